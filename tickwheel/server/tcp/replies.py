"""What is answered once a batch is durable, or refused: frames for whoever asked."""

from __future__ import annotations

from typing import Any, Protocol

from tickwheel.engine.state import Batch
from tickwheel.errors import TickwheelError
from tickwheel.model.records import ID_STEP
from tickwheel.protocol.codec import encode, encode_all
from tickwheel.protocol.frames import FrameType

_OK = int(FrameType.OK)


class Peer(Protocol):
    """Where a reply goes; a closed one swallows it."""

    def send(self, data: bytes) -> None: ...


def release(batch: Batch) -> None:
    """Every reply that rests on the batch, in one piece for each peer."""
    confirmed: dict[object, list[tuple[Any, ...]]] = {}
    for address, _, (request, first, count, accepted_ms) in batch.staged:
        ids = (first,) if count == 1 else _ids(first, count)
        frame = (_OK, request, (accepted_ms, ids))
        if address in confirmed:
            confirmed[address].append(frame)
        else:
            confirmed[address] = [frame]
    confirmed.pop(None, None)
    chunks = {peer: [encode_all(frames)] for peer, frames in confirmed.items()}
    for peer, data in batch.replies:
        chunks.setdefault(peer, []).append(data)
    for peer, parts in chunks.items():
        peer.send(b"".join(parts))  # type: ignore[attr-defined]  # every address is a Peer


def enqueue_reply(request: int, first: int, count: int, accepted_ms: int) -> bytes:
    """The OK frame of an ENQUEUE."""
    return encode((_OK, request, (accepted_ms, _ids(first, count))))


def send_error(peer: object, request: int, error: TickwheelError) -> None:
    data = encode((FrameType.ERROR, request, error.code, error.message))
    peer.send(data)  # type: ignore[attr-defined]  # every address is a Peer


def _ids(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count * ID_STEP, ID_STEP))
