"""SQL statements in files, each under a line ``-- name: NAME``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.resources.abc import Traversable

_NAME: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_COMMENT: Final = re.compile(r"^\s*--.*\n", re.MULTILINE)
_INCLUDE: Final = re.compile(r"\{include (\w+)\}")


def read_statements(file: Traversable) -> Mapping[str, str]:
    """Return name → statement without comments. ``{include NAME}`` stands for an earlier one; other
    braces are left to ``str.format``."""
    statements: dict[str, str] = {}
    _, *parts = _NAME.split(file.read_text("utf-8"))
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        text = _COMMENT.sub("", part).strip()
        statements[name] = _INCLUDE.sub(lambda found: statements[found[1]], text)
    return statements
