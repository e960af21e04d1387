"""Starting Spark, and saying clearly what is missing when it cannot start.

On one machine the settings below make Spark quick and quiet. Under ``spark-submit`` whatever
the cluster's administrator set wins: only what the job's correctness needs is set there.

Java's classes are kept as the JVM has them in memory for the next report (class data sharing).

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
from tickwheel.reports.state import is_local, news

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OFF = "off"
"""Given in place of a folder: neither use an archive nor make one."""
MAGIC = bytes.fromhex("a8ab0bf0")
"""The first bytes of a whole archive; the JVM writes them when all else is written."""
ARCHIVES_KEPT = 3
"""Archives of other versions and class paths that are kept beside the one in use; 200 MB each."""
RECORDING_S = 600.0
"""After so many seconds a file without these bytes is not waited for any longer."""
ROOM_BYTES = 1 << 30
"""Nothing is recorded if the disk has less room than this."""
_RECORD, _USE = "-XX:ArchiveClassesAtExit=", "-XX:SharedArchiveFile="
CLASS_LOCK = "lock"
"""The file that is locked while somebody decides to record; it stays."""
ENVIRONMENT = ("SPARK_HOME", "SPARK_DIST_CLASSPATH", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
CONF_FOLDERS = ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR")
"""Folders on the class path, with which the JVM keeps no classes."""


def default_folder() -> Path:
    """The folder for caches of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tickwheel" / "java"


def class_options(place: str | None) -> list[str]:
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
    descriptor = os.open(folder / CLASS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def recorded(options: list[str]) -> Path | None:
    """The archive that a JVM with these options writes when it ends; None: it writes none."""
    found = (option.removeprefix(_RECORD) for option in options if option.startswith(_RECORD))
    return next(map(Path, found), None)


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
    of_home = Path(home) / "bin" / "java" if home else None
    found = of_home if of_home is not None and of_home.exists() else shutil.which("java")
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
    for path in [path for path in old if not _is_whole(path)] + old[ARCHIVES_KEPT:]:
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
    # Dates of the table are UTC whatever the machine's zone; reports convert on their own.
    "spark.sql.session.timeZone": "UTC",
    # A topic called 2024 or 1e5 is a text.
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
    # Listing by a Spark job pays with thousands of remote folders only.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    # Where in Python each expression was made: a debugging aid that doubles the time to make it.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Percentiles by the hour have many groups; sorting them first costs more than the memory.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "100000",
}
JAVA = "-XX:+UseParallelGC"
QUICK_JAVA = (
    f"{JAVA} -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:-DontCompileHugeMethods"
)
"""For runs with little to load. Most of their time is Spark's own code, each part of it run a few
times only: compiling it well takes twice as long as it then runs (measured: 57 → 30 s of CPU).
Widest plans become methods of over 8,000 bytes, which the JVM compiles only when told to."""
LITTLE_BYTES, LITTLE_ROWS = 32 << 20, 5_000_000
"""Bytes of new history, and events in the table, up to which there is little to do; with more of
either the better compiler earns its time back."""


def missing_part() -> str | None:
    """What has to be installed first; None: nothing."""
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
    """A session that ends with the block. ``master`` None: what spark-submit says, else local.

    ``quiet`` keeps the JVM's chatter away; ``little`` says that there is not much to do;
    ``class_cache``: see :func:`class_options`.
    """
    missing = missing_part()
    if missing is not None:
        raise ReportError(missing)
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    from tickwheel.reports.files import spare_programs

    conf = SparkConf()
    wanted, kept = dict(NEEDED), list[str]()
    if master is None and not conf.contains("spark.master"):
        master = "local[*]"
    is_on_one_machine = (master or "").startswith("local")
    if is_on_one_machine:
        cores = _cores(str(master))
        # Options are for a JVM that is yet to start.
        kept = class_options(class_cache) if SparkContext._gateway is None else []
        java = [QUICK_JAVA if little else JAVA, *kept]
        wanted |= LOCAL | {
            # Hadoop sets modes itself, by this and not by the umask of its process.
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
        spare_programs(spark)
    done = False
    try:
        yield spark
        done = True
    finally:
        gateway: Any = SparkContext._gateway
        spark.stop()
        # What a report that failed has loaded is no sample of what the next one needs.
        if not done and (archive := recorded(kept)) is not None:
            gateway.proc.kill()
            archive.unlink(missing_ok=True)  # the next one may record


def little_to_do(settings: ReportSettings) -> bool:
    """Whether a run has little to do, guessed from local files; False where that is unknown."""
    if not is_local(*settings.history, settings.out):
        return False
    try:
        held, new = news(settings)
    except (OSError, ReportError):
        return False
    return sum(segment.bytes for segment in new) < LITTLE_BYTES and held.rows < LITTLE_ROWS


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _cores(master: str) -> int:
    inside = master.partition("[")[2].partition("]")[0].partition(",")[0]
    return int(inside) if inside.isdecimal() else (os.cpu_count() or 1)


@contextlib.contextmanager
def _chatter_aside(quiet: bool) -> Iterator[Path | None]:
    """Keep the JVM's output, which belongs to no user, in a file: the JVM keeps stdout and stderr
    as it was started with them, and a reader of a report must not wait for its end."""
    if not quiet:
        yield None
        return
    descriptor, name = tempfile.mkstemp(prefix="tickwheel-spark-", suffix=".log")
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        for number, former in zip((1, 2), kept, strict=True):
            os.dup2(former, number)
            os.close(former)
        # The JVM holds it open; the name is not needed any more.
        Path(name).unlink(missing_ok=True)


def _reason(error: Exception, log: Path | None) -> str:
    """The last words of the JVM, without its stack; else the exception."""
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
