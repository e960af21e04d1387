"""Takes tasks from an inbox: rows that applications write in their own transactions.

An ``Inbox`` (``contract.py``) is in a database of the application, in PostgreSQL
(``postgresql.py``) or in SQLite (``sqlite.py``). A ``Taker`` (``taker.py``) reads the rows of
committed transactions, sends them to the daemon, and records what it has sent. ``process.py`` is
the process in which the daemon runs a taker; applications write rows with ``tickwheel.sql``.

This is client-side code: it connects to the daemon like every producer, and imports nothing from
it.
"""

from __future__ import annotations

from tickwheel.errors import BadRequest, needs_extra
from tickwheel.inbox.contract import Inbox


def open_inbox(url: str) -> Inbox:
    """Return the inbox at ``postgresql://USER@HOST/DATABASE?schema=NAME`` or ``sqlite:///PATH``;
    ``open`` connects to it. Raise BadRequest for an invalid URL or a missing extra."""
    scheme = url.partition("://")[0]
    if scheme in {"postgresql", "postgres"}:
        with needs_extra("an inbox in PostgreSQL", "postgresql"):
            from tickwheel.inbox.postgresql import PostgresInbox

        return PostgresInbox(url)
    if scheme == "sqlite":
        from tickwheel.inbox.sqlite import SqliteInbox

        return SqliteInbox(url)
    raise BadRequest("inbox must be postgresql://USER@HOST/DATABASE or sqlite:///PATH")
