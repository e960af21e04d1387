"""FastAPI and Starlette against a real daemon: lifespan, dependency, errors, and the worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.fake_daemon import FakeDaemon
from support.frameworks import need
from support.waiting import WAIT_S, comes, soon, until

need("fastapi", "httpx2", "starlette", "uvicorn")

import httpx2  # noqa: E402
from fastapi import FastAPI, WebSocket  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

from tickwheel import (  # noqa: E402
    BadRequest,
    Client,
    ClientClosed,
    Conflict,
    Delivery,
    NotFound,
    TickwheelError,
    Unauthorized,
    Unreachable,
    Worker,
    task,
)
from tickwheel.contrib import fastapi as contrib  # noqa: E402
from tickwheel.contrib.fastapi import (  # noqa: E402
    SyncTickwheelClient,
    TickwheelClient,
    answer_error,
    lifespan,
)
from tickwheel.testing import SyncTestWheel, TestWheel  # noqa: E402

ROOT = Path(__file__).parents[2]
NOWHERE = "tcp://127.0.0.1:1"


def application(**options: Any) -> FastAPI:
    app = FastAPI(lifespan=lifespan(**options))
    app.add_exception_handler(TickwheelError, answer_error)

    @app.post("/{topic}", status_code=201)
    async def place(
        topic: str, tickwheel: TickwheelClient, delay: float = 0, timeout: float = WAIT_S
    ) -> str:
        return str((await tickwheel.enqueue(topic, b"x", delay=delay, timeout=timeout)).id)

    return app


def collecting(topic: str) -> tuple[Worker, list[Delivery], threading.Event]:
    worker, seen, done = Worker(Client(NOWHERE)), list[Delivery](), threading.Event()

    @worker.on(topic)
    async def handle(delivery: Delivery) -> None:
        seen.append(delivery)
        done.set()

    return worker, seen, done


def test_a_worker_in_the_application_handles_enqueued_tasks(running: Daemon) -> None:
    worker, seen, done = collecting("beside")
    for round_ in (1, 2):  # a worker is used again by the next life of the application
        with TestClient(application(url=running.url, worker=worker)) as http:
            answer = http.post("/beside")
            assert answer.status_code == 201
            assert done.wait(WAIT_S)
            done.clear()
        assert len(seen) == round_
        assert str(seen[-1].id) == answer.json()


def test_a_handler_enqueues_typed_tasks_with_the_applications_client(running: Daemon) -> None:
    worker, seen, done = collecting("typed.second")
    second = task("typed.second")(ship)
    worker.register(second, group="other")

    @worker.on("typed.first")
    async def first(delivery: Delivery) -> None:
        await second.enqueue(7)

    with TestClient(application(url=running.url, worker=worker)) as http:
        assert http.post("/typed.first").status_code == 201
        assert done.wait(WAIT_S)
    assert [delivery.topic for delivery in seen] == ["typed.second"]


async def ship(number: int) -> None: ...


@task("orders.typed")
def close_order(number: int) -> None: ...


def test_a_plain_endpoint_gets_a_blocking_client(running: Daemon) -> None:
    app, kept = application(url=running.url), []

    @app.post("/orders/{number}", status_code=201)
    def place(number: int, tickwheel: SyncTickwheelClient) -> list[str]:
        kept.append(tickwheel)
        plain = tickwheel.enqueue("orders.plain", b"x", delay=60, key=f"{number}", timeout=WAIT_S)
        typed = close_order.using(tickwheel).options(delay=60).enqueue(number)
        return [str(tickwheel.lookup(receipt.id).topic) for receipt in (plain, typed)]

    @app.delete("/orders/{number}")
    def drop(number: int, tickwheel: SyncTickwheelClient) -> list[str]:
        return [item.status for item in tickwheel.cancel(topic="orders.plain", key=f"{number}")]

    with TestClient(app) as http:
        threads = {item.name for item in threading.enumerate()}
        assert http.post("/orders/41").json() == ["orders.plain", "orders.typed"]
        assert http.delete("/orders/41").json() == ["cancelled"]
        assert http.delete("/orders/41").json() == ["already_cancelled"]
        assert "tickwheel-client" not in {item.name for item in threading.enumerate()} - threads
    with pytest.raises(ClientClosed):
        kept[0].enqueue("orders.plain", b"x")


def test_the_wrong_client_names_the_right_one(running: Daemon) -> None:
    app = application(url=running.url)

    @app.post("/plain/enqueue")
    def plain(tickwheel: TickwheelClient) -> None:
        tickwheel.enqueue("wrong", b"x")  # type: ignore[unused-coroutine]

    @app.post("/plain/typed")
    def typed(tickwheel: TickwheelClient) -> None:
        close_order.using(tickwheel).enqueue(1)  # type: ignore[unused-coroutine]

    @app.post("/plain/cancel")
    def cancel(tickwheel: TickwheelClient) -> None:
        tickwheel.cancel(1)  # type: ignore[unused-coroutine]

    @app.post("/async/enqueue")
    async def blocks(tickwheel: SyncTickwheelClient) -> None:
        tickwheel.enqueue("wrong", b"x")

    with TestClient(app) as http:
        for path in ("/plain/enqueue", "/plain/typed", "/plain/cancel"):
            answer = http.post(path)
            assert answer.status_code == 400, path
            assert "SyncTickwheelClient" in answer.json()["message"]
        assert ".using(client)" in http.post("/plain/typed").json()["message"]
        assert "await the asynchronous client" in http.post("/async/enqueue").json()["message"]
        assert http.post("/right").status_code == 201, "the loop was not blocked"


def shop() -> tuple[FastAPI, list[bytes]]:
    """An application as in production: without a test wheel it finds no daemon for 10 s."""
    worker, closed = Worker(Client(NOWHERE)), list[bytes]()

    @worker.on("orders.close")
    async def close(delivery: Delivery) -> None:
        closed.append(delivery.body)

    app = application(url=NOWHERE, worker=worker)

    @app.post("/async/{number}")
    async def place(number: str, tickwheel: TickwheelClient) -> str:
        receipt = await tickwheel.enqueue("orders.close", number.encode(), delay=1800, key=number)
        return str(receipt.id)

    @app.post("/plain/{number}")
    def place_in_a_thread(number: str, tickwheel: SyncTickwheelClient) -> str:
        receipt = tickwheel.enqueue("orders.close", number.encode(), delay=1800, key=number)
        return str(receipt.id)

    return app, closed


def test_an_application_runs_on_the_wheel_of_a_plain_test(tickwheel_sync: SyncTestWheel) -> None:
    app, closed = shop()
    tickwheel_sync.client.enqueue("orders.close", b"before", delay=1200)
    tickwheel_sync.client.create_group("audit", "g")
    begin = tickwheel_sync.now
    for round_ in (1, 2):  # it goes there and back, and keeps what it has
        with tickwheel_sync.serving(app), TestClient(app) as http:
            for path in ("/async/41", "/plain/42"):
                assert http.post(path).status_code == 200
            tickwheel_sync.assert_enqueued("orders.close", key="41", within="30m")
            tickwheel_sync.advance("29m")
            assert len(closed) == 1 + 2 * (round_ - 1)
            tickwheel_sync.advance("1m")
            assert closed == [b"before", *[b"41", b"42"] * round_]
            http.post("/async/43")
            tickwheel_sync.crash()
        (left,) = tickwheel_sync.enqueued("orders.close")
        assert left.key == "43"
        assert tickwheel_sync.now - begin == timedelta(minutes=30 * round_)
        tickwheel_sync.client.cancel(left.id)
    assert "g" in tickwheel_sync.client.stats().topics["audit"].groups


def test_an_overriding_wheel_client_runs_the_lifespan(tickwheel_sync: SyncTestWheel) -> None:
    app, closed = shop()
    app.dependency_overrides[contrib.sync_client] = lambda: tickwheel_sync.client
    with TestClient(app) as http:
        assert http.post("/plain/42").status_code == 200
        tickwheel_sync.advance("30m")
    assert closed == [b"42"]


async def test_an_application_on_the_tests_own_loop_runs_on_its_wheel(tickwheel: TestWheel) -> None:
    app, closed = shop()
    transport = httpx2.ASGITransport(app)
    with tickwheel.serving(app):
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://shop") as http,
        ):
            for path in ("/async/41", "/plain/42"):
                assert (await http.post(path)).status_code == 200
            await tickwheel.advance("30m")
            assert closed == [b"41", b"42"]
    await tickwheel.client.ping()


async def test_the_documented_override_works(tickwheel: TestWheel) -> None:
    """Without a lifespan, and although the fixture has the name of the package."""
    app, _ = shop()
    app.dependency_overrides[contrib.client] = lambda: tickwheel.client
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop") as http:
        await http.post("/async/41")
    await tickwheel.assert_enqueued("orders.close", key="41", within="30m")


def test_an_override_with_dependencies_is_left_to_fastapi(running: Daemon) -> None:
    app = application(url=running.url)

    async def other(request: Request) -> Any:
        return await contrib.client(request).connect()

    def generated() -> Any:
        yield None

    app.dependency_overrides |= {contrib.client: other, contrib.sync_client: generated}
    with TestClient(app) as http:
        assert http.post("/override").status_code == 201


async def test_a_blocking_test_client_names_the_right_fixture(tickwheel: TestWheel) -> None:
    app, _ = shop()
    for way in ("serving", "override"):
        if way == "override":
            app.dependency_overrides[contrib.client] = lambda: tickwheel.client
        with contextlib.ExitStack() as stack:
            if way == "serving":
                stack.enter_context(tickwheel.serving(app))
            began_s = time.monotonic()
            with pytest.raises(BadRequest, match="use the fixture tickwheel_sync"):
                stack.enter_context(TestClient(app))
            assert time.monotonic() - began_s < 5, "it does not wait for a daemon"


def test_an_error_of_tickwheel_is_an_answer_with_its_own_status(running: Daemon) -> None:
    with TestClient(application(url=running.url)) as http:
        answer = http.post("/errors", params={"delay": -1})
    assert answer.status_code == 400
    assert answer.json()["error"] == "bad_request"
    assert "delay" in answer.json()["message"]


def test_an_application_without_a_daemon_does_not_start() -> None:
    app = application(url=NOWHERE, connect_timeout=0.2)
    with pytest.raises(Unreachable, match="no daemon within") as raised, TestClient(app):
        pass
    assert any("wait=True" in note for note in raised.value.__notes__)


async def test_an_application_with_wait_starts_without_a_daemon(tmp_path: Path) -> None:
    worker, _, done = collecting("waits")
    with Daemon(tmp_path) as daemon:
        await asyncio.to_thread(daemon.kill)
        app = application(url=daemon.url, worker=worker, wait=True, connect_timeout=0.2)

        def use() -> None:
            with TestClient(app) as http:
                refused = http.post("/waits", params={"timeout": 0.5})
                assert (refused.status_code, refused.json()["error"]) == (503, "unreachable")
                daemon.start()
                until(lambda: http.post("/waits").status_code == 201)
                assert done.wait(WAIT_S)

        await asyncio.to_thread(use)


def test_an_application_with_wait_can_be_stopped() -> None:
    worker, _, _ = collecting("waits")
    app = application(url=NOWHERE, worker=worker, wait=True, connect_timeout=0.2)
    with TestClient(app) as http:
        assert http.post("/waits", params={"timeout": 0.5}).status_code == 503


def test_the_applications_lifespan_outlives_the_worker(running: Daemon) -> None:
    order = []
    worker = Worker(Client(NOWHERE))

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        tickwheel: Client = app.state.tickwheel
        assert tickwheel.connected
        await tickwheel.enqueue("own", b"")
        order.append("begins")
        yield {"greeting": "hello"}
        await tickwheel.ping()  # it is not closed yet
        order.append("ends")

    begun = threading.Event()

    @worker.on("own")
    async def handle(_: Delivery) -> None:
        order.append("handler begins")
        begun.set()
        await asyncio.sleep(0.2)  # real time: it runs while the application stops
        order.append("handler ends")

    app = application(url=running.url, worker=worker, inner=own)

    @app.get("/greeting")
    async def greet(request: Request) -> str:
        return str(request.state.greeting)

    with TestClient(app) as http:
        assert http.get("/greeting").json() == "hello"
        assert begun.wait(WAIT_S)
    assert order == ["begins", "handler begins", "handler ends", "ends"]


def test_a_refused_worker_stops_the_applications_start(running: Daemon) -> None:
    plain, _, _ = collecting("refused")
    with TestClient(application(url=running.url, worker=plain)):
        pass
    worker = Worker(Client(NOWHERE))
    worker.on("refused", tags="eu")(lambda delivery: None)
    with pytest.raises(Conflict), TestClient(application(url=running.url, worker=worker)):
        pass


async def test_a_worker_that_ends_is_logged_and_raised_at_the_end(
    running: Daemon, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker, _, _ = collecting("deleted")
    app = application(url=running.url, worker=worker)
    with pytest.raises(NotFound):
        async with app.router.lifespan_context(app):
            await client.delete_group("deleted", "default", force=True)
            await comes(lambda: "continues without its worker" in caplog.text)


async def test_a_worker_whose_token_is_refused_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    worker, *_ = collecting("refused")
    async with FakeDaemon() as daemon:
        daemon.greet = lambda peer, frame: peer.error(frame, "unauthorized")
        app = application(url=daemon.url, worker=worker, wait=True)
        with pytest.raises(Unauthorized):
            async with app.router.lifespan_context(app):
                await comes(lambda: "continues without its worker" in caplog.text)


def test_a_websocket_and_a_mounted_application_have_the_client(running: Daemon) -> None:
    app, inside = FastAPI(lifespan=lifespan(running.url)), FastAPI()

    @app.websocket("/ws")
    async def talk(socket: WebSocket, tickwheel: TickwheelClient) -> None:
        await socket.accept()
        await socket.send_text(str(tickwheel.connected))
        await socket.close()

    @inside.get("/here")
    async def here(tickwheel: TickwheelClient) -> bool:
        return tickwheel.connected

    app.mount("/inside", inside)
    with TestClient(app) as http:
        assert http.get("/inside/here").json() is True
        with http.websocket_connect("/ws") as socket:
            assert socket.receive_text() == "True"


def test_a_missing_lifespan_is_named() -> None:
    app = FastAPI()

    @app.get("/")
    async def use(tickwheel: TickwheelClient) -> None: ...

    with TestClient(app) as http, pytest.raises(RuntimeError, match=r"lifespan=tickwheel\.contrib"):
        http.get("/")


def test_starlette_alone_is_enough(running: Daemon) -> None:
    async def place(request: Request) -> PlainTextResponse:
        receipt = await contrib.client(request).enqueue("starlette", b"")
        return PlainTextResponse(str(receipt.id))

    def place_in_a_thread(request: Request) -> PlainTextResponse:
        receipt = contrib.sync_client(request).enqueue("starlette", b"")
        return PlainTextResponse(str(receipt.id))

    routes = [Route("/", place), Route("/thread", place_in_a_thread)]
    app = Starlette(routes=routes, lifespan=lifespan(running.url))
    with TestClient(app) as http:
        assert 0 < int(http.get("/").text) < int(http.get("/thread").text)
    without = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from tickwheel.contrib.fastapi import client, lifespan, sync_client\n"
    )
    subprocess.run([sys.executable, "-c", without], check=True, cwd=ROOT)


SERVED = """
import asyncio
from fastapi import FastAPI
from tickwheel import Client, Delivery, Worker
from tickwheel.contrib.fastapi import lifespan
worker = Worker(Client())
@worker.on("served")
async def handle(delivery: Delivery) -> None:
    print("begins", flush=True)
    await asyncio.sleep(0.3)  # real time: it runs while the server stops
app = FastAPI(lifespan=lifespan(worker=worker))
"""


async def test_sigterm_to_uvicorn_lets_handlers_end(
    running: Daemon, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "served.py").write_text(SERVED)
    receipt = await client.enqueue("served", b"")
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "served:app", "--port", "0"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TICKWHEEL_URL": running.url},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await soon(asyncio.to_thread(process.stdout.readline)) == "begins\n"
        process.send_signal(signal.SIGTERM)
        _, err = await soon(asyncio.to_thread(process.communicate))
    finally:
        process.kill()
        process.wait()
    assert "Application shutdown complete" in err, err
    assert (await client.lookup(receipt.id)).state == "acked"
