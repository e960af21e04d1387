"""How far a list goes: as JSON to its end, as a table to ROWS_SHOWN, or as far as ``--limit`` says.

A table that stops before the end says so on stderr: nobody takes a part for the whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Annotated, Final, TypeVar

import typer

from tickwheel.cli.call import Call

T = TypeVar("T")

ROWS_SHOWN: Final = 100
"""Rows of a table, unless ``--limit`` says otherwise."""

LimitOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help=f"At most so many. Default: all with --json, {ROWS_SHOWN} as a table.",
    ),
]


def wanted(call: Call, limit: int | None) -> int | None:
    """How many rows are shown; None: all."""
    return limit if limit is not None or call.out.as_json else ROWS_SHOWN


def asked(call: Call, limit: int | None) -> int | None:
    """How many rows to ask for: a table asks for one more than it shows, to know if it stops."""
    most = wanted(call, limit)
    return most if most is None or call.out.as_json else most + 1


async def shown(
    call: Call, limit: int | None, ask: Callable[[int | None], AsyncIterator[T]]
) -> AsyncIterator[T]:
    """The rows that ``ask(how many)`` finds, as far as the list goes."""
    most, count = wanted(call, limit), 0
    async for one in ask(asked(call, limit)):
        if most is not None and count >= most:
            stops(call, most)
            return
        yield one
        count += 1


def cut(call: Call, limit: int | None, found: Iterable[T]) -> Iterator[T]:
    """The rows of ``found``, as far as the list goes."""
    most = wanted(call, limit)
    for count, one in enumerate(found):
        if most is not None and count >= most:
            if not call.out.as_json:
                stops(call, most)
            return
        yield one


def stops(call: Call, most: int) -> None:
    call.out.remark(f"there are more than these {most:,}: --limit N shows so many, --json all")
