"""Commands that find nobody say so at once, and their tree is made once for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer

from tickwheel.cli import call
from tickwheel.cli.app import app


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in this process waits a tenth of a second for a daemon, which is not there."""
    monkeypatch.setattr(call, "CONNECT_S", 0.1)


@pytest.fixture(scope="module", autouse=True)
def one_tree() -> Iterator[None]:
    make, tree = typer.main.get_command, typer.main.get_command(app)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", lambda one: tree if one is app else make(one))
        yield
