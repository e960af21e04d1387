"""The text of a condition as values. The only module that knows the parser library, which is
loaded when the first condition is read: most daemons never see one.

The parser is LALR(1) over a fixed grammar. It keeps a stack of its own and builds no tree, so that
no text, however it is nested, makes it recurse; the length of a text is bounded by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any

from tickwheel.model.filters.conditions import (
    ANY_MANY,
    ANY_ONE,
    AllOf,
    AnyOf,
    Comparison,
    Condition,
    Holds,
    Inverted,
    IsNull,
    Kind,
    Like,
    Literal,
    Member,
    Name,
    Operand,
    Source,
    depth_of,
)
from tickwheel.model.filters.errors import FilterError

if TYPE_CHECKING:
    from lark import Token

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
%ignore /\s+/
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
        return Literal(Kind.NUMBER, value)

    def text(self, parts: list[Token]) -> Operand:
        return Literal(Kind.TEXT, _unquoted(parts[0]))

    def truth(self, parts: list[Token]) -> Operand:
        return Literal(Kind.TRUTH, parts[0].type == "TRUE")

    def null(self, _parts: list[Token]) -> Operand:
        return Literal(Kind.NULL, None)


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
        GRAMMAR, parser="lalr", lexer="basic", maybe_placeholders=False, transformer=Reading()
    )

    def run(text: str) -> Condition:
        found: Any = lark.parse(text)
        return found  # type: ignore[no-any-return]

    return run
