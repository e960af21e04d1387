"""Requests and answers as classes: each field once, with its kind, its default and one sentence.

A request is ``class HeldKeys(Request)`` with fields ``name: Annotated[type, KIND, "sentence"]``. A
field without a default has a place of its own in the frame; ``place(default)`` gives it one though
it may be left out over HTTP or in Python; all others travel by name in the frame's last element, a
map. An answer is ``class HeldKey(Answer)``, whose fields have the names of the daemon's map.

The classes are read when they are first used, not when they are made: a program that only enqueues
does not pay for them. Invariant: a request that exists was checked whole.
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
    """The default of a field that has a place of its own in the frame all the same."""
    return _Place(default)


def called(python: str, *, default: Any = None) -> Any:
    """A field with another name as a keyword of the Python client. One whose default is REQUIRED
    travels by name all the same."""
    return _Called(default, python)


class Field(NamedTuple):
    """One field of a request or an answer."""

    name: str
    kind: FieldKind
    text: str
    """One sentence for the documents."""
    default: Any
    is_place: bool
    """Whether the field of a request has a place of its own in the frame."""
    may_be_none: bool
    python: str
    """The keyword of the Python client."""
    annotation: Any
    """The type in Python, without what is beside it."""
    mark: Any = None
    """What else stands beside the type, for those who know it."""

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED


class Shape:
    """What requests and answers have in common: fields, read from the annotations once."""

    _fields: ClassVar[tuple[Field, ...] | None] = None

    def __init_subclass__(cls) -> None:
        cls._fields = None

    @classmethod
    def fields(cls) -> tuple[Field, ...]:
        """All fields, those of the base classes first."""
        if cls._fields is None:
            cls._fields = tuple(_read_fields(cls))
        return cls._fields

    @classmethod
    def field(cls, name: str) -> Field:
        """The field of this name. Raises KeyError."""
        return next(field for field in cls.fields() if field.name == name)

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self._values().items())
        return f"{type(self).__name__}({said})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._values() == other._values()

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in self.fields()}

    __hash__ = None  # type: ignore[assignment]  # like other values that hold maps


_OWN: Final = ("raw", "_said", "_fields")
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
    """Type, kind, sentence and mark of an annotation. An alias of a kind stands inside of it."""
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
        kind = next((found for found in map(_inner_kind, get_args(hint)) if found), kind)
    return hint, kind, text, other


def _inner_kind(hint: Any) -> FieldKind | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((mark for mark in get_args(hint)[1:] if isinstance(mark, FieldKind)), None)


@dataclass_transform(kw_only_default=True, field_specifiers=(place, called))
class Request(Shape):
    """What a verb is asked with. Its fields are checked when it is made of a frame, of JSON, or of
    keywords; the constructor takes checked values."""

    none_is_said: ClassVar[bool] = False
    """Whether None in Python is something to say: it takes a setting away."""
    one_of: ClassVar[tuple[str, ...]] = ()
    """Fields of which exactly one has to be said."""

    _said: frozenset[str]

    def __init__(self, **values: Any) -> None:
        for field in self.fields():
            value = values.get(field.name, field.default)
            if value is REQUIRED:
                raise TypeError(f"{type(self).__name__} needs {field.name}")
            setattr(self, field.name, value)
        self._said = frozenset(values)

    @classmethod
    def places(cls) -> tuple[Field, ...]:
        """The fields that have a place of their own in the frame, in its order."""
        return tuple(field for field in cls.fields() if field.is_place)

    @classmethod
    def options(cls) -> tuple[Field, ...]:
        """The fields that travel by name in the last element of the frame."""
        return tuple(field for field in cls.fields() if not field.is_place)

    @classmethod
    def checked(cls, values: Mapping[str, Any], limits: Limits) -> Self:
        """The request with these values, in the form of the wire. None stands for a field that is
        not said, where it has a default. Raises BadRequest, LimitExceeded."""
        found: dict[str, Any] = {}
        for field in cls.fields():
            name = field.name
            if name not in values:
                if field.is_required:
                    raise BadRequest(f"{name} is missing")
            elif values[name] is None and field.may_be_none:
                found[name] = None if field.is_required else field.default
            else:
                found[name] = field.kind.check(values[name], name, limits)
        if cls.one_of:
            cls._check_one({name: found.get(name) for name in cls.one_of})
        request = cls(**found)
        request.check_together()
        return request

    def check_together(self) -> None:
        """Check values that have to fit each other. Raises BadRequest."""

    @classmethod
    def _check_one(cls, values: Mapping[str, Any]) -> None:
        """Raises BadRequest when none of the values is there, or several are."""
        if sum(value not in (None, ()) for value in values.values()) != 1:
            raise BadRequest(f"one of {' and '.join(values)} must be given")

    @classmethod
    def of_frame(cls, elements: tuple[Any, ...], limits: Limits) -> Self:
        """The request in a frame's elements behind its number, of which the options, the last one,
        may be left out. Raises BadRequest, LimitExceeded."""
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
        values = {field.name: one for field, one in zip(places, elements, strict=False)}
        if options:
            values |= named(elements[-1], [field.name for field in options])
        return cls.checked(values, limits)

    @classmethod
    def of_keywords(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The form on the wire of keywords of the Python client, by the fields' names. One that is
        None is left out where it may be, unless ``none_is_said``. Raises BadRequest."""
        if cls.one_of:
            names = [cls.field(name).python for name in cls.one_of]
            cls._check_one({name: given.get(name) for name in names})
        found: dict[str, Any] = {}
        for field in cls.fields():
            if field.python not in given:
                continue
            value = given[field.python]
            may_be_none = field.may_be_none
            if cls.none_is_said:
                may_be_none = may_be_none and field.kind.none_takes_away
            if value is not None or not may_be_none:
                found[field.name] = field.kind.of_python(value, field.python)
            elif cls.none_is_said:
                found[field.name] = None
        return found

    @classmethod
    def to_frame(cls, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The elements of a frame behind its number, of values in the form of the wire."""
        places = tuple(
            values.get(f.name, None if f.is_required else f.default) for f in cls.places()
        )
        options = cls.options()
        if not options:
            return places
        return (*places, {f.name: values[f.name] for f in options if f.name in values})

    def said(self, block: type[Request] | None = None) -> dict[str, Any]:
        """The fields that were said, by name: those of ``block``, or all."""
        names = (field.name for field in (block or type(self)).fields())
        return {name: getattr(self, name) for name in names if name in self._said}


def named(value: object, known: Iterable[str], field: str = "options") -> dict[str, Any]:
    """A checked map with no key that is not known; None is an empty one. Raises BadRequest."""
    if value is None:
        return {}
    if type(value) is not dict:
        raise BadRequest(f"{field} must be a map, not {shown(value)}")
    allowed = list(known)
    for key in value:
        if key not in allowed:
            raise BadRequest(
                f"{field} has an unknown key {shown(key)}; known: {', '.join(allowed)}"
            )
    return value


class Block(FieldKind):
    """A map whose fields are those of a block of options."""

    word, python, json = "map", "Mapping[str, Any]", dict[str, Any]
    is_logged = False

    def __init__(self, block: type[Request]) -> None:
        self.block = block

    def check(self, value: Any, field: str, limits: Limits) -> dict[str, Any]:
        fields = self.block.fields()
        given = named(value, (one.name for one in fields), field)
        return {
            one.name: one.kind.check(given[one.name], f"{field}.{one.name}", limits)
            for one in fields
            if given.get(one.name) is not None
        }


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(called,))
class Answer(Shape):
    """What a verb is answered with: a view of the daemon's map, which ``raw`` keeps whole, so that
    what a newer daemon adds is there. A field that an older daemon does not say has its default."""

    raw: Mapping[str, Any]

    def __init__(self, **values: Any) -> None:
        for field in self.fields():
            vars(self)[field.name] = values.get(field.name, field.default)
        vars(self)["raw"] = values.get("raw", values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is read-only")

    @classmethod
    def of(cls, raw: Any) -> Self:
        """The answer in a map of the daemon. Raises ProtocolError when it has not its shape."""
        try:
            found = {
                field.name: _read(field, raw[field.name])
                for field in cls.fields()
                if field.is_required or field.name in raw
            }
        except (TypeError, ValueError, LookupError, AttributeError) as problem:
            raise ProtocolError(
                f"the daemon's answer is no {cls.__name__}:"
                f" {type(problem).__name__}: {problem!s:.200}"
            ) from None
        return cls(**found, raw=raw)


if TYPE_CHECKING:

    class _When(Generic[M]):
        """A property that type checkers know to be a datetime, or to be one or None."""

        def __init__(self, read: Callable[[Any], M], *, doc: str) -> None: ...

        def __get__(self, answer: object, owner: type | None = None, /) -> M: ...

else:
    _When = property


def when(field: str, text: str) -> _When[datetime]:
    """The property of an answer that has a field of milliseconds as a datetime."""
    return _When(lambda answer: moment(getattr(answer, field)), doc=text)


def maybe_when(field: str, text: str) -> _When[datetime | None]:
    """``when`` of a field that may be None."""

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
    """What makes a value of this type of the daemon's: answers, in arrays and maps, of maps; plain
    types of what is one."""
    try:
        return _READERS[annotation]
    except KeyError:
        found = _READERS[annotation] = _make_reader(annotation)
        return found


def _make_reader(annotation: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return reader_of(arguments[0])
    if isinstance(annotation, type) and hasattr(annotation, "of") and origin is None:
        made: Callable[[Any], Any] = annotation.of
        return made
    if annotation in (int, str, float, bool):
        return _of_type(annotation)
    if origin is tuple and arguments[-1] is not ...:
        each = [reader_of(argument) for argument in arguments]
        return lambda value: tuple(read(one) for read, one in zip(each, value, strict=True))
    if origin in (tuple, list) and arguments:
        inner = reader_of(arguments[0])
        kind = origin
        return lambda value: kind(inner(one) for one in value)
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        inner = reader_of(arguments[1])
        return lambda value: {str(name): inner(one) for name, one in value.items()}
    rest = [one for one in arguments if one is not type(None)]
    if type(None) in arguments and len(rest) == 1:
        return reader_of(rest[0])
    return lambda value: value


def _of_type(kind: Any) -> Callable[[Any], Any]:
    """Return a reader that accepts any number for a number, but only text for text."""

    def read(value: Any) -> Any:
        if kind is str and not isinstance(value, str):
            raise TypeError(f"{shown(value)} is not text")
        return kind(value)

    return read
