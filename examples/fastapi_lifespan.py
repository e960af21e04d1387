"""FastAPI: one client for the whole application, connected while it serves.

The client lives in the lifespan; requests that come at the same time share its frames. What
Tickwheel cannot do now becomes an answer that says so: each error knows its HTTP status, and
``timeout=`` makes sure that a request never waits longer than it may. A worker runs in the same
process here, to see what comes of it; in production it is a process of its own.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse

from tickwheel import Client, Delivery, TickwheelError, Worker

closed = asyncio.Event()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with Client() as client:
        app.state.tickwheel = client
        worker = Worker(client, signals=False)  # the server has its own

        @worker.on("example.fastapi", group="shop")
        async def close(delivery: Delivery) -> None:
            print(f"order {delivery.key}: not paid in time")
            closed.set()

        running = asyncio.create_task(worker.run())
        yield
        worker.stop()
        await running


app = FastAPI(lifespan=lifespan)


def tickwheel(request: Request) -> Client:
    client: Client = request.app.state.tickwheel
    return client


Tickwheel = Annotated[Client, Depends(tickwheel)]


@app.exception_handler(TickwheelError)
async def failed(_: Request, error: TickwheelError) -> JSONResponse:
    return JSONResponse({"error": error.code, "message": error.message}, error.http_status)


@app.post("/orders/{number}", status_code=201)
async def place(number: str, client: Tickwheel) -> dict[str, str]:
    receipt = await client.enqueue("example.fastapi", b"", delay=1.5, key=number, timeout=2)
    return {"task": str(receipt.id)}  # a string: JavaScript has no 64-bit numbers


@app.post("/orders/{number}/payment")
async def pay(number: str, client: Tickwheel) -> dict[str, list[str]]:
    outcomes = await client.cancel(topic="example.fastapi", key=number, timeout=2)
    return {"timeout": [outcome.status for outcome in outcomes]}


@app.post("/orders/{number}/reminders")
async def remind(number: str, hours: float, client: Tickwheel) -> dict[str, str]:
    receipt = await client.enqueue(
        "example.fastapi.reminders", b"", delay=hours * 3600, key=number, timeout=2
    )
    return {"task": str(receipt.id)}


async def main() -> None:
    # As uvicorn would, without a port: its lifespan, then requests.
    async with lifespan(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
            for number in ("1", "2"):
                print(f"order {number}: {(await http.post(f'/orders/{number}')).status_code}")
            print("order 1: paid,", (await http.post("/orders/1/payment")).json()["timeout"])
            wrong = await http.post("/orders/2/reminders", params={"hours": -1})
            print(f"wrong: {wrong.status_code} {wrong.json()['error']}")
        await closed.wait()
    print("done")


if __name__ == "__main__":
    asyncio.run(main())
