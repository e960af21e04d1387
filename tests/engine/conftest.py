"""Most tests of the engine need one rig, which is counted again after each of them."""

from __future__ import annotations

from support.engine_recount import recounted
from support.engine_rig import Rig

rig = recounted(Rig)
