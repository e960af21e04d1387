"""The declaration of one verb: number, name, request, answer, right, path, errors.

Everything that is the same for all verbs follows from it: the decoding and the checks of frames,
rights, the audit log, HTTP routes and the OpenAPI document, the parsing of answers, the methods of
the clients, the tables of the documents. Knows no verb; the families do (``tasks.py``, …), and
``verbs.py`` has them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from tickwheel.api.frames import FrameType
    from tickwheel.api.shapes import Request


class Right(StrEnum):
    """What a principal may be allowed to do. No right includes another."""

    PRODUCE = "produce"
    CONSUME = "consume"
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


class Of(StrEnum):
    """For which of its topics a verb needs its right."""

    NAMED = "the topic that is named"
    EACH_TASK = "the topic of each new task"
    FOUND = "the topics of what is found: anything else is as if it were not there"
    SELECTED = "the topic that is named, or those of what is found by ids"
    ANY = "all topics"


class Over(StrEnum):
    """Which shards a client asks a verb, where there are several."""

    ONE = "the shard that the client is connected to"
    IDS = "the shards of the ids that are named; all, where a key is named instead"
    TASK = (
        "the shard of the id that is named; all, where a key is named instead. One that is away is"
        " part of the answer"
    )
    BASIS = "the shard where what is made has its home"
    NAME = "all: the one that has what is named answers"
    ALL = "all at once; their answers are made one"
    TURN = "all, one after the other, up to the first error; their answers are made one"
    TOGETHER = "all, one after the other; where one refuses, what has begun is cancelled"
    HOME = "the home of the topic's settings, which decides, then all others that are there"
    HOME_LAST = (
        "all, one after the other, the home of the topic's settings last; up to the first error"
    )
    CLAIM = "the home of the name, then the shard that it is claimed for"
    PAGES = "all, page by page, in the order of the list"
    EACH = "each has its own, which the client makes one"


class Home(StrEnum):
    """Which shard decides who gets a name that is unique for the daemon, where there are several.
    It is the same one for everybody, whatever else the request says."""

    NAME = "shard crc32(name) mod N, which says in which shard the name is in use (CLAIM)"
    KEY = "shard crc32(key) mod N, which remembers the request before any other has a task of it"
    TOPIC = "shard crc32(topic) mod N, which the others follow"
    FIRST = "shard 0: all are told in turn, and the first refusal ends it"
    ALL = "all: none has begun when one refuses"


class Unique(NamedTuple):
    """What of a verb's request is unique for the daemon."""

    name: str
    """The field that has the name."""
    home: Home


class Need(NamedTuple):
    """The right that a verb needs, and for which topics."""

    right: Right
    of: Of


class Audit(StrEnum):
    """Whether a verb has its line in the log of what operators did."""

    NEVER = "never"
    ALWAYS = "always"
    OF_OTHERS = "unless the owner decides"


class Method(NamedTuple):
    """A method of the Python clients that is generated for a verb."""

    name: str
    gives: str = ""
    """The field of the answer that the method returns; "": the whole answer."""
    fixed: tuple[tuple[str, Any], ...] = ()
    """Fields of the request that have a fixed value here instead of a keyword."""
    fields: type[Request] | None = None
    """The fields that the method has; None: all of the request's."""
    text: str = ""
    """What ``help`` says; "": the verb's own text."""
    word: str = ""
    """The type of the word that the method returns where it names one task: for a verb that takes
    a selection, when the task is named alone; for another on several tasks, the method takes one,
    as ``task_id`` instead of ``ids``. "": the whole outcome."""


_NONE: Final = ("",)


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb. ``errors`` are the codes beside those that every request may get."""

    name: str
    """Also the name of the operation, and of the handler over HTTP."""
    request: type[Request] | None
    """None: its frame is read by hand (``server/tcp``), and checked by its operation."""
    answer: Any
    """The type of the answer; None: nil."""
    need: Need | None
    """None: whoever may speak at all may say this; it is about the caller itself."""
    summary: str
    """One line, for tables and the OpenAPI document."""
    text: str = ""
    """What ``help`` of the client's method says: sentences, with what it raises."""
    frame: FrameType | None = None
    """None: over HTTP only."""
    word: str = ""
    """Which of the verbs that share ``frame`` it is: the frame's second place."""
    path: str = ""
    """METHOD and path over HTTP; "": over TCP only, or its handler is written by hand."""
    tag: str = ""
    """The part of the OpenAPI document."""
    status: int = 200
    """The HTTP status of success."""
    errors: tuple[str, ...] = ()
    audit: Audit = Audit.NEVER
    changes: bool = False
    """Whether it changes anything."""
    standby: bool = False
    """Whether a standby also answers it."""
    public: bool = False
    """Whether it needs no login over HTTP, because its request proves itself."""
    repeat: bool = True
    """Whether a client asks again when the connection broke before the answer."""
    prompt: bool = True
    """Whether silence after it means a dead connection."""
    extra_s: float = 0.0
    """How much longer than usual an answer may take."""
    over: Over | None = None
    """Which shards are asked; None: over HTTP only, where each shard is by itself."""
    unique: Unique | None = None
    """For a verb that creates something with a name: the name, and the shard that grants it."""
    bulk: str = ""
    """The kind of bulk operation that does the same to all of a topic that matches; its method
    takes the one or the other."""
    pages: str = ""
    """The field of the answer that has the items of a page; its method is an iterator."""
    methods: tuple[Method, ...] = ()
    command: str = ""
    """The command line's command that this verb is by itself: its words, and in capitals the fields
    that are arguments; all others are options. "": none."""
    fields: str = ""
    """The fields of a frame that is read by hand, for the protocol's document."""
    result: str = ""
    """Its answer there; also where a declared answer needs more words than its type."""

    @property
    def asked(self) -> type[Request]:
        """What a verb that is declared whole is asked with."""
        assert self.request is not None, self.name
        return self.request

    @property
    def is_by_hand(self) -> bool:
        return self.request is None
