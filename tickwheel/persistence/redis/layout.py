"""The keys of one shard in Redis, and how ids and names are written there.

Everything an operator sees with redis-cli is decided here and nowhere else; all keys of a shard
share a hash tag, so that Redis Cluster keeps them on one node. Layout 1, for the shard ``S`` =
``{tw:default:0}``:

| key | type | what |
|---|---|---|
| S:wheel | hash | epoch, owner, last (batch), position_ms, incarnation, format, id_mark, clean, … |
| S:store | zset | StoreQueue: every pending task; score: due, in milliseconds |
| S:task | hash | id → record (topic, body and all) |
| S:prepare | zset | PrepareQueue: id/group in flight or waiting for a retry; score: see below |
| S:progress | hash | id/group → record (exact deadline, attempt, failures) |
| S:touched | hash | id → the groups that have or had a row in progress or dead_record |
| S:dead | zset | id/group of every dead letter, score 0: ordered by id, then group |
| S:dead_record | hash | id/group → record |
| S:records | hash | kind and key → record: groups, sessions, schedules, … (model/kinds.py) |
| S:endings | list | how the newest tasks ended, a batch an element: "count:record" |
| S:stage:1 … | list | parts of a batch too large for one script; gone when it is applied |
| S:leader | string | who leads, with a time to live (not the store's; its name is kept free) |
| S:standbys | zset | who stands by; score: the server's uptime in seconds when it last said so |

Invariants: an id is 19 digits with leading zeros wherever it is stored, so that the order of the
bytes is the order of the ids. No number above 2^53 is ever a Lua number.

The wheel's field ``format`` holds the number of the layout. Whoever opens a shard of an older one
raises it, and older releases refuse the shard from then on. Its keys stay as they are: what a later
layout adds to it begins empty, and records carry versions of their own. (Shards from before the
first release have a field ``layout`` instead, and are refused.)

The Lua scripts, each made of the files in ``lua/``: those that apply a batch (at once, or staged
in parts, sealed, and applied), those that open, claim, close and rewrite a shard, those that read
one and write nothing, and those of ``tickwheel init`` and of the leader's lease.

Every script begins with the names of the keys, the fence and the first write. The traps of Lua
inside Redis (6.2 to 7, Valkey) ask for this, and every script keeps to it:

* No call gets more than 1,000 arguments (``unpack`` fails at about 8,000).
* A script is checked whole before its first write, because an error leaves the earlier writes.
  What Redis itself may refuse (no memory, read-only, no replicas) it refuses at the first
  write of a script and never later; ``begin`` makes that one harmless write.
* Without memory Redis refuses a script that begins with a growing command, and lets one pass
  that begins with DEL. So a batch that makes no task always goes through.
* Ids and epochs are compared as strings; numbers in Lua lose digits above 2^53.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from tickwheel.model.effects import RecordKey
from tickwheel.model.kinds import Kind
from tickwheel.model.records import ProgressRow, ProgressState
from tickwheel.persistence.codec import key_text, kind_of

LAYOUT = 1
ID_MAX = 2**63 - 1
RETRY_MAX = 999
"""The most failures that the last three digits of a score can say."""

NAMES = (
    "wheel", "store", "task", "prepare", "progress", "touched", "dead", "dead_record",
    "records", "endings", "scratch",
)  # fmt: skip
"""The keys in the order of scripts: KEYS[1] is the wheel. ``scratch`` never exists."""
TYPES = (
    "hash", "zset", "hash", "zset", "hash", "hash", "zset", "hash",
    "hash", "list", "string",
)  # fmt: skip
KEY = {name: str(i + 1).encode() for i, name in enumerate(NAMES)}
"""Name of a key → its number in a script, as operations name it."""

IN_PREPARE = frozenset((ProgressState.IN_FLIGHT, ProgressState.WAITING, ProgressState.HELD))


class Keys:
    """The key names of one shard."""

    def __init__(self, prefix: str, namespace: str, shard: int) -> None:
        self.shard = f"{{{prefix}:{namespace}:{shard}}}"
        self.all = tuple(f"{self.shard}:{name}".encode() for name in NAMES)
        self.named = dict(zip(NAMES, self.all, strict=True))
        self.leader = f"{self.shard}:leader".encode()
        self.standbys = f"{self.shard}:standbys".encode()

    def stage(self, part: int) -> bytes:
        """The key of part ``part``, from 1 on, of a large batch."""
        return f"{self.shard}:stage:{part}".encode()


def id_text(task_id: int) -> bytes:
    return b"%019d" % task_id


def member(task_id: int, group: str) -> bytes:
    """The name of one group's row of a task, in the PrepareQueue, progress and dead letters."""
    return b"%019d/%b" % (task_id, group_text(group))


def group_text(group: str) -> bytes:
    """A group's name as part of a member: line feeds, which separate groups, are escaped."""
    return group.replace("%", "%25").replace("\n", "%0A").encode()


def split_member(data: bytes) -> tuple[int, str]:
    task_id, _, group = data.partition(b"/")
    return int(task_id), group.decode().replace("%0A", "\n").replace("%25", "%")


def record_field(key: RecordKey) -> bytes:
    """The field of a record: its kind and the parts of its key, for an operator to read."""
    kind, its_key = key
    return f"{kind.name} {key_text(its_key)}".encode()


def kind_in(field: bytes) -> Kind[Any]:
    """The kind of the record in this field. Raises RecordUnreadable."""
    return kind_of(field.partition(b" ")[0].decode())


def prepare_score(row: ProgressRow) -> bytes:
    """The score in the PrepareQueue: the deadline's second * 1000 + failures (999 at most)."""
    return b"%d" % (row.at_ms // 1000 * 1000 + min(row.failed, RETRY_MAX))


@dataclass(frozen=True, slots=True)
class Script:
    """The text of a script, and the digest under which Redis caches it."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


_FOLDER = files(__package__) / "lua"


def _script(*names: str) -> Script:
    """The script made of these files; what the last one needs comes first."""
    return Script("".join(_FOLDER.joinpath(f"{name}.lua").read_text("utf-8") for name in names))


COMMIT = _script("keys", "fence", "apply", "commit")
STAGE = _script("keys", "fence", "stage")
SEAL = _script("keys", "fence", "seal")
APPLY_PART = _script("keys", "fence", "apply", "apply_part")

OPEN = _script("keys", "open")
CLAIM = _script("keys", "claim")
CLOSE = _script("keys", "fence", "close")
REWRITE = _script("keys", "rewrite")
RIGHTS = _script("keys", "rights")

READ = _script("keys", "sees", "read")
DEAD_PAGE = _script("keys", "sees", "dead_page")
HANDLES = _script("keys", "sees", "handles")

INIT_LOOK = _script("keys", "init_seen", "init_look")
INIT_LAY_OUT = _script("keys", "init_seen", "init_lay_out")

LEADER_LOOK = _script("leader", "leader_look")
LEADER_ACQUIRE = _script("leader", "leader_acquire")
LEADER_RENEW = _script("leader", "leader_renew")
LEADER_RELEASE = _script("leader", "leader_release")
