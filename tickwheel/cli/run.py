"""From arguments to exit code. Whatever a user can cause is one line on stderr, never a traceback.

0 done, 1 failed, 2 usage (or a request that the daemon calls wrong), 3 the daemon cannot be
reached, 4 there is no such task. A traceback means a bug.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import typer

from tickwheel.cli.app import app
from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_UNREACHABLE, EXIT_USAGE
from tickwheel.cli.output import remark
from tickwheel.errors import (
    BadRequest,
    ConnectionLost,
    NotFound,
    TaskGone,
    TickwheelError,
    Unreachable,
)

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells count."""


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of ``tickwheel ARGUMENTS…``."""
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
        remark(f"{error.code}: {_one_line(error.message)}")
        return exit_code(error)
    except BrokenPipeError:
        # The reader has gone; Python's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        remark(f"io_error: {_one_line(str(error))}")
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED


def exit_code(error: TickwheelError) -> int:
    """By kind, so that scripts can tell them apart."""
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
