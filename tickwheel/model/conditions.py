"""The language of conditions on a task's tag, key, priority and properties: its grammar
(``GRAMMAR``, ``parse``), the parsed form (``Condition``), and the compiled form (``compiled``).
Callers use ``filters.py``.

As in SQL-92, a condition is TRUE, FALSE or UNKNOWN (``True``, ``False``, ``None``), and an absent
value is NULL. Numbers are compared with numbers, strings with strings (by code points), and
truth values with truth values (``=`` and ``<>`` only). Any other comparison is UNKNOWN, never an
error.

``why_never`` finds conditions that no task can satisfy.

``compiled`` returns nested functions and never evaluates text as code. ``cost_of`` bounds the work
of one call, because patterns do not backtrack: each part between two ``%`` matches at its first
occurrence, which leaves most text for the remaining parts.

Only this module imports the parser library, and only when the first condition is parsed, because
most daemons never parse one. The parser is LALR(1) over a fixed grammar, with an explicit stack and
without a tree, so that nested text cannot make it recurse. The caller bounds the length of the
text.
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


# These are dataclasses because named tuples of different classes can compare as equal.


class Source(Enum):
    """The part of a task in which the value of a name is found."""

    PROPERTY = "property"
    TAG = "tag"
    KEY = "key"
    PRIORITY = "priority"


class ValueKind(Enum):
    """The kinds of values. Only values of the same kind can be compared."""

    NUMBER = "number"
    TEXT = "text"
    TRUTH = "truth"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a condition, which refers to a value of the task."""

    source: Source
    name: str = ""


@dataclass(frozen=True, slots=True)
class Literal:
    kind: ValueKind
    """The kind of the value, because True == 1 in Python."""
    value: PropertyValue | None


Operand = Name | Literal


@dataclass(frozen=True, slots=True)
class Comparison:
    operator: str
    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class Member:
    """The test whether a value is in a list: ``IN``."""

    operand: Operand
    values: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Like:
    operand: Operand
    pattern: tuple[str | None, ...]
    """The characters to match, ``ANY_ONE`` for ``_`` and ``ANY_MANY`` for ``%``."""


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Operand


@dataclass(frozen=True, slots=True)
class Holds:
    """A value that is used as a condition. The result is UNKNOWN unless it is a truth value."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Inverted:
    """A negated condition: ``NOT``."""

    term: Condition
    depth: int


@dataclass(frozen=True, slots=True)
class AllOf:
    """Conditions joined by ``AND``."""

    terms: tuple[Condition, ...]
    depth: int


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Conditions joined by ``OR``."""

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
    kind: frozenset(python_type for python_type, its_kind in KINDS.items() if its_kind is kind)
    for kind in (ValueKind.NUMBER, ValueKind.TEXT, ValueKind.TRUTH)
}


def depth_of(condition: Condition) -> int:
    """Return how deeply AND, OR and NOT are nested, or 0 if the condition has none of them."""
    return condition.depth if isinstance(condition, Inverted | AllOf | AnyOf) else 0


def cost_of(condition: Condition) -> int:
    """Return the maximum cost of evaluating the condition for a task: one step per comparison, and
    one per searched character of a pattern."""
    return _work_of(condition, 1)


def steps_of(condition: Condition) -> int:
    """Return the maximum time for evaluating the condition for a task, in comparisons of about 0.2
    µs. A searched character counts as a search in the longest text that a property can have."""
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
    """Return a function that evaluates the condition for a task's options and properties."""
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
    """Return AND (a FALSE term decides) or OR (a TRUE term decides). Without a deciding term the
    result is UNKNOWN if any term is UNKNOWN."""

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        result: Truth = not decides
        for term in terms:
            truth = term(options, properties)
            if truth is decides:
                return truth
            if truth is None:
                result = None
        return result

    return judge


def _inverted(term: Predicate) -> Predicate:
    def judge(options: TaskOptions, properties: Properties) -> Truth:
        truth = term(options, properties)
        return None if truth is None else not truth

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
        left_value, right_value = first(options, properties), second(options, properties)
        kind = KINDS.get(type(left_value))
        if kind is None or kind is not KINDS.get(type(right_value)):
            return None
        if is_order and kind is ValueKind.TRUTH:
            return None
        return compare(left_value, right_value)

    return judge


def _with_literal(sign: str, left: Name, right: Literal) -> Predicate:
    """Return the predicate that compares a name with a literal, which is the most frequent case."""
    if right.kind is ValueKind.NULL or (right.kind is ValueKind.TRUTH and sign not in {"=", "<>"}):
        return _unknown
    compare, types, literal, name = OPERATORS[sign], TYPES[right.kind], right.value, left.name
    if left.source is Source.PROPERTY:

        def judge_property(_options: TaskOptions, properties: Properties) -> Truth:
            value = properties.get(name)
            return compare(value, literal) if type(value) in types else None

        return judge_property
    get = _getter(left)

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        value = get(options, properties)
        return compare(value, literal) if type(value) in types else None

    return judge


def _member(operand: Operand, values: tuple[Literal, ...]) -> Predicate:
    get = _getter(operand)
    # One set per kind: because True == 1, a common set could not distinguish them.
    of_kind = {
        kind: frozenset(literal.value for literal in values if literal.kind is kind)
        for kind in TYPES
    }
    # If a value is not in the list, the result is UNKNOWN if the list has values of another kind.
    missing: dict[ValueKind, Truth] = {
        kind: False if all(literal.kind is kind for literal in values) else None for kind in TYPES
    }

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        value = get(options, properties)
        kind = KINDS.get(type(value))
        if kind is None:
            return None
        return True if value in of_kind[kind] else missing[kind]

    return judge


def _is_null(operand: Operand) -> Predicate:
    get = _getter(operand)
    return lambda options, properties: get(options, properties) is None


def _holds(operand: Operand) -> Predicate:
    get = _getter(operand)

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        value = get(options, properties)
        return value if type(value) is bool else None

    return judge


# --- LIKE ------------------------------------------------------------------------------------

Part = tuple[str | None, ...]


def _split(pattern: Part) -> list[Part]:
    """Return the parts between the ``%`` of a pattern. The first and the last are anchored."""
    parts: list[list[str | None]] = [[]]
    for char in pattern:
        if char == ANY_MANY:
            parts.append([])
        else:
            parts[-1].append(char)
    inner = [tuple(part) for part in parts[1:-1] if part]
    anchored = [tuple(part) for part in parts]
    return anchored if len(anchored) == 1 else [anchored[0], *inner, anchored[-1]]


def _expression(part: Part) -> re.Pattern[str]:
    """Return a regular expression of fixed length, which cannot backtrack."""
    expression = "".join("." if char is ANY_ONE else re.escape(char) for char in part)
    return re.compile(expression, re.DOTALL)


Search = Callable[[str, int, int], int]
"""Finds a part of a pattern in text[first:end]. Returns the index after it, or -1."""


def _searching(part: Part) -> Search:
    length = len(part)
    if ANY_ONE not in part:
        literal = "".join(char for char in part if char is not ANY_ONE)

        def find(text: str, first: int, end: int) -> int:
            index = text.find(literal, first, end)
            return index if index < 0 else index + length

        return find
    expression = _expression(part)

    def search(text: str, first: int, end: int) -> int:
        match = expression.search(text, first, end)
        return -1 if match is None else match.end()

    return search


def _like(operand: Operand, pattern: Part) -> Predicate:
    get, matches = _getter(operand), _matcher(pattern)

    def judge(options: TaskOptions, properties: Properties) -> Truth:
        value = get(options, properties)
        return matches(value) if type(value) is str else None

    return judge


def _matcher(pattern: Part) -> Callable[[str], bool]:
    parts = _split(pattern)
    if len(parts) == 1:
        exact = _expression(parts[0])
        return lambda text: exact.fullmatch(text) is not None
    head, *inner, tail = parts
    head_length, tail_length = len(head), len(tail)
    begins, ends = _expression(head), _expression(tail)
    searches = tuple(map(_searching, inner))

    def matches(text: str) -> bool:
        index, end = head_length, len(text) - tail_length
        if index > end or not begins.match(text) or not ends.match(text, end):
            return False
        for search in searches:
            index = search(text, index, end)
            if index < 0:
                return False
        return True

    return matches


BEFORE_MAX = 40
"""Maximum characters that a message shows before the position of the error."""
AFTER_MAX = 20
"""Maximum characters that a message shows after the position of the error."""


class FilterError(ValueError):
    """A filter is not valid (the message has a caret under the position of the error) or exceeds a
    limit (there is no position)."""

    def __init__(self, field: str, message: str, text: str, position: int | None) -> None:
        self.field = field
        """The field with the error: ``tags`` or ``where``."""
        self.position = position
        """The index of the first invalid character; None if the filter exceeds a limit."""
        if position is None:
            super().__init__(f"{field}: {message}")
        else:
            where = f"{field}, character {position + 1}"
            super().__init__(f"{where}: {message}\n{_pointed(text, position)}")


def _pointed(text: str, position: int) -> str:
    """Return the text around the position in one line, and a caret in a second line."""
    first, end = max(0, position - BEFORE_MAX), position + AFTER_MAX
    before, after = "..." if first else "", "..." if end < len(text) else ""
    # For the caret, every character must be one column wide.
    part = "".join(char if char.isprintable() else " " for char in text[first:end])
    caret = " " * (len(before) + position - first) + "^"
    return f"  {before}{part}{after}\n  {caret}"


FOUND_LENGTH_MAX = 40
OWN = {"tag": Source.TAG, "key": Source.KEY, "priority": Source.PRIORITY}
"""Names, in upper or lower case, of values of the task itself. In quotes they are properties."""
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**64 - 1
"""Range of the integers in conditions."""

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

# (terminals that the parser expects, their name in messages). The first match is used.
EXPECTED = (
    ({"_NOT", "NAME"}, "a condition"),
    ({"NAME"}, "a name or a value"),
    ({"NUMBER", "TEXT"}, "a value"),
    ({"COMPARISON", "_AND"}, "an operator, AND, OR or the end"),
    ({"COMPARISON"}, "an operator"),
    ({"TEXT"}, "a string in single quotes"),
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


class _InvalidToken(Exception):
    """A token is accepted by the grammar, but is not valid."""

    def __init__(self, token: Token, message: str) -> None:
        self.position = token.start_pos or 0
        self.message = message


def parse(text: str) -> Condition:
    """Parse the text of a condition. Raise FilterError if it is not valid."""
    from lark.exceptions import UnexpectedCharacters, UnexpectedToken

    try:
        return _parser()(text)
    except UnexpectedToken as error:
        token = error.token
        at_end = token.type == "$END"
        position = len(text) if at_end else token.start_pos or 0
        actual = "the end" if at_end else str(token)[:FOUND_LENGTH_MAX]
        expected = _expected(error.accepts or error.expected)
        raise _failure(text, position, f"expected {expected}, found {actual}") from None
    except UnexpectedCharacters as error:
        index: Any = error.pos_in_stream  # declared as None only
        position = int(index)
        raise _failure(text, position, _character(text[position])) from None
    except _InvalidToken as error:
        raise FilterError("where", error.message, text, error.position) from None


def _failure(text: str, position: int, message: str) -> FilterError:
    for start in (position, position - 1):
        hint = HINTS.get(text[max(0, start) : start + 2])
        if hint is not None:
            return FilterError("where", hint, text, position)
    return FilterError("where", message, text, position)


def _expected(terminals: Collection[str]) -> str:
    return next(
        (description for names, description in EXPECTED if names <= set(terminals)),
        "something else",
    )


def _character(char: str) -> str:
    if char == "'":
        return "the string that begins here has no end"
    if char == '"':
        return "the name that begins here is empty or has no end"
    return f"{char!r} is not part of the language"


class _Callbacks:
    """The functions that build the conditions for the grammar's rules."""

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
                raise _InvalidToken(parts[0], "the number is too large")
        elif not INTEGER_MIN <= value <= INTEGER_MAX:
            raise _InvalidToken(
                parts[0], f"an integer must be between {INTEGER_MIN} and {INTEGER_MAX}"
            )
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
    """Return the characters of a pattern, with markers for ``_`` and ``%``."""
    escaping = None if escape is None else _unquoted(escape)
    if escape is not None and len(escaping or "") != 1:
        raise _InvalidToken(escape, f"ESCAPE takes one character, not {len(escaping or '')}")
    pattern: list[str | None] = []
    is_escaped = False
    for char in _unquoted(token):
        if is_escaped:
            if char not in {"%", "_", escaping}:
                raise _InvalidToken(token, f"{escaping} in the pattern must precede %, _ or itself")
            pattern.append(char)
            is_escaped = False
        elif char == escaping:
            is_escaped = True
        else:
            pattern.append(ANY_MANY if char == "%" else ANY_ONE if char == "_" else char)
    if is_escaped:
        raise _InvalidToken(token, f"the pattern must not end with its escape character {escaping}")
    return tuple(pattern)


@cache
def _parser() -> Callable[[str], Condition]:
    from lark import Lark, Transformer

    class Reading(_Callbacks, Transformer[Any, Any]):
        """The parser calls these methods while it reads the text."""

    lark = Lark(
        GRAMMAR,
        parser="lalr",
        lexer="basic",
        maybe_placeholders=False,
        transformer=Reading(),
        g_regex_flags=re.ASCII,  # otherwise S would match U+017F when case is ignored
    )

    def run(text: str) -> Condition:
        condition: Any = lark.parse(text)
        return condition  # type: ignore[no-any-return]

    return run


# --- conditions that no task can satisfy -----------------------------------------------------

JUDGED_MAX = 20_000
"""Maximum number of evaluations in a search for a value that satisfies a condition. A longer search
is skipped."""
SHOWN_LENGTH_MAX = 200
PRIORITY_MAX = 255
"""The highest priority of a task; the lowest is 0."""
PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")

Simple = Comparison | Member | Like | IsNull | Holds
Wanted = tuple[Condition, bool]
"""(condition, required truth value)"""
Sample = tuple[TaskOptions, Properties]


def why_never(condition: Condition) -> str | None:
    """Return why no task can satisfy the condition, or None if no reason is found. A part that is
    UNKNOWN for every task is always a mistake. Other parts are grouped by name, and the parts that
    must hold together are evaluated for all relevant values: each literal, and a value in each gap
    between literals. Contradictions between two names or between two patterns are not detected."""
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


def _why_not(conditions_wanted: Iterable[Wanted]) -> str | None:
    """Return why the conditions cannot all have the required truth values, or None if no reason is
    found."""
    of_names: dict[frozenset[Name], dict[Wanted, None]] = {}
    for condition, truth in _together(conditions_wanted):
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
            conditions = _cut(" AND ".join(_shown(part, truth) for part, truth in together))
            scope = "".join(f" for any value of {_shown_operand(name)}" for name in names)
            return f"{conditions} cannot be TRUE{scope}"
    return None


def _together(required: Iterable[Wanted]) -> Iterator[Wanted]:
    """Flatten the conditions into conditions that must all have the required truth values. An AND
    that must be FALSE, or an OR that must be TRUE, is not flattened."""
    for condition, truth in required:
        match condition:
            case Inverted(term):
                yield from _together([(term, not truth)])
            case AllOf(terms) if truth:
                yield from _together((term, True) for term in terms)
            case AnyOf(terms) if not truth:
                yield from _together((term, False) for term in terms)
            case _:
                yield condition, truth


def _can_be(required: list[Wanted]) -> bool:
    """Return whether some value gives all conditions the required truth values. The conditions must
    have at most one name."""
    parts = [part for condition, _ in required for part in _simple_parts(condition)]
    samples = list(_samples(parts))
    if len(samples) * len(parts) > JUDGED_MAX:
        return True
    judges = [
        # Any text counts as a match of a pattern, because patterns are not compared with each
        # other.
        (_is_text(condition.operand), True)
        if isinstance(condition, Like) and isinstance(condition.operand, Name)
        else (compiled(condition), truth)
        for condition, truth in required
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
    return frozenset(operand for operand in _operands(part) if isinstance(operand, Name))


def _samples(parts: list[Simple]) -> Iterator[Sample]:
    """Yield tasks with every value that can make a difference to conditions on one name. For two
    names, yield a value of every kind."""
    operands = (operand for part in parts for operand in _operands(part))
    literals = [operand for operand in operands if isinstance(operand, Literal)]
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
    named = [literal.value for literal in literals if literal.kind is ValueKind.TEXT]
    # The text that immediately follows a text in order is the same text with a NUL appended.
    texts = ["", *named, *(f"{text}\0" for text in named)]
    if name.source is not Source.PROPERTY:
        return [None, *texts]
    numbers = [literal.value for literal in literals if literal.kind is ValueKind.NUMBER]
    return [None, True, False, *texts, *_around(numbers)]


def _around(numbers: Iterable[Any]) -> Iterator[float]:
    """Yield each number and the lowest possible numbers, each followed by the next integer and the
    next fraction, so that every gap contains a value."""
    for number in (nextafter(-inf, 0), INTEGER_MIN, 0, *numbers):
        yield number
        if INTEGER_MIN <= (next_integer := floor(number) + 1) <= INTEGER_MAX:
            yield next_integer
        nearest = float(number)
        fraction = nearest if nearest > number else nextafter(nearest, inf)
        if isfinite(fraction):
            yield fraction


def _why_unknown(part: Simple) -> str:
    if isinstance(part, Like):
        return "LIKE is for strings"
    if isinstance(part, Holds):
        return "it is not TRUE or FALSE"
    operands = _operands(part)[1:] if isinstance(part, Member) else _operands(part)
    kinds = {operand.kind for operand in operands if isinstance(operand, Literal)}
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
    """Return the parts of a condition that a task does not satisfy, with the task's values, or ""
    if the task satisfies the condition."""
    failing = list(dict.fromkeys(_failing(condition, options, properties, truth=True)))
    omitted = [f"{len(failing) - FAILING_MAX} more"] if len(failing) > FAILING_MAX else []
    return " and ".join([*failing[:FAILING_MAX], *omitted])


FAILING_MAX = 5
"""Maximum number of parts of a condition that ``why_not`` lists."""


def _failing(
    condition: Condition, options: TaskOptions, properties: Properties, *, truth: bool
) -> Iterator[str]:
    """Yield the parts that prevent the condition from being ``truth``, in words."""
    if compiled(condition)(options, properties) is truth:
        return
    match condition:
        case Inverted(term):
            yield from _failing(term, options, properties, truth=not truth)
        case AllOf(terms) | AnyOf(terms):
            for term in terms:
                yield from _failing(term, options, properties, truth=truth)
        case _:
            result = compiled(condition)(options, properties)
            result_name = "UNKNOWN" if result is None else str(result).upper()
            names = sorted(_names(condition), key=_shown_operand)
            values = ", ".join(_value_of(name, options, properties) for name in names)
            yield f"{_cut(_shown(condition))} is {result_name}{values and f' ({values})'}"


def _value_of(name: Name, options: TaskOptions, properties: Properties) -> str:
    value = _getter(name)(options, properties)
    if value is None:
        noun = "property " if name.source is Source.PROPERTY else ""
        return f"the task has no {noun}{_shown_operand(name)}"
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
            shown = f"{_shown_operand(left)} {sign} {_shown_operand(right)}"
        case Member(operand, values):
            listed = ", ".join(map(_shown_operand, values))
            shown = f"{_shown_operand(operand)} IN ({listed})"
        case Like(operand, pattern):
            marks = {ANY_ONE: "_", ANY_MANY: "%"}
            text = "".join(marks.get(char, char or "") for char in pattern)
            shown = f"{_shown_operand(operand)} LIKE {_quoted(text)}"
        case IsNull(operand):
            return f"{_shown_operand(operand)} IS {'' if truth else 'NOT '}NULL"
        case Holds(operand):
            shown = _shown_operand(operand)
    return shown if truth else f"NOT {shown}"


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
