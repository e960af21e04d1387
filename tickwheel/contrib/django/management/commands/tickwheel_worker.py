"""``python manage.py tickwheel_worker`` runs the workers of HANDLERS in the setting TICKWHEEL.

Before and after each handler that is a plain function, the command closes broken or old database
connections, as Django does for requests.
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
    """Runs workers until SIGTERM or Ctrl-C. It waits for a daemon that is not running yet."""

    help = "Runs Tickwheel handlers until SIGTERM or Ctrl-C; a second signal ends the grace period."
    requires_system_checks = ()  # ``handle`` does; with --reload, only in the child

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "workers", nargs="*", metavar="MODULE:WORKER",
            help="Workers to run. Default: TICKWHEEL['HANDLERS'].",
        )  # fmt: skip
        parser.add_argument(
            "--concurrency", type=int, metavar="N",
            help="Concurrent calls per handler. Default: as set in the program.",
        )  # fmt: skip
        parser.add_argument(
            "--grace", type=float, metavar="SECONDS",
            help="Seconds for handlers to end after SIGTERM. Default: as set in the program.",
        )  # fmt: skip
        parser.add_argument(
            "--reload", action="store_true",
            help="Restart when a Python file of the project changes (pip install"
            " 'tickwheel[reload]').",
        )  # fmt: skip

    def handle(self, *_: Any, **arguments: Any) -> None:
        grace_s = arguments["grace"]
        if arguments["reload"]:
            if not is_child():
                self._supervise()
                return
            grace_s = RELOAD_GRACE_S if grace_s is None else grace_s
        self.check()
        targets = arguments["workers"] or options().get("HANDLERS") or ()
        if not targets:
            raise CommandError("no handlers are configured: set TICKWHEEL = {'HANDLERS': [...]}")
        try:
            run_workers(
                targets, Client(**client_options()), fresh_connections,
                coroutines=False, concurrency=arguments["concurrency"], grace=grace_s,
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
    """Close this thread's database connections that are broken or older than CONN_MAX_AGE, before
    and after the block."""
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()
