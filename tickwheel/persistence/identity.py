"""The identity of a store: its incarnation, and its epochs with their marks. A starting daemon
compares them with facts from outside the store (``contract.Evidence``) before it begins an epoch.

Every epoch has a mark, the random end of its owner's name. The mark distinguishes epochs that have
the same number in different branches, for example after an older copy was restored. A store keeps
the marks of its newest epochs. A history (``history/branches.py``) records the newest epoch, mark
and batch that it contains. A history never runs ahead of its store, so a history that is ahead
proves a loss. A lock file, a reserve or a setting can prove that a store existed.

The next epoch begins a new branch if the store is marked ``COPY`` or ``NEW``. A backup is marked
``COPY``; it can be served unless it lacks a known batch. ``tickwheel init`` and ``tickwheel
restore`` mark a store ``NEW``, which is an operator's decision. A branch has a new incarnation,
begins above every known epoch, and keeps no earlier epochs. This module uses no files or servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tickwheel.persistence.contract import Evidence, StoreUnusable

COPY, NEW = "copy", "new"
"""The reasons why the next epoch begins a branch."""
PAST_MAX = 64
"""Maximum number of earlier epochs that a store keeps."""


class EpochRecord(NamedTuple):
    """An epoch of a store: its number, its mark, and the last batch that it applied."""

    epoch: int
    mark: str
    batch: int


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The identity recorded in a store that is not empty, before an epoch begins."""

    last: EpochRecord
    incarnation: str
    past: tuple[EpochRecord, ...] = ()
    """The newest epochs of this branch before ``last``, oldest first."""
    branch_reason: str = ""
    """``COPY`` or ``NEW``; empty: the next epoch continues this branch."""


class Beginning(NamedTuple):
    """The identity of the next epoch."""

    epoch: int
    past: tuple[EpochRecord, ...] = ()
    after: str = ""
    """The mark of the preceding epoch; empty: there is none."""
    is_branch: bool = False
    is_behind: bool = False
    """Whether the store lacks known batches and an operator has accepted this loss."""


def mark_of(owner: str) -> str:
    """Return the mark of an epoch of this owner."""
    return owner.rpartition("/")[2]


def restored(after: str) -> dict[str, str]:
    """Return the identity of a store that a restore has filled, as field name → value. ``after``:
    the mark of the epoch that was restored."""
    return {"branch": NEW, "owner": f"restore/{after}"}


def next_epoch(
    name: str, identity: StoreIdentity | None, evidence: Sequence[Evidence], epoch_min: int = 1
) -> Beginning:
    """Return the identity of the next epoch of the store ``name``. ``identity`` None: it is empty.
    Raise StoreUnusable if the store lacks a known epoch or batch and is not marked ``NEW``."""
    epoch_min = max([epoch_min, *(fact.epoch + 1 for fact in evidence if not fact.mark)])
    evidence = [fact for fact in evidence if fact.mark or not fact.epoch]
    if identity is None:
        for fact in evidence:
            raise StoreUnusable(
                f"{name} is empty, but {_describe(fact)}: its data is lost. `tickwheel restore`"
                " recovers it from a backup and the history; `tickwheel init --force` starts"
                " with an empty store"
            )
        return Beginning(epoch_min)
    lacking = next((fact for fact in evidence if _is_lacking(identity, fact)), None)
    if lacking is not None and identity.branch_reason != NEW:
        last = identity.last
        reached = f"epoch {last.epoch} ({last.mark or 'no mark'}), batch {last.batch}"
        empty = "" if last.batch else "; `tickwheel init --force` starts with an empty store"
        raise StoreUnusable(
            f"{name} is an older or another store: it has reached {reached}, incarnation"
            f" {identity.incarnation}, but {_describe(lacking)}. `tickwheel restore` recovers the"
            f" missing data; `tickwheel init --branch` continues without it{empty}"
        )
    epoch = max(identity.last.epoch + 1, epoch_min)
    if identity.branch_reason:
        epoch = max([epoch, *(fact.epoch + 1 for fact in evidence)])
        # A store that was initialized and never used has no preceding epoch.
        after = identity.last.mark if identity.last.batch else ""
        return Beginning(epoch, (), after, True, lacking is not None and bool(after))
    return Beginning(epoch, (*identity.past, identity.last)[-PAST_MAX:], identity.last.mark)


def _is_lacking(identity: StoreIdentity, fact: Evidence) -> bool:
    """Return whether this store lacks the known epoch or batch."""
    if fact.epoch > identity.last.epoch:
        return True
    for began in (identity.last, *identity.past):
        if began.epoch == fact.epoch:
            return fact.mark != began.mark or fact.batch > began.batch
    return False  # the epoch is older than ``past``, or belongs to an abandoned branch


def _describe(fact: Evidence) -> str:
    if not fact.epoch:
        return f"{fact.where} proves that a store existed"
    until = fact.until and f", until {fact.until}"
    return f"{fact.where} has reached epoch {fact.epoch} ({fact.mark}), batch {fact.batch}{until}"


# --- text form -----------------------------------------------------------------------------------


NO_BATCH = 1 << 62
"""Stands for the last batch of an epoch that is not compared."""


def past_text(past: Sequence[EpochRecord], *, with_batches: bool = True) -> str:
    """Return the epochs as text, as stores keep them. On a server, batches of earlier epochs are
    not compared (``with_batches`` False): a machine that knows of batches that a failover has lost
    could otherwise not lead after another machine has led."""
    return " ".join(
        f"{began.epoch}:{began.mark}:{began.batch if with_batches else NO_BATCH}" for began in past
    )


def read_past(text: str) -> tuple[EpochRecord, ...]:
    """Parse the text that ``past_text`` returns."""
    parts = (item.split(":") for item in text.split())
    return tuple(EpochRecord(int(epoch), mark, int(batch)) for epoch, mark, batch in parts)
