"""``Runner``: a subscriber that hands what comes due to a target, and settles it by its answers.

    runner = Runner(client, "orders.close", "warehouse", target_of("redis://host/0?stream=orders"))
    await runner.run()                        # until it is cancelled, or ``stop`` is called

A lane takes what is there, as one batch, sends it, settles it, and takes what has come meanwhile:
there is no timer, batches grow with the load. What has failed with a connection is sent once more
on a new one. When that fails as well, each of the batch is sent alone, because one of them may be
what the target fails at; what fails then goes back by the group's retry policy. A target that
cannot be reached, or that refuses with ``NotNow``, costs no task an attempt: what it has not taken
is released. Before each further try to connect there is a pause, which grows, and all that comes
due meanwhile waits in the daemon, untouched.

Invariants: nothing is acked before the target has said so; at most ``concurrency`` batches are
under way; leases are kept up while a batch is; there is one try to connect at a time; after ``run``
the subscription is over, the target is closed, and what was not sent is given back.

Every connection that a target opens can be checked at the very address that it goes to. A check
before the name is looked up would be about another address than the one that is connected to, and
brokers name further brokers. So it sits where all libraries upon asyncio meet: at the event loop's
``sock_connect``. It holds for what runs in the context of ``checked``, and in tasks begun there;
other connections of the process, such as the one to the daemon, are left alone.
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
from tickwheel.outbound.target import NotNow, Outcome, Target, why

if TYPE_CHECKING:
    from tickwheel.client.leases import InHand, Leases
    from tickwheel.client.subscription import Subscription

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


LOGGER = logging.getLogger("tickwheel.outbound")
LOGGER.addHandler(logging.NullHandler())

OnSettled = Callable[[Delivery, Outcome, str], object]
"""Called with a delivery, what the target made of it, and the daemon's word for that; of an ack,
for whose answer nobody waits, "acked"."""

CONNECT_S: Final = 10.0
"""How long, in seconds, one try to connect may take."""
PAUSE_S: Final = 0.1
PAUSE_MAX_S: Final = 5.0
"""Seconds before the second try to connect, which double with each further one, and their most."""
ALONE_MAX: Final = 3
"""So many deliveries in a row that fail one by one are not to blame: their target is."""
GRACE_S: Final = 10.0
"""How long, in seconds, batches under way may take after ``stop``."""
GIVE_BACK_S: Final = 3.0
"""How long, in seconds, the daemon may take to answer at the end."""


class Runner:
    """Hands the deliveries of one group to one target. It runs once.

    ``prefetch``: deliveries that may be here unsettled (default: two batches for each ``send``
    that may be under way). ``on_settled`` is called with each. ``check``: see ``checked``.
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
    ) -> None:
        self.topic, self.group = topic, group
        self.is_connected = False
        self.trouble: str | None = None
        """Why the target could not be reached, or did not take a batch; None: it does."""
        self.tries = 0
        """Tries to connect and to send that have failed since the last batch was taken."""
        self.batches = 0
        """How many batches the target has taken."""
        self._target = target
        self._client = client
        self._on_settled = on_settled
        self._check = check
        least = target.batch_max * target.concurrency
        self._subscription: Subscription = client.subscribe(
            topic, group=group, prefetch=2 * least if prefetch is None else prefetch
        )
        self._leases: Leases | None = None
        self._under_way: dict[int, list[Delivery]] = {}
        """The batches that were taken and are not settled, by the identity of their lists."""
        self._lost: set[int] = set()
        """Which of their deliveries have no lease any more, by their identity."""
        self._connections = 0
        """How many connections there were: of two lanes that lose one, the first closes it."""
        self._connecting: asyncio.Task[str | None] | None = None
        self._changing = asyncio.Lock()
        """Held while the target connects or closes: it does one of them at a time."""
        self._lanes: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._began = False

    # --- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Forward until ``stop``, a cancel, or the end of the client. Raises what the daemon
        objects to: at the start, or later, when the group is deleted (NotFound)."""
        if self._began:
            raise BadRequest("a runner runs once; make a new one")
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
                await self._end()
            finally:
                self._ended.set()

    async def _all_lanes(self) -> None:
        try:
            await asyncio.gather(*self._lanes)
        except asyncio.CancelledError:
            # ``stop`` cancels lanes whose batches take too long: that is no cancel of this task.
            if _is_cancelled() or not self._stopping.is_set():
                raise

    async def stop(self) -> None:
        """Take no more, let the batches under way end, and return when ``run`` is over. Harmless
        at any time."""
        self._stopping.set()
        if not self._began:
            return
        await self._subscription.close()
        if self._lanes:
            _, late = await asyncio.wait(self._lanes, timeout=GRACE_S)
            for lane in late:
                lane.cancel()
        await self._ended.wait()

    async def _end(self) -> None:
        self._stopping.set()
        tasks = [*self._lanes, *([] if self._connecting is None else [self._connecting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._close_target()
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S):
                await self._give_back()
                await self._subscription.close()
                await self._client._flush_acks()
        if self._leases is not None:
            self._leases.close()

    async def _give_back(self) -> None:
        """Release what was taken and not settled: it may have been sent, and goes out again."""
        left = [one for batch in self._under_way.values() for one in batch if not one.settled]
        self._under_way.clear()
        await asyncio.gather(*(one.release() for one in left), return_exceptions=True)

    # --- batches --------------------------------------------------------------------------------

    async def _lane(self) -> None:
        async for batch in self._subscription.batches(self._target.batch_max):
            self._under_way[id(batch)] = batch
            assert self._leases is not None, "it runs"
            self._leases.begin()
            if await self._forward(batch):
                del self._under_way[id(batch)]

    async def _forward(self, batch: list[Delivery]) -> bool:
        """Send a batch and settle it; False: the runner stops, and it was not sent."""
        problem = away = await self._connect()
        if away is None:
            problem = await self._send(batch)
        if problem is not None and self.tries == 1:
            # A connection that was idle may have been closed long ago, which is nobody's failure.
            problem = away = await self._connect()
            if away is None:
                problem = await self._send(batch)
        if problem is None:
            return True
        if away is not None:
            return await self._put_off(batch, away)
        if len(batch) > 1:
            return await self._forward_each(batch)
        return await self._failed(batch, problem)

    async def _forward_each(self, batch: list[Delivery]) -> bool:
        """Send each delivery of a batch that has failed alone: what the target fails at may be one
        of them, and shall not take the others along. When ``ALONE_MAX`` in a row have failed, it is
        the target, and the rest is put off."""
        failures = 0
        for at, delivery in enumerate(batch):
            away = await self._connect()
            if away is not None:
                return await self._put_off(batch[at:], away)
            problem = await self._send([delivery])
            failures = 0 if problem is None else failures + 1
            if problem is None:
                continue
            if not await self._failed([delivery], problem):
                return False
            if failures == ALONE_MAX:
                return await self._put_off(batch[at + 1 :], problem)
        return True

    async def _failed(self, batch: list[Delivery], problem: str) -> bool:
        """Nack what could not be sent; False: the runner stops, and it goes back as it is."""
        return await self._settle_unsent(batch, Outcome("retry", reason=problem))

    async def _put_off(self, batch: list[Delivery], problem: str) -> bool:
        """Release what the target has not taken; False: the runner stops, and it goes back."""
        return await self._settle_unsent(batch, Outcome("later", reason=problem))

    async def _settle_unsent(self, batch: list[Delivery], outcome: Outcome) -> bool:
        if self._stopping.is_set():
            return False
        await self._settle(batch, [outcome] * len(batch))
        return True

    async def _send(self, batch: list[Delivery]) -> str | None:
        """Send a batch and settle it by the target's answers; else why that was not possible."""
        connection = self._connections
        try:
            outcomes = _one_each(await self._target.send(batch), batch)
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancelled():
                raise
            problem = why(error)
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
        leases, told = self._leases, self._on_settled
        assert leases is not None, "it runs"
        asking = []
        for delivery, outcome in zip(batch, outcomes, strict=True):
            leases.drop(delivery)
            self._lost.discard(id(delivery))
            if outcome[0] == "ack":
                delivery.ack_unwatched()
                if told is not None:
                    told(delivery, outcome, "acked")
            else:
                asking.append(self._give_up(delivery, outcome))
        if asking:
            await asyncio.gather(*asking)

    async def _give_up(self, delivery: Delivery, outcome: Outcome) -> None:
        try:
            word = await _settled(delivery, outcome)
        except TickwheelError as error:  # the lease ends by itself, and the task comes again
            LOGGER.warning("%r was not settled: %s: %s", delivery, error.code, error.message)
            word = "unsettled"
        if word == "dead":
            LOGGER.error("%r is a dead letter: %s", delivery, outcome.reason)
        if self._on_settled is not None:
            self._on_settled(delivery, outcome, word)

    def _in_hand(self) -> Iterator[InHand]:
        for batch in self._under_way.values():
            for delivery in batch:
                if not delivery.settled and id(delivery) not in self._lost:
                    yield delivery, delivery.lease_until_s, partial(self._lose, delivery)

    def _lose(self, delivery: Delivery, word: str) -> None:
        # It is acked all the same when the target has it: the ack of whoever is first counts.
        self._lost.add(id(delivery))
        LOGGER.warning("%r: its lease was lost while it was under way (%s)", delivery, word)

    # --- the connection -------------------------------------------------------------------------

    async def _connect(self) -> str | None:
        """Connect, if there is no connection; else why there is none. Lanes share one try."""
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
                return "the forwarder stops"
            try:
                async with self._changing, asyncio.timeout(CONNECT_S):
                    await self._target.connect()
            except (Exception, asyncio.CancelledError) as error:
                if _is_cancelled():
                    raise
                problem = why(error)
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
            LOGGER.warning("%s, group %s: the target fails: %s", self.topic, self.group, problem)
            LOGGER.debug("the target fails", exc_info=error)
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
            LOGGER.info("the target was not closed: %s", why(error))


def _one_each(outcomes: Sequence[Outcome], batch: Sequence[Delivery]) -> Sequence[Outcome]:
    if len(outcomes) != len(batch):
        raise RuntimeError(f"{len(outcomes)} outcomes of {len(batch)} deliveries")
    return outcomes


def _is_cancelled() -> bool:
    """Whether the present task was cancelled itself. Libraries give up by cancelling, too: then
    what they were asked to do has failed."""
    me = asyncio.current_task()
    return me is not None and me.cancelling() > 0


def _pause_s(tries: int) -> float:
    most_s = min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(tries - 1, 16))
    return most_s * random.uniform(0.5, 1.0)


async def _settled(delivery: Delivery, outcome: Outcome) -> str:
    """Settle a delivery in another way than by an ack. Returns the daemon's word."""
    settled, delay_s, reason = outcome
    reason = None if reason is None else reason[:REASON_CHARACTERS_MAX]
    word: str
    if settled == "reject":
        word = await delivery.reject(reason)
    elif settled == "later" and delay_s is None:
        word = await delivery.release()
    elif settled == "later" and delay_s is not None:
        word = await delivery.snooze(delay_s)
        if word == "too_often":
            word = await delivery.nack(delay_s, f"postponed too often; {reason or ''}")
    else:
        word = await delivery.nack(delay_s, reason)
    return word
