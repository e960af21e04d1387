"""Values at the bounds of a field, and just beyond them, as its kind declares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tickwheel.api.dead import LetterPlace
from tickwheel.api.kinds import Choice, Flag, Ids, Kind, Letters, Name, Number, Text, Whole
from tickwheel.api.shapes import Field
from tickwheel.api.tasks import Moves
from tickwheel.limits import ID_MAX, Limits

WIRE_MIN, WIRE_MAX = -(2**63), 2**64 - 1
"""The least and the greatest whole number that a frame can say."""
TOO_HIGH = ID_MAX + 1
NAMES = "1 to 255 of A-Z a-z 0-9 . _ : / -"


class Bound(NamedTuple):
    """A value at a bound, or beyond it, and the words of the error that says so."""

    value: Any
    words: tuple[str, ...]


def beyond(field: Field, limits: Limits) -> Iterator[Bound]:
    """Values just beyond the bounds, and what is of another type."""
    for kind, values in _BEYOND:
        if isinstance(field.kind, kind):
            yield from values(field.kind, limits)


def _text(kind: Text, limits: Limits) -> Iterator[Bound]:
    most, _ = kind._most(limits)
    yield Bound("x" * (most + 1), (f"{most + 1} characters", f"the limit is {most}"))
    yield Bound(5, ())


def _name(kind: Name, limits: Limits) -> Iterator[Bound]:
    for name in ("", "x" * 256, "no name"):
        yield Bound(name, (NAMES,))
    yield Bound(5, ())


def _choice(kind: Choice, limits: Limits) -> Iterator[Bound]:
    yield Bound("odd", (f"one of {', '.join(kind.words)}", "'odd'"))


def _flag(kind: Flag, limits: Limits) -> Iterator[Bound]:
    yield Bound(5, ())


def _whole(kind: Whole, limits: Limits) -> Iterator[Bound]:
    for number in (kind.low - 1, kind.high + 1):
        if WIRE_MIN <= number <= WIRE_MAX:
            yield Bound(number, (str(kind.high), str(number)))
    yield Bound(1.5, ())


def _number(kind: Number, limits: Limits) -> Iterator[Bound]:
    for number in (kind.low / 2, kind.high * 2):
        yield Bound(number, (f"a number of {kind.low:g} to {kind.high:.0f} ({kind.what})",))


def _ids(kind: Ids, limits: Limits) -> Iterator[Bound]:
    yield Bound((TOO_HIGH,), (str(ID_MAX), str(TOO_HIGH)))
    yield Bound((1,) * (limits.ids_per_frame_max + 1), (str(limits.ids_per_frame_max),))


def _letters(kind: Letters, limits: Limits) -> Iterator[Bound]:
    yield Bound(((TOO_HIGH, "g"),), (str(ID_MAX), str(TOO_HIGH)))
    yield Bound(((1, "no name"),), (NAMES,))


def _moves(kind: Moves, limits: Limits) -> Iterator[Bound]:
    yield Bound(((TOO_HIGH, 5, None),), (str(ID_MAX), str(TOO_HIGH)))


def _place(kind: LetterPlace, limits: Limits) -> Iterator[Bound]:
    yield Bound((TOO_HIGH, "g"), (str(ID_MAX), str(TOO_HIGH)))


_BEYOND: tuple[tuple[type[Kind], Callable[[Any, Limits], Iterator[Bound]]], ...] = (
    (Text, _text), (Name, _name), (Choice, _choice), (Flag, _flag), (Whole, _whole),
    (Number, _number), (Ids, _ids), (Letters, _letters), (Moves, _moves), (LetterPlace, _place),
)  # fmt: skip


def within(field: Field, limits: Limits) -> Iterator[Bound]:
    """Values at the bounds, with the words that nobody may say of them."""
    kind = field.kind
    if isinstance(kind, Text):
        most, _ = kind._most(limits)
        yield Bound("x" * most, (f"the limit is {most}",))
    elif isinstance(kind, Name):
        yield Bound("x" * 255, (NAMES,))
    elif isinstance(kind, Choice):
        for word in kind.words:
            yield Bound(word, (f"{field.name} must be one of",))
    elif isinstance(kind, Whole):
        for number in (kind.low, kind.high):
            yield Bound(number, (f"{field.name} must be an integer of {kind.low} to {kind.high},",))
    elif isinstance(kind, Number):
        for number in (kind.low, kind.high):
            yield Bound(number, (f"{field.name} must be a number of",))
    elif isinstance(kind, Ids):
        yield Bound((0, ID_MAX), (f"not {ID_MAX}",))
