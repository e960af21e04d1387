"""Where daemons listen: ``tcp://a:7355,b:7355`` as a list of (host, port); with ``tls://`` all of
them speak TLS. No I/O."""

from __future__ import annotations

from tickwheel.api.frames import DEFAULT_PORT
from tickwheel.errors import BadRequest

DEFAULT_URL = f"tcp://127.0.0.1:{DEFAULT_PORT}"
PLAIN, SECURE = "tcp://", "tls://"

Address = tuple[str, int]


def parse_url(url: str) -> list[Address]:
    """Every address of ``url``, in order; the scheme may stand before each, a port may be left out.

    Raises BadRequest naming what cannot be read.
    """
    if not isinstance(url, str):
        raise BadRequest(f"url must be text like {DEFAULT_URL}, not {url!r:.60}")
    parts = [part.strip() for part in url.split(",")]
    if len({_is_secure(part) for part in parts if "://" in part or part is parts[0]}) > 1:
        raise BadRequest(f"url {url!r:.200}: either all of it is {SECURE}, or nothing")
    return [_parse(part, url) for part in parts]


def is_secure(url: str) -> bool:
    """Whether the daemons of the URL speak TLS."""
    return _is_secure(url.strip())


def url_of(address: Address, *, secure: bool) -> str:
    """The URL of one address."""
    return f"{SECURE if secure else PLAIN}{shown(address)}"


def _is_secure(part: str) -> bool:
    return part.startswith(SECURE)


def shown(address: Address) -> str:
    """An address as it stands in a URL; IPv6 addresses are in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse(part: str, url: str) -> Address:
    scheme, mark, rest = part.rpartition("://")
    if mark and scheme + mark not in (PLAIN, SECURE):
        raise BadRequest(f"url {url!r:.200}: {scheme}:// is not spoken, only {PLAIN} and {SECURE}")
    rest = rest.rstrip("/")
    if rest.startswith("["):
        host, bracket, port = rest[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise BadRequest(f"url {url!r:.200}: {part!r:.60} has no closing bracket")
        port = port[1:]
    else:
        host, _, port = rest.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536)):
        raise BadRequest(
            f"url {url!r:.200}: {part!r:.60} must be {PLAIN}HOST:PORT with a port of 1 to 65535"
        )
    return host, int(port) if port else DEFAULT_PORT
