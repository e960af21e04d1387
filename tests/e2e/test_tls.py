"""TLS against real daemons: who gets in, who is told why not, and what changes while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import Cli
from support.certificates import Authority
from support.daemon import Daemon, DaemonFailed
from support.redis_server import RedisServer
from support.waiting import comes, soon
from tickwheel import Client, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.protocol import Decoder, encode
from tickwheel.server.access import tokens
from tickwheel.sync import Client as SyncClient


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def settings(authority: Authority) -> dict[str, Any]:
    pair = authority.sign("daemon")
    return {
        "tls_cert": str(pair.cert),
        "tls_key": str(pair.key),
        "tls_client_ca": str(authority.ca),
        "tls_handshake_timeout_s": 8,
        "tls_handshakes_max": 8,
    }


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    grants = tokens.parse_scopes(["produce=orders.*"])
    tokens.create(path, "shop", grants, 1, None, "CN=shop")
    return path


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any], rules: Path
) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    more = {"serve_token": "of-everything", "tokens_file": str(rules)}
    with Daemon(folder, http=True, **settings, **more) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


def http_port(daemon: Daemon) -> int:
    return int(daemon.http.rpartition(":")[2])


def client(daemon: Daemon, authority: Authority, **options: Any) -> Client:
    return Client(daemon.url, ca=str(authority.ca), **{"token": "of-everything"} | options)


def over_http(daemon: Daemon, context: ssl.SSLContext, path: str, token: str | None = None) -> Any:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{daemon.http}{path}", headers=headers)  # noqa: S310  # ours
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:  # noqa: S310
        return json.load(answer)


async def test_a_task_is_delivered_over_tls(running: Daemon, authority: Authority) -> None:
    assert running.url.startswith("tls://") and running.http.startswith("https://")
    async with (
        client(running, authority) as consumer,
        client(running, authority) as producer,
        consumer.subscribe("t", group="g") as deliveries,
    ):
        bodies = [os.urandom(100_000) for _ in range(20)]
        for body in bodies:
            await producer.enqueue("t", body)
        results = set()
        while len(results) < len(bodies):
            delivery = await soon(anext(deliveries))
            results.add(delivery.body)
            await delivery.ack()
        assert results == set(bodies)


def test_every_client_works_over_tls(
    running: Daemon, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncClient(running.url, token="of-everything", ca=str(authority.ca)) as one:
        one.enqueue("sync", b"", delay=3600)
    context = ssl.create_default_context(cafile=str(authority.ca))
    assert over_http(running, context, "/healthz") == {"status": "alive"}
    stats = over_http(running, context, "/v1/stats", "of-everything")
    assert stats["topics"]["sync"]["scheduled"] == 1
    cli = Cli(running)
    first = ("--ca", str(authority.ca), "--token", "of-everything")
    cli.run(*first, "enqueue", "cli", "x", "--delay", "1h")
    assert running.url.removeprefix("tls://") in cli.run(*first, "status").stdout.decode()
    link = cli.run(*first, "console", "--no-browser").stdout.decode()
    assert link.startswith(f"{running.http}/console/#login=")
    console = ("console", "--no-browser", "--http", running.http)
    message = cli.fails(1, "--token", "of-everything", *console)
    assert "certificate is not trusted" in message
    monkeypatch.setenv("TICKWHEEL_CA", str(authority.ca))
    monkeypatch.setenv("TICKWHEEL_TOKEN", "of-everything")
    cli.run("stats")


async def test_tls_mismatches_are_one_line_errors(
    running: Daemon, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    with pytest.raises(errors.TlsFailed, match="not trusted"):
        await client(running, stranger).connect()
    with pytest.raises(errors.TlsFailed, match="not trusted"):  # not with the system's either
        await Client(running.url, token="of-everything").connect()
    with pytest.raises(errors.TlsRequired, match="tls://"):
        await Client(running.url.replace("tls", "tcp"), token="of-everything").connect()
    with (
        Daemon(tmp_path / "plain") as plain,
        pytest.raises(errors.TlsFailed, match="does not use TLS"),
    ):
        await Client(plain.url.replace("tcp", "tls")).connect()
    with pytest.raises(errors.BadRequest, match="ca no/such"):
        Client(running.url, ca="no/such.pem")
    with pytest.raises(errors.BadRequest, match="all addresses or none must use tls"):
        Client("tls://a,tcp://b")
    cli = Cli(running)
    message = cli.fails(1, "stats")
    assert message.startswith("tickwheel: tls_failed: ") and message.count("\n") == 1, message


def test_a_plain_request_at_an_https_port_is_refused(running: Daemon) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(f"http://127.0.0.1:{http_port(running)}/healthz", timeout=30)
    assert raised.value.code == 400
    assert json.load(raised.value)["code"] == "tls_required"


def test_a_plain_hello_at_a_tls_port_is_refused(running: Daemon) -> None:
    with socket.create_connection(("127.0.0.1", running.port), 30) as plain:
        plain.sendall(encode((int(T.HELLO), 1, {"v": 1})))
        data = b"".join(iter(lambda: plain.recv(4096), b""))
    assert Decoder(4096).feed(data)[0][:3] == (T.ERROR, 0, "tls_required")


async def test_a_client_certificate_replaces_a_token(running: Daemon, authority: Authority) -> None:
    shop, other = authority.sign("shop"), authority.sign("other")
    files = {"client_cert": str(shop.cert), "client_key": str(shop.key), "token": ""}
    async with client(running, authority, **files) as limited:
        await limited.enqueue("orders.eu", b"", delay=3600)
        with pytest.raises(errors.Forbidden, match="token shop may not do this"):
            await limited.enqueue("mails", b"", delay=3600)
    files = {"client_cert": str(other.cert), "client_key": str(other.key), "token": ""}
    with pytest.raises(errors.Unauthorized, match="no rule matches the certificate CN=other"):
        await client(running, authority, **files).connect()
    # A token says more than a certificate.
    async with client(running, authority, **files | {"token": "of-everything"}) as owner:
        await owner.enqueue("mails", b"", delay=3600)
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.load_cert_chain(shop.cert, shop.key)
    with pytest.raises(urllib.error.HTTPError) as raised:
        over_http(running, context, "/v1/stats")
    assert raised.value.code == 403 and "token shop" in json.load(raised.value)["detail"]


async def test_a_certificate_of_an_unknown_authority_is_refused(
    running: Daemon, authority: Authority, tmp_path: Path
) -> None:
    shop = Authority(tmp_path, "stranger").sign("shop")
    files = {"client_cert": str(shop.cert), "client_key": str(shop.key), "token": ""}
    with pytest.raises(errors.Unreachable, match="does the daemon accept the client"):
        await client(running, authority, **files, connect_timeout=3.0).connect()
    text = "the client's certificate: unable to get local issuer"
    await comes(lambda: text in running.log_text())


async def test_certificates_are_enough_where_they_are_required(
    tmp_path: Path, settings: dict[str, Any], authority: Authority
) -> None:
    somebody = authority.sign("somebody")
    files = {"client_cert": str(somebody.cert), "client_key": str(somebody.key)}
    with Daemon(tmp_path, http=True, **settings, tls_client_required=True) as daemon:
        async with client(daemon, authority, token=None, **files) as known:
            await known.enqueue("t", b"")
        with pytest.raises(errors.Unauthorized, match="a client certificate is required"):
            await client(daemon, authority, token=None).connect()
        # Whoever looks whether it is well needs none.
        context = ssl.create_default_context(cafile=str(authority.ca))
        assert over_http(daemon, context, "/readyz")["status"] == "ready"


async def test_a_renewed_certificate_keeps_connections(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "a", "first"), Authority(tmp_path / "b", "second")
    served = first.sign("daemon")
    files = {"tls_cert": str(served.cert), "tls_key": str(served.key)}
    with Daemon(tmp_path / "daemon", http=True, **files) as daemon:
        async with Client(daemon.url, ca=str(first.ca)) as connected:
            await connected.enqueue("t", b"")
            connection = connected._reconnector.connection
            fresh = second.sign("daemon")
            fresh.key.replace(served.key)
            fresh.cert.replace(served.cert)
            await comes(lambda: "certificate_read" in daemon.log_text(), 10)
            async with Client(daemon.url, ca=str(second.ca)) as later:
                await later.enqueue("t", b"")
            assert over_http(daemon, ssl.create_default_context(cafile=str(second.ca)), "/readyz")
            with pytest.raises(errors.TlsFailed):
                await Client(daemon.url, ca=str(first.ca)).connect()
            await connected.enqueue("t", b"")
            assert connected._reconnector.connection is connection
            served.cert.write_text("broken")
            await comes(lambda: "certificate_broken" in daemon.log_text(), 10)
            async with Client(daemon.url, ca=str(second.ca)) as later:
                await later.enqueue("t", b"")


def test_invalid_tls_files_stop_the_start(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(DaemonFailed) as raised:
        Daemon(tmp_path, **settings | {"tls_cert": "no/such.pem"}).start()
    answer = str(raised.value)
    assert "tls_cert no/such.pem: No such file" in answer and "Traceback" not in answer


# --- peers that do not finish --------------------------------------------------------------------


async def test_unfinished_handshakes_do_not_block_others(
    running: Daemon, authority: Authority
) -> None:
    """More of them than there may be at a time, on both ports: silent, and half way."""
    ports = (running.port, http_port(running))
    half = [socket.create_connection(("127.0.0.1", port), 20) for port in ports * 20]
    try:
        for sock in half[::3]:
            sock.sendall(b"\x16\x03\x01")
        for _ in range(3):
            # Sooner than the time-out of any handshake: room is made, not waited for.
            async with client(running, authority, connect_timeout=6.0) as one:
                await soon(one.enqueue("t", b"", delay=3600))
        context = ssl.create_default_context(cafile=str(authority.ca))
        over_http(running, context, "/healthz")
        for sock in half:  # and each is ended, by number or by time
            assert await soon(asyncio.to_thread(ended, sock))
    finally:
        for sock in half:
            sock.close()


async def test_handshakes_are_admitted_at_a_limited_rate(
    tmp_path: Path, settings: dict[str, Any], authority: Authority
) -> None:
    """A burst is admitted at once and the rest at a rate; open connections do not wait."""
    at_once, per_s, count = settings["tls_handshakes_max"], 50, 30
    with Daemon(tmp_path, tls_handshakes_per_s=per_s, **settings) as daemon:
        async with client(daemon, authority, token=None) as first:
            began_s = time.monotonic()
            async with contextlib.AsyncExitStack() as stack:
                enter = stack.enter_async_context
                rush = [enter(client(daemon, authority, token=None)) for _ in range(count)]
                entering = asyncio.gather(*rush)
                await soon(first.enqueue("t", b"", delay=3600))
                await soon(entering)
            assert time.monotonic() - began_s >= (count - at_once) / per_s - 0.05


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(4096) == b""
    except ConnectionError:
        return True


async def test_garbage_at_a_tls_port_ends_only_its_connection(
    running: Daemon, authority: Authority
) -> None:
    for data in (
        b"\x16" * 100,
        b"\x16\x03\x01\x02\x00\x01" + b"\0" * 600,
        b"\0",
        b"GET / HTTP/1.1",
    ):
        for port in (running.port, http_port(running)):
            with socket.create_connection(("127.0.0.1", port), 30) as sock:
                sock.sendall(data)
                await soon(asyncio.to_thread(list, iter_until_end(sock)))
    async with client(running, authority) as one:
        await one.enqueue("t", b"", delay=3600)


def iter_until_end(sock: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            data = sock.recv(4096)
        except ConnectionError:
            return
        if not data:
            return
        yield data


# --- several daemons -----------------------------------------------------------------------------


async def test_a_failover_works_over_tls(
    tmp_path: Path, settings: dict[str, Any], authority: Authority
) -> None:
    server = RedisServer(tmp_path / "redis").start().lay_out()
    options: dict[str, Any] = {"store": server.url(), **settings}
    try:
        with (
            Daemon(tmp_path / "first", **options) as first,
            Daemon(tmp_path / "second", **options) as second,
        ):
            # It knows the standby only, and is sent on; then back.
            async with client(second, authority, token=None, active_timeout=60.0) as one:
                await soon(one.enqueue("t", b"1", delay=3600))
                answer = Cli(second).json("--ca", str(authority.ca), "status")
                assert {status["role"] for status in answer} == {"active", "standby"}
                assert {status["url"][:6] for status in answer} == {"tls://"}
                first.kill()
                await one.enqueue("t", b"2", delay=3600, timeout=60)
    finally:
        server.kill()
