"""By which names the HTTP port may be asked while it asks for no token, on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from server.http.rig import nothing, ready
from tickwheel.cli.top import _link
from tickwheel.errors import NotFound
from tickwheel.server.http.app import Http
from tickwheel.server.settings import load


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    names = load(None, {"http": "127.0.0.1:0", "http_hosts": "Proxy.example., other"}).http_names
    running = Http("127.0.0.1", 0, ready, nothing, names=names)
    await running.start()
    yield running
    await running.stop()


async def ask(http: Http, host: str | None, path: str = "/metrics") -> tuple[int, bytes]:
    """The status, and what is said."""
    assert http.url is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", int(http.url.rpartition(":")[2]))
    head = "HTTP/1.0" if host is None else f"HTTP/1.1\r\nHost: {host}"
    writer.write(f"GET {path} {head}\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7356", 200),
        ("127.0.0.1", 200),
        ("[::1]:7356", 200),
        ("10.0.0.7", 200),
        ("localhost:7356", 200),
        ("LocalHost.", 200),
        ("tickwheel.localhost:7356", 200),
        ("proxy.example", 200),
        ("OTHER:80", 200),
        (None, 200),
        ("evil.example", 403),
        ("evil.example:7356", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("notlocalhost", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
async def test_unknown_host_names_are_refused(http: Http, host: str | None, status: int) -> None:
    found, said = await ask(http, host)
    assert found == status, said
    if status == 403:
        assert json.loads(said)["code"] == "forbidden" and b"http_hosts" in said
        assert (await ask(http, host, "/v1/stats"))[0] == 403


def test_a_public_address_needs_http_names() -> None:
    open_to_all = {"http": "0.0.0.0:80", "insecure": True}
    assert load(None, open_to_all).http_names is None
    http_names = load(None, open_to_all | {"http_hosts": "wheel"}).http_names
    assert http_names is not None and "wheel" in http_names
    assert load(None, {"http": "localhost:80"}).http_names == frozenset({"localhost"})


# --- without the extra ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/console", "/console/", "/v1/stats", "/docs"])
async def test_a_missing_http_extra_is_named(http: Http, path: str) -> None:
    status, said = await ask(http, "localhost", path)
    assert status == 404
    assert "pip install 'tickwheel[http]'" in json.loads(said)["detail"]
    assert (await ask(http, "localhost", "/healthz"))[0] == 200


async def test_the_console_command_names_the_missing_extra(http: Http) -> None:
    with pytest.raises(NotFound, match=r"pip install 'tickwheel\[http\]'"):
        await asyncio.to_thread(_link, str(http.url), None)
