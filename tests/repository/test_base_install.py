"""The base install is the client and msgpack: proved where nothing else can be imported."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import msgpack
import pytest

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
        "assert Client and Task\n"
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


def test_the_worker_and_once_need_no_more_and_come_with_their_first_use(
    base_install: Path,
) -> None:
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


def test_nothing_but_msgpack_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [text.split(">")[0] for text in project["dependencies"]] == ["msgpack"]
    assert set(project["optional-dependencies"]) == {
        "server", "cli", "redis", "asyncio-redis", "reports", "all",
    }  # fmt: skip


def test_files_that_are_no_python_are_in_the_built_package() -> None:
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


def test_the_command_without_its_extra_says_so_in_one_line(base_install: Path) -> None:
    done = _run(base_install, "from tickwheel.cli import main; sys.exit(main())")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "tickwheel: the command line needs typer and rich: pip install 'tickwheel[cli]'"
    ]
