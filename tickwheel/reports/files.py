"""Files wherever Spark's file systems reach: local paths, ``hdfs://``, ``s3a://``.

All of a report's own bookkeeping goes through here, so that the job runs unchanged on a
cluster. Uses Hadoop's FileSystem inside Spark's JVM; no local-only call. What Spark and its file
systems raise becomes one line for people here, too.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from tickwheel.reports.state import ASIDE, Found

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


FAILED = (Py4JError, PySparkException)
"""What a Spark job, or a call into its JVM, raises."""
CAUSES_MAX = 20
_REASON_MAX = 400
_MEMORY = "OutOfMemoryError"
_NO_FILE = "java.io.FileNotFoundException"


def in_short(error: BaseException) -> str:
    """The innermost cause of an error, without the stack that led to it."""
    causes = _causes(error)
    text = causes[-1] if causes else str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), repr(error))
    if any(_MEMORY in cause for cause in causes) or _MEMORY in str(error):
        line += " (give Spark more with --memory, or load less at a time with --batch-mb)"
    return line[:_REASON_MAX]


def is_no_file(error: Py4JJavaError) -> bool:
    """Whether the error says that a file was not there."""
    return str(error.java_exception.getClass().getName()) == _NO_FILE


def _causes(error: BaseException) -> list[str]:
    """The causes of a JVM error from the outside in; empty for other errors."""
    found: Any = None
    if isinstance(error, Py4JJavaError):
        found = error.java_exception
    elif isinstance(error, PySparkException):
        # pyspark keeps the JVM's exception to itself.
        found = getattr(error, "_origin", None)
    causes: list[str] = []
    while found is not None and len(causes) < CAUSES_MAX:
        causes.append(str(found.toString()))
        found = found.getCause()
    return causes


_WITHOUT_PROGRAMS = """
package tickwheel;

public class LocalFiles extends org.apache.hadoop.fs.RawLocalFileSystem {
    public void setPermission(org.apache.hadoop.fs.Path path,
            org.apache.hadoop.fs.permission.FsPermission wanted) throws java.io.IOException {
        if (wanted.getStickyBit()) {
            super.setPermission(path, wanted);
            return;
        }
        java.nio.file.Files.setPosixFilePermissions(pathToFile(path).toPath(),
            java.nio.file.attribute.PosixFilePermissions.fromString(wanted.toString()));
    }
}
"""


def spare_programs(spark: SparkSession) -> None:
    """Have Hadoop set the mode of each new local file and folder by a call.

    Without its native library, which pyspark does not bring, it starts ``chmod`` for each: 420
    times a report. Hadoop's own class with that one method replaced; Janino, with which Spark
    compiles every query, compiles it here. Where that fails all stays as it was.
    """
    jvm: Any = spark.sparkContext._jvm
    try:
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
        compiler.cook(_WITHOUT_PROGRAMS)
        conf = jvm.org.apache.hadoop.conf.Configuration(
            spark.sparkContext._jsc.hadoopConfiguration()
        )
        conf.setClassLoader(compiler.getClassLoader())
        conf.set("fs.file.impl", "tickwheel.LocalFiles")
        # Hadoop keeps one object a scheme and user: who asks first decides for all.
        local = jvm.java.net.URI("file:///")
        jvm.org.apache.hadoop.fs.FileSystem.get(local, conf).close()
        jvm.org.apache.hadoop.fs.FileSystem.get(local, conf)
    except Py4JError:
        return


class Files:
    """Small files and folders. Paths are text; a missing file reads as None, empty or False."""

    def __init__(self, spark: SparkSession) -> None:
        # Hadoop's classes are reached through the gateway that pyspark itself uses.
        self._jvm: Any = spark.sparkContext._jvm
        self._conf: Any = spark.sparkContext._jsc.hadoopConfiguration()

    def _at(self, path: str) -> tuple[Any, Any]:
        hadoop = self._jvm.org.apache.hadoop.fs.Path(path)
        system = hadoop.getFileSystem(self._conf)
        # Local folders would fill with .crc files that nobody asked for.
        system.setWriteChecksum(False)
        return system, hadoop

    def matching(self, folder: str, pattern: str) -> list[Found]:
        """The files in a folder that match a pattern."""
        system, path = self._at(f"{folder}/{pattern}")
        statuses = system.globStatus(path) or ()
        return [
            Found(status.getPath().toString(), int(status.getLen()))
            for status in statuses
            if status.isFile()
        ]

    def names(self, folder: str) -> list[str]:
        """The names directly in ``folder``, sorted; empty: there is no such folder."""
        system, path = self._at(folder)
        if not system.exists(path):
            return []
        return sorted(status.getPath().getName() for status in system.listStatus(path))

    def exists(self, path: str) -> bool:
        system, hadoop = self._at(path)
        return bool(system.exists(hadoop))

    def read(self, path: str) -> str | None:
        system, hadoop = self._at(path)
        if not system.exists(hadoop):
            return None
        try:
            stream = system.open(hadoop)
        except Py4JJavaError as error:
            if is_no_file(error):
                return None  # it has gone since
            raise
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode(
                "utf-8", "replace"
            )
        finally:
            stream.close()

    def write(self, path: str, text: str) -> None:
        """Whole or not at all, as far as the file system can: written aside and renamed.

        One writer at a time: what it writes aside is overwritten by the next one.
        """
        system, hadoop = self._at(path)
        aside = self._aside(system, hadoop, text, ASIDE)
        if system.getUri().getScheme() == "file":
            # Without a moment at which there is neither the old nor the new one.
            os.replace(aside.toUri().getPath(), hadoop.toUri().getPath())
            return
        system.delete(hadoop, False)
        if not system.rename(aside, hadoop):
            raise OSError(f"{path}: the file system refused to rename it into place")

    def create(self, path: str, text: str) -> bool:
        """Whole, and False when it is there already. Of two at the same moment one gets True.

        (Where the file system can guarantee that: local ones by a link, HDFS by a rename that
        replaces nothing. An object store cannot.)
        """
        system, hadoop = self._at(path)
        if system.exists(hadoop):
            return False
        aside = self._aside(system, hadoop, text, f"{ASIDE}{uuid.uuid4().hex}-")
        try:
            if system.getUri().getScheme() == "file":
                return _linked(aside.toUri().getPath(), hadoop.toUri().getPath())
            return bool(system.rename(aside, hadoop))
        finally:
            system.delete(aside, False)

    def _aside(self, system: Any, hadoop: Any, text: str, prefix: str) -> Any:
        """A file beside ``hadoop`` that holds ``text``."""
        name = f"{prefix}{hadoop.getName()}"
        aside = self._jvm.org.apache.hadoop.fs.Path(hadoop.getParent(), name)
        stream = system.create(aside, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        return aside

    def delete(self, path: str) -> None:
        system, hadoop = self._at(path)
        system.delete(hadoop, True)

    def age_s(self, path: str, now_ms: int) -> float:
        """Seconds since the file was last written."""
        system, hadoop = self._at(path)
        return (now_ms - int(system.getFileStatus(hadoop).getModificationTime())) / 1000


def _linked(aside: str, path: str) -> bool:
    """Give a local file its name; a rename would replace one that was just made."""
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError:
        # No hard links here (FAT, some network shares): the moment between has to be risked.
        if os.path.exists(path):  # text as Hadoop has it, as in the lines around
            return False
        os.rename(aside, path)
    return True
