from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from server.http.rig import HttpRig


@pytest.fixture
async def rig() -> AsyncIterator[HttpRig]:
    running = await HttpRig().start()
    yield running
    await running.stop()
