"""The rules of ARCHITECTURE.md that a machine can hold: who imports whom, and that nobody does in
a circle; how long functions are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


def _modules(part: str) -> Iterator[Path]:
    found = PACKAGE / part
    yield from sorted(found.rglob("*.py")) if found.is_dir() else [found.with_suffix(".py")]


def _imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names that ``path`` imports; a name taken from ``tickwheel`` itself counts whole."""
    tree = _parsed(path)
    nodes = ast.walk(tree) if lazy else _at_import(tree.body)
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
    for node in ast.walk(_parsed(path)):
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
    found = subprocess.run(
        [sys.executable, "-c", lint, "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr


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
        if path.name not in {"branches.py", "daemon.py", "past.py", "fold.py", "restore.py"}
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
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}"
        for part in ("server", "history")
        for path in _modules(part)
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in wall
    ]
    assert not wrong


def test_only_ownership_reads_owed() -> None:
    """``state`` keeps what ``ownership`` decides there; everybody else asks."""
    names = {
        path.name
        for part in ("engine", "server", "history")
        for path in _modules(part)
        for node in ast.walk(_parsed(path))
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
    "": 4_650, "api": 5_300, "cli": 8_200, "client": 13_100, "contrib": 1_200, "demo": 1_050,
    "engine": 12_350, "history": 6_150, "model": 3_800, "outbound": 2_350, "persistence": 11_400,
    "reports": 4_100, "server": 7_750, "server/http": 5_600, "server/metrics": 1_350,
    "server/shard": 12_400, "server/tcp": 1_650, "testing": 800, "wheel": 1_350,
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


TESTS_LINES_MAX = 131_900
"""Lines of all test code. A commit that raises it says why; one that removes some lowers it."""


def test_the_tests_keep_their_budget_of_lines() -> None:
    tests = ROOT / "tests"
    lines = sum(len(path.read_text().splitlines()) for path in tests.rglob("*.py"))
    assert lines <= TESTS_LINES_MAX, "test on a lower level, parametrise, or say why it needs more"
    assert lines >= TESTS_LINES_MAX * 0.95, "lower the budget to what the tests have"


CLIENTS_OF_THE_CLIENT = ("outbound", "contrib", "cli", "demo", "otel.py")
"""Packages and modules that use the client as any program does."""
PRIVATE_OF_OTHERS = {
    "os._exit", "current_app._get_current_object", "connection._create_reader_task",
    "self._reader", "self._client._flush_acks",
}  # fmt: skip
"""Names of libraries without a public one (``_reader``: aiokafka's connections), and the acks that
a runner of ``outbound`` waits for."""


def test_users_of_the_client_use_public_names() -> None:
    found = set[str]()
    for top in CLIENTS_OF_THE_CLIENT:
        paths = [PACKAGE / top] if top.endswith(".py") else (PACKAGE / top).rglob("*.py")
        own = {path: _parsed(path) for path in paths}
        names = {name for module in own.values() for name in _defined(module)}
        for path, module in own.items():
            found |= {
                f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}"
                for node in ast.walk(module)
                if isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
                and node.attr not in names | {"_replace", "_asdict", "_fields", "_make"}
                and ast.unparse(node) not in PRIVATE_OF_OTHERS
            }
    assert not found


def _defined(module: ast.AST) -> Iterator[str]:
    """The names of all functions, fields and attributes that a module defines."""
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_every_module_has_a_docstring() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if path.read_text().strip() and not ast.get_docstring(_parsed(path))
    ]
    assert not without
