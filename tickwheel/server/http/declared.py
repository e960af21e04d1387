"""Serves the declared verbs over HTTP: their msgspec types, the conversion of values to and from
JSON, and their handlers.

In JSON, ids are text, bodies are text or base64, and references to dead letters are ID.GROUP. This
module contains no verb: everything is derived from the declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tickwheel.api.kinds import Body, FieldKind, Id, Ids, Policy, Rule
from tickwheel.api.shapes import Answer, Block, Field
from tickwheel.api.tasks import AcceptedIds, Failure, LetterPlace, TaskOutcome
from tickwheel.errors import BadRequest, shown
from tickwheel.limits import ID_MAX
from tickwheel.model.records import ID_STEP
from tickwheel.model.values import whole_number
from tickwheel.server.http.call import as_json, put_body
from tickwheel.server.http.types import NULL_REMOVES_SETTING, annotated_type, policy, rule

if TYPE_CHECKING:
    from tickwheel.api.verb import Verb
    from tickwheel.server.http.call import Call, Handler

WITHOUT_BODY = ("GET", "DELETE")
"""Methods whose requests have their fields in the query string."""


# --- values --------------------------------------------------------------------------------------


def read_id(text: object, field: str) -> int:
    """Return the id that a text represents. Raise BadRequest if it is invalid."""
    task_id = whole_number(text) if type(text) is str else None
    if task_id is not None and task_id <= ID_MAX:
        return task_id
    raise BadRequest(
        f"{field} must be text with a whole number between 0 and {ID_MAX}, not {shown(text)}"
    )


def read_ids(texts: Sequence[str], field: str = "ids") -> tuple[int, ...]:
    """Return the ids that texts represent. Raise BadRequest if there are none or one is invalid."""
    if not texts:
        raise BadRequest(f"{field} has 0 elements; the minimum is 1")
    return tuple(read_id(text, f"{field}[{index}]") for index, text in enumerate(texts))


def from_json(kind: FieldKind, value: Any, field: str) -> Any:
    """Return the wire form of a JSON value. Raise BadRequest if the value is invalid."""
    if value is None:
        return None
    if isinstance(kind, Id):
        return read_id(value, field)
    if isinstance(kind, Ids):
        return read_ids(value, field)
    if isinstance(kind, LetterPlace):
        task_id, _, group = value.partition(".")
        return read_id(task_id, field), group
    if isinstance(kind, Block):
        values = set_fields(value)
        return {
            member.name: from_json(member.kind, values[member.name], f"{field}.{member.name}")
            for member in kind.block.fields()
            if member.name in values
        }
    if isinstance(kind, Policy):
        return policy(value, field)
    return rule(value, field) if isinstance(kind, Rule) else value


def set_fields(struct: Any) -> dict[str, Any]:
    """Return the fields that are set in a body or a query, by name."""
    values = ((name, getattr(struct, name)) for name in struct.__struct_fields__)
    return {name: value for name, value in values if value is not UNSET}


def to_json(answer: Any, value: Any) -> Any:
    """Return the JSON form of ``value``, which has the declared type ``answer``."""
    return _writer(answer)(value)


@cache
def _writer(answer: Any) -> Callable[[Any], Any]:
    """Return the function that converts values of the type ``answer`` to JSON."""
    origin, arguments = get_origin(answer), get_args(answer)
    if origin is Annotated:
        return _writer(arguments[0])
    if isinstance(answer, type) and origin is None:
        if issubclass(answer, Answer):
            return _map_writer(answer)
        return _WRITERS.get(answer, _unchanged)
    inner = [argument for argument in arguments if argument not in (type(None), ...)]
    writer = _writer(inner[-1]) if inner else _unchanged
    if writer is _unchanged:
        return _unchanged
    if type(None) in arguments:
        return lambda value: None if value is None else writer(value)
    if origin in (list, tuple, Sequence):
        return lambda value: [writer(item) for item in value]
    return lambda value: {name: writer(item) for name, item in value.items()}


def _unchanged(value: Any) -> Any:
    return value


def _map_writer(answer: type[Answer]) -> Callable[[Any], Any]:
    writers = {f.name: w for f in answer.fields() if (w := _field_writer(f)) is not _unchanged}
    body = next((f.name for f in answer.fields() if isinstance(f.kind, Body)), None)

    def write(value: Mapping[str, Any]) -> dict[str, Any]:
        view = dict(value)
        for name, writer in writers.items():
            if view.get(name) is not None:
                view[name] = writer(view[name])
        if body is not None and body in view:
            data = view.pop(body)
            if data is not None:
                put_body(view, data)
        return view

    return write if writers or body else _unchanged


def _field_writer(field: Field) -> Callable[[Any], Any]:
    if isinstance(field.kind, Id):
        return str
    if isinstance(field.kind, Ids):
        return lambda ids: list(map(str, ids))
    if isinstance(field.kind, LetterPlace):
        return lambda letter: f"{letter[0]}.{letter[1]}"
    return _writer(field.annotation)


def results(outcomes: Sequence[Any]) -> dict[str, Any]:
    """Return the JSON of outcomes for several tasks: id and result, and the due time of a moved
    task."""
    names = ("id", "result", "due_ms")
    return {
        "results": [
            dict(zip(names, outcome, strict=False))
            | {"id": None if outcome[0] is None else str(outcome[0])}
            for outcome in outcomes
        ]
    }


def _accepted(answer: Sequence[Any]) -> dict[str, Any]:
    """Return the JSON for ids of new tasks. The answer is (ms, ids) or (ms, first id, count)."""
    ids = answer[1]
    if isinstance(ids, int):
        ids = range(ids, ids + answer[2] * ID_STEP, ID_STEP)
    return {"ids": [str(task_id) for task_id in ids]}


_WRITERS: Mapping[type, Callable[[Any], Any]] = {
    AcceptedIds: _accepted,
    Failure: lambda failure: Failure.of(failure)._asdict(),
}
"""For each type that the wire represents as an array, the function that converts it to JSON."""


# --- types ---------------------------------------------------------------------------------------


@cache
def request_type(request: Any, excluded: frozenset[str], name: str = "") -> type[msgspec.Struct]:
    """Return the type of a request's body or query, without the fields ``excluded``, such as those
    in the path. An absent field is UNSET. Types of the same request with different fields need
    different names, because the document has one schema for each name."""
    fields: list[Any] = []
    for field in request.fields():
        if field.name in excluded:
            continue
        if isinstance(field.kind, Body):
            for form, python in (("body", str), ("body_base64", bytes)):
                fields.append((form, annotated_type(python, field, UnsetType, type(None)), UNSET))
            continue
        is_block = isinstance(field.kind, Block)
        kind = request_type(field.kind.block, frozenset()) if is_block else field.kind.json
        null_removes = request.none_is_sent and field.kind.none_removes
        marks: dict[str, Any] = {NULL_REMOVES_SETTING: True} if null_removes else {}
        if not field.is_required and field.default is not None:
            marks["default"] = field.default
        if field.is_required:
            fields.append((field.name, annotated_type(kind, field)))
        else:
            alternatives = (UnsetType, type(None)) if field.may_be_none else (UnsetType,)
            fields.append((field.name, annotated_type(kind, field, *alternatives, **marks), UNSET))
    return msgspec.defstruct(
        name or request.__name__, fields, kw_only=True, forbid_unknown_fields=True,
        namespace={"__doc__": request.__doc__},
    )  # fmt: skip


@cache
def answer_type(answer: Any) -> Any:
    """Return the msgspec type of an answer's JSON, from which its schema is derived."""
    origin, arguments = get_origin(answer), get_args(answer)
    if origin is Annotated:
        return answer_type(arguments[0])
    if answer == list[TaskOutcome]:
        return RESULTS_TYPE
    if answer is AcceptedIds:
        return _IDS_TYPE
    if isinstance(answer, type) and origin is None:
        return _class_type(answer)
    if not arguments:
        return Any
    inner = tuple(kind if kind in (type(None), ...) else answer_type(kind) for kind in arguments)
    if origin in (list, tuple, Sequence):
        return list[inner[0]]  # type: ignore[valid-type]
    if origin is not None and issubclass(origin, Mapping):
        return dict[str, inner[1]]  # type: ignore[valid-type]
    return reduce(or_, inner)


def _class_type(answer: type) -> Any:
    if issubclass(answer, Answer):
        return _answer_struct(answer)
    if issubclass(answer, tuple) and hasattr(answer, "_fields"):
        hints = get_type_hints(answer, include_extras=True)
        fields = [
            (name, Annotated[get_args(hint)[0], Meta(description=get_args(hint)[1])])
            for name, hint in hints.items()
        ]
        return msgspec.defstruct(answer.__name__, fields, namespace={"__doc__": answer.__doc__})
    return answer if answer in _PLAIN else dict[str, Any]


_PLAIN = (int, str, float, bool, bytes, object, Any)


def _answer_struct(answer: type[Answer]) -> type[msgspec.Struct]:
    fields: list[Any] = []
    for field in answer.fields():
        if isinstance(field.kind, Body):
            fields.append(("body", annotated_type(str, field, type(None)), None))
            fields.append(("body_base64", annotated_type(bytes, field, type(None)), None))
            continue
        if isinstance(field.kind, Ids):  # the list can be empty, unlike in a request
            fields.append((field.name, Annotated[list[str], Meta(description=field.text or None)]))
            continue
        has_kind = type(field.kind) is not FieldKind
        kind = field.kind.json if has_kind else answer_type(field.annotation)
        alternatives = (type(None),) if field.may_be_none else ()
        shown_kind = annotated_type(kind, field, *alternatives)
        fields.append(
            (field.name, shown_kind) if field.is_required else (field.name, shown_kind | None, None)
        )
    # Client generators create a variable for the type's name and one for each field's name.
    collides = any(field.name == answer.__name__.lower() for field in answer.fields())
    name = f"{answer.__name__}Answer" if collides else answer.__name__
    return msgspec.defstruct(name, fields, kw_only=True, namespace={"__doc__": answer.__doc__})


RESULT_TYPE = msgspec.defstruct(
    "Result",
    [
        ("id", Annotated[str | None, Meta(description="The task, or null without such a task.")]),
        (
            "result",
            Annotated[
                str, Meta(description="The change of the task, or the state that forbids it.")
            ],
        ),
        (
            "due_ms",
            Annotated[
                int | None,
                Meta(description="The new due time of a moved task, in milliseconds since 1970."),
            ],
            None,
        ),
    ],
    namespace={"__doc__": "The outcome of a command for a task."},
)


RESULTS_TYPE = msgspec.defstruct(
    "ResultList",
    [
        (
            "results",
            Annotated[
                list[RESULT_TYPE],  # type: ignore[valid-type]
                Meta(description="The outcome for each task, in the order of the request."),
            ],
        )
    ],
    namespace={"__doc__": "The outcomes of a command for several tasks."},
)
_IDS_TYPE = msgspec.defstruct(
    "AcceptedIds",
    [("ids", Annotated[list[str], Meta(description="The ids of the new tasks.")])],
    namespace={"__doc__": AcceptedIds.__doc__},
)


# --- the handler ---------------------------------------------------------------------------------


def handler_of(verb: Verb, path_fields: frozenset[str]) -> Handler:
    """Return the handler of a verb whose path contains the fields ``path_fields``."""
    request: Any = verb.request_type
    method = verb.path.partition(" ")[0]
    fields_type = request_type(request, path_fields)
    decoder = msgspec.json.Decoder(fields_type)
    has_fields = bool(fields_type.__struct_fields__)
    render = renderer(verb.answer)
    kinds = {field.name: field.kind for field in request.fields()}
    body = next((name for name, kind in kinds.items() if isinstance(kind, Body)), None)

    async def handle(call: Call) -> None:
        is_new = True

        def show(value: Any) -> bytes:
            nonlocal is_new
            is_new = method != "PUT" or value.get("created", value.get("outcome") == "created")
            return render(value)

        answer = await call.ask(verb.name, await values_of(call), show)
        if verb.answer is AcceptedIds and not isinstance(answer, bytes):
            answer = render(answer)  # the exchange returns ids of new tasks without ``show``
        await call.answer(answer, verb.status if is_new else 200)

    async def values_of(call: Call) -> dict[str, Any]:
        """Return the fields of the request in wire form."""
        values: dict[str, Any] = dict(call.path_values)
        if has_fields:
            in_query = method in WITHOUT_BODY
            values |= set_fields(call.query(fields_type) if in_query else await call.json(decoder))
        if body is not None:
            values[body] = _body_of(values, verb.name)
        return {
            name: value if name == body else from_json(kinds[name], value, name)
            for name, value in values.items()
        }

    handle.__name__ = verb.name
    return handle


def _body_of(values: dict[str, Any], field: str) -> bytes | None:
    """Return the bytes of a body, which is text or base64. Raise BadRequest if both are set."""
    text: str | None = values.pop("body", None)
    data: bytes | None = values.pop("body_base64", None)
    if text is not None and data is not None:
        raise BadRequest(f"{field} must have body or body_base64, not both")
    return data if text is None else text.encode()


def renderer(answer: Any) -> Callable[[Any], bytes]:
    """Return the function that encodes an answer. It runs in the operation's step of the loop."""
    return lambda value: as_json(
        results(value) if answer == list[TaskOutcome] else to_json(answer, value)
    )
