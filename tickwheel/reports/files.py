"""Files in all file systems that Spark supports: local paths, ``hdfs://``, ``s3a://``.

A report reads and writes its state through this module, which uses Hadoop's FileSystem in Spark's
JVM, so the same job runs on a cluster. The module also summarizes Spark's errors in one line.
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


SPARK_ERRORS = (Py4JError, PySparkException)
"""Errors of Spark jobs, and of calls into the JVM."""
CAUSES_MAX = 20
_REASON_MAX = 400
_MEMORY = "OutOfMemoryError"
_NO_FILE = "java.io.FileNotFoundException"


def in_short(error: BaseException) -> str:
    """Return the innermost cause of an error, without a stack trace."""
    causes = _causes(error)
    text = causes[-1] if causes else str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), repr(error))
    if any(_MEMORY in cause for cause in causes) or _MEMORY in str(error):
        line += " (give Spark more with --memory, or load less at a time with --batch-mb)"
    return line[:_REASON_MAX]


def is_file_not_found(error: Py4JJavaError) -> bool:
    """Return whether the error means that a file does not exist."""
    return str(error.java_exception.getClass().getName()) == _NO_FILE


def _causes(error: BaseException) -> list[str]:
    """Return the causes of a JVM error, outermost first, or [] for other errors."""
    cause: Any = None
    if isinstance(error, Py4JJavaError):
        cause = error.java_exception
    elif isinstance(error, PySparkException):
        # pyspark provides the JVM's exception only in a private attribute.
        cause = getattr(error, "_origin", None)
    causes: list[str] = []
    while cause is not None and len(causes) < CAUSES_MAX:
        causes.append(str(cause.toString()))
        cause = cause.getCause()
    return causes


_LOCAL_FILES_JAVA = """
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


def avoid_chmod_processes(spark: SparkSession) -> None:
    """Make Hadoop set the modes of new local files and folders with a call, not a process.
    Without its native library, which pyspark does not include, Hadoop starts ``chmod`` 420 times
    for each report. This compiles a subclass of Hadoop's class with Janino, Spark's compiler for
    queries. If that fails, nothing changes."""
    jvm: Any = spark.sparkContext._jvm
    try:
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
        compiler.cook(_LOCAL_FILES_JAVA)
        conf = jvm.org.apache.hadoop.conf.Configuration(
            spark.sparkContext._jsc.hadoopConfiguration()
        )
        conf.setClassLoader(compiler.getClassLoader())
        conf.set("fs.file.impl", "tickwheel.LocalFiles")
        # Hadoop caches one object for each scheme and user, so this first call determines the
        # class.
        local = jvm.java.net.URI("file:///")
        jvm.org.apache.hadoop.fs.FileSystem.get(local, conf).close()
        jvm.org.apache.hadoop.fs.FileSystem.get(local, conf)
    except Py4JError:
        return


class Files:
    """Small files and folders. Paths are strings. For a missing file, methods return None, [] or
    False."""

    def __init__(self, spark: SparkSession) -> None:
        # Hadoop's classes are available through pyspark's gateway.
        self._jvm: Any = spark.sparkContext._jvm
        self._conf: Any = spark.sparkContext._jsc.hadoopConfiguration()

    def _located(self, path: str) -> tuple[Any, Any]:
        target = self._jvm.org.apache.hadoop.fs.Path(path)
        system = target.getFileSystem(self._conf)
        # Prevent Hadoop from writing .crc files into local folders.
        system.setWriteChecksum(False)
        return system, target

    def matching(self, folder: str, pattern: str) -> list[Found]:
        """Return the files in a folder that match a pattern."""
        system, path = self._located(f"{folder}/{pattern}")
        statuses = system.globStatus(path) or ()
        return [
            Found(status.getPath().toString(), int(status.getLen()))
            for status in statuses
            if status.isFile()
        ]

    def names(self, folder: str) -> list[str]:
        """Return the names in ``folder``, sorted, or nothing if the folder does not exist."""
        system, path = self._located(folder)
        if not system.exists(path):
            return []
        return sorted(status.getPath().getName() for status in system.listStatus(path))

    def exists(self, path: str) -> bool:
        system, target = self._located(path)
        return bool(system.exists(target))

    def read(self, path: str) -> str | None:
        system, target = self._located(path)
        if not system.exists(target):
            return None
        try:
            stream = system.open(target)
        except Py4JJavaError as error:
            if is_file_not_found(error):
                return None  # it was removed after ``exists``
            raise
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode(
                "utf-8", "replace"
            )
        finally:
            stream.close()

    def write(self, path: str, text: str) -> None:
        """Write a file, atomically if the file system supports that, by renaming a temporary file.
        Only one writer at a time can call this, because writers share the temporary file."""
        system, target = self._located(path)
        aside = self._aside(system, target, text, ASIDE)
        if system.getUri().getScheme() == "file":
            # Unlike with Hadoop's rename, the file exists at every moment.
            os.replace(aside.toUri().getPath(), target.toUri().getPath())
            return
        system.delete(target, False)
        if not system.rename(aside, target):
            raise OSError(f"{path}: the file system refused to rename the temporary file")

    def create(self, path: str, text: str) -> bool:
        """Create a file atomically. Return False if it exists. Only one of two concurrent calls
        returns True. Local file systems guarantee this with a link, HDFS with a rename that does
        not replace. An object store does not guarantee it."""
        system, target = self._located(path)
        if system.exists(target):
            return False
        aside = self._aside(system, target, text, f"{ASIDE}{uuid.uuid4().hex}-")
        try:
            if system.getUri().getScheme() == "file":
                return _linked(aside.toUri().getPath(), target.toUri().getPath())
            return bool(system.rename(aside, target))
        finally:
            system.delete(aside, False)

    def _aside(self, system: Any, target: Any, text: str, prefix: str) -> Any:
        """Write ``text`` to a temporary file next to ``target``."""
        name = f"{prefix}{target.getName()}"
        aside = self._jvm.org.apache.hadoop.fs.Path(target.getParent(), name)
        stream = system.create(aside, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        return aside

    def delete(self, path: str) -> None:
        system, target = self._located(path)
        system.delete(target, True)

    def age_s(self, path: str, now_ms: int) -> float:
        """Return the number of seconds since the file was last written."""
        system, target = self._located(path)
        return (now_ms - int(system.getFileStatus(target).getModificationTime())) / 1000


def _linked(aside: str, path: str) -> bool:
    """Give ``aside`` the name ``path``. Return False if it exists; a rename would replace it."""
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError:
        # Without hard links (FAT, some network shares) a race cannot be excluded.
        if os.path.exists(path):  # os.path, because Hadoop's paths are strings
            return False
        os.rename(aside, path)
    return True
