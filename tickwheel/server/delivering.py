"""Writing deliveries: the engine's values to the owners of the subscriptions they are for."""

from __future__ import annotations

from tickwheel.clock import Clock
from tickwheel.engine.engine import Engine
from tickwheel.engine.topics import Dispatch, Item
from tickwheel.protocol.codec import encode
from tickwheel.server.lateness import Lateness
from tickwheel.server.wire import delivery_items


class Delivering:
    """Also counts how late they are, and any that would be early."""

    def __init__(self, engine: Engine, clock: Clock, lateness: Lateness) -> None:
        self._core = engine.core
        self._settlement = engine.settlement
        self._clock = clock
        self._lateness = lateness

    def write(self, dispatch: Dispatch, now_ms: int) -> None:
        subscriber, items = dispatch
        late_ms = [
            now_ms - row.due_ms for row, attempt in items if attempt == 1 or row.due_ms > now_ms
        ]
        if late_ms and min(late_ms) < 0:
            self._core.totals.early += sum(late < 0 for late in late_ms)
            late_ms = [late for late in late_ms if late >= 0]
        if late_ms:
            self._lateness.note(subscriber.group.topic.name, late_ms)
        deliver = subscriber.owner.deliver  # type: ignore[attr-defined]  # the shell's own
        try:
            deliver(self._core.epoch, now_ms, delivery_items(items))
        except Exception:
            fit = [item for item in items if self._is_fit(dispatch, item, now_ms)]
            if len(fit) == len(items):
                raise  # it is not about a task
            if fit or subscriber.once:
                deliver(self._core.epoch, now_ms, delivery_items(fit))

    def _is_fit(self, dispatch: Dispatch, item: Item, now_ms: int) -> bool:
        """Whether it can be written; if not, its task goes to the dead letters, unless it ended
        with this delivery. The others of its frame must not suffer, nor the daemon end."""
        row, attempt = item
        try:
            encode(delivery_items([item]))
        except Exception as error:
            group = dispatch.subscriber.group
            lease = self._settlement.current(group, row.id, self._core.epoch, attempt)
            if lease is not None:
                self._settlement.unfit(lease, error, now_ms)
            else:
                self._core.faults.append((f"task {row.id}, delivered once", error))
            return False
        return True

    def hand_over(self, dispatches: list[Dispatch]) -> None:
        """At-most-once deliveries whose end is durable now."""
        now_ms = self._clock.read().now_ms
        for dispatch in dispatches:
            if dispatch.subscriber.gone_mono_ms is not None:
                self._core.totals.dropped_once += len(dispatch.items)
            else:
                # The clock may have gone back since they were taken.
                self.write(dispatch, max(now_ms, *(row.due_ms for row, _ in dispatch.items)))

    def tell_cut(self) -> None:
        """Subscriptions that the engine ended."""
        cut, self._core.cut = self._core.cut, []
        for subscriber, code, message in cut:
            subscriber.owner.cut(code, message)  # type: ignore[attr-defined]  # the shell's own
