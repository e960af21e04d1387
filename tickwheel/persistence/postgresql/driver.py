"""One connection to PostgreSQL, and the options of the store, which a URL sets.

``Link`` connects on demand and classifies errors by the only question that matters to a commit: can
the statement have been executed? ``NotConnected``: it was not sent. ``ServerError``: PostgreSQL has
answered that it rolled it back. ``NoReply``: unknown. A link has no retries and no pool.

A call that lasts too long ends by closing the socket, never by a cancel request: PostgreSQL answers
a cancelled wait for a synchronous standby with success.

Settings that a DBA can give a role or a database (time-outs, the isolation level, the schema) are
startup parameters, so that every session has ours. A pooler that drops startup parameters, such as
PgBouncer, is refused: its sessions would have the DBA's settings.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode, urlsplit

from tickwheel.errors import module_needs_extra
from tickwheel.persistence.on_server import (
    NoReply,
    NotConnected,
    ServerTrouble,
    address_from,
    invalid,
    settings_from,
    unusable,
)
from tickwheel.persistence.postgresql.layout import SQL

with module_needs_extra("a store in PostgreSQL", "postgresql"):
    import asyncpg

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from tickwheel.persistence.contract import StoreError

_T = TypeVar("_T")
PORT: Final = 5432
LIBPQ = ("sslmode", "sslrootcert", "sslcert", "sslkey", "passfile", "target_session_attrs")
"""Settings in a URL that have the names and the meaning of libpq's."""
SYNCHRONOUS_COMMIT = ("on", "remote_apply", "remote_write", "local", "off")
NEVER_ZERO = ("connect_ms", "call_ms", "endings_max", "part_rows")
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,39}")
"""Names that mean the same with and without quotes; words of SQL need them. PostgreSQL reserves
names that begin with ``pg_``."""


@dataclass(frozen=True, slots=True)
class PostgresOptions:
    """Options of the PostgreSQL store, also as a URL query: ``postgresql://host/db?schema=t``."""

    dsn: str = field(repr=False)
    """The URL with only its host, database, user, password and settings of ``LIBPQ``."""
    name: str
    """The URL without secrets and settings, for messages."""
    address: str
    """The addresses in the URL, ``HOST:PORT,…``."""
    schema: str = "tickwheel"
    shard: int = 0
    synchronous_commit: str = "on"
    """The setting of the store's sessions: after which writes a batch is confirmed."""
    allow_volatile_store: bool = False
    """Whether to accept a PostgreSQL that can lose confirmed tasks in a power cut."""
    connect_ms: int = 2_000
    """Maximum milliseconds to connect."""
    call_ms: int = 5_000
    """Maximum milliseconds to wait for an answer."""
    endings_max: int = 100_000
    """Number of finished tasks whose outcomes are kept."""
    part_rows: int = 50_000
    """Number of tasks after which a part of the tasks is complete. All ended tasks leave with their
    part."""


_IN_QUERY = {
    item.name: item.type
    for item in fields(PostgresOptions)
    if item.name not in ("dsn", "name", "address")
}


def options_from(url: str) -> PostgresOptions:
    """Return the options in a URL. Raise StoreUnusable, without the password in its message."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2]
    name = f"postgresql://{hosts}{parts.path}"
    if not parts.path.strip("/"):
        raise invalid(name, "the path must be the name of the database, for example /app")
    types = _IN_QUERY | dict.fromkeys(LIBPQ, "str")
    settings = settings_from(name, parts.query, types, never_zero=NEVER_ZERO)
    libpq = {key: settings.pop(key) for key in LIBPQ if key in settings}
    level = settings.get("synchronous_commit", "on")
    if level not in SYNCHRONOUS_COMMIT:
        levels = ", ".join(SYNCHRONOUS_COMMIT)
        raise invalid(name, f"synchronous_commit={level!r} is not one of {levels}")
    schema = settings.get("schema", "tickwheel")
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise invalid(
            name, f"schema={schema!r} must be 1 to 40 characters from a-z 0-9 _, and not begin"
            " with a digit or pg_",
        )  # fmt: skip
    if "," in hosts:
        if not all(hosts.split(",")):
            raise invalid(name, "one of its hosts has no name")
        libpq.setdefault("target_session_attrs", "primary")
    addresses = [str(address_from(name, host, PORT)) for host in hosts.split(",")]
    dsn = parts._replace(scheme="postgresql", query=urlencode(libpq), fragment="").geturl()
    return PostgresOptions(dsn=dsn, name=name, address=",".join(addresses), **settings)


# --- errors --------------------------------------------------------------------------------------

MISSING_TABLE, DISK_FULL = "42P01", "53100"
REFUSING = (
    "25006",  # the server is or became a standby, or the role's transactions are read-only
    "42501",  # a privilege was revoked
    "40001", "40P01", "55P03", "57014",  # a conflict, a lock or a time-out of somebody else
    "53000", "53100", "53200", "53400",  # no memory, no disk
)  # fmt: skip
"""Errors that another attempt can outlive. PostgreSQL has rolled the statement back."""
UNFIT: Final = "22"
"""The class of errors of values that PostgreSQL cannot represent, such as text with NUL."""
_GONE = ("08", "57P")
"""Classes of errors after which the connection is closed, whatever the statement did."""
_IDENTITY = ("28000", "28P01", "3D000")
"""Errors of the user, the password or the name of the database."""


class ServerError(ServerTrouble):
    """PostgreSQL has rolled the statement back; ``state`` is its SQLSTATE."""

    def __init__(self, state: str, text: str) -> None:
        super().__init__(f"{text} (SQLSTATE {state})")
        self.state = state


def is_table_dropped(error: Exception) -> bool:
    return isinstance(error, ServerError) and error.state == MISSING_TABLE


# --- the connection ------------------------------------------------------------------------------

SETTINGS = {
    "application_name": "tickwheel",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
}
LOOKUPS = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
"""For sessions that find rows by index: PostgreSQL has no statistics of a table that is new."""
SNAPSHOT = "ISOLATION LEVEL REPEATABLE READ, READ ONLY"
CLOSE_S = 1.0
LONG_CALL_MS = 60_000
"""Maximum milliseconds of a statement that reads or copies whole tables."""
_POOLED = (
    "it is reached through a pooler (PgBouncer?) that does not pass startup parameters on, so that"
    " the store's sessions would have foreign settings; name PostgreSQL itself"
)


class Link:
    """A connection that is opened again when it is needed. It has one caller at a time."""

    def __init__(self, options: PostgresOptions, planner: Mapping[str, str] | None = None) -> None:
        """``planner``: further settings of the session, such as ``LOOKUPS``."""
        self._options = options
        self._settings = {
            **SETTINGS,
            "search_path": options.schema,
            "synchronous_commit": options.synchronous_commit,
            **(planner or {}),
        }
        self._connection: Any = None
        self._is_in_transaction = False
        self.connections = 0
        """Number of connections made so far."""
        self.address = ""
        """The server of the last connection, ``HOST:PORT``: as the URL or, with several, the server
        has it."""
        self.server_changes = 0
        """How often a connection reached another server than the one before."""
        self._since_s = 0.0

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

    @property
    def connected_s(self) -> int:
        """Age of the last connection in seconds, rounded down."""
        return int(asyncio.get_running_loop().time() - self._since_s)

    async def ready(self) -> Any:
        """Return the open connection. Raise NotConnected, NoReply or StoreUnusable."""
        if self.connected:
            return self._connection
        options = self._options
        if self._is_in_transaction:
            raise NoReply(f"{options.name}: the connection broke in a transaction")
        try:
            connection = await asyncpg.connect(
                options.dsn, timeout=options.connect_ms / 1000, server_settings=self._settings
            )
        except asyncpg.PostgresError as error:
            raise _connect_error(options, error) from error
        except (OSError, ValueError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            reason = str(error) or f"no answer within {options.connect_ms} ms (connect_ms)"
            raise NotConnected(f"{options.name}: {reason}") from error
        self._connection = connection
        self.connections += 1
        self._since_s = asyncio.get_running_loop().time()
        names, values = list(self._settings), list(self._settings.values())
        try:
            ((foreign, _, host, port),) = await self.fetch(SQL["session"], names, values)
        except BaseException:
            self.drop()  # the next call must not use a connection that was not checked
            raise
        address, _, others = options.address.partition(",")
        if others and host:
            address = f"{host}:{port}"
        self.server_changes += self.address not in ("", address)
        self.address = address
        if foreign:
            await self.close()
            raise unusable(options.name, f"{_POOLED} ({', '.join(foreign)})")
        return connection

    async def fetch(
        self, statement: str, *args: object, timeout_ms: int | None = None
    ) -> Sequence[Any]:
        """Return the rows of a statement. Raise ServerTrouble."""
        return await self._call(lambda link: link.fetch(statement, *args), timeout_ms)

    async def execute(self, script: str, timeout_ms: int | None = None) -> None:
        """Execute statements without arguments as one transaction. Raise as ``fetch``."""
        await self._call(lambda link: link.execute(script), timeout_ms)

    async def _call(self, call: Callable[[Any], Awaitable[_T]], timeout_ms: int | None) -> _T:
        connection = await self.ready()
        limit_ms = self._options.call_ms if timeout_ms is None else timeout_ms
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            connection.terminate()

        loop, name = asyncio.get_running_loop(), self._options.name
        timer = loop.call_later(limit_ms / 1000, expire)
        calling = asyncio.ensure_future(call(connection))
        try:
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            # A cancelled call of asyncpg would send a cancel request.
            connection.terminate()
            await asyncio.gather(calling, return_exceptions=True)
            raise
        except asyncpg.PostgresError as error:
            if expired:
                raise NoReply(f"{name}: no answer within {limit_ms} ms", silent=True) from error
            state = error.sqlstate or ""
            if connection.is_closed() or state.startswith(_GONE):
                connection.terminate()
                raise NoReply(f"{name}: {_text(error)}") from error
            dropped = "a table of the store is missing: " if state == MISSING_TABLE else ""
            raise ServerError(state, f"{name}: {dropped}{_text(error)}") from error
        except (OSError, asyncpg.InternalClientError, asyncpg.InterfaceError) as error:
            if isinstance(error, ValueError):  # an argument that PostgreSQL cannot store is a bug
                raise
            connection.terminate()
            raise NoReply(f"{name}: the connection broke: {error}", silent=expired) from error
        except AttributeError as error:  # from asyncpg, if ``expire`` ran between two of its steps
            if not connection.is_closed():
                raise
            raise NoReply(f"{name}: no answer within {limit_ms} ms", silent=expired) from error
        finally:
            timer.cancel()

    @asynccontextmanager
    async def transaction(self, mode: str = "") -> AsyncIterator[None]:
        """Begin a transaction with this mode, such as ``SNAPSHOT``. Roll it back if the block ends
        with an error."""
        await self.execute(f"BEGIN {mode}")
        self._is_in_transaction = True
        try:
            yield
            await self.execute("COMMIT")
        except Exception:
            with suppress(NoReply, ServerError):
                await self.execute("ROLLBACK")
            raise
        except BaseException:
            self.drop()
            raise
        finally:
            self._is_in_transaction = False

    async def cursor(
        self, statement: str, *args: object
    ) -> Callable[[int], Awaitable[Sequence[Any]]]:
        """Return a function that returns the next rows. Call both inside a transaction."""
        cursor = await self._call(lambda link: link.cursor(statement, *args), None)
        return lambda count: self._call(lambda link: cursor.fetch(count), LONG_CALL_MS)

    def drop(self) -> None:
        """Close the connection at once."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        """Close the connection in good order. Can be repeated."""
        connection, self._connection = self._connection, None
        if connection is None or connection.is_closed():
            return
        try:
            await connection.close(timeout=CLOSE_S)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            connection.terminate()


def _text(error: Any) -> str:
    """Return the text of an error in one line, without its hint."""
    detail = f" ({error.detail})" if error.detail else ""
    return f"{error.args[0]}{detail}".replace("\n", " ")


def _connect_error(options: PostgresOptions, error: Any) -> StoreError:
    state, text = error.sqlstate or "", _text(error)
    if "startup parameter" in text:
        return unusable(options.name, f"{_POOLED}: {text}")
    if state in _IDENTITY:
        return unusable(options.name, f"{text}; check the store's URL and pg_hba.conf")
    return NotConnected(f"{options.name}: {text}")
