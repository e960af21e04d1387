"""``tickwheel policy``: how often and when a failed delivery is tried again.

Of the policies that are set, the task's own wins, then the group's, the topic's, the daemon's.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tickwheel.cli.call import Call
from tickwheel.cli.options import MaybeGroup, SpecParser, TopicArgument
from tickwheel.cli.output import Grid
from tickwheel.cli.topics import tell
from tickwheel.cli.values import SPEC_HELP, SPEC_METAVAR, describe_policy, retry_of
from tickwheel.errors import NotFound

SpecArgument = Annotated[
    Any, typer.Argument(parser=SpecParser, metavar=SPEC_METAVAR, help=SPEC_HELP)
]


async def show(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """The policies of a topic and its groups; none set means the next outer one."""
    async with call.client() as client:
        topics = (await client.stats()).raw.get("topics") or {}
    if topic not in topics:
        raise NotFound(f"there is no topic {topic!r:.255}")
    groups = topics[topic].get("groups") or {}
    if group is not None and group not in groups:
        raise NotFound(f"there is no group {group!r:.255} of topic {topic}")
    own = topics[topic].get("retry")
    rows: list[tuple[str | None, Any]] = [] if group is not None else [(None, own)]
    rows += [(n, g.get("retry")) for n, g in sorted(groups.items()) if group in {None, n}]
    grid = Grid(("topic", "group", "own policy", "what holds"))
    for name, policy in rows:
        found, level = _holding(policy, own, name)
        if call.out.as_json:
            call.out.record(
                {"topic": topic, "group": name, "retry": policy, "holds": found, "from": level}
            )
        else:
            shown = describe_policy(found) if found is not None else "the daemon's default"
            grid.rows.append((topic, name or "", describe_policy(policy), shown))
    if not call.out.as_json:
        call.out.grid(grid)


def _holding(policy: Any, of_topic: Any, group: str | None) -> tuple[Any, str]:
    """The policy that holds, and whose it is."""
    if policy is not None:
        return policy, "topic" if group is None else "group"
    return (of_topic, "topic") if of_topic is not None else (None, "daemon")


async def set_(
    call: Call, topic: TopicArgument, spec: SpecArgument, group: MaybeGroup = None
) -> None:
    """Set the policy of a topic, or of one of its groups."""
    async with call.client() as client:
        tell(call, await client.configure(topic, group, retry=retry_of(spec)))


async def clear(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """Take away a topic's or group's own policy; the next outer one holds again."""
    async with call.client() as client:
        tell(call, await client.configure(topic, group, retry=None))
