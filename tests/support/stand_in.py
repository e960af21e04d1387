"""A module with some names replaced, for the one module under test that uses it.

A name replaced in a shared module itself (``time.sleep``) would be met by every thread of the
process, those of libraries among them, and by the test runner.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def stand_in(module: ModuleType, **names: Any) -> ModuleType:
    """A copy of ``module`` in which ``names`` have these values."""
    unknown = names.keys() - vars(module).keys()
    if unknown:
        raise AttributeError(f"{module.__name__} has no {', '.join(sorted(unknown))}")
    copy = ModuleType(module.__name__)
    vars(copy).update(vars(module), **names)
    return copy
