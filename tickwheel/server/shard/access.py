"""Who asks, with which rights for which topics. Which right a verb needs, its declaration says
(``api.verbs``); ``guard`` checks it for every transport. A principal without limits is never
checked: its transport calls the operations themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from tickwheel.api.verb import Right

ALL_TOPICS: Final = "*"
PRINCIPALS_KEPT_MAX: Final = 1_024
"""How many principals' operations are kept ready; more tokens in use only cost time."""


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
OUTBOUND: Final = Principal("outbound process", None)
"""The daemon's own process that sends the tasks of groups with targets."""
