"""A TCP proxy before a Redis server that can hold what a client sends, and deliver it late.

With a context it speaks TLS to its clients, as a Redis with ``tls-port`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl


class Proxy:
    """A proxy. ``hold`` keeps everything the clients send, ``let_go`` delivers it, even for
    clients that are gone. ``let_new_through`` lets connections made later pass meanwhile."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = port
        self._tls = tls
        self._holding = False
        self._go = asyncio.Event()
        self._go.set()
        self.connections: set[asyncio.Task[None]] = set()
        self.held = asyncio.Event()
        """Something was taken, and is kept."""
        self.late = asyncio.Event()
        """Something was delivered late, and answered."""

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def hold(self) -> None:
        self._holding = True
        self._go.clear()

    def let_new_through(self) -> None:
        self._holding = False

    def let_go(self) -> None:
        self._holding = False
        self._go.set()

    async def stop(self) -> None:
        self.let_go()
        self._server.close()
        for task in list(self.connections):
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server is not there: its client sees that at once
            writer.transport.abort()
            self.connections.discard(task)
            return
        back = asyncio.ensure_future(self._back(upstream_reader, writer))
        try:
            held = False
            while data := await reader.read(1 << 16):
                # A connection that was held once stays held: its bytes keep their order.
                if self._holding or held:
                    held = True
                    self.held.set()
                    rest = asyncio.ensure_future(self._drain(reader))
                    await self._go.wait()
                    upstream.write(data + await rest)
                    await upstream.drain()
                    upstream.write_eof()
                    await back
                    self.late.set()
                    return
                upstream.write(data)
        except OSError:  # also one that was held for a server that has gone: "not connected"
            pass
        finally:
            back.cancel()
            upstream.close()
            writer.close()
            self.connections.discard(task)

    async def _drain(self, reader: asyncio.StreamReader) -> bytes:
        """Read until the client closes."""
        parts = []
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                parts.append(data)
        return b"".join(parts)

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()  # the server has closed: its client is to see that
