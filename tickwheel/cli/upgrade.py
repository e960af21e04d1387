"""``tickwheel store upgrade`` and ``tickwheel inbox upgrade``: upgrade tables to the layout of this
release, or print how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from tickwheel.cli.call import Call, limit_file_mode, offline
from tickwheel.cli.options import argument, flag
from tickwheel.errors import Conflict

if TYPE_CHECKING:
    from tickwheel.upgrades import Upgrade

DryRunOption = Annotated[bool, flag("Print the steps; change nothing.")]


@offline()
async def store(
    call: Call,
    store_url: Annotated[str, argument("URL", "The store, as in `tickwheel serve --store URL`.")],
    dry_run: DryRunOption = False,
) -> None:
    """Upgrade a store that an older release wrote, in one transaction for each shard.

    A daemon does this at its start. Stop all daemons of the store first; a running one makes this
    command fail. With --dry-run the steps are on stdout, for PostgreSQL as SQL that a DBA can run:
    `psql -1 -f FILE`.
    """
    from tickwheel.persistence import upgrade

    limit_file_mode()
    async for done in upgrade(store_url, dry_run=dry_run):
        _show(call, "store", done, dry_run=dry_run)


@offline()
async def inbox(
    call: Call,
    inbox_url: Annotated[str, argument("URL", "The inbox, as in `tickwheel inbox run URL`.")],
    dry_run: DryRunOption = False,
) -> None:
    """Upgrade an inbox that an older release created, in one transaction.

    A taker does this at its start. Stop all takers first. Applications can go on meanwhile.
    """
    from tickwheel.inbox import open_inbox
    from tickwheel.inbox.contract import InboxTrouble

    opened = open_inbox(inbox_url)
    try:
        found = await opened.open(dry_run=True)
        if found.steps and not dry_run:
            await opened.close()
            await opened.open()
        _show(call, "inbox", found, dry_run=dry_run)
    except InboxTrouble as error:
        raise Conflict(str(error)) from None
    finally:
        await opened.close()


def _show(call: Call, kind: str, upgrade: Upgrade, *, dry_run: bool) -> None:
    label, layout, needed, steps = upgrade
    fields = {
        kind: label, "layout": layout, "needed": needed, "steps": steps,
        "upgraded": bool(steps) and not dry_run,
    }  # fmt: skip
    if not steps:
        state = f"has layout {layout}, as this release needs" if layout else "is empty"
        call.out.result(fields, f"{label} {state}: nothing to upgrade")
    elif not dry_run:
        call.out.result(fields, f"{label} was upgraded from layout {layout} to {needed}")
    else:
        call.out.remark(f"{label} has layout {layout}; this release needs layout {needed}")
        call.out.result(fields, "\n".join(steps))
