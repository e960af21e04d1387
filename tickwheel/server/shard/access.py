"""Who asks, and which right each operation needs.

``RIGHTS`` is the one table: what is not in it, nobody with limited rights may do. ``guard`` checks
it for every transport. A principal without limits is never checked: its transport calls the
operations themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

ALL_TOPICS: Final = "*"
PRINCIPALS_KEPT_MAX: Final = 1_024
"""How many principals' operations are kept ready; more tokens in use only cost time."""


class Right(StrEnum):
    """What a principal may be allowed to do. No right includes another."""

    PRODUCE = "produce"
    CONSUME = "consume"
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


class Of(StrEnum):
    """For which of its topics an operation needs its right."""

    NAMED = "the topic that is named"
    EACH_TASK = "the topic of each new task"
    FOUND = "the topics of what is found: anything else is as if it were not there"
    ANY = "all topics"


class Need(NamedTuple):
    """The right that an operation needs, and for which topics."""

    right: Right
    of: Of


Only = Callable[[str], bool]
"""Whether the topic of this name may be touched."""


class Topics:
    """The topics that patterns name: a whole name, the beginning of one and ``*``, or ``*``."""

    def __init__(self, patterns: Iterable[str]) -> None:
        found = frozenset(patterns)
        self.are_all = ALL_TOPICS in found
        self._patterns = found
        self._names = frozenset(p for p in found if not p.endswith(ALL_TOPICS))
        self._beginnings = tuple(sorted(p[:-1] for p in found - self._names))

    def __call__(self, topic: str) -> bool:
        return topic in self._names or topic.startswith(self._beginnings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topics) and other._patterns == self._patterns

    def __hash__(self) -> int:
        return hash(self._patterns)


Grants = tuple[tuple[Right, tuple[str, ...]], ...]
"""Each right with the patterns of the topics that it is for."""


class Quotas(NamedTuple):
    """How much a principal may take; None: as much as the daemon has."""

    tasks_per_s: float | None = None
    bytes_per_s: float | None = None
    pending: int | None = None
    """Unfinished tasks on all topics that the principal may produce to."""
    connections: int | None = None
    subscriptions: int | None = None
    transactions: int | None = None
    """Undecided transactions; None: as many as are left for others."""


class Principal(NamedTuple):
    """Somebody whose identity has been checked; ``name`` is "" for anonymous."""

    name: str
    grants: Grants | None
    """The principal's rights; None: it may do all."""
    token_id: str = ""
    """The id of its token in the file of tokens; empty: it has none."""
    quotas: Quotas | None = None

    @property
    def is_limited(self) -> bool:
        return self.grants is not None

    def topics(self, right: Right) -> Topics:
        """The topics for which the principal has ``right``."""
        return _topics(self, right)


@lru_cache(maxsize=PRINCIPALS_KEPT_MAX * len(Right))
def _topics(principal: Principal, right: Right) -> Topics:
    if principal.grants is None:
        return Topics((ALL_TOPICS,))
    return Topics(p for held, patterns in principal.grants if held == right for p in patterns)


NOBODY: Final = Principal("", ())
"""The principal of a caller who has not said yet who it is."""
ANONYMOUS: Final = Principal("", None)
TOKEN_TEXT: Final = re.compile(r"tw_[0-9a-f]{12}(_|$)")
"""How the text of a file's token begins, whether that token is there or not."""
TOKEN_HOLDER: Final = Principal("token", None)

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
        "cancel": Need(Right.PRODUCE, Of.FOUND),
        "reschedule": Need(Right.PRODUCE, Of.FOUND),
        "run_now": Need(Right.PRODUCE, Of.FOUND),
        "look_up": Need(Right.READ, Of.FOUND),
        "cancel_key": Need(Right.PRODUCE, Of.NAMED),
        "reschedule_key": Need(Right.PRODUCE, Of.NAMED),
        "run_now_key": Need(Right.PRODUCE, Of.NAMED),
        "look_up_key": Need(Right.READ, Of.NAMED),
        "list_tasks": Need(Right.READ, Of.FOUND),
        "list_topics": Need(Right.READ, Of.FOUND),
        "show_topic": Need(Right.READ, Of.NAMED),
        "list_dead": Need(Right.READ, Of.FOUND),
        "stats": Need(Right.READ, Of.FOUND),
        "load": Need(Right.READ, Of.ANY),
        "overview": Need(Right.READ, Of.ANY),
        "group_lag": Need(Right.READ, Of.NAMED),
        "consumers": Need(Right.READ, Of.FOUND),
        "task_history": Need(Right.READ, Of.FOUND),
        "history_tasks": Need(Right.READ, Of.FOUND),
        "report": Need(Right.READ, Of.ANY),
        "requeue_dead": Need(Right.OPERATE, Of.FOUND),
        "delete_dead": Need(Right.OPERATE, Of.FOUND),
        "create_group": Need(Right.OPERATE, Of.NAMED),
        "delete_group": Need(Right.OPERATE, Of.NAMED),
        "reset_group": Need(Right.OPERATE, Of.NAMED),
        "preview_reset": Need(Right.READ, Of.NAMED),
        "delete_topic": Need(Right.OPERATE, Of.NAMED),
        "configure": Need(Right.OPERATE, Of.NAMED),
        "held_keys": Need(Right.READ, Of.NAMED),
        "key_lines": Need(Right.READ, Of.NAMED),
        "release_key": Need(Right.OPERATE, Of.NAMED),
        "skip_key": Need(Right.OPERATE, Of.NAMED),
        "put_schedule": Need(Right.OPERATE, Of.FOUND),
        "list_schedules": Need(Right.READ, Of.FOUND),
        "show_schedule": Need(Right.READ, Of.FOUND),
        "pause_schedule": Need(Right.OPERATE, Of.FOUND),
        "resume_schedule": Need(Right.OPERATE, Of.FOUND),
        "run_schedule": Need(Right.OPERATE, Of.FOUND),
        "backfill_schedule": Need(Right.OPERATE, Of.FOUND),
        "delete_schedule": Need(Right.OPERATE, Of.FOUND),
        "prepare": Need(Right.PRODUCE, Of.EACH_TASK),
        "commit_transaction": Need(Right.PRODUCE, Of.FOUND),
        "rollback_transaction": Need(Right.PRODUCE, Of.FOUND),
        "answer_checks": Need(Right.PRODUCE, Of.FOUND),
        "list_transactions": Need(Right.READ, Of.FOUND),
        "show_transaction": Need(Right.READ, Of.FOUND),
        "make_bulk": Need(Right.OPERATE, Of.NAMED),
        "preview_bulk": Need(Right.READ, Of.NAMED),
        "list_bulk": Need(Right.READ, Of.FOUND),
        "show_bulk": Need(Right.READ, Of.FOUND),
        "cancel_bulk": Need(Right.OPERATE, Of.FOUND),
        "backup": Need(Right.ADMIN, Of.ANY),
        "restore": Need(Right.ADMIN, Of.ANY),
        "cancel_restore": Need(Right.ADMIN, Of.ANY),
        "list_restores": Need(Right.READ, Of.ANY),
        "show_restore": Need(Right.READ, Of.ANY),
        # Whoever may speak at all may say these; they are about the caller itself.
        "ping": None,
        "status": None,
        "set_prefetch": None,
        "unsubscribe": None,
        "leave": None,
    }
)
"""Name of an operation → what it needs; None: no right."""
