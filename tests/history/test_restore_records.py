"""Paused keys, targets and claimed names of a lost store: what a backup had, and what changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.recording_rig import RecordingRig
from history.test_restore_model import lines
from support.engine_rig import CONFIG
from support.history_rig import NOW_MS, write
from support.restore_rig import STARTED, held, make_backup, restored, run, stopped, url
from tickwheel.history.fold import Fold, Owners
from tickwheel.history.lines import EventKind
from tickwheel.history.restore import NOT_COPIED
from tickwheel.model.kinds import (
    BULK,
    CLAIM,
    COUNTER,
    KINDS,
    PAUSED_KEY,
    RECORDED,
    SESSION,
    TARGET,
    ClaimRow,
    PausedKey,
    RecordKey,
    TargetRow,
    keyed,
)
from tickwheel.model.records import GroupSettings

TOPIC, GROUPS = "t", ("g", "h")
VALUES: list[str | int | float | bool] = ["a", "", "1", 1, 2**53 + 1, 0.5, True]
SECRETS = [(), ("one",), ("one", "two")]
URLS = ["https://one/", "redis://two", "https://one/?token=a", "https://one/?token=b"]
OPTIONS = (("headers", "a: b"), ("n", 3))
TARGET_ROW = TargetRow("t", "g", "push", "https://one/", ("one",), OPTIONS, 5, "me")


def test_no_kind_of_record_is_silently_taken_from_the_backup() -> None:
    """A new kind needs events, or an exception that docs/history.md names."""
    taken = set(KINDS.values()) - set(NOT_COPIED)
    assert taken == {SESSION, COUNTER}
    assert {*RECORDED.values(), BULK} < set(NOT_COPIED)


def pause(rig: RecordingRig, group: str, value: Any, number: int) -> None:
    by = "tenant" if number % 2 else None
    key = PausedKey(TOPIC, group, by, value, NOW_MS + number, "me")
    rig.engine.key_control.pause(rig.group(TOPIC, group), key)


def resume(rig: RecordingRig, group: str, value: Any, number: int) -> None:
    by = "tenant" if number % 2 else None
    rig.engine.key_control.resume(rig.group(TOPIC, group), by, value, NOW_MS)


def set_target(rig: RecordingRig, group: str, value: Any, number: int) -> None:
    row = TARGET_ROW._replace(
        group=group, url=URLS[number % 4], secrets=SECRETS[number % 3], since_ms=number
    )
    rig.engine.grouping.set_target(row)


def end_target(rig: RecordingRig, group: str, value: Any, number: int) -> None:
    row = rig.core.targets.get((TOPIC, group))
    if row is not None:
        rig.engine.grouping.set_target(row._replace(ended_ms=number, reason="410"))


def drop_target(rig: RecordingRig, group: str, value: Any, number: int) -> None:
    rig.engine.grouping.drop_target(TOPIC, group)


def claim(rig: RecordingRig, group: str, value: Any, number: int) -> None:
    row = ClaimRow("schedule", str(value), TOPIC, number % 4, number, NOW_MS, number % 2 == 0)
    rig.core.put_record(CLAIM, row)


def drop_claim(rig: RecordingRig, group: str, value: Any, number: int) -> None:
    rig.core.drop_record(CLAIM, ClaimRow("schedule", str(value), TOPIC, 0, 0, 0))


def share_differently(rig: RecordingRig, group: str, value: Any, number: int) -> None:
    """This ends the pauses of shares."""
    settings = GroupSettings().replaced({"fair_by": "tenant" if number % 2 else "region"})
    rig.engine.grouping.set(rig.group(TOPIC, group), settings, 0)


STEPS: list[Callable[[RecordingRig, str, Any, int], None]] = [
    pause, pause, resume, set_target, set_target, end_target, drop_target, claim, drop_claim,
    share_differently,
]  # fmt: skip


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(STEPS), st.sampled_from(GROUPS), st.sampled_from(VALUES),
            st.integers(0, 9),
        ),
        max_size=30,
    ),
    at=st.integers(0, 30),
)  # fmt: skip
def test_events_since_any_backup_lead_to_the_records_of_the_store(
    steps: list[tuple[Callable[..., None], str, Any, int]], at: int
) -> None:
    """Except for targets whose secrets, or hidden URLs, only the store has; these are named."""
    rig = RecordingRig(CONFIG)
    for group in GROUPS:
        rig.subscribe(TOPIC, group)
    backup, start = {}, 0
    for number, (step, *arguments) in enumerate(steps):
        step(rig, *arguments)
        rig.commit()
        if number == at:
            backup, start = recorded(rig), len(rig.history)
    fold = Fold(Owners([]), 0, 0, records=backup)
    for event in lines(rig.history[start:]):
        fold.apply([event])
    assert fold.unusable == 0
    lost = {(TARGET, tuple(name.split())) for name in fold.records.targets_lost()}
    stored = recorded(rig)
    assert {key: row for key, row in stored.items() if key not in lost} == fold.records.records
    assert all(stored[key].secrets or "token" in stored[key].url for key in lost)


def recorded(rig: RecordingRig) -> dict[RecordKey, Any]:
    of_kinds = [keyed(kind, rig.rows.of_kind(kind)) for kind in RECORDED.values()]
    return {key: row for rows in of_kinds for key, row in rows.items()}


def test_a_deleted_group_takes_its_pauses_and_its_target_along() -> None:
    rig = RecordingRig(CONFIG)
    rig.subscribe(TOPIC, "g")
    pause(rig, "g", "a", 0)
    rig.engine.grouping.set_target(TARGET_ROW)
    rig.commit()
    backup, start = recorded(rig), len(rig.history)
    assert len(backup) == 2
    rig.engine.closing.close(rig.group(TOPIC, "g"))
    rig.commit()
    fold = Fold(Owners([]), 0, 0, records=backup)
    for event in lines(rig.history[start:]):
        fold.apply([event])
    assert fold.records.records == recorded(rig) == {}


def test_no_secret_gets_into_the_history() -> None:
    rig = RecordingRig(CONFIG)
    rig.engine.grouping.set_target(TARGET_ROW._replace(secrets=("sesame",)))
    rig.engine.grouping.set_target(TARGET_ROW._replace(url="https://one/?token=sesame"))
    rig.commit()
    events = lines(rig.history)
    assert [event["event"] for event in events] == ["record_put", "record_put"]
    assert "sesame" not in json.dumps(events)


@pytest.mark.parametrize("changed", [True, False])
def test_a_url_with_hidden_values_comes_from_the_backup(changed: bool) -> None:
    rig = RecordingRig(CONFIG)
    target = TARGET_ROW._replace(url="https://one/?token=a")
    rig.engine.grouping.set_target(target)
    rig.commit()
    backup, start = recorded(rig), len(rig.history)
    url = "https://one/?token=b" if changed else target.url
    rig.engine.grouping.set_target(target._replace(url=url, options=(), since_ms=9))
    rig.commit()
    fold = Fold(Owners([]), 0, 0, records=backup)
    for event in lines(rig.history[start:]):
        fold.apply([event])
    assert fold.records.records == ({} if changed else recorded(rig))
    assert fold.records.targets_lost() == (["t g"] if changed else [])


def target_event(**more: Any) -> list[Any]:
    fields = TARGET_ROW._asdict() | {"secrets": 1, "same_secrets": True} | more
    return [EventKind.RECORD, NOW_MS + 5, "t", "g", "target", "put", fields]


async def restored_target(
    folder: Path, records: Mapping[RecordKey, Any], *events: list[Any]
) -> tuple[Any, list[TargetRow]]:
    backup = await make_backup(folder, records=records)
    write(folder, [[STARTED], list(events), [stopped()]])
    report, result = await restored(folder, backup)
    return report, list(result.small.of_kind(TARGET))


async def test_a_target_changed_since_is_restored_with_its_secrets(tmp_path: Path) -> None:
    event = target_event(url="https://new/", since_ms=6)
    report, rows = await restored_target(tmp_path, keyed(TARGET, [TARGET_ROW]), event)
    assert rows == [TARGET_ROW._replace(url="https://new/", since_ms=6)] and report.exact


async def test_a_target_set_just_before_the_backup_is_restored(tmp_path: Path) -> None:
    """The last position in the backup can be earlier than its last event."""
    event = target_event(same_secrets=False)
    report, rows = await restored_target(tmp_path, keyed(TARGET, [TARGET_ROW]), event)
    assert rows == [TARGET_ROW] and report.exact


async def test_a_target_with_new_secrets_is_missing_and_named(tmp_path: Path) -> None:
    """A push to the former address, or with the former secrets, would be wrong."""
    backup = await make_backup(tmp_path, records=keyed(TARGET, [TARGET_ROW]))
    event = target_event(same_secrets=False, since_ms=6)
    write(tmp_path, [[STARTED], [event], [stopped()]])
    report = await run(tmp_path, backup)
    assert (await held(url(tmp_path))).small.of_kind(TARGET) == []
    assert report.targets_lost == ["t g"] and not report.exact


async def test_a_target_that_got_other_secrets_and_was_removed_is_not_missed(
    tmp_path: Path,
) -> None:
    drop = [EventKind.RECORD, NOW_MS + 6, "t", "g", "target", "dropped", {"key": ["t", "g"]}]
    records, event = keyed(TARGET, [TARGET_ROW]), target_event(same_secrets=False, since_ms=6)
    report, rows = await restored_target(tmp_path, records, event, drop)
    assert rows == [] and report.exact


async def test_pauses_and_claims_of_the_backup_stay_without_events(tmp_path: Path) -> None:
    key = PausedKey("t", "g", None, "a", 5, "me")
    claimed = ClaimRow("transaction", "x", "t", 1, 2, 3)
    backup = await make_backup(tmp_path, records=keyed(PAUSED_KEY, [key]) | keyed(CLAIM, [claimed]))
    write(tmp_path, [[STARTED], [stopped()]])
    report, result = await restored(tmp_path, backup)
    assert list(result.small.of_kind(PAUSED_KEY)) == [key]
    assert list(result.small.of_kind(CLAIM)) == [claimed]
    assert report.exact
