"""The command line has an option for each keyword of the client's blocks, under the same name."""

from __future__ import annotations

from typing import Any

import pytest

from tickwheel.cli import options
from tickwheel.client import keywords

SAME: list[tuple[Any, Any]] = [
    (options.TaskOptions, keywords.ScheduledTaskKeywords),
    (options.GroupOptions, keywords.GroupKeywords),
    (options.NewGroupOptions, keywords.NewGroupKeywords),
    (options.SelectionOptions, keywords.SelectionKeywords),
]
CALLED = {"prop": "properties"}
"""An option that is repeated, and the keyword that takes all of it."""


@pytest.mark.parametrize(("block", "of_client"), SAME)
def test_options_are_the_keywords_of_the_client(block: Any, of_client: Any) -> None:
    assert {CALLED.get(name, name) for name in block.__annotations__} == set(
        of_client.__annotations__
    )
