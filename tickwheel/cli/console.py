"""``tickwheel console``: the daemon's console in a browser, logged in by a link that works once.

The link's code is in no command line: others on the machine could read it there. The browser gets
a file that only its user may read, which leads to the link.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import urllib.error
import urllib.request
import webbrowser
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from tickwheel.cli.call import Call
from tickwheel.client.trust import Trust, explain
from tickwheel.errors import BY_CODE, BadRequest, InternalError, TickwheelError, Unreachable

if TYPE_CHECKING:
    from tickwheel.client import Status

TIMEOUT_S = 10.0
KEEP_S = 5.0
"""How long, in seconds, the browser has for the file that leads to the link."""
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # what a daemon says that listens on all addresses
PAGE = """<!doctype html>
<meta charset="utf-8"><title>Tickwheel</title><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}"><a href="{url}">To the console</a>
"""


async def console(
    call: Call,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Where the daemon answers HTTP. Default: it says so itself."
        ),
    ] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only show the link; it works once, for a minute.")
    ] = False,
) -> None:
    """Open the console in a browser, logged in with the token of this command."""
    if http is None:
        async with call.client(retries=0) as client:
            http = address_of(await client.status())
    token = call.token or os.environ.get("TICKWHEEL_TOKEN")
    said = await asyncio.to_thread(_link, http.rstrip("/"), token)
    code, until_ms = said["code"], said["until_ms"]
    url = f"{http.rstrip('/')}/console/{f'#login={code}' if code else ''}"
    if no_browser or not await _opened(url):
        _show(call, url, until_ms)


def _show(call: Call, url: str, until_ms: int | None) -> None:
    if call.out.as_json:
        call.out.record({"url": url, "until_ms": until_ms})
        return
    call.out.line(url)
    if until_ms is not None:
        until = datetime.fromtimestamp(until_ms / 1000, UTC).astimezone()
        call.out.remark(f"it logs in once, until {until:%H:%M:%S}")


def address_of(status: Status) -> str:
    """The URL of the daemon's console, as seen from here. Raises BadRequest."""
    http = status.raw.get("http")
    if not http:
        raise BadRequest(
            "the daemon answers no HTTP: start it with --http 127.0.0.1:7356, or name its address"
            " with --http"
        )
    parts = urlsplit(str(http))
    if parts.hostname in EVERYWHERE:
        host = urlsplit(status.address or "").hostname or "127.0.0.1"
        host = "127.0.0.1" if host in EVERYWHERE else host
        shown = f"[{host}]" if ":" in host else host
        return f"{parts.scheme}://{shown}:{parts.port}"
    return str(http)


def _link(http: str, token: str | None) -> dict[str, Any]:
    """Ask the daemon for a login link. Raises what it answers, Unreachable, BadRequest."""
    if urlsplit(http).scheme not in ("http", "https"):
        raise BadRequest(f"--http must be http://HOST:PORT, not {http!r:.60}")
    context = Trust().context() if http.startswith("https:") else None
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    request = urllib.request.Request(  # noqa: S310  # its scheme was looked at
        f"{http}/v1/session-links", b"", headers, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as response:  # noqa: S310
            found: dict[str, Any] = json.load(response)
            return found
    except urllib.error.HTTPError as error:
        with error:
            raise _problem(error) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, OSError):
            why = explain(reason)
            raise type(why)(f"{http}: {why.message}") from None
        raise Unreachable(f"{http}: {reason}") from None


def _problem(error: urllib.error.HTTPError) -> TickwheelError:
    try:
        said = json.load(error)
        return BY_CODE.get(said["code"], InternalError)(str(said["detail"]))
    except (ValueError, KeyError, TypeError):
        return Unreachable(f"{error.url} answered {error.code}: is it a daemon's console?")


async def _opened(url: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="tickwheel-console-") as folder:  # its user's alone
        page = Path(folder) / "open.html"
        page.write_text(PAGE.format(url=escape(url)), "utf-8")
        if not await asyncio.to_thread(webbrowser.open, page.as_uri()):
            return False
        await asyncio.sleep(KEEP_S)
    return True
