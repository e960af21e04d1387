"""Conditions on a task's tag, key, priority and properties: values that were parsed, and the
functions that judge by them.

A condition is TRUE, FALSE or UNKNOWN (``True``, ``False``, ``None``), as in SQL-92. What is absent
is NULL. Numbers are compared with numbers, texts with texts (by code points), truth values with
truth values (``=`` and ``<>`` only); any other pair is UNKNOWN, never an error.

``compiled`` makes nested functions. No text is ever evaluated, and the work of one judgement is
bounded by ``cost``, because a pattern never backtracks: what stands between two ``%`` is found at
its first place, which leaves the most room for the rest.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tickwheel.model.records import PropertyValue, TaskOptions

Truth = bool | None
Properties = Mapping[str, PropertyValue]
Judge = Callable[[TaskOptions, Properties], Truth]

STEPS_PER_SEARCHED = 64
WILD_COST = 4
"""The cost of a character in a searched part of a pattern that has a ``_``."""


# Not tuples: those of two classes with the same parts are equal, and filters are compared.


class Source(Enum):
    """Where in a task the value of a name is found."""

    PROPERTY = "property"
    TAG = "tag"
    KEY = "key"
    PRIORITY = "priority"


class Kind(Enum):
    """The kinds of values; only values of one kind can be compared."""

    NUMBER = "number"
    TEXT = "text"
    TRUTH = "truth"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a condition, which stands for a value of the task."""

    source: Source
    name: str = ""


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal value in a condition."""

    kind: Kind
    """The kind, said beside the value because Python takes TRUE for 1."""
    value: PropertyValue | None


Operand = Name | Literal


@dataclass(frozen=True, slots=True)
class Comparison:
    operator: str
    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class Member:
    """Whether a value is one of some others: ``IN``."""

    operand: Operand
    values: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Like:
    operand: Operand
    pattern: tuple[str | None, ...]
    """The characters to match, with ``ANY_ONE`` and ``ANY_MANY`` among them."""


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Operand


@dataclass(frozen=True, slots=True)
class Holds:
    """A value that is a condition by itself: UNKNOWN unless it is a truth value."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Inverted:
    """The negation of a condition: ``NOT``."""

    term: Condition
    depth: int


@dataclass(frozen=True, slots=True)
class AllOf:
    """Conditions that all have to hold: ``AND``."""

    terms: tuple[Condition, ...]
    depth: int


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Conditions of which one has to hold: ``OR``."""

    terms: tuple[Condition, ...]
    depth: int


Condition = Comparison | Member | Like | IsNull | Holds | Inverted | AllOf | AnyOf

ANY_ONE = None
ANY_MANY = ""

OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
KINDS: Mapping[type, Kind] = {
    int: Kind.NUMBER,
    float: Kind.NUMBER,
    str: Kind.TEXT,
    bool: Kind.TRUTH,
}
TYPES = {
    kind: frozenset(found for found, of in KINDS.items() if of is kind)
    for kind in (Kind.NUMBER, Kind.TEXT, Kind.TRUTH)
}


def depth_of(condition: Condition) -> int:
    """How deep AND, OR and NOT are nested; 0: the condition has none of them."""
    return condition.depth if isinstance(condition, Inverted | AllOf | AnyOf) else 0


def cost_of(condition: Condition) -> int:
    """Steps of a judgement at most: one a comparison, and one for each character of a pattern
    that has to be searched for."""
    if isinstance(condition, Inverted):
        return cost_of(condition.term)
    if isinstance(condition, AllOf | AnyOf):
        return sum(map(cost_of, condition.terms))
    if not isinstance(condition, Like):
        return 1
    searched = _split(condition.pattern)[1:-1]
    return 1 + sum(len(part) * (WILD_COST if ANY_ONE in part else 1) for part in searched)


def steps_of(condition: Condition) -> int:
    """The time that a judgement takes at most, in comparisons: about 0.2 us each. A character that
    is searched for is looked for in a text of any length that a property may have."""
    if isinstance(condition, Inverted):
        return steps_of(condition.term)
    if isinstance(condition, AllOf | AnyOf):
        return sum(map(steps_of, condition.terms))
    return 1 + (cost_of(condition) - 1) * STEPS_PER_SEARCHED


def compiled(condition: Condition) -> Judge:
    """The function that judges a task by its options and its properties."""
    match condition:
        case AllOf(terms):
            return _all_of(tuple(map(compiled, terms)))
        case AnyOf(terms):
            return _any_of(tuple(map(compiled, terms)))
        case Inverted(term):
            return _inverted(compiled(term))
        case Comparison(sign, left, right):
            return _comparison(sign, left, right)
        case Member(operand, values):
            return _member(operand, values)
        case Like(operand, pattern):
            return _like(operand, pattern)
        case IsNull(operand):
            return _is_null(operand)
        case Holds(operand):
            return _holds(operand)


# --- AND, OR, NOT ----------------------------------------------------------------------------


def _all_of(terms: tuple[Judge, ...]) -> Judge:
    def judge(options: TaskOptions, properties: Properties) -> Truth:
        result: Truth = True
        for term in terms:
            found = term(options, properties)
            if found is False:
                return False
            if found is None:
                result = None
        return result

    return judge


def _any_of(terms: tuple[Judge, ...]) -> Judge:
    def judge(options: TaskOptions, properties: Properties) -> Truth:
        result: Truth = False
        for term in terms:
            found = term(options, properties)
            if found is True:
                return True
            if found is None:
                result = None
        return result

    return judge


def _inverted(term: Judge) -> Judge:
    def judge(options: TaskOptions, properties: Properties) -> Truth:
        found = term(options, properties)
        return None if found is None else not found

    return judge


# --- values ----------------------------------------------------------------------------------

Getter = Callable[[TaskOptions, Properties], PropertyValue | None]


def _getter(operand: Operand) -> Getter:
    if isinstance(operand, Literal):
        value = operand.value
        return lambda _options, _properties: value
    name = operand.name
    match operand.source:
        case Source.PROPERTY:
            return lambda _options, properties: properties.get(name)
        case Source.TAG:
            return lambda options, _properties: options.tag
        case Source.KEY:
            return lambda options, _properties: options.key
        case Source.PRIORITY:
            return lambda options, _properties: options.priority


def _unknown(_options: TaskOptions, _properties: Properties) -> Truth:
    return None


# --- predicates ------------------------------------------------------------------------------

MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "<>": "<>"}


def _comparison(sign: str, left: Operand, right: Operand) -> Judge:
    if isinstance(left, Literal) and isinstance(right, Name):
        sign, left, right = MIRRORED[sign], right, left
    if isinstance(right, Literal) and isinstance(left, Name):
        return _with_literal(sign, left, right)
    compare, is_order = OPERATORS[sign], sign not in {"=", "<>"}
    first, second = _getter(left), _getter(right)

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        one, other = first(options, properties), second(options, properties)
        kind = KINDS.get(type(one))
        if kind is None or kind is not KINDS.get(type(other)):
            return None
        if is_order and kind is Kind.TRUTH:
            return None
        return compare(one, other)

    return judge


def _with_literal(sign: str, left: Name, right: Literal) -> Judge:
    """The judge of a comparison of a name with a literal, which nearly every comparison is."""
    if right.kind is Kind.NULL or (right.kind is Kind.TRUTH and sign not in {"=", "<>"}):
        return _unknown
    compare, types, value, name = OPERATORS[sign], TYPES[right.kind], right.value, left.name
    if left.source is Source.PROPERTY:

        def judge_property(_options: TaskOptions, properties: Properties) -> Truth:
            found = properties.get(name)
            return compare(found, value) if type(found) in types else None

        return judge_property
    get = _getter(left)

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        found = get(options, properties)
        return compare(found, value) if type(found) in types else None

    return judge


def _member(operand: Operand, values: tuple[Literal, ...]) -> Judge:
    get = _getter(operand)
    # A set for each kind: in one, TRUE would be found where 1 is.
    of_kind = {
        kind: frozenset(each.value for each in values if each.kind is kind) for kind in TYPES
    }
    # Not found is UNKNOWN when the list has something that the value cannot be compared with.
    missing: dict[Kind, Truth] = {
        kind: False if all(each.kind is kind for each in values) else None for kind in TYPES
    }

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        found = get(options, properties)
        kind = KINDS.get(type(found))
        if kind is None:
            return None
        return True if found in of_kind[kind] else missing[kind]

    return judge


def _is_null(operand: Operand) -> Judge:
    get = _getter(operand)
    return lambda options, properties: get(options, properties) is None


def _holds(operand: Operand) -> Judge:
    get = _getter(operand)

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        found = get(options, properties)
        return found if type(found) is bool else None

    return judge


# --- LIKE ------------------------------------------------------------------------------------

Part = tuple[str | None, ...]


def _split(pattern: Part) -> list[Part]:
    """The parts between the ``%`` of a pattern. The first and the last are anchored."""
    parts: list[list[str | None]] = [[]]
    for char in pattern:
        if char == ANY_MANY:
            parts.append([])
        else:
            parts[-1].append(char)
    inner = [tuple(part) for part in parts[1:-1] if part]
    ends = [tuple(part) for part in parts]
    return ends if len(ends) == 1 else [ends[0], *inner, ends[-1]]


def _expression(part: Part) -> re.Pattern[str]:
    """A regular expression of fixed length, so that it has nothing to try twice."""
    found = "".join("." if char is ANY_ONE else re.escape(char) for char in part)
    return re.compile(found, re.DOTALL)


Search = Callable[[str, int, int], int]
"""Finds a part between two places; returns the place behind it, or -1."""


def _searching(part: Part) -> Search:
    length = len(part)
    if ANY_ONE not in part:
        literal = "".join(char for char in part if char is not ANY_ONE)

        def find(text: str, first: int, end: int) -> int:
            found = text.find(literal, first, end)
            return found if found < 0 else found + length

        return find
    expression = _expression(part)

    def search(text: str, first: int, end: int) -> int:
        found = expression.search(text, first, end)
        return -1 if found is None else found.end()

    return search


def _like(operand: Operand, pattern: Part) -> Judge:
    get, matches = _getter(operand), _matcher(pattern)

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        found = get(options, properties)
        return matches(found) if type(found) is str else None

    return judge


def _matcher(pattern: Part) -> Callable[[str], bool]:
    parts = _split(pattern)
    if len(parts) == 1:
        whole = _expression(parts[0])
        return lambda text: whole.fullmatch(text) is not None
    head, *inner, tail = parts
    head_length, tail_length = len(head), len(tail)
    begins, ends = _expression(head), _expression(tail)
    searches = tuple(map(_searching, inner))

    def matches(text: str) -> bool:
        place, end = head_length, len(text) - tail_length
        if place > end or not begins.match(text) or not ends.match(text, end):
            return False
        for search in searches:
            place = search(text, place, end)
            if place < 0:
                return False
        return True

    return matches
