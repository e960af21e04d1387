"""Scenes: what a verb is asked with in a place where that makes sense, and what must come of it.

    @scene("cancel", cli="cancel {ids[0]}")
    def cancel(stage):
        [task] = stage.enqueue()                            # what has to be there before
        yield {"ids": (task,)}, [["#0", "cancelled"]]       # the values, and the answer
        assert stage.state(task) == "cancelled"             # what must be true afterwards

A scene is played once for each way in which the verb can be asked (``ways.py``), each time on a
stage of its own: a topic that nobody else has. What is asked before and after goes over a
connection of the stage's. In answers the stage's names have no prefix, and ids are ``#0``, ``#1``,
in the order in which they were seen; an expected answer names what must be in it.

Other values, or other words for the same, are variants, ``@scene("cancel", "one", …)``.

    @refusal("cancel_bulk", "not_found")
    def no_bulk(stage):
        return {"bulk": stage.name("none")}

is asked in each way, too, and must be refused so.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.raw import Raw
from tickwheel.api.policies import IfPending, Retry
from tickwheel.api.shapes import Answer
from tickwheel.api.tasks import Failure, TaskOutcome
from tickwheel.api.verb import Verb
from tickwheel.api.verbs import VERBS
from tickwheel.client.delivery import Delivery
from tickwheel.client.tasks import Receipt, Receipts
from tickwheel.errors import from_wire
from tickwheel.sync import Delivery as SyncDelivery

if TYPE_CHECKING:
    from verbs.house import House

DAY_MS = 86_400_000
Values = dict[str, Any]
"""Fields of a request by their names, in the form of the wire."""
Play = Callable[["Stage"], Generator[tuple[Values, Any], None, None]]
Python = str | Callable[[Any, Values], Any]


@dataclass(frozen=True)
class Saying:
    """How a verb is said where that does not follow from its declaration."""

    frame: Callable[[Values], tuple[Any, ...]] | None = None
    """The fields of its frame."""
    means: Callable[[Any], Any] | None = None
    """What of the answer over TCP is the same in all ways."""
    http: str | tuple[str, str] = ""
    """METHOD and path; where a key's tasks have another one than ids: that, and that of ids."""
    is_of_http: bool = False
    """Whether HTTP alone has it in this form."""
    body: Callable[[Values], Any] | None = None
    """The body over HTTP."""
    reply: Callable[[Any], Any] | None = None
    """What the answer over HTTP means as an answer over TCP."""
    python: Python | None = None
    """The client's method that takes the values as keywords, or a call of its own."""
    gives: Callable[[Any], Any] | None = None
    """What the client makes of an answer over TCP."""
    cli: str = ""
    """The command: ``{name}`` is a value, ``[name: text]`` a part for a value that is there."""
    shows: Callable[[Any], Any] | None = None
    """What the command shows of an answer over TCP, a list of its lines."""


@dataclass(frozen=True)
class Scene:
    """The scene of a verb."""

    verb: Verb
    play: Play
    saying: Saying


@dataclass(frozen=True)
class Refusal:
    """What a verb refuses, and with which code."""

    scene: str
    """Scene that provides the words."""
    code: str
    values: Callable[[Stage], Values]
    cli: bool
    """Whether the command of the scene can say it."""


SCENES: dict[str, Scene] = {}
"""Name of a verb → its scene."""
VARIANTS: dict[str, Scene] = {}
"""More scenes: the same verb with other values, or said in other words."""
REFUSALS: list[Refusal] = []


def scene(name: str, variant: str = "", /, **saying: Any) -> Callable[[Play], Play]:
    """The scene of a verb, and how it is said where no declaration says that: see ``Saying``. With
    ``variant`` one more of them."""
    scenes, key = (VARIANTS, f"{name}: {variant}") if variant else (SCENES, name)

    def keep(play: Play) -> Play:
        assert key not in scenes, f"{key} has two scenes"
        scenes[key] = Scene(VERBS[name], play, Saying(**saying))
        return play

    return keep


def refusal(
    name: str, code: str, *, cli: bool = True
) -> Callable[[Callable[[Stage], Values]], Any]:
    """Values with which a verb, or a variant of it, is refused with this code."""

    def keep(values: Callable[[Stage], Values]) -> Any:
        REFUSALS.append(Refusal(name, code, values, cli))
        return values

    return keep


# --- where scenes are played ---------------------------------------------------------------------

_numbers = itertools.count(1)
ID_MIN = 1 << 42
"""Ids are larger; no moment of the clock of tests is."""
UNKNOWN = 1 << 62
"""The id of no task."""
_ID = re.compile(r"\d{13,19}")


class Stage:
    """Names that nobody else has, and what scenes do before and after."""

    def __init__(self, house: House, raw: Raw) -> None:
        self.house = house
        self._raw = raw
        self.prefix = f"s{next(_numbers)}."
        self.topic, self.group = self.name("t"), "g"
        self._seen: dict[int, str] = {}

    def name(self, word: str) -> str:
        """A name of this stage alone."""
        return f"{self.prefix}{word}"

    def ask(self, name: str, /, **values: Any) -> Any:
        """The daemon's answer to a declared verb."""
        return self.say(VERBS[name], *elements(VERBS[name], values))

    def say(self, verb: Verb, *fields: Any) -> Any:
        """The daemon's answer to the frame of a verb."""
        assert verb.frame is not None
        answer = self._raw.call(verb.frame, *fields)
        if len(answer) > 3:
            raise from_wire(answer[2], answer[3])
        return answer[2]

    # --- what scenes need ------------------------------------------------------------------------

    def enqueue(self, count: int = 1, *, delay_ms: int = DAY_MS, **options: Any) -> list[int]:
        """Enqueue `count` tasks with numbers as bodies, and return their ids."""
        tasks = [(self.topic, b"%d" % n, delay_ms, options) for n in range(count)]
        answer = self.say(VERBS["enqueue"], self._raw.request + 1, tasks)
        self.house.settle()
        return [self.seen(item) for item in answer[1]]

    def seen(self, task_id: int) -> int:
        """The id, which answers show by its place among those that were seen."""
        self._seen.setdefault(task_id, f"#{len(self._seen)}")
        return task_id

    def make_group(self, **settings: Any) -> None:
        """Its group, with these settings."""
        self.ask("create_group", topic=self.topic, group=self.group, **settings)

    def pull(self, count: int = 1) -> list[tuple[int, int, int]]:
        """Deliveries of its group: (id, epoch, attempt)."""
        fields = (self.topic, self.group, count, 0, None)
        epoch, _, deliveries = self.say(VERBS["pull"], *fields)
        return [(delivery[0], epoch, delivery[1]) for delivery in deliveries]

    def deliver(self, count: int = 1, **options: Any) -> list[tuple[int, int, int]]:
        """Enqueue and deliver `count` tasks to the group."""
        self.make_group()
        self.enqueue(count, delay_ms=0, **options)
        deliveries = self.pull(count)
        assert len(deliveries) == count
        return deliveries

    @contextmanager
    def subscribed(self) -> Iterator[None]:
        """While somebody is subscribed to its group."""
        with Raw(self.house.port, token=self.house.tokens["stage"], client="stage") as raw:
            raw.call(VERBS["subscribe"].frame or 0, 1, self.topic, self.group, 5, None)
            yield

    def bury(self, count: int = 1, **options: Any) -> list[int]:
        """Make `count` dead letters of the group and return their ids."""
        receipts = [(*item, "bad") for item in self.deliver(count, **options)]
        self.say(VERBS["reject"], self.topic, self.group, receipts)
        return [receipt[0] for receipt in receipts]

    def hold(self, *keys: str) -> list[int]:
        """The ids of tasks that failed, so that their order keys are held."""
        self.make_group(order_failure="hold", order_attempts=1)
        ids = [self.enqueue(delay_ms=0, order_key=key)[0] for key in keys]
        receipts = [(*delivery, None, "why") for delivery in self.pull(len(keys))]
        self.say(VERBS["nack"], self.topic, self.group, receipts)
        self.house.settle()
        return ids

    def prepare(self, name: str, count: int = 1, *, count_from: str = "enqueue") -> str:
        """Prepare a transaction with `count` tasks."""
        halves = [(self.topic, b"half", DAY_MS)] * count
        name = self.name(name)
        self.say(VERBS["prepare"], name, self.name("payments"), 1, halves, {"from": count_from})
        return name

    def state(self, task_id: int) -> str:
        """Where a task stands."""
        [found] = self.ask("look_up", ids=(task_id,))
        return str(found["state"])

    # --- answers that can be compared ------------------------------------------------------------

    def plain(self, value: Any) -> Any:
        """A value without what only this stage, or this way of asking, has."""
        if isinstance(value, Answer):
            self._check_fields(value)
        value = _as_tcp_has_it(value)
        if isinstance(value, Mapping):
            result = {self._text(name): self.plain(one) for name, one in value.items()}
            return {name: one for name, one in result.items() if one is not None}
        if isinstance(value, (list, tuple)):
            return [self.plain(item) for item in value]
        if isinstance(value, str):
            return self._text(value)
        return self._of_id(value) if type(value) is int and value >= ID_MIN else value

    def _check_fields(self, answer: Answer) -> None:
        """The fields of an answer say what the daemon's map says."""
        for field in answer.fields():
            value, raw = getattr(answer, field.name), answer.raw.get(field.name)
            if isinstance(value, (Retry, IfPending)):
                assert value == type(value).of(raw), (field.name, answer)
            elif raw is not None:
                assert self.plain(value) == self.plain(raw), (field.name, answer)

    def _text(self, text: str) -> str:
        """A text without this stage's prefix, with ids by their places."""
        return _ID.sub(self._shown, text.replace(self.prefix, ""))

    def _shown(self, found: re.Match[str]) -> str:
        number = int(found[0])
        return self._of_id(number) if number >= ID_MIN else found[0]

    def _of_id(self, number: int) -> str:
        return self._seen[self.seen(number)]


def _as_tcp_has_it(value: Any) -> Any:
    """What a client, or HTTP, makes of an answer, as it was; bytes are text."""
    if isinstance(value, Answer):
        return value.raw
    if isinstance(value, Receipt):
        return value.id
    if isinstance(value, Receipts):
        return value.ids
    if isinstance(value, (Delivery, SyncDelivery)):
        return value.id, value.attempt, value.body
    if isinstance(value, TaskOutcome) and value.due_ms is None:
        return value[:2]
    if isinstance(value, Mapping) and value.keys() == set(Failure._fields):
        return [value[name] for name in Failure._fields]
    return value.decode() if isinstance(value, bytes) else value


def elements(verb: Verb, values: Values) -> tuple[Any, ...]:
    """The elements of a declared verb's frame behind its number and the request's."""
    assert verb.request is not None, f"the frame of {verb.name} is written by hand"
    fields = verb.request.to_frame(values)
    more = values.keys() - {field.name for field in verb.request.fields()}
    if more and verb.request.options():  # which the verb does not know
        fields = (*fields[:-1], fields[-1] | {name: values[name] for name in more})
    if not verb.word:
        return fields
    sharing = [item for item in VERBS.values() if item.frame is verb.frame]
    some = any(item.request is not None and item.request.options() for item in sharing)
    place, *rest = fields
    return (place, verb.word, *(rest or [None] * some))


def differences(expected: Any, found: Any, at: str = "answer") -> Iterator[str]:
    """Where not all that is expected is found, and what is there."""
    if callable(expected):
        if not expected(found):
            yield f"{at} is {found!r:.300}"
    elif isinstance(expected, dict) and isinstance(found, dict):
        for name, one in expected.items():
            yield from differences(one, found.get(name), f"{at}.{name}")
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(expected) != len(found):
            yield f"{at} has {len(found)} elements, not {len(expected)}: {found!r:.500}"
        for index, (one, its) in enumerate(zip(expected, found, strict=False)):
            yield from differences(one, its, f"{at}[{index}]")
    elif expected != found:
        yield f"{at} is {found!r:.300}, not {expected!r:.300}"
