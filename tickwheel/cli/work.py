"""``tickwheel work MODULE:WORKER``: run a worker that a program defines.

The program's own errors are its own: what goes wrong while it is imported is said in one line
with the place; what a handler raises is logged, and becomes a nack.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from tickwheel.cli.call import Call
from tickwheel.cli.options import typed
from tickwheel.client.worker import Worker
from tickwheel.model.written import parse_duration

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


async def work(
    call: Call,
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:WORKER",
            help="For example shop.jobs:worker; looked for here and on PYTHONPATH.",
        ),
    ],
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=65_535, metavar="N",
            help="Handlers at a time, of each kind. Default: as the program says.",
        ),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            parser=typed(parse_duration), metavar="DURATION",
            help="How long running handlers may take after SIGTERM. Default: as the program says.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Run the handlers of a Worker until SIGTERM or Ctrl-C; a second one ends the grace.

    A daemon that is not there yet is waited for.

    --url and --token hold for a Client() that is made without its own.
    """
    # The program makes its client itself, usually while it is imported.
    for name, value in (("TICKWHEEL_URL", call.url), ("TICKWHEEL_TOKEN", call.token)):
        if value is not None:
            os.environ[name] = value
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    await load(target).run(concurrency=concurrency, grace=grace, wait=True)


def load(target: str) -> Worker:
    """The worker that ``MODULE:WORKER`` names; looks through the working directory first."""
    module_name, colon, path = target.partition(":")
    names = path.split(".")
    if not colon or not all(name.isidentifier() for name in (*module_name.split("."), *names)):
        raise _wrong(f"{target!r} is not MODULE:WORKER, such as shop.jobs:worker")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = _import(module_name)
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError:
            raise _wrong(f"module {module_name} has no {path}") from None
    if not isinstance(found, Worker):
        raise _wrong(f"{target} is no tickwheel.Worker, but {type(found).__name__}")
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise _wrong(
                f"there is no module {error.name} here ({Path.cwd()}) or on PYTHONPATH"
            ) from None
        raise _broken(name, error) from None
    except Exception as error:
        raise _broken(name, error) from None


def _broken(name: str, error: Exception) -> typer.BadParameter:
    """The error of a failed import, with the program's line and not that of the import
    machinery."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else ""
    if isinstance(error, SyntaxError):
        place = f" at {error.filename}:{error.lineno}"
    return _wrong(f"importing {name} failed{place}: {type(error).__name__}: {error}")


def _wrong(text: str) -> typer.BadParameter:
    return typer.BadParameter(text, param_hint="MODULE:WORKER")
