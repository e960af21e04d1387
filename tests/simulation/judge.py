"""The verdict on a run: the judge of the torture on what clients saw, and what only somebody can
see who knows all hosts and the true time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from crash.checker import check
from crash.ordered import judge_order
from simulation.workload import GROUPS
from tickwheel.model.records import ID_STEP
from tickwheel.model.values import shard_of

if TYPE_CHECKING:
    from crash.clocks import Clocks
    from crash.ordered import Seen
    from simulation.store import Server
    from simulation.workload import Records

PLANNED_GROUPS = "planned"


def judge(records: Records, servers: Sequence[Server], clocks: Clocks) -> list[str]:
    """Return the problems. `servers` are those of each shard."""
    owed = {topic: groups for topic, groups in GROUPS.items() if topic != PLANNED_GROUPS}
    wrong = list(check([records.journal], owed, clocks=clocks).violations)
    # The judge of the torture takes all tasks for enqueued before the first one comes. A delivery
    # that a power cut made the store forget is due again later by a clock that was ahead then.
    beside = ("out of order", "again, after") if not clocks.are_true else ("out of order",)
    wrong += [
        text for text in judge_order(records.seen, records.sent) if not text.startswith(beside)
    ]
    wrong += in_order(records) if clocks.are_true else ()
    for shard, server in enumerate(servers):
        of = f"shard {shard}: " if len(servers) > 1 else ""
        wrong += [of + text for text in one_owner_an_epoch(server)]
    wrong += at_home(records, len(servers))
    wrong += once_an_occurrence(records)
    return wrong


def in_order(records: Records) -> list[str]:
    """Return tasks of a key delivered before an earlier due task that already existed."""
    wrong: list[str] = []
    came: dict[str, list[Seen]] = defaultdict(list)
    for task in records.seen:
        others = came[task.key]
        if all(task.id != before.id for before in others):
            wrong += [
                f"out of order: {task} came after {before}"
                for before in others
                if (before.due_ms, before.id) > (task.due_ms, task.id)
                # One whose first delivery nobody saw has had its turn since then.
                if before.attempt == 1
                and records.there_ms.get(task.id, before.delivered_ms) < before.delivered_ms
            ]
            others.append(task)
    return wrong


def at_home(records: Records, shards: int) -> list[str]:
    """A task with a key is in the shard of its key, and nowhere else."""
    return [
        f"task {task_id} with the key {basis} is in shard {task_id % ID_STEP} of {shards}"
        for task_id, basis in records.basis.items()
        if task_id % ID_STEP != shard_of(basis, shards)
    ]


def one_owner_an_epoch(server: Server) -> list[str]:
    """No two daemons write in one epoch, and no batch is written after a later epoch began."""
    wrong = []
    owners: dict[int, str] = {}
    for at_s, epoch, owner in server.opened:
        if owners.setdefault(epoch, owner) != owner:
            wrong.append(f"epoch {epoch} was begun twice, by {owners[epoch]} and {owner}: {at_s}")
    for _, epoch, owner, n in server.applied:
        if owners.get(epoch) != owner:
            wrong.append(f"two write: batch {n} of {owner} in epoch {epoch} of {owners.get(epoch)}")
    for before, after in pairwise(server.applied):
        if after[1] < before[1]:
            wrong.append(f"two write: batch {after[3]} of epoch {after[1]} after epoch {before[1]}")
    return wrong


def nothing_twice(records: Records) -> list[str]:
    """Return repeats in a run with orderly stops only, over which leases last."""
    came = Counter((item.token, item.group) for item in records.journal.delivered)
    return [
        f"{token} came {times} times to {group}, and nothing had happened but hand-overs"
        for (token, group), times in came.items()
        if times > 1
    ]


def once_an_occurrence(records: Records) -> list[str]:
    """A schedule's occurrence is one task."""
    return [
        f"the occurrence {moment_ms} of the schedule came as {sorted(ids)}"
        for moment_ms, ids in sorted(records.runs.items())
        if len(ids) > 1
    ]
