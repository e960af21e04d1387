"""Small changes of one function, found by its syntax tree and made in its text.

A change names what it is about (a call, a condition, a name), not how that is written, so that
it outlives formatting, new arguments, and moves of its function. It must find exactly one place;
otherwise it raises Unfit. Only the text of that place changes: lines keep their numbers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CONDITIONED = (ast.If, ast.While, ast.IfExp)
SIMPLE = (
    ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise, ast.Delete,
)  # fmt: skip

T = TypeVar("T")


class Unfit(Exception):
    """A change finds nothing, or more than one place: look again at its function."""


class Place(NamedTuple):
    """From one byte of a file to another, and what stands there instead."""

    begin: int
    end: int
    text: str


class Function:
    """One function of a module, by its dotted name within that: ``Class.function``."""

    def __init__(self, source: bytes, name: str) -> None:
        self.source = source
        lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        node = _only(_defined(source, name), name)
        assert isinstance(node, FUNCTIONS)
        self.node = node

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt))
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.source[begin:end].decode()

    def place(self, node: ast.AST, text: str) -> Place:
        begin, end = self.span(node)
        lost = self.source[begin:end].count(b"\n") - text.count("\n")
        return Place(begin, end, text + " \\\n" * lost)


Change = Callable[[Function], Place]


def changed(source: bytes, name: str, changes: tuple[Change, ...]) -> bytes:
    """The module with a function changed. Raises Unfit."""
    function = Function(source, name)
    places = sorted(change(function) for change in changes)
    for before, after in pairwise(places):
        if before.end > after.begin:
            raise Unfit(f"changes of {name} overlap")
    for place in reversed(places):
        source = source[: place.begin] + place.text.encode() + source[place.end :]
    ast.parse(source)
    return source


class Modules:
    """The source of the package, in which a function is found by its name."""

    def __init__(self, root: Path) -> None:
        self._sources = {path: path.read_bytes() for path in (root / "tickwheel").rglob("*.py")}

    def with_function(self, name: str) -> tuple[Path, str, bytes]:
        """The module of ``Class.function``, its name there, its source. What several modules have
        is said with the end of one's path: ``sqlite/schema:upgrade``."""
        end, _, name = name.rpartition(":")
        first = rf"^ *(class|def|async def) {name.partition('.')[0]}\b".encode()
        paths = [
            path
            for path, source in self._sources.items()
            if path.as_posix().endswith(f"{end}.py" if end else "")
            and re.search(first, source, re.MULTILINE)
            and _defined(source, name)
        ]
        path = _only(paths, name)
        return path, name, self._sources[path]


def dropped(mention: str) -> Change:
    """The one statement that mentions a name is not executed."""
    return replaced(mention, "pass")


def replaced(mention: str, text: str) -> Change:
    """Another statement instead of the one that mentions a name."""
    return lambda function: function.place(_statement(function, mention), text)


def followed(mention: str, text: str) -> Change:
    """Another statement behind the one that mentions a name."""

    def change(function: Function) -> Place:
        node = _statement(function, mention)
        return function.place(node, f"{function.text(node)}; {text}")

    return change


def preceded(mention: str, text: str) -> Change:
    """Another statement before the one that mentions a name."""

    def change(function: Function) -> Place:
        node = _statement(function, mention)
        return function.place(node, f"{text}; {function.text(node)}")

    return change


def condition(mention: str, text: str) -> Change:
    """The one condition that mentions a name is another, ``"False"`` say."""

    def change(function: Function) -> Place:
        conditions: list[ast.expr] = []
        for node in ast.walk(function.node):
            if isinstance(node, CONDITIONED):
                conditions.append(node.test)
            elif isinstance(node, ast.comprehension):
                conditions += node.ifs
        nodes = [node for node in conditions if _mentions(node, mention)]
        return function.place(_only(nodes, f"condition with {mention}"), text)

    return change


def without(mention: str) -> Change:
    """An ``and`` or ``or`` lacks the one operand that mentions a name."""

    def change(function: Function) -> Place:
        rows = [
            (operand, isinstance(node.op, ast.And))
            for node in ast.walk(function.node)
            if isinstance(node, ast.BoolOp)
            for operand in node.values
            if _mentions(operand, mention) and not isinstance(operand, ast.BoolOp)
        ]
        operand, neutral = _only(rows, f"operand with {mention}")
        return function.place(operand, str(neutral))

    return change


def instead(expression: str, text: str) -> Change:
    """Another expression instead of one: a name, an attribute, a comparison."""
    wanted = ast.dump(ast.parse(expression, mode="eval").body)

    def change(function: Function) -> Place:
        nodes = [
            node
            for node in ast.walk(function.node)
            if isinstance(node, ast.expr) and ast.dump(node) == wanted
        ]
        return function.place(_only(nodes, expression), text)

    return change


def word(old: str, new: str) -> Change:
    """Another word in the one text that has it."""

    def change(function: Function) -> Place:
        nodes = [
            node
            for node in ast.walk(function.node)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and old in node.value
        ]
        node = _only(nodes, f"text with {old}")
        return function.place(node, function.text(node).replace(old, new))

    return change


def returning(text: str) -> Change:
    """The function does nothing but return this."""

    def change(function: Function) -> Place:
        first, last = function.node.body[0], function.node.body[-1]
        begin, end = function.span(first)[0], function.span(last)[1]
        lost = function.source[begin:end].count(b"\n")
        return Place(begin, end, f"return {text}" + " \\\n" * lost)

    return change


@lru_cache(maxsize=100)
def _parsed(source: bytes) -> ast.Module:
    return ast.parse(source)


def _defined(source: bytes, name: str) -> list[ast.AST]:
    nodes: list[ast.AST] = [_parsed(source)]
    for part in name.split("."):
        nodes = [
            child
            for node in nodes
            for child in _scope(node)
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)) and child.name == part
        ]
    return nodes


def _scope(node: ast.AST) -> Iterator[ast.AST]:
    """What is defined in a module, a class or a function, under its own name there."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from _scope(child)


def _statement(function: Function, mention: str) -> ast.AST:
    nodes = [
        node
        for node in ast.walk(function.node)
        if isinstance(node, SIMPLE) and _mentions(node, mention)
    ]
    return _only(nodes, f"statement with {mention}")


def _mentions(node: ast.AST, mention: str) -> bool:
    """Whether a name stands in it: ``b`` and ``a.b`` both in ``a.b(c)``."""
    for part in ast.walk(node):
        if isinstance(part, (ast.Name, ast.Attribute)):
            name = ast.unparse(part)
            if name == mention or name.endswith(f".{mention}"):
                return True
    return False


def _only(found: list[T], what: str) -> T:
    if len(found) != 1:
        raise Unfit(f"{what}: {len(found)} places")
    return found[0]
