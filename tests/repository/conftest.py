"""The benchmarks' daemons are forked here, as those of the other tests are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import servers
from support import forked


@pytest.fixture(autouse=True)
def launched_by_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.Server, "launch", staticmethod(_launch))


def _launch(
    command: Sequence[str], *, log: Path, folder: Path, user: str | None
) -> servers.Process:
    begun = len(servers.DAEMON_COMMAND)
    if tuple(command[:begun]) != servers.DAEMON_COMMAND:
        return servers.launch(command, log=log, folder=folder, user=user)
    with log.open("ab") as said:
        return forked.start(
            command[begun:],
            env=os.environ | servers.ANY_DISK,
            stdin=None, stdout=said, stderr=said, folder=folder,
        )  # fmt: skip
