"""Skip tests of a framework whose packages are missing; on CI they fail."""

from __future__ import annotations

import importlib.util
import os

import pytest


def need(*modules: str) -> None:
    """Skip the calling module's tests if one of `modules` cannot be imported."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not missing:
        return
    reason = f"not installed: {', '.join(missing)}"
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)
