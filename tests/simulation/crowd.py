"""All programs of a run, what they have seen together, and the verdict on that."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from simulation import judge
from simulation.loop import passes
from simulation.workload import (
    GROUPS,
    ORDERED,
    PLANNED,
    WORK,
    Program,
    Records,
    SimClient,
    consume,
    look,
    probe,
    produce,
    work,
)

if TYPE_CHECKING:
    from crash.clocks import Clocks
    from simulation.store import Server
    from simulation.world import Run

BOUND_S = 20.0
"""Maximum seconds from the last fault to the last delivery."""
LOOK_S = 0.25
GENTLE_HOLD_S = 0.3
"""Where nothing happens but hand-overs consumers work so long on a delivery: some are under way at
each of them."""
TASKS = 10
"""Tasks of each producer."""

Act = Callable[[Program, SimClient], Coroutine[Any, Any, None]]


class Crowd:
    """Producers, consumers and a worker, who use the daemons of a run."""

    def __init__(
        self, run: Run, url: str, span_s: float, *, tasks: int = TASKS, keys: Sequence[str] = ()
    ) -> None:
        """``url``: where they begin to look for daemons. ``span_s``: in how many seconds they
        produce, ``tasks`` each or a little more. ``keys``: see ``produce``."""
        self._run, self._url = run, url
        self.records = Records(run.loop)
        self.programs = list(self._make(partial(produce, tasks, span_s, keys)))

    def _program(self, name: str, act: Act, rnd: random.Random) -> Program:
        run = self._run
        return Program(name, run.loop, run.net, self._url, self.records, rnd, run.trace, act)

    def _make(self, act_of_producers: Act) -> Iterator[Program]:
        def program(name: str, act: Act) -> Program:
            return self._program(name, act, random.Random(f"{self._run.seed}/{name}"))

        for number in (1, 2):
            yield program(f"producer-{number}", act_of_producers)
        one, two = GROUPS[WORK]
        yield program("consumer-1", partial(consume, ((WORK, one), (PLANNED, GROUPS[PLANNED][0]))))
        yield program("consumer-2", partial(consume, ((WORK, two), (ORDERED, GROUPS[ORDERED][0]))))
        yield program("worker", work)

    def start(self) -> None:
        run = self._run
        for program in self.programs:
            run.loop.call_later(run.rnd.uniform(0.05, 0.2), program.start)

    def be_gentle(self) -> None:
        """Let all behave well from the start, and take their time."""
        for program in self.programs:
            program.is_calm, program.holds_s = True, GENTLE_HOLD_S

    def behave(self) -> None:
        """No more faults come: let all live, and behave well."""
        for program in self.programs:
            program.is_calm = True
            if program.host.is_alive:
                program.host.thaw()
            else:
                program.start()

    def probe(self, keys: Sequence[str]) -> None:
        """Let a last producer enqueue something with each of these keys."""
        rnd = random.Random(f"{self._run.seed}/last")
        program = self._program("producer-last", partial(probe, keys), rnd)
        self.programs.append(program)
        program.start()

    async def until_over(self) -> None:
        """Wait until everything has ended. It must, within the bound."""
        loop = self._run.loop
        until_s = loop.time() + BOUND_S
        while True:
            await passes(LOOK_S)
            producing = any(
                program.name.startswith("producer") and not program.is_done
                for program in self.programs
            )
            left = self.records.open_tasks(sure=False)
            if not producing and not left:
                await self._look(until_s - loop.time())
                left = self.records.open_tasks()
                if not left:
                    return
            if loop.time() > until_s:
                what = "; ".join(left[:5]) or "a producer"
                self._run.problems.append(f"after {BOUND_S:g} s still open: {what}")
                return

    async def _look(self, patience_s: float) -> None:
        """Let a client ask what became of all tasks."""
        looker = self._program("looker", look, self._run.rnd)
        self.programs.append(looker)
        looker.start()
        await asyncio.wait({looker.life}, timeout=patience_s)

    def judge(self, servers: Sequence[Server], clocks: Clocks) -> list[str]:
        """Return the problems. `servers` are those of each shard."""
        wrong = [text for program in self.programs for text in program.failed]
        return wrong + judge.judge(self.records, servers, clocks)

    def counts(self, servers: Sequence[Server]) -> Counter[str]:
        journal = self.records.journal
        return Counter(
            tasks=len(journal.accepted),
            deliveries=len(journal.delivered),
            acked=len(self.records.acked),
            runs=len(self.records.runs),
            epochs=sum(len(server.opened) for server in servers),
            batches=sum(len(server.applied) for server in servers),
            fenced=sum(server.fenced for server in servers),
            replays=sum(server.replays for server in servers),
        )
