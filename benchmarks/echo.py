"""An echo server on the given port: ``python -m benchmarks.echo``.

The floor of one round trip over loopback: one connection at a time, blocking, nothing between the
read and the write.
"""

from __future__ import annotations

import socket
import sys

_READ_BYTES = 1 << 16


def main() -> None:
    """Serve until killed."""
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
        while True:
            peer, _ = listener.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with peer:
                while data := peer.recv(_READ_BYTES):
                    peer.sendall(data)


if __name__ == "__main__":
    main()
