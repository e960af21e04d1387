"""What a metric is made of: its shapes. Knows no name, and no text format.

``metrics`` has the tables, ``snapshot`` walks through them, ``exposition`` writes them down.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from tickwheel.engine.state import Core
from tickwheel.server.histogram import Histogram
from tickwheel.server.observing import Observed

if TYPE_CHECKING:
    from tickwheel.server.daemon import Daemon

Subject = TypeVar("Subject")


def kind_of(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"


class Moment(NamedTuple):
    """When, and of which engine, a value is read."""

    now_ms: int
    core: Core


@dataclass(frozen=True, slots=True)
class Metric(Generic[Subject]):
    """One number of each subject."""

    name: str
    help: str
    read: Callable[[Subject, Moment], float]
    merge: Callable[[float, float], float] = operator.add
    """How the value of several subjects is made of theirs."""

    @property
    def kind(self) -> str:
        return kind_of(self.name)


class Plain(NamedTuple):
    """One number of the process."""

    name: str
    help: str
    read: Callable[[Daemon], float]


class Distribution(NamedTuple):
    """A histogram of the process, or one for each value of a label."""

    name: str
    help: str
    label: str
    """Empty: there is one."""
    read: Callable[[Observed], Sequence[tuple[str, Histogram]]]
    divisor: float = 1
    """Kept in milliseconds, told in seconds: 1000."""
