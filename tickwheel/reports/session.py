"""Starts Spark, with clear errors if something that it needs is missing.

On one machine the settings below make Spark fast and quiet. Under ``spark-submit`` the settings of
the cluster's administrator take precedence, except those that the job needs to be correct.

Java's class data sharing speeds up later reports. At a start, Spark loads and checks some 16,000
classes, a fifth of the time of a small report. The JVM of the first report writes them into an
archive when it ends, and later reports map the archive. The archive's name identifies the Java and
Spark versions and the class path. The JVM checks these again, and ignores an archive that does not
match.

An archive is code, so only archives that this user wrote, in a folder that nobody else can write
to, are used. If several first reports run concurrently, only one records an archive: it reserves
the archive's name under the folder's lock. The JVM writes the header last, so a killed JVM leaves
no valid archive.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tickwheel.reports import ReportError, ReportSettings
from tickwheel.reports.state import find_new_segments, is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OFF = "off"
"""Value that replaces a folder: neither use nor record an archive."""
MAGIC = bytes.fromhex("a8ab0bf0")
"""The first bytes of a complete archive, which the JVM writes last."""
ARCHIVES_KEPT = 3
"""Number of archives of other versions and class paths that are kept, 200 MB each."""
RECORDING_S = 600.0
"""Seconds after which a file without ``MAGIC`` counts as abandoned."""
ROOM_BYTES = 1 << 30
"""Minimum free bytes on the disk for recording an archive."""
_RECORD, _USE = "-XX:ArchiveClassesAtExit=", "-XX:SharedArchiveFile="
CLASS_LOCK = "lock"
"""The file that a report locks while it decides whether it records. It is never removed."""
ENVIRONMENT = ("SPARK_HOME", "SPARK_DIST_CLASSPATH", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
CONF_FOLDERS = ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR")
"""Variables that put folders on the class path, with which the JVM supports no archive."""


def default_folder() -> Path:
    """Return this user's folder for archives."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tickwheel" / "java"


def class_options(place: str | None) -> list[str]:
    """Return JVM options that use or record an archive, or nothing if neither is possible.
    ``place`` is a folder, ``OFF``, or None for the default."""
    key = _key()
    if place == OFF or key is None or any(map(os.environ.get, CONF_FOLDERS)):
        return []
    try:
        folder = default_folder() if place is None else Path(place)
        # Spark splits JVM options at blanks.
        if not _is_ours_alone(folder) or any(mark in str(folder) for mark in " \t\"'\\"):
            return []
        options = _using(folder, key)
        if options is not None:
            return options
        with _alone(folder):
            options = _using(folder, key)  # another report may have been faster
            return _recording(folder, key) if options is None else options
    except OSError:
        return []


def _using(folder: Path, key: str) -> list[str] | None:
    """Return options for an existing archive, [] while another report records it, or None."""
    for path in sorted(folder.glob(f"{key}-*.jsa"), key=_written_s, reverse=True):
        if _is_whole(path):
            os.utime(path)
            return [f"{_USE}{path}"]
        if time.time() - _written_s(path) < RECORDING_S:
            return []
    return None


def _recording(folder: Path, key: str) -> list[str]:
    """Create an empty file, which shows that this report records the archive. The JVM replaces
    it."""
    _sweep(folder)
    if shutil.disk_usage(folder).free < ROOM_BYTES:
        return []
    path = folder.resolve() / f"{key}-{os.getpid()}-{time.time_ns()}.jsa"
    path.touch(mode=0o600, exist_ok=False)
    return [f"{_RECORD}{path}"]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder / CLASS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def recorded(options: list[str]) -> Path | None:
    """Return the archive that a JVM with these options records, or None."""
    paths = (option.removeprefix(_RECORD) for option in options if option.startswith(_RECORD))
    return next(map(Path, paths), None)


def _key() -> str | None:
    """Return a key of Java, Spark and the class path, or None if they cannot be identified."""
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
    """Return the Java program that Spark's scripts start."""
    home = os.environ.get("JAVA_HOME")
    of_home = Path(home) / "bin" / "java" if home else None
    program = of_home if of_home is not None and of_home.exists() else shutil.which("java")
    return None if program is None else Path(program).resolve()


def _stats(*paths: Path) -> bytes:
    stats = ((path.name, path.stat()) for path in paths)
    return repr([(name, at.st_size, at.st_mtime_ns) for name, at in stats]).encode()


def _is_ours_alone(folder: Path) -> bool:
    """Create the folder if necessary. Return whether only this user can write to it. Otherwise
    other users could inject code into the JVM."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _is_ours(folder.stat()) and os.access(folder, os.W_OK | os.X_OK)


def _is_ours(stats: os.stat_result) -> bool:
    return stats.st_uid == os.geteuid() and not stats.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_whole(path: Path) -> bool:
    stats = path.lstat()
    if not stat.S_ISREG(stats.st_mode) or not _is_ours(stats):
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _written_s(path: Path) -> float:
    return path.lstat().st_mtime


def _sweep(folder: Path) -> None:
    """Remove abandoned files, and the oldest archives."""
    archives = sorted(_archives(folder), key=_written_s, reverse=True)
    for path in [path for path in archives if not _is_whole(path)] + archives[ARCHIVES_KEPT:]:
        if time.time() - _written_s(path) >= RECORDING_S:
            path.unlink(missing_ok=True)


def _archives(folder: Path) -> Iterator[Path]:
    for path in folder.glob("*.jsa"):
        with contextlib.suppress(FileNotFoundError):
            path.lstat()
            yield path


# --- starting Spark ----------------------------------------------------------------------------


MEMORY = "2g"
JAVA_HELP = "reports need Java 17 or newer: on Debian, apt install openjdk-17-jre-headless"
PYSPARK_HELP = "reports need pyspark: pip install 'tickwheel[reports]'"

NEEDED = {
    # Dates of the table are UTC regardless of the machine's zone; reports convert them.
    "spark.sql.session.timeZone": "UTC",
    # A topic called 2024 or 1e5 must remain text.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
}
LOCAL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # A machine whose name does not resolve must still be able to make a report.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.files.maxPartitionBytes": str(16 << 20),
    "spark.sql.files.openCostInBytes": str(1 << 20),
    # Listing folders with a Spark job is faster only for thousands of remote folders.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    # This debugging aid records the Python line of each expression, which doubles its cost.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Percentiles by hour have many groups, and sorting them would cost more than the memory.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "100000",
}
JAVA = "-XX:+UseParallelGC"
QUICK_JAVA = (
    f"{JAVA} -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:-DontCompileHugeMethods"
)
"""JVM options for runs with little to load. Most of their time is Spark's code, which runs only a
few times: optimizing this code takes longer than it saves (measured: 57 s of CPU with, 30 s
without). The widest plans become methods of over 8,000 bytes, which the JVM compiles only with the
last option."""
LITTLE_BYTES, LITTLE_ROWS = 32 << 20, 5_000_000
"""Maximum bytes of new history, and maximum number of events in the table, of a run with little to
do. Larger runs benefit from the optimizing compiler."""


def missing_part() -> str | None:
    """Return the help for a missing installation, or None if nothing is missing."""
    if importlib.util.find_spec("pyspark") is None:
        return PYSPARK_HELP
    return JAVA_HELP if _java() is None else None


@contextlib.contextmanager
def started(
    master: str | None,
    *,
    memory: str = MEMORY,
    quiet: bool = False,
    little: bool = False,
    class_cache: str | None = OFF,
) -> Iterator[SparkSession]:
    """Start a session that ends with the block. If ``master`` is None, use that of spark-submit, or
    run locally. ``quiet``: hide the JVM's output. ``little``: the run has little to do.
    ``class_cache``: see :func:`class_options`. Raise ReportError."""
    missing = missing_part()
    if missing is not None:
        raise ReportError(missing)
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    from tickwheel.reports.files import avoid_chmod_processes

    conf = SparkConf()
    wanted, class_flags = dict(NEEDED), list[str]()
    if master is None and not conf.contains("spark.master"):
        master = "local[*]"
    is_on_one_machine = (master or "").startswith("local")
    if is_on_one_machine:
        cores = _cores(str(master))
        # Options have no effect on a running JVM.
        class_flags = class_options(class_cache) if SparkContext._gateway is None else []
        java = [QUICK_JAVA if little else JAVA, *class_flags]
        wanted |= LOCAL | {
            # Hadoop uses this value for modes, not the umask of its process.
            "spark.hadoop.fs.permissions.umask-mode": f"{_umask():03o}",
            "spark.driver.memory": memory,
            "spark.driver.extraJavaOptions": " ".join(java),
            "spark.sql.shuffle.partitions": str(2 * cores),
            "spark.default.parallelism": str(cores),
        }
    builder = SparkSession.builder.appName("tickwheel report")
    if master is not None:
        builder = builder.master(master)
    for name, value in wanted.items():
        if name in NEEDED or not conf.contains(name):
            builder = builder.config(name, value)
    with _chatter_aside(quiet) as log:
        try:
            spark = builder.getOrCreate()
        except Exception as error:
            raise ReportError(f"Spark did not start: {_reason(error, log)}") from error
    if is_on_one_machine:
        avoid_chmod_processes(spark)
    succeeded = False
    try:
        yield spark
        succeeded = True
    finally:
        gateway: Any = SparkContext._gateway
        spark.stop()
        # The classes of a failed report are not representative.
        if not succeeded and (archive := recorded(class_flags)) is not None:
            gateway.proc.kill()
            archive.unlink(missing_ok=True)  # the next report can record


def little_to_do(settings: ReportSettings) -> bool:
    """Return whether a run has little to do, judging from local files. Return False if unknown."""
    if not is_local(*settings.history, settings.out):
        return False
    try:
        manifest, segments = find_new_segments(settings)
    except (OSError, ReportError):
        return False
    return sum(segment.bytes for segment in segments) < LITTLE_BYTES and manifest.rows < LITTLE_ROWS


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _cores(master: str) -> int:
    inside = master.partition("[")[2].partition("]")[0].partition(",")[0]
    return int(inside) if inside.isdecimal() and len(inside) < 10 else (os.cpu_count() or 1)


@contextlib.contextmanager
def _chatter_aside(quiet: bool) -> Iterator[Path | None]:
    """Redirect the JVM's output into a file. The JVM inherits stdout and stderr. Otherwise a pipe
    that reads the report would stay open until the JVM ends."""
    if not quiet:
        yield None
        return
    descriptor, name = tempfile.mkstemp(prefix="tickwheel-spark-", suffix=".log")
    sys.stdout.flush()
    sys.stderr.flush()
    saved_fds = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        for number, former in zip((1, 2), saved_fds, strict=True):
            os.dup2(former, number)
            os.close(former)
        # The JVM has opened the file, and nobody needs its name any longer.
        Path(name).unlink(missing_ok=True)


def _reason(error: Exception, log: Path | None) -> str:
    """Return the last lines of the JVM's output without its stack, or the exception."""
    from py4j.protocol import Py4JJavaError

    from tickwheel.reports.files import in_short

    if isinstance(error, Py4JJavaError):
        return in_short(error)
    lines: list[str] = []
    if log is not None:
        written = map(str.strip, log.read_text(errors="replace").splitlines())
        noise = re.compile(r"$|at |\.\.\. |WARNING: |\S+ \S+ (WARN|INFO) ")
        lines = [line for line in written if not noise.match(line)]
    return " / ".join(lines[-3:]) or str(error)
