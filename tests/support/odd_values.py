"""Values at every bound, one beyond it, and of wrong types, and their places in requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from tickwheel.limits import Limits
from tickwheel.model.records import MOMENT_MS_MAX

Way = tuple[Any, ...]
"""The path to a place inside a value: indexes and names."""

_EDGES = (0, 2**31, 2**32, 2**53, 2**63, 2**64)
INTEGERS = tuple(
    sorted({sign * edge + d for edge in _EDGES for sign in (1, -1) for d in (-1, 0, 1)})
)
"""Integers at powers of two, including some that JSON can encode and msgpack cannot."""
FAR = (2**53 - 2, 2**63, -(2**63) - 1, 2**64, 10**30, -(10**30))
"""Where calendars have no date any more, and 64 bits no number: every walk tries each of them."""
HUGE = (10**30, -(10**30), 10**400)
NUMBERS = (0.5, -0.0, 1e300, -1e300, 5e-324, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", "t", "a b", "\0", "é" * 255, "a" * 256, "😀" * 256, "x" * 4_096, "x" * 4_097, "é" * 2_049,
    "x" * 70_000,
)  # fmt: skip
HALVES = ("\ud800", "a\udfff", "\udc00" * 256)
"""Halves of surrogate pairs, which Python and JSON escapes allow, but UTF-8 does not."""
OTHERS: tuple[Any, ...] = (
    None, True, False, (), {}, ((),), ("t",), {"": None}, {"a": {"b": 1}}, (1,) * 300, (0, "g"),
)  # fmt: skip


@st.composite
def almost(draw: st.DrawFn, text: str, alphabet: str) -> str:
    """Return the text, or a copy with one or two characters changed."""
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        place = draw(st.integers(0, len(text)))
        text = (
            text[:place]
            + draw(st.sampled_from(["", *alphabet]))
            + text[place + draw(st.integers(0, 1)) :]
        )
    return text


def nested(depth: int) -> Any:
    """Return nested arrays."""
    value: Any = ()
    for _ in range(depth):
        value = (value,)
    return value


def at_limits(limits: Limits) -> tuple[int, ...]:
    """Return values at, below and above each announced limit, and the last date."""
    edges = {*limits.to_wire().values(), MOMENT_MS_MAX}
    return tuple(sorted({edge + d for edge in edges for d in (-1, 0, 1)}))


def for_frames(limits: Limits) -> list[Any]:
    """Return the values that msgpack can encode."""
    integers = [n for n in {*INTEGERS, *at_limits(limits)} if -(2**63) <= n < 2**64]
    return [*sorted(integers), *NUMBERS, *TEXTS, b"", b"x" * 300, *OTHERS, nested(12), nested(20)]


def for_json(limits: Limits) -> list[Any]:
    """Return the values that Python's JSON can encode, including NaN."""
    integers = sorted({*INTEGERS, *at_limits(limits)})
    return [*integers, *HUGE, *NUMBERS, *TEXTS, *HALVES, *OTHERS, nested(12), nested(400)]


JSON_VALUES = st.one_of(
    st.sampled_from(for_json(Limits())),
    st.integers(-(2**130), 2**130),
    st.floats(),
    st.text(st.characters(codec=None, categories=None), max_size=300),
)


def places(value: Any, way: Way = ()) -> Iterator[Way]:
    """Yield the paths to `value` and everything inside it."""
    yield way
    inner: Sequence[Any] = ()
    if isinstance(value, (tuple, list)):
        inner = range(len(value))
    elif isinstance(value, dict):
        inner = list(value)
    for at in inner:
        yield from places(value[at], (*way, at))


def put(value: Any, way: Way, fresh: Any) -> Any:
    """Return `value` with `fresh` at a place. A missing name is added to its map."""
    if not way:
        return fresh
    at, *rest = way
    if isinstance(value, dict):
        return value | {at: put(value.get(at), tuple(rest), fresh)}
    inner = put(value[at], tuple(rest), fresh)
    return type(value)((*value[:at], inner, *value[at + 1 :]))
