"""``python manage.py tickwheel_worker``: the handlers of TICKWHEEL's HANDLERS as one worker.

Around each handler that is a plain function, connections to databases that are broken or too old
are closed, as Django does it around a request.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import close_old_connections

from tickwheel.client import Client
from tickwheel.contrib.django import client_options, options
from tickwheel.contrib.workers import RELOAD_GRACE_S, is_child, run_workers, supervise
from tickwheel.errors import TickwheelError


class Command(BaseCommand):
    """Runs until SIGTERM or Ctrl-C; a daemon that is not there yet is waited for."""

    help = "Runs Tickwheel's handlers until SIGTERM or Ctrl-C; a second one ends the grace."
    requires_system_checks = ()  # with --reload the child makes them: a broken program is repaired

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "workers", nargs="*", metavar="MODULE:WORKER",
            help="Default: those of TICKWHEEL['HANDLERS'].",
        )  # fmt: skip
        parser.add_argument(
            "--concurrency", type=int, metavar="N",
            help="Handlers at a time, of each kind. Default: as the program says.",
        )  # fmt: skip
        parser.add_argument(
            "--grace", type=float, metavar="SECONDS",
            help="How long running handlers may take after SIGTERM. Default: as the program says.",
        )  # fmt: skip
        parser.add_argument(
            "--reload", action="store_true",
            help="Start anew when a Python file of the project changes (pip install"
            " 'tickwheel[reload]').",
        )  # fmt: skip

    def handle(self, *_: Any, **given: Any) -> None:
        grace_s = given["grace"]
        if given["reload"]:
            if not is_child():
                self._supervise()
                return
            grace_s = RELOAD_GRACE_S if grace_s is None else grace_s
        self.check()
        targets = given["workers"] or options().get("HANDLERS") or ()
        if not targets:
            raise CommandError("there are no handlers: name TICKWHEEL = {'HANDLERS': [...]}")
        try:
            run_workers(
                targets, Client(**client_options()), fresh_connections,
                coroutines=False, concurrency=given["concurrency"], grace=grace_s,
            )  # fmt: skip
        except TickwheelError as error:
            raise CommandError(f"{error.code}: {error.message}") from None

    def _supervise(self) -> None:
        try:
            code = asyncio.run(supervise([Path.cwd(), Path(getattr(settings, "BASE_DIR", "."))]))
        except ModuleNotFoundError as error:
            raise CommandError(str(error)) from None
        if code != 0:
            raise SystemExit(code)


@contextmanager
def fresh_connections() -> Iterator[None]:
    """Before and after the block, databases' connections of this thread that are broken, or older
    than CONN_MAX_AGE, are closed."""
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()
