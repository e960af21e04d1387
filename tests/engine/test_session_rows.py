"""What batches say of producer sessions: as much as they have answered, and no more, whatever is
remembered; and whatever is refused, lost or forgotten, a restart finds what was answered."""

from __future__ import annotations

import random

import pytest

from support.engine_recount import recount
from support.engine_rig import Rig
from tickwheel.model.kinds import SESSION
from tickwheel.model.records import SessionRow

KEY = b"k" * 16


def written(rig: Rig) -> int:
    """Answers that the next batch writes."""
    batch = rig.seal()
    assert batch is not None
    rows = [row for row in batch.effects.of_kind(SESSION).values() if row is not None]
    rig.apply_and_land()
    return sum(len(row.answers) for row in rows)


@pytest.mark.parametrize("requests", [1, 10])
def test_a_batch_writes_only_its_own_answers(requests: int) -> None:
    rig = Rig()  # what it holds takes seconds to be counted
    session, number = rig.session(KEY), 0
    for _ in range(200):
        for _ in range(requests):
            number += 1
            rig.stage(session=session, request=number)
        assert written(rig) == requests
    assert len(session.answers) == number
    rig.crash()
    assert list(rig.rows.answered(KEY)) == list(rig.session(KEY).answers) == [*range(1, number + 1)]


def test_session_rows_below_the_floor_are_dropped() -> None:
    """However a client chooses its numbers."""
    chance, rig = random.Random(7), Rig()
    session, numbers = rig.session(KEY), list(range(1, 1_500))
    at = 0
    while at < len(numbers) - 60:
        some = numbers[at : at + chance.randint(1, 50)]
        at += len(some)
        chance.shuffle(some)
        if chance.random() < 0.3:  # one that comes late
            at -= 1
            some.remove(numbers[at])
        for number in some:
            rig.stage(session=session, request=number)
        rig.commit()
        session.raise_floor(max(1, at - chance.randint(0, 200)))
        rig.store(session=session, request=10_000 + at)
        rows = rig.rows.sessions.values()
        partly = [row for row in rows if row.answers[0][0] < session.floor]
        assert len(partly) <= 1
        assert all(row.answers[-1][0] >= session.floor for row in rows)
    recount(rig)
    live = dict(session.answers)
    rig.crash()
    assert rig.session(KEY).answers == live


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_a_restart_recovers_session_answers(seed: int) -> None:
    """Over refusals, floors, sessions that are forgotten and begun anew, and crashes."""
    chance, rig = random.Random(seed), Rig()
    durable: dict[int, int] = {}
    number = 0
    for _ in range(150):
        session = rig.session(KEY)
        staged: dict[int, int] = {}
        for _ in range(chance.randint(0, 5)):
            number += chance.randint(1, 3)
            (staged[number],) = rig.stage(session=session, request=number)
        if chance.random() < 0.3 and session.answers:
            session.raise_floor(chance.choice(list(session.answers)))
        end = chance.choice(["land", "land", "land", "refuse", "withdraw", "crash", "forget"])
        if end == "withdraw":
            rig.engine.intake.withdraw()
        elif end == "forget":
            rig.commit()
            rig.engine.forget_session(KEY)
            rig.commit()
            durable, staged = {}, {}
            assert not rig.rows.sessions
        elif rig.seal() is not None:
            if end == "crash":
                rig.crash()
            elif end == "refuse":
                rig.refuse()
            else:
                rig.apply_and_land()
                durable |= staged
        rig.commit()
        result = rig.rows.answered(KEY)
        floor = max((row.floor for row in rig.rows.sessions.values()), default=0)
        assert result == {n: i for n, i in durable.items() if n >= floor}
        recount(rig)
    rig.crash()
    kept = {n: answer[1] for n, answer in rig.session(KEY).answers.items()}
    assert kept == rig.rows.answered(KEY)


def test_accepted_answers_of_a_refused_batch_are_written_next(rig: Rig) -> None:
    """A request that was only answered with others is gone; an accepted one stays."""
    session = rig.session(KEY)
    rig.store(session=session, request=1)
    rig.stage(session=session, request=2)
    session.remember_merged((3, 0, 1, rig.now_ms), ((1, 7, 9),))
    rig.core.dirty_sessions[KEY] = None
    rig.seal()
    rig.refuse()
    rig.commit()
    assert list(rig.rows.answered(KEY)) == [1, 3]
    assert {type(row) for row in rig.rows.sessions.values()} == {SessionRow}
