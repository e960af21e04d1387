"""A reminder every day at 9:00 in Berlin, in summer and winter time, and a schedule that fires now.

The first schedule is created and shown; it fires tomorrow. The second schedule fires every second.
Its consumer sees the name of the schedule and the planned time.
"""

import asyncio
from zoneinfo import ZoneInfo

from tickwheel import Client

DAILY, MAILS = "example.reminder", "example.mails"
POLL, RUNS = "example.poll", 2


async def remind_daily(client: Client) -> None:
    await client.put_schedule(
        DAILY, topic=MAILS, body=b"stand-up at 9:15", cron="0 9 * * *",
        timezone="Europe/Berlin", catch_up="last", overlap="skip",
    )  # fmt: skip


async def main() -> None:
    async with Client() as client:
        await remind_daily(client)
        daily = await client.show_schedule(DAILY, planned=2)
        berlin = ZoneInfo("Europe/Berlin")
        for at in daily.planned:
            print(f"{DAILY}: planned for {at.astimezone(berlin):%H:%M} in Berlin")

        await client.put_schedule(POLL, topic=POLL, every=1, runs_max=RUNS)
        async with client.subscribe(POLL) as deliveries:
            for number in range(1, RUNS + 1):
                delivery = await anext(deliveries)
                late_ms = delivery.delivered_ms - delivery.due_ms
                print(f"{delivery.schedule}: run {number}, {late_ms} ms after its planned time")
                await delivery.ack()
        ended = await client.show_schedule(POLL)
        print(f"{POLL}: {ended.runs} runs, {'over' if ended.next is None else 'goes on'}")
        for name in (DAILY, POLL):
            await client.delete_schedule(name)
    print("done")


if __name__ == "__main__":
    asyncio.run(main())
