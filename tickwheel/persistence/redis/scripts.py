"""The Lua scripts, each made of the files in ``lua/``: those that apply a batch (at once, or staged
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
