"""The frames of verbs that are declared whole: each is read as its declaration says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tickwheel.api.shapes import named
from tickwheel.api.verb import Verb
from tickwheel.errors import TickwheelError
from tickwheel.server import checks
from tickwheel.server.shard.callers import Ask
from tickwheel.server.tcp import decode

if TYPE_CHECKING:
    from tickwheel.api.shapes import Request
    from tickwheel.clock import Now
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.shard.operations.standby import StandbyOperations
    from tickwheel.server.tcp.shared import Handler, Peer


def declared(
    operations: Operations | StandbyOperations, verbs: Iterable[Verb]
) -> dict[int, Handler]:
    """The handlers of those of the verbs that are declared whole, by the number of their frame."""
    found: dict[int, Handler] = {}
    words: dict[int, dict[str, Verb]] = {}
    for verb in verbs:
        if verb.request is None or verb.frame is None:
            continue
        if verb.word:
            words.setdefault(int(verb.frame), {})[verb.word] = verb
        else:
            found[int(verb.frame)] = _handler(operations, verb)
    return found | {number: _by_word(operations, some) for number, some in words.items()}


def _handler(operations: Operations | StandbyOperations, verb: Verb) -> Handler:
    request, operation = _request(verb), getattr(operations, verb.name)
    limits = operations.limits

    def handle(peer: Peer, frame: Frame, now: Now) -> None:
        number = decode.request_number(frame[1])
        try:
            asked = request.of_frame(frame[2:], limits)
        except TickwheelError as error:
            operations.unreadable(peer.caller, verb.name, error)
            raise
        operation(Ask(peer.caller, number, asked, now))

    return handle


def _by_word(operations: Operations | StandbyOperations, verbs: Mapping[str, Verb]) -> Handler:
    """The handler of a frame that several verbs share: the second place says which it is."""
    most = 2 + any(_request(verb).options() for verb in verbs.values())
    places = ("name", "verb", "options")[:most]
    handlers = {word: (_request(v), _handler(operations, v)) for word, v in verbs.items()}

    def handle(peer: Peer, frame: Frame, now: Now) -> None:
        decode.arity(frame, most, ", ".join(places))
        word = frame[3]
        if type(word) is not str or word not in handlers:
            checks.wrong("verb", f"one of {', '.join(handlers)}", word)
        request, handler = handlers[word]
        rest = frame[4:]
        if not request.options():
            named(rest[0] if rest else None, ())
            rest = ()
        handler(peer, (*frame[:3], *rest), now)

    return handle


def _request(verb: Verb) -> type[Request]:
    assert verb.request is not None, verb.name
    return verb.request
