"""The files of statements and the modules that use them name the same statements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tickwheel
from tickwheel.inbox import postgresql as inbox
from tickwheel.persistence.postgresql import layout
from tickwheel.statements import read_statements

PACKAGE = Path(tickwheel.__file__).parent


@pytest.mark.parametrize(
    ("statements", "folder", "file"),
    [
        (layout.SQL, "persistence/postgresql", "sql/statements.sql"),
        (inbox.STATEMENTS, "inbox", "postgresql-statements.sql"),
    ],
)
def test_every_statement_is_used(statements: dict[str, str], folder: str, file: str) -> None:
    texts = [path.read_text() for path in (PACKAGE / folder).glob("*.py")]
    quoted = re.findall(r'"(\w+)"', "\n".join(texts))
    included = re.findall(r"\{include (\w+)\}", (PACKAGE / folder / file).read_text())
    assert not statements.keys() - {*quoted, *included}
    assert not any("--" in text or "{include" in text for text in statements.values())


def test_a_statement_includes_an_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "some.sql"
    file.write_text(
        "-- About all.\n\n-- name: one\n-- About one.\nSELECT {at}\n  -- about x\n  FROM x\n"
        "-- name: two\nSELECT ({include one})\n"
    )
    one = "SELECT {at}\n  FROM x"
    assert read_statements(file) == {"one": one, "two": f"SELECT ({one})"}
    file.write_text("-- name: two\nSELECT {include one}\n")
    with pytest.raises(KeyError, match="one"):
        read_statements(file)
