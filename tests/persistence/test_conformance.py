"""What every store must do. A new store is done when this passes over it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from string import ascii_letters, digits
from typing import Any

import pytest

from persistence.store_subject import OWNER, Subject
from support.store_rows import (
    BULKS,
    CLAIMS,
    COUNTER_ROW,
    DEAD,
    GROUPS,
    HALVES,
    ID_MAX,
    MS_MAX,
    PROGRESS,
    SCHEDULES,
    SESSIONS,
    TARGETS,
    TASKS,
    TRANSACTIONS,
    UNICODE,
    dropped,
    ended,
    everything,
    in_flight,
    tasks,
)
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.kinds import (
    BULK,
    CLAIM,
    COUNTER,
    GROUP,
    KINDS,
    PAUSED_KEY,
    SCHEDULE,
    SESSION,
    TARGET,
    TRANSACTION,
    BulkRow,
    Effects,
    Kind,
    PausedKey,
    RecordKey,
    TransactionRow,
    TransactionState,
    key_of,
    keyed,
)
from tickwheel.model.records import (
    ID_STEP,
    DeadRow,
    GroupRow,
    Outcome,
    ProgressState,
    SessionRow,
    TaskOptions,
    TaskRow,
)
from tickwheel.persistence import open_url
from tickwheel.persistence.contract import (
    SCAN_BYTES_MAX,
    CommitRefused,
    Fenced,
    StoreBroken,
    StoredTask,
    StoreError,
    is_cut,
)

PLAIN = TaskOptions()


FEW = (1, 2, 3, 7, 16, 33, 513, 1_025)
SIZES = [
    pytest.param(count, marks=() if count in FEW else pytest.mark.slow)
    for count in [*range(1, 18), 31, 33, 63, 65, 511, 512, 513, 700, 1_025]
]
"""Around the numbers of rows that a store takes at once."""
ANSWERED = SessionRow(b"a" * 16, 1, 2, ((7, 5, 1, 9),))


class TestBatches:
    async def test_batches_are_applied_in_order_and_once(self, subject: Subject) -> None:
        store, epoch = subject.store, subject.opened.epoch
        assert await store.commit(epoch, OWNER, 1, tasks([10])) is True
        assert await store.commit(epoch, OWNER, 1, tasks([11])) is False
        assert await store.commit(epoch, OWNER, 2, tasks([12])) is True
        assert await store.commit(epoch, OWNER, 1, tasks([13])) is False
        assert await subject.ids() == [10, 12]

    async def test_a_gap_is_refused_and_the_number_stays_free(self, subject: Subject) -> None:
        store, epoch = subject.store, subject.opened.epoch
        with pytest.raises(CommitRefused) as refused:
            await store.commit(epoch, OWNER, 2, tasks([10]))
        assert refused.value.full is False
        assert await subject.ids() == []
        assert await store.commit(epoch, OWNER, 1, tasks([10])) is True

    async def test_another_epoch_or_owner_is_fenced(self, subject: Subject) -> None:
        store, epoch = subject.store, subject.opened.epoch
        await subject.commit(tasks([10]))
        for wrong_epoch, wrong_owner in ((epoch - 1, OWNER), (epoch + 1, OWNER), (epoch, "else")):
            for n in (1, 2, 3):
                with pytest.raises(Fenced):
                    await store.commit(wrong_epoch, wrong_owner, n, tasks([11]))
        assert await subject.ids() == [10]

    async def test_a_former_epoch_is_fenced_after_a_restart(self, subject: Subject) -> None:
        former = subject.opened.epoch
        await subject.reopen()
        with pytest.raises(Fenced):
            await subject.store.commit(former, OWNER, 1, tasks([10]))
        assert await subject.commit(tasks([10])) is True

    async def test_open_raises_the_epoch_to_a_minimum(self, subject: Subject) -> None:
        """For a store that takes a lost one's place."""
        store, first = subject.store, subject.opened.epoch
        await store.close(clean=True)
        assert (await store.open(OWNER, 1, epoch_min=first + 40)).epoch == first + 40
        await store.close(clean=True)
        assert (await store.open(OWNER, 1, epoch_min=2)).epoch == first + 41
        assert await store.commit(first + 41, OWNER, 1, tasks([10])) is True

    async def test_an_id_assigned_twice_is_loud(self, subject: Subject) -> None:
        await subject.commit(tasks([10], body=b"first"))
        with pytest.raises(StoreBroken):
            await subject.commit(tasks([9, 10], body=b"second"))
        await subject.reopen(clean=False)
        assert await subject.ids() == [10]
        assert (await subject.store.read([10]))[10].row.body == b"first"

    async def test_an_empty_batch_counts(self, subject: Subject) -> None:
        assert await subject.commit(Effects()) is True
        assert (await subject.reopen()).last_batch == 1

    async def test_large_batches_are_applied_whole(self, subject: Subject) -> None:
        ids = range(1, 20_001)
        await subject.commit(tasks(ids))
        assert await subject.ids() == list(ids)
        await subject.commit(
            Effects(
                ended=dict.fromkeys(ids[:10_000], Outcome.ACKED),
                progress={(i, "default"): in_flight(i) for i in ids[10_000:]},
            )
        )
        assert await subject.ids() == list(ids[10_000:])
        assert len((await subject.small()).progress) == 10_000
        await subject.commit(ended(ids[10_000:]))
        assert await subject.ids() == []
        assert (await subject.small()).progress == []

    @pytest.mark.parametrize("count", SIZES)
    async def test_batches_of_any_size_are_applied_whole(
        self, subject: Subject, count: int
    ) -> None:
        ids = list(range(100, 100 + count))
        await subject.commit(tasks(ids))
        await subject.commit(Effects(progress={(i, "g"): in_flight(i, "g") for i in ids}))
        rows = await subject.store.read([99, *ids, 100 + count])
        assert list(rows) == ids or sorted(rows) == ids
        assert all(rows[i].progress == (in_flight(i, "g"),) for i in ids)
        await subject.commit(Effects(progress={(i, "g"): None for i in ids}))
        assert (await subject.small()).progress == []
        assert await subject.ids() == ids


def by_id(rows: list[BulkRow]) -> list[BulkRow]:
    return sorted(rows, key=lambda row: row.bulk.id)


class TestStates:
    async def test_rare_options_and_held_progress_are_kept(self, subject: Subject) -> None:
        """Due windows, order keys, what a task stands for."""
        rows = [row for row in TASKS if (row.options or PLAIN)[6:] != PLAIN[6:]]
        held = next(row for row in PROGRESS if row.state is ProgressState.HELD)
        ordered = next(row for row in SCHEDULES if row.schedule.name == "ordered")
        effects = Effects(enqueued={row.id: row for row in rows}, id_mark=ID_MAX)
        effects.put(SCHEDULE, ordered)
        await subject.commit(effects)
        await subject.commit(Effects(progress={(held.id, held.group): held}))
        expected = {row.id: row._replace(due_ms=77) if row.id % 2 else row for row in rows}
        await subject.commit(Effects(updated={i: row for i, row in expected.items() if i % 2}))
        await subject.reopen(clean=False)
        result = await subject.store.read([row.id for row in rows])
        assert {i: task.row for i, task in result.items()} == expected
        assert len(expected) >= 9 and result[held.id].progress == (held,)
        small = await subject.small()
        assert (small.of_kind(SCHEDULE), small.progress) == ([ordered], [held])

    async def test_states_are_absolute(self, subject: Subject) -> None:
        row = TaskRow(10, 2_000, "other", b"new")
        await subject.commit(tasks([10]))
        for _ in range(2):
            await subject.commit(
                Effects(
                    updated={10: row},
                    progress={(10, "a"): in_flight(10, "a"), (10, "b"): None},
                    dead={(10, "c"): DeadRow(10, "c", "other", 1, 2, "why"), (10, "d"): None},
                    records={
                        (GROUP, ("t", "a")): GroupRow("t", "a", 5),
                        (GROUP, ("t", "b")): None,
                        (SESSION, (b"a" * 16, 7)): ANSWERED,
                        (SESSION, (b"b" * 16, 7)): None,
                    },
                )
            )
            assert await subject.store.read([10]) == {
                10: StoredTask(
                    row, (in_flight(10, "a"),), (DeadRow(10, "c", "other", 1, 2, "why"),)
                )
            }
            small = await subject.small()
            assert sorted(small.of_kind(GROUP)) == [GroupRow("t", "a", 5)]
            assert sorted(small.of_kind(SESSION)) == [ANSWERED]

    async def test_a_session_has_as_many_rows_as_batches_answered_it(
        self, subject: Subject
    ) -> None:
        rows = [ANSWERED._replace(answers=((first, 1, 1, 1),)) for first in (1, 7, 2**53 - 1)]
        other = rows[0]._replace(session=b"b" * 16)
        for row in (*rows, other):
            await subject.commit(Effects(records=keyed(SESSION, [row])))
        assert sorted((await subject.small()).of_kind(SESSION)) == sorted([*rows, other])
        await subject.commit(Effects(records=dropped(SESSION, rows[1].key, (b"c" * 16, 7))))
        await subject.reopen()
        assert sorted((await subject.small()).of_kind(SESSION)) == sorted([rows[0], rows[2], other])

    async def test_the_last_state_wins(self, subject: Subject) -> None:
        await subject.commit(tasks([10]))
        for attempt in (1, 2, 3):
            await subject.commit(Effects(progress={(10, "a"): in_flight(10, "a", attempt)}))
            row = ANSWERED._replace(floor=attempt)
            await subject.commit(Effects(records=keyed(SESSION, [row])))
        small = await subject.small()
        assert small.progress == [in_flight(10, "a", 3)]
        assert sorted(small.of_kind(SESSION)) == [ANSWERED._replace(floor=3)]

    async def test_the_longest_key_of_each_kind_is_stored(self, subject: Subject) -> None:
        """With texts that have the most bytes and do not compress."""
        chance = Random(1)
        name = "".join(chance.choices(ascii_letters + digits, k=255))
        wide = "".join(map(chr, chance.choices(range(0x10000, 0x20000), k=1_024)))
        key, other = (PausedKey(name, name, wide[:255], wide[1:] + last, 0, "") for last in "ab")
        bulk, schedule = BULKS[0], SCHEDULES[0]
        records: dict[RecordKey, Any] = (
            keyed(GROUP, [GroupRow(name, name, 0)])
            | keyed(SESSION, [SESSIONS[1]])
            | keyed(SCHEDULE, [schedule._replace(schedule=schedule.schedule._replace(name=name))])
            | keyed(TRANSACTION, [HALVES[1]._replace(transaction=name)])
            | keyed(BULK, [bulk._replace(bulk=bulk.bulk._replace(id=name))])
            | keyed(PAUSED_KEY, [key])
            | keyed(TARGET, [TARGETS[1]._replace(topic=name, group=name)])
            | keyed(COUNTER, [COUNTER_ROW])
            | keyed(CLAIM, [CLAIMS[1]._replace(name=name)])
        )
        assert {kind for kind, _ in records} == set(KINDS.values())
        await subject.commit(Effects(records=records | keyed(PAUSED_KEY, [other])))
        await subject.commit(Effects(records=dropped(PAUSED_KEY, PAUSED_KEY.key(other))))
        await subject.reopen()
        assert (await subject.small()).records == records

    async def test_a_drop_removes_one_key_only(self, subject: Subject) -> None:
        await subject.commit(everything())
        row, dead, group = PROGRESS[1], DEAD[0], GROUPS[1]
        await subject.commit(
            Effects(
                progress={(row.id, row.group): None, (10, "no such"): None},
                dead={(dead.id, dead.group): None},
                records=dropped(GROUP, (group.topic, group.group))
                | dropped(SESSION, SESSIONS[0].key),
            )
        )
        small = await subject.small()
        assert small.progress == sorted(set(PROGRESS) - {row})
        assert small.dead == sorted((d.id, d.group, d.topic) for d in DEAD if d != dead)
        assert sorted(small.of_kind(GROUP)) == sorted(set(GROUPS) - {group})
        assert sorted(small.of_kind(SESSION)) == sorted(SESSIONS[1:])

    async def test_an_ended_task_leaves_only_its_outcome(self, subject: Subject) -> None:
        await subject.commit(everything())
        some = sorted({row.id for row in (*PROGRESS, *DEAD)})
        await subject.commit(ended(some, Outcome.CANCELLED))
        assert await subject.store.read(some) == {}
        small = await subject.small()
        assert small.progress == []
        assert small.dead == []
        assert small.outcomes[-len(some) :] == [(i, Outcome.CANCELLED) for i in some]
        assert await subject.ids() == sorted({row.id for row in TASKS} - set(some))

    async def test_an_ended_task_that_is_not_there_is_remembered(self, subject: Subject) -> None:
        await subject.commit(ended([5], Outcome.EXPIRED))
        assert (await subject.small()).outcomes == [(5, Outcome.EXPIRED)]

    async def test_progress_is_removed_with_its_task_after_many_batches(
        self, subject: Subject
    ) -> None:
        """Also when there was no progress and no dead letter for many batches before."""
        for i in range(1, 200):
            await subject.commit(tasks([i]))
            await subject.commit(ended([i]))
        await subject.commit(tasks([500]))
        await subject.commit(
            Effects(
                progress={(500, "a"): in_flight(500, "a")},
                dead={(500, "b"): DeadRow(500, "b", "t", 1, 1, "")},
            )
        )
        await subject.commit(ended([500]))
        small = await subject.small()
        assert small.progress == []
        assert small.dead == []

    async def test_the_id_mark_is_never_lowered(self, subject: Subject) -> None:
        await subject.commit(Effects(id_mark=ID_MAX - 1, position_ms=900))
        await subject.commit(Effects(id_mark=5, position_ms=800))
        opened = await subject.reopen()
        assert opened.id_mark == ID_MAX - 1
        assert opened.position_ms == 800


class TestEndings:
    async def test_outcomes_are_limited_to_the_newest(self, subject: Subject) -> None:
        """The stores under test keep 1,000."""
        for start in range(0, 3_000, 7):
            await subject.commit(ended(range(start, start + 7)))
        outcomes = (await subject.small()).outcomes
        assert [task_id for task_id, _ in outcomes] == list(range(2_003, 3_003))
        await subject.reopen()
        await subject.commit(ended([9_999], Outcome.DELETED))
        outcomes = (await subject.small()).outcomes
        assert len(outcomes) == 1_000
        assert outcomes[-1] == (9_999, Outcome.DELETED)
        assert outcomes[0][0] == 2_004

    async def test_outcomes_of_a_large_batch_are_limited(self, subject: Subject) -> None:
        await subject.commit(ended(range(5_000)))
        outcomes = (await subject.small()).outcomes
        assert [task_id for task_id, _ in outcomes] == list(range(4_000, 5_000))


class TestReading:
    async def test_extreme_values_are_read_back_unchanged(self, subject: Subject) -> None:
        await subject.commit(everything())
        for restart in (False, True):
            if restart:
                await subject.reopen()
            rows = await subject.store.read([row.id for row in TASKS])
            assert {i: task.row for i, task in rows.items()} == {row.id: row for row in TASKS}
            assert rows[3].progress == tuple(sorted(row for row in PROGRESS if row.id == 3))
            assert rows[3].dead == (DEAD[0],)
            assert rows[1] == StoredTask(TASKS[0], (), ())
            properties = rows[3].row.options and rows[3].row.options.properties
            assert properties
            assert str(properties["minus zero"]) == "-0.0"
            assert [type(properties[k]) for k in ("yes", "one", "tiny")] == [bool, int, float]
            small = await subject.small()
            assert small.progress == sorted(PROGRESS)
            assert small.dead == sorted((d.id, d.group, d.topic) for d in DEAD)
            assert sorted(small.of_kind(GROUP)) == sorted(GROUPS)
            assert sorted(small.of_kind(SESSION)) == sorted(SESSIONS)
            assert small.outcomes == list(everything().ended.items())

    async def test_schedules_are_read_back_unchanged(self, subject: Subject) -> None:
        one, *others = SCHEDULES
        await subject.commit(Effects(records=keyed(SCHEDULE, SCHEDULES)))
        await subject.reopen()
        records = (await subject.small()).of_kind(SCHEDULE)
        assert sorted(records) == sorted(SCHEDULES)
        changed = one._replace(runs=7, next_ms=MS_MAX)
        await subject.commit(
            Effects(
                records=keyed(SCHEDULE, [changed])
                | dropped(SCHEDULE, "no", *(row.schedule.name for row in others))
            )
        )
        for restart in (False, True):
            if restart:
                await subject.reopen()
            assert (await subject.small()).of_kind(SCHEDULE) == [changed]

    async def test_a_run_and_its_schedules_advance_are_atomic(self, subject: Subject) -> None:
        effects = tasks([10])
        effects.put(SCHEDULE, SCHEDULES[0])
        await subject.commit(effects)
        await subject.reopen()
        assert list(await subject.store.read([10])) == [10]
        assert (await subject.small()).of_kind(SCHEDULE) == [SCHEDULES[0]]

    async def test_transactions_are_read_back_unchanged(self, subject: Subject) -> None:
        rows = {key_of(row): row for row in TRANSACTIONS}
        await subject.commit(Effects(records=keyed(TRANSACTION, TRANSACTIONS)))
        await subject.reopen(clean=False)
        assert sorted((await subject.small()).of_kind(TRANSACTION), key=key_of) == [
            rows[key] for key in sorted(rows)
        ]
        changed = TRANSACTIONS[-1]
        assert isinstance(changed, TransactionRow)
        rows["c", 0] = changed._replace(state=TransactionState.OPEN, topics=(UNICODE,))
        gone = (("order-17", 1), ("b", 0), ("no", 7))
        changes = dropped(TRANSACTION, *gone) | keyed(TRANSACTION, [rows["c", 0]])
        await subject.commit(Effects(records=changes))
        kept = [rows[key] for key in sorted(rows) if key not in gone]
        for restart in (False, True):
            if restart:
                await subject.reopen()
            assert sorted((await subject.small()).of_kind(TRANSACTION), key=key_of) == kept

    async def test_bulk_operations_are_read_back_unchanged(self, subject: Subject) -> None:
        rows = {row.bulk.id: row for row in BULKS}
        await subject.commit(Effects(records=keyed(BULK, BULKS)))
        await subject.reopen(clean=False)
        assert by_id((await subject.small()).of_kind(BULK)) == list(BULKS)
        rows["a"] = rows["a"]._replace(place=(9, "g"), refused=(("dead", 3),))
        await subject.commit(Effects(records=keyed(BULK, [rows["a"]]) | dropped(BULK, "c", "no")))
        del rows["c"]
        for restart in (False, True):
            if restart:
                await subject.reopen()
            assert by_id((await subject.small()).of_kind(BULK)) == list(rows.values())

    async def test_a_bulk_step_and_its_changes_are_atomic(self, subject: Subject) -> None:
        await subject.commit(Effects(enqueued={10: TaskRow(10, 5, "t", b"x")}))
        step = BULKS[0]._replace(place=(10, ""), changed=1)
        effects = Effects(ended={10: Outcome.CANCELLED}, records=keyed(BULK, [step]))
        assert not effects.is_empty() and not effects.makes_tasks
        await subject.commit(effects)
        await subject.reopen(clean=False)
        assert by_id((await subject.small()).of_kind(BULK)) == [step]
        assert await subject.ids() == []

    async def test_a_transactions_commit_and_tasks_are_atomic(self, subject: Subject) -> None:
        await subject.commit(Effects(records=keyed(TRANSACTION, TRANSACTIONS)))
        effects = tasks([10, 11])
        head = next(row for row in TRANSACTIONS if key_of(row) == ("order-17", 0))
        assert isinstance(head, TransactionRow)
        done = head._replace(state=TransactionState.COMMITTED, first_id=10)
        gone = {key_of(half): None for half in HALVES}
        effects.change(TRANSACTION, {**gone, ("order-17", 0): done})
        await subject.commit(effects)
        await subject.reopen(clean=False)
        assert sorted(await subject.store.read([10, 11])) == [10, 11]
        result = {key_of(row): row for row in (await subject.small()).of_kind(TRANSACTION)}
        assert result["order-17", 0] == done
        assert not result.keys() & gone.keys()

    async def test_the_snooze_count_is_read_back(self, subject: Subject) -> None:
        first = next(row for row in PROGRESS if row.snoozes)
        key, again = (first.id, first.group), first._replace(failures=(), snoozes=1)
        await subject.commit(tasks([first.id]))
        for row in (first, again, again._replace(snoozes=0)):
            await subject.commit(Effects(progress={key: row}))
            await subject.reopen()
            assert (await subject.small()).progress == [row]
            assert (await subject.store.read([row.id]))[row.id].progress == (row,)

    async def test_settings_and_outcomes_are_read_back(self, subject: Subject) -> None:
        records = keyed(GROUP, GROUPS) | keyed(SESSION, SESSIONS)
        await subject.commit(Effects(records=dict(records)))
        await subject.reopen()
        small = await subject.small()
        assert small.records == records

    async def test_types_are_those_of_the_records(self, subject: Subject) -> None:
        await subject.commit(everything())
        task = (await subject.store.read([3]))[3]
        assert type(task.row) is TaskRow
        assert type(task.row.body) is bytes
        assert type(task.progress) is tuple
        assert {type(row.state).__name__ for row in task.progress} == {"ProgressState"}
        assert {type(how) for _, how in (await subject.small()).outcomes} == {Outcome}

    async def test_unknown_ids_are_left_out(self, subject: Subject) -> None:
        await subject.commit(tasks([10]))
        assert await subject.store.read([]) == {}
        rows = await subject.store.read([9, 10, 10, 11, 0, -1, ID_MAX, 2**64])
        assert list(rows) == [10]

    async def test_sees_a_batch_when_its_commit_has_returned(self, subject: Subject) -> None:
        for i in range(1, 50):
            await subject.commit(tasks([i]))
            assert list(await subject.store.read([i])) == [i]
            await subject.commit(ended([i]))
            assert await subject.store.read([i]) == {}

    async def test_many_large_bodies(self, subject: Subject) -> None:
        await subject.commit(tasks(range(1, 20), body=b"\x00\xff" * 10_000))
        await subject.commit(tasks(range(20, 600), body=b"z" * 600))
        rows = await subject.store.read(list(range(1, 600)))
        assert [len(rows[i].row.body) for i in (1, 19, 20, 599)] == [20_000, 20_000, 600, 600]
        assert len(rows) == 599


class TestScanning:
    async def test_pages_by_id(self, subject: Subject) -> None:
        await subject.commit(tasks(range(1, 26), topic="a"))
        await subject.commit(tasks(range(26, 51), topic="b"))
        pages, after = [], -1
        while page := [t.row.id for t in await subject.store.scan(after, 7, None)]:
            pages.append(page)
            after = page[-1]
        assert [i for page in pages for i in page] == list(range(1, 51))
        assert {len(page) for page in pages[:-1]} == {7}

    async def test_filters_by_topic(self, subject: Subject) -> None:
        await subject.commit(tasks(range(1, 26), topic="a"))
        await subject.commit(tasks(range(26, 51), topic=UNICODE))
        page = await subject.store.scan(20, 10, UNICODE)
        assert [task.row.id for task in page] == list(range(26, 36))
        assert await subject.store.scan(-1, 10, "no such") == []

    @pytest.mark.parametrize("options", [False, pytest.param(True, marks=pytest.mark.slow)])
    async def test_a_page_ends_at_its_bytes_and_the_next_goes_on(
        self, subject: Subject, options: bool
    ) -> None:
        size, count = SCAN_BYTES_MAX // 4, 7
        batch = tasks(range(1, 2 * count), topic="a", body=b"x" * (0 if options else size))
        for task_id, row in batch.enqueued.items():
            if options:
                more = row._replace(options=TaskOptions(properties={"p": "v" * size}))
                batch.enqueued[task_id] = more
            if task_id % 2:
                batch.enqueued[task_id] = batch.enqueued[task_id]._replace(topic="b")
        for first in range(1, 2 * count, 2):
            # A store may take no more at once.
            ids = (first, first + 1)
            some = {i: row for i, row in batch.enqueued.items() if i in ids}
            await subject.commit(Effects(enqueued=some))
        scan, scan_back = subject.store.scan, subject.store.scan_back
        for topic, wanted in (
            (None, list(range(1, 2 * count))),
            ("b", list(range(1, 2 * count, 2))),
        ):
            for back in (False, True):
                results: list[int] = []
                place = 2 * count if back else -1
                while page := await (scan_back if back else scan)(place, 100, topic):
                    assert len(page) <= 4
                    assert is_cut(page) == (len(page) == 4)
                    results += [task.row.id for task in page]
                    place = results[-1]
                assert results == (wanted[::-1] if back else wanted)

    async def test_gives_whole_tasks(self, subject: Subject) -> None:
        await subject.commit(everything())
        page = await subject.store.scan(2, 1, None)
        assert page == [(await subject.store.read([3]))[3]]

    async def test_ends_at_the_last_id(self, subject: Subject) -> None:
        await subject.commit(everything())
        assert [t.row.id for t in await subject.store.scan(ID_MAX - 1, 5, None)] == [ID_MAX]
        assert await subject.store.scan(ID_MAX, 5, None) == []
        assert await subject.store.scan(2**64, 5, None) == []

    async def test_pages_back_from_the_highest_id(self, subject: Subject) -> None:
        await subject.commit(tasks(range(1, 26), topic="a"))
        await subject.commit(tasks(range(26, 51), topic=UNICODE))
        await subject.commit(Effects(ended={48: Outcome.ACKED, 3: Outcome.CANCELLED}))
        pages, before = [], 2**64
        while page := [t.row.id for t in await subject.store.scan_back(before, 7, None)]:
            pages.append(page)
            before = page[-1]
        assert [i for page in pages for i in page] == [
            i for i in range(50, 0, -1) if i not in {48, 3}
        ]
        assert {len(page) for page in pages[:-1]} == {7}
        result = await subject.store.scan_back(27, 99, UNICODE)
        assert [task.row.id for task in result] == [26]
        result = await subject.store.scan_back(2**64, 3, "a")
        assert [task.row.id for task in result] == [25, 24, 23]
        assert await subject.store.scan_back(99, 9, "no such") == []
        assert await subject.store.scan_back(1, 9, None) == []
        assert await subject.store.scan_back(-5, 9, None) == []

    async def test_back_it_gives_whole_tasks_and_the_last_id(self, subject: Subject) -> None:
        await subject.commit(everything())
        assert [t.row.id for t in await subject.store.scan_back(ID_MAX + 1, 1, None)] == [ID_MAX]
        assert ID_MAX not in [t.row.id for t in await subject.store.scan_back(ID_MAX, 9, None)]
        assert await subject.store.scan_back(4, 1, None) == [(await subject.store.read([3]))[3]]

    async def test_pages_of_dead_letters(self, subject: Subject) -> None:
        rows = [
            DeadRow(i, group, "even" if i % 2 == 0 else "odd", 1, 1, "")
            for i in range(1, 21)
            for group in ("a", "b", UNICODE)
        ]
        await subject.commit(tasks(range(1, 21)))
        await subject.commit(Effects(dead={(row.id, row.group): row for row in rows}))
        results: list[DeadRow] = []
        after = (0, "")
        while page := await subject.store.scan_dead(after, 7, None, None):
            results += page
            after = (page[-1].id, page[-1].group)
        assert results == sorted(rows)
        assert await subject.store.scan_dead((3, "a"), 3, None, None) == sorted(rows)[7:10]
        assert await subject.store.scan_dead((0, ""), 99, "even", "b") == [
            row for row in sorted(rows) if row.topic == "even" and row.group == "b"
        ]
        assert await subject.store.scan_dead((0, ""), 99, "no such", None) == []
        assert await subject.store.scan_dead((ID_MAX, ""), 99, None, None) == []

    async def test_dead_letters_have_all_fields(self, subject: Subject) -> None:
        await subject.commit(everything())
        assert await subject.store.scan_dead((-1, ""), 99, None, None) == sorted(DEAD)


class TestRecovery:
    async def test_handles_are_recovered_in_due_order(self, subject: Subject) -> None:
        rows = [TaskRow(i, (i * 7_919) % 50, f"topic{i % 3}", b"") for i in range(1, 501)]
        await subject.commit(Effects(enqueued={row.id: row for row in rows}, id_mark=500))
        chunks = await subject.handles(chunk=64)
        assert [len(chunk.ids) for chunk in chunks] == [64] * 7 + [52]
        results = [
            (due_ms, task_id, topic)
            for chunk in chunks
            for task_id, due_ms, topic in zip(chunk.ids, chunk.dues_ms, chunk.topics, strict=True)
        ]
        assert sorted(results) == sorted((row.due_ms, row.id, row.topic) for row in rows)
        assert [due_ms for due_ms, _, _ in results] == sorted(row.due_ms for row in rows)
        for chunk in chunks:
            pairs = list(zip(chunk.dues_ms, chunk.ids, strict=True))
            assert pairs == sorted(pairs)

    async def test_extremes_are_among_the_handles(self, subject: Subject) -> None:
        await subject.commit(everything())
        (chunk,) = await subject.handles()
        results = list(zip(chunk.ids, chunk.dues_ms, chunk.topics, strict=True))
        assert results == [
            (row.id, row.due_ms, row.topic)
            for row in sorted(TASKS, key=lambda row: (row.due_ms, row.id))
        ]

    async def test_an_empty_store_has_no_handles(self, subject: Subject) -> None:
        assert await subject.handles() == []

    async def test_commits_continue_between_chunks(self, subject: Subject) -> None:
        await subject.commit(tasks(range(1, 101)))
        results: list[int] = []
        async for handles in subject.store.recover_handles(chunk=10):
            results += handles.ids
            await subject.commit(ended([results[-1]]))
            await subject.commit(tasks([1_000 + len(results)], due_ms=0))
        assert results == list(range(1, 101))
        assert len(await subject.ids()) == 100

    async def test_keys_are_recovered_as_hashes(self, subject: Subject) -> None:
        """In packs, mixed packs and rows of their own; given or worked out; moved and ended."""
        key_hash = KeyHash(subject.opened.key_seed)
        rows: dict[int, TaskRow] = {}
        batches = ((200, lambda n: TaskOptions(key=f"k{n}")), (100, _sometimes), (3, _sometimes))
        for count, options_of in batches:
            first = (max(rows, default=1 << 40) // ID_STEP + 2) * ID_STEP
            fresh = {
                first + n * ID_STEP: TaskRow(
                    first + n * ID_STEP, n, f"t{n % 2}", bytes(n), options_of(n)
                )
                for n in range(count)
            }
            known = dict(list(key_hash.of_rows(fresh.values()).items())[::2])
            rows |= fresh
            await subject.commit(Effects(enqueued=fresh, hashes=known, id_mark=max(rows)))
            assert await _keys(subject) == key_hash.of_rows(rows.values())
        for step in (1, 2, 3, 5):
            some = list(rows)[::7][:: step * 3]
            left = {i: rows[i]._replace(due_ms=5) for i in some[::2]}
            gone = [task_id for task_id in list(rows)[step::4] if task_id not in left]
            rows = {i: left.get(i, row) for i, row in rows.items() if i not in gone}
            await subject.commit(Effects(updated=left, ended=dict.fromkeys(gone, Outcome.ACKED)))
            assert await _keys(subject) == key_hash.of_rows(rows.values())
        key_hash = KeyHash((await subject.reopen()).key_seed)
        assert await _keys(subject) == key_hash.of_rows(rows.values())
        await subject.commit(ended(rows))
        assert await _keys(subject) == {}

    async def test_keys_of_every_extreme(self, subject: Subject) -> None:
        await subject.commit(everything())
        assert await _keys(subject) == KeyHash(subject.opened.key_seed).of_rows(TASKS)

    async def test_recovery_can_be_abandoned(self, subject: Subject) -> None:
        await subject.commit(tasks(range(1, 101)))
        async for _ in subject.store.recover_handles(chunk=10):
            break
        await subject.commit(tasks([1_000]))
        assert (await subject.reopen()).last_batch == 2


class TestOpening:
    async def test_a_new_store_has_its_first_epoch(self, subject: Subject) -> None:
        opened = subject.opened
        assert opened.created
        assert opened.clean
        assert opened.epoch >= 1
        assert (opened.last_batch, opened.id_mark, opened.position_ms) == (0, 0, 0)

    async def test_keeps_everything_and_raises_the_epoch(self, subject: Subject) -> None:
        await subject.commit(everything())
        await subject.commit(tasks([100], body=b"again"))
        epochs = [subject.opened.epoch]
        for clean in (True, False, True):
            opened = await subject.reopen(clean)
            epochs.append(opened.epoch)
            assert not opened.created
            assert opened.clean is clean
            assert opened.last_batch == 2
            assert len(await subject.ids()) == len(TASKS) + 1
        assert all(a < b for a, b in pairwise(epochs))

    async def test_is_not_clean_while_it_is_open(self, subject: Subject) -> None:
        await subject.store.close(clean=True)
        await subject.open()
        await subject.store.close(clean=False)
        assert (await subject.open()).clean is False

    async def test_batch_numbers_go_on(self, subject: Subject) -> None:
        await subject.commit(tasks([1]))
        opened = await subject.reopen()
        assert await subject.store.commit(opened.epoch, OWNER, 1, tasks([2])) is False
        assert await subject.store.commit(opened.epoch, OWNER, 2, tasks([2])) is True

    async def test_close_may_be_called_twice(self, subject: Subject) -> None:
        await subject.store.close(clean=True)
        await subject.store.close(clean=False)
        assert (await subject.open()).clean is True

    async def test_a_closed_store_refuses(self, subject: Subject) -> None:
        await subject.store.close(clean=True)
        with pytest.raises(StoreBroken):
            await subject.commit(tasks([1]))
        with pytest.raises(StoreBroken):
            await subject.store.read([1])

    async def test_probe_room_finds_room(self, subject: Subject) -> None:
        assert await subject.store.probe_room() is True


class TestBackup:
    async def test_is_a_store_of_the_same_content(self, subject: Subject, tmp_path: Path) -> None:
        await subject.commit(everything())
        path = tmp_path / "backups" / "copy.db"
        path.parent.mkdir()
        assert await subject.store.backup(str(path)) == path.stat().st_size
        assert list(path.parent.iterdir()) == [path], "nothing is left beside it"
        await subject.commit(tasks([100]))
        copy = Subject(open_url(f"sqlite:///{path}"))
        opened = await copy.open()
        try:
            assert (opened.id_mark, opened.position_ms) == (ID_MAX, everything().position_ms)
            assert await copy.ids() == sorted(row.id for row in TASKS)
            ids = [row.id for row in TASKS]
            assert await copy.store.read(ids) == await subject.store.read(ids)
            assert await copy.small() == await subject.small()
        finally:
            await copy.store.close(clean=True)

    @pytest.mark.parametrize(("kind", "rows"), [(TRANSACTION, TRANSACTIONS), (BULK, BULKS)])
    async def test_has_records(
        self, subject: Subject, tmp_path: Path, kind: Kind[Any], rows: Sequence[Any]
    ) -> None:
        await subject.commit(Effects(records=keyed(kind, rows)))
        path = tmp_path / "copy.db"
        await subject.store.backup(str(path))
        copy = Subject(open_url(f"sqlite:///{path}"))
        await copy.open()
        try:
            assert len((await copy.small()).of_kind(kind)) == len(rows)
            assert await copy.small() == await subject.small()
        finally:
            await copy.store.close(clean=True)

    async def test_does_not_replace_a_file(self, subject: Subject, tmp_path: Path) -> None:
        path = tmp_path / "there"
        path.write_bytes(b"mine")
        with pytest.raises(StoreError, match="exists"):
            await subject.store.backup(str(path))
        assert path.read_bytes() == b"mine"

    async def test_fails_in_an_absent_folder(self, subject: Subject, tmp_path: Path) -> None:
        with pytest.raises(StoreError):
            await subject.store.backup(str(tmp_path / "no" / "copy.db"))
        assert await subject.commit(tasks([1])) is True


def _sometimes(n: int) -> TaskOptions | None:
    """A key, or something else, or nothing."""
    return (None, TaskOptions(tag="x"), TaskOptions(key=f"é{n % 7}", priority=1))[n % 3]


async def _keys(subject: Subject) -> dict[int, int]:
    await subject.handles()
    return await subject.keys()
