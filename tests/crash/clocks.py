"""Nemesis *clock*: daemons' wall clocks that step, drift, disagree, and are wrong at a start.

``Clocks`` is also what the checker judges by: it knows what each daemon's clock can have shown
at each of the machine's moments, which is the time of the clients. A promise about time ("never
early") is one about the daemon's clock, so a stamp that no clock has shown is a violation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crash.link import now_ms
from support.daemon import Daemon
from support.steering import WallClock
from support.waiting import rest

if TYPE_CHECKING:
    from crash.plan import Plan

OFF_MS_MAX = 6 * 3_600_000
"""Sessions live for 24 h by the clock, and a jump ahead of more is held: steps stay below."""
FAR_MS = 30 * 86_400_000
"""Beyond ``clock_hold_over_s``: the daemon goes on by its steady clock."""
BEYOND_MS = OFF_MS_MAX + 600_000
"""Ahead of all that was ever due: so everything comes due at the end."""
STEP_MS = (1_500, 10_000, 600_000, OFF_MS_MAX)
DRIFT_MAX = 0.05
SLACK_MS = 2
"""Each reading is floored."""
DRIFT_SLACK_MS = 1_500
"""A change of rate, and the begin of a process, count from a reading: nobody knows from which. One
that is frozen until another has taken over reads nothing for seconds: this is half a minute of
``DRIFT_MAX``."""
REST_S_MAX = 0.6
HELD_S = 0.4
SEEN_S = 0.3
"""By then the daemon has read its clock."""
KINDS = ("step", "back", "ahead", "drift", "boot", "far")


@dataclass(slots=True)
class Piece:
    """One daemon's clock while nothing was done to it. ``until_ms`` None: it still holds."""

    daemon: int
    from_ms: int
    off_ms: float
    """At ``from_ms``, from the machine's clock."""
    rate: float
    slack_ms: int
    until_ms: int | None = None
    loose: bool = False
    """It may show that or anything less."""

    @property
    def below_ms(self) -> int:
        return 2 * OFF_MS_MAX if self.loose else self.slack_ms

    def at(self, true_ms: int) -> float:
        return true_ms + self.off_ms + (true_ms - self.from_ms) * (self.rate - 1)

    def end(self, until_ms: int) -> int:
        return until_ms if self.until_ms is None else min(self.until_ms, until_ms)


class Clocks:
    """The readings of a clock over time. Without pieces it is the machine's clock."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces = list(pieces)

    @property
    def are_true(self) -> bool:
        return not self.pieces

    def high(self, since_ms: int, until_ms: int) -> int:
        """The latest time that any daemon's clock can have shown in between."""
        results = [at for _, at in self._ranges(since_ms, until_ms)]
        return int(max(results, default=until_ms))

    def low(self, since_ms: int, until_ms: int) -> int:
        results = [at for at, _ in self._ranges(since_ms, until_ms)]
        return int(min(results, default=since_ms))

    def may_have_shown(self, stamp_ms: int, since_ms: int, until_ms: int) -> bool:
        if self.are_true:
            return stamp_ms <= until_ms
        return any(low <= stamp_ms <= high for low, high in self._ranges(since_ms, until_ms))

    def first_shown(self, stamp_ms: int) -> int:
        """The machine's earliest moment at which a clock can have shown ``stamp_ms``."""
        results = []
        for piece in self.pieces:
            until_ms = piece.end(now_ms())
            low, high = piece.at(piece.from_ms), piece.at(until_ms)
            if low - piece.below_ms <= stamp_ms <= high + piece.slack_ms:
                after_ms = (stamp_ms - piece.slack_ms - low) / piece.rate
                results.append(piece.from_ms + max(0, int(after_ms)))
        return min(results, default=stamp_ms if self.are_true else 0)

    def _ranges(self, since_ms: int, until_ms: int) -> Iterable[tuple[float, float]]:
        for piece in self.pieces:
            first, last = max(since_ms, piece.from_ms), piece.end(until_ms)
            if first <= last:
                yield piece.at(first) - piece.below_ms, piece.at(last) + piece.slack_ms


class Clocked(Daemon):
    """A daemon with a clock of its own, which ``clocks`` writes down."""

    def __init__(self, folder: Path, clocks: Clocks, number: int, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = WallClock(folder / "clock")
        super().__init__(folder, env=self._file.env, **options)
        self.at_next_start: int | None = None
        """An offset that is there when the process begins."""
        self.offset_ms = 0
        self._far_ms = 0
        self._clocks = clocks
        self._number = number
        self._drifted = False

    def spawn(self) -> None:
        """What a process has drifted begins at nothing, some time after this."""
        self._end_piece()
        if self.at_next_start is not None:
            self.offset_ms, self.at_next_start = self.at_next_start, None
        self.far(0)
        self._drifted = self._file.rate != 1.0
        self._begin_piece(now_ms(), 0.0)
        super().spawn()

    def set_clock(self, offset_ms: int | None = None, rate: float | None = None) -> None:
        """While it runs, or not."""
        before, moment_ms, drift_ms = self._piece(), now_ms(), 0.0
        if before is not None:
            drift_ms = before.at(moment_ms) - moment_ms - self.offset_ms
        if offset_ms is not None:
            self.offset_ms = offset_ms
            self.far(self._far_ms)
        if rate is not None:
            self._file.drift(rate)
        self._drifted = self._drifted or self._file.rate != 1.0
        self._end_piece()
        self._begin_piece(moment_ms, drift_ms)

    def far(self, by_ms: int) -> None:
        """A jump that nobody may follow: it is not written down as the clock's."""
        self._far_ms = by_ms
        self._file.step(self.offset_ms + by_ms - self._file.offset_ms)

    @contextmanager
    def anything_before(self) -> Iterator[None]:
        """A jump far ahead is held. One who starts or takes over meanwhile goes on from where
        the store was left, by whatever clock: any time that was shown before may come again."""
        high_ms = self._clocks.high(0, now_ms())
        piece = Piece(self._number, now_ms(), high_ms - now_ms(), 1.0, 0, loose=True)
        self._clocks.pieces.append(piece)
        try:
            yield
        finally:
            piece.until_ms = now_ms()

    def _piece(self) -> Piece | None:
        mine = [
            piece
            for piece in self._clocks.pieces
            if piece.daemon == self._number and piece.until_ms is None and not piece.loose
        ]
        return mine[-1] if mine else None

    def _end_piece(self) -> None:
        piece = self._piece()
        if piece is not None:
            piece.until_ms = now_ms()

    def _begin_piece(self, from_ms: int, drift_ms: float) -> None:
        slack_ms = SLACK_MS + (DRIFT_SLACK_MS if self._drifted else 0)
        off_ms = self.offset_ms + drift_ms
        self._clocks.pieces.append(Piece(self._number, from_ms, off_ms, self._file.rate, slack_ms))


class ClockFaults:
    """``run`` does ``count`` things to clocks, each kind at least once, and sets them beyond
    everything that is due. ``restart`` is called when a start is needed: None while somebody
    else kills the daemons anyway."""

    def __init__(
        self,
        daemons: Sequence[Clocked],
        plan: Plan,
        count: int,
        restart: Callable[[Daemon], Awaitable[None]] | None,
    ) -> None:
        self._daemons = daemons
        self._rnd = plan.rnd("clock")
        self._count = count
        self._restart = restart
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []

    @property
    def missed(self) -> list[str]:
        return [f"clock: {kind} never happened" for kind in KINDS if not self.done[kind]]

    def text(self) -> str:
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(self.done.items()))
        return f"clocks {self.done.total()} ({shown})"

    async def run(self) -> None:
        for _ in range(max(self._count, len(KINDS))):
            kind = self._rnd.choice([k for k in KINDS if not self.done[k]] or KINDS)
            await self._change(kind, self._rnd.choice(self._daemons))
            self.done[kind] += 1
            await rest(REST_S_MAX * self._rnd.random())
        self.finish()

    def finish(self) -> None:
        for daemon in self._daemons:
            daemon.at_next_start = None
            daemon.set_clock(BEYOND_MS, 1.0)

    async def _change(self, kind: str, daemon: Clocked) -> None:
        rnd = self._rnd
        if kind == "drift":
            daemon.set_clock(rate=1 + rnd.uniform(-DRIFT_MAX, DRIFT_MAX))
        elif kind == "boot":
            daemon.at_next_start = rnd.randint(-OFF_MS_MAX, OFF_MS_MAX)
            if self._restart is not None:
                await self._restart(daemon)
        elif kind == "far":
            with daemon.anything_before():
                daemon.far(FAR_MS)
                await rest(HELD_S * rnd.random())
                daemon.far(0)
                await rest(SEEN_S)
        else:
            daemon.set_clock(self._stepped(kind, daemon.offset_ms))

    def _stepped(self, kind: str, offset_ms: int) -> int:
        """``step``: anywhere; ``back`` and ``ahead``: from where it stands, mostly a little."""
        rnd = self._rnd
        if kind == "step":
            return rnd.randint(-OFF_MS_MAX, OFF_MS_MAX)
        by_ms = rnd.randint(1, rnd.choice(STEP_MS)) * (-1 if kind == "back" else 1)
        return max(-OFF_MS_MAX, min(OFF_MS_MAX, offset_ms + by_ms))
