"""Environment variables of the daemon and of clients.

The daemon's variables are its settings; all other names are declared here. Unknown names that begin
with ``TICKWHEEL_`` are refused. An empty variable counts as unset. This module needs only the
standard library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Final

from tickwheel.errors import BadRequest

PREFIX: Final = "TICKWHEEL_"
CLIENT: Final = ("URL", "TOKEN", "CA", "CLIENT_CERT", "CLIENT_KEY", "KEYS_FILE")
"""Variables of clients and of the command line."""
OTHERS: Final = (
    "CLASS_CACHE", "TEST_CLOCK", "FAILPOINTS", "FAILPOINTS_LOG", "RELOADED",
    "ID", "TOPIC", "ATTEMPT", "FAILURES", "DUE_MS",
    "CLIENT", "TIMEOUT", "HANDLERS",
)  # fmt: skip
"""Variables of reports, of tests, of ``--reload`` and of commands run by ``subscribe --exec``, and
Flask settings that applications can take from the environment."""
KNOWN: Final = frozenset(f"{PREFIX}{name}" for name in (*CLIENT, *OTHERS))
SURROUNDING: Final = frozenset(
    f"{PREFIX}{name}" for name in ("DIR", "HOME", "IMAGE", "ROOT", "TAG", "USER", "VENV", "VERSION")
)
"""Variables of scripts and images that are used with the product. The product ignores them."""
_BARE: Final = (*CLIENT, *OTHERS)
NEAR: Final = 0.85
"""If the settings are unavailable, an unknown name is refused whose similarity to a client's
variable, from 0 to 1, is at least this."""
_LINK: Final = re.compile(
    r"TICKWHEEL_(?:[A-Z0-9_]+?_)??"
    r"(?:(?P<host>SERVICE_HOST|PORT_\d+_(?:TCP|UDP|SCTP)_ADDR)"
    r"|(?P<port>SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT_\d+_(?:TCP|UDP|SCTP)_PORT)"
    r"|(?P<url>PORT(?:_\d+_(?:TCP|UDP|SCTP))?)"
    r"|(?P<proto>PORT_\d+_(?:TCP|UDP|SCTP)_PROTO))"
)
_LINKED: Final = {
    "host": re.compile(r"[0-9a-fA-F.:]+|None"),
    "port": re.compile(r"\d+"),
    "url": re.compile(r"(?:tcp|udp|sctp)://\S+:\d+"),
    "proto": re.compile(r"tcp|udp|sctp"),
}
"""Pattern of the values that Kubernetes sets, by kind of variable."""


def value(name: str) -> str | None:
    """Return the value of a variable, or None if it is empty or not set."""
    return os.environ.get(name) or None


def check(settings: Callable[[], Iterable[str] | None]) -> None:
    """Raise BadRequest for an unknown variable that begins with ``TICKWHEEL_``.

    ``settings`` returns the names of the daemon's settings, which are also variables, or None if
    the daemon is not installed. It is called only if a name is not declared here.
    """
    names: frozenset[str] | None = None
    for name, text in os.environ.items():
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper in KNOWN or upper in SURROUNDING:
            continue
        if _is_link(upper, text):
            continue
        if names is None:
            setting_names = settings()
            if setting_names is None:
                # The common prefix would make any two names similar.
                if get_close_matches(upper.removeprefix(PREFIX), _BARE, n=1, cutoff=NEAR):
                    raise unknown("environment variable", name, upper, KNOWN)
                continue
            names = KNOWN | {f"{PREFIX}{setting.upper()}" for setting in setting_names}
        if upper not in names:
            raise unknown("environment variable", name, upper, names)


def unknown(what: str, name: str, near: str, known: Iterable[str]) -> BadRequest:
    """Return the error for an unknown name, which suggests the known name closest to ``near``."""
    matches = get_close_matches(near, sorted(known), n=1)
    hint = f"; did you mean {matches[0]}?" if matches else ""
    return BadRequest(f"there is no {what} {name}{hint}")


def _is_link(name: str, text: str) -> bool:
    """Return whether Kubernetes set the variable, for a Service named ``tickwheel…``."""
    match = _LINK.fullmatch(name)
    kind = None if match is None else match.lastgroup
    return kind is not None and _LINKED[kind].fullmatch(text) is not None
