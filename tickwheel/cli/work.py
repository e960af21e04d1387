"""``tickwheel work``: runs a worker that a program defines, and shows what it does.

On a terminal one line on stderr, drawn again four times a second below what the program prints and
logs; with ``--json`` a line of JSON on stdout for each finished delivery, and nothing else there:
what the program prints goes to stderr. Otherwise log lines alone.

The errors of the program are its own: what goes wrong while it is imported is said in one line with
the place; what a handler raises is logged, and becomes a nack.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tickwheel.cli.call import Call
from tickwheel.cli.options import argument, duration, flag, option
from tickwheel.cli.output import format_count, format_duration
from tickwheel.client import Delivery
from tickwheel.client.worker import Worker
from tickwheel.contrib.workers import (
    LOG_FORMAT,
    RELOAD_GRACE_S,
    is_child,
    load_worker,
    supervise,
)
from tickwheel.errors import BadRequest

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

DRAW_S = 0.25
"""How often, in seconds, the live line is drawn."""
DRAWINGS = 8
"""So many drawings are what the live line's rate and lateness look back."""
HANDLED = frozenset(("acked", "settled", "snoozed"))
"""What becomes of a delivery whose handler did what it had to."""
GIVEN_BACK = frozenset(("released", "lost", "unsettled", "stale"))
"""What becomes of a delivery that was not handled to an end here; any other word: it failed."""


async def work(
    call: Call,
    target: Annotated[
        str,
        argument(
            "MODULE:WORKER", "For example shop.jobs:worker; looked for here and on PYTHONPATH."
        ),
    ],
    concurrency: Annotated[
        int | None,
        option(
            "Handlers at a time, of each kind. Default: as the program says.",
            "N",
            min=1,
            max=65_535,
        ),
    ] = None,
    grace: Annotated[
        float | None,
        duration("How long running handlers may take after SIGTERM. Default: as the program says."),
    ] = None,
    reload: Annotated[
        bool,
        flag("Start anew when a Python file of the program changes, with a grace of 3 s."),
    ] = False,
) -> int:
    """Run the handlers of a Worker until SIGTERM or Ctrl-C; a second one ends the grace.

    A daemon that is not there yet is waited for.

    --url and --token hold for a Client() that is made without its own.
    """
    # The program makes its client itself, usually while it is imported.
    for name, value in (("TICKWHEEL_URL", call.url), ("TICKWHEEL_TOKEN", call.token)):
        if value is not None:
            os.environ[name] = value
    if reload:
        if not is_child():
            return await supervise(folders_of(target))
        grace = RELOAD_GRACE_S if grace is None else grace
    view = view_of(call)
    with view.around():
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        worker = named_worker(target)
        with view.watch(worker):
            await worker.run(concurrency=concurrency, grace=grace, wait=True)
    return 0


def named_worker(target: str) -> Worker:
    """The worker that ``MODULE:WORKER`` names; looks through the working directory first."""
    look_here()
    try:
        return load_worker(target)
    except BadRequest as error:
        raise typer.BadParameter(error.message, param_hint="MODULE:WORKER") from None


def look_here() -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def folders_of(target: str) -> list[Path]:
    """The working directory, and where the program's first module is, unless that is installed."""
    look_here()
    found = [Path.cwd()]
    with suppress(ImportError, ValueError, AttributeError):  # said when it is imported
        spec = importlib.util.find_spec(target.partition(":")[0].partition(".")[0])
        folder = Path(str(spec.origin)).parent if spec is not None else found[0]
        if folder.is_dir() and not folder.is_relative_to(sys.prefix):
            found.append(folder)
    return found


# --- what is shown -------------------------------------------------------------------------------


def view_of(call: Call) -> View:
    """What the command shows, by its options and by where stderr goes."""
    if call.out.as_json:
        return Lines()
    from rich.console import Console

    console = Console(stderr=True)
    return LiveLine(console) if console.is_interactive else View()


class Finished(NamedTuple):
    """One delivery and its end."""

    delivery: Delivery
    outcome: str
    took_s: float
    error: BaseException | None


def late_ms(delivery: Delivery) -> int:
    """How long after its due time it was delivered; the waits between attempts count, too."""
    return max(0, delivery.delivered_ms - delivery.due_ms)


def error_text(delivery: Delivery, error: BaseException) -> str:
    """What a handler raised, in one line; of an encrypted task the type alone, because the text may
    have come out of the body."""
    name = type(error).__name__
    return name if delivery.encrypted_with is not None else f"{name}: {error}"


class View:
    """What is shown of a worker at work: nothing beside what it logs."""

    def around(self) -> AbstractContextManager[Any]:
        """A context in which the program prints and logs."""
        return nullcontext()

    def watch(self, worker: Worker) -> AbstractContextManager[Any]:
        """A context in which the worker runs."""
        return nullcontext()


class Telling(View):
    """Hears of each finished delivery. The program's own callback is called as well."""

    def watch(self, worker: Worker) -> AbstractContextManager[Any]:
        own, loop = worker.on_settled, asyncio.get_running_loop()

        def settled(
            delivery: Delivery, outcome: str, began_s: float, error: BaseException | None
        ) -> None:
            self.hear(worker, Finished(delivery, outcome, loop.time() - began_s, error))
            if own is not None:
                own(delivery, outcome, began_s, error)

        worker.on_settled = settled
        return nullcontext()

    def hear(self, worker: Worker, finished: Finished) -> None:
        raise NotImplementedError


class Lines(Telling):
    """A line of JSON on stdout for each delivery. When nobody reads them any more the worker is
    stopped, and the command fails."""

    def __init__(self) -> None:
        self._stdout = sys.stdout
        self._broken: BrokenPipeError | None = None

    def around(self) -> AbstractContextManager[Any]:
        return redirect_stdout(sys.stderr)

    @contextmanager
    def watch(self, worker: Worker) -> Iterator[None]:
        super().watch(worker)
        yield
        if self._broken is not None:
            raise self._broken

    def hear(self, worker: Worker, finished: Finished) -> None:
        delivery, error = finished.delivery, finished.error
        fields = {
            "topic": delivery.topic,
            "group": delivery.group,
            "id": str(delivery.id),
            "key": delivery.key,
            "attempt": delivery.attempt,
            "outcome": finished.outcome,
            "took_ms": round(finished.took_s * 1000, 1),
            "late_ms": late_ms(delivery),
            "error": None if error is None else error_text(delivery, error),
        }
        try:
            self._stdout.write(json.dumps(fields) + "\n")
            self._stdout.flush()
        except BrokenPipeError as problem:
            self._broken = problem
            worker.stop()


class LiveLine(Telling):
    """One line on the terminal of stderr, below what the program prints and logs."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
        self._handled = self._failed = 0
        self._past = deque([(time.monotonic(), 0)], DRAWINGS + 1)
        """When the line was drawn, and how many deliveries had been finished by then."""
        self._late_ms = deque([0], DRAWINGS)
        """The greatest lateness between two drawings."""

    def around(self) -> AbstractContextManager[Any]:
        return self._live

    @contextmanager
    def watch(self, worker: Worker) -> Iterator[None]:
        super().watch(worker)
        drawing = asyncio.create_task(self._draw(worker))
        try:
            yield
        finally:
            drawing.cancel()
            self._live.update(self._line(worker), refresh=True)

    def hear(self, worker: Worker, finished: Finished) -> None:
        if finished.outcome in HANDLED:
            self._handled += 1
        elif finished.outcome not in GIVEN_BACK:
            self._failed += 1
        self._late_ms[-1] = max(self._late_ms[-1], late_ms(finished.delivery))

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
