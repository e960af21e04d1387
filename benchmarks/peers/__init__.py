"""Job queues in PostgreSQL as peers. Only ``--peers all`` asks for them: they are installed into a
folder of their own, with npm and with pip.

Each has a load process with the jobs ``bulk``, ``burst``, ``produce`` and ``consume``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NODE_PACKAGES = {
    "graphile": "graphile-worker@0.18.0",
    "pgboss": "pg-boss@12.38.0",
    "bullmq": "bullmq@6.7.0",
}
"""The package of each queue, by the name that ``node.cjs`` gives it."""
_DRIVER = "pg@8.23.1"
PROCRASTINATE = "procrastinate==3.10.0"
_REQUIREMENTS = (PROCRASTINATE, "psycopg[binary]==3.3.9", "msgpack==1.2.4", "uvloop==0.23.0")
"""msgpack is for the bodies, which are those of the other load processes."""
_PROJECT = Path(__file__).parents[2]
_FOLDER = _PROJECT / ".cache" / "bench-peers"
_SCRIPT = Path(__file__).parent / "node.cjs"
_INSTALL_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Queue:
    """An installed queue. ``command`` starts its load process, in ``folder``."""

    key: str
    name: str
    command: tuple[str, ...]
    folder: Path

    @property
    def is_batched(self) -> bool:
        """Whether its worker fetches and finishes many jobs per statement."""
        return self.key in ("graphile", "pgboss")


def set_up_queues(folder: Path = _FOLDER) -> list[Queue | str]:
    """Install the queues that are missing. Return each, or the reason why it is not there."""
    return [*set_up_node_queues(folder / "node"), set_up_procrastinate(folder / "procrastinate")]


def set_up_node_queues(folder: Path) -> list[Queue | str]:
    """Install those of npm, if need be. Return them, or the reason why they are not there."""
    names = {key: package.replace("@", " ") for key, package in NODE_PACKAGES.items()}
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return [f"no {', '.join(names.values())}: Node.js with npm is not installed"]
    packages = [*NODE_PACKAGES.values(), _DRIVER]
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
    error = _install(folder, packages, [command])
    if error is not None:
        return [f"no {', '.join(names.values())}: {error}"]
    return [Queue(key, name, (node, str(_SCRIPT), key), folder) for key, name in names.items()]


def set_up_procrastinate(folder: Path) -> Queue | str:
    """Install procrastinate, if need be. Return it, or the reason why it is not there."""
    name = PROCRASTINATE.replace("==", " ")
    python = folder / "bin" / "python"
    make = [sys.executable, "-m", "venv", "--clear", str(folder)]
    fill = [str(python), "-m", "pip", "install", "--quiet", *_REQUIREMENTS]
    error = _install(folder, _REQUIREMENTS, [make, fill])
    if error is not None:
        return f"no {name}: {error}"
    command = (str(python), "-m", "benchmarks.peers.procrastinate_load")
    return Queue("procrastinate", name, command, _PROJECT)


def _install(
    folder: Path, packages: Sequence[str], commands: Sequence[Sequence[str]]
) -> str | None:
    """Run the commands, unless the folder's list says that it has the packages. Return the error,
    if any."""
    wanted, listed = "\n".join(packages), folder / "packages.txt"
    if listed.exists() and listed.read_text() == wanted:
        return None
    print(f"installing {', '.join(packages)} into {folder} …", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    for command in commands:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_INSTALL_TIMEOUT_S,
            cwd=folder,
        )
        if done.returncode != 0:
            return f"{Path(command[0]).name}: {done.stderr[-300:]}"
    listed.write_text(wanted)
    return None
