"""The documents as a site: built strictly, read without another host, and whole."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest

import tickwheel
import tickwheel.client
import tickwheel.client.worker
import tickwheel.sync
from tickwheel import errors

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (ROOT / "docs/python.md").read_text()
API = (ROOT / "docs/api.md").read_text()
ERRORS = (ROOT / "docs/errors.md").read_text()
PRIVATE_ERRORS = {"InternalError"}
"""Has the code of the root: its row is there by that."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [ROOT / "scripts/docs", folder], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_document(site: Path) -> None:
    for document in ROOT.glob("docs/*.md"):
        assert (site / "docs" / f"{document.stem}.html").exists(), document.name
    assert "Hand it work that must happen later" in (site / "index.html").read_text()


def test_the_site_loads_no_other_host(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|link|iframe|source)\b[^>]*(?:src|href)=\"(https?:)?//[^\"]+"
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        results = [m[0] for m in loads.finditer(page.read_text()) if 'rel="canonical"' not in m[0]]
        assert results == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?://|@import", sheet.read_text()), sheet


def test_the_reference_has_every_verb_with_its_arguments(site: Path) -> None:
    page = (site / "docs/api.html").read_text()
    for kind in (tickwheel.Client, tickwheel.Subscription, tickwheel.Delivery, tickwheel.Worker):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and method.__doc__:
                where = (
                    "tickwheel.client.worker" if kind is tickwheel.Worker else "tickwheel.client"
                )
                assert f'id="{where}.{kind.__name__}.{name}"' in page, f"{kind.__name__}.{name}"
    plain = re.sub(r"<[^>]+>", "", page)
    for words in ("not answered within", "delay_level", "OutcomeUnknown when the task was sent"):
        assert words in plain


# --- every public name ---------------------------------------------------------------------------


def public() -> dict[str, object]:
    result: dict[str, object] = {}
    for module in (tickwheel, tickwheel.client, tickwheel.client.worker, tickwheel.sync):
        result |= {name: getattr(module, name) for name in module.__all__}
    return result


@pytest.mark.parametrize("name", sorted(public().keys() - {"__version__", "Handler"}))
def test_public_names_are_documented(name: str) -> None:
    value = public()[name]
    if isinstance(value, type) and issubclass(value, errors.TickwheelError) and name != "Partly":
        assert f"`{name}`" in ERRORS
    else:
        assert re.search(rf"\b{name}\b", PYTHON), "docs/python.md says when it is used"
        assert re.search(rf"^::: tickwheel\..*\b{name}$", API, re.MULTILINE)
    assert inspect.getdoc(value)


def test_every_error_can_be_caught_by_its_name() -> None:
    for kind in errors.BY_CODE.values():
        assert getattr(tickwheel, kind.__name__) is kind
    assert {"OutcomeUnknown", "Refused", "Unreachable", "Partly"} <= set(tickwheel.__all__)


@pytest.mark.parametrize(
    "words",
    ["RetryLater", "Reject", "Snooze", "lookup_many", "enqueue_nowait", "auto_ack",
     "OutcomeUnknown", "grace=", "timeout=", "on_delivery", "connect_timeout"],
)  # fmt: skip
def test_the_python_guide_covers_common_questions(words: str) -> None:
    assert words in PYTHON


def test_every_verb_is_named_in_the_guide() -> None:
    for kind in (tickwheel.Client, tickwheel.Delivery):
        for name, _ in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and name != "connect":
                assert re.search(rf"\b{name}\b", PYTHON), f"{kind.__name__}.{name}"


def test_the_table_of_errors_matches_the_code() -> None:
    rows = [
        [cell.strip().strip("`") for cell in line.strip("| ").split(" | ")]
        for line in ERRORS.splitlines()
        if line.startswith("| `")
    ]
    assert {row[0] for row in rows} == errors.BY_CODE.keys()
    for code, name, parent, retryable, meaning, advice in rows:
        kind = errors.BY_CODE[code]
        base = kind.__base__
        assert base is not None
        assert (name, parent) == (kind.__name__, base.__name__)
        assert retryable == ("yes" if kind.retryable else "no")
        text = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        assert meaning == text
        assert len(advice) > 20, "what to do about it"


def test_the_decisions_are_listed_in_order() -> None:
    folder = ROOT / "docs/decisions"
    text = (folder / "README.md").read_text()
    listed = re.findall(r"\]\((0\S+\.md)\)", text)
    assert listed == sorted(path.name for path in folder.glob("0*.md"))


# --- one figure ----------------------------------------------------------------------------------


def test_documents_agree_on_the_memory_of_a_pending_task() -> None:
    readme, operations = ((ROOT / name).read_text() for name in ("README.md", "docs/operations.md"))
    (figure,) = set(re.findall(r"(\d+) bytes of memory per pending task", readme))
    assert f"{figure} bytes in memory, its body on disk" in readme
    assert f"With SQLite {figure} bytes for each pending task" in operations
    for text in (readme, operations, (ROOT / "ARCHITECTURE.md").read_text()):
        assert "About 20 bytes" not in text
        assert not re.search(r"\b16 bytes", text)
