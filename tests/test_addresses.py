"""Which addresses may be asked."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.stand_in import stand_in
from support.waiting import comes, soon
from tickwheel import webhooks
from tickwheel.outbound.process import Sending
from tickwheel.webhooks import ForbiddenAddress, Guard

PUBLIC = ("93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808")
PRIVATE = (
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1",
    "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254",
    "::7f00:1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::a00:1", "2002:7f00:1::",
    "2002:a00:1::1", "2001:0:a00:1:0:0:0:0", "no address", "",
)  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    Guard().check("host", address)


@pytest.mark.parametrize("address", PRIVATE)
def test_other_addresses_are_forbidden(address: str) -> None:
    with pytest.raises(ForbiddenAddress, match="host"):
        Guard().check("host", address)


@pytest.mark.parametrize(
    ("network", "inside", "outside"),
    [
        ("10.1.0.0/16", "10.1.2.3", "10.2.0.1"),
        ("127.0.0.1/32", "::ffff:127.0.0.1", "127.0.0.2"),
        ("fd00::/8", "fd12::1", "fc00::1"),
    ],
)
def test_a_network_can_be_allowed(network: str, inside: str, outside: str) -> None:
    guard = Guard.from_texts([network])
    guard.check("host", inside)
    with pytest.raises(ForbiddenAddress, match="push_allow"):
        guard.check("host", outside)


def test_an_address_embedding_an_allowed_one_is_forbidden() -> None:
    guard = Guard.from_texts(["10.0.0.0/8"])
    guard.check("host", "64:ff9b::a00:1")  # NAT64 of it leads there
    with pytest.raises(ForbiddenAddress):
        guard.check("host", "64:ff9b:1::a00:1")  # a network of its own


@pytest.mark.parametrize("host", ["127.1", "0x7f000001", "2130706433", "0177.0.0.1"])
async def test_addresses_in_other_forms_are_checked(host: str) -> None:
    with pytest.raises(ForbiddenAddress, match=r"127\.0\.0\.1"):
        await Guard().resolve(host, 80)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.1", "::ffff:10.0.0.1"])
async def test_an_address_is_checked_without_a_look_up(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tickwheel.webhooks.socket", stand_in(socket, getaddrinfo=None))
    with pytest.raises(ForbiddenAddress):
        await Guard().resolve(host, 80)


async def test_forbidden_addresses_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, port: int, **options: Any) -> Any:
        there = {"both": ("10.0.0.1", "8.8.8.8"), "none": ("10.0.0.1", "127.0.0.1")}[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (item, port)) for item in there]

    monkeypatch.setattr("tickwheel.webhooks.socket", stand_in(socket, getaddrinfo=getaddrinfo))
    assert await Guard().resolve("both", 443) == [(socket.AF_INET, "8.8.8.8")]
    with pytest.raises(ForbiddenAddress):
        await Guard().resolve("none", 443)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], threading.Event]]:
    """The names that were looked up, and the event that all except "fine" wait for."""
    asked, answer = list[str](), threading.Event()

    def getaddrinfo(host: str, *given: Any, **options: Any) -> Any:
        asked.append(host)
        if host != "fine":
            answer.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 0))]

    monkeypatch.setattr("tickwheel.webhooks.socket", stand_in(socket, getaddrinfo=getaddrinfo))
    yield asked, answer
    answer.set()


@pytest.mark.parametrize("kind", ["push", "forward"])
async def test_silent_name_servers_stop_no_other_work(
    names: tuple[list[str], threading.Event], kind: str
) -> None:
    config = {"allow": (), "callbacks": None, "url": "tcp://127.0.0.1:1", "token": "t"}
    sending, (_, answer) = Sending(config, io.StringIO()), names
    loop = asyncio.get_running_loop()
    look_up: Any = sending.guard.resolve if kind == "push" else loop.getaddrinfo
    waiting = [asyncio.create_task(look_up(f"silent{n}", 80)) for n in range(40)]
    fine = asyncio.create_task(look_up("fine", 80))
    assert (await soon(fine))[0][-1] == ("8.8.8.8" if kind == "push" else ("8.8.8.8", 80))
    await soon(asyncio.to_thread(int))
    answer.set()
    await soon(asyncio.gather(*waiting))


async def test_look_ups_are_limited_and_count_until_they_end(
    names: tuple[list[str], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "LOOK_UPS_MAX", 2)
    guard, (asked, answer) = Guard(), names
    waiting = [asyncio.create_task(guard.resolve(name, 80)) for name in ("a", "a", "b", "c")]
    await comes(lambda: len(asked) == 2)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (sorted(asked), guard.look_ups.count) == (["a", "b"], 3)
    answer.set()
    await comes(lambda: not guard.look_ups.count)
    assert sorted(asked) == ["a", "b", "c"]


def test_an_invalid_network_is_refused() -> None:
    with pytest.raises(ValueError, match="host bits"):
        Guard.from_texts(["10.0.0.1/8"])
