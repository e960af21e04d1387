"""Transactions of a lost store: what a backup had of them, and what was decided since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.transaction_rig import TRANSACTIONS, TransactionRig, half
from history.recording_rig import RecordingRig
from history.test_restore_model import lines
from support.history_rig import NOW_MS, write
from support.restore_rig import STARTED, held, make_backup, restored, run, stopped, url
from tickwheel.history.lines import EventKind
from tickwheel.model.kinds import (
    TRANSACTION,
    Half,
    Halves,
    TransactionRow,
    TransactionState,
    key_of,
    keyed,
)
from tickwheel.model.records import TaskOptions

HALVES = Halves("x", 1, NOW_MS, (Half("t", NOW_MS + 9, None, b"1", None), half(b"2")))
HEAD = TransactionRow("x", "payments", TransactionState.OPEN, NOW_MS, NOW_MS, 2, 2, ("t",))
DETAILS: dict[str, Any] = {"group": "payments", "bytes": 2}
FIRST = (1 << 40) + 7 * 1024


def rows(*found: TransactionRow | Halves) -> dict[Any, Any]:
    return {key_of(row): row for row in found}


def event(what: str, first_id: int = 0, **details: Any) -> list[Any]:
    return [EventKind.TRANSACTION, NOW_MS + 5, "p", "x", what, 2, first_id, DETAILS | details]


async def test_an_open_transaction_is_restored(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, records=keyed(TRANSACTION, [HEAD, HALVES]))
    write(tmp_path, [[STARTED], [event("checked", checks=1, asked=1)], [stopped()]])
    report, result = await restored(tmp_path, backup)
    result = result.small.of_kind(TRANSACTION)
    assert rows(*result) == rows(HEAD, HALVES)
    assert report.exact


async def test_a_transaction_parked_since_is_parked(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, records=keyed(TRANSACTION, [HEAD, HALVES]))
    write(tmp_path, [[STARTED], [event("parked", checks=15, asked=0)], [stopped()]])
    await run(tmp_path, backup)
    result = rows(*(await held(url(tmp_path))).small.of_kind(TRANSACTION))
    assert result["x", 0].state is TransactionState.PARKED


async def test_a_transaction_committed_since_restores_its_tasks(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, records=keyed(TRANSACTION, [HEAD, HALVES]))
    ids = [FIRST, FIRST + 1024]
    dues = [NOW_MS + 10**9, NOW_MS + 10**9]
    came = [EventKind.ENQUEUED, NOW_MS + 5, "p", ids, dues, "t", {0: TaskOptions("k")}, None]
    write(tmp_path, [[STARTED], [came, event("committed", FIRST)], [stopped()]])
    report = await run(tmp_path, backup)
    assert report.without_body.count == 0
    there = await held(url(tmp_path))
    assert [(row.id, row.body) for row in there.rows.values()] == [(ids[0], b"1"), (ids[1], b"2")]
    (head,) = there.small.of_kind(TRANSACTION)
    state = TransactionState.COMMITTED
    assert head == HEAD._replace(state=state, first_id=FIRST, decided_ms=NOW_MS + 5)


async def test_a_transaction_rolled_back_since_is_rolled_back(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, records=keyed(TRANSACTION, [HEAD, HALVES]))
    write(tmp_path, [[STARTED], [event("rolled_back")], [stopped()]])
    assert (await run(tmp_path, backup)).exact
    (head,) = (await held(url(tmp_path))).small.of_kind(TRANSACTION)
    assert isinstance(head, TransactionRow) and head.state is TransactionState.ROLLED_BACK


async def test_a_transaction_prepared_since_is_named_as_lost(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, records=keyed(TRANSACTION, [HEAD, HALVES]))
    write(tmp_path, [[STARTED], [event("prepared", part=2)], [stopped()]])
    report = await run(tmp_path, backup)
    assert (await held(url(tmp_path))).small.of_kind(TRANSACTION) == []
    assert report.transactions_lost == ["x"]
    assert not report.exact


async def test_a_transaction_decided_since_is_decided(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path)
    end = event("rolled_back", topics=["t"], owner="shop", age_ms=5, checks=2, asked=1)
    write(tmp_path, [[STARTED], [event("prepared", part=1)], [end], [stopped()]])
    report = await run(tmp_path, backup)
    (head,) = (await held(url(tmp_path))).small.of_kind(TRANSACTION)
    assert head == HEAD._replace(
        state=TransactionState.ROLLED_BACK, touched_ms=NOW_MS + 5, decided_ms=NOW_MS + 5,
        checks=2, asked=1, owner="shop",
    )  # fmt: skip
    assert report.transactions_lost == []


class RecordingTransactionRig(RecordingRig, TransactionRig):
    """Keeps what is durable."""


def test_a_refused_transaction_has_no_event() -> None:
    rig = RecordingTransactionRig(TRANSACTIONS)
    rig.prepare("x", 1, half(b"1"), half(b"2"), address="p")
    rig.seal()
    rig.refuse()
    rig.prepare("x", 1, half(b"1"), half(b"2"), address="p")
    rig.commit()
    rig.commit_of("x", "p")
    rig.engine.intake.withdraw()
    rig.commit()
    rig.commit_of("x", "p")
    rig.commit()
    results = [e for e in lines(rig.history) if "transaction" in e]
    assert [(e["event"], e["transaction"], e["count"]) for e in results] == [
        ("transaction_prepared", "x", 2),
        ("transaction_committed", "x", 2),
    ]
    assert results[0]["details"] == {"group": "payments", "bytes": 2, "part": 1}
    assert (
        "ack_ms" not in results[0] and results[1]["ack_ms"] == results[1]["details"]["age_ms"] == 0
    )
    enqueued = [e for e in lines(rig.history) if e["event"] == "enqueued"]
    assert [e["task_id"] for e in enqueued] == [str(row) for row in sorted(rig.rows.tasks)]
    assert results[1]["task_id"] == enqueued[0]["task_id"]


def test_transaction_events_have_task_count_and_age() -> None:
    rig = RecordingTransactionRig(TRANSACTIONS)
    rig.prepare("x", 1, half(b"1"), half(b"2"))
    rig.prepare("y", 1, half(b"1"))
    rig.commit()
    rig.pass_time(700)
    rig.prepare("x", 2, half(b"3"))
    rig.commit()
    rig.pass_time(300)
    rig.commit_of("x")
    rig.roll_back("y")
    rig.commit()
    results = [e for e in lines(rig.history) if "transaction" in e]
    assert [(e["event"], e["transaction"], e["count"], e.get("ack_ms")) for e in results] == [
        ("transaction_prepared", "x", 2, None),
        ("transaction_prepared", "y", 1, None),
        ("transaction_prepared", "x", 1, None),
        ("transaction_committed", "x", 3, 1_000),
        ("transaction_rolled_back", "y", 1, 1_000),
    ]
