"""Commands with one request and one answer, and lists, derived from the declarations of verbs.

The declaration (``Verb.command``) names the command and the fields that are its arguments; all
other fields are options. Help, types, bounds and defaults come from the request's fields. A
function for each command shows the answer and returns the exit code; a list needs only columns.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from tickwheel.api import kinds
from tickwheel.api.shapes import REQUIRED, Block, Field
from tickwheel.api.targets import Password, Secrets
from tickwheel.api.verb import Verb
from tickwheel.api.verbs import VERBS
from tickwheel.cli.call import EXIT_FAILED, Call, Command, ask_person, can_ask
from tickwheel.cli.options import (
    REMOVED_BY_0,
    argument_of,
    limit_option,
    option_of,
    parameter_name,
    past_time_option,
    properties_of,
    time_option,
)
from tickwheel.cli.output import Column, Listing, fields_of
from tickwheel.client import Client
from tickwheel.errors import BadRequest, Conflict

Request = Mapping[str, Any]
"""The fields of a request by the client's keywords."""
Show = Callable[[Call, Request, Any], int | None]
"""Shows the answer of a verb. Returns the exit code; None means 0."""

FIRST = "delete them first"
"""The end of the daemon's message when force does not help."""
FILE_BYTES_MAX = 64 * 1024


def declared(
    name: str, show: Show, note: str = "", check: Callable[[Request], None] | None = None
) -> Command:
    """Return the command of a verb. ``note`` is the end of its help; ``check`` raises BadRequest
    for options that cannot be combined."""
    verb = VERBS[name]
    method = verb.methods[0].name if verb.methods else verb.name
    fields = _fields_of(verb)

    async def run(call: Call, **values: Any) -> int | None:
        request = _request(verb, fields, values)
        if check is not None:
            check(request)
        try:
            answer = await call.ask(lambda client: getattr(client, method)(**request))
        except Conflict as conflict:
            is_final = "force" in request or "dry_run" in request
            if "force" not in fields or is_final or conflict.message.endswith(FIRST):
                raise
            if not can_ask(call):
                raise Conflict(f"{conflict.message}; --force deletes it with them") from None
            call.out.remark(conflict.message)
            subject = " of ".join(f"{n} {request[n]}" for n in reversed(_arguments(verb)))
            if not ask_person(f"Delete {subject} with its contents?"):
                call.out.remark("nothing was deleted")
                return EXIT_FAILED
            request["force"] = True
            answer = await call.ask(lambda client: getattr(client, method)(**request))
        return show(call, request, answer)

    # A list of commands shows only the first sentence. Errors are those of the client's method.
    text = (verb.text or f"{verb.summary}.").partition(" Raise ")[0].replace("``", "`")
    return _command(verb, text.replace(". ", ".\n\n", 1) + f"\n\n{note}", run, fields, time_option)


def listed(
    name: str,
    help_: str,
    columns: Sequence[Column[Any]],
    fields: Callable[[Any], dict[str, Any]] = fields_of,
    nothing: str = "",
    spare: Sequence[str] = (),
    method: str = "",
) -> Command:
    """Return the command that lists what a verb finds: all of its pages, or its only answer.
    ``nothing`` can name arguments; ``method`` is the client's method, by default the verb's."""
    verb = VERBS[name]
    method = method or verb.methods[0].name
    options = _fields_of(verb)
    page: Any = options.pop("limit").kind
    answer_max: int = page.high

    async def run(call: Call, limit: int | None = None, **values: Any) -> None:
        request = _request(verb, options, values)
        labels = {label: request[label] for label in _arguments(verb)}

        async def once(client: Client, count: int | None) -> AsyncIterator[Any]:
            asked = min(count or answer_max, answer_max)
            items = await getattr(client, method)(**request, limit=asked)
            if limit is None and len(items) == answer_max:
                call.out.remark(
                    f"these are the first {answer_max:,}; the daemon returns no more at once"
                )
            for item in items:
                yield item

        def pages(client: Client, count: int | None) -> Any:
            return getattr(client, method)(**request, limit=count)

        remark = nothing.format(**request) or None
        listing = Listing(call.out, columns, lambda one: labels | fields(one), remark, spare)
        await call.listed(limit, pages if verb.pages else once, listing)

    limit = Annotated[int | None, limit_option(None if verb.pages else answer_max)]
    return _command(verb, help_, run, options, past_time_option, _keyword("limit", limit, None))


def _command(
    verb: Verb,
    help_: str,
    run: Command,
    fields: Mapping[str, Field],
    times: Callable[..., Any],
    *more: inspect.Parameter,
) -> Command:
    """Make ``run`` a command with a parameter for each field."""
    own, arguments = [], _arguments(verb)
    for name, field in fields.items():
        word = next((word for word in (name, field.name) if word in arguments), None)
        annotation = option_of(field, times) if word is None else argument_of(word.upper(), field)
        default = False if isinstance(field.kind, kinds.Flag) else field.default
        own.append(_keyword(name, annotation, default))
    # Required parameters first, as Python demands; otherwise in declared order.
    own.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)
    call = inspect.Parameter("call", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Call)
    run.__signature__ = inspect.Signature([call, *own, *more])  # type: ignore[attr-defined]  # ``command`` reads it
    run.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
    run.__doc__, run.__name__ = help_, [w for w in verb.command.split() if not w.isupper()][-1]
    return run


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is REQUIRED else default
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, annotation=annotation, default=default)


def _arguments(verb: Verb) -> list[str]:
    return [word.lower() for word in verb.command.split() if word.isupper()]


def _fields_of(verb: Verb) -> dict[str, Field]:
    """Return the fields of a request by their parameters: those of a block last, and without
    ``after``, which the client sets for each page."""
    own = [f for f in verb.request_type.fields() if not (verb.pages and f.name == "after")]
    blocks = [field.kind.block for field in own if isinstance(field.kind, Block)]
    fields = [f for f in own if not isinstance(f.kind, Block)]
    return {parameter_name(f): f for f in (*fields, *(f for b in blocks for f in b.fields()))}


def _request(verb: Verb, fields: Mapping[str, Field], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client's keywords for the parameters that were given. Raise BadRequest."""
    given = {
        name: value
        for name, value in values.items()
        if value is not None and not (value is False and isinstance(fields[name].kind, kinds.Flag))
    }
    one_of = verb.request_type.one_of
    alternatives = [name for name, field in fields.items() if field.name in one_of]
    if alternatives and len(given.keys() & set(alternatives)) != 1:
        arguments = _arguments(verb)
        names = (name.upper() if name in arguments else f"--{name}" for name in alternatives)
        raise BadRequest(f"give exactly one of {', '.join(names)}")
    return {
        name if name == "task_id" else fields[name].python: _value(fields[name], value)
        for name, value in given.items()
    }


def _value(field: Field, value: Any) -> Any:
    """Return an option's value as the client accepts it."""
    if isinstance(field.kind, (Secrets, Password)):
        secrets = read_secrets(value)
        return secrets if isinstance(field.kind, Secrets) else secrets[0]
    if isinstance(field.kind, kinds.Properties):
        return properties_of(value)
    if field.name in REMOVED_BY_0:
        return value or None
    return os.fsencode(value) if isinstance(field.kind, kinds.Body) else value


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
        raise BadRequest(f"--secret-file {path} contains other characters than ASCII") from None
    if len(data) > FILE_BYTES_MAX:
        raise BadRequest(f"--secret-file {path} has more than {FILE_BYTES_MAX} bytes")
    lines = (line.strip() for line in text.splitlines())
    secrets = [line for line in lines if line and not line.startswith("#")]
    if not secrets:
        raise BadRequest(f"--secret-file {path} contains no secret")
    return secrets
