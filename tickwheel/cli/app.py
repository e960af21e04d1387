"""The program ``tickwheel``: its commands, what can be said before them, and its exit codes.

``run`` goes from arguments to exit code: 0 done, 1 failed, 2 usage (or a request that the daemon
calls wrong), 3 the daemon cannot be reached, 4 there is no such task. Whatever a user can cause
is one line on stderr; a traceback means a bug.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tickwheel.cli import (
    advice,
    dead,
    enqueue,
    groups,
    history,
    schedules,
    serve,
    subscribe,
    tasks,
    top,
)
from tickwheel.cli.call import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    JSON_HELP,
    TOKEN_HELP,
    URL_HELP,
    Shared,
    command,
    nested,
)
from tickwheel.cli.output import remark
from tickwheel.errors import (
    BadRequest,
    ConnectionLost,
    NotFound,
    TaskGone,
    TickwheelError,
    Unreachable,
)
from tickwheel.version import __version__

app = typer.Typer(
    name="tickwheel",
    help="A durable timing-wheel scheduler: hand in tasks, get each when it is due.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 daemon unreachable, 4 not found.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


CA_HELP = "tls://: whom to trust instead of the system's authorities (PEM)."
CERT_HELP = "tls://: the certificate to show to a daemon that asks for one (PEM)."
KEY_HELP = "Its key, when that is in a file of its own."


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tickwheel {__version__}")
        raise typer.Exit


@app.callback()
def shared(
    ctx: typer.Context,
    url: Annotated[
        str | None, typer.Option(envvar="TICKWHEEL_URL", metavar="URL", help=URL_HELP)
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="TICKWHEEL_TOKEN", metavar="TOKEN", help=TOKEN_HELP)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    ca: Annotated[
        str | None, typer.Option("--ca", envvar="TICKWHEEL_CA", metavar="FILE", help=CA_HELP)
    ] = None,
    client_cert: Annotated[
        str | None,
        typer.Option(
            "--client-cert", envvar="TICKWHEEL_CLIENT_CERT", metavar="FILE", help=CERT_HELP
        ),
    ] = None,
    client_key: Annotated[
        str | None,
        typer.Option("--client-key", envvar="TICKWHEEL_CLIENT_KEY", metavar="FILE", help=KEY_HELP),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and end.")
    ] = False,
) -> None:
    """Kept for the command that follows."""
    ctx.obj = Shared(url=url, token=token, as_json=as_json)
    # For every client of this process, also one that a program of `work` makes.
    files = {"CA": ca, "CLIENT_CERT": client_cert, "CLIENT_KEY": client_key}
    os.environ.update({f"TICKWHEEL_{name}": path for name, path in files.items() if path})


# --- the commands, in the order in which the help shows them -------------------------------------

SERVE = "A daemon and its store"
TASKS = "Tasks"
TOPICS = "Topics and groups"
WATCH = "Look at what happens"

app.command(rich_help_panel=SERVE)(serve.serve)
app.command(rich_help_panel=SERVE)(serve.demo)
app.command(rich_help_panel=SERVE)(serve.check)
app.command(rich_help_panel=SERVE)(serve.init)
command(app, panel=TASKS)(enqueue.enqueue)
command(app, panel=TASKS)(subscribe.subscribe)
command(app, panel=TASKS)(tasks.cancel)
command(app, panel=TASKS)(tasks.reschedule)
command(app, "run-now", panel=TASKS)(tasks.run_now)
command(app, panel=TASKS)(tasks.show)
command(app, "list", panel=TASKS)(tasks.list_)
command(app, panel=SERVE)(serve.status)
command(app, panel=WATCH)(top.stats)
command(app, panel=SERVE)(serve.backup)
command(app, panel=WATCH)(top.load)
command(app, panel=TOPICS)(groups.pause)
command(app, panel=TOPICS)(groups.resume)
command(app, panel=TOPICS)(groups.rate)
command(app, panel=TOPICS)(subscribe.consumers)
app.command(rich_help_panel=SERVE)(history.restore)
app.command(rich_help_panel=WATCH)(history.report)
command(app, panel=WATCH)(top.top)
command(app, panel=WATCH)(top.console)
command(app, panel=TASKS)(subscribe.work)
command(app, panel=WATCH)(serve.bench)

_topics = nested(
    app, "topics", "Topics: list them (by default), delete them, keep one for broadcasts only.",
    panel=TOPICS, list_by_default=True,
)  # fmt: skip
command(_topics, "list")(groups.topics)
command(_topics, "delete")(groups.delete_topic)
command(_topics, "broadcast")(groups.broadcast_topic)

_groups = nested(
    app, "groups", "Groups of a topic: list (by default), create, set, reset, delete; held keys.",
    panel=TOPICS, list_by_default=True,
)  # fmt: skip
command(_groups, "list")(groups.list_groups)
command(_groups, "create")(groups.create_group)
command(_groups, "set")(groups.set_group)
command(_groups, "delete")(groups.delete_group)
command(_groups, "reset")(groups.reset_group)
command(_groups, "held")(groups.held_keys)
command(_groups, "lines")(groups.key_lines)
command(_groups, "release-key")(groups.release_key)
command(_groups, "skip-key")(groups.skip_key)

_policy = nested(
    app, "policy", "Retry policies of topics and groups: show, set, clear.", panel=TOPICS
)
command(_policy, "show")(groups.show_policy)
command(_policy, "set")(groups.set_policy)
command(_policy, "clear")(groups.clear_policy)

_pending = nested(
    app, "pending", "Tasks of a topic whose key is pending: set what becomes of them.", panel=TOPICS
)
command(_pending, "set")(groups.set_pending)
command(_pending, "clear")(groups.clear_pending)

_schedule = nested(
    app, "schedule", "Recurring schedules: put, list, show, next, pause, resume, run, delete, …",
    panel=TASKS, list_by_default=True,
)  # fmt: skip
command(_schedule)(schedules.put)
command(_schedule, "list")(schedules.list_)
command(_schedule)(schedules.show)
command(_schedule, "next")(schedules.next_)
command(_schedule)(schedules.pause)
command(_schedule)(schedules.resume)
command(_schedule)(schedules.run)
command(_schedule)(schedules.backfill)
command(_schedule)(schedules.delete)
command(_schedule)(schedules.apply)

_transactions = nested(
    app, "transactions", "Transactions of producers: list (by default), show, commit, rollback.",
    panel=TASKS, list_by_default=True,
)  # fmt: skip
command(_transactions, "list")(enqueue.list_transactions)
command(_transactions, "show")(enqueue.show_transaction)
command(_transactions, "commit")(enqueue.commit_transaction)
command(_transactions, "rollback")(enqueue.rollback_transaction)

_bulks = nested(
    app, "bulk", "Bulk operations over all that matches: list (by default), show, cancel.",
    panel=TASKS, list_by_default=True,
)  # fmt: skip
command(_bulks, "list")(tasks.list_bulk)
command(_bulks, "show")(tasks.show_bulk)
command(_bulks, "cancel")(tasks.cancel_bulk)

_token = nested(
    app, "token", "Tokens with rights of their own: create, list, revoke; needs no daemon.",
    panel=SERVE,
)  # fmt: skip
_token.command("create")(serve.create_token)
_token.command("list")(serve.list_tokens)
_token.command("revoke")(serve.revoke_token)

_dead = nested(app, "dead", "Dead letters: look at them, requeue them, delete them.", panel=TASKS)
command(_dead, "list")(dead.list_)
command(_dead)(dead.show)
command(_dead)(dead.requeue)
command(_dead)(dead.delete)
command(_dead)(dead.purge)

_history = nested(
    app, "history", "What happened to tasks: search it (by default), or make some up for trials.",
    panel=WATCH, list_by_default=True,
)  # fmt: skip
_history.command("list")(history.list_)
_history.command()(history.tasks)
_history.command()(history.generate)


# --- from arguments to exit code -----------------------------------------------------------------

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells count."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run ``tickwheel ARGUMENTS…``; returns the exit code."""
    # What the client logs, a command says in its own words; `subscribe` alone shows it.
    logging.getLogger("tickwheel.client").addHandler(logging.NullHandler())
    try:
        found = typer.main.get_command(app).main(
            args=None if arguments is None else list(arguments),
            prog_name="tickwheel",
            standalone_mode=False,
        )
        return found if isinstance(found, int) else 0
    except typer.TyperException as error:
        return _usage(error)
    except TickwheelError as error:
        remark(f"{error.code}: {_one_line(error.message)}{_hint(error)}")
        return exit_code(error)
    except ModuleNotFoundError as error:
        line = advice(error.name)
        if line is None:
            raise
        remark(line)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader has gone; Python's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        remark(f"io_error: {_one_line(str(error))}")
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED


def _hint(error: TickwheelError) -> str:
    """Advice for somebody who sees the error for the first time; often empty."""
    if type(error) is Unreachable:
        return "; is there a daemon? `tickwheel serve` starts one, --url names another address"
    return ""


def exit_code(error: TickwheelError) -> int:
    """The exit code of an error, by its kind, so that scripts can distinguish errors."""
    if isinstance(error, (Unreachable, ConnectionLost)):
        return EXIT_UNREACHABLE
    if isinstance(error, (NotFound, TaskGone)):
        return EXIT_NOT_FOUND
    return EXIT_USAGE if isinstance(error, BadRequest) else EXIT_FAILED


def _usage(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "tickwheel"
    message = _one_line(error.format_message()).rstrip(".")
    if message:  # without one the help has been shown instead
        remark(f"usage: {message} (see {path} --help)")
    return int(error.exit_code)


def _one_line(text: str) -> str:
    return " ".join(text.split())
