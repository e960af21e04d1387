"""The daemon's address: bound before anything else, and told in the ready file."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from tickwheel.server.settings import split_address


def bind(address: str) -> socket.socket:
    """Take ``tcp://HOST:PORT`` before the work of a recovery, so that a taken one is told at
    once. Raises OSError."""
    host, port = split_address(address, "listen")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """``tcp://HOST:PORT`` with the port that was found."""
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def write_ready_file(path: Path, url: str, http: str | None) -> None:
    """At once or not at all, for whoever waits for it."""
    told = {"url": url, "http": http, "pid": os.getpid()}
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(told) + "\n")
    fresh.replace(path)
