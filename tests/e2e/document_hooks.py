"""What Schemathesis does not do by itself: of the requests that fit the document, some get a value
at a bound or beyond it in one place, and most are about the one topic that the token is for.

Loaded by its command line (``SCHEMATHESIS_HOOKS``) in ``test_http_document.py``.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import schemathesis

from support.odd_values import for_json, places, put
from tickwheel.errors import BY_CODE
from tickwheel.limits import Limits

OURS = os.environ.get("DOCUMENT_TOPIC", "")
"""The topic of a token with few rights; empty: the token has all."""
ODD_SHARE, OURS_SHARE = 0.5, 0.8
_chance = random.Random(7)


def _is_json(value: Any) -> bool:
    """Without NaN and halves of surrogate pairs, which Schemathesis itself does not take."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        return False
    return True


ODD = [value for value in for_json(Limits()) if _is_json(value)]


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Only what fits the document is changed: of the rest the document says that it is refused."""
    meta = case.meta
    if meta is None or not meta.generation.mode.is_positive:
        return
    if OURS and _chance.random() < OURS_SHARE:
        _make_ours(case)
    if isinstance(case.body, (dict, list)) and case.body and _chance.random() < ODD_SHARE:
        ways = [way for way in places(case.body) if way]
        if ways:
            case.body = put(case.body, _chance.choice(ways), _chance.choice(ODD))


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """An error is one of the table, with its status. Raises AssertionError, which fails the run."""
    if response.status_code >= 400 and response.content:
        code = response.json()["code"]
        assert code in BY_CODE and code not in ("internal", "outcome_unknown"), code
        assert BY_CODE[code].http_status == response.status_code, code


def _make_ours(case: Any) -> None:
    if case.path_parameters and "topic" in case.path_parameters:
        case.path_parameters["topic"] = OURS
    body = case.body if isinstance(case.body, dict) else {}
    for one in (body, *(body.get("tasks") or ())):
        if isinstance(one, dict) and "topic" in one:
            one["topic"] = OURS
