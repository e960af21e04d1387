"""Starting Spark, and saying clearly what is missing when it cannot start.

On one machine the settings below make Spark quick and quiet. Under ``spark-submit`` whatever
the cluster's administrator set wins: only what the job's correctness needs is set there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tickwheel.reports import classes
from tickwheel.reports import manifest as manifests
from tickwheel.reports.local import LocalFiles, is_local
from tickwheel.reports.segments import listed, new
from tickwheel.reports.settings import ReportError, ReportSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").exists():
        return None
    return None if shutil.which("java") else JAVA_HELP


@contextlib.contextmanager
def started(
    master: str | None,
    *,
    memory: str = MEMORY,
    quiet: bool = False,
    little: bool = False,
    class_cache: str | None = classes.OFF,
) -> Iterator[SparkSession]:
    """A session that ends with the block. ``master`` None: what spark-submit says, else local.

    ``quiet`` keeps the JVM's chatter away; ``little`` says that there is not much to do;
    ``class_cache``: see :func:`classes.options`.
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
    if (master or "").startswith("local"):
        cores = _cores(str(master))
        # Options are for a JVM that is yet to start.
        kept = classes.options(class_cache) if SparkContext._gateway is None else []
        java = [QUICK_JAVA if little else JAVA, *kept]
        wanted |= LOCAL | {
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
    if (master or "").startswith("local"):
        spare_programs(spark)
    done = False
    try:
        yield spark
        done = True
    finally:
        gateway: Any = SparkContext._gateway
        spark.stop()
        # What a report that failed has loaded is no sample of what the next one needs.
        if not done and classes.records(kept):
            gateway.proc.kill()
            classes.give_up(kept)


def little_to_do(settings: ReportSettings) -> bool:
    """Whether a run has little to do, guessed from local files; False where that is unknown."""
    there = LocalFiles()
    if not is_local(settings.history, settings.out):
        return False
    try:
        held = manifests.newest(there, settings.table)
        news = new(listed(there, settings), held)
    except (OSError, ReportError):
        return False
    return sum(segment.bytes for segment in news) < LITTLE_BYTES and held.rows < LITTLE_ROWS


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
