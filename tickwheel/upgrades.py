"""Upgrades of a store or an inbox from one layout to the next, as steps that a person can read. The
steps of one upgrade are one transaction."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from typing import NamedTuple


class Upgrade(NamedTuple):
    """The layout of a store or an inbox, and the steps to that of this release."""

    label: str
    """The store or the inbox for messages, without secrets."""
    layout: int
    """The layout that was found; 0: there is none yet."""
    needed: int
    """The layout that this release needs."""
    steps: tuple[str, ...] = ()
    """SQL or other commands, in order; empty: there is nothing to upgrade."""


def sql_steps(folder: Traversable, layout: int, needed: int, prefix: str = "") -> tuple[str, ...]:
    """Return the texts of the files ``upgrade-N.sql`` in a folder of a package, each of which
    upgrades layout N - 1 to N and records the number N. ``layout`` 0: there is nothing to
    upgrade."""
    numbers = range(layout + 1, needed + 1) if layout else ()
    return tuple(
        folder.joinpath(f"{prefix}upgrade-{number}.sql").read_text("utf-8") for number in numbers
    )
