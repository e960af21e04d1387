"""Java's classes as the JVM has them in memory, kept for the next report (class data sharing).

A Spark that starts loads and checks some 16,000 classes, a fifth of the time of a report with
little to do. The first report has its JVM write them into an archive when it ends, beside whatever
comes next; the following ones map it. What an archive is good for is in its name, and the JVM
checks Java and class path once more: an archive that does not fit is passed over, never an error.

Mapped into a JVM an archive is code, so only what this user wrote, in a folder that nobody else can
write to, is used. Of several first reports at once one records: it takes the archive's name while
it has the folder's lock. The JVM writes the head last, so one that is killed leaves nothing that is
taken for whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

OFF = "off"
"""Given in place of a folder: neither use an archive nor make one."""
MAGIC = bytes.fromhex("a8ab0bf0")
"""The first bytes of a whole archive; the JVM writes them when all else is written."""
KEPT = 3
"""Archives of other versions and class paths that are kept beside the one in use; 200 MB each."""
RECORDING_S = 600.0
"""After so many seconds a file without these bytes is not waited for any longer."""
ROOM_BYTES = 1 << 30
"""Nothing is recorded if the disk has less room than this."""
_RECORD, _USE = "-XX:ArchiveClassesAtExit=", "-XX:SharedArchiveFile="
LOCK = "lock"
"""The file that is locked while somebody decides to record; it stays."""
ENVIRONMENT = ("SPARK_HOME", "SPARK_DIST_CLASSPATH", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
CONF_FOLDERS = ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR")
"""Folders on the class path, with which the JVM keeps no classes."""


def default_folder() -> Path:
    """The folder for caches of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tickwheel" / "java"


def options(place: str | None) -> list[str]:
    """What the JVM is told: use an archive, or record one. Nothing when neither is possible.

    ``place`` is a folder, ``OFF``, or None for the default.
    """
    key = _key()
    if place == OFF or key is None or any(map(os.environ.get, CONF_FOLDERS)):
        return []
    try:
        folder = default_folder() if place is None else Path(place)
        # An option of the JVM is cut at blanks.
        if not _is_ours_alone(folder) or any(mark in str(folder) for mark in " \t\"'\\"):
            return []
        found = _using(folder, key)
        if found is not None:
            return found
        with _alone(folder):
            found = _using(folder, key)  # perhaps somebody was quicker
            return _recording(folder, key) if found is None else found
    except OSError:
        return []


def _using(folder: Path, key: str) -> list[str] | None:
    """Options for an archive that exists; none while somebody records it; None without one."""
    for path in sorted(folder.glob(f"{key}-*.jsa"), key=_written_s, reverse=True):
        if _is_whole(path):
            os.utime(path)
            return [f"{_USE}{path}"]
        if time.time() - _written_s(path) < RECORDING_S:
            return []
    return None


def _recording(folder: Path, key: str) -> list[str]:
    """Take a name, which tells others that somebody records; the JVM replaces the empty file."""
    _sweep(folder)
    if shutil.disk_usage(folder).free < ROOM_BYTES:
        return []
    path = folder.resolve() / f"{key}-{os.getpid()}-{time.time_ns()}.jsa"
    path.touch(mode=0o600, exist_ok=False)
    return [f"{_RECORD}{path}"]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def records(found: list[str]) -> bool:
    """Whether a JVM with these options writes an archive when it ends."""
    return any(option.startswith(_RECORD) for option in found)


def give_up(found: list[str]) -> None:
    """The JVM with these options was ended before it could write: the next report may record."""
    for option in found:
        if option.startswith(_RECORD):
            Path(option.removeprefix(_RECORD)).unlink(missing_ok=True)


def _key() -> str | None:
    """A key for the Java, the Spark and the class path; None: one of them cannot be kept."""
    java, spark = _java(), find_spec("pyspark")
    if java is None or spark is None or spark.origin is None:
        return None
    home = Path(os.environ.get("SPARK_HOME") or Path(spark.origin).parent)
    if (home / "conf").exists():
        return None
    digest = hashlib.sha256()
    try:
        digest.update(
            str(java).encode() + _stats(java, *sorted(java.parent.parent.glob("release")))
        )
        digest.update(f"{version('pyspark')} {home}".encode())
        digest.update(_stats(*sorted((home / "jars").iterdir())))
    except (OSError, PackageNotFoundError):
        return None
    digest.update(repr([os.environ.get(name) for name in ENVIRONMENT]).encode())
    return digest.hexdigest()[:24]


def _java() -> Path | None:
    """The Java program that Spark's scripts start."""
    home = os.environ.get("JAVA_HOME")
    found = Path(home) / "bin" / "java" if home else shutil.which("java")
    return None if found is None else Path(found).resolve()


def _stats(*paths: Path) -> bytes:
    found = ((path.name, path.stat()) for path in paths)
    return repr([(name, at.st_size, at.st_mtime_ns) for name, at in found]).encode()


def _is_ours_alone(folder: Path) -> bool:
    """Whether the folder, made if needed, is ours alone: others could put code into our JVM."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _is_ours(folder.stat()) and os.access(folder, os.W_OK | os.X_OK)


def _is_ours(at: os.stat_result) -> bool:
    return at.st_uid == os.geteuid() and not at.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_whole(path: Path) -> bool:
    at = path.lstat()
    if not stat.S_ISREG(at.st_mode) or not _is_ours(at):
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _written_s(path: Path) -> float:
    return path.lstat().st_mtime


def _sweep(folder: Path) -> None:
    """Remove files that never became whole, and archives that others followed."""
    old = sorted(_archives(folder), key=_written_s, reverse=True)
    for path in [path for path in old if not _is_whole(path)] + old[KEPT:]:
        if time.time() - _written_s(path) >= RECORDING_S:
            path.unlink(missing_ok=True)


def _archives(folder: Path) -> Iterator[Path]:
    for path in folder.glob("*.jsa"):
        with contextlib.suppress(FileNotFoundError):
            path.lstat()
            yield path
