"""The program ``tickwheel``: its commands, its shared options and its exit codes.

``run`` turns arguments into an exit code: 0 done, 1 failed, 2 usage (or a request that the daemon
refuses as invalid), 3 the daemon cannot be reached, 4 no such task. Any error that a user can cause
is one line on stderr; a traceback means a bug.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from tickwheel import environment
from tickwheel.cli import (
    enqueue,
    groups,
    history,
    inbox,
    nodes,
    schedules,
    serve,
    subscribe,
    tasks,
    top,
    upgrade,
)
from tickwheel.cli.call import (
    EXIT_FAILED,
    JSON_HELP,
    KEYS_HELP,
    TOKEN_HELP,
    URL_HELP,
    Command,
    Shared,
    command,
    exit_code,
    nested,
)
from tickwheel.cli.options import flag, option
from tickwheel.cli.output import remark
from tickwheel.client.encodings import KEYS_VARIABLE
from tickwheel.errors import TickwheelError, Unreachable
from tickwheel.version import __version__

OTHER_WORDS = {
    "requeue": "dead requeue", "retry": "dead requeue", "redrive": "dead requeue", "dlq": "dead",
    "publish": "enqueue", "send": "enqueue", "add": "enqueue",
    "consume": "subscribe", "receive": "subscribe", "delete": "cancel", "purge": "topics delete",
    "delay": "reschedule", "postpone": "reschedule", "get": "show", "ls": "list", "tasks": "list",
    "queues": "topics", "start": "serve", "server": "serve", "worker": "work",
    "migrate": "store upgrade", "upgrade": "store upgrade",
}  # fmt: skip
"""Other names for commands → the command."""


class _Root(TyperGroup):
    """The top-level commands. For another product's command it suggests the one of this program."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0] if args else ""
        if word in OTHER_WORDS and word not in self.commands:
            ctx.fail(f"No such command {word!r}. Did you mean {OTHER_WORDS[word]!r}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="tickwheel",
    cls=_Root,
    help="A durable timing-wheel scheduler: enqueue tasks and receive each when it is due.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 daemon unreachable, 4 not found.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
CA_HELP = "tls://: certificates to trust instead of the system's (PEM)."
CERT_HELP = "tls://: the client certificate, if the daemon requires one (PEM)."
KEY_HELP = "The key of --client-cert, if it is in a separate file."


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"tickwheel {__version__}")
        raise typer.Exit


@app.callback()
def shared(
    ctx: typer.Context,
    url: Annotated[str | None, option(URL_HELP, "URL", envvar="TICKWHEEL_URL")] = None,
    token: Annotated[str | None, option(TOKEN_HELP, "TOKEN", envvar="TICKWHEEL_TOKEN")] = None,
    as_json: Annotated[bool, flag(JSON_HELP, "--json")] = False,
    ca: Annotated[str | None, option(CA_HELP, "FILE", envvar="TICKWHEEL_CA")] = None,
    client_cert: Annotated[
        str | None, option(CERT_HELP, "FILE", envvar="TICKWHEEL_CLIENT_CERT")
    ] = None,
    client_key: Annotated[
        str | None, option(KEY_HELP, "FILE", envvar="TICKWHEEL_CLIENT_KEY")
    ] = None,
    keys_file: Annotated[str | None, option(KEYS_HELP, "FILE", envvar=KEYS_VARIABLE)] = None,
    version: Annotated[
        bool, flag("Print the version and exit.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Store the options before the command's name for the command."""
    environment.check(_settings)
    ctx.obj = Shared(url=url, token=token, as_json=as_json)
    # For every client of this process, including those that a program of `work` creates.
    files = {"CA": ca, "CLIENT_CERT": client_cert, "CLIENT_KEY": client_key}
    files["KEYS_FILE"] = keys_file
    os.environ.update({f"TICKWHEEL_{name}": path for name, path in files.items() if path})


def _settings() -> Iterable[str] | None:
    """Return the names of the daemon's settings, if the daemon is installed."""
    try:
        from tickwheel.server.settings import Settings
    except ModuleNotFoundError:
        return None
    return Settings.model_fields


# --- the commands, in the order in which the help shows them -------------------------------------

SERVE = "A daemon and its store"
TASKS = "Tasks"
TOPICS = "Topics and groups"
WATCH = "Observe"

COMMANDS: tuple[tuple[str, Command], ...] = (
    (SERVE, serve.serve), (SERVE, serve.demo), (SERVE, serve.check), (SERVE, serve.init),
    (SERVE, serve.reshard), (SERVE, serve.deploy_files),
    (TASKS, enqueue.enqueue), (TASKS, subscribe.subscribe), (TASKS, tasks.cancel),
    (TASKS, tasks.reschedule), (TASKS, tasks.run_now), (TASKS, tasks.show), (TASKS, tasks.list_),
    (TASKS, tasks.explain), (TASKS, subscribe.peek),
    (SERVE, serve.status), (WATCH, top.stats), (SERVE, serve.backup),
    (WATCH, top.load),
    (TOPICS, groups.pause), (TOPICS, groups.resume), (TOPICS, groups.rate),
    (TOPICS, subscribe.consumers), (SERVE, history.restore), (WATCH, history.report),
    (WATCH, top.top), (WATCH, top.console), (TASKS, subscribe.work), (WATCH, serve.bench),
)  # fmt: skip
"""Commands with the panel of the help that lists them; a command has its function's name."""


def _below(panel: str, name: str, help_: str, *, lists: bool = True, **functions: Command) -> None:
    """Add the commands of ``tickwheel NAME``. ``lists``: ``list`` is the default command."""
    group = nested(app, name, help_, panel=panel, list_by_default=lists)
    for word, function in functions.items():
        command(group, _word(word))(function)


def _word(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


for _panel, _function in COMMANDS:
    command(app, _word(_function.__name__), panel=_panel)(_function)
_below(
    SERVE, "shards", "Shards: list (by default), move one, drain a node.",
    list=nodes.list_shards, move=nodes.move, drain=nodes.drain,
)  # fmt: skip
_below(
    SERVE, "nodes", "Nodes that share a store of several shards: list (by default), drain.",
    list=nodes.list_nodes, drain=nodes.drain,
)  # fmt: skip
_below(
    TOPICS, "topics", "Topics: list them (by default), delete them, keep one for broadcasts only.",
    list=groups.topics, delete=groups.delete_topic, broadcast=groups.broadcast_topic,
)  # fmt: skip
_below(
    TOPICS,
    "groups",
    "Groups of a topic: list (by default), create, set, reset, delete; held keys.",
    lists=True,
    **groups.OF_GROUPS,
)
_below(
    TOPICS, "policy", "Retry policies of topics and groups: show, set, clear.", lists=False,
    show=groups.show_policy, set=groups.set_policy, clear=groups.clear_policy,
)  # fmt: skip
_below(
    TOPICS, "pending", "A topic's rule for tasks with a pending key: set, clear.",
    lists=False, set=groups.set_pending, clear=groups.clear_pending,
)  # fmt: skip
_below(
    TOPICS, "push", "Groups that push to a URL: list (by default), set, remove, test, log, …",
    lists=True, **groups.OF_PUSH,
)  # fmt: skip
_below(
    TOPICS, "forward", "Groups that forward to another broker: list (by default), set, remove.",
    lists=True, **groups.OF_FORWARD,
)  # fmt: skip
_below(
    TASKS, "schedule", "Recurring schedules: put, list, show, next, pause, resume, run, delete, …",
    put=schedules.put, list=schedules.list_, show=schedules.show, next=schedules.next_,
    pause=schedules.pause, resume=schedules.resume, run=schedules.run,
    backfill=schedules.backfill, delete=schedules.delete, apply=schedules.apply,
)  # fmt: skip
_below(
    TASKS, "transactions", "Transactions of producers: list (by default), show, commit, rollback.",
    list=enqueue.list_transactions, show=enqueue.show_transaction,
    commit=enqueue.commit_transaction, rollback=enqueue.rollback_transaction,
)  # fmt: skip
_below(
    TASKS, "bulk", "Bulk operations: list (by default), show, cancel.",
    list=tasks.list_bulk, show=tasks.show_bulk, cancel=tasks.cancel_bulk,
)  # fmt: skip
_below(
    SERVE, "token", "Tokens with restricted rights: create, list, revoke; needs no daemon.",
    lists=False, create=serve.create_token, list=serve.list_tokens, revoke=serve.revoke_token,
)  # fmt: skip
_below(
    TASKS, "dead", "Dead letters: list, show, requeue, delete.", lists=False,
    list=tasks.list_dead, show=tasks.show_dead, requeue=tasks.requeue, delete=tasks.delete,
    purge=tasks.purge,
)  # fmt: skip
_below(
    SERVE, "inbox", "Tasks from transactions of applications: take them; print the SQL; upgrade.",
    lists=False, run=inbox.run, sql=inbox.sql, upgrade=upgrade.inbox,
)  # fmt: skip
_below(SERVE, "store", "The layout of a store: upgrade it.", lists=False, upgrade=upgrade.store)
_below(
    WATCH, "history",
    "The history of tasks: search it (by default), or generate a synthetic one.",
    list=history.list_, tasks=history.tasks, generate=history.generate,
)  # fmt: skip


# --- from arguments to exit code -----------------------------------------------------------------

EXIT_INTERRUPTED = 130
"""128 + SIGINT, the convention of shells."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run ``tickwheel ARGUMENTS…``. Return the exit code. Raise ModuleNotFoundError."""
    _fill_streams()
    code = _run(arguments)
    # Unwritten data of stdout or stderr would fail again at the exit.
    _flush(sys.stderr)
    return code if _flush(sys.stdout) else code or EXIT_FAILED


def _fill_streams() -> None:
    """Open /dev/null for closed standard streams. Otherwise every use of them fails, and the next
    file or socket gets their descriptors."""
    for fd, name, mode, opposite in (
        (0, "stdin", "r", os.O_WRONLY),
        (1, "stdout", "w", os.O_RDONLY),
        (2, "stderr", "w", os.O_WRONLY),  # errors have no reader
    ):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, opposite)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115  # open until the process ends


def _flush(stream: TextIO) -> bool:
    """Return whether the stream has accepted everything. If not, nothing more is written to it."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def _run(arguments: Sequence[str] | None) -> int:
    # Commands report errors in their own words; only `subscribe` shows the client's log.
    logging.getLogger("tickwheel.client").addHandler(logging.NullHandler())
    try:
        code = typer.main.get_command(app).main(
            args=None if arguments is None else list(arguments),
            prog_name="tickwheel",
            standalone_mode=False,
        )
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "tickwheel"
        message = _one_line(error.format_message()).rstrip(".")
        if message:  # empty: the help was shown instead
            remark(f"usage: {message} (see {path} --help)")
        return int(error.exit_code)
    except TickwheelError as error:
        remark(f"{error.code}: {_one_line(error.message)}{_hint(error)}")
        return exit_code(error)
    except BrokenPipeError:
        return EXIT_FAILED  # the reader has closed the pipe
    except OSError as error:
        remark(f"io_error: {_one_line(str(error))}")
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED


def _hint(error: TickwheelError) -> str:
    """Return advice for a user who sees the error for the first time; often empty."""
    if type(error) is Unreachable:
        return "; is the daemon running? `tickwheel serve` starts it, --url sets another address"
    return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
