"""A daemon alone and the API of three shards accept and refuse the same values."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from server.access.test_rights import ROUTES, target
from server.http.rig import HttpRig, Response
from server.http.test_gateway import Hall
from server.test_values import DELIVERED, ODD, PLACES, UNSURE, is_about_several
from support.odd_values import put

OF_VALUES = ("bad_request", "limit_exceeded", "body_too_large", "due_too_far")
VALUES: tuple[Any, ...] = ("", "t", "a b", 0, -1, 5, 0.5, None, True, (), {})
"""Tried at each place of a body, with ``MORE`` others."""
MORE = 2
TEXTS = ("", "t", "a b", "0", "00", "-1", "1e3", "+1", "5", "true", "True")
"""Tried for each parameter of a query."""

Doors = tuple[HttpRig, Hall]


@pytest.fixture
async def doors(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Doors]:
    one, hall = await HttpRig(topics_max=100_000).start(), await Hall(monkeypatch).start()
    yield one, hall
    await one.stop()
    await hall.stop()


async def differ(doors: Doors, method: str, path: str, data: bytes | None = None) -> Any:
    """Return both answers if one of them accepts what the other refuses for a value, or None."""
    answers: list[Response] = []
    for door in doors:
        named = {} if data is None else {"content_type": "application/json"}
        request = door.begin(method, path, data, **named)
        await request.until(lambda it: it.status)
        if request.response.status < 400:
            request.leave()
        await request.task
        answers.append(request.response)
    accepted = [answer.status < 400 for answer in answers]
    if accepted[0] == accepted[1]:
        return None
    error = answers[accepted.index(False)].json
    is_of_shards = "decides the shard" in error["detail"]
    if error["code"] not in OF_VALUES or is_about_several(error["detail"]) or is_of_shards:
        return None
    return [answer.status for answer in answers], error["detail"]


FEW = ("t", -1, 0.5, None, ())


@pytest.mark.parametrize(
    ("values", "more"), [(FEW, 1), pytest.param(VALUES, MORE, marks=pytest.mark.slow)]
)
async def test_each_field_of_a_body_accepts_the_same(
    doors: Doors, values: tuple[Any, ...], more: int
) -> None:
    chance = random.Random(2)
    differing: list[Any] = []
    for (method, path, base), way in PLACES:
        if path in UNSURE or path in DELIVERED:
            continue
        for value in (*values, *chance.sample(ODD, more)):
            data = json.dumps(put(base, way, value)).encode()
            if found := await differ(doors, method, target(path), data):
                differing.append((method, path, way, value, found))
    assert not differing


async def test_each_parameter_of_a_query_accepts_the_same(doors: Doors) -> None:
    differing: list[Any] = []
    for route in ROUTES:
        if route.method != "GET":
            continue
        for field in msgspec.structs.fields(route.query):
            for text in TEXTS:
                path = f"{target(route.path)}?{field.encode_name}={quote(text)}"
                if found := await differ(doors, "GET", path):
                    differing.append((path, found))
    assert not differing
