"""What a transaction costs: the same tasks in transactions, and without."""

from __future__ import annotations

from typing import Any

from benchmarks.context import Contestant, Context, Result, alternate, measured

SIZES = (1, 10, 100)
"""Tasks of one transaction."""
CALLERS = 200


def transactions(context: Context) -> Result:
    """Tasks a second of coroutines that each wait for one transaction after the other; beside them
    as many that wait for enqueues of the same size."""
    result = Result("transactions")

    def contestant(size: int, *, plain: bool) -> Contestant:
        def run(seed: int) -> dict[str, Any]:
            with context.tickwheel() as daemon:
                return measured(
                    daemon,
                    "client_transactions",
                    count=context.scale.single,
                    per_call=size,
                    callers=CALLERS,
                    seed=seed,
                    plain=plain,
                )

        return run

    contestants = {}
    for size in SIZES:
        contestants[f"rate_{size}"] = contestant(size, plain=False)
        contestants[f"plain_{size}"] = contestant(size, plain=True)
    rounds_of = alternate(context, result.case, contestants)
    for size in SIZES:
        tasks = f"{size} task{'s' if size > 1 else ''}, {CALLERS} coroutines"
        rate = result.median(f"rate_{size}", f"transactions of {tasks}", rounds_of[f"rate_{size}"])
        plain = result.median(f"plain_{size}", f"enqueues of {tasks}", rounds_of[f"plain_{size}"])
        what = f"transactions / enqueues, {size} each"
        result.ratio(f"ratio_{size}", what, rate / plain)
    return result
