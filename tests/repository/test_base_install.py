"""The base install is the client and msgpack: proved where nothing else can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tickwheel.cli import EXTRAS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def base_install(tmp_path: Path) -> Path:
    """A folder with this package and msgpack; with ``-S`` there is no other."""
    (tmp_path / "tickwheel").symlink_to(ROOT / "tickwheel")
    (tmp_path / "msgpack").symlink_to(Path(msgpack.__file__).parent)
    return tmp_path


def _run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )


def test_the_client_imports_with_msgpack_alone(base_install: Path) -> None:
    done = _run(
        base_install,
        "from tickwheel import Client, Task\n"
        "from tickwheel.sync import Client as Blocking\n"
        "assert Client and Task and Blocking\n"
        "files = [n for n, m in sys.modules.items() if getattr(m, '__file__', None)]\n"
        "tops = {name.partition('.')[0] for name in files}\n"
        "print(*sorted(tops - sys.stdlib_module_names))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('tickwheel.')))\n",
    )
    assert done.returncode == 0, done.stderr
    tops, ours = (line.split() for line in done.stdout.splitlines())
    assert set(tops) == {"msgpack", "tickwheel"}
    heavy = ("cli", "server", "persistence", "wheel", "clock")
    assert not [name for name in ours if name.split(".")[1] in heavy]


def test_worker_and_once_are_imported_on_first_use(base_install: Path) -> None:
    done = _run(
        base_install,
        "import tickwheel\n"
        "early = [name for name in sys.modules if '.worker' in name or '.idempotence' in name]\n"
        "from tickwheel import Reject, Retry, RetryLater, Worker\n"
        "from tickwheel.client.idempotence import Once\n"
        "Worker(tickwheel.Client()), Retry.none(), Once()\n"
        "files = [n for n, m in sys.modules.items() if getattr(m, '__file__', None)]\n"
        "tops = {name.partition('.')[0] for name in files}\n"
        "print(early, *sorted(tops - sys.stdlib_module_names))\n"
        "try:\n"
        "    Once('redis://127.0.0.1')\n"
        "except tickwheel.TickwheelError as error:\n"
        "    print(error)\n",
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "[] msgpack tickwheel"
    assert "pip install 'tickwheel[redis]'" in second


def test_each_target_names_its_missing_extra(base_install: Path) -> None:
    done = _run(
        base_install,
        "import tickwheel\n"
        "from tickwheel.outbound.runner import Runner\n"
        "from tickwheel.outbound.target import target_of\n"
        "files = [n for n, m in sys.modules.items() if getattr(m, '__file__', None)]\n"
        "tops = {name.partition('.')[0] for name in files}\n"
        "print(*sorted(tops - sys.stdlib_module_names))\n"
        "for url in ('redis://a/?stream=s', 'amqp://a/?routing_key=k', 'kafka://a/?topic=t'):\n"
        "    try:\n"
        "        target_of(url)\n"
        "    except tickwheel.BadRequest as error:\n"
        "        print(error)\n",
    )
    assert done.returncode == 0, done.stderr
    first, *said = done.stdout.splitlines()
    assert first == "msgpack tickwheel"
    for line, extra in zip(said, ("redis", "amqp", "kafka"), strict=True):
        assert f"pip install 'tickwheel[{extra}]'" in line


def test_tracing_says_which_extra_it_needs(base_install: Path) -> None:
    done = _run(base_install, "import tickwheel.otel")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: tickwheel.otel needs the extra otel")
    assert "pip install 'tickwheel[otel]'" in last


def test_only_msgpack_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [text.split(">")[0] for text in project["dependencies"]] == ["msgpack"]
    assert set(project["optional-dependencies"]) == {
        "server", "http", "cli", "redis", "asyncio-redis", "postgresql", "reports", "typed",
        "zstd", "encryption", "otel", "amqp", "kafka", "push", "reload", "sqlalchemy", "all",
    }  # fmt: skip


def test_data_files_are_in_the_built_package() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    package = ROOT / "tickwheel"
    packed = {
        path
        for pattern in tools["setuptools"]["package-data"]["tickwheel"]
        for path in package.glob(pattern)
    }
    there = {path for path in package.rglob("*.*") if path.suffix not in {".py", ".pyc"}}
    assert packed == there
    assert package / "persistence/redis/lua/commit.lua" in packed


MISSING = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
def find_spec(name, package=None):
    return None if name.partition(".")[0] in {modules!r} else found(name, package)
importlib.util.find_spec = find_spec
"""
BLOCK = (
    MISSING
    + """
sys.argv = ["tickwheel", *{arguments!r}]
from tickwheel.cli import main
sys.exit(main())
"""
)
WITHOUT = {
    "any command": ("cli", ["enqueue", "t", "x"]),
    "serve": ("server", ["serve", "--store", "memory:", "--listen", "tcp://127.0.0.1:0"]),
    "check": ("server", ["check", "--store", "sqlite:///none.db"]),
    "init": ("server", ["init", "--store", "sqlite:///none.db"]),
    "reshard": ("server", ["reshard", "--store", "sqlite:///none/", "--to", "2"]),
    "demo": ("server", ["demo", "--seconds", "5"]),
    "a store in Redis": ("redis", ["serve", "--store", "redis://127.0.0.1:1/0"]),
    "a store in PostgreSQL": (
        "postgresql", ["serve", "--store", "postgresql://127.0.0.1:1/app"],
    ),
    "a demo on PostgreSQL": ("postgresql", ["demo", "--store", "postgresql://127.0.0.1:1/app"]),
    "init of PostgreSQL": ("postgresql", ["init", "--store", "postgresql://127.0.0.1:1/app"]),
    "an upgrade": ("server", ["store", "upgrade", "sqlite:///none.db"]),
    "an upgrade of PostgreSQL": (
        "postgresql", ["store", "upgrade", "postgresql://127.0.0.1:1/app"],
    ),
    "init of Redis": ("redis", ["init", "--store", "redis://127.0.0.1:1/0"]),
    "its other driver": (
        "asyncio-redis", ["serve", "--store", "redis://127.0.0.1:1/0?driver=asyncio-redis"],
    ),
    "traces": (
        "otel",
        ["serve", "--store", "memory:", "--listen", "tcp://127.0.0.1:0",
         "--set", "otlp_endpoint=http://127.0.0.1:1"],
    ),
    "an inbox in PostgreSQL": (
        "postgresql",
        ["serve", "--store", "memory:", "--inbox", "postgresql://127.0.0.1:1/app"],
    ),
    "a worker that starts anew": ("reload", ["work", "app:worker", "--reload"]),
    "report": ("reports", ["report", "--history", "history", "--out", "out"]),
}  # fmt: skip


def first_of_each_extra(cases: dict[str, tuple[str, Any]]) -> list[Any]:
    """Parameters: `make test` has the first case of each extra, `make test-full` all."""
    first = {extra: case for case, (extra, _) in reversed(cases.items())}.values()
    slow = [pytest.param(case, marks=pytest.mark.slow) for case in cases if case not in first]
    return [*first, *slow]


@pytest.mark.parametrize("case", first_of_each_extra(WITHOUT))
def test_a_missing_extra_is_reported_in_one_line(case: str, tmp_path: Path) -> None:
    extra, arguments = WITHOUT[case]
    _says_what_to_install(extra, EXTRAS[extra].modules, arguments, tmp_path)


ABSENT = {
    "lark",  # loaded with the first filter that has a condition
    "pydantic",  # comes with typer
    "tzdata",  # the system's is taken
    "uvloop",  # asyncio's own loop is taken
}


PACKAGES = sorted({*EXTRAS["server"].modules} - ABSENT)


@pytest.mark.parametrize(
    "module",
    [PACKAGES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in PACKAGES[1:])],
)
def test_each_missing_package_of_the_daemon_is_named(module: str, tmp_path: Path) -> None:
    arguments = [
        "serve", "--store", "memory:", "--listen", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0",
    ]  # fmt: skip
    _says_what_to_install("server", (module,), arguments, tmp_path)


def _says_what_to_install(
    extra: str, modules: tuple[str, ...], arguments: list[str], folder: Path
) -> None:
    code = BLOCK.format(modules=modules, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60,
        cwd=folder,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tickwheel: ")
    assert f"pip install 'tickwheel[{extra}]'" in line


TYPED = "@{made}\ndef close(n: int) -> None: ..."
VERIFY = """
import time
from tickwheel import webhooks
headers = {"webhook-id": "1", "webhook-timestamp": str(int(time.time())), "webhook-signature": "x"}
webhooks.verify("whpk_" + 43 * "A" + "=", headers, b"")
"""
INSIDE = "from tickwheel import embedded\nwith embedded({store!r}) as client: client.ping()"
WHEEL = "from tickwheel.testing import SyncTestWheel\nwith SyncTestWheel() as wheel: wheel.settle()"
PORTS = {"prometheus_client", "starlette", "uvicorn"}
TARGET = "from tickwheel.outbound.target import target_of\ntarget_of({url!r})"
CLIENT = "from tickwheel import Client, Worker, sync, task\n"
PUSH = INSIDE.format(store="memory:").replace(
    "ping()", "set_push('t', 'g', 'https://example.org'{secrets})"
)
DOORS = {
    "embedded": ("server", "from tickwheel import embedded"),
    "the class of it": ("server", "from tickwheel import Embedded"),
    "its module": ("server", "import tickwheel.inside"),
    "the test wheel": ("server", "from tickwheel.testing import TestWheel"),
    "one without an event loop": ("server", "from tickwheel.testing import SyncTestWheel"),
    "a case of unittest": ("server", "from tickwheel.testing import WheelCase"),
    "embedded in Redis": ("redis", INSIDE.format(store="redis://127.0.0.1:1/0")),
    "by the other driver": (
        "asyncio-redis",
        INSIDE.format(store="redis://127.0.0.1:1/0?driver=asyncio-redis"),
    ),
    "marks in Redis": ("redis", "from tickwheel import Once\nOnce('redis://127.0.0.1')"),
    "marks in SQL": ("sqlalchemy", "from tickwheel.contrib.sqlalchemy import SqlOnce"),
    "a typed task": ("typed", CLIENT + TYPED.format(made="task('t')")),
    "one of a worker": ("typed", CLIENT + TYPED.format(made="Worker(Client()).task('t')")),
    "zstd": ("zstd", CLIENT + "Client(compress='zstd')"),
    "zstd without an event loop": ("zstd", CLIENT + "sync.Client(compress='zstd')"),
    "keys": ("encryption", CLIENT + "Client(keys={'a': bytes(32)})"),
    "keys without an event loop": ("encryption", CLIENT + "sync.Client(keys={'a': bytes(32)})"),
    "a public key of webhooks": ("encryption", VERIFY),
    "a private key of a push": (
        "encryption", PUSH.format(secrets=", secrets=['whsk_' + 43 * 'A' + '=']"),
    ),
    "a push": ("push", PUSH.format(secrets="")),
    "spans": ("otel", "import tickwheel.otel"),
    "a target in RabbitMQ": ("amqp", TARGET.format(url="amqp://a/?routing_key=k")),
    "a target in Kafka": ("kafka", TARGET.format(url="kafka://a/?topic=t")),
    "a target in Redis": ("redis", TARGET.format(url="redis://a/?stream=s")),
}  # fmt: skip
"""What a program may do, beside commands, that an extra is needed for."""
TOLD_ELSEWHERE = {"http"}
"""By the answer to a request: tests/server/http/test_hosts.py."""


@pytest.mark.parametrize("case", first_of_each_extra(DOORS))
def test_a_missing_extra_of_an_import_is_named(case: str) -> None:
    extra, code = DOORS[case]
    _raises_what_to_install(extra, EXTRAS[extra].modules, code)


@pytest.mark.slow  # the daemon of a process imports the same packages, see above
@pytest.mark.parametrize("module", PACKAGES)
def test_each_missing_package_of_an_embedded_daemon_is_named(module: str) -> None:
    """It says so, or it can do without: the packages of ports are not needed inside."""
    for code in (INSIDE.format(store="memory:"), WHEEL):
        if module in PORTS:
            _run_without((module,), code, works=True)
        else:
            _raises_what_to_install("server", (module,), code)


def test_every_extra_has_a_test_for_its_absence() -> None:
    missed = {extra for extra, _ in (*DOORS.values(), *WITHOUT.values())}
    assert missed | TOLD_ELSEWHERE == EXTRAS.keys()


@pytest.mark.parametrize(
    "fixture", ["tickwheel", pytest.param("tickwheel_sync", marks=pytest.mark.slow)]
)
def test_a_fixture_without_its_extra_fails_in_one_line(fixture: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(f"def test_it({fixture}): ...\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    code = MISSING.format(modules=EXTRAS["server"].modules)
    code += "import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if "pip install 'tickwheel[server]'" in line]
    assert told, done.stdout
    assert all(line.startswith(("tickwheel.testing needs", "ERROR test_it.py")) for line in told)
    assert "Traceback" not in done.stdout and "import_module" not in done.stdout


def _run_without(modules: tuple[str, ...], code: str, *, works: bool) -> str:
    """What a program that lacks these modules writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", MISSING.format(modules=modules) + code],
        capture_output=True, text=True, check=False, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == (0 if works else 1), done.stdout + done.stderr
    return done.stderr


def _raises_what_to_install(extra: str, modules: tuple[str, ...], code: str) -> None:
    told = _run_without(modules, code, works=False)
    *_, last = told.splitlines()
    kind, _, text = last.partition(": ")
    assert kind.rpartition(".")[2] in ("ModuleNotFoundError", "BadRequest", "StoreUnusable"), last
    assert f"pip install 'tickwheel[{extra}]'" in text
    # One exception: its causes are not shown to a user.
    assert told.count("Traceback (most recent call last)") == 1, told


def test_the_table_of_extras_lists_every_package() -> None:
    """What ``pip install`` calls otherwise than ``import`` does is written down here."""
    imported = {"asyncio-redis": "asyncio_redis", "pydantic-settings": "pydantic_settings"}
    imported |= {"prometheus-client": "prometheus_client", "aio-pika": "aio_pika"}
    for part in ("api", "sdk", "exporter-otlp-proto-http"):
        imported[f"opentelemetry-{part}"] = "opentelemetry"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name, packages in extras.items():
        if name == "all":
            named = [item for text in packages for item in text[:-1].partition("[")[2].split(",")]
            assert sorted(named) == sorted(set(extras) - {"all", "reports"})  # pyspark: 400 MB
            continue
        for package in packages:
            plain = package.partition(";")[0].partition(">")[0].strip()
            answer = imported.get(plain, plain)
            assert any(answer in extra.modules for extra in EXTRAS.values()), package
        assert name in EXTRAS
