"""Peers that only ``--peers all`` asks for: each is installed into a folder of its own.

graphile-worker: a queue in PostgreSQL, for Node.js. Its load process is ``graphile.cjs``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

GRAPHILE_VERSION = "0.18.0"
_FOLDER = Path(__file__).parents[2] / ".cache" / "bench-peers" / "graphile"
_SCRIPT = Path(__file__).parent / "graphile.cjs"
_INSTALL_TIMEOUT_S = 300.0


class Graphile:
    """An installed graphile-worker. ``command`` starts a load process, in ``folder``."""

    name = f"graphile-worker {GRAPHILE_VERSION}"

    def __init__(self, folder: Path, node: str) -> None:
        self.folder = folder
        self.command = (node, str(_SCRIPT))


def set_up_graphile(folder: Path = _FOLDER) -> Graphile | str:
    """Installed, if need be with npm; or why it is not there."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return f"no {Graphile.name}: Node.js with npm is not installed"
    if not _is_installed(folder):
        print(f"installing {Graphile.name} into {folder} …", file=sys.stderr, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        wanted = f"graphile-worker@{GRAPHILE_VERSION}"
        done = subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), wanted],
            capture_output=True,
            text=True,
            check=False,
            timeout=_INSTALL_TIMEOUT_S,
            cwd=folder,
        )
        if not _is_installed(folder):
            return f"no {Graphile.name}: npm says {done.stderr[-300:]}"
    return Graphile(folder, node)


def _is_installed(folder: Path) -> bool:
    package = folder / "node_modules" / "graphile-worker" / "package.json"
    return package.exists() and f'"version": "{GRAPHILE_VERSION}"' in package.read_text()
