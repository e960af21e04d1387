"""What people who join expect to find in the root is there, and says what this repository does."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git clone: there is no list of files to look through")
    return [name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()]


# --- .editorconfig -------------------------------------------------------------------------------

INDENTED_OTHERWISE = (".py", ".md")
"""ruff formats Python; what Markdown shows in blocks is indented by its own language's rules."""


def test_every_tracked_file_follows_the_editorconfig() -> None:
    sections = _sections((ROOT / ".editorconfig").read_text())
    broken = []
    for name in _tracked():
        data = (ROOT / name).read_bytes()
        if b"\0" not in data and not name.endswith(".gz"):
            broken += [f"{name}: {wrong}" for wrong in _breaks(name, data, _rules(sections, name))]
    assert broken == []


@pytest.mark.parametrize(
    ("name", "data", "rule"),
    [
        ("a.py", b"x = 1", "insert_final_newline"),
        ("a.py", b"x = 1\r\n", "end_of_line"),
        ("a.md", b"two \nlines\n", "trim_trailing_whitespace"),
        ("a.md", b"\xff\n", "charset"),
        ("Makefile", b"all:\n    true\n", "indent_style"),
        ("a.js", b"{\n\treturn;\n}\n", "indent_style"),
        (".github/workflows/a.yml", b"a:\n   b: 1\n", "indent_size"),
        ("scripts/a", b"if true; then\n  true\nfi\n", "indent_size"),
    ],
)
def test_a_file_that_breaks_a_rule_is_found(name: str, data: bytes, rule: str) -> None:
    rules = _rules(_sections((ROOT / ".editorconfig").read_text()), name)
    assert [wrong.split(" ")[0] for wrong in _breaks(name, data, rules)] == [rule]


def _sections(text: str) -> list[tuple[list[str], dict[str, str]]]:
    """The patterns of each section with its rules, in the order of the file."""
    sections: list[tuple[list[str], dict[str, str]]] = []
    for line in text.splitlines():
        if line.startswith("["):
            sections.append((_without_braces(line[1:-1]), {}))
        elif sections and (rule := re.match(r"(\w+) = (\w[\w-]*)$", line)):
            sections[-1][1][rule[1]] = rule[2]
        else:
            assert not line or line.startswith("#") or line == "root = true", line
    return sections


def _without_braces(pattern: str) -> list[str]:
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        return [pattern]
    return [
        plain
        for choice in braces[1].split(",")
        for plain in _without_braces(pattern[: braces.start()] + choice + pattern[braces.end() :])
    ]


def _rules(sections: list[tuple[list[str], dict[str, str]]], name: str) -> dict[str, str]:
    """What holds for one file: a later section wins; a pattern without a slash means any folder."""
    rules: dict[str, str] = {}
    for patterns, own in sections:
        if any(
            fnmatchcase(name if "/" in pattern else Path(name).name, pattern)
            for pattern in patterns
        ):
            rules |= own
    return rules


def _breaks(name: str, data: bytes, rules: dict[str, str]) -> Iterator[str]:
    """Every rule that the file breaks, with the number of the line that breaks it."""
    assert rules["charset"] == "utf-8"
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError:
        yield "charset"
        return
    if data and lines[-1] and rules["insert_final_newline"] == "true":
        yield f"insert_final_newline {len(lines)}"
    size = rules.get("indent_size", "unset")
    step = 1 if size == "unset" or name.endswith(INDENTED_OTHERWISE) else int(size)
    # The further lines of a comment stand one column in: ` * like this`.
    is_even = re.compile(rf"(?: {{{step}}})*(?: (?=\*)|(?! ))")
    for number, line in enumerate(lines, 1):
        text = line.lstrip(" \t")
        indent = line[: len(line) - len(text)]
        if "\r" in line and rules["end_of_line"] == "lf":
            yield f"end_of_line {number}"
        elif line.endswith((" ", "\t")) and rules["trim_trailing_whitespace"] == "true":
            yield f"trim_trailing_whitespace {number}"
        elif (" " if rules["indent_style"] == "tab" else "\t") in indent:
            yield f"indent_style {number}"
        elif rules["indent_style"] == "space" and not is_even.match(line):
            yield f"indent_size {number}"


# --- .pre-commit-config.yaml ---------------------------------------------------------------------


def test_the_hooks_are_the_parts_of_the_check_and_nothing_else() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (local,) = config["repos"]
    assert local["repo"] == "local", "what is fetched from elsewhere is declared a second time"
    entries = [hook["entry"].split() for hook in local["hooks"]]
    assert [script for script, _ in entries] == ["scripts/check"] * len(entries)
    assert [part for _, part in entries] == _parts_of_the_check()
    for hook, (_, part) in zip(local["hooks"], entries, strict=True):
        assert hook["id"] == part
        assert hook["language"] == "script"
        assert hook["pass_filenames"] is False, "a part looks at all files"
        assert re.search(hook["files"], "tickwheel/errors.py")
        assert re.search(hook["files"], "pyproject.toml"), "it has the settings of every part"


def test_a_part_of_the_check_runs_alone() -> None:
    """The quickest one. That each of them runs is what `make check` shows."""
    done = _check("format")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _parts_of_the_check() -> list[str]:
    """As the script itself names them to somebody who asks for another."""
    done = _check("format", "none-such")
    assert done.returncode == 2
    said = re.fullmatch(r"check: no part 'none-such'; there are: (.*)\n", done.stderr)
    assert said is not None, done.stderr
    return said[1].split()


def _check(*parts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts/check", *parts], capture_output=True, text=True, check=False, timeout=60
    )
