"""Words that a shell completes by asking the daemon: topics and groups.

A shell waits for them while somebody types, so a daemon that does not answer at once has none.
"""

from __future__ import annotations

import os
from typing import Any

import typer  # its annotations are read when the program starts

from tickwheel.errors import TickwheelError

ANSWER_S = 0.5


def topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of topics that begin with ``incomplete``."""
    return sorted(name for name in _topics(ctx) if name.startswith(incomplete))


def groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of groups that begin with ``incomplete``: of the topic before it, else of any."""
    found, topic = _topics(ctx), ctx.params.get("topic")
    chosen = [found.get(topic) or {}] if topic else list(found.values())
    names = {name for one in chosen for name in (one.get("groups") or {})}
    return sorted(name for name in names if name.startswith(incomplete))


def _topics(ctx: typer.Context) -> dict[str, Any]:
    from tickwheel.sync import Client

    def given(name: str) -> Any:
        return ctx.params.get(name) or ctx.find_root().params.get(name)

    url = given("url") or os.environ.get("TICKWHEEL_URL")
    try:
        client = Client(url, token=given("token"), connect_timeout=ANSWER_S, retries=0)
        with client:
            return dict(client.stats(timeout=ANSWER_S).raw.get("topics") or {})
    except TickwheelError:
        return {}
