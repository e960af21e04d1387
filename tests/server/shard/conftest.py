"""A daemon without sockets, for tests that need no other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.in_process import InProcess
from support.shard_rig import Peer


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as made:
        yield made
        made.recount()


@pytest.fixture
async def peer(daemon: InProcess) -> Peer:
    return daemon.connect()
