"""Targets of groups in a daemon in this process: who is refused, what is kept, what is told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.shard.test_lining import pull, put
from support.in_process import InProcess
from support.sender import FakeSender
from support.stand_in import stand_in
from support.waiting import comes
from tickwheel.api.frames import FrameType as T
from tickwheel.api.targets import FORWARD_URL, SECRETS_MAX, hosts_of, shown_url
from tickwheel.errors import BadRequest
from tickwheel.limits import Limits
from tickwheel.model.kinds import TARGET
from tickwheel.server.settings import Settings, load
from tickwheel.server.shard import targets as shard_targets
from tickwheel.server.shard.callers import OUTBOUND

URL = "https://93.184.216.34/hook"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ROTATED = "whsec_" + "A" * 32
PUSH = (URL, {"secrets": (SECRET,)})


@pytest.fixture
def sender(daemon: InProcess) -> FakeSender:
    daemon.daemon.outbound = None
    daemon.shard.outbound = made = FakeSender()
    return made


@pytest.fixture
def are_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The event before which no name of a host is resolved."""
    event = threading.Event()

    def getaddrinfo(*given: Any, **options: Any) -> Any:
        event.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 443))]

    monkeypatch.setattr("tickwheel.webhooks.socket", stand_in(socket, getaddrinfo=getaddrinfo))
    yield event
    event.set()


async def test_a_group_has_a_target_or_subscribers(daemon: InProcess, sender: FakeSender) -> None:
    peer, other = daemon.connect(), daemon.connect()
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    code, message = await other.refused(T.PUSH_SET, "t", "g", *PUSH)
    assert code == "conflict" and "1 subscribers" in message
    await peer.do(T.UNSUBSCRIBE, 1)
    made = await other.do(T.PUSH_SET, "t", "g", *PUSH)
    assert made["created"] and sender.changes == 1
    for frame in (
        (T.SUBSCRIBE, 2, "t", "g", 10, None),
        (T.PULL, "t", "g", 1, 0, None),
    ):
        code, message = await peer.refused(*frame)
        assert code == "conflict" and f"is pushed to {URL}" in message
    await peer.do(T.SUBSCRIBE, 3, "t", "h", 10, None)  # another group of the topic
    await other.do(T.TARGET_REMOVE, "t", "g")
    assert sender.changes == 2
    await peer.do(T.SUBSCRIBE, 2, "t", "g", 10, None)
    daemon.recount()


async def test_a_callback_lease_over_the_limit_of_leases_is_refused(
    daemon: InProcess, sender: FakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every 202 would count as a failure."""
    monkeypatch.setattr(daemon.shard, "limits", Limits(lease_ms_max=60_000))
    peer = daemon.connect()
    await peer.do(T.PUSH_SET, "t", "g", URL, {**PUSH[1], "callback_lease_ms": 60_000})
    over = {**PUSH[1], "callback_lease_ms": 60_001}
    code, message = await peer.refused(T.PUSH_SET, "t", "g", URL, over)
    assert code == "bad_request" and "callback_lease_ms must be" in message
    [target] = daemon.shard.core.targets.values()
    assert target.option("callback_lease_ms") == 60_000


async def test_the_process_that_sends_may_subscribe(daemon: InProcess, sender: FakeSender) -> None:
    daemon.daemon._logins.companions[OUTBOUND] = b"secret of the moment"
    peer, ours = daemon.connect(), daemon.connect(token="secret of the moment")
    await peer.do(T.PUSH_SET, "t", "g", *PUSH)
    await ours.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    # That the process is subscribed does not keep anybody from setting the target again.
    assert not (await peer.do(T.PUSH_SET, "t", "g", *PUSH))["created"]
    await peer.do(T.TARGET_REMOVE, "t", "g")
    assert (await peer.do(T.PUSH_SET, "t", "g", *PUSH))["created"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1/", "127.0.0.1 is not a public address"),
        ("http://[::1]:8080/", "::1 is not a public address"),
        ("http://[::ffff:10.1.2.3]/", "not a public address"),
        ("http://[::1%a,b]/", "::1%a,b is not a public address"),
        ("http://localhost/", "localhost (127.0.0.1) is not"),
        ("https://me:word@example.com/", "must not contain credentials"),
        ("https://me@example.com/", "must not contain credentials"),
        ("ftp://example.com/", "http, https"),
        ("https:///path", "http, https"),
        ("https://example.com:99999/", "is not valid"),
        ("https://example.com/#part", "without spaces or a fragment"),
        ("https://example.com/a b", "without spaces"),
        ("x" * 3_000, "URL_LENGTH_MAX"),
    ],
)
async def test_a_forbidden_push_address_is_refused_at_once(
    daemon: InProcess, sender: FakeSender, url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(self: Any, host: str, port: int, family: int = 0) -> Any:
        if host == "localhost":
            self.check(host, "127.0.0.1")
        return await plain(self, host, port, family)

    plain = shard_targets.Guard.resolve
    monkeypatch.setattr(shard_targets.Guard, "resolve", resolve)
    peer = daemon.connect()
    code, message = await peer.refused(T.PUSH_SET, "t", "g", url, PUSH[1])
    assert code in ("bad_request", "limit_exceeded") and said in message, message
    assert "word" not in message
    assert not daemon.shard.core.targets and sender.changes == 0


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("kafka://u@a,b:9092/t", [("a", None), ("b", 9092)]),
        ("kafka://a:1,b:2/t", [("a", 1), ("b", 2)]),
        ("kafka://a:1,b:0/t", None),
        ("kafka://a:1,b:99999/t", None),
        ("kafka://a:99999,[::1]/t", None),
        ("kafka://[::1%a,b]/t", None),
        ("kafka://[a,b]@[::1]/t", None),
    ],
)
def test_each_host_of_a_broker_url_is_checked(url: str, hosts: list[Any] | None) -> None:
    if hosts is None:
        with pytest.raises(BadRequest, match="url must be a URL"):
            FORWARD_URL.check(url, "url", Limits())
    else:
        assert FORWARD_URL.check(url, "url", Limits()) == url
        assert hosts_of(url) == hosts


async def test_an_unexpected_error_of_a_check_is_its_answer(
    daemon: InProcess, sender: FakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*given: Any, **options: Any) -> Any:
        raise RuntimeError

    peer = daemon.connect()
    monkeypatch.setattr(sender, "ask", fail)
    assert (await peer.refused(T.FORWARD_SET, "t", "f", "redis://8.8.8.8/0", None))[0] == "internal"
    monkeypatch.setattr(shard_targets.Guard, "resolve", fail)
    code, message = await peer.refused(T.PUSH_SET, "t", "g", *PUSH)
    assert code == "internal" and "RuntimeError" in message
    assert daemon.alive and not daemon.shard.core.targets


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        ((), "0 elements"),
        (("whsec_MfKQ",), "24 to 64 bytes in base64, not 3"),
        (("whsec_not base64!",), "base64 after whsec_"),
        (("whsk_" + "A" * 32,), "32 or 64 bytes"),
        (("password",), "must begin with whsec_ or whsk_"),
        ((SECRET,) * (SECRETS_MAX + 1), f"the limit is {SECRETS_MAX}"),
        (None, "secrets must contain"),
        (SECRET, "must be an array"),
    ],
)
async def test_an_invalid_secret_is_refused_and_not_shown(
    daemon: InProcess, sender: FakeSender, secrets: Any, said: str
) -> None:
    peer = daemon.connect()
    options = None if secrets is None else {"secrets": secrets}
    code, message = await peer.refused(T.PUSH_SET, "t", "g", URL, options)
    assert code in ("bad_request", "limit_exceeded") and said in message, message
    assert "password" not in message and "not base64" not in message


async def test_answers_and_logs_have_no_secrets(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    async with InProcess(tmp_path, audit_file=str(log)) as daemon:
        daemon.shard.outbound = FakeSender()
        peer = daemon.connect()
        fields = {"secrets": (SECRET,)}
        answers = [await peer.do(T.PUSH_SET, "t", "g", f"{URL}?code=quiet", fields)]
        answers.append(await peer.do(T.FORWARD_SET, "t", "f", "redis://8.8.8.8/0?password=quiet",
                                     {"secret": "quiet word"}))  # fmt: skip
        answers.append(await peer.do(T.TARGET_LIST, None))
        await peer.refused(T.PUSH_SET, "t", "g", "https://me:quiet@h/", fields)
        answers.append(daemon.daemon.log.lines)
    text = json.dumps(answers, default=str, ensure_ascii=False) + log.read_text()
    assert "quiet" not in text and SECRET not in text
    assert "code=…" in text and log.read_text().count('"set_push"') == 2


async def test_deleting_a_group_or_topic_deletes_its_target(
    daemon: InProcess, sender: FakeSender
) -> None:
    peer = daemon.connect()
    for group in ("a", "b", "c"):
        await peer.do(T.PUSH_SET, "t", group, *PUSH)
    await peer.do(T.GROUP_DELETE, "t", "a", False)
    assert {group for _, group in daemon.shard.core.targets} == {"b", "c"}
    await peer.do(T.TOPIC_DELETE, "t", True)
    await daemon.settle()
    assert not daemon.shard.core.targets
    daemon.recount()
    assert sender.changes == 5
    again = await peer.do(T.PUSH_SET, "t", "a", *PUSH)
    assert again["created"], "a group of the same name begins without a target"


async def test_targets_survive_a_restart(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as daemon:
        daemon.shard.outbound = FakeSender()
        peer = daemon.connect()
        made = await peer.do(T.PUSH_SET, "t", "g", *PUSH)
        await peer.do(T.FORWARD_SET, "t", "f", "redis://8.8.8.8/0?stream=s", {"secret": "pass"})
        operations = daemon.daemon.listener._active.operations
        operations.targeting.end("t", "g", "the endpoint answered 410", made["since_ms"] + 1)
        assert daemon.shard.core.targets["t", "g"].ended_ms is None, "it was set anew since"
        operations.targeting.end("t", "g", "the endpoint answered 410", made["since_ms"])
        await daemon.settle()
        daemon.recount()
        before = dict(daemon.shard.core.targets)
        store = daemon.store
    async with InProcess(tmp_path, store=store) as daemon:
        daemon.daemon.outbound = None
        assert daemon.shard.core.targets == before
        (forward, push) = (await daemon.connect().do(T.TARGET_LIST, None))["targets"]
        assert (push["state"], push["reason"]) == ("ended", "the endpoint answered 410")
        assert forward["state"] in ("starting", "stopped")
        assert before["t", "f"].secrets == ("pass",) and TARGET.name == "target"


async def test_a_daemon_without_an_outbound_process_refuses_targets(daemon: InProcess) -> None:
    daemon.daemon.outbound = daemon.shard.outbound = None
    peer = daemon.connect()
    assert (await peer.do(T.PUSH_SET, "t", "g", *PUSH))["state"] == "stopped"
    for frame in ((T.PUSH_TEST, URL, None), (T.PUSH_LOG, "t", "g", None)):
        code, message = await peer.refused(*frame)
        assert code == "conflict" and "no outbound process" in message


async def test_a_group_keeps_its_tasks_when_it_gets_a_target(
    daemon: InProcess, sender: FakeSender
) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", None)
    (task,) = await put(daemon, peer, {})
    await peer.do(T.PUSH_SET, "t", "g", *PUSH)
    await peer.do(T.TARGET_REMOVE, "t", "g")
    daemon.pass_time(10_000)
    await daemon.settle()
    assert [task_id for task_id, _ in (await pull(peer))[1]] == [task]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://h/p?a=1&b=", "https://h/p?a=…&b=…"),
        ("https://h/p", "https://h/p"),
        ("redis://h/0?stream=s&password=x", "redis://h/0?stream=s&password=…"),
    ],
)
def test_possible_secrets_in_urls_are_hidden(url: str, said: str) -> None:
    assert shown_url(url) == said


def test_networks_of_push_allow_are_checked() -> None:
    result = Settings(push_allow="10.0.0.0/8, fd00::/8")
    assert result.push_networks == ("10.0.0.0/8", "fd00::/8")
    with pytest.raises(BadRequest, match="push_allow"):
        load(None, {"push_allow": "10.0.0.1/8"})


@pytest.mark.parametrize("is_waited_for", [True, False])
async def test_concurrent_host_lookups_are_limited(
    daemon: InProcess,
    sender: FakeSender,
    monkeypatch: pytest.MonkeyPatch,
    are_known: threading.Event,
    is_waited_for: bool,
) -> None:
    monkeypatch.setattr(shard_targets, "LOOK_UPS_MAX", 2)
    monkeypatch.setattr(shard_targets, "RESOLVE_S_MAX", 60.0 if is_waited_for else 0.001)
    peer, other = daemon.connect(), daemon.connect()
    pushes = [("t", name, f"https://{name}.test/", {"secrets": (SECRET,)}) for name in "abc"]
    waiting = [asyncio.create_task(peer.do(T.PUSH_SET, *push)) for push in pushes[:2]]
    await (asyncio.sleep(0) if is_waited_for else asyncio.gather(*waiting))
    code, message = await other.refused(T.PUSH_TEST, "https://slow.test/", None)
    assert code == "overloaded" and "the limit is 2 (LOOK_UPS_MAX)" in message
    are_known.set()
    await asyncio.gather(*waiting)
    look_ups = daemon.daemon.listener._active.operations.targeting._guard.look_ups
    await comes(lambda: not look_ups.count)
    assert (await other.do(T.PUSH_SET, *pushes[2]))["created"]


async def test_all_hosts_of_a_target_share_the_time_to_resolve_them(
    daemon: InProcess,
    sender: FakeSender,
    monkeypatch: pytest.MonkeyPatch,
    are_known: threading.Event,
) -> None:
    monkeypatch.setattr(shard_targets, "RESOLVE_S_MAX", 0.05)
    hosts = ",".join(f"{n}.slow.test" for n in range(100))
    peer = daemon.connect()
    frame = T.FORWARD_SET, "t", "g", f"kafka://{hosts}/t", None
    assert (await peer.do(*frame))["created"]
    targeting = daemon.daemon.listener._active.operations.targeting
    assert (targeting._resolving, targeting._guard.look_ups.count) == (0, 1)
    code, message = await peer.refused(*frame[:3], f"kafka://{hosts},127.0.0.1/t", None)
    assert code == "bad_request" and "127.0.0.1 is not a public address" in message


async def test_a_push_without_secrets_keeps_the_newest(
    daemon: InProcess, sender: FakeSender, are_known: threading.Event
) -> None:
    peer, other = daemon.connect(), daemon.connect()
    for group in "ab":
        await peer.do(T.PUSH_SET, "t", group, *PUSH)
    waiting = [peer.send(T.PUSH_SET, "t", group, "https://slow.test/", None) for group in "ab"]
    await other.do(T.PUSH_SET, "t", "a", URL, {"secrets": (ROTATED,)})
    await other.do(T.TARGET_REMOVE, "t", "b")
    are_known.set()
    rotated, removed = [await peer.answer(number) for number in waiting]
    assert rotated[0] == T.OK and removed[2] == "bad_request" and "secrets" in removed[3]
    ((name, row),) = daemon.shard.core.targets.items()
    assert (name, row.url, row.secrets) == (("t", "a"), "https://slow.test/", (ROTATED,))


async def test_targets_of_a_daemon_are_limited(
    daemon: InProcess, sender: FakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_targets, "TARGETS_MAX", 2)
    peer = daemon.connect()
    for group in ("a", "b", "a"):  # one that is set again is no further one
        await peer.do(T.PUSH_SET, "t", group, *PUSH)
    code, message = await peer.refused(T.PUSH_SET, "t", "c", *PUSH)
    assert code == "limit_exceeded" and "the limit is 2 (TARGETS_MAX)" in message
