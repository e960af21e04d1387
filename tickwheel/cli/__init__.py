"""The command line. Importing this needs nothing; running it needs the extra ``cli``."""

from __future__ import annotations

import sys
from typing import NamedTuple


def main() -> int:
    """Run the ``tickwheel`` command. Return the exit code."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401

        from tickwheel.cli.app import run

        return run()
    except ModuleNotFoundError as error:
        line = advice(error.name)
        if line is None:
            raise
        print(f"tickwheel: {line}", file=sys.stderr)
        return 1


class Extra(NamedTuple):
    what: str
    """The feature that needs the extra, as the beginning of a sentence."""
    modules: tuple[str, ...]
    """The import names of the extra's modules."""


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
    "postgresql": Extra("a store or an inbox in PostgreSQL", ("asyncpg",)),
    "asyncio-redis": Extra("the driver asyncio-redis", ("asyncio_redis",)),
    "otel": Extra("OpenTelemetry", ("opentelemetry",)),
    "reports": Extra("a report", ("pyspark", "py4j")),
    "typed": Extra("a typed task", ("msgspec",)),
    "zstd": Extra("compression by zstd", ("zstandard",)),
    "encryption": Extra("encryption", ("cryptography",)),
    "amqp": Extra("a target in RabbitMQ", ("aio_pika",)),
    "kafka": Extra("a target in Kafka", ("aiokafka",)),
    "push": Extra("push", ("aiohttp",)),
    "reload": Extra("--reload", ("watchfiles",)),
    "sqlalchemy": Extra("SqlOnce", ("sqlalchemy",)),
}  # fmt: skip


def advice(module: str | None) -> str | None:
    """Return the message for a module that cannot be imported; None if no extra has it."""
    top = (module or "").partition(".")[0]
    for name, extra in EXTRAS.items():
        if top in extra.modules:
            reason = f"{extra.what} needs {top}, which is not installed"
            return f"{reason}: pip install 'tickwheel[{name}]'"
    return None
