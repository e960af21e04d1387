"""Which extra of this package brings which module: what to say when one is missing.

Imports nothing: it speaks where nothing is installed.
"""

from __future__ import annotations

from typing import NamedTuple


class Extra(NamedTuple):
    what: str
    """What needs the extra, as the beginning of a sentence."""
    modules: tuple[str, ...]
    """The modules of the extra, as they are imported."""


EXTRAS = {
    "cli": Extra("the command line", ("typer", "rich")),
    "server": Extra(
        "the daemon",
        (
            "cronsim", "lark", "prometheus_client", "pydantic", "pydantic_settings", "starlette",
            "structlog", "tzdata", "uvicorn", "uvloop",
        ),
    ),
    "http": Extra("the HTTP API", ("msgspec", "offapi")),
    "redis": Extra("a store in Redis", ("hiredis", "redis")),
    "asyncio-redis": Extra("the driver asyncio-redis", ("asyncio_redis",)),
    "reports": Extra("a report", ("pyspark", "py4j")),
}  # fmt: skip


def advice(module: str | None) -> str | None:
    """The line for a module that cannot be imported; None when no extra brings it."""
    top = (module or "").partition(".")[0]
    for name, extra in EXTRAS.items():
        if top in extra.modules:
            what = f"{extra.what} needs {top}, which is not installed"
            return f"{what}: pip install 'tickwheel[{name}]'"
    return None
