"""One word for one thing, wherever somebody reads it: documents, commands, metrics, console."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tickwheel.api.frames import FrameType
from tickwheel.api.tasks import STATES as OF_A_TASK
from tickwheel.cli.output import STATES
from tickwheel.server.metrics.catalogue import GROUP, TOPIC

pytestmark = pytest.mark.usefixtures("no_collections")
ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "tickwheel/server/http/console"
OTHERS = {
    # In code spans it is what a nack is answered with: a verdict, and no state.
    r"(?<![`\"'])\bretrying\b": "waiting",
    r"\b(?:rotations?|turns?|rounds?) left\b": "cycles left",
    r"\brotations_left\b|\bcycles_left\b|\bcycle_num\b": "cycles",
}
"""What must not be said of a task, and the word for it."""


def _strings(path: Path) -> Iterator[str]:
    """Texts of a program: help, heads of columns, messages."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _values(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        for item in found:
            yield from _values(item)
    elif isinstance(found, str):
        yield found


@cache
def _read_by_people() -> list[tuple[Path, str]]:
    return list(_all_read_by_people())


def _all_read_by_people() -> Iterator[tuple[Path, str]]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        yield from ((path, line) for line in path.read_text("utf-8").splitlines())
    for folder in ("tickwheel/cli", "tickwheel/server/metrics"):
        for path in sorted((ROOT / folder).glob("*.py")):
            yield from ((path, text) for text in _strings(path))
    for path in sorted((ROOT / "grafana").rglob("*.json")):
        yield from ((path, text) for text in _values(json.loads(path.read_text("utf-8"))))
    for path in sorted(CONSOLE.glob("*.js")):
        yield from ((path, line) for line in path.read_text("utf-8").splitlines())


@pytest.mark.parametrize(("other", "word"), OTHERS.items(), ids=OTHERS.values())
def test_a_state_of_a_task_has_one_word(other: str, word: str) -> None:
    violations = [
        f"{path.relative_to(ROOT)}: {text.strip()[:100]}"
        for path, text in _read_by_people()
        if re.search(other, text, re.IGNORECASE)
    ]
    assert not violations, f"the word is {word!r}"


def test_the_searched_files_exist() -> None:
    """Or the test above would find nothing in nothing."""
    read = {path.relative_to(ROOT).parts[0] for path, _ in _read_by_people()}
    assert {"docs", "tickwheel", "grafana"} <= read
    assert any("waiting" in text for path, text in _read_by_people() if path.suffix == ".json")


def test_metrics_use_the_command_lines_state_names() -> None:
    metrics = {metric.name for metric in (*TOPIC, *GROUP)}
    assert {f"tickwheel_{state}_tasks" for state in STATES} <= metrics


def test_the_console_uses_the_command_lines_state_names() -> None:
    listed = re.search(r"const STATES = (\[\[.*?\]\]);", (CONSOLE / "tasks.js").read_text("utf-8"))
    assert listed is not None
    states = {value: label for value, label in json.loads(listed[1]) if value}
    assert tuple(states) == OF_A_TASK.words
    for value, label in states.items():
        assert label == value.replace("_", " ").capitalize()


OF_SQL = {"COMMIT", "ROLLBACK"}
OF_A_HANDSHAKE = {"HELLO", "PING"}
"""Named to whoever writes a client: no command or method stands for them."""
FRAMES = re.compile(rf"\b(?:{'|'.join({t.name for t in FrameType} - OF_SQL - OF_A_HANDSHAKE)})s?\b")
OF_THE_PROTOCOL = {"errors.py", "frames.py", "protocol.py", "verb.py"}
"""Files that describe the protocol; of ``tcp`` the frames of a program that speaks it wrongly."""


def _messages(path: Path) -> Iterator[str]:
    """The texts of what a program raises, logs, or says behind ``said =``."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        is_logged = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in {"debug", "info", "warning", "error", "overdue", "remark"}
        )
        is_noted = isinstance(node, (ast.Assign, ast.Return)) and isinstance(
            node.value, (ast.JoinedStr, ast.Constant, ast.Tuple)
        )
        if is_logged or is_noted or isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
                elif isinstance(part, ast.FormattedValue):
                    yield ast.unparse(part.value)


def test_messages_name_commands_and_methods_instead_of_frames() -> None:
    violations = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted((ROOT / "tickwheel").rglob("*.py"))
        if path.name not in OF_THE_PROTOCOL and "tcp" not in path.parts
        if FRAMES.search(path.read_text("utf-8")) or "self.kind.name" in path.read_text("utf-8")
        for text in _messages(path)
        if (FRAMES.search(text) and " " in text.strip()) or text == "self.kind.name"
    ]
    assert not violations, violations


NEWER_CURL = {"--json": "7.82", "--fail-with-body": "7.76"}
"""Options that curl 7.74, which Debian 11 has, does not know, and the first release that does."""


@pytest.mark.parametrize(("option", "version"), NEWER_CURL.items(), ids=NEWER_CURL)
def test_a_page_says_which_curl_its_examples_need(option: str, version: str) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    uses = re.compile(rf"\bcurl\b.* {option}\b")
    results = [page for page in pages if uses.search(page.read_text("utf-8"))]
    silent = [page.name for page in results if f"curl {version}" not in page.read_text("utf-8")]
    assert not silent, silent


# --- plain English -------------------------------------------------------------------------------

ODD = {
    "is not a valid X": r"(?<![Tt]here )\b(?:is|are|was|were) (?:no|none) "
    r"(?!longer\b|more\b|less\b|later\b|such\b)[A-Za-z]",
    "the number, the time": r"\b[Ss]o (?:many|much|long)\b(?! (?:as|that|ago)\b)",
    "the field, the option": r"\b(?:decided|said|told) of\b|\basked about\b",
    "the thing itself": r"(?:(?<=^)|(?<=[.:;] ))What (?:is|was|are|has|came|stands|becomes)\b"
    r"(?![^.]*\?)|\b(?:of|by|with|from|than|behind|beside|for) what "
    r"(?:is|was|are|has|comes|came|stands|becomes)\b|\bwhat becomes of\b",
    "the subject first": r"(?:(?<=^)|(?<=[.!?:] ))"
    r"(?:Of (?!course)|Those (?:that|who|of)\b|Whose |As ever\b)",
    "also": r", too(?=[.,;:)]|$)",
    "as usual": r"\bas ever\b",
}
"""Patterns of odd English, by what to write instead."""
ALLOWED = ("is none of its business", "What is promised", "decided of as a whole")
"""Phrases that match a pattern and are plain English."""
PACKAGES_AT_MOST = {
    "benchmarks": 3,
    "scripts": 3,
    "tests": 168,
    "tickwheel/server": 12,
}
"""Hits in docstrings, comments and messages of each package. These numbers only fall."""


COMMENT_OR_STRING = re.compile(
    r"""#[^\n]*|(?:\b[rbfRBF]{1,2})?(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"""
    r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""",
    re.DOTALL,
)
"""Tokens of a module; `tokenize` finds the same, but takes much longer."""


def _prose(path: Path) -> Iterator[str]:
    """Paragraphs of a document without its blocks, or of a module: comments and texts."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for line in text.splitlines():
            if line.startswith("#"):
                continue  # a heading may be a question without its mark
            yield re.sub(r"^(?:[-*#>|] ?|\d+\. )+", "", line).strip()
        return
    for token in COMMENT_OR_STRING.findall(text):
        if token.startswith("#"):
            yield token.lstrip("#: ")
        else:
            bare = token.lstrip("rbfRBF").strip("\"' \n")
            yield from (" ".join(part.split()) for part in re.split(r"\n\s*\n", bare))


def _odd(path: Path) -> list[str]:
    """Hits of a file, each with the text around it and what to write instead."""
    return [
        f"{path.relative_to(ROOT)}: …{part[max(0, hit.start() - 40) : hit.end() + 40]}… ({better})"
        for part in _prose(path)
        for better, pattern in ODD.items()
        for hit in re.finditer(pattern, part)
        if not any(phrase in part for phrase in ALLOWED)
    ]


def _documents() -> list[Path]:
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "docs/decisions/README.md"]
    return sorted(path for path in paths if path.name != "CHANGELOG.md")


@pytest.mark.parametrize("path", _documents(), ids=lambda path: path.name)
def test_a_document_is_plain_english(path: Path) -> None:
    hits = _odd(path)
    assert hits == []


REFERENCE = ("protocol.md", "settings.md", "limits.md", "errors.md")
"""Documents that are looked up, not read."""
PROSE_WORDS_MAX = 46_500
"""Maximum words of all other documents, code blocks and the decisions apart."""
WORDS_MAX = 80_000
"""Maximum words of `docs/*.md` and the three main documents, as `wc -w` counts them."""


def test_the_documents_stay_short() -> None:
    words = 0
    for path in _documents():
        if path.name not in REFERENCE and path.parent.name != "decisions":
            text = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text("utf-8"))
            words += sum(1 for word in text.split() if re.search(r"\w", word))
    assert words <= PROSE_WORDS_MAX, "say it once and link to it"
    assert words >= PROSE_WORDS_MAX * 0.95, "lower the bound to what the documents have"


def test_all_documents_together_stay_short() -> None:
    paths = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    words = sum(len(path.read_text("utf-8").split()) for path in (*paths, *ROOT.glob("docs/*.md")))
    assert words <= WORDS_MAX, "say it once and link to it"


def _modules() -> dict[str, list[Path]]:
    """Modules by package: of `tickwheel/` one level down, of other folders all."""
    result: dict[str, list[Path]] = {}
    for folder in ("tickwheel", "tests", "scripts", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            is_package = folder == "tickwheel" and len(parts) > 2
            result.setdefault("/".join(parts[: 1 + is_package]), []).append(path)
    return result


@pytest.mark.parametrize(("package", "paths"), _modules().items(), ids=_modules())
def test_a_package_gets_no_more_odd_english(package: str, paths: list[Path]) -> None:
    hits = [hit for path in paths if path != Path(__file__) for hit in _odd(path)]
    most = PACKAGES_AT_MOST.get(package, 0)
    assert len(hits) <= most, "\n".join([f"{len(hits)} hits, at most {most}", *hits])


@pytest.mark.parametrize(
    "text",
    [
        "the body is no JSON", "After so many seconds it ends.", "what is said of its tasks",
        "What is left out is not sent.", "Of requests: unknown fields are refused.",
        "It holds there, too.", "All goes on as ever.",
    ],
)  # fmt: skip
def test_each_kind_of_odd_english_is_seen(text: str) -> None:
    assert any(re.search(pattern, text) for pattern in ODD.values())


@pytest.mark.parametrize(
    "text",
    ["There is no limit.", "It is no longer open.", "as long as it runs", "So many that it waits.",
     "What is a lease?", "too many sessions"],
)  # fmt: skip
def test_plain_english_is_not_odd(text: str) -> None:
    assert not any(re.search(pattern, text) for pattern in ODD.values())
