"""FastAPI and Starlette: a client for the application's lifetime, optionally with a worker.

    app = FastAPI(lifespan=lifespan(worker=worker))
    app.add_exception_handler(TickwheelError, answer_error)

    @app.post("/orders/{number}")
    async def place(number: str, tickwheel: TickwheelClient) -> None:
        await tickwheel.enqueue("orders.close", b"", delay=1800, key=number, timeout=2)

    @app.delete("/orders/{number}")
    def cancel(number: str, tickwheel: SyncTickwheelClient) -> None:
        tickwheel.cancel(topic="orders.close", key=number, timeout=2)

This module needs Starlette; ``TickwheelClient`` and ``SyncTickwheelClient`` need FastAPI.
Invariants: the client connects before the application's own lifespan begins and closes after it has
ended. The worker starts last and stops first, so its handlers can use resources of that lifespan.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from typing import Annotated, Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse

from tickwheel import sync
from tickwheel.client import Client
from tickwheel.client.worker import WAIT_S, Worker, joined
from tickwheel.errors import NotActive, TickwheelError, Unreachable

Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]
"""A function that ``FastAPI(lifespan=…)`` accepts."""
LOGGER = logging.getLogger("tickwheel.worker")


def lifespan(
    url: str | None = None,
    *,
    worker: Worker | None = None,
    wait: bool = False,
    inner: Lifespan | None = None,
    **options: Any,
) -> Lifespan:
    """Return a lifespan that connects a Client to ``url`` with the ``options`` of Client.

    The handlers of ``worker`` run in the application with this client and stop gracefully at the
    end. ``inner`` is the application's own lifespan, which finds the client in
    ``app.state.tickwheel``. Without a daemon the application does not start (Unreachable). With
    ``wait`` it starts, calls raise Unreachable, and the worker waits until a daemon is available.
    In a test, the application runs on a test wheel inside the wheel's ``serving`` block.
    """

    @asynccontextmanager
    async def running(app: Any) -> AsyncIterator[Mapping[str, Any]]:
        async with AsyncExitStack() as stack:
            wheel = _wheel_of(app)
            if wheel is not None:
                wheel = await stack.enter_async_context(wheel.on_this_loop())
                client = wheel.client
            else:
                client = Client(url, **options)
                stack.push_async_callback(client.close)
                if not wait:
                    await _connect(client)
            app.state.tickwheel = client
            app.state.tickwheel_sync = sync.on_loop(client, asyncio.get_running_loop())
            state: dict[str, Any] = {
                "tickwheel": client,
                "tickwheel_sync": app.state.tickwheel_sync,
            }
            if inner is not None:
                state |= await stack.enter_async_context(inner(app)) or {}
            if worker is not None and wheel is not None:
                await stack.enter_async_context(wheel.working(worker))
            elif worker is not None:
                ours = joined(client, [worker], signals=False)  # the server handles signals
                await stack.enter_async_context(_working(ours, client, wait=wait))
            yield state

    return running


def _wheel_of(app: Any) -> Any:
    """Return the test wheel of the application, or None in production.

    A test sets it with ``serving``, or overrides a dependency with a wheel's client."""
    wheel = getattr(app.state, "tickwheel_wheel", None)
    overrides = getattr(app, "dependency_overrides", {})
    for dependency in (client, sync_client):
        override = overrides.get(dependency)
        if wheel is None and override is not None and _is_plain(override):
            wheel = getattr(override(), "wheel", None)
    return wheel


def _is_plain(override: Any) -> bool:
    """Return whether the override is a plain function without parameters. Other overrides can only
    be called by FastAPI."""
    is_other = inspect.iscoroutinefunction(override) or inspect.isgeneratorfunction(override)
    return not (
        is_other or inspect.isasyncgenfunction(override) or inspect.signature(override).parameters
    )


def client(connection: HTTPConnection) -> Client:
    """Return the application's client, as a dependency. Raise RuntimeError without
    ``lifespan``."""
    application_client: Client = _of_application(connection, "tickwheel")
    return application_client


def sync_client(connection: HTTPConnection) -> sync.Client:
    """Return the application's synchronous client, for endpoints that are plain functions.

    Raise RuntimeError without ``lifespan``."""
    application_client: sync.Client = _of_application(connection, "tickwheel_sync")
    return application_client


def _of_application(connection: HTTPConnection, name: str) -> Any:
    # In a mounted application only the scope has it; without a server only the application has it.
    client_of_app = connection.scope.get("state", {}).get(name)
    client_of_app = client_of_app or getattr(connection.app.state, name, None)
    if client_of_app is None:
        raise RuntimeError(
            "the application has no Tickwheel client: create the application with"
            " lifespan=tickwheel.contrib.fastapi.lifespan() and run its lifespan; in tests use"
            f" app.dependency_overrides[{'sync_client' if 'sync' in name else 'client'}]"
        )
    return client_of_app


try:
    from fastapi import Depends
except ModuleNotFoundError:  # endpoints of Starlette without FastAPI call client(request)
    pass
else:
    TickwheelClient = Annotated[Client, Depends(client)]
    SyncTickwheelClient = Annotated[sync.Client, Depends(sync_client)]


async def answer_error(_: Request, error: Exception) -> JSONResponse:
    """Answer a request with the code, message and HTTP status of a Tickwheel error.

    Use it with ``add_exception_handler(TickwheelError, answer_error)``."""
    if not isinstance(error, TickwheelError):
        raise error
    return JSONResponse({"error": error.code, "message": error.message}, error.http_status)


async def _connect(client: Client) -> None:
    try:
        await client.connect()
    except (Unreachable, NotActive) as error:
        error.add_note("the application starts without a daemon only with lifespan(wait=True)")
        raise


@asynccontextmanager
async def _working(worker: Worker, client: Client, *, wait: bool) -> AsyncIterator[None]:
    """Run the worker in the context. Raise the worker's error at the start or at the end."""
    running = asyncio.create_task(_work(worker, client), name="tickwheel-worker")
    try:
        if not wait:
            started = asyncio.create_task(worker.started.wait())
            await asyncio.wait((running, started), return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
        if running.done():
            running.result()
        yield
    finally:
        worker.stop()
        if not worker.started.is_set():
            running.cancel()
        await asyncio.wait((running,))
    if not running.cancelled():
        running.result()


async def _work(worker: Worker, client: Client) -> None:
    try:
        while True:
            try:
                await client.connect()
                break
            except (Unreachable, NotActive):
                await asyncio.sleep(WAIT_S)
        await worker.run()
    except TickwheelError as error:
        LOGGER.error("the application continues without its worker: %s: %s", error.code, error)
        raise
