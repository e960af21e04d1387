"""What a failed ack means for `tickwheel subscribe`."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tickwheel.cli.call import Call
from tickwheel.cli.output import Output
from tickwheel.cli.subscribe import Receiver
from tickwheel.client.delivery import Delivery, DeliveryBatch
from tickwheel.client.subscription import Subscription
from tickwheel.errors import ClientClosed, SendTimeout, TickwheelError

IDS = (1, 2, 3)


class _Channel:
    """Every ack of the first task fails; the others succeed."""

    def __init__(self, error: TickwheelError) -> None:
        self._error = error

    def add(self, task_id: int, attempt: int) -> asyncio.Future[str]:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if task_id == IDS[0]:
            future.set_exception(self._error)
        else:
            future.set_result("acked")
        return future


class _Leases:
    def hold(self, delivery: Delivery, lost: object) -> None:
        """Nothing is lost here."""

    def drop(self, delivery: Delivery) -> None:
        """Nothing was held."""

    def close(self) -> list[Delivery]:
        return []


class _Deliveries:
    """What a subscription gives."""

    def __init__(self, error: TickwheelError) -> None:
        items: list[Any] = [(task_id, 1, 0, b"", {}) for task_id in IDS]
        batch = DeliveryBatch(cast(Any, None), cast(Any, _Channel(error)), "t", "g", 1, 0, items)
        self._left = [Delivery(batch, item) for item in items]

    def keep_leases(self) -> _Leases:
        return _Leases()

    def __aiter__(self) -> _Deliveries:
        return self

    async def __anext__(self) -> Delivery:
        await asyncio.sleep(0)  # the acks before it are answered
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop(0)


async def _receive(error: TickwheelError) -> None:
    receiver = Receiver(Call(None, None, Output(as_json=True)), None, settles=True)
    await receiver.run(cast(Subscription, _Deliveries(error)), None, asyncio.Event())


async def test_an_ack_without_an_answer_does_not_end_a_subscriber(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await _receive(SendTimeout("ACK: no answer"))
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == len(IDS)
    assert "no answer" in shown.err


async def test_an_ack_that_can_never_be_answered_ends_it() -> None:
    with pytest.raises(ClientClosed):
        await _receive(ClientClosed("closed"))
