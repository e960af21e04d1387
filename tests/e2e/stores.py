"""The stores that tests of a whole daemon run on."""

from __future__ import annotations

import pytest

OTHER_DRIVER = pytest.param("asyncio-redis", marks=pytest.mark.slow)
"""What a driver does is the same for every feature: ``tests/persistence`` asks each of them all,
and ``test_transactions.py`` kills a daemon on each."""
