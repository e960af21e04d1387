"""FastAPI: one client for the whole application, and a worker in the same process.

The lifespan connects the client, and concurrent requests share its frames. Errors of Tickwheel
become HTTP answers with their status, and ``timeout=`` limits how long a request waits. The worker
stops gracefully with the application. In production it can also be a separate process
(``tickwheel work``).
"""

import asyncio

import httpx
from fastapi import FastAPI

from tickwheel import Client, Delivery, TickwheelError, Worker
from tickwheel.contrib.fastapi import TickwheelClient, answer_error, lifespan

closed = asyncio.Event()
worker = Worker(Client())


@worker.on("example.fastapi", group="shop")
async def close(delivery: Delivery) -> None:
    print(f"order {delivery.key}: not paid in time")
    closed.set()


app = FastAPI(lifespan=lifespan(worker=worker))
app.add_exception_handler(TickwheelError, answer_error)


@app.post("/orders/{number}", status_code=201)
async def place(number: str, tickwheel: TickwheelClient) -> dict[str, str]:
    receipt = await tickwheel.enqueue("example.fastapi", b"", delay=1.5, key=number, timeout=2)
    return {"task": str(receipt.id)}  # a string, since JavaScript has no 64-bit integers


@app.post("/orders/{number}/payment")
async def pay(number: str, tickwheel: TickwheelClient) -> dict[str, list[str]]:
    outcomes = await tickwheel.cancel(topic="example.fastapi", key=number, timeout=2)
    return {"timeout": [outcome.status for outcome in outcomes]}


@app.post("/orders/{number}/reminders")
async def remind(number: str, hours: float, tickwheel: TickwheelClient) -> dict[str, str]:
    receipt = await tickwheel.enqueue(
        "example.fastapi.reminders", b"", delay=hours * 3600, key=number, timeout=2
    )
    return {"task": str(receipt.id)}


async def main() -> None:
    # Like uvicorn without a port: run the lifespan, then send requests.
    async with app.router.lifespan_context(app):
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
