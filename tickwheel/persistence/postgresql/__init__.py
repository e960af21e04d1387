"""The PostgreSQL store: each batch is one statement, and tables with tasks are only added to."""

from __future__ import annotations

from tickwheel.persistence.on_server import ServerKind
from tickwheel.persistence.postgresql.driver import PostgresOptions, options_from
from tickwheel.persistence.postgresql.election import (
    PostgresElection,
    PostgresNodes,
    PostgresSiblings,
)
from tickwheel.persistence.postgresql.opening import PostgresAdministration
from tickwheel.persistence.postgresql.store import PostgresStore

__all__ = ["KIND", "PostgresOptions", "PostgresStore", "options_from"]


def _check(options: PostgresOptions) -> None:
    """Do nothing: the driver was imported, and PostgreSQL's library checks the files."""


def _store(options: PostgresOptions, resident_bytes_max: int | None) -> PostgresStore:
    return PostgresStore(options)


KIND = ServerKind(
    options_from, _check, _store, PostgresElection, PostgresNodes, PostgresSiblings,
    PostgresAdministration, has_one_layout=True,
)  # fmt: skip
