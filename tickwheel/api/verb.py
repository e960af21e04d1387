"""The declaration of one verb: number, name, request, answer, right, path, errors.

Everything that is common to all verbs is derived from it: the decoding and checking of frames,
rights, the audit log, HTTP routes and the OpenAPI document, the parsing of answers, the methods of
the clients, the tables of the documents. This module contains no verbs; ``tasks.py`` and its
siblings declare them, and ``verbs.py`` collects them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from tickwheel.api.frames import FrameType
    from tickwheel.api.shapes import Request


class Right(StrEnum):
    """The rights of a principal. No right includes another."""

    PRODUCE = "produce"
    CONSUME = "consume"
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


class Of(StrEnum):
    """The topics for which a verb needs its right."""

    NAMED = "the named topic"
    EACH_TASK = "the topic of each new task"
    FOUND = "the named topic, if any; results of other topics are left out"
    SELECTED = "the named topic, or the topics of the named ids"
    ANY = "all topics"


class Routing(StrEnum):
    """The shards that a client asks if there are several."""

    ONE = "the shard that the client is connected to"
    IDS = "the shards of the named ids; all shards if a key is named"
    TASK = (
        "the shard of the named id; all shards if a key is named. The answer names a shard that is"
        " unreachable"
    )
    BASIS = "the shard to which the new object belongs"
    NAME = "all shards; the one that has the named object answers"
    ALL = "all shards at once; their answers are merged"
    TURN = "all shards, one after another, until the first error; their answers are merged"
    TOGETHER = "all shards, one after another; if one refuses, the others are cancelled"
    HOME = "the home shard of the topic's settings, which decides, then all reachable others"
    HOME_LAST = (
        "all shards, one after another, the home shard of the topic's settings last; none acts if"
        " one would refuse"
    )
    CLAIM = "the home shard of the name, then the shard for which it is claimed"
    PAGES = "all shards, page by page, in the order of the list"
    EACH = "each shard separately; the client merges them"


class Home(StrEnum):
    """The shard that grants a unique name. It depends on nothing else in the request."""

    NAME = "shard crc32(name) mod N, which knows the shard that uses the name (CLAIM)"
    KEY = "shard crc32(key) mod N, which remembers the request before another shard gets a task"
    TOPIC = "shard crc32(topic) mod N, which the others follow"
    FIRST = "shard 0, then the others in turn; the first refusal ends the request"
    ALL = "all shards; none starts if one refuses"


class Unique(NamedTuple):
    """The field of a verb's request whose value is unique in the daemon."""

    name: str
    """The name of the field."""
    home: Home


class Need(NamedTuple):
    """The right that a verb needs, and the topics for which it needs the right."""

    right: Right
    of: Of


class Audit(StrEnum):
    """Whether a verb is written to the audit log."""

    NEVER = "never"
    ALWAYS = "always"
    OF_OTHERS = "unless the owner decides"


class Method(NamedTuple):
    """A method of the Python clients that is generated for a verb."""

    name: str
    gives: str = ""
    """The field of the answer that the method returns; "" returns the whole answer."""
    fixed: tuple[tuple[str, Any], ...] = ()
    """Fields of the request that have a fixed value, and are not keyword arguments of the
    method."""
    fields: type[Request] | None = None
    """The fields that are keyword arguments of the method; None means all fields of the request."""
    text: str = ""
    """The method's docstring; "" means the verb's text."""
    word: str = ""
    """The type of the word that the method returns for a single task. If the verb takes a
    selection, the method returns a word if it is called with one id. Otherwise the method takes
    ``task_id`` instead of ``ids``. "" means that the method always returns the whole outcome."""


_NONE: Final = ("",)


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb. ``errors`` are its error codes, without the codes that every request can get."""

    name: str
    """The name of the verb, and also of the operation and the HTTP handler."""
    request: type[Request] | None
    """The type of the request. None if the frame is decoded by hand (``server/tcp``) and checked by
    the operation."""
    answer: Any
    """The type of the answer; None means nil."""
    need: Need | None
    """The right that the verb needs. None if every connected caller may use the verb, because it
    concerns only the caller."""
    summary: str
    """One line, for tables and the OpenAPI document."""
    text: str = ""
    """The docstring of the client's method."""
    frame: FrameType | None = None
    """The type of the frame. None for a verb that exists only over HTTP."""
    word: str = ""
    """The frame's second element, which distinguishes verbs that share ``frame``."""
    path: str = ""
    """METHOD and path over HTTP; "" if there is no HTTP route, or its handler is written by
    hand."""
    tag: str = ""
    """The section of the OpenAPI document."""
    status: int = 200
    """The HTTP status of success."""
    errors: tuple[str, ...] = ()
    audit: Audit = Audit.NEVER
    changes: bool = False
    """Whether the verb changes state."""
    standby: bool = False
    """Whether a standby also answers the verb."""
    public: bool = False
    """Whether the verb needs no login over HTTP, because its request contains a proof."""
    repeat: bool = True
    """Whether a client sends the request again although it may have been executed, if its fields
    allow it (``Request.is_repeatable``)."""
    prompt: bool = True
    """Whether a missing answer means that the connection is dead."""
    extra_s: float = 0.0
    """Number of seconds that the answer may take in addition to the usual time."""
    routing: Routing | None = None
    """The shards that are asked; None for a verb of HTTP only, which asks one shard."""
    unique: Unique | None = None
    """For a verb that creates a named object: the name, and the shard that grants it."""
    bulk: str = ""
    """The kind of bulk operation that has the same effect on all matching tasks of a topic. The
    method then takes tasks or a selection."""
    pages: str = ""
    """The field of the answer that contains the items of a page. The method is then an iterator."""
    methods: tuple[Method, ...] = ()
    command: str = ""
    """The command of the command line that is derived from the verb: its words, and in capitals the
    fields that are arguments. Other fields are options. "" means that no command is derived."""
    fields: str = ""
    """The fields of a frame that is decoded by hand, for the protocol's document."""
    result: str = ""
    """The answer in the protocol's document, if its type does not describe it fully."""

    @property
    def request_type(self) -> type[Request]:
        """The request of a verb that has one."""
        assert self.request is not None, self.name
        return self.request

    @property
    def has_custom_arguments(self) -> bool:
        return self.request is None
