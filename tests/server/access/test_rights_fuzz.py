"""Whatever somebody without rights sends, over both ports, nothing changes and nothing is told."""

from __future__ import annotations

import random
from typing import Any

import pytest

from server.access.access_rig import AccessRig
from server.access.test_rights import BODIES, ROUTES, target
from server.tcp.fuzzer import Fuzzer, pack
from support.shard_rig import Peer, started
from tickwheel.api.frames import FrameType as T

FRAMES = 2_000
HOUR_MS = 3_600_000
SECRET = b"nobody may read this"


rig = started(AccessRig)


async def furnished(rig: AccessRig) -> tuple[int, ...]:
    """There is something to find and to break, under the names that the fuzzer uses."""
    owner = await rig.peer_with("all")
    many = tuple((topic, SECRET, HOUR_MS, {"key": "k"}) for topic in ("t", "u", "v"))
    ids: tuple[int, ...] = (await owner.enqueue(*many))[2][1]
    for topic in ("t", "u"):
        await owner.call(T.GROUP_CREATE, topic, "g", {"since": "first"})
    every = {"topic": "t", "body": SECRET, "every_ms": HOUR_MS}
    assert (await owner.call(T.SCHEDULE_PUT, "a", every))[0] == T.OK
    owner.lose()
    await rig.settle()
    return ids


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


def state(rig: AccessRig) -> tuple[Any, ...]:
    core = rig.core
    topics = {
        name: (topic.settings, topic.scheduled, {g: topic.groups[g].settings for g in topic.groups})
        for name, topic in core.topics.items()
    }
    schedules = {name: planned.row for name, planned in core.schedule_heap.by_name.items()}
    return core.tasks, core.dead, len(core.wheel), topics, schedules, core.subscribers


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scopes", [("produce=nothing",), ("all=nothing.*",), ()])
async def test_random_tcp_requests_need_their_rights(
    rig: AccessRig, seed: int, scopes: tuple[str, ...]
) -> None:
    """Without a scope: before HELLO."""
    ids = await furnished(rig)
    token = await rig.token(*scopes) if scopes else None
    fuzzer = Fuzzer(seed, rig.shard.limits)
    fuzzer.ids.extend(ids)
    before = state(rig)

    async def connected() -> Peer:
        return rig.stranger() if token is None else await rig.peer(token=token)

    peer = await connected()
    kept: list[Any] = []
    for count in range(FRAMES):
        if peer.closed:
            kept += peer.kept
            peer = await connected()
        frame = fuzzer.frame()
        if frame and frame[0] == T.HELLO and token is None:
            continue  # a right HELLO without a token is refused, and closes
        peer.feed(pack(frame))
        if count % 50 == 0:
            await rig.settle(5)
            for answer in peer.frames():
                fuzzer.heard(answer)
    await rig.settle()
    kept += peer.kept
    assert kept and SECRET.decode() not in str(kept)
    peer.lose()
    await rig.settle()
    assert state(rig) == before


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scope", ["produce=nothing", "all=nothing.*", None])
async def test_random_http_requests_need_their_rights(
    rig: AccessRig, seed: int, scope: str | None
) -> None:
    ids = await furnished(rig)
    token = await rig.token(scope) if scope is not None else "tw_000000000000_x"
    before, chance = state(rig), random.Random(seed)
    for _ in range(10):
        for route in ROUTES:
            if route.path.startswith(("/v1/sessions", "/v1/session-links")):
                continue  # whoever has a token may log in
            path = target(route.path).replace("/5", f"/{chance.choice(ids)}")
            body = BODIES.get((route.method, route.path))
            if body is not None and chance.random() < 0.5:
                body = mutated(chance, body, ids)
            asked = rig.begin(route.method, path, body, authorization=f"Bearer {token}")
            response = await asked.until(lambda response: response.status)
            asked.leave()
            assert SECRET not in response.body and response.status != 500
            assert response.status in (200, 400, 403, 404, 409, 422) or scope is None, route.path
            assert scope is not None or response.status == 401
    await rig.settle()
    assert state(rig) == before


def mutated(chance: random.Random, body: Any, ids: tuple[int, ...]) -> Any:
    """With ids that there are, or something that is none."""
    odd = (None, 5, "", "t", [], {}, [str(i) for i in ids], {"topic": "t"}, -1, True, "é" * 300)
    return {name: chance.choice((value, *odd)) for name, value in body.items()}
