"""The engine rig with the daemon's recorder: what it notes, kept as batches become durable."""

from __future__ import annotations

from typing import Any

import msgpack

from support.engine_rig import NOW_MS, Rig
from tickwheel.engine.engine import Engine
from tickwheel.engine.state import EngineConfig
from tickwheel.history.daemon import Notes, Recorder
from tickwheel.history.lines import policy_map

Record = list[Any]


class RecordingRig(Rig):
    """``history`` holds (epoch, record) of everything that is durable, in order."""

    def __init__(self, config: EngineConfig, now_ms: int = NOW_MS) -> None:
        self.history: list[tuple[int, Record]] = []
        super().__init__(config, now_ms)

    def new_engine(self) -> Engine:
        self.recorder = Recorder(self.epoch, lambda: self.now, lambda source: "p", bodies=True)
        return Engine(self.config, self.epoch, self.rows.id_mark, self.now_ms, self.recorder)

    def apply(self) -> None:
        super().apply()
        assert self.core.sealed is not None
        notes = self.core.sealed.notes
        if isinstance(notes, Notes):
            self.history += [(self.epoch, spooled(r)) for r in self.recorder.records(notes)]


def spooled(record: Record) -> Record:
    """As it comes out of a spool."""
    packed = msgpack.packb(record, default=policy_map)
    result: Record = msgpack.unpackb(packed, strict_map_key=False)
    return result
