"""Writes docs/settings.md and deploy/tickwheel.toml from the daemon's settings.

Names, kinds, defaults and ranges come from the code. Meanings are written by hand in the last
column of docs/settings.md, which is kept; a limit without one gets its row in the table of
docs/operations.md. A new setting needs one of the two first. Run this after a setting has changed:
``.venv/bin/python scripts/settings_page.py``. A test compares.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tickwheel.server.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
OPERATIONS = ROOT / "docs" / "operations.md"
SETTINGS = ROOT / "docs" / "settings.md"
NO_DEFAULT = {"node": "the host's name"}
WIDTH = 96


def cells_of(path: Path) -> list[list[str]]:
    """The cells of every row of every table of a document."""
    rows = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.removesuffix("|")[2:].split(" | ")] for row in rows]


def meanings() -> dict[str, str]:
    """The meaning of each setting by name, in Markdown with links for docs/settings.md."""
    means: dict[str, str] = {}
    for cells in cells_of(OPERATIONS):
        if len(cells) == 5:  # | what | `name` | default | when it is reached | tests |
            meaning = f"limit: {cells[0]}. When it is reached: {cells[3]}"
            for name in re.findall(r"^`(\w+)`$", cells[1]):
                means[name] = meaning.replace("](#", "](operations.md#")
    for cells in cells_of(SETTINGS):
        if cells[0].startswith("`") and not cells[-1].startswith("limit: "):
            means[cells[0].strip("`")] = cells[-1]
    return means


def kind_of(name: str) -> str:
    field = Settings.model_fields[name]
    shown = str(field.annotation).replace("typing.", "").replace("<class '", "").replace("'>", "")
    words = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}
    plain = shown.replace(" | None", "")
    if plain == "int | Literal['auto']":
        return "whole number or `auto`"
    if plain.startswith("Literal"):
        return " or ".join(re.findall(r"'(\w+)'", plain))
    return words.get(plain, "table")


def range_of(name: str) -> str:
    signs = {"gt": "above {}", "ge": "{} or more", "lt": "below {}", "le": "{} or less"}
    found = []
    for rule in Settings.model_fields[name].metadata:
        for sign, words in signs.items():
            value = getattr(rule, sign, None)
            if value is not None:
                found.append(words.format(f"{value:g}" if isinstance(value, float) else value))
    return ", ".join(found)


def default_of(name: str) -> Any:
    """None where it depends on the machine."""
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
    """docs/settings.md"""
    means = meanings()
    lines = [
        "# Settings",
        "",
        "Each setting is a key of the TOML file (`--config`), the variable `TICKWHEEL_<NAME>`"
        " ([environment](operations.md#environment)), and `--set name=value` on the command line."
        " Flags override the environment, and the environment overrides the file. A file with all"
        " defaults: [deploy/tickwheel.toml](../deploy/tickwheel.toml). `scripts/settings_page.py`"
        " makes this page from the code.",
        "",
        "| setting | kind | default | range | meaning |",
        "|---|---|---|---|---|",
    ]
    for name in Settings.model_fields:
        value = default_of(name)
        default = NO_DEFAULT.get(name) or ("none" if value in (None, {}) else toml_value(value))
        shown = default if default in {"none", *NO_DEFAULT.values()} else f"`{default}`"
        row = (f"`{name}`", kind_of(name), shown, range_of(name), means[name])
        lines.append(f"| {' | '.join(row)} |")
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
    """deploy/tickwheel.toml"""
    means = meanings()
    lines = [
        "# Every setting of the daemon, with its default: tickwheel serve --config tickwheel.toml",
        "# Made from the code by scripts/settings_page.py. What is commented out has no value of",
        "# its own, or one that depends on the machine. Units are at the end of the names.",
    ]
    for name in Settings.model_fields:
        value = default_of(name)
        more = [kind_of(name).replace("`", ""), *filter(None, [range_of(name)])]
        lines += ["", *wrapped(f"{plain(means[name])} ({'; '.join(more)})")]
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
