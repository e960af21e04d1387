"""The file of tokens without a daemon: made, read, changed, and never half of it."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.stand_in import stand_in
from tickwheel.api.verb import Right
from tickwheel.errors import BadRequest, Conflict, LimitExceeded, NotFound
from tickwheel.server.access import tokens

ALL = tokens.parse_scopes(["all"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def test_token_secrets_are_not_stored(path: Path) -> None:
    token, text = tokens.create(path, "shop", ALL, 5, None)
    prefix, token_id, secret = text.split("_", 2)
    assert (prefix, token_id) == ("tw", token.id) and len(secret) == 43
    assert secret not in path.read_text() and path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]
    assert tokens.find(tokens.read(path), text) == token
    assert secret not in repr(token) and text not in repr(token)


def test_written_tokens_are_read_back(path: Path) -> None:
    grants = tokens.parse_scopes(["produce=a.*,b", "read", "produce=c"])
    assert grants == ((Right.PRODUCE, ("a.*", "b", "c")), (Right.READ, ("*",)))
    token, _ = tokens.create(path, "shop", grants, 5, 10)
    assert tokens.read(path) == {token.id: token}
    assert not token.is_over(9) and token.is_over(10)
    assert path.read_bytes() == (
        b'{\n "version": 1,\n "tokens": [\n  {\n   "id": "%b",\n   "name": "shop",\n'
        b'   "sha256": "%b",\n   "scopes": {\n    "produce": [\n     "a.*",\n     "b",\n'
        b'     "c"\n    ],\n    "read": [\n     "*"\n    ]\n   },\n   "created_ms": 5,\n'
        b'   "expires_ms": 10\n  }\n ]\n}\n' % (token.id.encode(), token.sha256.encode())
    ), "older files must be read for ever"


@pytest.mark.parametrize(
    ("scopes", "said"),
    [
        ([], "needs at least one of"),
        (["write"], "not 'write'"),
        (["=t"], "not ''"),
        (["read="], "not ''"),
        (["read=a,,b"], "not ''"),
        (["read=*x"], "not"),
        (["read=a*b"], "not"),
        (["read=a b"], "not"),
        (["read=a**"], "not"),
    ],
)
def test_invalid_scopes_are_refused(scopes: list[str], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        tokens.parse_scopes(scopes)


def test_token_fields_are_limited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = ",".join(f"t{n}" for n in range(tokens.PATTERNS_MAX))
    tokens.parse_scopes([f"read={most}"])
    with pytest.raises(LimitExceeded, match="101 patterns; the limit is 100"):
        tokens.parse_scopes([f"read={most},more"])
    tokens.create(path, "n" * tokens.NAME_LENGTH_MAX, ALL, 5, None)
    for name in ("n" * (tokens.NAME_LENGTH_MAX + 1), "", "a b", "é"):
        with pytest.raises(BadRequest, match="name must have"):
            tokens.create(path, name, ALL, 5, None)
    monkeypatch.setattr(tokens, "TOKENS_MAX", 2)
    tokens.create(path, "second", ALL, 5, None)
    with pytest.raises(LimitExceeded, match="the limit is 2"):
        tokens.create(path, "third", ALL, 5, None)
    monkeypatch.setattr(tokens, "TOKENS_MAX", 1)
    with pytest.raises(LimitExceeded, match="2 tokens; the limit is 1"):
        tokens.read(path)
    monkeypatch.setattr(tokens, "FILE_BYTES_MAX", 10)
    with pytest.raises(LimitExceeded, match="exceeds the limit of 10 bytes"):
        tokens.read(path)


def test_a_token_file_never_grows_beyond_what_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokens.create(path, "first", ALL, 5, None)[0]
    monkeypatch.setattr(tokens, "FILE_BYTES_MAX", 2 * path.stat().st_size - 100)
    with pytest.raises(LimitExceeded, match="FILE_BYTES_MAX"):
        tokens.create(path, "second", ALL, 5, None)
    assert tokens.revoke(path, "first") == [first]


def test_revoking_by_id_by_name_and_all_of_a_name(path: Path) -> None:
    first, second, other = (
        tokens.create(path, name, ALL, 5, None)[0] for name in ("shop", "shop", "other")
    )
    with pytest.raises(Conflict, match=f"{first.id}, {second.id}"):
        tokens.revoke(path, "shop")
    assert tokens.revoke(path, first.id) == [first]
    assert tokens.revoke(path, "other") == [other]
    assert set(tokens.read(path)) == {second.id}
    with pytest.raises(NotFound, match="'other'"):
        tokens.revoke(path, "other")
    tokens.create(path, "shop", ALL, 5, None)
    assert len(tokens.revoke(path, "shop", every=True)) == 2 and tokens.read(path) == {}


GOOD: dict[str, Any] = {
    "id": "0" * 12, "name": "n", "sha256": "0" * 64, "scopes": {"read": ["*"]}, "created_ms": 1,
    "expires_ms": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"id": "x"}, {"id": 5}, {"id": "A" * 12}, {"name": ""}, {"name": None},
        {"sha256": "0" * 63}, {"sha256": None}, {"scopes": None}, {"scopes": []},
        {"scopes": {"read": "*"}}, {"scopes": {"write": ["*"]}}, {"scopes": {"read": [5]}},
        {"scopes": {"read": ["a b"]}},
        {"created_ms": None}, {"created_ms": "1"}, {"created_ms": True}, {"expires_ms": -1},
        {"expires_ms": 1.5}, {"expires": 5},
    ],
)  # fmt: skip
def test_an_unknown_field_refuses_the_whole_token_file(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps({"version": 1, "tokens": [GOOD]}))
    assert len(tokens.read(path)) == 1
    other = GOOD | {"id": "1" * 12} | change
    path.write_text(json.dumps({"version": 1, "tokens": [GOOD, other]}))
    with pytest.raises(BadRequest):
        tokens.read(path)


@pytest.mark.parametrize(
    "value",
    [[], 5, {}, {"version": 1}, {"version": 2, "tokens": []}, {"version": 1, "tokens": {}},
     {"version": 1, "tokens": [], "more": 1}, {"version": 1, "tokens": [GOOD, GOOD]},
     {"version": 1, "tokens": [5]}],
)  # fmt: skip
def test_a_file_of_another_shape(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
    with pytest.raises(BadRequest, match=str(path)):
        tokens.read(path)


def test_concurrent_commands_lose_no_token(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(tokens.create, path, f"n{n}", ALL, 5, None) for n in range(24)]
    assert set(tokens.read(path)) == {item.result()[0].id for item in made}


def test_a_failed_write_keeps_the_token_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens.create(path, "first", ALL, 5, None)
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        tokens.create(path, "second", ALL, 5, None)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_a_symlinked_token_file_is_changed_at_its_target(path: Path, tmp_path: Path) -> None:
    tokens.create(path, "first", ALL, 5, None)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    tokens.create(link, "second", ALL, 5, None)
    assert link.is_symlink() and len(tokens.read(path)) == 2


def test_root_keeps_the_owner_of_the_token_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that cannot read the new file goes by the old one: what is revoked stays valid."""
    owners: list[tuple[int, int]] = []

    def beside(user: int, **more: Any) -> None:
        names = {"geteuid": lambda: user, "fchown": lambda fd, uid, gid: owners.append((uid, gid))}
        monkeypatch.setattr(tokens, "os", stand_in(os, **names, **more))

    beside(0)
    of_folder = path.parent.stat()
    tokens.create(path, "shop", ALL, 0, None)
    assert owners == [(of_folder.st_uid, of_folder.st_gid)]
    stat = os.stat

    def of_the_daemon(at: Any, **more: Any) -> os.stat_result:
        result = stat(at, **more)
        return os.stat_result((*result[:4], 4711, 4712, *result[6:])) if at == path else result

    beside(0, stat=of_the_daemon)
    tokens.revoke(path, "shop")
    assert owners[1:] == [(4711, 4712)]
    beside(1000)
    tokens.create(path, "shop", ALL, 0, None)
    assert len(owners) == 2


def test_last_use_only_grows_and_forgets_revoked_tokens(path: Path) -> None:
    token, _ = tokens.create(path, "first", ALL, 5, None)
    known = {token.id: token}
    tokens.write_used(path, {token.id: 100, "1" * 12: 7}, known)
    tokens.write_used(path, {token.id: 50}, known)
    assert tokens.read_used(path) == {token.id: 100}
    for broken in (b"", b"[]", b'{"x": 1}', b"\xff", b" " * (tokens.FILE_BYTES_MAX + 1)):
        tokens.used_path(path).write_bytes(broken)
        assert tokens.read_used(path) == {}
