"""``tickwheel token``: no daemon is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tickwheel.cli.app import run
from tickwheel.server.access import tokens

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_the_token_alone_is_on_stdout(path: Path, capsys: Capture) -> None:
    assert run(["token", "create", "shop", "--scope", "read", "--file", str(path)]) == 0
    shown = capsys.readouterr()
    (token,) = tokens.read(path).values()
    assert tokens.find(tokens.read(path), shown.out.strip()) == token
    assert shown.out.count("\n") == 1 and "shown once" in shown.err


def test_token_file_can_come_from_the_environment(
    path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TICKWHEEL_TOKENS_FILE", str(path))
    assert run(["token", "create", "shop", "--scope", "all", "--expires", "2.01s", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["token"].split("_")[1] == made["id"] and made["last_used"] is None
    (token,) = tokens.read(path).values()
    assert token.expires_ms == token.created_ms + 2_010


def test_tokens_are_listed(path: Path, capsys: Capture) -> None:
    over, _ = tokens.create(path, "old", tokens.parse_scopes(["read=a,b.*"]), 5, 10)
    tokens.write_used(path, {over.id: 7}, {over.id: over})
    assert run(["token", "list", "--file", str(path)]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["id", "name", "scopes", "created", "expires", "last", "used"]
    assert row.split()[:3] == [over.id, "old", "read=a,b.*"] and "(expired)" in row
    assert run(["token", "list", "--file", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["expired"] and shown["last_used"] == "1970-01-01T00:00:00.007Z"
    assert "sha256" not in shown


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["create", "shop"], 2, "a token needs at least one of"),
        (["create", "shop", "--scope", "write"], 2, "a right must be one of"),
        (["create", "a b", "--scope", "all"], 2, "name must have"),
        (["create", "shop", "--scope", "all", "--expires", "soon"], 2, "usage: "),
        (["create", "shop", "--scope", "all", "--expires", "9999999d"], 2, "at most 25340230079"),
        (["list"], 1, "io_error"),
        (["revoke", "nobody"], 1, "io_error"),
    ],
)
def test_token_errors_are_one_line(
    path: Path, capsys: Capture, arguments: list[str], code: int, said: str
) -> None:
    assert run(["token", *arguments, "--file", str(path)]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error and not path.exists()


def test_revoking_an_ambiguous_name_needs_an_id_or_all(path: Path, capsys: Capture) -> None:
    for _ in range(2):
        tokens.create(path, "shop", tokens.parse_scopes(["all"]), 5, None)
    assert run(["token", "revoke", "shop", "--file", str(path)]) == 1
    assert "2 tokens have this name" in capsys.readouterr().err
    assert run(["token", "revoke", "nobody", "--file", str(path)]) == 4
    first = next(iter(tokens.read(path)))
    assert run(["token", "revoke", first, "--file", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": first, "name": "shop", "revoked": True}
    assert run(["token", "revoke", "shop", "--all", "--file", str(path)]) == 0
    assert tokens.read(path) == {}
