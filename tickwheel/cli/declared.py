"""Commands with one request and one answer, derived from the declarations of their verbs.

The declaration (``Verb.command``) names the command and the fields that are its arguments; all
other fields are options. Help, types, bounds and defaults come from the request's fields. A
function for each command shows the answer and returns the exit code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any

from tickwheel.api import kinds
from tickwheel.api.shapes import Field
from tickwheel.api.targets import Password, Secrets, Url
from tickwheel.api.verb import Verb
from tickwheel.api.verbs import VERBS
from tickwheel.cli.call import Call, Command
from tickwheel.cli.options import (
    argument,
    complete_topics,
    duration,
    flag,
    option,
    parse_id,
    parse_value,
    point,
)
from tickwheel.errors import BadRequest
from tickwheel.model.values import INTEGER_MAX

Show = Callable[[Call, Mapping[str, Any], Any], int | None]
"""Shows the answer of a verb, given the call, the request by the client's keywords, and the answer.
Returns the exit code; None means 0."""

FILE_BYTES_MAX = 64 * 1024


def declared(name: str, show: Show, note: str = "") -> Command:
    """Return the command of a verb; ``note`` is the end of its help."""
    verb = VERBS[name]
    method = verb.methods[0].name if verb.methods else verb.name
    arguments = [word.lower() for word in verb.command.split() if word.isupper()]
    fields = {_parameter_name(field): field for field in verb.request_type.fields()}

    async def run(call: Call, **values: Any) -> int | None:
        request = {
            fields[name].python: _value(fields[name], value)
            for name, value in values.items()
            if value is not None
        }
        one_of = verb.request_type.one_of
        if one_of and sum(name in request for name in one_of) != 1:
            raise BadRequest(f"give exactly one of --{', --'.join(one_of)}")
        answer = await call.ask(lambda client: getattr(client, method)(**request))
        return show(call, request, answer)

    own = sorted(  # required parameters first, as Python demands; otherwise in declared order
        (_parameter(name, field, is_argument=field.name in arguments)
         for name, field in fields.items()),
        key=lambda parameter: parameter.default is not inspect.Parameter.empty,
    )  # fmt: skip
    call = inspect.Parameter("call", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Call)
    run.__doc__ = f"{_help(verb)}\n\n{note}"
    run.__signature__ = inspect.Signature([call, *own])  # type: ignore[attr-defined]  # ``command`` reads it
    run.__annotations__ = {p.name: p.annotation for p in own}
    return run


def _help(verb: Verb) -> str:
    """Return a verb's help, without the errors of its method. A list of commands shows only the
    first sentence."""
    text = (verb.text or f"{verb.summary}.").partition(" Raises ")[0]
    return _shown(text.replace(". ", ".\n\n", 1))


def _shown(text: str) -> str:
    return text.replace("``", "`")


def _parameter_name(field: Field) -> str:
    """Return the parameter's name, which is also the option's: ``--url`` already means the
    daemon's."""
    if isinstance(field.kind, (Secrets, Password)):
        return "secret_file"
    name = "to" if isinstance(field.kind, Url) else field.name.removesuffix(field.kind.unit)
    return f"{name}_" if iskeyword(name) or name == "format" else name


def _parameter(name: str, field: Field, *, is_argument: bool) -> inspect.Parameter:
    kind, text = field.kind, _shown(field.text)
    default = inspect.Parameter.empty if field.is_required else field.default
    type_: Any = str
    if is_argument:
        more: dict[str, Any] = {"autocompletion": complete_topics} if name == "topic" else {}
        if isinstance(kind, kinds.Whole) and not isinstance(kind, kinds.Id):
            type_, more = int, _bounds(kind)
        parse = parse_id if isinstance(kind, kinds.Id) else None
        info = argument(field.name.upper(), text, parse, **more)
    elif isinstance(kind, Secrets):
        info = option(f"{text} The file has one on each line: {kind.bounds}.", "FILE")
    elif isinstance(kind, Password):
        info = option(f"{text} The file contains it.", "FILE")
    elif isinstance(kind, kinds.Flag):
        type_, info = bool, flag(text)
    elif isinstance(kind, kinds.Span):
        type_, info = float, duration(text)
    elif isinstance(kind, kinds.Moment):
        type_, info = Any, point(text)
    elif isinstance(kind, kinds.Whole):
        type_, info = int, option(text, "N", **_bounds(kind))
    elif isinstance(kind, kinds.PropertyValue):
        type_, info = Any, option(f"{text} :=12 is a number.", parse=parse_value)
    elif isinstance(kind, kinds.Choice):
        info = option(text, "|".join(kind.words))
    else:
        info = option(text, "URL" if isinstance(kind, Url) else None)
    annotated_type: Any = type_ | None if default is None and type_ is not Any else type_
    annotation: Any = Annotated[annotated_type, info]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, annotation=annotation, default=default)


def _bounds(kind: kinds.Whole) -> dict[str, Any]:
    return {"min": kind.low} | ({"max": kind.high} if kind.high < INTEGER_MAX else {})


def _value(field: Field, value: Any) -> Any:
    """Return an option's value as the client accepts it."""
    if isinstance(field.kind, Secrets):
        return read_secrets(value)
    return read_secrets(value)[0] if isinstance(field.kind, Password) else value


def read_secrets(path: str) -> list[str]:
    """Return the secrets in a file, one from each line that is not a comment (#). Raise
    BadRequest."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        text = data.decode("ascii")
    except OSError as error:
        raise BadRequest(f"--secret-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"--secret-file {path} is not ASCII") from None
    if len(data) > FILE_BYTES_MAX:
        raise BadRequest(f"--secret-file {path} has more than {FILE_BYTES_MAX} bytes")
    lines = (line.strip() for line in text.splitlines())
    secrets = [line for line in lines if line and not line.startswith("#")]
    if not secrets:
        raise BadRequest(f"--secret-file {path} contains no secret")
    return secrets
