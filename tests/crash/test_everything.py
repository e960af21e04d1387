"""Everything at once for a while: the run that `make torture NEMESIS=everything` makes longer; and
its judge, which finds what is seeded on purpose."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crash.clocks import Clocks
from crash.everything import run
from crash.link import now_ms
from crash.witness import Sent, Witness
from tickwheel.errors import TickwheelError

LONG_RUNS = 20


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(6.0, id="short"),
        *(pytest.param(60.0, id=f"long-{n}", marks=pytest.mark.slow) for n in range(LONG_RUNS)),
    ],
)
async def test_all_promises_hold_with_all_features_and_faults(
    tmp_path: Path, seconds: float
) -> None:
    seed = secrets.randbelow(2**31)
    print(f"everything: seed {seed}")  # noqa: T201  # shown when it fails
    scene = await run(seed, seconds, tmp_path)
    assert not scene.problems, scene.report()
    assert scene.witness.counts["delivered"] > 100, scene.report()


# --- the judge -----------------------------------------------------------------------------------

KEEPER = ("t", "keeper")
PLAIN = Sent("t", None, has_ttl=False)


def delivery(task_id: int, order_key: str | None = None, in_ms: int = -5) -> Any:
    due = datetime.fromtimestamp(now_ms() / 1000, UTC) + timedelta(milliseconds=in_ms)
    return SimpleNamespace(id=task_id, order_key=order_key, due=due, attempt=1, replay_of=None)


def witness() -> Witness:
    result = Witness(Clocks(), KEEPER)
    result.stored(1, PLAIN)
    return result


def pulls(found: Witness, *deliveries: Any, group: str = "g") -> None:
    found.took(found.asks("t", group, 60.0), "t", group, deliveries)


def two_at_once(found: Witness) -> None:
    pulls(found, delivery(1, "k"), delivery(2, "k"))


def two_pulled(found: Witness) -> None:
    pulls(found, delivery(1, "k"))
    pulls(found, delivery(2, "k"))


def early(found: Witness) -> None:
    pulls(found, delivery(1, in_ms=500))


def lost(found: Witness) -> None:
    found.ended(1, "unknown")


def missed_by_the_keeper(found: Witness) -> None:
    pulls(found, delivery(1))
    found.ends("t", "g", delivery(1), acks=True)
    found.ended(1, "acked")


def acked_by_nobody(found: Witness) -> None:
    pulls(found, delivery(1), group="keeper")
    found.ended(1, "acked")


def cancelled_by_nobody(found: Witness) -> None:
    found.cancelled.ids.add(2)
    found.cancelled.keys.add(("t", "k"))
    found.ended(1, "cancelled")


def expired_without_a_ttl(found: Witness) -> None:
    found.ended(1, "expired")


def below_nothing(found: Witness) -> None:
    found.counted({"dead": -1}, "t")


def internal(found: Witness) -> None:
    error = TickwheelError("ouch")
    error.code = "internal"
    found.error(error, "a pull")


@pytest.mark.parametrize(
    "wrong",
    [
        two_at_once, two_pulled, early, lost, missed_by_the_keeper, acked_by_nobody,
        cancelled_by_nobody, expired_without_a_ttl, below_nothing, internal,
    ],
)  # fmt: skip
def test_the_witness_finds_broken_promises(wrong: Callable[[Witness], None]) -> None:
    result = witness()
    wrong(result)
    assert len(result.problems) == 1


def test_explained_ends_are_not_problems() -> None:
    result = witness()
    result.stored(2, Sent("t", "k", has_ttl=False))
    result.stored(3, Sent("t", None, has_ttl=True))
    pulls(result, delivery(1, "k"), group="keeper")
    pulls(result, delivery(4, "k"))  # another group has its own line
    result.ends(*KEEPER, delivery(1, "k"), acks=True)
    pulls(result, delivery(2, "k"), group="keeper")
    result.new_era()
    pulls(result, delivery(3, "k"), group="keeper")
    result.new_life("t", "g")
    pulls(result, delivery(2, "k"))
    result.cancelled.keys.add(("t", "k"))
    for task_id, state in ((1, "acked"), (2, "cancelled"), (3, "expired")):
        result.ended(task_id, state)
    assert result.problems == []
