"""The engine: one object that owns a shard's memory, made of its parts.

Commands and times go in; outcomes, deliveries and effects come out. It reads no clock, opens
nothing, awaits nothing and logs nothing. The shard seals the open batch, commits it, and says
``landed`` or ``refused``; meanwhile commands fill the next batch.
"""

from __future__ import annotations

from collections import deque

from tickwheel.engine.bulk import Bulks
from tickwheel.engine.coalescing import Coalescer
from tickwheel.engine.dead_letters import DeadLetters
from tickwheel.engine.delivery import Delivery
from tickwheel.engine.enqueue import Intake
from tickwheel.engine.events import Recorder
from tickwheel.engine.groups import Closing, Grouping
from tickwheel.engine.held_keys import KeyControl
from tickwheel.engine.ownership import Ownership
from tickwheel.engine.recovery import Recovery
from tickwheel.engine.resets import Resets
from tickwheel.engine.schedules import Schedules
from tickwheel.engine.settlement import Settlement
from tickwheel.engine.state import ROW_OVERHEAD_BYTES, Batch, Core, EngineConfig, strip_ended
from tickwheel.engine.tasks import Control
from tickwheel.engine.topic_closing import TopicClosing
from tickwheel.engine.transactions import Transactions
from tickwheel.model.kinds import SESSION
from tickwheel.model.records import ProgressRow, ProgressState


class Engine:
    """One shard in memory. Its parts share ``core``, and their verbs are the engine's commands."""

    def __init__(
        self,
        config: EngineConfig,
        epoch: int,
        id_mark: int,
        now_ms: int,
        recorder: Recorder | None = None,
        key_seed: bytes = b"",
    ) -> None:
        """``key_seed``: the seed of key hashes that the store gave when it was opened."""
        self.core = core = Core(config, epoch, id_mark, now_ms, recorder, key_seed)
        self.intake = Intake(core)
        self.ownership = ownership = Ownership(core)
        self.dead_letters = dead_letters = DeadLetters(core, ownership)
        self.settlement = Settlement(core, ownership, dead_letters)
        self.control = Control(core, ownership, dead_letters)
        self.delivery = Delivery(core, ownership, self.settlement)
        self.grouping = Grouping(core, ownership)
        self.closing = Closing(core, ownership, dead_letters, self.settlement, self.grouping)
        self.topic_closing = TopicClosing(
            core, self.grouping, self.closing, self.control, self.delivery
        )
        self.coalescer = Coalescer(core, ownership, self.intake, self.control)
        self.schedules = Schedules(core, self.intake, self.control)
        self.transactions = Transactions(core, self.intake)
        self.bulks = Bulks(core, self.control)
        self.intake.undo_bulks = self.bulks.undo
        self.resets = Resets(core, self.intake, self.bulks)
        self.key_control = KeyControl(core, dead_letters)
        self.recovery = Recovery(core, ownership, dead_letters, self.grouping)

    def seal(self, now_ms: int, mono_ms: int, *, checkpoint_all: bool = False) -> Batch | None:
        """Close the open batch for the store; None when there is nothing to commit."""
        core = self.core
        if core.sealed is not None:
            raise AssertionError("a batch is with the store already")
        self._checkpoint_leases(now_ms, mono_ms, checkpoint_all)
        batch, effects = core.open, core.open.effects
        for key in core.dirty_sessions:
            session = core.sessions.get(key)
            if session is not None:
                effects.change(SESSION, session.changes())
        core.dirty_sessions.clear()
        if batch.is_empty():
            return None
        effects.enqueued_bytes = batch.staged_bytes - len(effects.enqueued) * ROW_OVERHEAD_BYTES
        strip_ended(effects)
        effects.id_mark = core.ids.last
        effects.position_ms = core.wheel.position_ms
        if core.recorder is not None:
            batch.notes = core.recorder.cut()
        core.sealed = batch
        core.open = Batch()
        return batch

    def _checkpoint_leases(self, now_ms: int, mono_ms: int, everything: bool) -> None:
        core = self.core
        limit_ms = mono_ms if everything else mono_ms - core.config.lease_checkpoint_ms
        progress, unsaved = core.open.effects.progress, core.unsaved
        while unsaved and unsaved[0].since_mono_ms <= limit_ms:
            lease = unsaved.popleft()
            if not lease.live or lease.checkpointed:
                continue
            lease.checkpointed = True
            progress[lease.id, lease.group.name] = ProgressRow(
                lease.id,
                lease.group.name,
                ProgressState.IN_FLIGHT,
                lease.attempt,
                now_ms + lease.deadline_mono_ms - mono_ms,
                lease.epoch,
                *lease.past,
            )

    def next_checkpoint_mono_ms(self) -> int | None:
        """When the oldest delivery that no batch holds has to be written; None: there is none."""
        unsaved = self.core.unsaved
        while unsaved and (not unsaved[0].live or unsaved[0].checkpointed):
            unsaved.popleft()
        if not unsaved:
            return None
        return unsaved[0].since_mono_ms + self.core.config.lease_checkpoint_ms

    def wake_in_ms(self, now_ms: int, mono_ms: int) -> int | None:
        """Milliseconds until something beside the wheel is due; None: nothing is."""
        core = self.core
        times = [
            at_ms - mono_ms
            for at_ms in (
                core.expiry_mono_ms,
                self.next_checkpoint_mono_ms(),
                self.delivery.next_token_mono_ms(),
                min((keep.until_mono_ms for keep in core.keeps.values()), default=None),
            )
            if at_ms is not None
        ]
        planned_ms = core.schedule_heap.next_ms()
        if planned_ms is not None:
            times.append(planned_ms - now_ms)
        asked_ms = core.transaction_registry.wait_ms(mono_ms)
        if asked_ms is not None:
            times.append(asked_ms)
        end_ms = core.lifetimes.next_ms(now_ms)
        looked_up_max = core.config.lapsing_max + core.missing_apart
        if end_ms is not None and len(core.lifetimes.fired) < looked_up_max:
            times.append(end_ms - now_ms)
        return min(times, default=None)

    def sweep(self, now_ms: int, mono_ms: int) -> None:
        """Once in a while: forget producer sessions that nobody will resume, and deliveries that
        need no checkpoint any more."""
        core = self.core
        for key in core.sessions.expired(now_ms):
            self.forget_session(key)
        self.transactions.sweep(mono_ms)
        self.bulks.sweep(now_ms)
        core.orderings.sweep()
        if len(core.unsaved) > 2 * core.in_flight:
            # While the store is away deliveries end and come again, behind one that lasts.
            live = (lease for lease in core.unsaved if lease.live and not lease.checkpointed)
            core.unsaved = deque(live)

    def forget_session(self, key: bytes) -> None:
        rows = self.core.sessions.forget(key)
        self.core.open.effects.change(SESSION, dict.fromkeys(rows))
