"""Who gets in, and who may stay: guesses, ends, rotation, and a file that changes or breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.access.access_rig import AccessRig, id_of
from support.shard_rig import NOW_MS, ShardRig, started
from support.waiting import comes
from tickwheel.api.frames import FrameType as T
from tickwheel.errors import BadRequest, Unauthorized
from tickwheel.protocol import encode
from tickwheel.server.access import logins, tokens
from tickwheel.server.logs import LINES_MAX

DAY_MS = 86_400_000


rig = started(AccessRig)


async def tcp_code(rig: AccessRig, token: object) -> str | None:
    """Return the error code of HELLO, or None if it was accepted."""
    answer = await rig.stranger().hello(token=token)
    return None if answer[0] == T.OK else str(answer[2])


async def comes_in(rig: AccessRig, token: str) -> bool:
    over_tcp = await tcp_code(rig, token) is None
    over_http = (await rig.http(token, "GET", "/v1/status")).status == 200
    assert over_tcp == over_http
    return over_tcp


async def test_guesses_are_refused_and_counted(rig: AccessRig) -> None:
    right = await rig.token("all")
    prefix, token_id, secret = right.split("_", 2)
    other = await rig.token("all", name="other")
    kept = tokens.read(rig.path)[token_id].sha256
    guesses = (
        "", " ", "tw", "tw_", "tw__", f"tw_{token_id}", f"tw_{token_id}_", secret, right[:-1],
        right + "x", right.upper(), f"{prefix}_{token_id}_{other.split('_', 2)[2]}",
        f"tw_{'0' * 12}_{secret}", f"xx_{token_id}_{secret}", "\ud800", "tw_é_é", "first",
        kept, f"tw_{token_id}_{kept}",
    )  # fmt: skip
    for guess in guesses:
        if guess != "\ud800":
            assert await tcp_code(rig, guess) == "unauthorized", guess
        with pytest.raises(Exception, match="token"):
            rig.logins.authenticate(guess)
    for odd in (None, 5, b"tw", ["x"], {"x": 1}, right.encode()):
        assert await tcp_code(rig, odd) == "unauthorized"
    assert rig.observed.login_failures == 2 * len(guesses) - 1 + 6
    for header in ("", "Bearer", f"Basic {right}", right, "Bearer tw_x_y"):
        answer = await rig.call("GET", "/v1/stats", authorization=header)
        assert answer.status == 401 and answer.headers["www-authenticate"].startswith("Bearer")
    assert await comes_in(rig, right) and await comes_in(rig, other)


async def test_an_expired_token_is_refused_and_ends_its_connections(rig: AccessRig) -> None:
    token = await rig.token("all", ttl_ms=DAY_MS)
    peer = await rig.peer(token=token)
    stream = rig.begin("GET", "/v1/topics/t/deliveries", authorization=f"Bearer {token}")
    await stream.until(lambda response: response.sent)
    rig.pass_time(DAY_MS - 1)
    await rig.reload()
    assert await comes_in(rig, token) and not peer.closed
    rig.pass_time(1)
    assert not await comes_in(rig, token)
    await rig.reload()
    await rig.until(lambda: peer.closed)
    assert peer.frames()[-1][:2] == (T.GOODBYE, "unauthorized")
    assert b"unauthorized" in (await stream.done()).body


async def test_a_revoked_token_ends_only_its_connections(rig: AccessRig) -> None:
    gone, stays = await rig.token("all"), await rig.token("all")
    peers = [await rig.peer(token=token) for token in (gone, stays)]
    await peers[0].call(T.SUBSCRIBE, 1, "t", "g", 10, None)
    pull = rig.begin(
        "POST", "/v1/topics/t/pull", {"wait_ms": 60_000}, authorization=f"Bearer {gone}"
    )
    other = rig.begin(
        "POST", "/v1/topics/t/pull", {"wait_ms": 60_000}, authorization=f"Bearer {stays}"
    )
    await rig.settle()
    tokens.revoke(rig.path, id_of(gone))
    await rig.reload()
    await rig.until(lambda: peers[0].closed)
    assert (await pull.done()).status == 401
    assert not await comes_in(rig, gone)
    assert not peers[1].closed and not other.task.done() and await comes_in(rig, stays)
    other.leave()
    await asyncio.wait([other.task])
    assert rig.core.subscribers == 0


async def test_uses_of_expired_tokens_are_logged_with_the_id(rig: AccessRig) -> None:
    gone, right = [await rig.token("all", name=name) for name in ("gone", "right")]
    old = await rig.token("all", name="old", ttl_ms=1_000)
    tokens.revoke(rig.path, id_of(gone))
    rig.pass_time(1_000)
    await rig.reload()

    def lines() -> list[str]:
        return [text for event, text in rig.notices if event == "token_refused"]

    for token, said in ((gone, "is not in the file (revoked?)"), (old, "of old has expired")):
        assert not await comes_in(rig, token)  # over both transports
        assert len(lines()[-2:]) == 2
        for line in lines()[-2:]:
            assert line.endswith(f": token {id_of(token)} {said}") and "unknown" not in line
        assert token.split("_", 2)[2] not in "".join(lines())
    assert len(lines()) == 4
    # A wrong secret for a known id, and text that is not a token, are only counted.
    for wrong in (right + "x", "tw_x_y", "", "password"):
        assert await tcp_code(rig, wrong) == "unauthorized"
    assert len(lines()) == 4
    for _ in range(50):
        await tcp_code(rig, f"tw_{'0' * 12}_x")
    assert len(lines()) == LINES_MAX


async def test_frames_after_a_revocation_are_ignored(rig: AccessRig) -> None:
    token = await rig.token("all")
    peer = await rig.peer(token=token)
    tokens.revoke(rig.path, id_of(token))
    await rig.logins.reload_if_changed()
    rig.listener.dismiss()
    peer.connection.data_received(encode((int(T.ENQUEUE), 5, 0, (("t", b"", 0),))))
    await rig.settle()
    assert rig.core.tasks == 0 and not rig.core.topics


async def test_both_tokens_work_during_a_rotation(rig: AccessRig) -> None:
    old, new = await rig.token("read", name="shop"), await rig.token("all", name="shop")
    assert await comes_in(rig, old) and await comes_in(rig, new)
    tokens.revoke(rig.path, id_of(old))
    await rig.reload()
    assert not await comes_in(rig, old) and await comes_in(rig, new)


async def test_changed_rights_end_a_tokens_connections(rig: AccessRig) -> None:
    token = await rig.token("all")
    peer = await rig.peer(token=token)
    known = tokens.read(rig.path)
    result = known[id_of(token)]._replace(grants=tokens.parse_scopes(["read"]))
    tokens._write(rig.path, known | {result.id: result})
    await rig.reload()
    await rig.until(lambda: peer.closed)
    assert (await (await rig.peer(token=token)).enqueue(("t", b"", 0)))[2] == "forbidden"


@pytest.mark.parametrize("broken", [b"", b"{", b'{"version": 2, "tokens": []}', b"\xff", None])
async def test_an_invalid_token_file_keeps_the_previous_tokens(
    rig: AccessRig, broken: bytes | None
) -> None:
    token = await rig.token("all")
    whole = rig.path.read_bytes()
    rig.path.unlink()
    if broken is not None:
        rig.path.write_bytes(broken)
    await rig.reload()
    await rig.reload()
    assert await comes_in(rig, token) and not rig.observed.tokens_file_ok
    texts = [text for event, text in rig.notices if event == "tokens_file_broken"]
    assert len(texts) == 1 and str(rig.path) in texts[0]
    rig.path.write_bytes(whole)
    await rig.reload()
    assert rig.observed.tokens_file_ok and rig.notices[-1][0] == "tokens_read"


async def test_an_unexpected_error_does_not_end_the_check_of_tokens(
    rig: AccessRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins, "CHECK_INTERVAL_S", 0.0)
    rounds: list[int] = []

    def present() -> list[Any]:
        rounds.append(1)
        raise KeyError("a bug")

    checking = asyncio.create_task(rig.logins.run(present, lambda: None))
    await comes(lambda: len(rounds) > LINES_MAX + 1)
    checking.cancel()
    assert [event for event, _ in rig.notices].count("internal_error") == LINES_MAX


async def test_a_missing_token_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("[]")
    for name in ("none", "bad"):
        with pytest.raises(BadRequest, match=name):
            await ShardRig(tokens_file=str(tmp_path / name)).start()


async def test_serve_token_has_all_rights_next_to_a_token_file() -> None:
    running = await AccessRig(serve_token="secret").start()
    assert isinstance(running, AccessRig)
    peer = await running.peer(token="secret")
    assert (await peer.enqueue(("t", b"", 0)))[0] == T.OK
    assert await comes_in(running, await running.token("read"))
    assert await tcp_code(running, "wrong") == "unauthorized"
    await running.stop()


async def test_an_empty_serve_token_is_not_a_token(rig: AccessRig) -> None:
    rig.logins._expected_token = ""  # the settings refuse it
    for sent in (None, ""):
        with pytest.raises(Unauthorized, match="a token is required"):
            rig.logins.authenticate(sent)


async def test_last_use_is_stored_next_to_the_token_file(rig: AccessRig) -> None:
    used, unused = await rig.token("all"), await rig.token("all")
    await rig.peer(token=used)
    rig.pass_time(5_000)
    await rig.http(used, "GET", "/v1/status")
    assert tokens.read_used(rig.path) == {}, "no request writes a file"
    await rig.logins.write_last_use()
    assert tokens.read_used(rig.path) == {id_of(used): rig.sources.now_ms}
    assert tokens.used_path(rig.path).stat().st_mode & 0o777 == 0o600
    tokens.revoke(rig.path, id_of(used))
    await rig.reload()
    await rig.http(unused, "GET", "/v1/status")
    await rig.logins.write_last_use()
    assert set(tokens.read_used(rig.path)) == {id_of(unused)}


async def test_an_unwritable_folder_loses_only_the_last_use(
    rig: AccessRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tokens, "write_used", refuse)
    for _ in range(2):
        token = next(iter(tokens.read(rig.path)))
        rig.logins._used[token] = 5
        await rig.logins.write_last_use()
    assert [event for event, _ in rig.notices].count("tokens_used_unwritable") == 1


async def test_failed_logins_wait_and_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await AccessRig(login_delay_s=0.5).start()
    assert isinstance(rig, AccessRig)
    timers: list[tuple[float, Callable[[], None]]] = []
    monkeypatch.setattr(rig.logins, "_call_later", lambda *timer: timers.append(timer))
    monkeypatch.setattr(logins, "WAITING_MAX", 3)
    strangers = [rig.stranger() for _ in range(4)]
    for stranger in strangers[:2]:
        stranger.say_hello(token="wrong")
    asked = rig.begin("GET", "/v1/stats", authorization="Bearer wrong")
    await rig.settle()
    assert rig.logins.waiting == len(timers) == 3 and timers[0][0] == 0.5
    assert not strangers[0].frames() and not asked.response.status
    for stranger in strangers[2:]:
        stranger.say_hello(token="wrong")
        assert stranger.frames()[-1][2] == "unauthorized", "no queue of strangers grows"
    welcome = await rig.peer(token=await rig.token("all"))
    assert rig.logins.waiting == 3 and not welcome.closed, "a right one does not wait"
    strangers[0].lose()
    for _, over in timers:
        over()
    assert (await asked.done()).status == 401 and rig.logins.waiting == 0
    assert strangers[1].frames()[-1][2] == "unauthorized" and not strangers[0].frames()
    await rig.stop()


async def test_a_certificate_rule_needs_all_its_parts(rig: AccessRig) -> None:
    """What TLS has verified of a certificate, against rules of the file."""
    grants = tokens.parse_scopes(["produce"])
    tokens.create(rig.path, "billing", grants, NOW_MS, None, "CN=billing,O=shop")
    tokens.create(rig.path, "short", grants, NOW_MS, NOW_MS + 1_000, "CN=short")
    await rig.reload()

    def peer(**parts: str) -> dict[str, Any]:
        return {"subject": tuple(((name, value),) for name, value in parts.items())}

    right = peer(commonName="billing", organizationName="shop", countryName="DE")
    assert rig.logins.authenticate(None, right).name == "token billing"
    assert rig.logins.authenticate("", peer(commonName="short")).name == "token short"
    rig.pass_time(1_000)
    for wrong in (
        peer(commonName="billing"),
        peer(organizationName="shop"),
        peer(commonName="billing", organizationName="other"),
        peer(commonName="short"),
    ):
        with pytest.raises(Unauthorized, match="CN=|O="):
            rig.logins.authenticate(None, wrong)
    tokens.revoke(rig.path, "billing")
    await rig.reload()
    with pytest.raises(Unauthorized):
        rig.logins.authenticate(None, right)
