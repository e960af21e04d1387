"""Write docs/settings.md and deploy/tickwheel.toml from the daemon's settings.

Names, kinds, defaults and ranges come from the code. The meaning of a limit comes from
docs/limits.md, that of any other setting from the last column of docs/settings.md itself: for a new
one, add a row ``| `name` | meaning |`` there. Run ``.venv/bin/python scripts/settings_page.py``
after a change of a setting; a test checks that the files are current.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tickwheel.server.settings import DURATION_S_MAX, Settings

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "docs" / "settings.md"
LIMITS = ROOT / "docs" / "limits.md"
LIMIT = "limit: "
HEAD = """# Settings

Each setting is a key of the TOML file (`--config tickwheel.toml`), `TICKWHEEL_<NAME>` in the \
environment, and `--set name=value` on the command line; some have a flag of their own. Flags win \
over the environment, the environment over the file. \
[deploy/tickwheel.toml](../deploy/tickwheel.toml) is a file with all of them; limits have \
[their own page](limits.md). Durations are at most 100 years. The settings of a store follow its \
URL: \
`sqlite:////var/lib/tickwheel/tasks.db?wal_bytes=67108864`.

<a id="environment"></a>**Environment variables.** The daemon, the command line and the commands \
of the frameworks refuse an unknown variable that begins with `TICKWHEEL_`. \
Variables of clients and of daemons may be mixed. Where the daemon is not installed, only names \
similar to a client variable are refused. An empty variable counts as unset. Two kinds of names \
are ignored: those that scripts and images use (`TICKWHEEL_HOME`, `_DIR`, `_IMAGE`, `_ROOT`, \
`_TAG`, `_USER`, `_VENV`, `_VERSION`), and those that Kubernetes makes for a Service whose name \
begins with `tickwheel` (`TICKWHEEL_SERVICE_HOST`, `TICKWHEEL_PORT=tcp://…`, …), recognised by \
name and value.
"""
NO_DEFAULT = {"node": "the host's name"}
WIDTH = 96


def meanings() -> dict[str, str]:
    """Return the meaning of each setting, in Markdown, by name."""
    by_name: dict[str, str] = {}
    for line in SETTINGS.read_text().splitlines():  # | `name` | ... | meaning |
        cells = line.strip("| ").split(" | ")
        if name := re.fullmatch(r"`(\w+)`", cells[0]):
            by_name[name[1]] = cells[-1]
    for line in LIMITS.read_text().splitlines():  # | what | `name` | default | error | tests |
        cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and (name := re.fullmatch(r"`(\w+)`", cells[1])):
            by_name.setdefault(name[1], f"{LIMIT}{cells[0]}. When it is reached: {cells[3]}")
    return by_name


def kind_of(name: str) -> str:
    field = Settings.model_fields[name]
    shown = str(field.annotation).replace("typing.", "").replace("<class '", "").replace("'>", "")
    words = {"str": "text", "int": "integer", "float": "number", "bool": "boolean"}
    plain = shown.replace(" | None", "")
    if plain == "Union[int, Literal['auto']]":
        return "integer or `auto`"
    if plain.startswith("Literal"):
        return ", ".join(f"`{word}`" for word in re.findall(r"'(\w+)'", plain))
    return f"{words.get(plain, 'table')}{range_of(name)}"


def range_of(name: str) -> str:
    """Return the range of a number as it continues the kind, such as " > 0" or ", 0 to 64", without
    the common maximum of durations."""
    bounds: dict[str, str] = {}
    for rule in Settings.model_fields[name].metadata:
        for sign in ("gt", "ge", "lt", "le"):
            value = getattr(rule, sign, None)
            if value not in (None, DURATION_S_MAX):
                bounds[sign] = f"{value:g}" if isinstance(value, float) else str(value)
    if bounds.keys() == {"ge", "le"}:
        return f", {bounds['ge']} to {bounds['le']}"
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return ",".join(f" {signs[sign]} {bound}" for sign, bound in bounds.items())


def default_of(name: str) -> Any:
    """Return the default, or None if it depends on the machine."""
    if name in NO_DEFAULT:
        return None
    return Settings.model_fields[name].get_default(call_default_factory=True)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:_}" if value >= 10_000 else str(value)
    return json.dumps(value) if isinstance(value, str) else str(value)


def page() -> str:
    """Return the text of docs/settings.md: all settings that are not in docs/limits.md alone."""
    means = meanings()
    lines = [
        HEAD,
        "| setting | value | default | meaning |",
        "|---|---|---|---|",
    ]
    for name in Settings.model_fields:
        if means[name].startswith(LIMIT):
            continue
        value = default_of(name)
        default = NO_DEFAULT.get(name) or ("none" if value in (None, {}) else toml_value(value))
        shown = default if default in {"none", *NO_DEFAULT.values()} else f"`{default}`"
        lines.append(f"| `{name}` | {kind_of(name)} | {shown} | {means[name]} |")
    return "\n".join(lines) + "\n"


def plain(markdown: str) -> str:
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "")


def wrapped(text: str) -> list[str]:
    lines, line = [], "#"
    for word in text.split():
        if len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line]


def sample() -> str:
    """Return the text of deploy/tickwheel.toml."""
    means = meanings()
    lines = [
        "# Every setting of the daemon, with its default: tickwheel serve --config tickwheel.toml",
        "# Generated by scripts/settings_page.py. Settings that are commented out have no default,",
        "# or one that depends on the machine. Names end with the unit.",
    ]
    for name in Settings.model_fields:
        value = default_of(name)
        lines += ["", *wrapped(f"{plain(means[name])} ({plain(kind_of(name))})")]
        if name == "retry_policies":
            lines.append(
                '# retry_policies.slow = { kind = "fixed", delay_ms = 60000, retries = 5 }'
            )
        elif name in NO_DEFAULT:
            lines.append(f"# {name} = {json.dumps(NO_DEFAULT[name])}")
        elif value is None:
            lines.append(f"# {name} =")
        else:
            lines.append(f"{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


FILES = {"docs/settings.md": page, "deploy/tickwheel.toml": sample}


def main() -> int:
    missing = sorted(Settings.model_fields.keys() - meanings().keys())
    if missing:
        print(f"without a meaning in docs/settings.md: {', '.join(missing)}", file=sys.stderr)
        return 1
    for name, make in FILES.items():
        path = ROOT / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
