from __future__ import annotations

from server.http.rig import HttpRig
from support.shard_rig import started

rig = started(HttpRig)
