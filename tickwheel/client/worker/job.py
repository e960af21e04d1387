"""One delivery in a handler: run, watched, and settled by how it ended.

Invariants: a delivery that the handler settled itself is left alone; nothing is acked whose lease
was lost; whatever goes wrong is logged and never ends the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tickwheel.client.autoack import reason_of
from tickwheel.client.delivery import Delivery
from tickwheel.client.times import Duration
from tickwheel.client.worker.outcomes import Reject, RetryLater
from tickwheel.client.worker.routes import Route
from tickwheel.client.worker.threads import Call, Threads
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from tickwheel.client.worker.leases import Leases

LOGGER = logging.getLogger("tickwheel.worker")
LOGGER.addHandler(logging.NullHandler())  # heard only where the application sets logging up


class Outcome(NamedTuple):
    """What is to become of the delivery."""

    verb: str
    reason: str | None = None
    delay: Duration | None = None


class Job:
    """From the moment a delivery is handed out until it is settled."""

    def __init__(self, route: Route, delivery: Delivery, leases: Leases, threads: Threads) -> None:
        self.delivery = delivery
        self.ack: asyncio.Future[str] | None = None
        """On its way, when the job has ended."""
        self._route = route
        self._leases = leases
        self._threads = threads
        self._call: Call | None = None
        self._lost: str | None = None
        self._stopped = False
        self._settling = False
        leases.hold(delivery, self._lose)
        self.task = asyncio.get_running_loop().create_task(self._run(), name=repr(delivery))

    def stop(self) -> None:
        """Cancel the handler; the delivery is given back, and the attempt does not count."""
        if not self._settling and not self._stopped:
            self._stopped = True
            self.task.cancel()

    def when_free(self, then: Callable[[], None]) -> None:
        """Call ``then`` when nothing of it runs any more: a thread may outlive its job."""
        if self._call is None or self._call.ended.done():
            then()
        else:
            LOGGER.warning("%r: its function still runs in a thread", self.delivery)
            self._call.ended.add_done_callback(lambda _: then())

    def _lose(self, word: str) -> None:
        self._lost = word
        LOGGER.warning("%r: its lease was lost (%s); it is not acked", self.delivery, word)
        self.task.cancel()

    async def _run(self) -> None:
        try:
            outcome = await self._handle()
            self._settling = True
            self._leases.drop(self.delivery)
            if self._lost is None and not self.delivery.settled:
                await self._settle(outcome)
        except TickwheelError as error:  # the lease ends by itself, and the task comes again
            LOGGER.warning("%r was not settled: %s: %s", self.delivery, error.code, error.message)
        finally:
            self._leases.drop(self.delivery)

    # --- the handler ----------------------------------------------------------------------------

    async def _handle(self) -> Outcome:
        try:
            async with asyncio.timeout(self._route.timeout_s) as limit:
                await self._work()
        except asyncio.CancelledError as error:
            return self._cancelled(error)
        except Reject as error:
            LOGGER.info("%r was rejected: %s", self.delivery, error)
            return Outcome("reject", error.reason)
        except RetryLater as error:
            LOGGER.info("%r is to come again: %s", self.delivery, error)
            return Outcome("nack", error.reason, error.delay)
        except Exception as error:
            if limit.expired() and isinstance(error, TimeoutError):
                reason = f"timed out after {self._route.timeout_s:g} s"
                LOGGER.warning("%r %s", self.delivery, reason)
            else:
                reason = reason_of(error)
                LOGGER.warning("%r failed: %s", self.delivery, reason, exc_info=error)
            return Outcome("nack", reason)
        return Outcome("ack")

    async def _work(self) -> None:
        if self._route.is_async:
            await cast(Any, self._route.handler(self.delivery))
        else:
            self._call = self._threads.start(self._route.handler, self.delivery)
            await self._call.result

    def _cancelled(self, error: asyncio.CancelledError) -> Outcome:
        if self._lost is not None:
            return Outcome("nothing")
        if self._stopped:
            self.task.uncancel()
            LOGGER.warning("%r was stopped before it was done", self.delivery)
            return Outcome("release")
        if self.task.cancelling():  # somebody else's doing: the event loop ends
            raise error
        LOGGER.warning("%r failed: its handler was cancelled from within", self.delivery)
        return Outcome("nack", reason_of(error))

    # --- its end --------------------------------------------------------------------------------

    async def _settle(self, outcome: Outcome) -> None:
        delivery, (verb, reason, delay) = self.delivery, outcome
        if verb == "ack":
            self.ack = delivery.ack_nowait()
            self.ack.add_done_callback(self._acked)
            return
        word = "nothing"
        if verb == "nack":
            word = await delivery.nack(delay, reason)
        elif verb == "reject":
            word = await delivery.reject(reason)
        elif verb == "release":
            word = await delivery.release()
        if word == "dead":
            LOGGER.error("%r is a dead letter: %s", delivery, reason)
        else:
            LOGGER.debug("%r: %s", delivery, word)

    def _acked(self, ack: asyncio.Future[str]) -> None:
        if not ack.cancelled() and ack.exception() is None and ack.result() != "acked":
            LOGGER.info("%r: its ack was answered %s", self.delivery, ack.result())
