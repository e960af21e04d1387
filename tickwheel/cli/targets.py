"""``tickwheel push`` and ``tickwheel forward``: groups whose tasks are sent to a URL, or to another
broker, instead of to subscribers.

Secrets come from files, a line each, and are shown by no command. (The address of a target is
``--to``: ``--url`` is the daemon's, here as everywhere.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tickwheel.cli.call import EXIT_FAILED, Call, given
from tickwheel.cli.options import GroupArgument, TopicArgument, argument, duration, option
from tickwheel.cli.output import (
    Column,
    Listing,
    ago,
    column,
    count_columns,
    facts_grid,
    fields_of,
    format_duration,
    format_time,
    printable,
    text_columns,
)
from tickwheel.client import PushSent, TargetInfo
from tickwheel.errors import BadRequest

FILE_BYTES_MAX = 64 * 1024
ERROR_SHOWN = 60
"""Characters of an error in a table."""
MaybeTopic = Annotated[str | None, argument("TOPIC", "Only of this topic.")]
SecretFile = Annotated[
    str | None, option("A file with secrets (whsec_… or whsk_…), a line each.", "FILE")
]
FormatOption = Annotated[
    str | None, option("The body as it is, or as a CloudEvent.", "plain|cloudevents", "--format")
]


def read_secrets(path: str) -> list[str]:
    """The lines of a file that has secrets; lines with # are comments. Raises BadRequest."""
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
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise BadRequest(f"--secret-file {path} has no secret in it")
    return found


# --- push ----------------------------------------------------------------------------------------


async def set_push(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    to: Annotated[str, option("Where each task is sent to, by POST.", "URL")],
    secret_file: SecretFile = None,
    format_: FormatOption = None,
    concurrency: Annotated[int | None, option("Requests at a time. Default: 32.", "N")] = None,
    request_timeout: Annotated[float | None, duration("For a whole request. Default: 30s.")] = None,
    connect_timeout: Annotated[float | None, duration("For a connection. Default: 5s.")] = None,
    callback_lease: Annotated[
        float | None, duration("After 202 wait so long for a callback.")
    ] = None,
) -> None:
    """Send the tasks of a group to a URL, signed as Standard Webhooks says.

    Without --secret-file the secrets that are set stay.
    """
    said = given(
        {
            "secrets": None if secret_file is None else read_secrets(secret_file),
            "format": format_,
            "concurrency": concurrency,
            "request_timeout": request_timeout,
            "connect_timeout": connect_timeout,
            "callback_lease": callback_lease,
        }
    )
    _say_set(call, await call.ask(lambda client: client.set_push(topic, group, to, **said)))


async def list_push(call: Call, topic: MaybeTopic = None) -> None:
    """Every push, and how it goes."""
    await _list(call, topic, "push")


async def try_push(
    call: Call,
    to: Annotated[str, argument("URL", "Where one request is sent to.")],
    secret_file: SecretFile = None,
    format_: FormatOption = None,
) -> int | None:
    """Send one request to a URL, and say what came of it. Exit code 1 unless it was 2xx."""
    said = given(
        {
            "secrets": None if secret_file is None else read_secrets(secret_file),
            "format": format_,
        }
    )
    return _say_sent(call, await call.ask(lambda client: client.test_push(to, **said)))


async def log_push(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    limit: Annotated[int, option("How many at most.", "N", min=1, max=200)] = 50,
) -> None:
    """The last requests of a push, the newest first; the daemon keeps 200 in memory."""
    found = await call.ask(lambda client: client.push_log(topic, group, limit=limit))
    nothing = f"nothing was sent for group {group} of topic {topic} yet"
    Listing.of(call.out, SENT, fields_of, nothing).show(found)


async def resend_push(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    number: Annotated[int, argument("NUMBER", "As `push log` shows it.")],
) -> int | None:
    """Send one of the last requests once more; nothing becomes of its task."""
    found = await call.ask(lambda client: client.resend(topic, group, number))
    return _say_sent(call, found)


def _cut(text: str | None) -> str:
    return printable(text or "")[:ERROR_SHOWN] or "-"


def _took(one: PushSent) -> str:
    return format_duration(one.duration_ms / 1000)


STATUS = column("status", right=True)
SENT = (
    column("number", right=True), column("at", "at_ms", format_time),
    column("task", "id", right=True), column("attempt", right=True),
    Column[PushSent]("result", lambda one: one.result + (" (again)" if one.again else "")),
    STATUS, Column("took", _took, right=True),
    Column[PushSent]("answer", lambda one: _cut(one.error or one.body)),
)  # fmt: skip


def _say_sent(call: Call, one: PushSent) -> int | None:
    if call.out.as_json:
        call.out.record(fields_of(one))
    else:
        facts = {
            "result": one.result,
            "status": STATUS.cell(one),
            "took": _took(one),
            "address": one.address or "-",
            "error": _cut(one.error),
            "answer": _cut(one.body),
        }
        call.out.grid(facts_grid(("what", "value"), facts))
    return None if one.result == "acked" else EXIT_FAILED


# --- forward -------------------------------------------------------------------------------------


async def set_forward(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    to: Annotated[str, option("redis://HOST/DB?stream=NAME, amqp://…, kafka://…", "URL")],
    secret_file: Annotated[
        str | None, option("A file with the password; the user stands in the URL.", "FILE")
    ] = None,
    batch: Annotated[int | None, option("Tasks sent together. Default: 512.", "N")] = None,
    concurrency: Annotated[int | None, option("Batches at a time. Default: 1.", "N")] = None,
) -> None:
    """Send the tasks of a group to another broker."""
    secret = None if secret_file is None else read_secrets(secret_file)[0]
    said = given({"secret": secret, "batch": batch, "concurrency": concurrency})
    _say_set(call, await call.ask(lambda client: client.set_forward(topic, group, to, **said)))


async def list_forward(call: Call, topic: MaybeTopic = None) -> None:
    """Every forwarder, and how it goes."""
    await _list(call, topic, "forward")


# --- both ----------------------------------------------------------------------------------------


async def remove(call: Call, topic: TopicArgument, group: GroupArgument) -> None:
    """Send the tasks of a group nowhere any more; it takes subscribers again."""
    found = await call.ask(lambda client: client.remove_target(topic, group))
    said = f"group {group} of topic {topic} is not sent to {found.url} any more"
    call.out.result(fields_of(found), said)


async def _list(call: Call, topic: str | None, kind: str) -> None:
    found = await call.ask(lambda client: client.targets(topic=topic))
    nothing = "no group is pushed" if kind == "push" else "no group is forwarded"
    rows = [one for one in found if one.kind == kind]
    Listing.of(call.out, TARGETS, fields_of, nothing).show(rows)


def _trouble(one: TargetInfo) -> str:
    if one.state not in ("ended", "failing", "open"):
        return "-"
    return _cut(one.reason if one.state == "ended" else one.last_error)


TARGETS = (
    *text_columns("topic", "group"), column("to", "url"), column("state"),
    *count_columns("sent", "acked", "failed"), column("last", "last_ms", ago),
    Column("trouble", _trouble),
)  # fmt: skip


def _say_set(call: Call, one: TargetInfo) -> None:
    verb = "pushed" if one.kind == "push" else "forwarded"
    said = f"group {one.group} of topic {one.topic} is {verb} to {one.url}"
    call.out.result(fields_of(one), said)
