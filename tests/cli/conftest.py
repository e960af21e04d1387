"""Commands that find nobody say so at once."""

from __future__ import annotations

import pytest

from tickwheel.cli import call


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in this process waits a tenth of a second for a daemon, which is not there."""
    monkeypatch.setattr(call, "CONNECT_S", 0.1)
