"""Tests that look through all files."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Syntax trees are no garbage, and looking at them again and again takes most of the time."""
    gc.disable()
    yield
    gc.enable()
