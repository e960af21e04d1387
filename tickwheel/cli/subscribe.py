"""Commands that receive or observe tasks: ``subscribe`` prints due tasks, or passes each to a
command; ``peek`` and ``subscribe --no-ack`` only show tasks; ``consumers`` lists the connected
consumers; ``work`` runs a worker that a program defines.

``subscribe`` prints a task (or runs its command) before it acks the task, so that a crash in
between repeats it and never loses it. Acks of printed tasks are not awaited one by one, but all are
awaited before the command ends. ``--exec`` runs one command for each delivery, with the body on its
stdin; its exit code settles the delivery. The lease is extended meanwhile.

``peek`` never touches a group. It follows a topic by a broadcast subscription, which owns nothing
and begins before the first listing, so that no task is missed.

``work`` shows what its worker does. On a terminal it redraws one line on stderr four times a
second, below the program's output and log. With ``--json`` it writes a line of JSON to stdout for
each finished delivery, and the program's output goes to stderr. Otherwise it only logs. An error
while the program is imported is reported on one line with its place; an exception of a handler is
logged, and becomes a nack.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack, cast

import typer

from tickwheel.api.frames import AckWord
from tickwheel.cli.call import Call, Default, given
from tickwheel.cli.declared import listed
from tickwheel.cli.options import (
    GroupOptions,
    LimitOption,
    RetryOption,
    argument,
    complete_groups,
    complete_topics,
    duration,
    flag,
    group_keywords,
    one_of,
    option,
)
from tickwheel.cli.output import (
    Column,
    Listing,
    ago,
    column,
    count_columns,
    format_count,
    format_duration,
    format_time,
    printable,
    remark,
    stored_fields,
    stored_text,
    text_columns,
)
from tickwheel.cli.tasks import COLUMNS, task_fields, task_line
from tickwheel.client import Client, ConsumerInfo, Delivery, Subscription, TaskInfo
from tickwheel.client.delivery import unpack_aside
from tickwheel.client.leases import Leases
from tickwheel.client.subscription import settle_failed
from tickwheel.client.worker import Worker
from tickwheel.contrib.workers import RELOAD_GRACE_S, is_child, load_worker, set_up_log, supervise
from tickwheel.errors import BadBody, BadRequest, NotFound, TickwheelError, Undecodable
from tickwheel.log_writer import END_S, unblock_stderr, unblocked, writer_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PREFETCH_DEFAULT = 256
PREFETCH_MAX = 65_535
LEASE_DEFAULT_S = 30.0
LEASE_S_MIN = 0.1
GROUP_DEFAULT = "default"
MANUAL = "manual"
ACKS = (MANUAL, "on_delivery")


class DeliveryOptions(TypedDict, total=False):
    """How to deliver tasks, and what to do with each."""

    no_ack: Annotated[
        bool,
        flag("Only show tasks, like `tickwheel peek --follow`: no group, no lease, no effect."),
    ]
    exec_: Annotated[
        str | None,
        option(
            "Run CMD (by sh) for each task: body on stdin, TICKWHEEL_ID, _TOPIC, _ATTEMPT, _DUE_MS"
            " in the environment. Exit code 0 acks; any other is a nack with the code as reason.",
            "CMD",
        ),
    ]
    prefetch: Annotated[
        int | None,
        option("Maximum unsettled tasks. Default: 256; with --exec 1.", min=1, max=PREFETCH_MAX),
    ]
    lease: Annotated[
        float | None,
        duration(
            "Time without an ack after which a task is delivered again. Default: 30s."
            " Extended while a command runs."
        ),
    ]
    retry: RetryOption
    ack: Annotated[
        str,
        one_of(ACKS, "on_delivery: at most once. The daemon finishes a task before it sends it."),
        Default(MANUAL),
    ]
    broadcast: Annotated[
        bool,
        flag("Receive every task that comes due while this runs, in addition to groups; no retry."),
    ]


class SubscribeOptions(DeliveryOptions, GroupOptions):
    """How to deliver tasks, and the settings of a group that is created."""


async def subscribe(
    call: Call,
    topic: Annotated[
        str | None, argument("TOPIC", "Topic to receive from.", autocompletion=complete_topics)
    ] = None,
    named: Annotated[
        str | None, option("Instead of TOPIC.", "TOPIC", "--topic", autocompletion=complete_topics)
    ] = None,
    group: Annotated[
        str | None,
        option(
            "The group: each group gets every task, and its members share them. A new group is"
            " created, and stays. [default: default]",
            autocompletion=complete_groups,
        ),
    ] = None,
    max_: Annotated[int | None, option("End after this number of tasks.", "N", min=1)] = None,
    **options: Unpack[SubscribeOptions],
) -> None:
    """Receive tasks as they come due, and ack them. Ctrl-C ends it cleanly.

    --retry sets the policy of a group that has none. --tags and --where set the filter of a new
    group, --order-…, --fair-by and its limits the other settings; an existing group must have the
    same settings.
    """
    if topic is not None and named is not None:
        raise BadRequest("give either TOPIC or --topic")
    topic = named if topic is None else topic
    if topic is None:
        raise BadRequest("give the topic as TOPIC or --topic")
    ack, broadcast = options.get("ack", MANUAL), options.get("broadcast", False)
    lease_s = options.get("lease", LEASE_DEFAULT_S)
    if lease_s is not None and lease_s < LEASE_S_MIN:
        raise BadRequest(f"--lease must be at least {LEASE_S_MIN} s, not {lease_s} s")
    if "no_ack" in options and "exec_" in options:
        raise BadRequest("--no-ack cannot be combined with --exec")
    if options.get("no_ack"):
        others = {name: value for name, value in options.items() if name != "no_ack"}
        others |= {"group": group, "ack": None if ack == MANUAL else ack}
        _refuse(others, "--no-ack, which uses no group")
        await _look(call, topic, {"due": True}, max_)
        return
    settles = ack == MANUAL and not broadcast
    if not settles:
        kind = "--broadcast" if broadcast else f"--ack {ack}"
        pointless = {name: options.get(name) for name in ("lease", "retry")}
        pointless["group"] = group if broadcast else None
        _refuse(pointless, f"{kind}: nothing is redelivered")
    cmd = options.get("exec_")
    receiver = Receiver(call, cmd, settles=settles)
    credit = options.get("prefetch") or (1 if cmd is not None else PREFETCH_DEFAULT)
    group_options = {n: v for n, v in options.items() if n in GroupOptions.__annotations__}
    keywords: dict[str, Any] = {"prefetch": min(credit, max_ or credit), "broadcast": broadcast}
    keywords |= group_keywords(cast("GroupOptions", group_options))
    if not broadcast:
        keywords |= {"group": GROUP_DEFAULT if group is None else group, "ack": ack}
    if settles:
        keywords |= {"lease": lease_s, "retry": options.get("retry")}
    stop = _stop_on_signals()
    async with call.client() as client, client.subscribe(topic, **keywords) as deliveries:
        if (new := deliveries.new_group) is not None:
            remark(new.describe(deliveries.topic, deliveries.group))
        _show_log()
        await receiver.run(deliveries, max_, stop)


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Raise BadRequest if an option is given that has no effect with others."""
    for name, value in options.items():
        if value is not None:
            option_name = f"--{name.rstrip('_').replace('_', '-')}"
            raise BadRequest(f"{option_name} has no effect with {why}")


async def peek(
    call: Call,
    topic: Annotated[str, argument("TOPIC", "Topic to show.", autocompletion=complete_topics)],
    key: Annotated[str | None, option("Only tasks with this key.")] = None,
    due: Annotated[bool, flag("Only tasks that are due.")] = False,
    newest_first: Annotated[bool, flag("Show the highest id first.")] = False,
    follow: Annotated[
        bool, flag("Only tasks that are due, and then each as it comes due, until Ctrl-C.")
    ] = False,
    limit: LimitOption = None,
) -> None:
    """Show the undelivered tasks of a topic, without any effect.

    Shows the tasks with their bodies in the order of ids. No group is created, no task is leased,
    and no attempt is counted. Exit code 4 if the topic does not exist.
    """
    query: dict[str, Any] = {"key": key, "due": due or follow, "newest_first": newest_first}
    if follow:
        await _look(call, topic, query, limit)
        return
    listing = Listing(call.out, COLUMNS, task_fields)

    async def look(client: Client, count_max: int | None) -> AsyncIterator[TaskInfo]:
        is_empty = True
        async for info in client.peek(topic, **query, limit=count_max):
            is_empty = False
            yield info
        if is_empty and topic not in (await client.stats()).topics:
            raise NotFound(f"there is no topic {topic!r:.255}")

    await call.listed(limit, look, listing)


async def _look(call: Call, topic: str, query: Mapping[str, Any], max_: int | None) -> None:
    """Show a topic's due tasks, then each as it comes due, at most ``max_`` tasks."""
    out, key, stop = call.out, query.get("key"), _stop_on_signals()
    seen: set[int] = set()
    async with call.client() as client, client.subscribe(topic, broadcast=True) as broadcasts:
        _show_log()
        async for info in client.peek(topic, **query, limit=max_):
            if stop.is_set():
                return
            seen.add(info.id)
            out.result(task_fields(info), task_line(info))
        shown = len(seen)
        while max_ is None or shown < max_:
            delivery = await _next(broadcasts, stop)
            if delivery is None:
                return
            if delivery.id in seen or key not in (None, delivery.key):
                continue
            out.result(delivery_fields(delivery), delivery_line(delivery))
            shown += 1


class _Remarks(logging.Handler):
    """Shows the client's log, such as a lost connection, as remarks."""

    def emit(self, record: logging.LogRecord) -> None:
        remark(record.getMessage())


def _show_log() -> None:
    """Show the client's log from now on. An earlier failure to connect is reported separately."""
    logging.getLogger("tickwheel.client").addHandler(_Remarks(logging.WARNING))


def _stop_on_signals() -> asyncio.Event:
    """Return an event that the first SIGINT or SIGTERM sets; a second one cancels the command."""
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
    """Prints or executes each delivery, and settles it."""

    def __init__(self, call: Call, cmd: str | None, *, settles: bool) -> None:
        """``settles``: whether to ack deliveries; if not, each task was finished before it was
        sent."""
        self._out = call.out
        self._settles = settles
        self._cmd = cmd
        self._leases: Leases | None = None
        self._acks: set[asyncio.Future[AckWord]] = set()
        self._failed: BaseException | None = None

    async def run(self, deliveries: Subscription, max_: int | None, stop: asyncio.Event) -> None:
        """Handle deliveries until ``max_`` are handled, the stream ends, or ``stop`` is set."""
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
            # Also after a failure, for example when the reader of the output has gone. A release
            # counts no attempt. It may fail: the lease ends by itself.
            held = self._leases.close() if self._leases is not None else []
            await asyncio.gather(*(delivery.release() for delivery in held), return_exceptions=True)
            await asyncio.gather(*self._acks, return_exceptions=True)
        if self._failed is not None:
            raise self._failed

    async def _handle(self, delivery: Delivery) -> None:
        if self._leases is None:
            code = None if self._cmd is None else await self._execute(self._cmd, delivery)
            self._print(delivery, code, "done")
            return
        # A lost lease needs no callback: the answer to the late ack or nack reports it.
        self._leases.hold(delivery, lambda word: None)
        await unpack_aside(delivery)
        try:
            _ = delivery.body
        except Undecodable as error:
            self._leases.drop(delivery)
            await settle_failed(delivery, error)
            remark(f"task {delivery.id}: {error.code}: {error}")
            if not isinstance(error, BadBody):
                self._failed = error
            return
        if self._cmd is None:
            self._print(delivery)
            self._leases.drop(delivery)
            self._ack(delivery)
            return
        exit_code = await self._execute(self._cmd, delivery)
        self._leases.drop(delivery)
        if exit_code == 0:
            result: str = await delivery.ack()
        else:
            result = await delivery.nack(reason=reason_of(exit_code))
        self._print(delivery, exit_code, result)

    async def _execute(self, cmd: str, delivery: Delivery) -> int:
        # With --json the command's output must not be mixed with the objects.
        return await execute(cmd, delivery, output_to_stderr=self._out.as_json)

    def _ack(self, delivery: Delivery) -> None:
        def confirmed(future: asyncio.Future[AckWord]) -> None:
            self._acks.discard(future)
            error = None if future.cancelled() else future.exception()
            if isinstance(error, TickwheelError) and error.retryable:
                # The task will be delivered again: keep receiving.
                remark(f"task {delivery.id}: its ack was not answered: {error}")
            elif self._failed is None:
                self._failed = error

        ack = delivery.ack_nowait()
        self._acks.add(ack)
        ack.add_done_callback(confirmed)

    def _print(
        self, delivery: Delivery, code: int | None = None, result: str | None = None
    ) -> None:
        """Print a delivery. ``code``: the exit code of its command."""
        if self._out.as_json:
            fields = delivery_fields(delivery)
            if code is not None:
                fields |= {"exit_code": code, "result": result}
            self._out.record(fields)
        elif code is None:
            self._out.line(delivery_line(delivery))
        elif code != 0:
            self._out.remark(f"task {delivery.id}: {reason_of(code)} ({result})")


async def _next(deliveries: AsyncIterator[Delivery], stop: asyncio.Event) -> Delivery | None:
    """Return the next delivery; None at the end of the stream or when ``stop`` is set."""
    upcoming = asyncio.ensure_future(anext(deliveries, None))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({upcoming, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if upcoming.done() and not stop.is_set():
            return upcoming.result()
        return None
    finally:
        # Closing the stream releases a delivery that arrived while stopping.
        for task in (upcoming, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(upcoming, stopping, return_exceptions=True)


# --- commands ------------------------------------------------------------------------------------


def reason_of(code: int) -> str:
    """Return the reason of a failure for the task's record."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


async def execute(cmd: str, delivery: Delivery, *, output_to_stderr: bool) -> int:
    """Run ``sh -c CMD`` to its end. Return its exit code, negative for a signal. A cancellation
    kills the command and its children.

    The environment has the delivery's fields except its body. The command has a separate process
    group, so that it can finish after Ctrl-C.
    """
    names = ("id", "topic", "attempt", "failures", "due_ms")
    variables = {f"TICKWHEEL_{name.upper()}": str(getattr(delivery, name)) for name in names}
    process = await asyncio.create_subprocess_shell(
        cmd,
        stdin=asyncio.subprocess.PIPE,
        stdout=sys.stderr.fileno() if output_to_stderr else None,
        env={**os.environ, **variables},
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
    return process.returncode


# --- deliveries for people and as JSON -----------------------------------------------------------


def delivery_fields(delivery: Delivery) -> dict[str, object]:
    """Return a delivery for ``--json``."""
    names = (
        "topic", "group", "due_ms", "delivered_ms", "attempt", "failures", "key", "tag", "priority",
    )  # fmt: skip
    return {
        "id": str(delivery.id),
        **{name: getattr(delivery, name) for name in names},
        **given(stored_fields(delivery.topic, delivery.raw[3], delivery.encoding, whole=True)),
        "replay_of": None if delivery.replay_of is None else str(delivery.replay_of),
        "properties": dict(delivery.properties or {}),
    }


def delivery_line(delivery: Delivery) -> str:
    """Format a delivery on one line: time, lateness, id, attempt and body."""
    late = format_duration((delivery.delivered_ms - delivery.due_ms) / 1000)
    again = f"  attempt {delivery.attempt}" if delivery.attempt > 1 else ""
    if delivery.replay_of is not None:
        again = f"  replay of {delivery.replay_of}{again}"
    body = stored_text(delivery.topic, delivery.raw[3], delivery.encoding, None, whole=True)
    return f"{format_time(delivery.delivered_ms)}  +{late:<7}  {delivery.id}{again}  {body}"


# --- consumers -----------------------------------------------------------------------------------

BROADCAST = "(broadcast)"
"""Shown instead of a group for broadcast subscriptions."""


CONSUMERS = (
    Column[ConsumerInfo]("host", lambda consumer: printable(consumer.host or consumer.address)),
    column("pid", right=True), column("topic"),
    Column[ConsumerInfo]("group", lambda c: BROADCAST if c.group is None else c.group),
    *count_columns("in_flight", "prefetch"), column("connected", "since_ms", ago),
    column("by", "kind"), *text_columns("client", "version"),
)  # fmt: skip
SPARE = ("version", "client", "by")
consumers = listed(
    "consumers", "List the connected consumers: subscriptions, and pulls that wait.", CONSUMERS,
    nothing="no matching consumer is connected", spare=SPARE,
)  # fmt: skip


# --- work ----------------------------------------------------------------------------------------

DRAW_S = 0.25
"""Seconds between two drawings of the live line."""
DRAWINGS = 8
"""Drawings over which the live line's rate and lateness are measured."""
HANDLED = frozenset(("acked", "settled", "snoozed"))
"""Outcomes of deliveries that a handler has finished."""
GIVEN_BACK = frozenset(("released", "lost", "unsettled", "stale"))
"""Outcomes of deliveries that were not finished here; all other outcomes are failures."""


async def work(
    call: Call,
    target: Annotated[
        str,
        argument(
            "MODULE:WORKER",
            "The worker, for example shop.jobs:worker, in this folder or on PYTHONPATH.",
        ),
    ],
    concurrency: Annotated[
        int | None,
        option(
            "Maximum running handlers of each kind. Default: the program's.", "N", min=1, max=65_535
        ),
    ] = None,
    grace: Annotated[
        float | None, duration("Time for running handlers after SIGTERM. Default: the program's.")
    ] = None,
    reload: Annotated[
        bool, flag("Restart when a Python file of the program changes, with a grace of 3 s.")
    ] = False,
) -> int:
    """Run the handlers of a Worker until SIGTERM or Ctrl-C; a second one ends the grace.

    Waits for a daemon that does not answer yet.

    --url and --token apply to a Client() without its own.
    """
    # The program creates its client itself, usually during its import.
    for name, value in (("TICKWHEEL_URL", call.url), ("TICKWHEEL_TOKEN", call.token)):
        if value is not None:
            os.environ[name] = value
    if reload:
        if not is_child():
            return await supervise(folders_of(target))
        grace = RELOAD_GRACE_S if grace is None else grace
    unblock_stderr()
    view = view_of(call)
    with view.around():
        set_up_log()
        worker = named_worker(target)
        with view.watch(worker):
            await worker.run(concurrency=concurrency, grace=grace, wait=True)
    return 0


def named_worker(target: str) -> Worker:
    """Return the worker named ``MODULE:WORKER``, searching the working directory first."""
    _search_here()
    try:
        return load_worker(target)
    except BadRequest as error:
        raise typer.BadParameter(error.message, param_hint="MODULE:WORKER") from None


def _search_here() -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def folders_of(target: str) -> list[Path]:
    """Return the working directory, and the folder of the program's module unless installed."""
    _search_here()
    folders = [Path.cwd()]
    with suppress(ImportError, ValueError, AttributeError):  # reported by the import
        spec = importlib.util.find_spec(target.partition(":")[0].partition(".")[0])
        folder = Path(str(spec.origin)).parent if spec is not None else folders[0]
        if folder.is_dir() and not folder.is_relative_to(sys.prefix):
            folders.append(folder)
    return folders


# --- views of a worker ---------------------------------------------------------------------------


def view_of(call: Call) -> View:
    """Return the view for the options and for stderr."""
    if call.out.as_json:
        return Lines()
    from rich.console import Console

    console = Console(stderr=True)
    return LiveLine(console) if console.is_interactive else View()


def late_ms(delivery: Delivery) -> int:
    """Return the milliseconds between due time and delivery, including waits between attempts."""
    return max(0, delivery.delivered_ms - delivery.due_ms)


def error_text(delivery: Delivery, error: BaseException) -> str:
    """Return a handler's exception on one line; for an encrypted task only its type, because the
    text may quote the body."""
    name = type(error).__name__
    return name if delivery.encrypted_with is not None else f"{name}: {error}"


class View:
    """A view that shows nothing besides the log. Subclasses get each finished delivery; the
    program's own callback is called as well."""

    def around(self) -> AbstractContextManager[Any]:
        """Return a context in which the program prints and logs."""
        return nullcontext()

    def watch(self, worker: Worker) -> AbstractContextManager[Any]:
        """Return a context in which the worker runs."""
        return nullcontext()

    def listen(self, worker: Worker) -> None:
        """Call ``hear`` for each delivery that the worker finishes."""
        own, loop = worker.on_settled, asyncio.get_running_loop()

        def settled(
            delivery: Delivery, outcome: str, began_s: float, error: BaseException | None
        ) -> None:
            self.hear(delivery, outcome, loop.time() - began_s, error)
            if own is not None:
                own(delivery, outcome, began_s, error)

        worker.on_settled = settled

    def hear(
        self, delivery: Delivery, outcome: str, took_s: float, error: BaseException | None
    ) -> None:
        raise NotImplementedError


class Lines(View):
    """A line of JSON on stdout for each delivery. If the reader stops reading, lines are dropped,
    because no handler may wait for a log. If the reader closes the pipe, the worker is stopped and
    the command fails."""

    def __init__(self) -> None:
        self._stdout = unblocked(sys.stdout, "stdout")
        self._broken: BrokenPipeError | None = None

    def around(self) -> AbstractContextManager[Any]:
        return redirect_stdout(sys.stderr)

    @contextmanager
    def watch(self, worker: Worker) -> Iterator[None]:
        self.listen(worker)
        loop = asyncio.get_running_loop()
        writer = writer_of(self._stdout)
        if writer is None:
            yield
            return

        def failed(error: OSError) -> None:
            if isinstance(error, BrokenPipeError):
                self._broken = error
                with suppress(RuntimeError):  # the loop is closed: the worker has stopped
                    loop.call_soon_threadsafe(worker.stop)

        writer.failed = failed
        writer.format_dropped = lambda count: json.dumps({"dropped": count}).encode() + b"\n"
        yield
        writer.flush(END_S)
        if self._broken is not None:
            raise self._broken

    def hear(
        self, delivery: Delivery, outcome: str, took_s: float, error: BaseException | None
    ) -> None:
        fields = {
            "topic": delivery.topic,
            "group": delivery.group,
            "id": str(delivery.id),
            "key": delivery.key,
            "attempt": delivery.attempt,
            "outcome": outcome,
            "took_ms": round(took_s * 1000, 1),
            "late_ms": late_ms(delivery),
            "error": None if error is None else error_text(delivery, error),
        }
        self._stdout.write(json.dumps(fields) + "\n")
        self._stdout.flush()


class LiveLine(View):
    """One line on the terminal of stderr, below what the program prints and logs."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
        self._handled = self._failed = 0
        self._past = deque([(time.monotonic(), 0)], DRAWINGS + 1)
        """Time of each drawing, and the deliveries finished by then."""
        self._late_ms = deque([0], DRAWINGS)
        """Maximum lateness between two drawings."""

    def around(self) -> AbstractContextManager[Any]:
        return self._live

    @contextmanager
    def watch(self, worker: Worker) -> Iterator[None]:
        self.listen(worker)
        drawing = asyncio.create_task(self._draw(worker))
        try:
            yield
        finally:
            drawing.cancel()
            self._live.update(self._line(worker), refresh=True)

    def hear(
        self, delivery: Delivery, outcome: str, took_s: float, error: BaseException | None
    ) -> None:
        if outcome in HANDLED:
            self._handled += 1
        elif outcome not in GIVEN_BACK:
            self._failed += 1
        self._late_ms[-1] = max(self._late_ms[-1], late_ms(delivery))

    async def _draw(self, worker: Worker) -> None:
        while True:
            self._live.update(self._line(worker), refresh=True)
            self._past.append((time.monotonic(), self._handled + self._failed))
            self._late_ms.append(0)
            await asyncio.sleep(DRAW_S)

    def _line(self, worker: Worker) -> Text:
        from rich.text import Text

        in_hand = worker.in_hand
        since_s, before = self._past[0]
        rate = (self._handled + self._failed - before) / max(time.monotonic() - since_s, DRAW_S)
        oldest_ms = max([*self._late_ms, *map(late_ms, in_hand)])
        parts = (
            f"{format_count(self._handled)} handled",
            f"{format_count(self._failed)} failed",
            f"{format_count(len(in_hand))} in flight",
            f"{rate:,.1f}/s",
            f"oldest {format_duration(oldest_ms / 1000)} late",
        )
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")
