"""Files wherever Spark's file systems reach: local paths, ``hdfs://``, ``s3a://``.

All of a report's own bookkeeping goes through here, so that the job runs unchanged on a
cluster. Uses Hadoop's FileSystem inside Spark's JVM; no local-only call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Found:
    """One file: its full path as Spark reads it, and its size."""

    path: str
    bytes: int


class Files:
    """Small files and folders. Paths are text; what is not there is None, empty or False."""

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

    def matching(self, pattern: str) -> list[Found]:
        """Files that match a glob pattern."""
        system, path = self._at(pattern)
        statuses = system.globStatus(path) or ()
        return [
            Found(status.getPath().toString(), int(status.getLen()))
            for status in statuses
            if status.isFile()
        ]

    def names(self, folder: str) -> list[str]:
        """What lies directly in ``folder``, sorted; nothing when there is no such folder."""
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
        stream = system.open(hadoop)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode(
                "utf-8", "replace"
            )
        finally:
            stream.close()

    def write(self, path: str, text: str) -> None:
        """Whole or not at all, as far as the file system can: written aside and renamed."""
        system, hadoop = self._at(path)
        aside = self._jvm.org.apache.hadoop.fs.Path(hadoop.getParent(), f".tmp-{hadoop.getName()}")
        stream = system.create(aside, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        system.delete(hadoop, False)
        if not system.rename(aside, hadoop):
            raise OSError(f"{path}: the file system refused to rename it into place")

    def create(self, path: str, text: str) -> bool:
        """False when it is there already."""
        system, hadoop = self._at(path)
        if system.exists(hadoop):
            return False
        self.write(path, text)
        return True

    def delete(self, path: str) -> None:
        system, hadoop = self._at(path)
        system.delete(hadoop, True)

    def age_s(self, path: str, now_ms: int) -> float:
        """Since it was last written."""
        system, hadoop = self._at(path)
        return (now_ms - int(system.getFileStatus(hadoop).getModificationTime())) / 1000
