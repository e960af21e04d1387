"""Typed tasks: a function's parameters are the arguments of its tasks.

``task`` makes a ``TypedTask`` of a function: producers enqueue its arguments, and a worker calls
the function with them. ``Schema`` converts arguments to JSON or msgpack and back, checks them on
both sides and versions them. Its dependencies are the extra ``typed``.

Invariants: arguments are read back at the enqueue by the rules of the handler; arguments that do
not fit a handler's parameters never reach the function, and make a dead letter with the place and
the reason instead of a retry.
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
from tickwheel.client.sql import enqueue_command, write
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
"""Converts the arguments of one schema version to those of the next."""
VERSION_MAX = 1_000_000


class TypedTaskOptions(TaskKeywords, total=False):
    """Options of a typed task besides its arguments."""

    delay: Duration | None
    """Time until the task is due: seconds, a timedelta, or text such as "30m"."""
    at: datetime | None
    """Due time, with a time zone."""
    timeout: Duration | None
    """Maximum time of the enqueue."""


class BlockingClient(Protocol):
    """The part of the synchronous client that a typed task uses."""

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
        self._task_options: TypedTaskOptions = {}

    @property
    def topic(self) -> str:
        """The topic of the tasks."""
        return self._definition.topic

    @property
    def encoding(self) -> str:
        """The encoding of the bodies, such as ``json;v=2``."""
        return self._definition.schema.encoding

    def options(self, **options: Unpack[TypedTaskOptions]) -> Self:
        """Return a copy with these task options: ``options(delay="30m", key="order-42")``. Options
        set earlier are kept unless replaced. Raise BadRequest for an invalid delay."""
        refuse_unknown(options, TypedTaskOptions, "options")
        if options.get("encoding") is not None:
            raise BadRequest("encoding is set by the typed task; omit it")
        if (delay := options.get("delay")) is not None:  # checked here, not at the enqueue
            options["delay"] = duration_ms(delay, "delay") / 1000
        changed = copy.copy(self)
        changed._task_options = {**self._task_options, **options}
        return changed

    def body(self, *args: P.args, **kwargs: P.kwargs) -> bytes:
        """Return the arguments as the body of a task, for example for a schedule. Raise BadRequest
        if they do not fit the parameters."""
        return self._definition.body(args, kwargs)

    def task(self, *args: P.args, **kwargs: P.kwargs) -> Task:
        """Return a Task for ``enqueue_many`` and transactions. Raise errors like ``body``."""
        options: dict[str, Any] = {k: v for k, v in self._task_options.items() if k != "timeout"}
        body = self._definition.body(args, kwargs)
        return Task(self.topic, body, **{**options, "encoding": self.encoding})

    def enqueue_in(self, connection: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Enqueue a task with these arguments when the transaction of ``connection`` commits. Like
        ``tickwheel.sql.enqueue``; ``await`` it with an asynchronous connection."""
        return write(connection, enqueue_command(self.task(*args, **kwargs)))


class BlockingTask(TypedArguments[P]):
    """A typed task for a synchronous client: ``close_order.using(client).enqueue(order_id=42)``."""

    def __init__(self, definition: Definition, client: BlockingClient) -> None:
        super().__init__(definition)
        self._blocking = client

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Enqueue a task with these arguments. Raise BadRequest, before anything is sent, if the
        arguments do not fit; otherwise like the client's ``enqueue``."""
        body, options = self._definition.body(args, kwargs), cast("Any", self._task_options)
        return self._blocking.enqueue(self.topic, body, **{**options, "encoding": self.encoding})


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
        """Return a copy that this client enqueues, instead of the worker's client. With a
        synchronous client, ``enqueue`` blocks and returns the receipt."""
        if isinstance(client, Client):
            changed = copy.copy(self)
            changed._client = client
            return changed
        if not callable(getattr(client, "enqueue", None)):
            raise BadRequest(f"client must be a client, not {shown(client)}")
        blocking = BlockingTask[P](self._definition, client)
        blocking._task_options = self._task_options
        return blocking

    @_awaited
    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Enqueue a task with these arguments, using the client of ``using`` or of the worker that
        the task is registered with. Raise BadRequest, before anything is sent, if the arguments do
        not fit or no event loop runs; otherwise like ``Client.enqueue``."""
        body, options = self._definition.body(args, kwargs), cast("Any", self._task_options)
        client = self._client or self._definition.client()
        return await client.enqueue(self.topic, body, **{**options, "encoding": self.encoding})

    def __repr__(self) -> str:
        return f"<typed task {self._definition.name} of {self.topic}>"


class TypedTask(_Asynchronous[P], Generic[P, R]):
    """A function whose calls can be enqueued; ``task`` and ``Worker.task`` make it.

    ``await close_order.enqueue(order_id=42)`` stores a task with these arguments; a worker that the
    task is registered with calls the function with them. Calling the object calls the function
    directly.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast("R", self._definition.function(*args, **kwargs))


class DeliveryTask(_Asynchronous[P], Generic[P, R]):
    """A ``TypedTask`` of a function whose first parameter is the ``Delivery``. The worker passes
    the delivery; ``enqueue`` omits this parameter, and a direct call of the object requires it."""

    def __call__(self, delivery: Delivery, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast("R", self._definition.function(delivery, *args, **kwargs))


class Typing(Protocol):
    """A decorator that makes a typed task of a function."""

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
    """Decorate a function to make it a ``TypedTask``: ``@task("orders.close")``. Producers enqueue
    it, and ``Worker.register`` adds it to a worker.

    Its parameters need annotations that msgspec supports, or pydantic models; the worker passes a
    first parameter of type ``Delivery``. ``version``: the version of the arguments' schema;
    ``upcasters``: for each older version still in use, a function that converts its arguments (a
    dict) to the next version. ``encoding``: "json" or "msgpack". Raise BadRequest if the function
    cannot be a typed task.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        names = sys._getframe(1).f_locals  # for annotations that are local to the caller
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
    """Return the typed task of a function. ``names``: the caller's local names, which annotations
    can use besides those of the module. Raise BadRequest."""
    definition = Definition(function, names, topic, version, upcasters or {}, encoding)
    return (DeliveryTask if definition.takes_delivery else TypedTask)(definition)


class Definition:
    """The part of a typed task that no options change: function, topic, schema."""

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
        """Returns the client that enqueues: that of the first worker the task was registered
        with."""
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
        """Return the client of the task's worker. Raise BadRequest if it has none."""
        if self.client_of_worker is None:
            raise BadRequest(
                f"{self.name} has no client: register it with a worker, or call"
                " .using(client).enqueue(…)"
            )
        return self.client_of_worker()

    def body(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Return the arguments of a call as a body. Raise BadRequest naming an invalid
        argument."""
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
        """The handler that calls the function with the arguments of a delivery."""
        function, schema, takes_delivery = self.function, self.schema, self.takes_delivery

        async def handle(delivery: Delivery) -> Any:
            arguments = schema.arguments(delivery)
            first = (delivery,) if takes_delivery else ()
            return await function(*first, **arguments)

        def handle_in_thread(delivery: Delivery) -> Any:
            arguments = schema.arguments(delivery)
            first = (delivery,) if takes_delivery else ()
            return function(*first, **arguments)

        handler = handle if inspect.iscoroutinefunction(function) else handle_in_thread
        handler.__qualname__ = self.name
        return handler


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
    for parameter in parameters:
        if parameter.kind not in by_name:
            raise BadRequest(
                f"{name}: parameter {parameter.name} must not be positional-only or variadic"
            )
        if parameter.annotation is inspect.Parameter.empty:
            raise BadRequest(f"{name}: parameter {parameter.name} must have an annotation")
        if parameter.annotation is Delivery:
            raise BadRequest(
                f"{name}: parameter {parameter.name}, the delivery, must be the first parameter"
            )


class NewerVersion(Exception):
    """The arguments have a newer version than this program supports. A newer program can work on
    them, so the task is tried again."""


class Schema:
    """Converts arguments by name to bytes and back."""

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
        self._names = [parameter.name for parameter in parameters]
        try:
            self._arguments = msgspec.defstruct(
                "Arguments", [_field(parameter, msgspec) for parameter in parameters],
                forbid_unknown_fields=True, kw_only=True,
            )  # fmt: skip
            self._readers = {
                "json": msgspec.json.Decoder(self._arguments, dec_hook=self._read_other),
                "msgpack": msgspec.msgpack.Decoder(self._arguments, dec_hook=self._read_other),
            }
        except (TypeError, ValueError) as problem:
            raise BadRequest(f"{name}: its parameters have unsupported types: {problem}") from None
        writers = {"json": msgspec.json.Encoder, "msgpack": msgspec.msgpack.Encoder}
        self._writer = writers[encoding](enc_hook=_write_other)
        self._no_fit = (
            msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError,
        )  # fmt: skip

    # --- at the enqueue -------------------------------------------------------------------------

    def encode(self, arguments: Mapping[str, Any]) -> bytes:
        """Return the arguments as a body, after reading it back like a handler. Raise Unfit."""
        try:
            body: bytes = self._writer.encode(arguments)
        except _CANNOT_WRITE as problem:
            self._blame(arguments, problem)
        try:
            decoded = self._readers[self._format].decode(body)
        except self._no_fit as problem:
            raise _unfit(problem) from None
        for name, value in arguments.items():
            if not _is_same(value, got := getattr(decoded, name)):
                raise Unfit(f"$.{name}", f"{shown(value)} would reach the handler as {shown(got)}")
        return body

    def _blame(self, arguments: Mapping[str, Any], problem: Exception) -> NoReturn:
        """Raise Unfit for the first argument that cannot be written."""
        for name, value in arguments.items():
            try:
                self._writer.encode(value)
            except _CANNOT_WRITE as cause:
                raise Unfit(f"$.{name}", str(cause)) from None
        raise Unfit("$", str(problem)) from None

    # --- in a handler ---------------------------------------------------------------------------

    def arguments(self, delivery: Delivery) -> dict[str, Any]:
        """Return the arguments of a delivery. Raise Unfit if no handler of this schema can take
        them, and NewerVersion if a newer one can."""
        body = delivery.body
        content, version = self._content(delivery.encoding)
        try:
            if version == self._version:
                decoded = self._readers[content].decode(body)
            else:
                raw = getattr(self._msgspec, content).decode(body)
                decoded = self._converted(raw, content, version)
        except self._no_fit as problem:
            raise _unfit(problem) from None
        unset = self._msgspec.UNSET
        pairs = ((name, getattr(decoded, name)) for name in self._names)
        return {name: value for name, value in pairs if value is not unset}

    def _content(self, encoding: str | None) -> tuple[str, int]:
        """Return the format of a body, "json" or "msgpack", and the version of its schema."""
        step = content_of(encoding)
        if step is None:  # the producer did not set an encoding
            return self._format, 1
        if step.name not in self._readers:
            raise Unfit("$", f"expected json or msgpack, got {encoding}")
        text = step.parameters.get("v", "1")
        if not text.isdecimal() or not 1 <= int(text[:9]) <= VERSION_MAX:
            raise Unfit("$", f"expected a version between 1 and {VERSION_MAX}, got {text}")
        version = int(text[:9])
        if version > self._version:
            raise NewerVersion(
                f"the task's arguments have version {version}; this handler of {self._topic}"
                f" supports versions up to {self._version}: a newer program can handle it"
            )
        return step.name, version

    def _converted(self, raw: Any, content: str, version: int) -> Any:
        """Convert arguments of an older version to this version."""
        if not isinstance(raw, dict):
            raise Unfit("$", f"expected object, got {type(raw).__name__}")
        for older in range(version, self._version):
            if older not in self._upcasters:
                raise Unfit("$", f"version {older} is no longer supported: it has no upcaster")
            raw = self._upcasters[older](raw)
        return self._msgspec.convert(
            raw, self._arguments, dec_hook=self._read_other, str_keys=content == "json"
        )

    # --- types that msgspec does not know -------------------------------------------------------

    def _read_other(self, kind: Any, value: Any) -> Any:
        """Read a value of a pydantic model."""
        model = _pydantic_model()
        if model is None or not isinstance(kind, type) or not issubclass(kind, model):
            raise NotImplementedError(f"{kind} cannot be decoded")
        errors: Any = sys.modules["pydantic"].ValidationError
        try:
            return kind.model_validate_json(self._msgspec.json.encode(value))  # type: ignore[attr-defined]  # a model
        except errors as problem:
            first = problem.errors(include_url=False, include_input=False)[0]
            place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
            raise ValueError(f"{_BELOW}{place}: {first['msg']}") from None


_BELOW = "@"
"""Prefix of a message that names a path below the reported place."""
_CANNOT_WRITE = (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError)


def _field(parameter: inspect.Parameter, msgspec: Any) -> tuple[Any, ...]:
    """Return a field of the arguments; a parameter with a default is optional."""
    kind: Any = NoneType if parameter.annotation is None else parameter.annotation
    if parameter.default is inspect.Parameter.empty:
        return parameter.name, kind
    return parameter.name, Union[kind, msgspec.UnsetType], msgspec.UNSET  # noqa: UP007  # at run time


def _pydantic_model() -> Any:
    """Return the base class of pydantic models; None: pydantic was not imported."""
    pydantic = sys.modules.get("pydantic")
    return None if pydantic is None else pydantic.BaseModel


def _write_other(value: Any) -> Any:
    model = _pydantic_model()
    if model is not None and isinstance(value, model):
        return value.model_dump(mode="json")
    raise TypeError(f"a {type(value).__name__} cannot be encoded")


def _is_same(written: Any, read: Any) -> bool:
    """Return whether a value that was read back equals the written one. NaN equals NaN."""
    if written == read or (written != written and read != read):  # noqa: PLR0124  # true for NaN only
        return True
    if type(written) is not type(read):
        return False
    if isinstance(written, dict):
        return written.keys() == read.keys() and all(_is_same(written[n], read[n]) for n in written)
    if isinstance(written, (list, tuple)):
        return len(written) == len(read) and all(map(_is_same, written, read))
    kind = type(written)
    names: Any = getattr(kind, "__struct_fields__", getattr(kind, "__dataclass_fields__", ()))
    return bool(names) and all(_is_same(getattr(written, n), getattr(read, n)) for n in names)


def _unfit(problem: Exception) -> Unfit:
    """Convert a msgspec error to Unfit with the place first: "$.order_id", "expected int, got
    str"."""
    text, _, place = str(problem).rpartition(" - at `")
    if not text:
        text, place = str(problem), "$"
    place, below = place.replace("`", ""), ""  # also "key` in `$.totals"
    if text.startswith(_BELOW):
        below, _, text = text.removeprefix(_BELOW).partition(": ")
    text = text.replace("`", "")
    return Unfit(place, text[:1].lower() + text[1:], below=below)


def _checked_version(version: Any) -> int:
    if type(version) is not int or not 1 <= version <= VERSION_MAX:
        raise BadRequest(
            f"version must be an integer between 1 and {VERSION_MAX}, not {shown(version)}"
        )
    return version


def _checked_upcasters(upcasters: Any, version: int) -> dict[int, Upcaster]:
    for older, upcaster in upcasters.items():
        if type(older) is not int or not 1 <= older < version:
            raise BadRequest(f"upcasters must be for versions below {version}, not {shown(older)}")
        if not callable(upcaster):
            raise BadRequest(f"upcasters[{older}] must be a function, not {shown(upcaster)}")
    return dict(upcasters)
