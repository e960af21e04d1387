"""When a torture run takes a daemon for one that works."""

from __future__ import annotations

from unittest.mock import AsyncMock, Mock

import pytest

from crash.plan import Plan
from crash.probe import Probe
from tickwheel.api.frames import FrameType


@pytest.mark.parametrize("may_be_full", [False, True])
@pytest.mark.parametrize("code", ["store_full", "refused"])
async def test_store_full_is_accepted_only_if_the_store_can_be_full(
    code: str, may_be_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(1, may_be_full=may_be_full)
    link = Mock(
        wait=AsyncMock(return_value=(FrameType.ERROR, 1, code, "why")),
        call=AsyncMock(return_value=(FrameType.OK, 2, {"state": "active"})),
    )
    monkeypatch.setattr(Plan, "try_link", AsyncMock(return_value=link))
    assert await Probe(plan).works([1]) == (may_be_full and code == "store_full")
