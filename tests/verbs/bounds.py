"""Values at the bounds of a field, and just beyond them, as its kind declares them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from tickwheel.api.kinds import (
    Choice,
    DeadLetterPairs,
    FieldKind,
    Flag,
    Ids,
    Name,
    Number,
    PropertyValue,
    Shift,
    Text,
    Whole,
    Window,
)
from tickwheel.api.shapes import Field
from tickwheel.api.tasks import LetterPlace
from tickwheel.limits import ID_MAX, Limits
from tickwheel.model.values import INTEGER_MAX, INTEGER_MIN

T = TypeVar("T")
WIRE_MIN, WIRE_MAX = -(2**63), 2**64 - 1
"""The least and the greatest whole number that a frame can say."""
TOO_HIGH = ID_MAX + 1
NAMES = "1 to 255 characters from A-Z a-z 0-9 . _ : / -"


class Bound(NamedTuple):
    """A value at a bound, or beyond it, and the words of the error that says so."""

    value: Any
    words: tuple[str, ...]


def beyond(field: Field, limits: Limits) -> Iterator[Bound]:
    """Values just beyond the bounds, and what is of another type."""
    values = _of(_BEYOND, field.kind)
    return iter(()) if values is None else values(field.kind, limits)


def within(field: Field, limits: Limits) -> Iterator[Bound]:
    """Values at the bounds, with the words that nobody may say of them."""
    values = _of(_WITHIN, field.kind)
    return iter(()) if values is None else values(field, field.kind, limits)


def _of(table: Iterable[tuple[type[FieldKind], T]], kind: FieldKind) -> T | None:
    return next((values for one, values in table if isinstance(kind, one)), None)


# --- beyond --------------------------------------------------------------------------------------


def _text(kind: Text, limits: Limits) -> Iterator[Bound]:
    most, _ = kind._length_max(limits)
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


def _window(kind: Window, limits: Limits) -> Iterator[Bound]:
    yield from _whole(kind, limits)
    most = limits.within_ms_max
    yield Bound(most + 1, (str(most + 1), f"the limit is {most}"))


def _shift(kind: Shift, limits: Limits) -> Iterator[Bound]:
    most = limits.delay_ms_max
    for number in (-most - 1, most + 1):
        yield Bound(number, (f"an integer between {-most} and {most}", str(number)))
    yield Bound(1.5, ())


def _property(kind: PropertyValue, limits: Limits) -> Iterator[Bound]:
    most = limits.property_value_bytes_max
    yield Bound("x" * (most + 1), (f"{most + 1} bytes", f"the limit is {most}"))
    yield Bound(TOO_HIGH, (str(ID_MAX), str(TOO_HIGH)))
    yield Bound(["x"], ())


def _number(kind: Number, limits: Limits) -> Iterator[Bound]:
    for number in (kind.low / 2, kind.high * 2):
        yield Bound(number, (f"a number between {kind.low:g} and {kind.high:.0f} ({kind.what})",))


def _ids(kind: Ids, limits: Limits) -> Iterator[Bound]:
    yield Bound((TOO_HIGH,), (str(ID_MAX), str(TOO_HIGH)))
    yield Bound((1,) * (limits.ids_per_frame_max + 1), (str(limits.ids_per_frame_max),))


def _letters(kind: DeadLetterPairs, limits: Limits) -> Iterator[Bound]:
    yield Bound(((TOO_HIGH, "g"),), (str(ID_MAX), str(TOO_HIGH)))
    yield Bound(((1, "no name"),), (NAMES,))


def _place(kind: LetterPlace, limits: Limits) -> Iterator[Bound]:
    yield Bound((TOO_HIGH, "g"), (str(ID_MAX), str(TOO_HIGH)))
    yield Bound((1, "\0"), (NAMES,))


_BEYOND: tuple[tuple[type[FieldKind], Callable[[Any, Limits], Iterator[Bound]]], ...] = (
    (Text, _text), (Name, _name), (Choice, _choice), (Flag, _flag), (Window, _window),
    (Shift, _shift), (Whole, _whole), (Number, _number), (PropertyValue, _property), (Ids, _ids),
    (DeadLetterPairs, _letters), (LetterPlace, _place),
)  # fmt: skip


# --- at the bounds -------------------------------------------------------------------------------


def _at_text(field: Field, kind: Text, limits: Limits) -> Iterator[Bound]:
    most, _ = kind._length_max(limits)
    yield Bound("x" * most, (f"the limit is {most}",))


def _at_name(field: Field, kind: Name, limits: Limits) -> Iterator[Bound]:
    yield Bound("x" * 255, (NAMES,))


def _at_choice(field: Field, kind: Choice, limits: Limits) -> Iterator[Bound]:
    for word in kind.words:
        yield Bound(word, (f"{field.name} must be one of",))


def _at_shift(field: Field, kind: Shift, limits: Limits) -> Iterator[Bound]:
    for number in (-limits.delay_ms_max, limits.delay_ms_max):
        yield Bound(number, (f"{field.name} must be an integer between",))


def _at_window(field: Field, kind: Window, limits: Limits) -> Iterator[Bound]:
    for number in (kind.low, limits.within_ms_max):
        yield Bound(number, (f"{field.name} must be an integer between", "(within_ms_max)"))


def _at_whole(field: Field, kind: Whole, limits: Limits) -> Iterator[Bound]:
    for number in (kind.low, kind.high):
        yield Bound(
            number, (f"{field.name} must be an integer between {kind.low} and {kind.high},",)
        )


def _at_number(field: Field, kind: Number, limits: Limits) -> Iterator[Bound]:
    for number in (kind.low, kind.high):
        yield Bound(number, (f"{field.name} must be a number of",))


def _at_property(field: Field, kind: PropertyValue, limits: Limits) -> Iterator[Bound]:
    for value in ("x" * limits.property_value_bytes_max, INTEGER_MIN, INTEGER_MAX):
        yield Bound(value, ("the limit is", f"{field.name} must be an integer between"))


def _at_ids(field: Field, kind: Ids, limits: Limits) -> Iterator[Bound]:
    yield Bound((0, ID_MAX), (f"not {ID_MAX}",))


def _at_place(field: Field, kind: LetterPlace, limits: Limits) -> Iterator[Bound]:
    yield Bound((ID_MAX, ""), (NAMES,))


_WITHIN: tuple[tuple[type[FieldKind], Callable[[Field, Any, Limits], Iterator[Bound]]], ...] = (
    (Text, _at_text), (Name, _at_name), (Choice, _at_choice), (Shift, _at_shift),
    (Window, _at_window), (Whole, _at_whole), (Number, _at_number),
    (PropertyValue, _at_property), (Ids, _at_ids), (LetterPlace, _at_place),
)  # fmt: skip
