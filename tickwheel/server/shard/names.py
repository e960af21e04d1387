"""Names of schedules and transactions, which are unique across the shards of a daemon.

A schedule or transaction is stored in the shard of its tasks' keys. Its name has a home, shard
crc32(name) mod N, which is usually a different shard. A client first *claims* the name at home
(``ClaimRow``), then creates the schedule or transaction in the shard that the home shard returns,
which is the one of the first claim. A single shard needs no claims. Invariants:

* A name is claimed at home before it is used. The home shard refuses a name that is claimed for
  another shard, and the other shards refuse a name without a claim.
* An unused claim ends in its target shard before it ends at home. Once it has ended there, that
  shard refuses the claim, however late a request arrives. So the next client that claims the name
  can continue wherever the previous one stopped.
* A claim expires when it is ``CLAIM_KEPT_MS`` old and its target shard does not use the name
  (``following.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tickwheel.errors import BadRequest, Conflict, Forbidden, Overloaded
from tickwheel.model.kinds import (
    CLAIM,
    HEADER_PART,
    SCHEDULE,
    SCHEDULE_NAMES,
    TRANSACTION,
    TRANSACTION_NAMES,
    ClaimRow,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel.api.schedules import ClaimName
    from tickwheel.engine.state import Core
    from tickwheel.model.kinds import RecordKey
    from tickwheel.server.shard.callers import Call
    from tickwheel.server.shard.parts import Parts

CLAIMS_MAX: Final = 1_000_000
"""Maximum number of claims in one shard."""
CLAIM_KEPT_MS: Final = 600_000
"""Lifetime of an unused claim in ms, which is longer than any request takes."""


def is_in_use(core: Core, kind: str, name: str) -> bool:
    """Return whether this shard contains a schedule or transaction with this name."""
    if kind == SCHEDULE_NAMES:
        return name in core.schedule_heap.by_name
    return name in core.transaction_registry.by_name


def check_new_name(core: Core, kind: str, name: str, claim: int | None = None) -> None:
    """Raise Conflict if this shard must not create a schedule or transaction with this new name.
    ``claim`` is the number of the claim, if the request contains one."""
    versions = core.versions
    if versions.shards == 1:
        return
    row, home = core.claims.get((kind, name)), versions.home_of(name)
    if home == versions.shard:
        if row is not None:
            raise Conflict(
                f"{kind} {name} exists in shard {row.shard} or is being created there; these tasks"
                f" belong to shard {home}: use keys of shard {row.shard}, or end the {kind} first"
            )
        return
    if row is not None and _is_over(row, claim):
        raise Conflict(f"another client has claimed the {kind} name {name}; try again")
    if claim is None and row is None:
        raise Conflict(
            f"{kind} {name} does not exist in shard {versions.shard}, and its name belongs to shard"
            f" {home}: use a client that knows all shards, or the HTTP API of all shards"
        )


def _is_over(row: ClaimRow, number: int | None) -> bool:
    """Return whether the claim with this number (None: the newest claim) has ended. The home shard
    assigns ascending numbers."""
    if number is None or number == row.number:
        return row.is_over
    return number < row.number


def _is_hidden(row: ClaimRow, call: Call[ClaimName]) -> bool:
    """Return whether the claim is for a topic that the caller may not use."""
    return call.topic_filter is not None and not call.topic_filter(row.topic)


class Naming:
    """The operations on claims."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._core = parts.core
        self._versions = parts.core.versions

    def claim_schedule(self, call: Call[ClaimName]) -> None:
        """Claim the name of a schedule and answer with its shard. Raise Conflict, Forbidden,
        Overloaded."""
        self._claim(SCHEDULE_NAMES, call)

    def claim_transaction(self, call: Call[ClaimName]) -> None:
        """Claim the name of a transaction and answer with its shard. Raise Conflict, Forbidden,
        Overloaded."""
        self._claim(TRANSACTION_NAMES, call)

    def _claim(self, kind: str, call: Call[ClaimName]) -> None:
        request, own = call.request, self._versions.shard
        if request.shard >= self._versions.shards:
            raise BadRequest(f"shard must be below {self._versions.shards}, not {request.shard}")
        home = self._versions.home_of(request.name)
        if home == own:
            answer = self._end(kind, call) if request.over else self._at_home(kind, call)
        elif request.shard == own and request.number:
            answer = self._elsewhere(kind, call)
        else:
            raise Conflict(f"the name of {kind} {request.name} belongs to shard {home}, not {own}")
        shard, number = answer
        self._parts.committer.answer(call, {"shard": shard, "number": number})

    def _at_home(self, kind: str, call: Call[ClaimName]) -> tuple[int, int]:
        request, now_ms, own = call.request, call.now.now_ms, self._versions.shard
        if is_in_use(self._core, kind, request.name):
            return own, 0
        row = self._core.claims.get((kind, request.name))
        if row is None:
            if request.shard == own:
                return own, 0
            self._check_room()
            number = self._parts.border.act().core.ids.take(1, now_ms)
            row = ClaimRow(kind, request.name, request.topic, request.shard, number, now_ms)
            self._put(row)
        elif _is_hidden(row, call):
            return row.shard, 0  # without its number, the caller can neither use nor end the claim
        elif self._is_old(row, call):
            self._put(row._replace(at_ms=now_ms))
        return row.shard, row.number

    def _end(self, kind: str, call: Call[ClaimName]) -> tuple[int, int]:
        """End a claim at home, unless it has ended already."""
        row = self._core.claims.get((kind, call.request.name))
        if row is not None and row.number == call.request.number:
            if _is_hidden(row, call):
                raise Forbidden(f"this caller may not end the claim of {kind} {row.name}")
            self._drop(row)
        return call.request.shard, 0

    def _elsewhere(self, kind: str, call: Call[ClaimName]) -> tuple[int, int]:
        """Record a claim for this shard, or its end. Return a number other than 0 to refuse the end
        of a claim that was used."""
        request, own = call.request, self._versions.shard
        row = self._core.claims.get((kind, request.name))
        if is_in_use(self._core, kind, request.name):
            return own, request.number
        if row is not None and _is_over(row, request.number):
            if not request.over:
                raise Conflict(
                    f"another client has claimed the {kind} name {request.name}; try again"
                )
            return own, 0
        new_row = ClaimRow(
            kind, request.name, request.topic, own, request.number, call.now.now_ms, request.over
        )
        if row is None:
            self._check_room()
        if row is None or row != new_row._replace(at_ms=row.at_ms) or self._is_old(row, call):
            self._put(new_row)
        return own, 0 if request.over else request.number

    @staticmethod
    def _is_old(row: ClaimRow, call: Call[ClaimName]) -> bool:
        """Return whether the claim has to be written again before it expires."""
        return call.now.now_ms - row.at_ms > CLAIM_KEPT_MS // 2

    def _check_room(self) -> None:
        count = len(self._core.claims)
        if count >= CLAIMS_MAX:
            raise Overloaded(f"{count} names are claimed; the limit is {CLAIMS_MAX} (CLAIMS_MAX)")

    def _put(self, row: ClaimRow) -> None:
        engine = self._parts.border.act()
        engine.core.claims[CLAIM.key(row)] = row
        engine.core.put_record(CLAIM, row)

    def _drop(self, row: ClaimRow) -> None:
        drop_claims(self._parts, (row,))


def drop_claims(parts: Parts, rows: Iterable[ClaimRow]) -> None:
    """End these unused claims, except those that have changed since they were read."""
    core: Any = parts.border.act().core
    for row in rows:
        if core.claims.get(CLAIM.key(row)) == row:
            del core.claims[CLAIM.key(row)]
            core.drop_record(CLAIM, row)


def key_of_named(row: ClaimRow) -> RecordKey:
    """Return the record key of the schedule or transaction with the claimed name."""
    if row.of == SCHEDULE_NAMES:
        return SCHEDULE, row.name
    return TRANSACTION, (row.name, HEADER_PART)


def old_claims(core: Core, now_ms: int) -> tuple[list[ClaimRow], dict[int, list[ClaimRow]]]:
    """Return the expired claims: the unused ones for this shard, and, by shard, those whose use
    another shard must check."""
    here, elsewhere = list[ClaimRow](), dict[int, list[ClaimRow]]()
    for row in core.claims.values():
        if abs(now_ms - row.at_ms) <= CLAIM_KEPT_MS:
            continue
        if row.shard != core.versions.shard:
            elsewhere.setdefault(row.shard, []).append(row)
        elif row.is_over or not is_in_use(core, row.of, row.name):
            here.append(row)
    return here, elsewhere
