"""Who asks, and which right each operation needs.

For now there is one token for everything, or none: whoever has passed may do all. The table is
what finer rights will be checked against; a test holds that every operation is in it.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from tickwheel.errors import Unauthorized


class Right(StrEnum):
    """What a principal may be allowed to do."""

    PRODUCE = "produce"
    CONSUME = "consume"
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


class Of(StrEnum):
    """Of which topics an operation needs its right."""

    NAMED = "the topic that is named"
    EACH_TASK = "the topic of each task"
    ANY = "all topics"


class Need(NamedTuple):
    """What an operation asks of its caller."""

    right: Right
    of: Of


class Principal(NamedTuple):
    """Somebody whose identity has been checked; ``name`` is "" for anonymous."""

    name: str


ANONYMOUS: Final = Principal("")
TOKEN_HOLDER: Final = Principal("token")

RIGHTS: Final[Mapping[str, Need | None]] = MappingProxyType(
    {
        "enqueue": Need(Right.PRODUCE, Of.EACH_TASK),
        "enqueue_once": Need(Right.PRODUCE, Of.EACH_TASK),
        "enqueue_plain": Need(Right.PRODUCE, Of.EACH_TASK),
        "enqueue_columns": Need(Right.PRODUCE, Of.NAMED),
        "enqueue_unanswered": Need(Right.PRODUCE, Of.EACH_TASK),
        "subscribe": Need(Right.CONSUME, Of.NAMED),
        "pull": Need(Right.CONSUME, Of.NAMED),
        "ack": Need(Right.CONSUME, Of.NAMED),
        "nack": Need(Right.CONSUME, Of.NAMED),
        "reject": Need(Right.CONSUME, Of.NAMED),
        "extend": Need(Right.CONSUME, Of.NAMED),
        "snooze": Need(Right.CONSUME, Of.NAMED),
        "release": Need(Right.CONSUME, Of.NAMED),
        "cancel": Need(Right.PRODUCE, Of.EACH_TASK),
        "reschedule": Need(Right.PRODUCE, Of.EACH_TASK),
        "run_now": Need(Right.PRODUCE, Of.EACH_TASK),
        "look_up": Need(Right.READ, Of.EACH_TASK),
        "cancel_key": Need(Right.PRODUCE, Of.NAMED),
        "reschedule_key": Need(Right.PRODUCE, Of.NAMED),
        "run_now_key": Need(Right.PRODUCE, Of.NAMED),
        "look_up_key": Need(Right.READ, Of.NAMED),
        "list_tasks": Need(Right.READ, Of.EACH_TASK),
        "list_topics": Need(Right.READ, Of.ANY),
        "show_topic": Need(Right.READ, Of.NAMED),
        "list_dead": Need(Right.READ, Of.EACH_TASK),
        "stats": Need(Right.READ, Of.ANY),
        "load": Need(Right.READ, Of.ANY),
        "requeue_dead": Need(Right.OPERATE, Of.EACH_TASK),
        "delete_dead": Need(Right.OPERATE, Of.EACH_TASK),
        "create_group": Need(Right.OPERATE, Of.NAMED),
        "delete_group": Need(Right.OPERATE, Of.NAMED),
        "delete_topic": Need(Right.OPERATE, Of.NAMED),
        "configure": Need(Right.OPERATE, Of.NAMED),
        "put_schedule": Need(Right.OPERATE, Of.NAMED),
        "list_schedules": Need(Right.READ, Of.ANY),
        "show_schedule": Need(Right.READ, Of.EACH_TASK),
        "pause_schedule": Need(Right.OPERATE, Of.EACH_TASK),
        "run_schedule": Need(Right.OPERATE, Of.EACH_TASK),
        "backfill_schedule": Need(Right.OPERATE, Of.EACH_TASK),
        "delete_schedule": Need(Right.OPERATE, Of.EACH_TASK),
        "backup": Need(Right.ADMIN, Of.ANY),
        # Whoever may speak at all may say these; they are about the caller itself.
        "ping": None,
        "status": None,
        "set_prefetch": None,
        "unsubscribe": None,
        "leave": None,
    }
)
"""By the operation's name. None: it needs no right."""


def authenticate(wanted: str | None, token: object) -> Principal:
    """Who has ``token``, when the daemon's is ``wanted``. Raises Unauthorized."""
    if wanted is None:
        return ANONYMOUS
    given = token if isinstance(token, str) else ""
    if not hmac.compare_digest(given.encode(), wanted.encode()):
        raise Unauthorized("the token is wrong" if token else "a token is required")
    return TOKEN_HOLDER
