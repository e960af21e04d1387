"""Names that are unique for the daemon, where there are several shards.

A schedule and a transaction are in the shard of their tasks' keys, and their names have a home,
shard crc32(name) mod N, which is another one as a rule. Whoever makes one *claims* its name at home
first (``ClaimRow``), and makes it where home says: the shard of the first claim. With one shard
there is nothing to claim. Invariants:

* What is made in a shard is named at home before: home refuses a name that is claimed for another
  shard, and another shard what was not claimed.
* A claim of which nothing was made ends in the shard that it was made for, before it ends at home:
  from then on nothing is made under it, however late a request comes. So the next one who claims
  the name goes on, wherever the one before has stopped.
* A claim ends by itself when it is ``CLAIM_KEPT_MS`` old and that shard has nothing of the name
  (``following.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tickwheel.errors import BadRequest, Conflict, Forbidden, Overloaded
from tickwheel.model.kinds import (
    CLAIM,
    HEADER_PART,
    OF_SCHEDULE,
    OF_TRANSACTION,
    SCHEDULE,
    TRANSACTION,
    ClaimRow,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel.api.schedules import ClaimName
    from tickwheel.engine.state import Core
    from tickwheel.model.kinds import RecordKey
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.shard.parts import Parts

CLAIMS_MAX: Final = 1_000_000
"""Claims that one shard keeps."""
CLAIM_KEPT_MS: Final = 600_000
"""A claim of which nothing was made ends after so long; no request is under way for longer."""


def is_in_use(core: Core, of: str, name: str) -> bool:
    """Whether this shard has a schedule, or a transaction, of this name."""
    if of == OF_SCHEDULE:
        return name in core.schedule_heap.known
    return name in core.transaction_registry.known


def check_new_name(core: Core, of: str, name: str, claim: int | None = None) -> None:
    """Check that this shard may make what has this name, which it does not know. ``claim``: the
    number of the claim, where the request says it. Raises Conflict."""
    versions = core.versions
    if versions.shards == 1:
        return
    found, home = core.claims.get((of, name)), versions.home_of(name)
    if home == versions.shard:
        if found is not None:
            raise Conflict(
                f"{of} {name} is in shard {found.shard}, or is about to be; its tasks would be in"
                f" shard {home}: give them the keys of the one that is there, or end it first"
            )
        return
    if found is not None and _is_over(found, claim):
        raise Conflict(f"somebody else uses the name of {of} {name} meanwhile; try again")
    if claim is None and found is None:
        raise Conflict(
            f"{of} {name} is new in shard {versions.shard}, and its name has its home in shard"
            f" {home}: ask a client that knows all shards, or the HTTP API of all"
        )


def _is_over(found: ClaimRow, number: int | None) -> bool:
    """Whether nothing may be made under the claim of this number; None: under the newest. Home
    gives them in ascending order."""
    if number is None or number == found.number:
        return found.is_over
    return number < found.number


class Naming:
    """The operations on claims."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._core = parts.core
        self._versions = parts.core.versions

    def claim_schedule(self, ask: Ask[ClaimName]) -> None:
        """Claim the name of a schedule; the answer says in which shard it is. Raises Conflict,
        Forbidden, Overloaded."""
        self._claim(OF_SCHEDULE, ask)

    def claim_transaction(self, ask: Ask[ClaimName]) -> None:
        """Claim the name of a transaction; the answer says in which shard it is. Raises Conflict,
        Forbidden, Overloaded."""
        self._claim(OF_TRANSACTION, ask)

    def _claim(self, of: str, ask: Ask[ClaimName]) -> None:
        asked, own = ask.request, self._versions.shard
        if asked.shard >= self._versions.shards:
            raise BadRequest(f"shard is {asked.shard}; there are {self._versions.shards} shards")
        home = self._versions.home_of(asked.name)
        if ask.only is not None and not ask.only(asked.topic):
            raise Forbidden(f"names of topic {asked.topic} are not this caller's to claim")
        if home == own:
            found = self._end(of, ask) if asked.over else self._at_home(of, ask)
        elif asked.shard == own and asked.number:
            found = self._elsewhere(of, ask)
        else:
            raise Conflict(f"the home of {of} {asked.name} is shard {home}, and this is {own}")
        shard, number = found
        self._parts.committer.answer(ask, {"shard": shard, "number": number})

    def _at_home(self, of: str, ask: Ask[ClaimName]) -> tuple[int, int]:
        asked, now_ms, own = ask.request, ask.now.now_ms, self._versions.shard
        if is_in_use(self._core, of, asked.name):
            return own, 0
        found = self._core.claims.get((of, asked.name))
        if found is None:
            if asked.shard == own:
                return own, 0
            self._check_room()
            number = self._parts.border.act().core.ids.take(1, now_ms)
            found = ClaimRow(of, asked.name, asked.topic, asked.shard, number, now_ms)
            self._put(found)
        elif self._is_old(found, ask):
            self._put(found._replace(at_ms=now_ms))
        return found.shard, found.number

    def _end(self, of: str, ask: Ask[ClaimName]) -> tuple[int, int]:
        """End a claim at home, if it is there yet."""
        found = self._core.claims.get((of, ask.request.name))
        if found is not None and found.number == ask.request.number:
            if ask.only is not None and not ask.only(found.topic):
                raise Forbidden(f"the name of {of} {found.name} is not this caller's")
            self._drop(found)
        return ask.request.shard, 0

    def _elsewhere(self, of: str, ask: Ask[ClaimName]) -> tuple[int, int]:
        """Take note of a claim for this shard, or that it is over, unless something was made of it:
        then the number is not 0."""
        asked, own = ask.request, self._versions.shard
        found = self._core.claims.get((of, asked.name))
        if is_in_use(self._core, of, asked.name):
            return own, asked.number
        if found is not None and _is_over(found, asked.number):
            if not asked.over:
                raise Conflict(
                    f"somebody else uses the name of {of} {asked.name} meanwhile; try again"
                )
            return own, 0
        row = ClaimRow(of, asked.name, asked.topic, own, asked.number, ask.now.now_ms, asked.over)
        if found is None:
            self._check_room()
        if found is None or found != row._replace(at_ms=found.at_ms) or self._is_old(found, ask):
            self._put(row)
        return own, 0 if asked.over else asked.number

    @staticmethod
    def _is_old(found: ClaimRow, ask: Ask[ClaimName]) -> bool:
        """Whether a claim has to be written anew, so that it lasts."""
        return ask.now.now_ms - found.at_ms > CLAIM_KEPT_MS // 2

    def _check_room(self) -> None:
        count = len(self._core.claims)
        if count >= CLAIMS_MAX:
            raise Overloaded(f"{count} names are claimed; the limit is {CLAIMS_MAX} (CLAIMS_MAX)")

    def _put(self, row: ClaimRow) -> None:
        engine = self._parts.border.act()
        engine.core.claims[CLAIM.key(row)] = row
        engine.core.open.effects.put(CLAIM, row)

    def _drop(self, row: ClaimRow) -> None:
        drop_claims(self._parts, (row,))


def drop_claims(parts: Parts, rows: Iterable[ClaimRow]) -> None:
    """End these claims, of which nothing was made, unless they have changed."""
    core: Any = parts.border.act().core
    for row in rows:
        if core.claims.get(CLAIM.key(row)) == row:
            del core.claims[CLAIM.key(row)]
            core.open.effects.drop(CLAIM, CLAIM.key(row))


def key_of_named(row: ClaimRow) -> RecordKey:
    """The key of the record of the schedule, or transaction, that has the name."""
    if row.of == OF_SCHEDULE:
        return SCHEDULE, row.name
    return TRANSACTION, (row.name, HEADER_PART)


def old_claims(core: Core, now_ms: int) -> tuple[list[ClaimRow], dict[int, list[ClaimRow]]]:
    """The claims that may end by themselves: those for this shard of which it has nothing, and
    those for each other shard, which has to be looked at."""
    here, elsewhere = list[ClaimRow](), dict[int, list[ClaimRow]]()
    for row in core.claims.values():
        if abs(now_ms - row.at_ms) <= CLAIM_KEPT_MS:
            continue
        if row.shard != core.versions.shard:
            elsewhere.setdefault(row.shard, []).append(row)
        elif row.is_over or not is_in_use(core, row.of, row.name):
            here.append(row)
    return here, elsewhere
