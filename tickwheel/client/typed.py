"""Typed tasks: a function's parameters are the arguments of its tasks.

``task`` makes a ``TypedTask`` of a function: producers enqueue its arguments, a worker calls it
with them. ``Schema`` is between the two: arguments as JSON or msgpack, checked on both sides, with
versions of their shape. What it needs beside msgpack is the extra ``typed``.

Invariants: what was enqueued has been read back by the same rules as a handler's; what does not fit
a handler's parameters never reaches its function, and is no retry, but a dead letter that says
where and why.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Union,
    Unpack,
    cast,
    overload,
)

from tickwheel.api.times import Duration, duration_ms
from tickwheel.client.client import Client
from tickwheel.client.delivery import Delivery
from tickwheel.client.encodings import content_of, extra
from tickwheel.client.jobs import Unfit, check_awaits, check_function
from tickwheel.client.keywords import TaskKeywords
from tickwheel.client.requests import SYNCHRONOUS, needs_loop
from tickwheel.client.task_options import Task
from tickwheel.client.tasks import Receipt, TaskChecker, refuse_unknown
from tickwheel.errors import BadRequest, shown

if TYPE_CHECKING:
    from tickwheel.client.jobs import Handler

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
Format = Literal["json", "msgpack"]
Upcaster = Callable[[dict[str, Any]], dict[str, Any]]
"""Arguments of one version of a schema → those of the next."""
VERSION_MAX = 1_000_000


class TypedTaskOptions(TaskKeywords, total=False):
    """What may be said of a typed task beside its arguments."""

    delay: Duration | None
    """Due so much later: seconds, a timedelta, or text such as "30m"."""
    at: datetime | None
    """Due at this time, which has a zone."""
    timeout: Duration | None
    """How long the enqueue may take."""


class BlockingClient(Protocol):
    """The synchronous client, as a typed task needs it."""

    def enqueue(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        timeout: Duration | None = None,
        **options: Unpack[TaskKeywords],
    ) -> Receipt:
        """Store a task durably."""
        ...


class TypedArguments(Generic[P]):
    """The tasks of one topic whose arguments are the parameters of a function."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._said: TypedTaskOptions = {}

    @property
    def topic(self) -> str:
        """The topic of its tasks."""
        return self._definition.topic

    @property
    def encoding(self) -> str:
        """What the bodies of its tasks are, such as ``json;v=2``."""
        return self._definition.schema.encoding

    def options(self, **options: Unpack[TypedTaskOptions]) -> Self:
        """The same with what is said of its tasks: ``options(delay="30m", key="order-42")``. Each
        goes on from what was said before. Raises BadRequest for a delay that is none."""
        refuse_unknown(options, TypedTaskOptions, "options")
        if options.get("encoding") is not None:
            raise BadRequest("encoding is said by the typed task itself; leave it out")
        if (delay := options.get("delay")) is not None:  # a wrong one fails where it is written
            options["delay"] = duration_ms(delay, "delay") / 1000
        found = copy.copy(self)
        found._said = {**self._said, **options}
        return found

    def body(self, *args: P.args, **kwargs: P.kwargs) -> bytes:
        """The arguments as the body of a task, for schedules, say. Raises BadRequest when they do
        not fit the parameters."""
        return self._definition.body(args, kwargs)

    def task(self, *args: P.args, **kwargs: P.kwargs) -> Task:
        """A Task for ``enqueue_many`` and transactions. Raises as ``body``."""
        said: dict[str, Any] = {k: it for k, it in self._said.items() if k != "timeout"}
        body = self._definition.body(args, kwargs)
        return Task(self.topic, body, **{**said, "encoding": self.encoding})


class BlockingTask(TypedArguments[P]):
    """A typed task for a synchronous client: ``close_order.using(client).enqueue(order_id=42)``."""

    def __init__(self, definition: Definition, client: BlockingClient) -> None:
        super().__init__(definition)
        self._blocking = client

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Enqueue a task with these arguments. Raises BadRequest, before anything is sent, when
        they do not fit; else as the client's ``enqueue``."""
        body, said = self._definition.body(args, kwargs), cast("Any", self._said)
        return self._blocking.enqueue(self.topic, body, **{**said, "encoding": self.encoding})


def _awaited(function: F) -> F:
    return needs_loop(
        function,
        "enqueue of a typed task",
        f"call .using(client).enqueue(…) with a synchronous client; {SYNCHRONOUS}",
    )


class _Asynchronous(TypedArguments[P]):
    """A typed task for the asynchronous client."""

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        self._client: Client | None = None
        functools.update_wrapper(cast("Any", self), definition.function)

    @overload
    def using(self, client: Client) -> Self: ...

    @overload
    def using(self, client: BlockingClient) -> BlockingTask[P]: ...

    def using(self, client: Client | BlockingClient) -> Self | BlockingTask[P]:
        """The same, enqueued by this client instead of the worker's. By a synchronous client,
        ``enqueue`` returns the receipt."""
        if isinstance(client, Client):
            found = copy.copy(self)
            found._client = client
            return found
        if not callable(getattr(client, "enqueue", None)):
            raise BadRequest(f"using takes a client, not {shown(client)}")
        blocking = BlockingTask[P](self._definition, client)
        blocking._said = self._said
        return blocking

    @_awaited
    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Enqueue a task with these arguments, by the client of the worker that it is registered
        with, or by that of ``using``. Raises BadRequest, before anything is sent, when they do not
        fit, or at once where no event loop runs; else as ``Client.enqueue``."""
        body, said = self._definition.body(args, kwargs), cast("Any", self._said)
        client = self._client or self._definition.client()
        return await client.enqueue(self.topic, body, **{**said, "encoding": self.encoding})

    def __repr__(self) -> str:
        return f"<typed task {self._definition.name} of {self.topic}>"


class TypedTask(_Asynchronous[P], Generic[P, R]):
    """A function whose calls can be enqueued; ``task`` and ``Worker.task`` make it.

    ``await close_order.enqueue(order_id=42)`` stores a task with these arguments; a worker that it
    is registered with calls the function with them. A call of the object itself is one of the
    function, at once and here.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast("R", self._definition.function(*args, **kwargs))


class DeliveryTask(_Asynchronous[P], Generic[P, R]):
    """A ``TypedTask`` of a function whose first parameter is the ``Delivery``: the worker fills it
    in; ``enqueue`` does not have it, and a call of the object does."""

    def __call__(self, delivery: Delivery, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast("R", self._definition.function(delivery, *args, **kwargs))


class Typing(Protocol):
    """What makes a typed task of a function."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Delivery, P], R], /
    ) -> DeliveryTask[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> TypedTask[P, R]: ...


def task(
    topic: str,
    *,
    version: int = 1,
    upcasters: Mapping[int, Upcaster] | None = None,
    encoding: Format = "json",
) -> Typing:
    """``@task("orders.close")`` on a function makes it a ``TypedTask``, which producers enqueue and
    ``Worker.register`` lets a worker work on.

    Its parameters need annotations that msgspec knows, or pydantic's models; a first one of type
    ``Delivery`` is filled in. ``version``: of the shape of the arguments; ``upcasters``: for each
    older one that may still come, a function from its arguments (as a dict) to those of the next.
    ``encoding``: "json" or "msgpack". Raises BadRequest for what cannot be a typed task.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        names = sys._getframe(1).f_locals  # of annotations that are local to the caller
        return define(function, names, topic, version, upcasters, encoding)

    return cast("Typing", decorate)


def define(
    function: Callable[..., Any],
    names: Mapping[str, Any],
    topic: str,
    version: int,
    upcasters: Mapping[int, Upcaster] | None,
    encoding: Format,
) -> Any:
    """The typed task of a function; ``names``: those that its annotations may use beside its
    module's. Raises BadRequest."""
    definition = Definition(function, names, topic, version, upcasters or {}, encoding)
    return (DeliveryTask if definition.takes_delivery else TypedTask)(definition)


class Definition:
    """What is the same for all that is said of one typed task: function, topic, schema."""

    def __init__(
        self,
        function: Callable[..., Any],
        names: Mapping[str, Any],
        topic: str,
        version: int,
        upcasters: Mapping[int, Upcaster],
        encoding: Format,
    ) -> None:
        check_function(function, "a typed task")
        self.function = function
        self.topic = TaskChecker().name(topic, "topic")
        self.name: str = getattr(function, "__qualname__", repr(function))
        self.client_of_worker: Callable[[], Client] | None = None
        """Says which client enqueues: that of the first worker that it was registered with."""
        parameters = _parameters(function, names, self.name)
        self.takes_delivery = bool(parameters) and parameters[0].annotation is Delivery
        if self.takes_delivery:
            parameters = parameters[1:]
        if not inspect.iscoroutinefunction(function) and self.takes_delivery:
            check_awaits(function, self.name)
        _check_parameters(parameters, self.name)
        self._signature = inspect.Signature(parameters)
        self.schema = Schema(topic, self.name, parameters, version, upcasters, encoding)

    def client(self) -> Client:
        """The client of its worker. Raises BadRequest when it has none."""
        if self.client_of_worker is None:
            raise BadRequest(
                f"{self.name} has no client: register it with a worker, or call"
                " .using(client).enqueue(…)"
            )
        return self.client_of_worker()

    def body(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """The arguments of a call as a body. Raises BadRequest naming what does not fit."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as problem:
            raise BadRequest(f"{self.name}: {problem}") from None
        try:
            return self.schema.encode(bound.arguments)
        except Unfit as problem:
            raise BadRequest(f"{self.name}: {problem}") from None

    @property
    def handler(self) -> Handler:
        """The function of a delivery that calls the function with its arguments."""
        function, schema, takes_delivery = self.function, self.schema, self.takes_delivery

        async def handle(delivery: Delivery) -> Any:
            arguments = schema.arguments(delivery)
            first = (delivery,) if takes_delivery else ()
            return await function(*first, **arguments)

        def handle_in_thread(delivery: Delivery) -> Any:
            arguments = schema.arguments(delivery)
            first = (delivery,) if takes_delivery else ()
            return function(*first, **arguments)

        made = handle if inspect.iscoroutinefunction(function) else handle_in_thread
        made.__qualname__ = self.name
        return made


def _parameters(
    function: Callable[..., Any], names: Mapping[str, Any], name: str
) -> list[inspect.Parameter]:
    try:
        signature = inspect.signature(function, locals=names, eval_str=True)
    except (NameError, AttributeError, SyntaxError, TypeError, ValueError) as problem:
        raise BadRequest(f"{name}: its annotations cannot be read: {problem}") from None
    return list(signature.parameters.values())


def _check_parameters(parameters: list[inspect.Parameter], name: str) -> None:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for one in parameters:
        if one.kind not in by_name:
            raise BadRequest(f"{name}: parameter {one.name} has no name in a call; give it one")
        if one.annotation is inspect.Parameter.empty:
            raise BadRequest(f"{name}: parameter {one.name} has no annotation")
        if one.annotation is Delivery:
            raise BadRequest(f"{name}: parameter {one.name}, the delivery, must be the first one")


class NewerVersion(Exception):
    """The arguments have a newer shape than this program knows: one that is newer itself can work
    on them, so the task is tried again."""


class Schema:
    """Arguments by name as bytes, and back."""

    def __init__(
        self,
        topic: str,
        name: str,
        parameters: list[inspect.Parameter],
        version: int,
        upcasters: Mapping[int, Upcaster],
        encoding: Format,
    ) -> None:
        if encoding not in ("json", "msgpack"):
            raise BadRequest(f"encoding must be 'json' or 'msgpack', not {shown(encoding)}")
        self._topic, self._version, self._format = topic, _checked_version(version), encoding
        self._upcasters = _checked_upcasters(upcasters, version)
        self.encoding = encoding if version == 1 else f"{encoding};v={version}"
        self._msgspec = msgspec = extra("typed", "msgspec", "a typed task")
        self._names = [one.name for one in parameters]
        try:
            self._arguments = msgspec.defstruct(
                "Arguments", [_field(one, msgspec) for one in parameters],
                forbid_unknown_fields=True, kw_only=True,
            )  # fmt: skip
            self._readers = {
                "json": msgspec.json.Decoder(self._arguments, dec_hook=self._read_other),
                "msgpack": msgspec.msgpack.Decoder(self._arguments, dec_hook=self._read_other),
            }
        except (TypeError, ValueError) as problem:
            raise BadRequest(f"{name}: its parameters cannot be read: {problem}") from None
        writers = {"json": msgspec.json.Encoder, "msgpack": msgspec.msgpack.Encoder}
        self._writer = writers[encoding](enc_hook=_write_other)
        self._no_fit = (
            msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError,
        )  # fmt: skip

    # --- at the enqueue -------------------------------------------------------------------------

    def encode(self, arguments: Mapping[str, Any]) -> bytes:
        """The arguments as a body, read back as a handler will. Raises Unfit."""
        try:
            body: bytes = self._writer.encode(arguments)
        except _CANNOT_WRITE as problem:
            self._blame(arguments, problem)
        try:
            found = self._readers[self._format].decode(body)
        except self._no_fit as problem:
            raise _unfit(problem) from None
        for name, value in arguments.items():
            if not _is_same(value, got := getattr(found, name)):
                raise Unfit(
                    f"$.{name}", f"{shown(value)} would come to the handler as {shown(got)}"
                )
        return body

    def _blame(self, arguments: Mapping[str, Any], problem: Exception) -> NoReturn:
        """Raise Unfit for the first argument that cannot be written."""
        for name, value in arguments.items():
            try:
                self._writer.encode(value)
            except _CANNOT_WRITE as its_problem:
                raise Unfit(f"$.{name}", str(its_problem)) from None
        raise Unfit("$", str(problem)) from None

    # --- in a handler ---------------------------------------------------------------------------

    def arguments(self, delivery: Delivery) -> dict[str, Any]:
        """The arguments in a delivery. Raises Unfit for what no handler of this shape can take,
        NewerVersion for what a newer one can."""
        body = delivery.body
        how, version = self._what(delivery.encoding)
        try:
            if version == self._version:
                found = self._readers[how].decode(body)
            else:
                found = self._converted(getattr(self._msgspec, how).decode(body), version)
        except self._no_fit as problem:
            raise _unfit(problem) from None
        unset = self._msgspec.UNSET
        pairs = ((name, getattr(found, name)) for name in self._names)
        return {name: value for name, value in pairs if value is not unset}

    def _what(self, encoding: str | None) -> tuple[str, int]:
        """What a body is, "json" or "msgpack", and the version of its schema."""
        step = content_of(encoding)
        if step is None:  # of a producer that says nothing
            return self._format, 1
        if step.name not in self._readers:
            raise Unfit("$", f"expected json or msgpack, got {encoding}")
        said = step.said.get("v", "1")
        if not said.isdecimal() or not 1 <= int(said[:9]) <= VERSION_MAX:
            raise Unfit("$", f"expected a version of 1 to {VERSION_MAX}, got {said}")
        version = int(said[:9])
        if version > self._version:
            raise NewerVersion(
                f"the task's arguments have version {version}, and this handler of {self._topic}"
                f" knows those up to {self._version}: a newer program can work on it"
            )
        return step.name, version

    def _converted(self, raw: Any, version: int) -> Any:
        """Arguments of an older version as those of this one."""
        if not isinstance(raw, dict):
            raise Unfit("$", f"expected object, got {type(raw).__name__}")
        for older in range(version, self._version):
            if older not in self._upcasters:
                raise Unfit("$", f"version {older} is not known any more: it has no upcaster")
            raw = self._upcasters[older](raw)
        return self._msgspec.convert(raw, self._arguments, dec_hook=self._read_other)

    # --- types that msgspec does not know -------------------------------------------------------

    def _read_other(self, kind: Any, value: Any) -> Any:
        """A value of one of pydantic's models."""
        model = _pydantic_model()
        if model is None or not isinstance(kind, type) or not issubclass(kind, model):
            raise NotImplementedError(f"{kind} is not a type that can be read")
        errors: Any = sys.modules["pydantic"].ValidationError
        try:
            return kind.model_validate_json(self._msgspec.json.encode(value))  # type: ignore[attr-defined]  # a model
        except errors as problem:
            first = problem.errors(include_url=False, include_input=False)[0]
            place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
            raise ValueError(f"{_BELOW}{place}: {first['msg']}") from None


_BELOW = "@"
"""Begins a reason that names a place below the one where it is reported."""
_CANNOT_WRITE = (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError)


def _field(parameter: inspect.Parameter, msgspec: Any) -> tuple[Any, ...]:
    """A field of the arguments; what has a default may be left out."""
    kind: Any = NoneType if parameter.annotation is None else parameter.annotation
    if parameter.default is inspect.Parameter.empty:
        return parameter.name, kind
    return parameter.name, Union[kind, msgspec.UnsetType], msgspec.UNSET  # noqa: UP007  # at run time


def _pydantic_model() -> Any:
    """The base of pydantic's models; None: nobody has imported it, so there are none."""
    pydantic = sys.modules.get("pydantic")
    return None if pydantic is None else pydantic.BaseModel


def _write_other(value: Any) -> Any:
    model = _pydantic_model()
    if model is not None and isinstance(value, model):
        return value.model_dump(mode="json")
    raise TypeError(f"a {type(value).__name__} cannot be written")


def _is_same(said: Any, read: Any) -> bool:
    """Whether a value that was read back is equal to the one that was written; NaN is to NaN."""
    if said == read or (said != said and read != read):  # noqa: PLR0124  # true of NaN alone
        return True
    if type(said) is not type(read):
        return False
    if isinstance(said, dict):
        return said.keys() == read.keys() and all(_is_same(said[n], read[n]) for n in said)
    if isinstance(said, (list, tuple)):
        return len(said) == len(read) and all(map(_is_same, said, read))
    kind = type(said)
    names: Any = getattr(kind, "__struct_fields__", getattr(kind, "__dataclass_fields__", ()))
    return bool(names) and all(_is_same(getattr(said, n), getattr(read, n)) for n in names)


def _unfit(problem: Exception) -> Unfit:
    """What msgspec says, with the place in front: "$.order_id", "expected int, got str"."""
    text, _, place = str(problem).rpartition(" - at `")
    if not text:
        text, place = str(problem), "$"
    place, below = place.rstrip("`"), ""
    if text.startswith(_BELOW):
        below, _, text = text.removeprefix(_BELOW).partition(": ")
    text = text.replace("`", "")
    return Unfit(place, text[:1].lower() + text[1:], below=below)


def _checked_version(version: Any) -> int:
    if type(version) is not int or not 1 <= version <= VERSION_MAX:
        raise BadRequest(f"version must be an integer of 1 to {VERSION_MAX}, not {shown(version)}")
    return version


def _checked_upcasters(upcasters: Any, version: int) -> dict[int, Upcaster]:
    for older, upcaster in upcasters.items():
        if type(older) is not int or not 1 <= older < version:
            raise BadRequest(f"upcasters are from versions below {version}, not {shown(older)}")
        if not callable(upcaster):
            raise BadRequest(f"upcasters: {older} must be a function, not {shown(upcaster)}")
    return dict(upcasters)
