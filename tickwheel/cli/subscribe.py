"""Those who take tasks: ``tickwheel subscribe`` prints what comes due, or hands each task to a
command; ``consumers`` lists who is connected.

Order of ``subscribe``: a task is printed (or its command has run) before it is acked, so that a
crash in between repeats it and never loses it. Acks of what was only printed are not waited for one
by one; all of them are before the command ends. ``--exec`` runs one command for one delivery: the
body on its stdin, the verdict by its exit code. Meanwhile, and with ``--no-ack``, the lease is
extended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, Unpack, cast

from tickwheel.api.words import AckWord
from tickwheel.cli.bodies import stored_fields, stored_text
from tickwheel.cli.call import Call, Default
from tickwheel.cli.options import (
    GroupOption,
    GroupOptions,
    LimitOption,
    RetryOption,
    TopicOption,
    argument,
    complete_groups,
    complete_topics,
    duration,
    flag,
    group_keywords,
    option,
    retry_of,
)
from tickwheel.cli.output import (
    Column,
    Listing,
    ago,
    column,
    count_columns,
    fields_of,
    format_duration,
    format_time,
    printable,
    remark,
    text_columns,
)
from tickwheel.client import Client, ConsumerInfo, Delivery, Subscription
from tickwheel.client.leases import Leases
from tickwheel.client.subscription import settle_failed
from tickwheel.errors import BadBody, BadRequest, Forbidden, TickwheelError, Undecodable

PREFETCH_DEFAULT = 256
PREFETCH_MAX = 65_535
LEASE_DEFAULT_S = 30.0
LEASE_S_MIN = 0.1
GROUP_DEFAULT = "default"
MANUAL = "manual"
ACKS = (MANUAL, "on_delivery")


class DeliveryOptions(TypedDict, total=False):
    """How tasks are delivered, and what becomes of each."""

    no_ack: Annotated[bool, flag("Look only: hold each until the end, then give it back.")]
    exec_: Annotated[
        str | None,
        option(
            "Run CMD (by sh) for each: body on stdin, TICKWHEEL_ID, _TOPIC, _ATTEMPT, _DUE_MS"
            " in the environment. Exit 0 acks, anything else is a nack with the code as reason.",
            "CMD",
        ),
    ]
    prefetch: Annotated[
        int | None,
        option("Unsettled tasks at a time. Default: 256; with --exec 1.", min=1, max=PREFETCH_MAX),
    ]
    lease: Annotated[
        float | None,
        duration(
            "After this long without an ack a task is delivered again. Default: 30s. "
            "Kept up while a command runs."
        ),
    ]
    retry: RetryOption
    ack: Annotated[
        str,
        option(
            "on_delivery: at most once. The daemon is through with a task before it sends it.",
            "manual|on_delivery",
        ),
        Default(MANUAL),
    ]
    broadcast: Annotated[
        bool, flag("All that comes due while this runs, whoever else gets it; no retry.")
    ]


class SubscribeOptions(DeliveryOptions, GroupOptions):
    """How tasks are delivered, and what holds for a group that is made by this."""


async def subscribe(
    call: Call,
    topic: Annotated[
        str, argument("TOPIC", "Whose tasks to receive.", autocompletion=complete_topics)
    ],
    group: Annotated[
        str | None,
        option(
            "Each group gets every task; its members share them. One that is not there is"
            " made, and stays. [default: default]",
            autocompletion=complete_groups,
        ),
    ] = None,
    max_: Annotated[int | None, option("End after so many.", "N", min=1)] = None,
    **options: Unpack[SubscribeOptions],
) -> None:
    """Receive tasks as they come due, and ack them. Ctrl-C ends it cleanly.

    --retry is the group's policy from then on, unless it has another one. --tags and --where
    are the filter of a group that is made by this, and what --order-… and --fair-by with its limits
    say holds for it; one that is there must have the same.
    """
    ack, broadcast = options.get("ack", MANUAL), options.get("broadcast", False)
    _check(options, ack)
    settles = ack == MANUAL and not broadcast
    if not settles:
        kind = "--broadcast" if broadcast else f"--ack {ack}"
        _check_settled(kind, {"group": group if broadcast else None, **options})
    cmd = options.get("exec_")
    receiver = Receiver(call, cmd, no_ack=options.get("no_ack", False), settles=settles)
    credit = options.get("prefetch") or (1 if cmd is not None else PREFETCH_DEFAULT)
    of_group = {name: it for name, it in options.items() if name in GroupOptions.__optional_keys__}
    keywords: dict[str, Any] = {"prefetch": min(credit, max_ or credit), "broadcast": broadcast}
    keywords |= group_keywords(cast("GroupOptions", of_group))
    if not broadcast:
        keywords |= {"group": group or GROUP_DEFAULT, "ack": ack}
    if settles:
        lease_s = options.get("lease", LEASE_DEFAULT_S)
        keywords |= {"lease": lease_s, "retry": retry_of(options.get("retry"))}
    stop = _stop_on_signals()
    async with call.client() as client:
        if group is not None and not broadcast:
            await _say_if_new(client, topic, group)
        async with client.subscribe(topic, **keywords) as deliveries:
            _show_log()
            await receiver.run(deliveries, max_, stop)


async def _say_if_new(client: Client, topic: str, group: str) -> None:
    """Remark that a group is new: one by a typing error would keep every task for ever."""
    try:
        known = (await client.stats()).topics.get(topic)
    except Forbidden:
        return  # a token that may consume need not be one that may look
    if known is None or group not in known.groups:
        remark(
            f"makes the group {group} of topic {topic}: it keeps what is due until somebody acks"
            f" it, also when this has ended; `tickwheel groups delete {topic} {group}` ends it"
        )


def _check(options: DeliveryOptions, ack: str) -> None:
    lease = options.get("lease")
    if "no_ack" in options and "exec_" in options:
        raise BadRequest("--no-ack and --exec exclude each other")
    if lease is not None and lease < LEASE_S_MIN:
        raise BadRequest(f"--lease is {lease} s; {LEASE_S_MIN} s is the least")
    if ack not in ACKS:
        raise BadRequest(f"--ack is {ack!r:.40}; known are {', '.join(ACKS)}")


def _check_settled(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse options about acks where the daemon waits for none."""
    for name in ("group", "no_ack", "lease", "retry"):
        if options.get(name) is not None:
            what = f"--{name.replace('_', '-')}"
            raise BadRequest(f"{what} has no meaning with {kind}: nothing is delivered again")


class _Remarks(logging.Handler):
    """Shows what the client logs, such as a lost connection, as remarks."""

    def emit(self, record: logging.LogRecord) -> None:
        remark(record.getMessage())


def _show_log() -> None:
    """Show the client's log from now on. A failure to connect, before, is reported by itself."""
    logging.getLogger("tickwheel.client").addHandler(_Remarks(logging.WARNING))


def _stop_on_signals() -> asyncio.Event:
    """An event that the first SIGINT or SIGTERM sets; a second one ends things the hard way."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and main is not None:
            main.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stop


class Receiver:
    """Prints or executes each delivery, and acks or holds it."""

    def __init__(self, call: Call, cmd: str | None, *, no_ack: bool, settles: bool) -> None:
        """``settles``: whether deliveries are to be acked; else each task was over before it
        came."""
        self._out = call.out
        self._no_ack = no_ack
        self._settles = settles
        self._cmd = cmd
        self._leases: Leases | None = None
        self._acks: set[asyncio.Future[AckWord]] = set()
        self._failed: BaseException | None = None

    async def run(self, deliveries: Subscription, max_: int | None, stop: asyncio.Event) -> None:
        """Handle deliveries until ``max_`` were handled, the stream ends, or ``stop`` is set."""
        handled = 0
        if self._settles:
            self._leases = deliveries.keep_leases()
        try:
            while (max_ is None or handled < max_) and self._failed is None:
                delivery = await _next(deliveries, stop)
                if delivery is None:
                    break
                await self._handle(delivery)
                handled += 1
        finally:
            # Also after a failure half way, for example when nobody reads what is printed.
            await self._release_held()
            await asyncio.gather(*self._acks, return_exceptions=True)
        if self._failed is not None:
            raise self._failed

    async def _handle(self, delivery: Delivery) -> None:
        if self._leases is None:
            await self._handle_settled(delivery)
            return
        # No callback for a lost lease: the result of the late ack or nack says it.
        self._leases.hold(delivery, lambda word: None)
        try:
            _ = delivery.body
        except Undecodable as error:
            self._leases.drop(delivery)
            await settle_failed(delivery, error)
            remark(f"task {delivery.id}: {error.code}: {error}")
            if not isinstance(error, BadBody):
                self._failed = error
            return
        if self._no_ack:
            self._print(delivery)
        elif self._cmd is None:
            self._print(delivery)
            self._leases.drop(delivery)
            self._ack(delivery)
        else:
            # With --json the command's own output must not stand between the objects.
            done = await execute(self._cmd, delivery, output_to_stderr=self._out.as_json)
            self._leases.drop(delivery)
            if done.exit_code == 0:
                result: str = await delivery.ack()
            else:
                result = await delivery.nack(reason=reason_of(done))
            self._print(delivery, done, result)

    async def _handle_settled(self, delivery: Delivery) -> None:
        done = None
        if self._cmd is not None:
            done = await execute(self._cmd, delivery, output_to_stderr=self._out.as_json)
        self._print(delivery, done, "done")

    async def _release_held(self) -> None:
        """Release the deliveries that are held, which costs no attempts."""
        held = self._leases.close() if self._leases is not None else []
        # A release that fails is no loss: the lease ends by itself.
        await asyncio.gather(*(d.release() for d in held), return_exceptions=True)

    def _ack(self, delivery: Delivery) -> None:
        def confirmed(future: asyncio.Future[AckWord]) -> None:
            self._acks.discard(future)
            error = None if future.cancelled() else future.exception()
            if isinstance(error, TickwheelError) and error.retryable:
                # Its task comes again, to whoever is there: no reason to receive nothing more.
                remark(f"task {delivery.id}: its ack has no answer: {error}")
            elif self._failed is None:
                self._failed = error

        ack = delivery.ack_nowait()
        self._acks.add(ack)
        ack.add_done_callback(confirmed)

    def _print(
        self, delivery: Delivery, done: Execution | None = None, result: str | None = None
    ) -> None:
        if self._out.as_json:
            fields = delivery_fields(delivery)
            if done is not None:
                fields |= {"exit_code": done.exit_code, "result": result}
            self._out.record(fields)
        elif done is None:
            self._out.line(delivery_line(delivery))
        elif done.exit_code != 0:
            self._out.remark(f"task {delivery.id}: {reason_of(done)} ({result})")


async def _next(deliveries: AsyncIterator[Delivery], stop: asyncio.Event) -> Delivery | None:
    """The next delivery; None: there will be none."""
    coming = asyncio.ensure_future(anext(deliveries, None))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if coming.done() and not stop.is_set():
            return coming.result()
        return None
    finally:
        # What came in the moment of stopping was not started: closing the stream releases it.
        for task in (coming, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(coming, stopping, return_exceptions=True)


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Execution:
    """How a command ended; a negative code is the number of the signal that ended it."""

    exit_code: int


def reason_of(done: Execution) -> str:
    """The reason of a failure, for the task's record."""
    if done.exit_code >= 0:
        return f"exit code {done.exit_code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-done.exit_code).name}"
    return f"signal {-done.exit_code}"


def environment(delivery: Delivery) -> dict[str, str]:
    """The environment of the command: it says what a delivery has beside its body."""
    return {
        **os.environ,
        "TICKWHEEL_ID": str(delivery.id),
        "TICKWHEEL_TOPIC": delivery.topic,
        "TICKWHEEL_ATTEMPT": str(delivery.attempt),
        "TICKWHEEL_FAILURES": str(delivery.failures),
        "TICKWHEEL_DUE_MS": str(delivery.due_ms),
    }


async def execute(cmd: str, delivery: Delivery, *, output_to_stderr: bool) -> Execution:
    """Run ``sh -c CMD`` to its end. Cancelled: the command and its children are killed.

    It has a process group of its own, so that Ctrl-C lets it finish what it has begun.
    """
    process = await asyncio.create_subprocess_shell(
        cmd,
        stdin=asyncio.subprocess.PIPE,
        stdout=sys.stderr.fileno() if output_to_stderr else None,
        env=environment(delivery),
        start_new_session=True,
    )
    try:
        await process.communicate(delivery.body)
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    assert process.returncode is not None
    return Execution(process.returncode)


# --- deliveries for people and as JSON -----------------------------------------------------------


def delivery_fields(delivery: Delivery) -> dict[str, object]:
    """A delivery in the form of ``--json``."""
    names = (
        "topic", "group", "due_ms", "delivered_ms", "attempt", "failures", "key", "tag", "priority",
    )  # fmt: skip
    return {
        "id": str(delivery.id),
        **{name: getattr(delivery, name) for name in names},
        **_body_fields(delivery),
        "replay_of": None if delivery.replay_of is None else str(delivery.replay_of),
        "properties": dict(delivery.properties or {}),
    }


def _body_fields(delivery: Delivery) -> dict[str, Any]:
    fields = stored_fields(delivery.topic, delivery._item[3], delivery.encoding)
    return {name: it for name, it in fields.items() if it is not None}


def delivery_line(delivery: Delivery) -> str:
    """One delivery for people: when, how late, which, what."""
    late = format_duration((delivery.delivered_ms - delivery.due_ms) / 1000)
    again = f"  attempt {delivery.attempt}" if delivery.attempt > 1 else ""
    if delivery.replay_of is not None:
        again = f"  replay of {delivery.replay_of}{again}"
    body = stored_text(delivery.topic, delivery._item[3], delivery.encoding, None)
    return f"{format_time(delivery.delivered_ms)}  +{late:<7}  {delivery.id}{again}  {body}"


# --- consumers -----------------------------------------------------------------------------------

BROADCAST = "(broadcast)"
"""Shown in place of the group of a broadcast subscription, which has none."""


async def consumers(
    call: Call, topic: TopicOption = None, group: GroupOption = None, limit: LimitOption = None
) -> None:
    """Who is connected and takes tasks: each subscription, and each pull that waits."""
    await call.listed(
        limit,
        lambda client, most: client.list_consumers(topic=topic, group=group, limit=most),
        Listing.of(call.out, CONSUMERS, fields_of, "nobody takes such tasks at the moment", SPARE),
    )


CONSUMERS = (
    Column[ConsumerInfo]("host", lambda one: printable(one.host or one.address)),
    column("pid", right=True), column("topic"),
    Column[ConsumerInfo]("group", lambda one: BROADCAST if one.group is None else one.group),
    *count_columns("in_flight", "prefetch"), column("connected", "since_ms", ago),
    column("by", "kind"), *text_columns("client", "version"),
)  # fmt: skip
SPARE = ("version", "client", "by")
