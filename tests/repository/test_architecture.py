"""The rules of ARCHITECTURE.md that a machine can hold: who imports whom, and that nobody does in
a circle; how long functions are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.usefixtures("no_collections")
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tickwheel"

# Data structures, types and arithmetic; nothing that reads a clock, waits, opens or logs.
PURE_STDLIB = {
    "__future__", "abc", "array", "bisect", "collections", "collections.abc", "dataclasses",
    "difflib", "enum", "functools", "hashlib", "heapq", "itertools", "math", "operator", "re",
    "shlex", "struct", "typing", "zlib",
}  # fmt: skip


CALENDAR = {"datetime", "zoneinfo", "cronsim"}
"""What ``engine/timetables.py`` may import beside: arithmetic on times that it is given. What the
data of a time zone says is a constant to it."""


PARSER = {"lark", "lark.exceptions"}
"""What ``model/conditions.py`` may import beside: text goes in, values come out."""


def _is_calendar(path: Path, name: str) -> bool:
    return path.name == "timetables.py" and name in CALENDAR


def _is_parser(path: Path, name: str) -> bool:
    return path.name == "conditions.py" and name in PARSER


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


ASKED_FOR = (
    ast.Assign, ast.Attribute, ast.Call, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef,
    ast.Import, ast.ImportFrom, ast.Name,
)  # fmt: skip


@cache
def _nodes(path: Path) -> list[ast.AST]:
    """All nodes of these kinds: a walk through a module takes longer than a look at them."""
    return [node for node in ast.walk(_parsed(path)) if isinstance(node, ASKED_FOR)]


def _modules(part: str) -> Iterator[Path]:
    result = PACKAGE / part
    yield from sorted(result.rglob("*.py")) if result.is_dir() else [result.with_suffix(".py")]


def _imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names that ``path`` imports; a name taken from ``tickwheel`` itself counts whole."""
    nodes = _nodes(path) if lazy else _at_import(_parsed(path).body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            if module == "tickwheel":
                yield from (f"tickwheel.{alias.name}" for alias in node.names)
            else:
                yield module


def _at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The statements that run when the module is imported; type checkers' blocks do not."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.stmt):
                yield from _at_import([inner])


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(path): path for path in PACKAGE.rglob("*.py")}


def _imported_modules(path: Path) -> Iterator[str]:
    """Those of ``MODULES`` that ``path`` names anywhere; not the packages that they are in."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module or ""


def _ours(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "tickwheel" and len(parts) > 1 else None


def test_the_import_contracts_hold() -> None:
    lint = "from importlinter.cli import lint_imports_command as lint; lint()"
    finished = subprocess.run(
        [sys.executable, "-c", lint, "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_the_pure_parts_import_an_allow_list_of_the_standard_library() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for part in ("wheel", "model", "engine")
        for path in _modules(part)
        for name in _imports(path)
        if name not in PURE_STDLIB
        and _ours(name) is None
        and not _is_calendar(path, name)
        and not _is_parser(path, name)
    ]
    assert not wrong


def test_the_calendar_reads_no_clock() -> None:
    tree = ast.parse((PACKAGE / "engine" / "timetables.py").read_text())
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not called & {"now", "utcnow", "today", "time", "fromtimestamp"}


def test_few_history_modules_import_stores() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in _modules("history")
        for name in _imports(path)
        if path.name not in {"branches.py", "daemon.py", "reset_plan.py", "fold.py", "restore.py"}
        and _ours(name) in {"engine", "model", "persistence"}
        and name != "tickwheel.model.policies"
    ]
    assert not wrong


def test_core_and_stores_do_not_read_the_time() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for part in ("wheel", "model", "engine", "persistence", "protocol")
        for path in _modules(part)
        for name in _imports(path)
        if name in {"time", "datetime"} and not _is_calendar(path, name)
    ]
    assert not wrong


def test_daemon_and_history_writer_read_the_time_from_the_clock() -> None:
    wall = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today"}
    names = {call.rpartition(".")[2] for call in wall}
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}"
        for part in ("server", "history")
        for path in _modules(part)
        for node in _nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in names
        and ast.unparse(node.func) in wall
    ]
    assert not wrong


def test_durations_in_seconds_are_not_truncated_to_milliseconds() -> None:
    """``int(2.01 * 1000)`` is 2009. Moments of the past and the rest of a wait may lose some."""
    truncated = re.compile(r"\bint\((?!began_s|left_s)[^()]*_s(?:\(\)|\"\])? \* 1000\)")
    wrong = [str(path) for path in MODULES.values() if truncated.search(path.read_text())]
    assert not wrong


def test_only_ownership_reads_owed() -> None:
    """``state`` keeps what ``ownership`` decides there; everybody else asks."""
    names = {
        path.name
        for part in ("engine", "server", "history")
        for path in _modules(part)
        for node in _nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "owed"
    }
    assert names == {"ownership.py", "state.py"}


def test_modules_have_no_import_cycles() -> None:
    """What is imported in a function, or for type checkers only, counts too."""
    imported = {
        name: {other for other in _imported_modules(path) if other != name}
        for name, path in MODULES.items()
    }
    # What imports nothing that is left, or what nothing that is left imports, is in no circle.
    while True:
        needed = set[str]().union(*imported.values())
        free = [
            n for n, others in imported.items() if n not in needed or not others & imported.keys()
        ]
        if not free:
            break
        for name in free:
            del imported[name]
    wrong = [
        f"{name} imports {', '.join(sorted(others & imported.keys()))}"
        for name, others in sorted(imported.items())
    ]
    assert not wrong


BUDGETS = {
    "": 4_814, "api": 5_347, "cli": 7_848, "client": 13_978, "contrib": 1_206, "demo": 1_190,
    "engine": 12_806, "history": 6_647, "inbox": 1_505, "model": 3_918, "outbound": 2_397,
    "persistence": 14_711, "reports": 4_217, "server": 3_528, "server/access": 1_357,
    "server/fleet": 3_235, "server/http": 5_697, "server/metrics": 1_333, "server/shard": 12_660,
    "server/tcp": 1_650, "testing": 750, "wheel": 1_317,
}  # fmt: skip
"""Folder of the package → lines that its modules may have, docstrings included. A commit that
raises one says why; one that shrinks a folder lowers it."""


def test_every_package_keeps_its_budget_of_lines() -> None:
    lines = dict.fromkeys(BUDGETS, 0)
    for path in PACKAGE.rglob("*.py"):
        words = path.relative_to(PACKAGE).parent.parts
        folder = "/".join(words[:2] if "/".join(words[:2]) in BUDGETS else words[:1])
        lines[folder] += len(path.read_text().splitlines())
    over = {name: count for name, count in lines.items() if count > BUDGETS[name]}
    loose = {name: count for name, count in lines.items() if count < BUDGETS[name] * 0.9}
    assert not over, "shrink the package, or say in the commit why it needs more"
    assert not loose, "lower the budget to what the package has"


TESTS_LINES_MAX = 140_743
"""Lines of all test code. A commit that raises it says why; one that removes some lowers it."""


def test_the_tests_keep_their_budget_of_lines() -> None:
    tests = ROOT / "tests"
    lines = sum(len(path.read_text().splitlines()) for path in tests.rglob("*.py"))
    assert lines <= TESTS_LINES_MAX, "test on a lower level, parametrise, or say why it needs more"
    assert lines >= TESTS_LINES_MAX * 0.95, "lower the budget to what the tests have"


PRIVATE_OF_LIBRARIES = {
    "client/requests.py: asyncio.coroutines._is_coroutine": "a coroutine function before 3.12",
    "client/requests.py: call._is_coroutine": "the same",
    "outbound/forward.py: connection._create_reader_task": "aiokafka has no hook for its reader",
    "persistence/redis/driver_asyncio_redis.py: protocol._query": "for commands unknown to it",
    "reports/files.py: getattr(error, '_origin', None)": "the exception of the JVM",
    "reports/files.py: spark.sparkContext._jsc": "the only way to Hadoop's file systems",
    "reports/session.py: SparkContext._gateway": "the only way to see whether a JVM runs",
    "testing/wheel.py: getattr(asyncio.get_running_loop(), '_ready', None)": "waiting callbacks",
}
"""Private names of libraries that have no public one, and what they are needed for. There are none
of other packages of ours."""
DOCUMENTED = {
    "_replace", "_asdict", "_fields", "_make", "_field_defaults", "_exit", "_getframe",
    "_get_current_object",
}  # fmt: skip
"""Public names in spite of their underscore: of named tuples, ``os``, ``sys`` and Flask."""


class _Class(NamedTuple):
    """One of our classes, with its private names."""

    package: str
    place: str
    bases: list[str]
    defines: set[str]
    uses: set[str]
    """What its methods read or call on ``self``, ``cls`` or ``super()``."""


def test_packages_use_public_names_of_each_other() -> None:
    """A package is a folder or a module directly under ``tickwheel``, or under its ``server``."""
    offences = {
        offence
        for path in MODULES.values()
        for offence in (*_private_imports(path), *_private_attributes(path))
    }
    offences |= set(_private_inheritance())
    listed = PRIVATE_OF_LIBRARIES.keys()
    assert not offences - listed, "give it a public name, or move the code to its package"
    assert not listed - offences, "no longer used: delete it from the list"


def _package(path: Path) -> str:
    words = path.relative_to(PACKAGE).with_suffix("").parts
    return "/".join(words[: 2 if words[0] == "server" and len(words) > 2 else 1])


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in DOCUMENTED


def _is_self(node: ast.expr) -> bool:
    match node:
        case ast.Name("self" | "cls") | ast.Call(ast.Name("super"), [], []):
            return True
    return False


@cache
def _private_names() -> dict[str, set[str]]:
    """Package → the private names of its functions, classes, variables, fields and attributes."""
    names: dict[str, set[str]] = {}
    for path in MODULES.values():
        results = {name for name in _defined(_nodes(path)) if _is_private(name)}
        names.setdefault(_package(path), set()).update(results)
    return names


def _private_imports(path: Path) -> Iterator[str]:
    for node in _nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tickwheel"):
            whole = f"{node.module}".replace(".", "/")
            origin = next(p for p in (f"{whole}.py", f"{whole}/__init__.py") if (ROOT / p).exists())
            if _package(ROOT / origin) != _package(path):
                for alias in node.names:
                    if _is_private(alias.name):
                        yield f"{path.relative_to(PACKAGE)}: import of {node.module}.{alias.name}"


def _private_attributes(path: Path) -> Iterator[str]:
    """Private names that this package does not define, used on anything but ``self``."""
    own = _private_names()[_package(path)]
    for node in _nodes(path):
        match node:
            case ast.Attribute(of, name) if not _is_self(of):
                pass
            case ast.Call(ast.Name("getattr" | "setattr"), [_, ast.Constant(name), *_]):
                pass
            case _:
                continue
        if _is_private(str(name)) and name not in own:
            yield f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}"


def _private_inheritance() -> Iterator[str]:
    """Private names that a class overrides or uses of an ancestor in another package."""
    classes = _classes()
    for item in classes.values():
        family = list(_ancestors(item, classes))
        own = {name for a in (item, *family) if a.package == item.package for name in a.defines}
        for ancestor in (a for a in family if a.package != item.package):
            yield from (
                f"{item.place}: {name} of {ancestor.place}"
                for name in ancestor.defines & (item.defines | (item.uses - own))
            )


def _ancestors(one: _Class, classes: dict[str, _Class]) -> Iterator[_Class]:
    for name in one.bases:
        if name in classes:
            yield classes[name]
            yield from _ancestors(classes[name], classes)


def _classes() -> dict[str, _Class]:
    """Our classes by their dotted names, also by those of packages that pass them on."""
    classes: dict[str, _Class] = {}
    aliases = {name: _imported_names(path) for name, path in MODULES.items()}

    def whole(module: str, name: str) -> str:
        while (origin := aliases.get(module, {}).get(name)) is not None:
            module, _, name = origin.rpartition(".")
        return f"{module}.{name}"

    for module, path in MODULES.items():
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                bases = [
                    base.value if isinstance(base, ast.Subscript) else base for base in node.bases
                ]
                names = [ast.unparse(base).rpartition(".") for base in bases]
                classes[f"{module}.{node.name}"] = _Class(
                    _package(path),
                    f"{path.relative_to(PACKAGE)}:{node.name}",
                    [
                        whole(aliases[module].get(on, module) if on else module, name)
                        for on, _, name in names
                    ],
                    {name for name in _defined(ast.walk(node)) if _is_private(name)},
                    {
                        inner.attr
                        for inner in ast.walk(node)
                        if isinstance(inner, ast.Attribute)
                        and _is_private(inner.attr)
                        and _is_self(inner.value)
                    },
                )
    return classes


def _imported_names(path: Path) -> dict[str, str]:
    """Name in a module → the dotted name that it was imported from."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in _nodes(path)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names of all functions, classes, variables, fields and own attributes."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Assign):
            match node.targets[0]:
                case ast.Name("__slots__"):
                    yield from (
                        str(slot.value) for slot in ast.walk(node) if isinstance(slot, ast.Constant)
                    )


def test_every_module_has_a_docstring() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if path.read_text().strip() and not ast.get_docstring(_parsed(path))
    ]
    assert not without
