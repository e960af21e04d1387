"""Tests that look through all files."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Turn off the collector, which would look at all syntax trees again and again."""
    gc.disable()
    yield
    gc.enable()
