"""Flask extension: a client in each process, and a command that runs handlers.

    tickwheel = Tickwheel(app)                     # or: tickwheel.init_app(app)
    tickwheel.enqueue("orders.close", b"", delay=1800, key="42")

    flask --app shop tickwheel worker              # the workers of TICKWHEEL_HANDLERS

Configuration: TICKWHEEL_URL and TICKWHEEL_TOKEN (default: the environment variables),
TICKWHEEL_CLIENT (a dict with other keywords of Client), TICKWHEEL_TIMEOUT (default timeout of an
enqueue in seconds), TICKWHEEL_HANDLERS (``["module:worker"]``). Invariant: each process has one
client per application, even after a fork. The client is created on first use and closed when the
process ends.
"""

from __future__ import annotations

import asyncio
import os
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

import click
from flask import Flask, current_app, has_app_context
from flask.cli import AppGroup

from tickwheel import environment
from tickwheel.api.times import Duration
from tickwheel.client import Client as AsyncClient
from tickwheel.client import Receipt
from tickwheel.client.keywords import TaskKeywords
from tickwheel.contrib.workers import RELOAD_GRACE_S, is_child, run_workers, supervise
from tickwheel.errors import TickwheelError
from tickwheel.sync import Client

NAME = "tickwheel"
"""The name of the extension and of its command."""


class Tickwheel:
    """The extension. One object can serve several applications."""

    def __init__(self, app: Flask | None = None) -> None:
        self._app = app
        """The application that is used outside an application context."""
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Add the extension and its command to an application."""
        known = [f"TICKWHEEL_{name}" for name in ("URL", "TOKEN", "CLIENT", "TIMEOUT", "HANDLERS")]
        for name in app.config:
            is_ours = name.startswith(environment.PREFIX) and name not in os.environ
            if is_ours and name not in known:
                raise environment.unknown("setting", name, name, known)
        for name in known:
            app.config.setdefault(name, None)
        app.extensions[NAME] = dict[str, Client]()
        app.cli.add_command(commands)

    @property
    def client(self) -> Client:
        """The application's synchronous client in this process. It connects with its first call.

        Raise RuntimeError for an application without the extension."""
        app = self._served()
        clients: dict[str, Client] | None = app.extensions.get(NAME)
        if clients is None:
            raise RuntimeError("the application has no Tickwheel: call tickwheel.init_app(app)")
        client = clients.get("client")
        if client is None:  # concurrent threads get the first client; surplus ones never connect
            client = clients.setdefault("client", Client(**client_options(app)))
        return client

    def enqueue(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        timeout: Duration | None = None,
        **task: Unpack[TaskKeywords],
    ) -> Receipt:
        """Store a task durably like ``Client.enqueue``, with TICKWHEEL_TIMEOUT as the default
        ``timeout``."""
        client = self.client
        if timeout is None:
            timeout = self._served().config["TICKWHEEL_TIMEOUT"]
        return client.enqueue(topic, body, delay=delay, at=at, timeout=timeout, **task)

    def _served(self) -> Flask:
        """Return the application of the current context, or else the constructor's application."""
        if self._app is None or has_app_context():
            return _current()
        return self._app


def _current() -> Flask:
    app: Flask = current_app._get_current_object()  # type: ignore[attr-defined]
    return app


def client_options(app: Flask) -> dict[str, Any]:
    """Return the keywords of Client that the configuration contains."""
    config = app.config
    return {
        "url": config["TICKWHEEL_URL"],
        "token": config["TICKWHEEL_TOKEN"],
        **(config["TICKWHEEL_CLIENT"] or {}),
    }


commands = AppGroup(NAME, help="Tickwheel: run handlers.")


@commands.command("worker")
@click.argument("workers", nargs=-1, metavar="[MODULE:WORKER]...")
@click.option("--concurrency", type=click.IntRange(1, 65_535), help="Concurrent calls per handler.")
@click.option("--grace", type=click.FloatRange(0), help="Seconds for handlers to end at SIGTERM.")
@click.option("--reload", is_flag=True, help="Restart when a Python file changes.")
def run_worker(
    workers: tuple[str, ...], concurrency: int | None, grace: float | None, reload: bool
) -> None:
    """Run handlers until SIGTERM or Ctrl-C, each in an application context.

    The default is the workers of TICKWHEEL_HANDLERS. The command waits for a daemon that is not
    running yet.
    """
    app = _current()
    try:
        if reload:
            if not is_child():
                code = asyncio.run(supervise([Path.cwd(), Path(app.root_path)]))
                raise SystemExit(code)
            grace = RELOAD_GRACE_S if grace is None else grace
        targets = workers or app.config["TICKWHEEL_HANDLERS"]
        if not targets:
            raise click.UsageError(
                "no handlers are configured: set TICKWHEEL_HANDLERS or name a worker"
            )
        run_workers(
            targets, AsyncClient(**client_options(app)), app.app_context,
            coroutines=True, concurrency=concurrency, grace=grace,
        )  # fmt: skip
    except TickwheelError as error:
        raise click.ClickException(f"{error.code}: {error.message}") from None
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from None
