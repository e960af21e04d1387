"""What Spark and its file systems raise, in one line for people."""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

FAILED = (Py4JError, PySparkException)
"""What a Spark job, or a call into its JVM, raises."""
CAUSES_MAX = 20
_REASON_MAX = 400
_MEMORY = "OutOfMemoryError"
_NO_FILE = "java.io.FileNotFoundException"


def in_short(error: BaseException) -> str:
    """The innermost cause, without the stack that led to it."""
    causes = _causes(error)
    told = causes[-1] if causes else str(error)
    line = next((line.strip() for line in told.splitlines() if line.strip()), repr(error))
    if any(_MEMORY in cause for cause in causes) or _MEMORY in str(error):
        line += " (give Spark more with --memory, or load less at a time with --batch-mb)"
    return line[:_REASON_MAX]


def is_no_file(error: Py4JJavaError) -> bool:
    """Whether it says that a file was not there."""
    return str(error.java_exception.getClass().getName()) == _NO_FILE


def _causes(error: BaseException) -> list[str]:
    """From the outside in; nothing when it is not the JVM's."""
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
