"""What must not be in any file of the repository, whoever writes it."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("no_collections")
ROOT = Path(__file__).resolve().parents[2]

# Put together here, so that this file does not hold them itself.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("npmjs", "com"),
        ("yarnpkg", "com"), ("crates", "io"), ("rubygems", "org"), ("proxy", "golang", "org"),
        ("conda", "anaconda", "org"),
    )
]  # fmt: skip
PLACES = ["/" + name + "/" for name in ("home", "root", "work", "Users", "workspace")]
PUBLISHED_AS_ONE_FILE = {"pyspark", "cronsim"}
LEFT_OPEN = ["TO" + "DO", "FIX" + "ME", "X" * 3]


IN_THE_ROOT = {
    ".editorconfig", ".gitignore", ".pre-commit-config.yaml", "ARCHITECTURE.md", "CHANGELOG.md",
    "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "SECURITY.md",
    "mkdocs.yml", "pyproject.toml", "setup.py",
}  # fmt: skip


@cache
def _names() -> list[str]:
    """Every file that is tracked or would be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git clone: there is no list of files to look through")
    return list(filter(None, listed.stdout.decode().split("\0")))


@cache
def _texts() -> list[tuple[str, str]]:
    """Those files with their texts; binary ones are left out."""
    return list(_read())


def _read() -> Iterator[tuple[str, str]]:
    for name in _names():
        try:
            yield name, (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue


def _lines_with(pattern: str) -> list[str]:
    result = re.compile(pattern)
    return [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in _texts()
        if result.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if result.search(line)
    ]


def test_the_root_has_no_stray_files() -> None:
    assert {name for name in _names() if "/" not in name} <= IN_THE_ROOT


def test_no_package_registry_is_named() -> None:
    """Where packages come from is the machine's business, not the repository's."""
    assert not [name for name, text in _texts() if any(map(text.lower().__contains__, REGISTRIES))]


def test_no_machine_specific_path_is_named() -> None:
    assert not _lines_with(r"(?<![\w.*$})-])(?:" + "|".join(map(re.escape, PLACES)) + ")")


def test_no_open_todo_is_left() -> None:
    assert not _lines_with(r"\b(?:" + "|".join(LEFT_OPEN) + r")\b")


def test_requirements_are_pinned_with_hashes() -> None:
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        text = path.read_text()
        assert "://" not in text, path.name
        assert not re.search(r"^\s*--(?!hash=sha256:)", text, re.MULTILINE), path.name
        pinned = re.split(r"\n(?=[a-z])", "\n" + text.strip())[1:]
        assert len(pinned) > 10
        for entry in pinned:
            assert re.match(r"[a-z0-9._-]+==[^\s]+ ", entry), entry[:80]
            least = 1 if entry.split("==")[0] in PUBLISHED_AS_ONE_FILE else 2
            assert entry.count("--hash=sha256:") >= least, f"too few files: {entry[:80]}"


def test_every_pause_of_a_test_says_why_it_needs_real_time() -> None:
    """Others wait for a signal, by ``support.waiting``, or move their clock."""
    pause = re.compile(r"\bsleep\((?!0\))(?!seconds: float\))")
    assert [
        f"{name}:{number}"
        for name, text in _texts()
        if name.startswith("tests/") and name.endswith(".py") and "sleep" in text
        for number, line in enumerate(text.splitlines(), 1)
        if pause.search(line) and "# real time: " not in line
    ] == []


@pytest.mark.slow
def test_tests_may_be_started_in_the_background() -> None:
    """A shell leaves SIGINT ignored there, and so would be what tests end by Ctrl-C."""
    test = "tests/sync/test_sync_client.py::test_ctrl_c_ends_a_wait"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 0, done.stdout[-2_000:]


def test_no_test_is_skipped_without_a_reason() -> None:
    assert not _nodes_in_tests(r"(mark|pytest)\.(skip|xfail)", _skips_silently)


def test_no_test_replaces_a_name_in_a_module_that_others_use() -> None:
    """``setattr(module.time, "sleep", …)`` is met by every thread of the process; see stand_in."""
    assert not _nodes_in_tests(r"\.setattr\(", _replaces_in_a_library)


def _nodes_in_tests(pattern: str, is_wrong: Callable[[ast.AST], bool]) -> list[str]:
    """Of the tests with the pattern in them: the others are not worth to be parsed."""
    return [
        f"{name}: {ast.unparse(node)[:80]}"
        for name, text in _texts()
        if name.startswith("tests/") and name.endswith(".py") and re.search(pattern, text)
        for node in ast.walk(ast.parse(text))
        if is_wrong(node)
    ]


def _replaces_in_a_library(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr != "setattr":
        return False
    target = node.args[0]
    if isinstance(target, ast.Constant):
        return str(target.value).partition(".")[0] in sys.stdlib_module_names
    last = ast.unparse(target).rpartition(".")[2]
    # The streams of the process are what a test of output is about.
    return last in sys.stdlib_module_names and last != "sys"


SKIPS = ("skip", "xfail")


def _skips_silently(node: ast.AST) -> bool:
    """``mark.skip``, ``mark.skipif``, ``mark.xfail`` or ``skip()`` that give no reason."""
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Attribute) or not node.func.attr.startswith(SKIPS):
            return False
        name = ast.unparse(node.func)
        given = {keyword.arg for keyword in node.keywords}
        if name.endswith(("mark.skip", "mark.skipif", "mark.xfail")):
            return "reason" not in given
        return name in {"pytest.skip", "pytest.xfail"} and not (node.args or given)
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(
        ast.unparse(mark).endswith(("mark.skip", "mark.xfail")) for mark in node.decorator_list
    )
