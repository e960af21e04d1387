"""``tickwheel console``: where the console is, the link, and what stands in no command line."""

from __future__ import annotations

import json
import stat
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from support.daemon import Daemon
from support.stand_in import stand_in
from tickwheel.cli import top as console
from tickwheel.cli.app import run
from tickwheel.errors import BadRequest

Capture = pytest.CaptureFixture[str]
Asked = Callable[..., int]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    with Daemon(folder, http=True, serve_token="secret", login_delay_s=0) as running:
        yield running


def test_the_link_is_shown(daemon: Daemon, capsys: Capture) -> None:
    assert run(["--url", daemon.url, "--token", "secret", "console", "--no-browser"]) == 0
    shown = capsys.readouterr()
    address, _, code = shown.out.strip().partition("#login=")
    assert address == f"{daemon.http}/console/" and code.startswith("once_")
    assert "the link logs in once, until" in shown.err and "secret" not in shown.out + shown.err


def test_console_prints_the_link_as_json(daemon: Daemon, capsys: Capture) -> None:
    given = ["console", "--http", f"{daemon.http}/", "--no-browser", "--json", "--token", "secret"]
    assert run(given) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["url"].startswith(f"{daemon.http}/console/#login=") and answer["until_ms"] > 0


def test_a_browser_gets_a_file_that_nobody_else_can_read(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    opened: list[tuple[str, str, int]] = []

    def take(url: str) -> bool:
        path = Path(unquote(urlsplit(url).path))
        opened.append((url, path.read_text(), stat.S_IMODE(path.parent.stat().st_mode)))
        return True

    monkeypatch.setattr(console, "webbrowser", stand_in(webbrowser, open=take))
    monkeypatch.setattr(console, "KEEP_S", 0.0)
    assert run(["--url", daemon.url, "--token", "secret", "console"]) == 0
    [(url, page, mode)] = opened
    assert url.startswith("file:///") and "once_" not in url and mode == 0o700
    assert f"{daemon.http}/console/#login=once_" in page
    assert not Path(unquote(urlsplit(url).path)).exists()
    assert capsys.readouterr().out == ""


def test_console_prints_the_link_without_a_browser(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    none = stand_in(webbrowser, open=lambda url: False)
    monkeypatch.setattr(console, "webbrowser", none)
    assert run(["--url", daemon.url, "--token", "secret", "console"]) == 0
    assert "#login=once_" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--token", "wrong", "console", "--http", "HTTP"], 1, "unauthorized: the token is wrong"),
        (["console", "--http", "http://127.0.0.1:1"], 3, "unreachable: http://127.0.0.1:1"),
        (["console", "--http", "file:///etc/passwd"], 2, "--http must be http://HOST:PORT"),
        *(
            (["console", "--http", f"http://{place}"], 2, "--http must be http://HOST:PORT")
            for place in ("", "localhost:http", "h:65536", "[::1", "h h", "h/\n")
        ),
        (["console", "--http", "TCP"], 3, "not that of a daemon's console"),
    ],
)
def test_console_errors_are_one_line(
    daemon: Daemon, capsys: Capture, arguments: list[str], code: int, text: str
) -> None:
    places = {"HTTP": daemon.http, "TCP": daemon.url.replace("tcp:", "http:")}
    given = [places.get(argument, argument) for argument in arguments]
    assert run([*given, "--no-browser"]) == code
    shown = capsys.readouterr()
    assert text in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_console_needs_http_but_no_tokens(tmp_path: Path, capsys: Capture) -> None:
    with Daemon(tmp_path / "a") as none:
        assert run(["--url", none.url, "console", "--no-browser"]) == 2
    assert "tickwheel serve --http" in capsys.readouterr().err
    with Daemon(tmp_path / "b", http=True) as open_to_all:
        assert run(["--url", open_to_all.url, "console", "--no-browser"]) == 0
        assert capsys.readouterr().out.strip() == f"{open_to_all.http}/console/"


@pytest.mark.parametrize(
    ("http", "address", "found"),
    [
        ("http://127.0.0.1:7356", "tcp://h:1", "http://127.0.0.1:7356"),
        ("http://0.0.0.0:7356", "tcp://node-3:7355", "http://node-3:7356"),
        ("http://[::]:7356", "tcp://[fe80::1]:7355", "http://[fe80::1]:7356"),
        ("http://0.0.0.0:7356", "tcp://0.0.0.0:7355", "http://127.0.0.1:7356"),
    ],
)
def test_console_address_is_reachable_from_the_client(http: str, address: str, found: str) -> None:
    status: Any = SimpleNamespace(raw={"http": http}, address=address)
    assert console.address_of(status) == found


def test_console_refuses_a_daemon_without_an_http_address() -> None:
    status: Any = SimpleNamespace(raw={}, address="tcp://h:1")
    with pytest.raises(BadRequest):
        console.address_of(status)
