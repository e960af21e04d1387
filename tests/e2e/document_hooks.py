"""What Schemathesis does not do by itself: most requests that fit the document get a body of
``server/test_values.py`` with a value at a bound or beyond it, and are about the one topic that the
token is for.

Loaded by its command line (``SCHEMATHESIS_HOOKS``) in ``test_http_document.py``.
"""

from __future__ import annotations

import copy
import json
import os
import random
from itertools import cycle, groupby
from typing import Any

import schemathesis

from server.test_values import PLACES, TOPIC
from support.odd_values import FAR, for_json, put
from tickwheel.errors import BY_CODE
from tickwheel.limits import Limits

OURS = os.environ.get("DOCUMENT_TOPIC", "")
"""The topic of a token with few rights; empty: the token has all."""
ODD_SHARE, FAR_SHARE, OURS_SHARE = 0.7, 0.5, 0.8
_chance = random.Random(7)


def _is_json(value: Any) -> bool:
    """Without NaN and halves of surrogate pairs, which Schemathesis itself does not take."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        return False
    return True


def _route_of(place: Any) -> tuple[str, str]:
    return place[0][0], place[0][1]


ODD = [value for value in for_json(Limits()) if _is_json(value)]

NEXT_OF = {
    key: cycle({way[-1:]: (case, way) for case, way in reversed(list(some))}.values())
    for key, some in groupby(sorted(PLACES, key=_route_of), key=_route_of)
}
"""Next place to change, by route; every field has a turn before any is repeated."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Only what fits the document is changed: of the rest the document says that it is refused."""
    meta = case.meta
    if meta is None or not meta.generation.mode.is_positive:
        return
    # Schemathesis shares the object among cases, and judges it again when one of them changes.
    case._meta = copy.deepcopy(meta)
    if OURS and _chance.random() < OURS_SHARE:
        _make_ours(case)
    if isinstance(case.body, (dict, list)) and _chance.random() < ODD_SHARE:
        case.body = _odd_body(case)


def _odd_body(case: Any) -> Any:
    """A good body with another value in one place: of what is made by the document, most is refused
    for another field already."""
    own = NEXT_OF.get((case.operation.method.upper(), case.operation.path))
    if own is None:
        return case.body
    (_, _, base), way = next(own)
    value = put(base, way, _chance.choice(FAR if _chance.random() < FAR_SHARE else ODD))
    if _has_null(value):  # see filter_case: it does not fit the document, and is accepted
        return case.body
    return json.loads(json.dumps(value).replace(json.dumps(TOPIC), json.dumps(OURS or TOPIC)))


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """An error is one of the table, with its status. Raises AssertionError, which fails the run."""
    if response.status_code >= 400 and response.content:
        code = response.json()["code"]
        assert code in BY_CODE and code not in ("internal", "outcome_unknown"), code
        assert BY_CODE[code].http_status == response.status_code, code


def _make_ours(case: Any) -> None:
    path = case.path_parameters or {}
    # A changed path is judged again, by its escaped values, which do not fit the document.
    if "topic" in path and not any("%" in str(path[name]) for name in path if name != "topic"):
        path["topic"] = OURS
    body = case.body if isinstance(case.body, dict) else {}
    for row in (body, *(body.get("tasks") or ())):
        if isinstance(row, dict) and "topic" in row:
            row["topic"] = OURS


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """The daemon takes null for an optional field that is not there, which the document leaves out:
    such a request is accepted though it does not fit."""
    meta = case.meta
    return meta is None or meta.generation.mode.is_positive or not _has_null(case.body)


def _has_null(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return any(map(_has_null, inner))
    return value is None
