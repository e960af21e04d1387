"""The language of conditions on a task's tag, key, priority and properties: the text (``GRAMMAR``,
``parse``), the values that it becomes (``Condition``), and the functions that judge by them
(``compiled``). ``filters.py`` is the surface.

A condition is TRUE, FALSE or UNKNOWN (``True``, ``False``, ``None``), as in SQL-92. What is absent
is NULL. Numbers are compared with numbers, texts with texts (by code points), truth values with
truth values (``=`` and ``<>`` only); any other pair is UNKNOWN, never an error.

``why_never`` finds conditions that no task can meet.

``compiled`` makes nested functions. No text is ever evaluated, and the work of one judgement is
bounded by ``cost``, because a pattern never backtracks: what stands between two ``%`` is found at
its first place, which leaves the most room for the rest.

This is the only module that knows the parser library, which is loaded when the first condition is
read: most daemons never see one. The parser is LALR(1) over a fixed grammar. It keeps a stack of
its own and builds no tree, so that no text, however it is nested, makes it recurse; the length of a
text is bounded by the caller.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import product
from math import floor, inf, isfinite, nextafter
from typing import TYPE_CHECKING, Any

from tickwheel.model.records import PropertyValue, TaskOptions

if TYPE_CHECKING:
    from lark import Token

Truth = bool | None
Properties = Mapping[str, PropertyValue]
Predicate = Callable[[TaskOptions, Properties], Truth]

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


class ValueKind(Enum):
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

    kind: ValueKind
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
KINDS: Mapping[type, ValueKind] = {
    int: ValueKind.NUMBER,
    float: ValueKind.NUMBER,
    str: ValueKind.TEXT,
    bool: ValueKind.TRUTH,
}
TYPES = {
    kind: frozenset(found for found, of in KINDS.items() if of is kind)
    for kind in (ValueKind.NUMBER, ValueKind.TEXT, ValueKind.TRUTH)
}


def depth_of(condition: Condition) -> int:
    """How deep AND, OR and NOT are nested; 0: the condition has none of them."""
    return condition.depth if isinstance(condition, Inverted | AllOf | AnyOf) else 0


def cost_of(condition: Condition) -> int:
    """Steps of a judgement at most: one a comparison, and one for each character of a pattern
    that has to be searched for."""
    return _work_of(condition, 1)


def steps_of(condition: Condition) -> int:
    """The time that a judgement takes at most, in comparisons: about 0.2 us each. A character that
    is searched for is looked for in a text of any length that a property may have."""
    return _work_of(condition, STEPS_PER_SEARCHED)


def _work_of(condition: Condition, per_searched: int) -> int:
    if isinstance(condition, Inverted):
        return _work_of(condition.term, per_searched)
    if isinstance(condition, AllOf | AnyOf):
        return sum(_work_of(term, per_searched) for term in condition.terms)
    if not isinstance(condition, Like):
        return 1
    searched = _split(condition.pattern)[1:-1]
    costs = (len(part) * (WILD_COST if ANY_ONE in part else 1) for part in searched)
    return 1 + per_searched * sum(costs)


def compiled(condition: Condition) -> Predicate:
    """The function that judges a task by its options and its properties."""
    match condition:
        case AllOf(terms):
            return _joined(tuple(map(compiled, terms)), decides=False)
        case AnyOf(terms):
            return _joined(tuple(map(compiled, terms)), decides=True)
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


def _joined(terms: tuple[Predicate, ...], *, decides: bool) -> Predicate:
    """AND, which one FALSE ``decides``, or OR, which one TRUE does. Else it is UNKNOWN if a term is
    so."""

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        result: Truth = not decides
        for term in terms:
            found = term(options, properties)
            if found is decides:
                return found
            if found is None:
                result = None
        return result

    return judge


def _inverted(term: Predicate) -> Predicate:
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


def _comparison(sign: str, left: Operand, right: Operand) -> Predicate:
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
        if is_order and kind is ValueKind.TRUTH:
            return None
        return compare(one, other)

    return judge


def _with_literal(sign: str, left: Name, right: Literal) -> Predicate:
    """The judge of a comparison of a name with a literal, which nearly every comparison is."""
    if right.kind is ValueKind.NULL or (right.kind is ValueKind.TRUTH and sign not in {"=", "<>"}):
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


def _member(operand: Operand, values: tuple[Literal, ...]) -> Predicate:
    get = _getter(operand)
    # A set for each kind: in one, TRUE would be found where 1 is.
    of_kind = {
        kind: frozenset(each.value for each in values if each.kind is kind) for kind in TYPES
    }
    # Not found is UNKNOWN when the list has something that the value cannot be compared with.
    missing: dict[ValueKind, Truth] = {
        kind: False if all(each.kind is kind for each in values) else None for kind in TYPES
    }

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        found = get(options, properties)
        kind = KINDS.get(type(found))
        if kind is None:
            return None
        return True if found in of_kind[kind] else missing[kind]

    return judge


def _is_null(operand: Operand) -> Predicate:
    get = _getter(operand)
    return lambda options, properties: get(options, properties) is None


def _holds(operand: Operand) -> Predicate:
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


def _like(operand: Operand, pattern: Part) -> Predicate:
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


BEFORE_MAX = 40
AFTER_MAX = 20
"""How many characters a message shows before the place of the error, and behind it."""


class FilterError(ValueError):
    """A filter that cannot be read, with the place in its text and a caret under it; or, without
    a place, one that is over a limit."""

    def __init__(self, field: str, message: str, text: str, position: int | None) -> None:
        self.field = field
        """The field of the error: ``tags`` or ``where``."""
        self.position = position
        """The index of the first wrong character; None: the whole text is over a limit."""
        if position is None:
            super().__init__(f"{field}: {message}")
        else:
            place = f"{field}, character {position + 1}"
            super().__init__(f"{place}: {message}\n{_pointed(text, position)}")


def _pointed(text: str, position: int) -> str:
    """The part of ``text`` around the place, as one line, and a line with a caret below it."""
    first, end = max(0, position - BEFORE_MAX), position + AFTER_MAX
    before, after = "..." if first else "", "..." if end < len(text) else ""
    # One column a character, or the caret points elsewhere.
    part = "".join(char if char.isprintable() else " " for char in text[first:end])
    caret = " " * (len(before) + position - first) + "^"
    return f"  {before}{part}{after}\n  {caret}"


FOUND_LENGTH_MAX = 40
OWN = {"tag": Source.TAG, "key": Source.KEY, "priority": Source.PRIORITY}
"""Names, in any case, that mean the task's own values; in double quotes they are properties."""
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**64 - 1
"""The whole numbers that a property can have."""

GRAMMAR = r"""
?start: any_of
?any_of: all_of (_OR all_of)*
?all_of: negated (_AND negated)*
?negated: _NOT negated -> inverted
    | predicate
?predicate: operand COMPARISON operand -> comparison
    | operand _BETWEEN operand _AND operand -> between
    | operand _NOT _BETWEEN operand _AND operand -> not_between
    | operand _IN _LPAR literal (_COMMA literal)* _RPAR -> member
    | operand _NOT _IN _LPAR literal (_COMMA literal)* _RPAR -> not_member
    | operand _LIKE TEXT (_ESCAPE TEXT)? -> like
    | operand _NOT _LIKE TEXT (_ESCAPE TEXT)? -> not_like
    | operand _IS _NULL -> is_null
    | operand _IS _NOT _NULL -> is_not_null
    | name -> holds
    | truth -> holds
    | null -> holds
    | _LPAR any_of _RPAR
?operand: name | literal
?literal: number | text | truth | null
name: NAME | QUOTED
number: SIGN? NUMBER
text: TEXT
truth: TRUE | FALSE
null: _NULL

_OR: "OR"i
_AND: "AND"i
_NOT: "NOT"i
_BETWEEN: "BETWEEN"i
_IN: "IN"i
_LIKE: "LIKE"i
_ESCAPE: "ESCAPE"i
_IS: "IS"i
_NULL: "NULL"i
TRUE: "TRUE"i
FALSE: "FALSE"i
_LPAR: "("
_RPAR: ")"
_COMMA: ","
COMPARISON: /<>|<=|>=|=|<|>/
SIGN: /[+-]/
NUMBER: /([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?/i
TEXT: /'(?:[^']|'')*'/
QUOTED: /"(?:[^"]|"")+"/
NAME: /[A-Z_][A-Z0-9_.]*/i
%ignore /(?u:\s)+/
"""

# What each place of the grammar is called in a message; the first that fits is taken.
EXPECTED = (
    ({"_NOT", "NAME"}, "a condition"),
    ({"NAME"}, "a name or a value"),
    ({"NUMBER", "TEXT"}, "a value"),
    ({"COMPARISON", "_AND"}, "an operator, AND, OR or the end"),
    ({"COMPARISON"}, "an operator"),
    ({"TEXT"}, "a text in single quotes"),
    ({"_BETWEEN", "_IN"}, "BETWEEN, IN or LIKE"),
    ({"_NOT", "_NULL"}, "NULL or NOT NULL"),
    ({"_NULL"}, "NULL"),
    ({"_LPAR"}, '"("'),
    ({"_COMMA"}, '"," or ")"'),
    ({"_AND", "_RPAR"}, 'AND, OR or ")"'),
    ({"_AND", "_OR"}, "AND, OR or the end"),
    ({"_AND"}, "AND"),
    ({"_RPAR"}, 'AND, OR or ")"'),
    ({"$END"}, "AND, OR or the end"),
    ({"NUMBER"}, "a number"),
)
HINTS = {
    "==": "equal is written =",
    "!=": "not equal is written <>",
    "&&": "and is written AND",
    "||": "or is written OR",
}


class _Wrong(Exception):
    """A part of the text that the grammar allows and that is wrong: where and why."""

    def __init__(self, token: Token, message: str) -> None:
        self.place = token.start_pos or 0
        self.message = message


def parse(text: str) -> Condition:
    """The condition that a text says. Raises FilterError."""
    from lark.exceptions import UnexpectedCharacters, UnexpectedToken

    try:
        return _parser()(text)
    except UnexpectedToken as error:
        token = error.token
        at_end = token.type == "$END"
        place = len(text) if at_end else token.start_pos or 0
        found = "the text ends" if at_end else f"found {str(token)[:FOUND_LENGTH_MAX]}"
        expected = _expected(error.accepts or error.expected)
        raise _failure(text, place, f"{expected} is expected, {found}") from None
    except UnexpectedCharacters as error:
        position: Any = error.pos_in_stream  # declared as None only
        place = int(position)
        raise _failure(text, place, _character(text[place])) from None
    except _Wrong as wrong:
        raise FilterError("where", wrong.message, text, wrong.place) from None


def _failure(text: str, place: int, message: str) -> FilterError:
    for start in (place, place - 1):
        hint = HINTS.get(text[max(0, start) : start + 2])
        if hint is not None:
            return FilterError("where", hint, text, place)
    return FilterError("where", message, text, place)


def _expected(terminals: Collection[str]) -> str:
    return next((said for names, said in EXPECTED if names <= set(terminals)), "something else")


def _character(found: str) -> str:
    if found == "'":
        return "the text that begins here has no end"
    if found == '"':
        return "the name that begins here is empty or has no end"
    return f"{found!r} is not part of the language"


class _Callbacks:
    """The functions that make conditions of the parts of the grammar's rules."""

    def any_of(self, terms: list[Condition]) -> Condition:
        return AnyOf(tuple(terms), 1 + max(map(depth_of, terms)))

    def all_of(self, terms: list[Condition]) -> Condition:
        return AllOf(tuple(terms), 1 + max(map(depth_of, terms)))

    def inverted(self, terms: list[Condition]) -> Condition:
        return _not(terms[0])

    def comparison(self, parts: list[Any]) -> Condition:
        return Comparison(str(parts[1]), parts[0], parts[2])

    def between(self, parts: list[Operand]) -> Condition:
        value, low, high = parts
        return AllOf((Comparison(">=", value, low), Comparison("<=", value, high)), 1)

    def not_between(self, parts: list[Operand]) -> Condition:
        return _not(self.between(parts))

    def member(self, parts: list[Any]) -> Condition:
        return Member(parts[0], tuple(parts[1:]))

    def not_member(self, parts: list[Any]) -> Condition:
        return _not(self.member(parts))

    def like(self, parts: list[Any]) -> Condition:
        return Like(parts[0], _pattern(*parts[1:]))

    def not_like(self, parts: list[Any]) -> Condition:
        return _not(self.like(parts))

    def is_null(self, parts: list[Operand]) -> Condition:
        return IsNull(parts[0])

    def is_not_null(self, parts: list[Operand]) -> Condition:
        return _not(IsNull(parts[0]))

    def holds(self, parts: list[Operand]) -> Condition:
        return Holds(parts[0])

    def name(self, parts: list[Token]) -> Operand:
        text = str(parts[0])
        if parts[0].type == "QUOTED":
            return Name(Source.PROPERTY, text[1:-1].replace('""', '"'))
        source = OWN.get(text.lower())
        return Name(Source.PROPERTY, text) if source is None else Name(source)

    def number(self, parts: list[Token]) -> Operand:
        text = "".join(parts)
        value = int(text) if text.lstrip("+-").isdecimal() else float(text)
        if isinstance(value, float):
            if not isfinite(value):
                raise _Wrong(parts[0], "the number is too large")
        elif not INTEGER_MIN <= value <= INTEGER_MAX:
            raise _Wrong(parts[0], f"whole numbers go from {INTEGER_MIN} to {INTEGER_MAX}")
        return Literal(ValueKind.NUMBER, value)

    def text(self, parts: list[Token]) -> Operand:
        return Literal(ValueKind.TEXT, _unquoted(parts[0]))

    def truth(self, parts: list[Token]) -> Operand:
        return Literal(ValueKind.TRUTH, parts[0].type == "TRUE")

    def null(self, _parts: list[Token]) -> Operand:
        return Literal(ValueKind.NULL, None)


def _not(term: Condition) -> Condition:
    return Inverted(term, 1 + depth_of(term))


def _unquoted(token: Token) -> str:
    return str(token)[1:-1].replace("''", "'")


def _pattern(token: Token, escape: Token | None = None) -> tuple[str | None, ...]:
    """The characters of a pattern, with markers for ``_`` and ``%``."""
    escaping = None if escape is None else _unquoted(escape)
    if escape is not None and len(escaping or "") != 1:
        raise _Wrong(escape, f"ESCAPE takes one character, not {len(escaping or '')}")
    found: list[str | None] = []
    is_escaped = False
    for char in _unquoted(token):
        if is_escaped:
            if char not in {"%", "_", escaping}:
                raise _Wrong(token, f"{escaping} in the pattern stands before %, _ or itself")
            found.append(char)
            is_escaped = False
        elif char == escaping:
            is_escaped = True
        else:
            found.append(ANY_MANY if char == "%" else ANY_ONE if char == "_" else char)
    if is_escaped:
        raise _Wrong(token, f"the pattern ends with {escaping}, which stands before another")
    return tuple(found)


@cache
def _parser() -> Callable[[str], Condition]:
    from lark import Lark, Transformer

    class Reading(_Callbacks, Transformer[Any, Any]):
        """The callbacks whose methods the parser calls while it reads."""

    lark = Lark(
        GRAMMAR,
        parser="lalr",
        lexer="basic",
        maybe_placeholders=False,
        transformer=Reading(),
        g_regex_flags=re.ASCII,  # or words in any case have letters that only look like theirs
    )

    def run(text: str) -> Condition:
        found: Any = lark.parse(text)
        return found  # type: ignore[no-any-return]

    return run


# --- conditions that no task can meet --------------------------------------------------------

JUDGED_MAX = 20_000
"""Judgements of one search for a value at most. A longer search is not made."""
SHOWN_LENGTH_MAX = 200
PRIORITY_MAX = 255
"""The highest priority of a task; the lowest is 0."""
PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")

Simple = Comparison | Member | Like | IsNull | Holds
Wanted = tuple[Condition, bool]
"""A condition, and whether it has to be TRUE or FALSE."""
Sample = tuple[TaskOptions, Properties]


def why_never(condition: Condition) -> str | None:
    """Say why no task can meet the condition; None: nothing rules that out.

    A part that is UNKNOWN for every task is a mistake wherever it stands. Otherwise the parts on
    one name that have to hold together are tried on all values that make a difference to them:
    each literal, and what lies between two of them. What two names rule out together, or two
    patterns, is not looked for."""
    for part in _simple_parts(condition):
        judge = compiled(part)
        if all(judge(*sample) is None for sample in _samples([part])):
            return f"{_cut(_shown(part))} is UNKNOWN for every task: {_why_unknown(part)}"
    return _why_not([(condition, True)])


def _simple_parts(condition: Condition) -> Iterator[Simple]:
    match condition:
        case Inverted(term):
            yield from _simple_parts(term)
        case AllOf(terms) | AnyOf(terms):
            for term in terms:
                yield from _simple_parts(term)
        case _:
            yield condition


def _why_not(wanted: Iterable[Wanted]) -> str | None:
    """Say why the conditions cannot all be as they are wanted; None: nothing rules that out."""
    of_names: dict[frozenset[Name], dict[Wanted, None]] = {}
    for condition, truth in _together(wanted):
        parts = list(_simple_parts(condition))
        names = frozenset(name for part in parts for name in _names(part))
        if isinstance(condition, AllOf | AnyOf) and (
            len(names) > 1 or any(isinstance(part, Like) for part in parts)
        ):
            reasons = [_why_not([(term, truth)]) for term in condition.terms]
            if None not in reasons:
                return reasons[0]
        else:
            of_names.setdefault(names, {})[condition, truth] = None
    for names, together in of_names.items():
        if len(names) <= 1 and not _can_be(list(together)):
            said = _cut(" AND ".join(_shown(*one) for one in together))
            of = "".join(f" for any value of {_shown_operand(name)}" for name in names)
            return f"{said} cannot be TRUE{of}"
    return None


def _together(wanted: Iterable[Wanted]) -> Iterator[Wanted]:
    """The conditions that all have to be so; of the terms of an AND or OR among them, one."""
    for condition, truth in wanted:
        match condition:
            case Inverted(term):
                yield from _together([(term, not truth)])
            case AllOf(terms) if truth:
                yield from _together((term, True) for term in terms)
            case AnyOf(terms) if not truth:
                yield from _together((term, False) for term in terms)
            case _:
                yield condition, truth


def _can_be(wanted: list[Wanted]) -> bool:
    """Whether a value makes all conditions as they are wanted; they have one name, or none."""
    parts = [part for condition, _ in wanted for part in _simple_parts(condition)]
    samples = list(_samples(parts))
    if len(samples) * len(parts) > JUDGED_MAX:
        return True
    judges = [
        # Any text may match: which ones patterns match together is not worked out.
        (_is_text(condition.operand), True)
        if isinstance(condition, Like) and isinstance(condition.operand, Name)
        else (compiled(condition), truth)
        for condition, truth in wanted
    ]
    return any(all(judge(*sample) is truth for judge, truth in judges) for sample in samples)


def _is_text(operand: Operand) -> Predicate:
    get = _getter(operand)
    return lambda options, properties: type(get(options, properties)) is str


def _operands(part: Simple) -> tuple[Operand, ...]:
    match part:
        case Comparison(_, left, right):
            return left, right
        case Member(operand, values):
            return operand, *values
        case Like(operand) | IsNull(operand) | Holds(operand):
            return (operand,)


def _names(part: Simple) -> frozenset[Name]:
    return frozenset(one for one in _operands(part) if isinstance(one, Name))


def _samples(parts: list[Simple]) -> Iterator[Sample]:
    """Tasks with every value that makes a difference to conditions on one name; of two names, with
    values of every kind."""
    literals = [one for part in parts for one in _operands(part) if isinstance(one, Literal)]
    names = list({name for part in parts for name in _names(part)})
    for values in product(*(_values(name, literals) for name in names)):
        sample: Sample = (TaskOptions(), {})
        for name, value in zip(names, values, strict=True):
            sample = _with_value(sample, name, value)
        yield sample


def _with_value(sample: Sample, name: Name, value: Any) -> Sample:
    options, properties = sample
    match name.source:
        case Source.PROPERTY:
            return options, properties if value is None else {**properties, name.name: value}
        case Source.TAG:
            return options._replace(tag=value), properties
        case Source.KEY:
            return options._replace(key=value), properties
        case Source.PRIORITY:
            return options._replace(priority=value), properties


def _values(name: Name, literals: list[Literal]) -> list[PropertyValue | None]:
    if name.source is Source.PRIORITY:
        return [*range(PRIORITY_MAX + 1)]
    given = [one.value for one in literals if one.kind is ValueKind.TEXT]
    # Nothing lies between a text and the same one with a NUL behind it.
    texts = ["", *given, *(f"{text}\0" for text in given)]
    if name.source is not Source.PROPERTY:
        return [None, *texts]
    numbers = [one.value for one in literals if one.kind is ValueKind.NUMBER]
    return [None, True, False, *texts, *_around(numbers)]


def _around(numbers: Iterable[Any]) -> Iterator[float]:
    """Each number, the lowest ones that a property can have, and behind each of all these the next
    whole number and the next fraction: so there is one in every gap that a value fits in."""
    for number in (nextafter(-inf, 0), INTEGER_MIN, 0, *numbers):
        yield number
        if INTEGER_MIN <= (whole := floor(number) + 1) <= INTEGER_MAX:
            yield whole
        nearest = float(number)
        fraction = nearest if nearest > number else nextafter(nearest, inf)
        if isfinite(fraction):
            yield fraction


def _why_unknown(part: Simple) -> str:
    if isinstance(part, Like):
        return "LIKE is for texts"
    if isinstance(part, Holds):
        return "it is not TRUE or FALSE"
    others = _operands(part)[1:] if isinstance(part, Member) else _operands(part)
    literals = [one for one in others if isinstance(one, Literal)]
    kinds = {one.kind for one in literals}
    if kinds == {ValueKind.NULL} or (ValueKind.NULL in kinds and isinstance(part, Comparison)):
        return "nothing compares with NULL; write IS NULL or IS NOT NULL"
    if (
        isinstance(part, Comparison)
        and ValueKind.TRUTH in kinds
        and part.operator not in {"=", "<>"}
    ):
        return "truth values have no order"
    return "it compares values of two kinds"


def why_not(condition: Condition, options: TaskOptions, properties: Properties) -> str:
    """Say which parts keep a condition from being TRUE of a task, each with the values that it
    found; of a task of which it is TRUE: nothing."""
    found = list(dict.fromkeys(_failing(condition, options, properties, truth=True)))
    more = [f"{len(found) - FAILING_MAX} more"] if len(found) > FAILING_MAX else []
    return " and ".join([*found[:FAILING_MAX], *more])


FAILING_MAX = 5
"""How many parts of a condition are named that a task does not meet."""


def _failing(
    condition: Condition, options: TaskOptions, properties: Properties, *, truth: bool
) -> Iterator[str]:
    """The parts because of which a condition is not ``truth``, in words."""
    if compiled(condition)(options, properties) is truth:
        return
    match condition:
        case Inverted(term):
            yield from _failing(term, options, properties, truth=not truth)
        case AllOf(terms) | AnyOf(terms):
            for term in terms:
                yield from _failing(term, options, properties, truth=truth)
        case _:
            found = compiled(condition)(options, properties)
            word = "UNKNOWN" if found is None else str(found).upper()
            names = sorted(_names(condition), key=_shown_operand)
            values = (_found(name, options, properties) for name in names)
            of_values = ", ".join(values)
            yield f"{_cut(_shown(condition))} is {word}{of_values and f' ({of_values})'}"


def _found(name: Name, options: TaskOptions, properties: Properties) -> str:
    value = _getter(name)(options, properties)
    if value is None:
        what = "property" if name.source is Source.PROPERTY else ""
        return f"the task has no {what} {_shown_operand(name)}".replace("  ", " ")
    text = _shown_operand(Literal(KINDS[type(value)], value))
    return f"{_shown_operand(name)} is {_cut(text)}"


def _shown(condition: Condition, truth: bool = True) -> str:
    match condition:
        case Inverted(term):
            return _shown(term, not truth)
        case AllOf(terms) | AnyOf(terms):
            joint = " AND " if isinstance(condition, AllOf) is truth else " OR "
            return f"({joint.join(_shown(term, truth) for term in terms)})"
        case Comparison(sign, left, right):
            said = f"{_shown_operand(left)} {sign} {_shown_operand(right)}"
        case Member(operand, values):
            listed = ", ".join(map(_shown_operand, values))
            said = f"{_shown_operand(operand)} IN ({listed})"
        case Like(operand, pattern):
            marks = {ANY_ONE: "_", ANY_MANY: "%"}
            text = "".join(marks.get(char, char or "") for char in pattern)
            said = f"{_shown_operand(operand)} LIKE {_quoted(text)}"
        case IsNull(operand):
            return f"{_shown_operand(operand)} IS {'' if truth else 'NOT '}NULL"
        case Holds(operand):
            said = _shown_operand(operand)
    return said if truth else f"NOT {said}"


def _shown_operand(operand: Operand) -> str:
    if isinstance(operand, Literal):
        match operand.kind:
            case ValueKind.TEXT:
                return _quoted(str(operand.value))
            case ValueKind.NUMBER:
                return repr(operand.value)
            case ValueKind.TRUTH | ValueKind.NULL:
                return "NULL" if operand.value is None else str(operand.value).upper()
    if operand.source is not Source.PROPERTY:
        return str(operand.source.value)
    is_plain = PLAIN_NAME.fullmatch(operand.name) and operand.name.lower() not in OWN
    return operand.name if is_plain else '"' + operand.name.replace('"', '""') + '"'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _cut(text: str) -> str:
    shown = text if len(text) <= SHOWN_LENGTH_MAX else text[: SHOWN_LENGTH_MAX - 3] + "..."
    return "".join(char if char.isprintable() else " " for char in shown)
