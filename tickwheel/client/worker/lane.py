"""One handler's lane: its subscription, and the jobs that are under way.

A delivery is taken only when a job may start: what waits is the subscription's, which keeps its
lease up and gives it back at the end. A part of the client: it uses its link and calls.
Invariant: at most ``concurrency`` handlers run.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tickwheel.client.delivery import Delivery
from tickwheel.client.worker.job import LOGGER, Job
from tickwheel.client.worker.leases import Leases
from tickwheel.client.worker.routes import Route
from tickwheel.client.worker.threads import Threads
from tickwheel.errors import ClientClosed

if TYPE_CHECKING:
    from tickwheel.client.client import Client

ABANDON_S = 5.0
"""How long a handler that was cancelled may take to end."""


class Lane:
    """``start``, then ``read`` until it fails or is cancelled; then ``close`` and ``finish``."""

    def __init__(self, client: Client, route: Route, threads: Threads) -> None:
        self.route = route
        self._client = client
        self._threads = threads
        self._slots = asyncio.Semaphore(route.concurrency)
        self._jobs: set[Job] = set()
        self._acks: set[asyncio.Future[Any]] = set()
        self._subscription = client.subscribe(
            route.topic,
            group=route.group,
            prefetch=route.prefetch or min(route.concurrency, client.limits.prefetch_max),
            lease=route.lease,
            retry=route.retry,
        )
        self._leases: Leases | None = None

    async def start(self) -> None:
        """Subscribe. Raises what the daemon objects to."""
        subscription = await self._subscription.start()
        route, client = self.route, self._client
        self._leases = Leases(client._calls, route.topic, route.group, subscription.lease_s)
        client._link.sources.append(self._leases)

    async def read(self) -> None:
        """Start a job for each delivery, for ever. Raises why there are no more."""
        while True:
            await self._slots.acquire()
            try:
                delivery = await anext(self._subscription, None)
            except BaseException:
                self._slots.release()
                raise
            if delivery is None:
                raise ClientClosed("the client was closed while the worker ran")
            self._begin(delivery)

    def _begin(self, delivery: Delivery) -> None:
        assert self._leases is not None, "started"
        job = Job(self.route, delivery, self._leases, self._threads)
        self._jobs.add(job)
        job.task.add_done_callback(lambda _: self._ended(job))

    def _ended(self, job: Job) -> None:
        self._jobs.discard(job)
        job.when_free(self._slots.release)
        if job.ack is not None and not job.ack.done():
            self._acks.add(job.ack)
            job.ack.add_done_callback(self._acks.discard)
        if not job.task.cancelled() and (bug := job.task.exception()) is not None:
            LOGGER.error("%r: %r", job.delivery, bug, exc_info=bug)

    # --- the end --------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Handlers that run."""
        return len(self._jobs)

    async def close(self) -> None:
        """Take no more; what was not started goes back."""
        await self._subscription.close()

    async def drained(self) -> None:
        """Until no handler runs."""
        while self._jobs:
            await asyncio.wait([job.task for job in self._jobs])
            await asyncio.sleep(0)  # their callbacks

    async def finish(self) -> None:
        """Cancel what still runs, give it back, and see that every ack is answered."""
        for job in list(self._jobs):
            job.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(ABANDON_S):
                await self.drained()
        for job in self._jobs:
            LOGGER.error("%r: its handler does not let itself be cancelled", job.delivery)
        if self._acks:
            await asyncio.wait(self._acks)
        if self._leases is not None:
            self._leases.stop(ClientClosed())
            self._client._link.sources.remove(self._leases)
