"""Which store this is: its incarnation, its epochs and their marks, and what is known of it beside
it. A start compares the two, before it begins an epoch.

Every epoch has a mark, the random end of its owner's name, so an epoch of one branch of a store is
told from that with the same number of another: of a copy that was put back, for example. A store
keeps the marks of its newest epochs. A history (``history/branches.py``) keeps the epoch, mark and
batch that it has come to; it follows the store, so one that is ahead of it proves that something
was lost. A lock file, a reserve or a setting can say that there was a store at all.

A store goes on in a new branch when it is marked: ``COPY`` by a backup, which may be served as long
as nothing is known that it lacks; ``NEW`` by ``tickwheel init`` and ``tickwheel restore``, on an
operator's word. A branch has an incarnation of its own, begins above every epoch that is known, and
remembers no epoch of before. Pure: neither files nor servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tickwheel.persistence.contract import Known, StoreUnusable

COPY, NEW = "copy", "new"
"""Why the next epoch begins a branch."""
PAST_MAX = 64
"""Epochs whose marks a store keeps."""


class Began(NamedTuple):
    """An epoch of a store: its number, its mark, and the last batch that it applied."""

    epoch: int
    mark: str
    batch: int


@dataclass(frozen=True, slots=True)
class Held:
    """What a store that is not empty says of itself, before an epoch begins."""

    last: Began
    incarnation: str
    past: tuple[Began, ...] = ()
    """Its epochs before ``last``, the newest ones, oldest first; of this branch only."""
    branch: str = ""
    """``COPY`` or ``NEW``; empty: it goes on as it is."""


class Beginning(NamedTuple):
    """How the next epoch begins."""

    epoch: int
    past: tuple[Began, ...] = ()
    after: str = ""
    """The mark of the epoch that it follows; empty: none."""
    is_branch: bool = False
    is_behind: bool = False
    """Whether the store lacks what is known, and an operator wants it all the same."""


def mark_of(owner: str) -> str:
    """The mark of an epoch of this owner."""
    return owner.rpartition("/")[2]


def restored(after: str) -> dict[str, str]:
    """What a store that a restore has filled says of itself, by the names that stores have for it.
    ``after``: the mark of the epoch whose end it has."""
    return {"branch": NEW, "owner": f"restore/{after}"}


def begin(name: str, held: Held | None, known: Sequence[Known], epoch_min: int = 1) -> Beginning:
    """How the next epoch of the store ``name`` begins; ``held`` None: it is empty. Raises
    StoreUnusable when it lacks what is known, unless an operator has decided."""
    epoch_min = max([epoch_min, *(one.epoch + 1 for one in known if not one.mark)])
    known = [one for one in known if one.mark or not one.epoch]
    if held is None:
        for one in known:
            raise StoreUnusable(
                f"{name} is empty, and {_told(one)}: what it held is lost here. `tickwheel restore`"
                " brings it back from a backup and the history; `tickwheel init --force` begins"
                " anew without it"
            )
        return Beginning(epoch_min)
    lacking = next((one for one in known if _is_lacking(held, one)), None)
    if lacking is not None and held.branch != NEW:
        its = held.last
        held_by = f"epoch {its.epoch} ({its.mark or 'no mark'}), batch {its.batch}"
        anew = "" if its.batch else "; `tickwheel init --force` begins anew"
        raise StoreUnusable(
            f"{name} is an older or another store: it has come to {held_by}, incarnation"
            f" {held.incarnation}, and {_told(lacking)}. `tickwheel restore` brings back what it"
            f" lacks; `tickwheel init --branch` goes on with what it has{anew}"
        )
    epoch = max(held.last.epoch + 1, epoch_min)
    if held.branch:
        epoch = max([epoch, *(one.epoch + 1 for one in known)])
        # One that was laid out and never used follows nothing.
        after = held.last.mark if held.last.batch else ""
        return Beginning(epoch, (), after, True, lacking is not None and bool(after))
    return Beginning(epoch, (*held.past, held.last)[-PAST_MAX:], held.last.mark)


def _is_lacking(held: Held, one: Known) -> bool:
    """Whether something is known that this store has not, or never was."""
    if one.epoch > held.last.epoch:
        return True
    for began in (held.last, *held.past):
        if began.epoch == one.epoch:
            return one.mark != began.mark or one.batch > began.batch
    return False  # of before what the store remembers, or of a branch that was given up


def _told(one: Known) -> str:
    if not one.epoch:
        return f"{one.where} says that there was a store"
    until = one.until and f", until {one.until}"
    return f"{one.where} has come to epoch {one.epoch} ({one.mark}), batch {one.batch}{until}"


# --- as text -------------------------------------------------------------------------------------


def past_text(past: Sequence[Began]) -> str:
    """The epochs as a store keeps them."""
    return " ".join(f"{one.epoch}:{one.mark}:{one.batch}" for one in past)


def read_past(text: str) -> tuple[Began, ...]:
    """The epochs that ``past_text`` made a text of."""
    parts = (one.split(":") for one in text.split())
    return tuple(Began(int(epoch), mark, int(batch)) for epoch, mark, batch in parts)
