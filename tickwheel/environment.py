"""Environment variables of the product, for daemon and clients alike.

Those of the daemon are its settings; every other name is declared here. A name that begins with
``TICKWHEEL_`` and is none of them is a mistake, and is refused. An empty variable counts as one
that is not set. Needs the standard library only.
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
"""Variables of reports, of tests, of ``--reload``, of what ``subscribe --exec`` runs, and settings
of Flask, which applications may take from the environment."""
KNOWN: Final = frozenset(f"{PREFIX}{name}" for name in (*CLIENT, *OTHERS))
SURROUNDING: Final = frozenset(
    f"{PREFIX}{name}" for name in ("DIR", "HOME", "IMAGE", "ROOT", "TAG", "USER", "VENV", "VERSION")
)
"""Variables that scripts and images around the product set for themselves; nothing reads them."""
_BARE: Final = (*CLIENT, *OTHERS)
NEAR: Final = 0.85
"""How near a name is to that of a client to be refused where the settings are not known."""
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
"""Kind of a variable → what Kubernetes writes into it."""


def value(name: str) -> str | None:
    """Return the value of a variable; None when it is empty or not set."""
    return os.environ.get(name) or None


def check(settings: Callable[[], Iterable[str] | None]) -> None:
    """Refuse names that begin as ours do and that nothing reads. Raises BadRequest.

    ``settings`` returns the daemon's settings, which are variables as well; None: they are not
    known here, because the daemon is not installed. It is asked only about names that no client
    has.
    """
    known: frozenset[str] | None = None
    for name, text in os.environ.items():
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper in KNOWN or upper in SURROUNDING:
            continue
        if _is_link(upper, text):
            continue
        if known is None:
            more = settings()
            if more is None:
                # Without what all names begin with, which would make any two of them near.
                if get_close_matches(upper.removeprefix(PREFIX), _BARE, n=1, cutoff=NEAR):
                    raise unknown("environment variable", name, upper, KNOWN)
                continue
            known = KNOWN | {f"{PREFIX}{one.upper()}" for one in more}
        if upper not in known:
            raise unknown("environment variable", name, upper, known)


def unknown(what: str, name: str, near: str, known: Iterable[str]) -> BadRequest:
    """Return the refusal of a name that is not among those that are known."""
    found = get_close_matches(near, sorted(known), n=1)
    meant = f"; did you mean {found[0]}?" if found else ""
    return BadRequest(f"there is no {what} {name}{meant}")


def _is_link(name: str, text: str) -> bool:
    """Whether Kubernetes has made the variable, for a Service whose name begins as ours."""
    found = _LINK.fullmatch(name)
    kind = None if found is None else found.lastgroup
    return kind is not None and _LINKED[kind].fullmatch(text) is not None
