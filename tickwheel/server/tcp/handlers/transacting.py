"""PREPARE, COMMIT, ROLLBACK, CHECKS and the two that look, and CHECK, which the daemon sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tickwheel.api.frames import FrameType
from tickwheel.protocol.codec import encode
from tickwheel.server import checks
from tickwheel.server.shard.operations.transacting import LIST_OPTIONS, PREPARE_OPTIONS
from tickwheel.server.tcp import decode

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.model.transactions import TransactionRow
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.tcp.shared import Peer

_CHECK = int(FrameType.CHECK)


class Transacting:
    """The frames about transactions."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def prepare(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 5, "transaction, group, part, tasks, options")
        request = decode.request_number(frame[1])
        transaction, group, part, tasks = frame[2:6]
        options = checks.options(frame[6], PREPARE_OPTIONS)
        self._operations.prepare(
            peer.caller, request, transaction, group, part, tasks, options, now
        )

    def commit(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "transaction")
        request = decode.request_number(frame[1])
        self._operations.commit_transaction(peer.caller, request, frame[2], now)

    def rollback(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "transaction")
        request = decode.request_number(frame[1])
        self._operations.rollback_transaction(peer.caller, request, frame[2], now)

    def list_transactions(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "options")
        request = decode.request_number(frame[1])
        options = checks.options(frame[2], LIST_OPTIONS)
        self._operations.list_transactions(peer.caller, request, options)

    def show(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "transaction")
        request = decode.request_number(frame[1])
        self._operations.show_transaction(peer.caller, request, frame[2])

    def answer_checks(self, peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, 1, "groups")
        request = decode.request_number(frame[1])
        sink = CheckFrames(peer)
        self._operations.answer_checks(peer.caller, request, frame[2], sink, now)


class CheckFrames:
    """A sink that makes CHECK frames of questions about transactions."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def ask(self, group: str, rows: Sequence[TransactionRow]) -> None:
        asked = [(row.id, row.began_ms, row.tasks, row.checks + 1) for row in rows]
        self._peer.send(encode((_CHECK, group, asked)))
