"""FastAPI and Starlette: one client for the application's life, and a worker beside it.

    app = FastAPI(lifespan=lifespan(worker=worker))
    app.add_exception_handler(TickwheelError, answer_error)

    @app.post("/orders/{number}")
    async def place(number: str, tickwheel: TickwheelClient) -> None:
        await tickwheel.enqueue("orders.close", b"", delay=1800, key=number, timeout=2)

    @app.delete("/orders/{number}")
    def cancel(number: str, tickwheel: SyncTickwheelClient) -> None:
        tickwheel.cancel(topic="orders.close", key=number, timeout=2)

Needs Starlette; ``TickwheelClient`` and ``SyncTickwheelClient`` are there with FastAPI. Invariants:
the client is connected before the application's own lifespan begins, and closed after it has ended;
the worker begins last and ends first, so that its handlers may use what that lifespan has made.
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
"""A function of the application, as ``FastAPI(lifespan=…)`` takes it."""
LOGGER = logging.getLogger("tickwheel.worker")


def lifespan(
    url: str | None = None,
    *,
    worker: Worker | None = None,
    wait: bool = False,
    inner: Lifespan | None = None,
    **options: Any,
) -> Lifespan:
    """A lifespan that connects a Client, to ``url`` and with the ``options`` of Client.

    ``worker``: its handlers run beside the application, on this client; they are stopped
    gracefully at the end. ``inner``: the application's own lifespan, which has the client in
    ``app.state.tickwheel``. Without a daemon the application does not start (Unreachable), unless
    it is to ``wait``: then calls raise Unreachable, and the worker waits, until one is there. In a
    test, an application that a test wheel is ``serving`` runs on that.
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
            app.state.tickwheel_sync = sync.beside(client, asyncio.get_running_loop())
            state: dict[str, Any] = {
                "tickwheel": client,
                "tickwheel_sync": app.state.tickwheel_sync,
            }
            if inner is not None:
                state |= await stack.enter_async_context(inner(app)) or {}
            if worker is not None and wheel is not None:
                await stack.enter_async_context(wheel.working(worker))
            elif worker is not None:
                ours = joined(client, [worker], signals=False)  # the server has its own
                await stack.enter_async_context(_working(ours, client, wait=wait))
            yield state

    return running


def _wheel_of(app: Any) -> Any:
    """The wheel that a test runs the application on, by ``serving`` of a test wheel, or by an
    override of one of the dependencies by a wheel's client; None: it runs as in production."""
    wheel = getattr(app.state, "tickwheel_wheel", None)
    overrides = getattr(app, "dependency_overrides", {})
    for dependency in (client, sync_client):
        override = overrides.get(dependency)
        if wheel is None and override is not None and _is_plain(override):
            wheel = getattr(override(), "wheel", None)
    return wheel


def _is_plain(override: Any) -> bool:
    """Whether it can be called here: FastAPI alone knows what to do with any other one."""
    is_other = inspect.iscoroutinefunction(override) or inspect.isgeneratorfunction(override)
    return not (
        is_other or inspect.isasyncgenfunction(override) or inspect.signature(override).parameters
    )


def client(connection: HTTPConnection) -> Client:
    """The application's client, as a dependency. Raises RuntimeError without ``lifespan``."""
    found: Client = _of_application(connection, "tickwheel")
    return found


def sync_client(connection: HTTPConnection) -> sync.Client:
    """The same client for endpoints that are plain functions, which run in threads: its calls
    return when they are answered. Raises RuntimeError without ``lifespan``."""
    found: sync.Client = _of_application(connection, "tickwheel_sync")
    return found


def _of_application(connection: HTTPConnection, name: str) -> Any:
    # A mounted application has the first one only, and what is called without a server the second.
    found = connection.scope.get("state", {}).get(name)
    found = found or getattr(connection.app.state, name, None)
    if found is None:
        raise RuntimeError(
            "the application has no Tickwheel client: make it with"
            " lifespan=tickwheel.contrib.fastapi.lifespan(), and let its lifespan run; in tests:"
            f" app.dependency_overrides[{'sync_client' if 'sync' in name else 'client'}]"
        )
    return found


try:
    from fastapi import Depends
except ModuleNotFoundError:  # Starlette alone: its endpoints call client(request)
    pass
else:
    TickwheelClient = Annotated[Client, Depends(client)]
    SyncTickwheelClient = Annotated[sync.Client, Depends(sync_client)]


async def answer_error(_: Request, error: Exception) -> JSONResponse:
    """An error of Tickwheel as the answer to a request: its code and message with its HTTP status.
    For ``add_exception_handler(TickwheelError, answer_error)``."""
    if not isinstance(error, TickwheelError):
        raise error
    return JSONResponse({"error": error.code, "message": error.message}, error.http_status)


async def _connect(client: Client) -> None:
    try:
        await client.connect()
    except (Unreachable, NotActive) as error:
        error.add_note(
            "the application does not start without a daemon, unless lifespan(wait=True)"
        )
        raise


@asynccontextmanager
async def _working(worker: Worker, client: Client, *, wait: bool) -> AsyncIterator[None]:
    """The worker at work. Raises what the daemon objects to, at the start or else at the end."""
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
    while True:
        try:
            await client.connect()
            break
        except (Unreachable, NotActive):
            await asyncio.sleep(WAIT_S)
    try:
        await worker.run()
    except TickwheelError as error:
        LOGGER.error("the application goes on without its worker: %s: %s", error.code, error)
        raise
