"""The border inside every command: before it has changed anything, what goes wrong is about what a
client sent and is answered; behind it, a failure leaves a change half done, and memory is the
truth: that must end the daemon.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from tickwheel.errors import InternalError, TickwheelError

if TYPE_CHECKING:
    from tickwheel.engine.engine import Engine

OnEvent = Callable[[str, str], None]


class Border:
    """``begin`` each command, ``act`` when it has been checked and changes something from there
    on, ``contain`` what it raised and should not have."""

    def __init__(self, engine: Engine, on_event: OnEvent) -> None:
        self._engine = engine
        self._on_event = on_event
        self._acting = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception that has to stop the daemon."""
        # One that comes after the first is of no interest.
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())

    def begin(self) -> None:
        """Begin a command, which has changed nothing yet."""
        self._acting = False

    def act(self) -> Engine:
        """The engine, for a command that may change something from here on."""
        self._acting = True
        return self._engine

    def fail(self, error: BaseException) -> None:
        """Stop the daemon: something broke that must not be survived."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def run(
        self, what: str, act: Callable[[], None], refuse: Callable[[TickwheelError], None]
    ) -> None:
        """Begin a command that has waited, and ``refuse`` what it raises."""
        self.begin()
        try:
            act()
        except TickwheelError as error:
            refuse(error)
        except Exception as error:
            refuse(self.contain(what, error))

    def contain(self, what: str, error: Exception) -> TickwheelError:
        """The answer to a command that failed in a way it should not before it changed anything;
        it is logged with its traceback. Raises ``error``, and fails, if it did change something."""
        if self._acting:
            self.fail(error)
            raise error
        return self.survive(what, error)

    def survive(self, what: str, error: Exception) -> TickwheelError:
        """The answer where something failed that changes nothing: what reads, or says an answer. It
        is logged with its traceback."""
        self.report(what, error)
        return InternalError(f"{type(error).__name__}: the daemon's log says more")

    def report(self, what: str, error: Exception) -> None:
        """Log an error that is survived and should not have been."""
        text = "".join(traceback.format_exception(error))
        self._on_event("internal_error", f"{what}: {text}")
