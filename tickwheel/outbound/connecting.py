"""Every connection that a target opens can be checked at the very address that it goes to.

A check before the name is looked up would be about another address than the one that is connected
to, and brokers name further brokers. So it sits where all libraries upon asyncio meet: at the
event loop's ``sock_connect``. It holds for what runs in the context of ``checked``, and in tasks
begun there; other connections of the process, such as the one to the daemon, are left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from tickwheel.errors import BadRequest, Forbidden, shown

Check = Callable[[str], object]
"""Is given the address that a connection is about to go to; raises when it must not."""

_CHECK: ContextVar[Check | None] = ContextVar("tickwheel_outbound_check", default=None)
_MARK: Final = "_tickwheel_checks"


@contextmanager
def checked(check: Check | None) -> Iterator[None]:
    """Check each connection that is opened in this context; None: check none. Raises BadRequest on
    an event loop that connects without its ``sock_connect``, as uvloop does."""
    if check is not None:
        _watch(asyncio.get_running_loop())
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def _watch(loop: asyncio.AbstractEventLoop) -> None:
    if not isinstance(loop, asyncio.BaseEventLoop):
        raise BadRequest(
            f"connections are checked on asyncio's own event loop only, not on {type(loop)!r}"
        )
    if hasattr(loop, _MARK):
        return
    connect = loop.sock_connect

    async def sock_connect(sock: Any, address: Any) -> None:
        check = _CHECK.get()
        if check is not None:
            if not isinstance(address, tuple):
                raise Forbidden(f"a target is reached by an address, not by {shown(address)}")
            check(str(address[0]))
        await connect(sock, address)

    setattr(loop, "sock_connect", sock_connect)  # noqa: B010  # a method, for type checkers
    setattr(loop, _MARK, True)
