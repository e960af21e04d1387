"""``tickwheel store upgrade`` and ``tickwheel inbox upgrade``, with an invented layout 2."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tickwheel.cli.app import run
from tickwheel.inbox import contract, schema
from tickwheel.inbox import sqlite as inbox
from tickwheel.persistence.sqlite import database

Capture = pytest.CaptureFixture[str]
STEP = "CREATE TABLE remark(id INTEGER PRIMARY KEY)"


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store and a folder of stores of layout 1, an inbox, and a program with layout 2."""
    for url in ("one.db", "all/"):
        assert run(["init", "--store", f"sqlite:///{tmp_path}/{url}", *_two(url)]) == 0
    connection = sqlite3.connect(tmp_path / "app.db")
    connection.executescript(schema.sqlite_sql())
    connection.close()
    sql = f"{STEP};\nUPDATE tickwheel_inbox_batch SET layout = 2;"
    (tmp_path / "sqlite-upgrade-2.sql").write_text(sql)
    monkeypatch.setattr(database, "LAYOUT", 2)
    monkeypatch.setattr(database, "UPGRADES", {1: (STEP,)})
    monkeypatch.setattr(contract, "FOLDER", tmp_path)
    monkeypatch.setattr(inbox, "LAYOUT", 2)


def _two(url: str) -> list[str]:
    return ["--processes", "2"] if url.endswith("/") else []


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(("command", "file"), [("store", "one.db"), ("inbox", "app.db")])
def test_an_upgrade_is_printed_and_applied(
    command: str, file: str, tmp_path: Path, capsys: Capture
) -> None:
    call = [command, "upgrade", f"sqlite:///{tmp_path}/{file}"]
    capsys.readouterr()
    assert run([*call, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{STEP};\n")
    assert f"{file} has layout 1; this release needs layout 2" in err
    assert run([*call, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["layout"], fields["needed"], fields["upgraded"]) == (1, 2, True)
    assert "".join(fields["steps"]).startswith(STEP)
    assert run(call) == 0
    out, err = capsys.readouterr()
    assert "has layout 2, as this release needs: nothing to upgrade" in out
    assert not err
    assert run(["check", "--store", call[-1]] if command == "store" else call) == 0


@pytest.mark.usefixtures("later")
def test_all_shards_of_a_folder_are_upgraded(tmp_path: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert run(["store", "upgrade", f"sqlite:///{tmp_path}/all/"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("all/")[2] for line in lines] == [
        f"shard-{shard}.db was upgraded from layout 1 to 2" for shard in (0, 1)
    ]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    ("command", "url", "error"),
    [
        ("store", "memory:", "memory: is empty at every start and has no layout"),
        ("store", "sqlite:///{}/app.db", "is a SQLite database of another program"),
        ("inbox", "sqlite:///{}/none.db", "unable to open database file"),
    ],
)
def test_a_database_without_a_layout_is_refused(
    command: str, url: str, error: str, tmp_path: Path, capsys: Capture
) -> None:
    assert run([command, "upgrade", url.format(tmp_path)]) == 1
    assert error in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()


@pytest.mark.usefixtures("later")
def test_an_empty_inbox_is_left_empty(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "new.db").touch()
    assert run(["inbox", "upgrade", f"sqlite:///{tmp_path}/new.db"]) == 0
    assert "new.db is empty: nothing to upgrade" in capsys.readouterr().out
    assert (tmp_path / "new.db").stat().st_size == 0
