"""Kinds of values of the fields of requests and answers.

A kind defines in one place how a value is checked, how it is written in Python, on the wire and in
JSON, and how the documents describe it. Daemon and client share the check and its messages. This
module does not know verbs or transports.

Invariant: a value that has passed ``check`` can be encoded and stored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NoReturn

from tickwheel.api.policies import policy_wire, rule_wire
from tickwheel.api.times import duration_ms, moment_ms
from tickwheel.errors import BadRequest, LimitExceeded, shown
from tickwheel.limits import ENCODING_STEPS_MAX, ID_MAX, Limits
from tickwheel.model import values
from tickwheel.model.policies import parse_shift
from tickwheel.model.values import INTEGER_MAX, INTEGER_MIN, InvalidValue

NAME_PATTERN: Final = "^[A-Za-z0-9._:/-]{1,255}$"
_NAME = re.compile(NAME_PATTERN[1:-1])
TRACE_PATTERN: Final = "^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$"
_TRACE = re.compile(TRACE_PATTERN[1:-1])
_STEP = "[a-z0-9][a-z0-9.+-]*(;[a-z]+=[A-Za-z0-9._:/+-]+)*"
ENCODING_PATTERN: Final = f"^{_STEP}(,{_STEP})*$"
ENCODING_LENGTH_MAX: Final = 255
STEPS: Final = frozenset(("zlib", "zstd", "aesgcm"))
"""Steps that our clients apply to bodies. If an encoding begins with another word, that word is the
body's type."""
_ENCODING = re.compile(ENCODING_PATTERN[1:-1])


_DEFAULT_LIMITS = Limits()


def wrong(field: str, expected: str, value: object) -> NoReturn:
    """Raise BadRequest for a value that a field does not accept."""
    raise BadRequest(f"{field} must be {expected}, not {shown(value)}")


def refusal(error: InvalidValue) -> BadRequest:
    """Return the error of the protocol for an invalid value."""
    return (LimitExceeded if error.is_too_long else BadRequest)(error.message(shown))


# --- checks that need no declaration, for the kinds below and frames parsed by hand --------------


def integer(value: object, field: str, low: int, high: int) -> int:
    """Return the value if it is an integer from ``low`` to ``high``. Raise BadRequest otherwise."""
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{field} must be an integer between {low} and {high}, not {shown(value)}")
    return value


def text(value: object, field: str, length_max: int, limit: str = "") -> str:
    """Return the value if it is a string of at most ``length_max`` characters that UTF-8 can
    encode. Otherwise raise BadRequest, or LimitExceeded with the name ``limit``."""
    if type(value) is str and len(value) <= length_max and value.isascii():
        return value
    try:
        return values.check_text(value, field, length_max, limit)
    except InvalidValue as error:
        raise refusal(error) from None


def name(value: object, field: str) -> str:
    """Return the value if it is a valid name of a topic, group or schedule. Raise BadRequest
    otherwise."""
    if type(value) is not str or not _NAME.fullmatch(value):
        wrong(field, "1 to 255 characters from A-Z a-z 0-9 . _ : / -", value)
    return value


def array(value: object, field: str, length_max: int) -> Sequence[Any]:
    """Return the value if it is an array of at most ``length_max`` elements. Raise BadRequest or
    LimitExceeded otherwise."""
    if type(value) is not tuple:
        raise BadRequest(f"{field} must be an array, not {shown(value)}")
    if len(value) > length_max:
        raise LimitExceeded(f"{field} has {len(value)} elements; the limit is {length_max}")
    return value


def task_ids(value: object, field: str, limits: Limits) -> Sequence[int]:
    """Return the value if it is an array of task ids that fits a frame. Raise BadRequest or
    LimitExceeded otherwise."""
    ids = array(value, field, limits.ids_per_frame_max)
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > ID_MAX):
        invalid = next(i for i in ids if type(i) is not int or not 0 <= i <= ID_MAX)
        raise BadRequest(f"{field} must be integers between 0 and {ID_MAX}, not {shown(invalid)}")
    return ids


class FieldKind:
    """One kind of value. The base class accepts any value."""

    word = "any"
    """The type in the tables of the documents."""
    python = "Any"
    """The annotation of the keyword argument in the Python client."""
    unit = ""
    """The suffix of the field's name that the Python keyword drops, because it takes a duration or
    a datetime."""
    json: Any = object
    """The type in JSON."""
    json_name = ""
    """The name of that type in the OpenAPI document, if several schemas share it."""
    measure = ""
    """A sentence that names the unit of a number."""
    has_limits = False
    """Whether ``described`` appends ``bounds``, because descriptions do not state them."""
    is_logged = True
    """Whether the audit log can show the value."""
    none_removes = True
    """Whether None removes a setting of this kind."""

    def check(self, value: Any, field: str, limits: Limits) -> Any:
        """Return the checked value in the wire format. Raise BadRequest or LimitExceeded, whose
        messages name the field, the limit and the value."""
        return value

    def logged(self, value: Any) -> Any:
        """Return a checked value in the form that the audit log shows."""
        return value

    def of_python(self, value: Any, field: str) -> Any:
        """Convert an argument of the Python client to the wire format. Raise BadRequest if this is
        impossible."""
        return value

    def of_task(self, value: Any, field: str, limits: Limits) -> Any:
        """Convert and check an option of a task. The client checks each option, because tasks of
        several callers are sent together. Raise BadRequest or LimitExceeded."""
        return self.check(self.of_python(value, field), field, limits)

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema without the type."""
        return {}

    @property
    def bounds(self) -> str:
        """The bounds, as text for the tables of the documents."""
        return ""

    def described(self, text: str) -> str:
        """Append the unit and the bounds of this kind to the description of a field."""
        bounds = self.bounds
        if bounds[:1].isdigit():
            bounds = f"from {bounds}"
        limits = f"{bounds[:1].upper()}{bounds[1:]}." if self.has_limits else ""
        measure = "" if "milliseconds" in text else self.measure
        return " ".join(filter(None, (text, measure, limits)))


class Text(FieldKind):
    """A string of at most ``length_max`` characters that UTF-8 can encode."""

    word, python, json = "str", "str", str
    has_limits = True

    def __init__(self, length_max: int | str = 255, limit: str = "") -> None:
        """``length_max`` is a number, or the name of one of the daemon's limits. ``limit`` is the
        name of that number in messages."""
        self.length_max = length_max
        self._limit = limit

    def check(self, value: Any, field: str, limits: Limits) -> str:
        return text(value, field, *self._length_max(limits))

    of_task = check

    def _length_max(self, limits: Limits) -> tuple[int, str]:
        """Return the maximum length in characters and the name of that limit, or ""."""
        if isinstance(self.length_max, str):
            return getattr(limits, self.length_max), self.length_max
        return self.length_max, self._limit

    def of_python(self, value: Any, field: str) -> Any:
        if not isinstance(value, str):
            wrong(field, "a str", value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"maxLength": self._length_max(_DEFAULT_LIMITS)[0]}

    @property
    def bounds(self) -> str:
        return f"up to {self.schema()['maxLength']} characters"


class Tag(Text):
    """A tag that the filter of a group can name."""

    def check(self, value: Any, field: str, limits: Limits) -> str:
        tag = super().check(value, field, limits)
        if not tag or tag == "*" or "||" in tag or tag != tag.strip():
            wrong(field, "a tag: not empty, not *, without ||, without blanks around it", value)
        return tag

    of_task = check


class Name(FieldKind):
    """The name of a topic, a group, a schedule, a transaction or a bulk operation."""

    word, python, json = "str", "str", str

    def check(self, value: Any, field: str, limits: Limits) -> str:
        return name(value, field)

    def of_python(self, value: Any, field: str) -> Any:
        return name(value, field)

    def schema(self) -> dict[str, Any]:
        return {"pattern": NAME_PATTERN}


class Traceparent(FieldKind):
    """A W3C ``traceparent``: version, trace id, span id, flags. Neither id is all zeros, and the
    version is not ff."""

    word, python, json = "str", "str", str

    def check(self, value: Any, field: str, limits: Limits) -> str:
        if type(value) is not str or not _TRACE.fullmatch(value):
            expected = (
                "a W3C traceparent (55 characters: 2, 32, 16 and 2 lower-case hex digits, separated"
                " by -; version not ff, ids not all zeros)"
            )
            wrong(field, expected, value)
        return value

    of_task = check

    def schema(self) -> dict[str, Any]:
        return {"pattern": TRACE_PATTERN}


def steps_in(encoding: str) -> int:
    """Return the number of steps in an encoding, not counting the body's type."""
    first = encoding.partition(",")[0].partition(";")[0]
    return encoding.count(",") + (first in STEPS)


class Encoding(FieldKind):
    """A body's type and the steps applied to it, in order: "json;v=2,zlib,aesgcm;key=2026-11".
    Commas separate steps; semicolons separate a step from its parameters."""

    word, python, json = "str", "str", str

    def check(self, value: Any, field: str, limits: Limits) -> str:
        length_max = ENCODING_LENGTH_MAX
        if type(value) is not str or len(value) > length_max or not _ENCODING.fullmatch(value):
            expected = (
                f"1 to {length_max} characters: the body's type and the steps applied to it, in"
                " order, separated by commas (like json;v=2,zlib)"
            )
            wrong(field, expected, value)
        if value.count(",") >= ENCODING_STEPS_MAX and (count := steps_in(value)) > (
            ENCODING_STEPS_MAX
        ):
            raise LimitExceeded(
                f"{field} has {count} steps; the limit is {ENCODING_STEPS_MAX} (encoding_steps_max)"
            )
        return value

    of_task = check

    def schema(self) -> dict[str, Any]:
        return {"pattern": ENCODING_PATTERN, "maxLength": ENCODING_LENGTH_MAX}


class Choice(FieldKind):
    """One of several words. ``python`` is the name of their Literal type in
    ``tickwheel.api.frames``."""

    word, json = "str", str

    def __init__(self, python: str, *words: str) -> None:
        self.python = python
        self.words = words

    def check(self, value: Any, field: str, limits: Limits) -> str:
        if type(value) is not str or value not in self.words:
            wrong(field, f"one of {', '.join(self.words)}", value)
        return value

    def of_python(self, value: Any, field: str) -> Any:
        if not isinstance(value, str):
            wrong(field, "a str", value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.words)}

    @property
    def bounds(self) -> str:
        return ", ".join(f"`{word}`" for word in self.words)


class Flag(FieldKind):
    """True or false."""

    word, python, json = "bool", "bool", bool
    none_removes = False

    def check(self, value: Any, field: str, limits: Limits) -> bool:
        if type(value) is not bool:
            wrong(field, "true or false", value)
        return value

    def of_python(self, value: Any, field: str) -> bool:
        if not isinstance(value, bool):
            wrong(field, "True or False", value)
        return value


class Whole(FieldKind):
    """A whole number from ``low`` to ``high``."""

    word, python = "int", "int"
    json: Any = int
    has_limits = True

    def __init__(self, low: int = 0, high: int | str = INTEGER_MAX) -> None:
        """``high`` is a number, or the name of one of the daemon's limits."""
        self.low = low
        self._limit = high if isinstance(high, str) else ""
        self.high: int = getattr(_DEFAULT_LIMITS, high) if isinstance(high, str) else high

    def check(self, value: Any, field: str, limits: Limits) -> int:
        high = getattr(limits, self._limit) if self._limit else self.high
        return integer(value, field, self.low, high)

    def of_task(self, value: Any, field: str, limits: Limits) -> Any:
        return self.check(value, field, limits)

    def of_python(self, value: Any, field: str) -> Any:
        return self.check(value, field, _DEFAULT_LIMITS)

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"minimum": self.low}
        return schema if self.high >= ID_MAX else schema | {"maximum": self.high}

    @property
    def bounds(self) -> str:
        return f"at least {self.low}" if self.high >= ID_MAX else f"{self.low} to {self.high}"


class Moment(Whole):
    """Milliseconds since 1970; in Python a datetime."""

    python, unit = "datetime", "_ms"
    measure, has_limits = "In milliseconds since 1970.", False

    def of_python(self, value: Any, field: str) -> int:
        return moment_ms(value, field)

    def schema(self) -> dict[str, Any]:
        return super().schema() if self.high < ID_MAX else {}


class Span(Whole):
    """Milliseconds. In Python: seconds, a timedelta or text."""

    python, unit = "Duration", "_ms"
    measure = "In milliseconds."

    def of_python(self, value: Any, field: str) -> int:
        return duration_ms(value, field)

    def of_task(self, value: Any, field: str, limits: Limits) -> Any:
        return self.check(self.of_python(value, field), f"{field} in ms", limits)


class Window(Span):
    """The length of a due window in milliseconds; 0 means no window."""

    def check(self, value: Any, field: str, limits: Limits) -> Any:
        within_ms, limit = super().check(value, field, limits), limits.within_ms_max
        if within_ms > limit:
            raise LimitExceeded(f"{field} is {within_ms}; the limit is {limit} (within_ms_max)")
        return within_ms or None


class Shift(Span):
    """Milliseconds, possibly negative. In Python: seconds, a timedelta or text."""

    def __init__(self) -> None:
        super().__init__(INTEGER_MIN)

    def check(self, value: Any, field: str, limits: Limits) -> int:
        return Whole(-limits.delay_ms_max, limits.delay_ms_max).check(value, field, limits)

    def of_python(self, value: Any, field: str) -> int:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(value, str) and value.lstrip().startswith("-"):
            try:
                return round(parse_shift(value) * 1000)
            except ValueError as problem:
                raise BadRequest(f"{field}: {problem}") from None
        is_back = (is_number and value < 0) or (
            isinstance(value, timedelta) and value < timedelta()
        )
        return -duration_ms(-value, field) if is_back else duration_ms(value, field)


class Number(FieldKind):
    """A number from ``low`` to ``high``."""

    word, python, json = "number", "float", float
    has_limits = True

    def __init__(self, what: str, low: float, high: float) -> None:
        """``what`` names the counted things in messages."""
        self.what = what
        self.low, self.high = low, high

    def check(self, value: Any, field: str, limits: Limits) -> float:
        if type(value) not in (int, float) or not self.low <= value <= self.high:
            wrong(field, f"a number between {self.low:g} and {self.high:.0f} ({self.what})", value)
        return float(value)

    def of_python(self, value: Any, field: str) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < float("inf"):
            wrong(field, f"a number above 0 ({self.what})", value)
        if value > self.high:  # an integer may be too large for a float
            return self.check(value, field, _DEFAULT_LIMITS)
        return float(value)

    def schema(self) -> dict[str, Any]:
        return {"minimum": self.low, "maximum": self.high}

    @property
    def bounds(self) -> str:
        return f"{self.low:g} to {self.high:g}"


class Id(Whole):
    """The id of a task; text in JSON, because JSON numbers lose digits."""

    json = str
    has_limits = False

    def __init__(self) -> None:
        super().__init__(0, ID_MAX)

    def schema(self) -> dict[str, Any]:
        return {"pattern": "^[0-9]{1,19}$"}


class Ids(FieldKind):
    """Ids of tasks."""

    word, python, json = "array of int", "Iterable[int]", list[str]

    def check(self, value: Any, field: str, limits: Limits) -> Sequence[int]:
        return task_ids(value, field, limits)

    def of_python(self, value: Any, field: str) -> list[int]:
        return [_task_id(task_id) for task_id in value]

    def schema(self) -> dict[str, Any]:
        return {"minItems": 1, "maxItems": Limits().ids_per_frame_max}


class DeadLetterPairs(FieldKind):
    """Dead letters, each (id, group)."""

    word, python = "array of [id, group]", "Iterable[tuple[int, str]]"

    def check(self, value: Any, field: str, limits: Limits) -> Sequence[tuple[int, str]]:
        letters = array(value, field, limits.ids_per_frame_max)
        for index, letter in enumerate(letters):
            at = f"{field}[{index}]"
            if type(letter) is not tuple or len(letter) != 2:
                wrong(at, "[id, group]", letter)
            ID.check(letter[0], f"{at}.id", limits)
            NAME.check(letter[1], f"{at}.group", limits)
        return letters

    def of_python(self, value: Any, field: str) -> list[tuple[int, str]]:
        return [self._pair(letter) for letter in value]

    @staticmethod
    def _pair(value: Any) -> tuple[int, str]:
        if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[1], str):
            raise BadRequest(f"a dead letter must be (id, group), not {shown(value)}")
        return _task_id(value[0]), value[1]


class Body(FieldKind):
    """The bytes of a task. In JSON they are text, or base64 if they are not UTF-8."""

    word, python, json = "bin", "bytes", bytes
    is_logged = False

    def of_python(self, value: Any, field: str) -> bytes:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise BadRequest(f"{field} must be bytes, not {type(value).__name__}")
        return bytes(value)


class Properties(FieldKind):
    """A producer's own fields of a task: strings, numbers and booleans, by name. An empty map means
    no properties."""

    word, python = "map of str to str, int, float or bool", "Mapping[str, Value]"
    json = dict[str, str | int | float | bool]
    is_logged = False

    def schema(self) -> dict[str, Any]:
        return {"maxProperties": _DEFAULT_LIMITS.properties_max}

    def check(self, value: Any, field: str, limits: Limits) -> Any:
        try:
            values.check_properties(
                value,
                field,
                properties_max=limits.properties_max,
                name_length_max=limits.key_length_max,
                value_bytes_max=limits.property_value_bytes_max,
            )
        except InvalidValue as error:
            raise refusal(error) from None
        return value or None

    def of_python(self, value: Any, field: str) -> dict[str, Any]:
        return dict(value)

    def of_task(self, value: Any, field: str, limits: Limits) -> Any:
        properties = self.check(value, field, limits)
        return None if properties is None else dict(properties)


class PropertyValue(FieldKind):
    """The value of a property: a string, a number or a boolean."""

    word, python = "str, int, float or bool", "Value"
    json, json_name = str | int | float | bool, "PropertyValue"

    def check(self, value: Any, field: str, limits: Limits) -> Any:
        try:
            values.check_property(value, field, limits.property_value_bytes_max)
        except InvalidValue as error:
            raise refusal(error) from None
        return value


class Policy(FieldKind):
    """A retry policy: a name, a text, or a map; in Python ``Retry``."""

    word, python, json = "policy", "Retry", str | dict[str, Any]
    json_name = "Retry"

    def of_python(self, value: Any, field: str) -> Any:
        return policy_wire(value, field)


class Rule(FieldKind):
    """The rule for a task whose key is pending: a word or a map; in Python ``IfPending``."""

    word, python, json = "rule", "Action | IfPending", str | dict[str, Any]
    json_name = "IfPending"

    def of_python(self, value: Any, field: str) -> Any:
        return rule_wire(value, field)


class Since(FieldKind):
    """Milliseconds since 1970, or one of several words; in Python a datetime or a word."""

    word, python, json = "int or str", "datetime | str", str | int

    def __init__(self, *words: str) -> None:
        self.words = words

    def of_python(self, value: Any, field: str) -> Any:
        if isinstance(value, datetime):
            return moment_ms(value, field)
        if value not in self.words:
            words = ", ".join(f"'{word}'" for word in self.words)
            wrong(field, f"{words} or a datetime", value)
        return value

    @property
    def bounds(self) -> str:
        return ", ".join(f"`{word}`" for word in self.words) + ", or milliseconds since 1970"


def _task_id(value: Any) -> int:
    return integer(value, "id", 0, ID_MAX)


ANY, NAME, FLAG, ID = FieldKind(), Name(), Flag(), Id()
IDS, DEAD_LETTERS, BODY = Ids(), DeadLetterPairs(), Body()
PROPERTIES, POLICY, RULE, TEXT, KEY = Properties(), Policy(), Rule(), Text(), Text("key_length_max")
PROPERTY, TAG = PropertyValue(), Tag("key_length_max")
TRACEPARENT, ENCODING = Traceparent(), Encoding()
