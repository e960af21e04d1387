"""Requests and answers as classes, which declare each field with its kind, default and description.

A request is ``class HeldKeys(Request)`` with fields ``name: Annotated[type, KIND, "sentence"]``. A
field without a default is an element of the frame. ``place(default)`` declares an element that can
be left out over HTTP and in Python. All other fields travel by name in a map, which is the frame's
last element. An answer is ``class HeldKey(Answer)``, whose fields are keys of the daemon's map.

Annotations are read when a class is first used, so that a program that only enqueues does not read
them. Invariant: every request object has been checked completely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    NamedTuple,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from tickwheel.api.kinds import FieldKind
from tickwheel.api.times import moment
from tickwheel.errors import BadRequest, ProtocolError, shown

if TYPE_CHECKING:
    from tickwheel.limits import Limits

T = TypeVar("T")
M = TypeVar("M", datetime, datetime | None)


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final[Any] = _Required()


class _Place(NamedTuple):
    default: Any


class _Called(NamedTuple):
    default: Any
    python: str


def place(*, default: Any = REQUIRED) -> Any:
    """Declare a field that is an element of the frame although it has a default."""
    return _Place(default)


def called(python: str, *, default: Any = None) -> Any:
    """Declare a field that travels by name. ``python`` is its keyword argument in the client."""
    return _Called(default, python)


class Field(NamedTuple):
    """One field of a request or an answer."""

    name: str
    kind: FieldKind
    text: str
    """One sentence for the documents."""
    default: Any
    is_place: bool
    """Whether the field is an element of the frame."""
    may_be_none: bool
    python: str
    """The name of the keyword argument in the Python client."""
    annotation: Any
    """The type in Python, without annotations."""
    mark: Any = None
    """A further annotation of the type, such as ``tasks.Option``."""

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED


class Shape:
    """Base of requests and answers. It reads the fields from the annotations once."""

    _fields: ClassVar[tuple[Field, ...] | None] = None

    def __init_subclass__(cls) -> None:
        cls._fields = None

    @classmethod
    def fields(cls) -> tuple[Field, ...]:
        """Return all fields, those of the base classes first."""
        if cls._fields is None:
            cls._fields = tuple(_read_fields(cls))
        return cls._fields

    @classmethod
    def field(cls, name: str) -> Field:
        """Return the field with this name. Raise StopIteration if there is none."""
        return next(field for field in cls.fields() if field.name == name)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values().items())
        return f"{type(self).__name__}({values})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._values() == other._values()

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in self.fields()}

    __hash__ = None  # type: ignore[assignment]  # fields can contain maps, which are not hashable


_OWN: Final = ("raw", "_set_names", "_fields")
"""Attributes of the base classes."""


def _read_fields(cls: type[Shape]) -> Iterable[Field]:
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if get_origin(hint) is ClassVar or name in _OWN:
            continue
        default = getattr(cls, name, REQUIRED)
        is_place = default is REQUIRED or isinstance(default, _Place)
        annotation, kind, text, mark = _parts(hint)
        python = name.removesuffix(kind.unit) if kind.unit else name
        if isinstance(default, _Called):
            python = default.python
        if isinstance(default, (_Place, _Called)):
            default = default.default
        may_be_none = type(None) in get_args(annotation) or default is None
        yield Field(name, kind, text, default, is_place, may_be_none, python, annotation, mark)


def _parts(hint: Any) -> tuple[Any, FieldKind, str, Any]:
    """Return type, kind, description and mark of an annotation, which may be nested by aliases."""
    kind, text, other = FieldKind(), "", None
    while get_origin(hint) is Annotated:
        hint, *marks = get_args(hint)
        for mark in marks:
            if isinstance(mark, FieldKind) and type(kind) is FieldKind:
                kind = mark
            elif isinstance(mark, str) and not text:
                text = mark
            elif not isinstance(mark, (FieldKind, str)) and other is None:
                other = mark
    if type(kind) is FieldKind:
        kind = next((inner for inner in map(_inner_kind, get_args(hint)) if inner), kind)
    return hint, kind, text, other


def _inner_kind(hint: Any) -> FieldKind | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((mark for mark in get_args(hint)[1:] if isinstance(mark, FieldKind)), None)


@dataclass_transform(kw_only_default=True, field_specifiers=(place, called))
class Request(Shape):
    """Base of the requests of verbs. ``checked`` and ``of_frame`` check the fields; the constructor
    takes checked values."""

    none_is_sent: ClassVar[bool] = False
    """Whether None in Python is sent, because it removes a setting."""
    one_of: ClassVar[tuple[str, ...]] = ()
    """Names of fields of which exactly one must be set."""

    _set_names: frozenset[str]

    def __init__(self, **values: Any) -> None:
        for field in self.fields():
            value = values.get(field.name, field.default)
            if value is REQUIRED:
                raise TypeError(f"{type(self).__name__} needs {field.name}")
            setattr(self, field.name, value)
        self._set_names = frozenset(values)

    @classmethod
    def places(cls) -> tuple[Field, ...]:
        """Return the fields that are elements of the frame, in order."""
        return tuple(field for field in cls.fields() if field.is_place)

    @classmethod
    def options(cls) -> tuple[Field, ...]:
        """Return the fields that travel by name in the frame's last element."""
        return tuple(field for field in cls.fields() if not field.is_place)

    @classmethod
    def checked(cls, values: Mapping[str, Any], limits: Limits) -> Self:
        """Return the request with these values, which are in the wire format. None means the
        field's default, if it has one. Raise BadRequest or LimitExceeded for invalid values."""
        fields: dict[str, Any] = {}
        for field in cls.fields():
            name = field.name
            if name not in values:
                if field.is_required:
                    raise BadRequest(f"{name} is missing")
            elif values[name] is None and field.may_be_none:
                fields[name] = None if field.is_required else field.default
            else:
                fields[name] = field.kind.check(values[name], name, limits)
        if cls.one_of:
            cls._check_one({name: fields.get(name) for name in cls.one_of})
        request = cls(**fields)
        request.check_together()
        return request

    def check_together(self) -> None:
        """Check that fields are compatible. Raise BadRequest if they are not."""

    @classmethod
    def _check_one(cls, values: Mapping[str, Any]) -> None:
        """Raise BadRequest unless exactly one of the values is set."""
        if sum(value not in (None, ()) for value in values.values()) != 1:
            raise BadRequest(f"exactly one of {' and '.join(values)} must be given")

    @classmethod
    def of_frame(cls, elements: tuple[Any, ...], limits: Limits) -> Self:
        """Return the request in the frame's elements after the request number. The options, which
        are the last element, can be left out. Raise BadRequest or LimitExceeded."""
        places, options = cls.places(), cls.options()
        count = len(places) + bool(options)
        if options and len(elements) == len(places):
            elements = (*elements, None)
        if len(elements) != count:
            names = [field.name for field in places] + ["options"] * bool(options)
            raise BadRequest(
                f"the frame has {len(elements)} fields, expected {count}:"
                f" {', '.join(names) or 'none'}"
            )
        values = {field.name: value for field, value in zip(places, elements, strict=False)}
        if options:
            values |= named(elements[-1], [field.name for field in options])
        return cls.checked(values, limits)

    @classmethod
    def is_repeatable(cls, frame: tuple[Any, ...]) -> bool:
        """Return whether executing these elements of a frame twice leaves the state that executing
        them once leaves."""
        return True

    @classmethod
    def of_keywords(cls, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Convert keyword arguments of the Python client to the wire format, by field name. None is
        left out if the field allows None, unless ``none_is_sent``. Raise BadRequest."""
        if cls.one_of:
            names = [cls.field(name).python for name in cls.one_of]
            cls._check_one({name: keywords.get(name) for name in names})
        values: dict[str, Any] = {}
        for field in cls.fields():
            if field.python not in keywords:
                continue
            value = keywords[field.python]
            may_be_none = field.may_be_none
            if cls.none_is_sent:
                may_be_none = may_be_none and field.kind.none_removes
            if value is not None or not may_be_none:
                values[field.name] = field.kind.of_python(value, field.python)
            elif cls.none_is_sent:
                values[field.name] = None
        return values

    @classmethod
    def to_frame(cls, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the frame's elements after the request number, from values in the wire format."""
        places = tuple(
            values.get(f.name, None if f.is_required else f.default) for f in cls.places()
        )
        options = cls.options()
        if not options:
            return places
        return (*places, {f.name: values[f.name] for f in options if f.name in values})

    def values(self, block: type[Request] | None = None) -> dict[str, Any]:
        """Return the fields that were set, by name: those of ``block``, or all fields."""
        names = (field.name for field in (block or type(self)).fields())
        return {name: getattr(self, name) for name in names if name in self._set_names}


def named(value: object, names: Iterable[str], field: str = "options") -> dict[str, Any]:
    """Return the value if it is a map whose keys are all in ``names``. None means an empty map.
    Raise BadRequest otherwise."""
    if value is None:
        return {}
    if type(value) is not dict:
        raise BadRequest(f"{field} must be a map, not {shown(value)}")
    allowed = list(names)
    for key in value:
        if key not in allowed:
            raise BadRequest(
                f"{field} has an unknown key {shown(key)}; known: {', '.join(allowed)}"
            )
    return value


class Block(FieldKind):
    """A map of options, whose fields are those of a block."""

    word, python, json = "map", "Mapping[str, Any]", dict[str, Any]
    is_logged = False

    def __init__(self, block: type[Request]) -> None:
        self.block = block

    def check(self, value: Any, field: str, limits: Limits) -> dict[str, Any]:
        options = self.block.fields()
        values = named(value, (option.name for option in options), field)
        return {
            option.name: option.kind.check(values[option.name], f"{field}.{option.name}", limits)
            for option in options
            if values.get(option.name) is not None
        }


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(called,))
class Answer(Shape):
    """Base of the answers of verbs: a view of the daemon's map. ``raw`` is the whole map, including
    fields that a newer daemon has added. A field that an older daemon lacks has its default."""

    raw: Mapping[str, Any]

    def __init__(self, **values: Any) -> None:
        for field in self.fields():
            vars(self)[field.name] = values.get(field.name, field.default)
        vars(self)["raw"] = values.get("raw", values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is read-only")

    @classmethod
    def of(cls, raw: Any) -> Self:
        """Read the answer from the daemon's map. Raise ProtocolError if the map is not a valid
        answer."""
        try:
            values = {
                field.name: _read(field, raw[field.name])
                for field in cls.fields()
                if field.is_required or field.name in raw
            }
        except (TypeError, ValueError, LookupError, AttributeError) as problem:
            raise ProtocolError(
                f"the daemon's answer is not a valid {cls.__name__}:"
                f" {type(problem).__name__}: {problem!s:.200}"
            ) from None
        return cls(**values, raw=raw)


if TYPE_CHECKING:

    class _When(Generic[M]):
        """A property of type datetime or ``datetime | None`` for type checkers."""

        def __init__(self, read: Callable[[Any], M], *, doc: str) -> None: ...

        def __get__(self, answer: object, owner: type | None = None, /) -> M: ...

else:
    _When = property


def when(field: str, text: str) -> _When[datetime]:
    """Return a property of an answer: the field, which is in milliseconds, as a datetime."""
    return _When(lambda answer: moment(getattr(answer, field)), doc=text)


def maybe_when(field: str, text: str) -> _When[datetime | None]:
    """Return a property as ``when`` does, for a field that can be None."""

    def read(answer: object) -> datetime | None:
        ms: int | None = getattr(answer, field)
        return None if ms is None else moment(ms)

    return _When(read, doc=text)


def _read(field: Field, value: Any) -> Any:
    if value is None:
        return None if field.is_required else field.default
    return reader_of(field.annotation)(value)


_READERS: dict[Any, Callable[[Any], Any]] = {}


def reader_of(annotation: Any) -> Callable[[Any], Any]:
    """Return a function that converts a value of the daemon to this type. Answers are read from
    maps, including maps inside arrays and maps; plain types are checked."""
    try:
        return _READERS[annotation]
    except KeyError:
        reader = _READERS[annotation] = _make_reader(annotation)
        return reader


def _make_reader(annotation: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return reader_of(arguments[0])
    if isinstance(annotation, type) and hasattr(annotation, "of") and origin is None:
        reader: Callable[[Any], Any] = annotation.of
        return reader
    if annotation in (int, str, float, bool):
        return _of_type(annotation)
    if origin is tuple and arguments[-1] is not ...:
        each = [reader_of(argument) for argument in arguments]
        return lambda value: tuple(read(item) for read, item in zip(each, value, strict=True))
    if origin in (tuple, list) and arguments:
        inner = reader_of(arguments[0])
        kind = origin
        return lambda value: kind(inner(item) for item in value)
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        inner = reader_of(arguments[1])
        return lambda value: {str(name): inner(item) for name, item in value.items()}
    argument_types = [argument for argument in arguments if argument is not type(None)]
    if type(None) in arguments and len(argument_types) == 1:
        return reader_of(argument_types[0])
    return lambda value: value


def _of_type(kind: Any) -> Callable[[Any], Any]:
    """Return a reader that converts between kinds of numbers, but requires strings for strings."""

    def read(value: Any) -> Any:
        if kind is str and not isinstance(value, str):
            raise TypeError(f"{shown(value)} is not a string")
        return kind(value)

    return read
