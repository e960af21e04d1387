"""Due windows from the frame to the task: what is answered, kept, refused and shown."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

import pytest

from server.shard.test_scheduling import SchedulingRig
from support.in_process import InProcess
from support.shard_rig import NOW_MS
from tickwheel.api.frames import FrameType as T
from tickwheel.errors import LimitExceeded

DAY_MS = 86_400_000
FLOOR = 0


@pytest.fixture
async def rig(daemon: InProcess) -> SchedulingRig:
    return SchedulingRig(daemon)


def windowed(delay_ms: int, within_ms: Any, **options: Any) -> tuple[Any, ...]:
    return "t", b"x", delay_ms, {"within_ms": within_ms, **options}


async def enqueue(rig: SchedulingRig, *tasks: tuple[Any, ...]) -> list[int]:
    """Their due times, as they were answered."""
    accepted_ms, ids, *more = await rig.ask(T.ENQUEUE, FLOOR, tasks)
    assert accepted_ms == rig.daemon.sources.now_ms and len(ids) == len(tasks)
    (said,) = more
    assert list(said) == ["dues_ms"]
    return list(said["dues_ms"])


async def look(rig: SchedulingRig, *ids: int) -> list[dict[str, Any]]:
    return list(await rig.ask(T.LOOKUP, list(ids)))


async def test_tasks_with_a_window_spread_and_answers_have_due_times(rig: SchedulingRig) -> None:
    dues = [
        due for _ in range(4) for due in await enqueue(rig, *[windowed(60_000, 600_000)] * 3_000)
    ]
    low_ms = NOW_MS + 60_000
    assert min(dues) == low_ms and max(dues) <= low_ms + 600_000
    each = Counter(due_ms // 1000 for due_ms in dues)
    assert max(each.values()) <= ceil(12_000 / 600)
    answer = await rig.ask(T.LIST, {"limit": 1_000, "topic": "t"})
    assert {task["due_ms"] for task in answer["tasks"]} <= set(dues)
    one = answer["tasks"][0]
    assert (one["asked_ms"], one["within_ms"]) == (low_ms, 600_000)


async def test_tasks_with_a_window_avoid_plain_tasks(rig: SchedulingRig) -> None:
    answer = await rig.ask(T.ENQUEUE, FLOOR, [("t", b"x", 60_000)] * 5)
    assert len(answer) == 2
    (due_ms,) = await enqueue(rig, windowed(60_000, 2_000))
    assert due_ms == NOW_MS + 61_000
    mixed = await enqueue(rig, ("t", b"x", 5), windowed(60_000, 0), windowed(60_000, 3_999))
    assert mixed == [NOW_MS + 5, NOW_MS + 60_000, NOW_MS + 62_000]
    tasks = await rig.tasks()
    assert [task["within_ms"] for task in tasks] == [None] * 5 + [2_000, None, None, 3_999]


async def test_uncommitted_tasks_count_in_a_window(daemon: InProcess, rig: SchedulingRig) -> None:
    numbers = [rig.send(T.ENQUEUE, FLOOR, [windowed(60_000, 9_999)]) for _ in range(5)]
    daemon.sources.now_ms += 5_000  # counts that were read are old by now
    numbers += [rig.send(T.ENQUEUE, FLOOR, [windowed(55_000, 9_999)]) for _ in range(5)]
    await daemon.settle()
    answers = {f[1]: f for f in rig.peer.frames()}
    dues = [answers[number][2][2]["dues_ms"][0] for number in numbers]
    assert [(due_ms - NOW_MS - 60_000) // 1000 for due_ms in dues] == list(range(10))


async def test_a_window_in_the_past_begins_now(rig: SchedulingRig) -> None:
    tasks = [("t", b"x", None, {"due_ms": NOW_MS - 60_000, "within_ms": 5_000})] * 3
    dues = await enqueue(rig, *tasks)
    assert sorted(dues) == [NOW_MS, NOW_MS + 1_000, NOW_MS + 2_000]


async def test_a_task_is_not_delivered_before_its_chosen_time(rig: SchedulingRig) -> None:
    await rig.ask(T.ENQUEUE, FLOOR, [("t", b"x", 60_000)])
    (due_ms,) = await enqueue(rig, windowed(60_000, 10_000))
    await rig.ask(T.SUBSCRIBE, 1, "t", "g", 10, {})
    await rig.pass_time(due_ms - NOW_MS - 1)
    came = [item[2] for f in rig.peer.frames() if f[0] == T.DELIVER for item in f[4]]
    assert came == [NOW_MS + 60_000]
    await rig.pass_time(1)
    came = [item[2] for f in rig.peer.frames() if f[0] == T.DELIVER for item in f[4]]
    assert came == [due_ms]


async def test_a_resend_has_the_same_due_times(daemon: InProcess, rig: SchedulingRig) -> None:
    rig.peer = daemon.connect(session=b"s" * 16)
    tasks = [windowed(60_000, 600_000)] * 3
    number = rig.send(T.ENQUEUE, FLOOR, tasks)
    await daemon.settle()
    first = rig.answer(number)
    rig._number -= 1
    assert rig.send(T.ENQUEUE, FLOOR, tasks) == number
    await daemon.settle()
    assert rig.answer(number) == first
    await rig.ask(T.CANCEL, [first[1][1]])
    rig._number = number - 1
    rig.send(T.ENQUEUE, FLOOR, tasks)
    await daemon.settle()
    dues = first[2]["dues_ms"]
    assert rig.answer(number)[2] == {"dues_ms": (dues[0], None, dues[2])}


@pytest.mark.parametrize(
    ("within", "code", "words"),
    [
        (-1, "bad_request", "tasks[0].within_ms"),
        (True, "bad_request", "tasks[0].within_ms"),
        ("10m", "bad_request", "tasks[0].within_ms"),
        (1.5, "bad_request", "tasks[0].within_ms"),
        (2**64 - 1, "bad_request", "tasks[0].within_ms"),
        (DAY_MS + 1, LimitExceeded.code, f"is {DAY_MS + 1}; the limit is {DAY_MS} (within_ms_max)"),
    ],
)
async def test_an_invalid_within_is_refused(
    within: Any, code: str, words: str, rig: SchedulingRig
) -> None:
    answer = await rig.ask(T.ENQUEUE, FLOOR, [windowed(0, within)])
    assert answer[0] == code and words in answer[1], answer
    assert await rig.tasks() == []
    answer = await rig.put(task={"within_ms": within})
    assert answer[0] == code and "task.within_ms" in answer[1], answer


async def test_a_refused_batch_frees_its_chosen_times(
    daemon: InProcess, rig: SchedulingRig
) -> None:
    rig.send(T.ENQUEUE, FLOOR, [windowed(60_000, 9_999)] * 10)
    intake = daemon.shard.engine.intake
    assert len(daemon.shard.core.open.placed) == 10
    intake.withdraw()
    assert daemon.shard.core.open.placed == [] and daemon.shard.core.open.chosen == {}
    daemon.sources.now_ms += 1_000
    (due_ms,) = await enqueue(rig, windowed(59_000, 9_999))
    assert due_ms == NOW_MS + 60_000


async def test_every_occurrence_of_a_schedule_has_the_window(rig: SchedulingRig) -> None:
    for name in ("one", "two", "three"):
        made = await rig.put(name, task={"within_ms": 2_000})
        assert made["task"] == {"within_ms": 2_000}
    assert (await rig.put(task={"within_ms": 2_000}))["outcome"] == "created"
    assert (await rig.put(task={"within_ms": 2_000}))["outcome"] == "unchanged"
    planned_ms = NOW_MS + 10_000
    await rig.pass_time(10_000)
    tasks = await rig.tasks()
    assert {(task["asked_ms"], task["within_ms"]) for task in tasks} == {(planned_ms, 2_000)}
    after_ms = sorted(task["due_ms"] - planned_ms for task in tasks)
    # The window's last tick is one of which it has the first millisecond only.
    assert after_ms == [0, 617, 1_000, 1_617]


async def test_a_reschedule_is_exact(rig: SchedulingRig) -> None:
    (_, (task_id,), _) = await rig.ask(T.ENQUEUE, FLOOR, [windowed(60_000, 5_000)])
    assert await rig.ask(T.RESCHEDULE, [task_id], {"delay_ms": 90_000}) == (
        (task_id, "scheduled", NOW_MS + 90_000),
    )  # fmt: skip
    (task,) = await look(rig, task_id)
    assert (task["due_ms"], task["asked_ms"]) == (NOW_MS + 90_000, NOW_MS + 60_000)


async def test_load_counts_the_tasks_on_the_wheel(rig: SchedulingRig) -> None:
    for delay_ms, count in ((5_000, 2), (65_000, 3), (DAY_MS, 4)):
        await rig.ask(T.ENQUEUE, FLOOR, [("t", b"x", delay_ms)] * count)
    answer = await rig.ask(T.LOAD, {"steps": 3})
    first_ms = NOW_MS // 60_000 * 60_000
    assert answer == {
        "from_ms": first_ms, "step_ms": 60_000, "counts": (2, 3, 0), "exact": True,
        "scheduled": 9,
    }  # fmt: skip
    answer = await rig.ask(T.LOAD, {"step_ms": 3_600_000, "steps": 25})
    assert (answer["counts"][0], sum(answer["counts"]), answer["exact"]) == (5, 9, True)
    answer = await rig.ask(T.LOAD, {"from_ms": NOW_MS + DAY_MS, "step_ms": 1_000, "steps": 1})
    assert answer["counts"] == (4,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 1_441}, "steps"),
        ({"step_ms": 999}, "step_ms"),
        ({"step_ms": 1_500}, "step_ms must be a multiple of 1000 (tick_ms), not 1500"),
        ({"step_ms": 10**12, "steps": 1_000}, "step_ms"),
        ({"from_ms": -1}, "from_ms"),
        ({"from_ms": 2**62}, "from_ms"),
        ({"hours": 3}, "hours"),
    ],
)
async def test_an_invalid_load_request_is_refused(
    options: dict[str, Any], words: str, daemon: InProcess
) -> None:
    code, message = await SchedulingRig(daemon).ask(T.LOAD, options)
    assert code == "bad_request" and words in message


async def test_a_task_with_a_coalescing_rule_can_have_a_window(rig: SchedulingRig) -> None:
    await rig.ask(T.ENQUEUE, FLOOR, [("t", b"x", 60_000)] * 50)
    task = windowed(60_000, 60_000, key="k", if_pending="keep")
    first = await rig.ask(T.ENQUEUE, FLOOR, [task])
    again = await rig.ask(T.ENQUEUE, FLOOR, [task])
    (found,) = await look(rig, first[1][0])
    low_ms = NOW_MS + 60_000
    assert low_ms + 1_000 <= found["due_ms"] <= low_ms + 60_000
    assert (found["asked_ms"], found["within_ms"]) == (low_ms, 60_000)
    rows = [(word, due_ms) for (word, due_ms) in (*first[2]["outcomes"], *again[2]["outcomes"])]
    assert rows == [("stored", found["due_ms"]), ("kept", found["due_ms"])]


async def test_a_replaced_body_keeps_the_due_time_despite_its_window(rig: SchedulingRig) -> None:
    await rig.ask(T.ENQUEUE, FLOOR, [("t", b"x", 0, {"key": "k"})])
    epoch, _, ((task_id, attempt, *_),) = await rig.ask(T.PULL, "t", "g", 1, 0, None)
    await rig.ask(T.NACK, "t", "g", [(task_id, epoch, attempt, 5_000, "no")])
    task = windowed(0, 60_000, key="k", if_pending={"action": "replace", "replaces": "body"})
    _, (newer_id,), more = await rig.ask(T.ENQUEUE, FLOOR, [task])
    assert newer_id != task_id
    assert more["outcomes"] == (("replaced", NOW_MS + 5_000),)
