"""A batch that was certainly not applied: its enqueues are forgotten, everything else is kept."""

from __future__ import annotations

from support.engine_rig import Rig
from tickwheel.engine.state import Batch, strip_ended
from tickwheel.model.kinds import SESSION, Effects
from tickwheel.model.records import Outcome, TaskRow

KEY = b"k" * 16


def refused(rig: Rig) -> list[object]:
    assert rig.seal() is not None
    return rig.refuse()


def test_a_refused_batch_drops_its_tasks_and_requests(rig: Rig) -> None:
    session = rig.session(KEY)
    rig.subscribe()
    (task_id,) = rig.stage(session=session, request=1, address="peer")
    assert refused(rig) == ["peer"]
    rig.commit()
    assert rig.tick() == []
    assert task_id not in rig.rows.tasks
    assert session.answers.get(1) is None
    assert rig.rows.sessions == {}


def test_the_resend_of_a_refused_request_is_a_new_request(rig: Rig) -> None:
    session = rig.session(KEY)
    (before,) = rig.stage(session=session, request=1)
    refused(rig)
    (after,) = rig.store(session=session, request=1)
    assert before < after
    assert list(rig.rows.tasks) == [after]
    (row,) = rig.rows.sessions.values()
    assert [answer[1] for answer in row.answers] == [after]


def test_repeats_of_a_refused_request_are_answered(rig: Rig) -> None:
    session, intake = rig.session(KEY), rig.engine.intake
    rig.stage(session=session, request=1, address="first")
    rig.seal()
    outcome = session.answers.get(1)
    assert outcome is not None
    intake.repeat("again", session, outcome)
    assert rig.refuse() == ["first", "again"]
    assert session.answers.get(1) is None


def test_a_refused_batch_keeps_the_requests_of_the_next(rig: Rig) -> None:
    session = rig.session(KEY)
    rig.stage(session=session, request=1)
    rig.seal()
    (kept,) = rig.stage(session=session, request=2, address="kept")
    rig.refuse()
    rig.commit()
    assert rig.answered == ["kept"]
    assert list(rig.rows.tasks) == [kept]
    assert list(rig.rows.answered(KEY)) == [2]


def test_a_refused_batch_keeps_its_acks_for_the_next(rig: Rig) -> None:
    subscriber = rig.subscribe()
    rig.enqueue()
    got = rig.one()
    rig.stage()
    assert rig.ack(got) == "acked"
    refused(rig)
    assert got.id in rig.rows.tasks
    assert subscriber.outstanding == 1
    assert rig.ack(got) == "done"
    rig.commit()
    assert got.id not in rig.rows.tasks
    assert subscriber.outstanding == 0


def test_the_later_state_of_a_key_wins_when_batches_are_joined(rig: Rig) -> None:
    rig.subscribe()
    rig.enqueue()
    got = rig.one()
    rig.nack(got, 5_000)
    refused_batch = rig.seal()
    assert refused_batch is not None
    rig.reschedule(got.id, 9_000)
    rig.refuse()
    rig.commit()
    assert rig.rows.progress[got.id, "default"].at_ms == rig.now_ms + 9_000


def test_an_ack_after_a_refused_nack_ends_the_task(rig: Rig) -> None:
    rig.subscribe()
    rig.enqueue()
    got = rig.one()
    rig.nack(got, 5_000)
    rig.seal()
    assert rig.ack(got) == "acked"
    rig.refuse()
    rig.commit()
    assert rig.rows.is_empty()


def test_replies_of_a_refused_batch_are_kept_in_order(rig: Rig) -> None:
    rig.stage()
    rig.core.open.replies.append(("peer", b"one"))
    sealed = rig.seal()
    assert sealed is not None
    sealed.replies.append(("peer", b"two"))
    rig.refuse()
    assert not rig.core.open.is_empty()
    batch = rig.seal()
    assert batch is not None
    assert batch.replies == [("peer", b"one"), ("peer", b"two")]
    assert batch.effects.is_empty()


def test_replies_of_a_refused_batch_precede_the_next(rig: Rig) -> None:
    rig.stage()
    rig.core.open.replies.append(("peer", b"one"))
    rig.seal()
    rig.stage()
    rig.core.open.replies.append(("peer", b"two"))
    rig.refuse()
    assert rig.core.open.replies == [("peer", b"one"), ("peer", b"two")]


def test_a_session_forgotten_during_a_refused_commit_is_dropped(rig: Rig) -> None:
    rig.stage(session=rig.session(KEY), request=1)
    rig.seal()
    rig.engine.forget_session(KEY)
    rig.refuse()
    batch = rig.seal()
    assert batch is not None
    assert batch.effects.of_kind(SESSION) == {(KEY, 1): None}


def test_ids_of_refused_tasks_are_not_reused(rig: Rig) -> None:
    (before,) = rig.stage()
    refused(rig)
    assert rig.stage()[0] > before
    rig.commit()
    assert before not in rig.rows.tasks


def test_strip_ended_drops_other_rows_of_ended_tasks() -> None:
    row = TaskRow(1, 0, "t", b"")
    effects = Effects(
        updated={1: row, 2: row._replace(id=2)},
        ended={1: Outcome.ACKED},
        progress={(1, "a"): None, (2, "a"): None},
        dead={(1, "b"): None, (2, "b"): None},
    )
    strip_ended(effects)
    assert (set(effects.updated), set(effects.progress), set(effects.dead)) == (
        {2},
        {(2, "a")},
        {(2, "b")},
    )


def test_an_update_and_a_drop_in_one_batch_still_drop(rig: Rig) -> None:
    task_id = rig.enqueue(delay_ms=1_000)
    rig.reschedule(task_id, 2_000)
    assert rig.cancel(task_id) == "cancelled"
    batch = rig.seal()
    assert batch is not None
    assert batch.effects.ended == {task_id: Outcome.CANCELLED}
    assert not batch.effects.updated
    rig.apply_and_land()
    assert rig.rows.is_empty()


def test_a_batch_with_replies_or_effects_is_not_empty() -> None:
    assert Batch().is_empty()
    assert not Batch(replies=[("peer", b"")]).is_empty()
    assert not Batch(effects=Effects(ended={1: Outcome.ACKED})).is_empty()
