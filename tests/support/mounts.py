"""Small file systems, for tests of a full disk."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path


def mount(folder: Path, size_bytes: int) -> bool:
    """Mount an empty file system in memory. Return whether this is allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def may_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        mounted = mount(Path(folder), 1 << 20)
        if mounted:
            subprocess.run(["umount", folder], check=True)
        return mounted
