"""``Runner``, a subscriber that sends deliveries to a target and settles them by its outcomes.

    runner = Runner(client, "orders.close", "warehouse", target_of("redis://host/0?stream=orders"))
    await runner.run()                        # until it is cancelled, or ``stop`` is called

A lane takes all waiting deliveries as one batch, sends and settles them, and takes the next batch.
There is no timer, so batches grow with the load. A batch that fails is sent again on a new
connection. If that fails, each delivery of the batch is sent alone, because a single one may cause
the failure; deliveries that still fail are nacked and follow the group's retry policy. If the
target is unreachable or raises ``NotNow``, the batch's unsent deliveries are released without
counting a failure. The runner connects only for a batch, with a growing pause before each retry.

Invariants: a delivery is acked only after the target has confirmed it. At most ``concurrency``
batches are being sent at a time, and their leases are extended. One attempt to connect runs at a
time. After ``run`` the subscription has ended, the target is closed, and unsent deliveries are
released.

The address of every connection that a target opens can be checked. A check before the name is
resolved could see a different address than the connection uses, and a broker can refer the client
to other brokers. Therefore the check is in the event loop's ``sock_connect``, which all asyncio
libraries use. It applies inside ``checked`` and to tasks that are created there, but not to other
connections of the process, such as that to the daemon.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tickwheel.client.client import Client
from tickwheel.client.delivery import Delivery
from tickwheel.client.subscription import REASON_CHARACTERS_MAX
from tickwheel.errors import BadRequest, Forbidden, TickwheelError, shown
from tickwheel.outbound.target import NotNow, Outcome, Target, error_text
from tickwheel.waiting import cancel_all

if TYPE_CHECKING:
    from tickwheel.client.leases import InHand, Leases
    from tickwheel.client.subscription import Subscription

Check = Callable[[str], object]
"""Receives the address of a connection before it is opened. Raises an error to forbid it."""

_CHECK: ContextVar[Check | None] = ContextVar("tickwheel_outbound_check", default=None)
_MARK: Final = "_tickwheel_checks"


@contextmanager
def checked(check: Check | None) -> Iterator[None]:
    """Check each connection that is opened in this context, unless ``check`` is None.

    Raise BadRequest on an event loop that does not use its ``sock_connect``, such as uvloop."""
    if check is not None:
        _watch(asyncio.get_running_loop())
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def _watch(loop: asyncio.AbstractEventLoop) -> None:
    if not isinstance(loop, asyncio.BaseEventLoop):
        raise BadRequest(f"check= needs asyncio's own event loop, not {type(loop)!r}")
    if hasattr(loop, _MARK):
        return
    connect = loop.sock_connect

    async def sock_connect(sock: Any, address: Any) -> None:
        check = _CHECK.get()
        if check is not None:
            if not isinstance(address, tuple):
                raise Forbidden(f"a target must have an IP address, not {shown(address)}")
            check(str(address[0]))
        await connect(sock, address)

    setattr(loop, "sock_connect", sock_connect)  # noqa: B010  # a method, for type checkers
    setattr(loop, _MARK, True)


LOGGER = logging.getLogger("tickwheel.outbound")
LOGGER.addHandler(logging.NullHandler())

OnSettled = Callable[[Delivery, Outcome, str], object]
"""Called with a delivery, its outcome and the daemon's answer. For an ack the answer is always
"acked", because the runner does not wait for the daemon."""

CONNECT_S: Final = 10.0
"""Maximum seconds of an attempt to connect."""
PAUSE_S: Final = 0.1
PAUSE_MAX_S: Final = 5.0
"""Pause before the second attempt to connect, in seconds; it doubles with each further attempt, up
to the maximum."""
ALONE_MAX: Final = 3
"""Consecutive failures of single deliveries after which the target is considered to be failing."""
GRACE_S: Final = 10.0
"""Maximum seconds for running batches after ``stop``."""
RELEASE_ANSWER_S: Final = 3.0
"""Maximum seconds to wait for the daemon's answers at the end."""


class Runner:
    """Sends the deliveries of one group to one target. It runs once.

    ``prefetch`` is the maximum number of unsettled deliveries (default: two batches for each
    concurrent ``send``, or the daemon's limit if it is lower). ``on_settled`` is called for each
    settled delivery. ``check``: see ``checked``. ``bytes_max`` returns the bytes of bodies, waiting
    and in batches, at which no further deliveries are requested.
    """

    def __init__(
        self,
        client: Client,
        topic: str,
        group: str,
        target: Target,
        *,
        prefetch: int | None = None,
        on_settled: OnSettled | None = None,
        check: Check | None = None,
        bytes_max: Callable[[], int] | None = None,
    ) -> None:
        self.topic, self.group = topic, group
        self.is_connected = False
        self.trouble: str | None = None
        """Why the target is unreachable or refuses batches; None while it accepts them."""
        self.tries = 0
        """Number of failed attempts to connect or send since the last accepted batch."""
        self.batches = 0
        """Number of accepted batches."""
        self._target = target
        self._client = client
        self._on_settled = on_settled
        self._check = check
        if prefetch is None:
            prefetch = min(2 * target.batch_max * target.concurrency, client.limits.prefetch_max)
        self._subscription: Subscription = client.subscribe(topic, group=group, prefetch=prefetch)
        if bytes_max is not None:
            self._subscription.has_room = lambda waiting: waiting + self.sending_bytes < bytes_max()
        self._leases: Leases | None = None
        self.sending_bytes = 0
        """Bytes of the bodies in ``_under_way``."""
        self._under_way: dict[int, list[Delivery]] = {}
        """Unsettled batches, by the identity of their lists."""
        self._lost_deliveries: set[int] = set()
        """Identities of the deliveries in ``_under_way`` that have lost their leases."""
        self._connections = 0
        """Number of connections so far, from which a lane learns that another has reconnected."""
        self._connecting: asyncio.Task[str | None] | None = None
        self._changing = asyncio.Lock()
        """Held while the target connects or closes."""
        self._lanes: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._began = False

    # --- start and stop -------------------------------------------------------------------------

    async def run(self) -> None:
        """Send deliveries until ``stop``, cancellation or the end of the client.

        Raise the daemon's error if it refuses the subscription or deletes the group (NotFound)."""
        if self._began:
            raise BadRequest("this runner has already run; create a new one")
        self._began = True
        try:
            if self._stopping.is_set():
                return
            await self._subscription.start()
            self._leases = self._subscription.keep_leases(self._in_hand)
            with checked(self._check):
                self._lanes = [
                    asyncio.create_task(self._lane()) for _ in range(self._target.concurrency)
                ]
            await self._all_lanes()
        finally:
            try:
                await self._shut_down()
            finally:
                self._ended.set()

    async def _all_lanes(self) -> None:
        try:
            await asyncio.gather(*self._lanes)
        except asyncio.CancelledError:
            # ``stop`` cancels lanes whose batches take too long, but not this task.
            if _is_cancelled() or not self._stopping.is_set():
                raise

    async def stop(self) -> None:
        """Stop taking deliveries, wait for running batches, and return after ``run`` has ended.

        It can be called at any time."""
        self._stopping.set()
        if not self._began:
            return
        await self._subscription.close()
        if self._lanes:
            _, unfinished = await asyncio.wait(self._lanes, timeout=GRACE_S)
            for lane in unfinished:
                lane.cancel()
        await self._ended.wait()

    async def _shut_down(self) -> None:
        self._stopping.set()
        tasks = [*self._lanes, *([] if self._connecting is None else [self._connecting])]
        await cancel_all(tasks)
        await self._close_target()
        with suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_ANSWER_S):
                await self._give_back()
                await self._subscription.close()
                await self._client.flush_acks()
        if self._leases is not None:
            self._leases.close()

    async def _give_back(self) -> None:
        """Release unsettled deliveries. They may have been sent, and will be sent again."""
        unsettled = [d for batch in self._under_way.values() for d in batch if not d.settled]
        self._under_way.clear()
        await asyncio.gather(*(d.release() for d in unsettled), return_exceptions=True)

    # --- batches --------------------------------------------------------------------------------

    async def _lane(self) -> None:
        async for batch in self._subscription.batches(self._target.batch_max):
            self._under_way[id(batch)] = batch
            size_bytes = sum(len(delivery.raw[3]) for delivery in batch)
            self.sending_bytes += size_bytes
            assert self._leases is not None, "the runner is running"
            self._leases.begin()
            if await self._forward(batch):
                del self._under_way[id(batch)]
                self.sending_bytes -= size_bytes

    async def _forward(self, batch: list[Delivery]) -> bool:
        """Send a batch and settle it. Return False if the runner stopped before sending it."""
        was_well = self.tries == 0  # a failure of another lane does not change it
        problem = unreachable_reason = await self._connect()
        if unreachable_reason is None:
            problem = await self._send(batch)
        if problem is not None and was_well:
            # The target may have closed an idle connection, which is not a failure.
            problem = unreachable_reason = await self._connect()
            if unreachable_reason is None:
                problem = await self._send(batch)
        if problem is None:
            return True
        if unreachable_reason is not None:
            return await self._put_off(batch, unreachable_reason)
        if len(batch) > 1:
            return await self._forward_each(batch)
        return await self._nack_failed(batch, problem)

    async def _forward_each(self, batch: list[Delivery]) -> bool:
        """Send each delivery of a failed batch alone, because a single one may cause the failure.

        After ``ALONE_MAX`` consecutive failures, assume that the target is the cause, and release
        the rest."""
        failures = 0
        for index, delivery in enumerate(batch):
            unreachable_reason = await self._connect()
            if unreachable_reason is not None:
                return await self._put_off(batch[index:], unreachable_reason)
            problem = await self._send([delivery])
            failures = 0 if problem is None else failures + 1
            if problem is None:
                continue
            if not await self._nack_failed([delivery], problem):
                return False
            if failures == ALONE_MAX:
                return await self._put_off(batch[index + 1 :], problem)
        return True

    async def _nack_failed(self, batch: list[Delivery], problem: str) -> bool:
        """Nack failed deliveries. If the runner is stopping, return False; they are released."""
        return await self._settle_unsent(batch, Outcome("retry", reason=problem))

    async def _put_off(self, batch: list[Delivery], problem: str) -> bool:
        """Release unsent deliveries. Return False if the runner is stopping."""
        return await self._settle_unsent(batch, Outcome("later", reason=problem))

    async def _settle_unsent(self, batch: list[Delivery], outcome: Outcome) -> bool:
        if self._stopping.is_set():
            return False
        await self._settle(batch, [outcome] * len(batch))
        return True

    async def _send(self, batch: list[Delivery]) -> str | None:
        """Send a batch and settle it by its outcomes. If this fails, return the reason."""
        connection = self._connections
        try:
            outcomes = _one_each(await self._target.send(batch), batch)
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancelled():
                raise
            problem = error_text(error)
            self._note(problem, error)
            if connection == self._connections and self.is_connected:
                self.is_connected = False
                await self._close_target()
            if not isinstance(error, NotNow):
                return problem
            put_off = [Outcome("later", reason=problem)] * len(batch)
            await self._settle(batch, _one_each(error.outcomes or put_off, batch))
            return None
        self.tries, self.trouble = 0, None
        self.batches += 1
        await self._settle(batch, outcomes)
        return None

    async def _settle(self, batch: Sequence[Delivery], outcomes: Sequence[Outcome]) -> None:
        leases, on_settled = self._leases, self._on_settled
        assert leases is not None, "the runner is running"
        asking = []
        for delivery, outcome in zip(batch, outcomes, strict=True):
            leases.drop(delivery)
            self._lost_deliveries.discard(id(delivery))
            if outcome[0] == "ack":
                delivery.ack_unwatched()
                if on_settled is not None:
                    on_settled(delivery, outcome, "acked")
            else:
                asking.append(self._settle_and_report(delivery, outcome))
        if asking:
            await asyncio.gather(*asking)

    async def _settle_and_report(self, delivery: Delivery, outcome: Outcome) -> None:
        try:
            answer = await _settle_without_ack(delivery, outcome)
        except (
            TickwheelError
        ) as error:  # the lease will expire, and the task will be delivered again
            LOGGER.warning("%r was not settled: %s: %s", delivery, error.code, error.message)
            answer = "unsettled"
        if answer == "dead":
            LOGGER.error("%r is a dead letter: %s", delivery, outcome.reason)
        if self._on_settled is not None:
            self._on_settled(delivery, outcome, answer)

    def _in_hand(self) -> Iterator[InHand]:
        for batch in self._under_way.values():
            for delivery in batch:
                if not delivery.settled and id(delivery) not in self._lost_deliveries:
                    yield delivery, delivery.lease_until_s, partial(self._lose, delivery)

    def _lose(self, delivery: Delivery, answer: str) -> None:
        # The delivery is still acked once the target confirms it, because the first ack counts.
        self._lost_deliveries.add(id(delivery))
        LOGGER.warning("%r lost its lease while it was being sent (%s)", delivery, answer)

    # --- the connection -------------------------------------------------------------------------

    async def _connect(self) -> str | None:
        """Connect if necessary, in one attempt for all lanes. If this fails, return the reason."""
        if self.is_connected:
            return None
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._try())
        return await asyncio.shield(self._connecting)

    async def _try(self) -> str | None:
        try:
            if self.tries:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _pause_s(self.tries))
            if self._stopping.is_set():
                return "the forwarder is stopping"
            try:
                async with self._changing, asyncio.timeout(CONNECT_S):
                    await self._target.connect()
            except (Exception, asyncio.CancelledError) as error:
                if _is_cancelled():
                    raise
                problem = error_text(error)
                self._note(problem, error)
                await self._close_target()
                return problem
            self._connections += 1
            self.is_connected = True
            return None
        finally:
            self._connecting = None

    def _note(self, problem: str, error: BaseException) -> None:
        if self.trouble != problem:
            LOGGER.warning("%s, group %s: the target failed: %s", self.topic, self.group, problem)
            LOGGER.debug("the target failed", exc_info=error)
        self.tries += 1
        self.trouble = problem

    async def _close_target(self) -> None:
        self.is_connected = False
        try:
            async with self._changing, asyncio.timeout(CONNECT_S):
                await self._target.close()
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancelled():
                raise
            LOGGER.info("the target was not closed: %s", error_text(error))


def _one_each(outcomes: Sequence[Outcome], batch: Sequence[Delivery]) -> Sequence[Outcome]:
    if len(outcomes) != len(batch):
        raise RuntimeError(
            f"the target returned {len(outcomes)} outcomes for {len(batch)} deliveries"
        )
    return outcomes


def _is_cancelled() -> bool:
    """Return whether the current task was cancelled.

    Libraries also raise CancelledError when they give up an operation, which is a failure."""
    me = asyncio.current_task()
    return me is not None and me.cancelling() > 0


def _pause_s(tries: int) -> float:
    most_s = min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(tries - 1, 16))
    return most_s * random.uniform(0.5, 1.0)


async def _settle_without_ack(delivery: Delivery, outcome: Outcome) -> str:
    """Settle a delivery that is not acked. Return the daemon's answer."""
    kind, delay_s, reason = outcome
    reason = None if reason is None else reason[:REASON_CHARACTERS_MAX]
    answer: str
    if kind == "reject":
        answer = await delivery.reject(reason)
    elif kind == "later" and delay_s is None:
        answer = await delivery.release()
    elif kind == "later" and delay_s is not None:
        answer = await delivery.snooze(delay_s)
        if answer == "too_often":
            answer = await delivery.nack(delay_s, f"postponed too often; {reason or ''}")
    else:
        answer = await delivery.nack(delay_s, reason)
    return answer
