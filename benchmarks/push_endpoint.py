"""An endpoint that answers 204 and records the lateness of each task, which ``/figures`` returns.

``python -m benchmarks.push_endpoint PORT [SECONDS]``; it answers after ``SECONDS`` (default 0).
"""

from __future__ import annotations

import asyncio
import sys
import time

from aiohttp import web


async def serve(port: int, takes_s: float) -> None:
    """Serve until killed."""
    late_ms: dict[str, float] = {}

    async def take(request: web.Request) -> web.Response:
        now_ms = time.time() * 1000
        task = request.headers["tickwheel-id"]
        late_ms.setdefault(task, now_ms - int(request.headers["tickwheel-due-ms"]))
        await request.read()
        if takes_s:
            await asyncio.sleep(takes_s)
        return web.Response(status=204)

    async def figures(request: web.Request) -> web.Response:
        return web.json_response(list(late_ms.values()))

    app = web.Application()
    app.router.add_post("/", take)
    app.router.add_get("/figures", figures)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))
