"""``tickwheel inbox``: take tasks that applications write in their own transactions; print the SQL
of an inbox."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress
from typing import Annotated

from tickwheel.cli.call import Call, offline
from tickwheel.cli.options import argument, flag, option
from tickwheel.errors import BadRequest, shown


async def run(
    call: Call,
    database: Annotated[
        str, argument("URL", "postgresql://USER@HOST/DATABASE?schema=NAME or sqlite:///PATH.")
    ],
    uncertain: Annotated[
        str,
        option(
            "What to do with tasks that an earlier process has sent without learning the outcome,"
            " if the daemon may have forgotten it too.",
            "stop|resend|skip",
        ),
    ] = "stop",
) -> None:
    """Take tasks from an inbox until SIGTERM or Ctrl-C.

    A single daemon does the same with `tickwheel serve --inbox URL`. With several shards, run this
    command beside them. Any number of processes can run; one of them works.
    """
    from tickwheel.inbox import open_inbox
    from tickwheel.inbox.taker import DECISIONS, Taker

    if uncertain not in DECISIONS:
        raise BadRequest(f"uncertain must be {', '.join(DECISIONS)}, not {shown(uncertain)}")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    inbox = open_inbox(database)
    taker = Taker(inbox, call.url, call.token, uncertain=uncertain)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, taker.stop)
    call.out.remark(f"taking tasks from {inbox.label}")
    await taker.run()
    fields = {"taken": taker.taken, "refused": taker.refused}
    call.out.result(fields, f"{taker.taken} rows taken, {taker.refused} refused")


@offline(json_help=None)
def sql(
    call: Call,
    schema: Annotated[str, option("The schema in PostgreSQL.", "NAME")] = "tickwheel",
    sqlite: Annotated[bool, flag("The tables in SQLite instead.", "--sqlite")] = False,
) -> None:
    """Print the statements that create an inbox, for people to read and run."""
    from tickwheel.inbox.schema import postgresql_sql, sqlite_sql

    call.out.line(sqlite_sql() if sqlite else postgresql_sql(schema))
