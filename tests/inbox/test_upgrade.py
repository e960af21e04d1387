"""Inboxes of an older layout, shown with a layout 2 that is invented here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from tickwheel.inbox import contract, open_inbox, postgresql, sqlite
from tickwheel.inbox.contract import InboxTrouble

UPGRADE = {
    "postgresql": (
        "ALTER TABLE tickwheel.inbox_refused ADD COLUMN remark text;"
        " UPDATE tickwheel.inbox_state SET layout = 2;"
    ),
    "sqlite": (
        "ALTER TABLE tickwheel_inbox_refused ADD COLUMN remark TEXT;"
        " UPDATE tickwheel_inbox_batch SET layout = 2;"
    ),
}


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/app.db"
    return f"{request.getfixturevalue('database')}?schema=shop"


@pytest.fixture
def layout_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``layout_2(sql)``: from now on as a release whose upgrade also does this."""

    def begin(sql: str = "") -> None:
        for kind, script in UPGRADE.items():
            (tmp_path / f"{kind}-upgrade-2.sql").write_text(f"{script}\n{sql}\n")
        monkeypatch.setattr(contract, "FOLDER", tmp_path)
        for module in (postgresql, sqlite):
            monkeypatch.setattr(module, "LAYOUT", 2)

    return begin


async def layout(url: str) -> int:
    inbox = open_inbox(url)
    found = await inbox.open(dry_run=True)
    await inbox.close()
    return found.layout


async def create(url: str) -> None:
    inbox = open_inbox(url)
    assert (await inbox.open()).layout == 0
    await inbox.close()


async def test_a_taker_upgrades_an_older_inbox(url: str, layout_2: Callable[..., None]) -> None:
    await create(url)
    layout_2()
    inbox = open_inbox(url)
    planned = await inbox.open(dry_run=True)
    await inbox.close()
    assert (planned.layout, planned.needed, await layout(url)) == (1, 2, 1)
    assert await inbox.open() == planned
    assert await inbox.lead()
    assert await inbox.take_over() is None
    await inbox.close()
    assert await layout(url) == 2
    assert (await inbox.open()).steps == ()
    await inbox.close()


async def test_an_upgrade_waits_for_the_taker_of_the_older_release(
    url: str, layout_2: Callable[..., None]
) -> None:
    await create(url)
    older, newer = open_inbox(url), open_inbox(url)
    await older.open()
    assert await older.lead()
    layout_2()
    with pytest.raises(InboxTrouble, match="layout 1 cannot be upgraded to 2 while a taker"):
        await newer.open()
    await newer.close()
    await older.close()
    await newer.open()
    await newer.close()
    assert await layout(url) == 2


async def test_a_failed_upgrade_of_an_inbox_changes_nothing(
    url: str, layout_2: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(url)
    layout_2("SELECT 1 FROM nowhere;")
    inbox = open_inbox(url)
    with pytest.raises(InboxTrouble, match="nowhere"):
        await inbox.open()
    await inbox.close()
    assert await layout(url) == 1
    layout_2()
    assert (await inbox.open()).layout == 1
    await inbox.close()
    monkeypatch.undo()
    with pytest.raises(InboxTrouble, match="the layout is 2; this version supports 1"):
        await inbox.open()
    await inbox.close()


async def test_a_role_without_the_privilege_is_told_the_command(
    database: str, layout_2: Callable[..., None]
) -> None:
    await create(database)
    connection = await asyncpg.connect(database)
    await connection.execute(
        "CREATE ROLE clerk LOGIN; GRANT USAGE ON SCHEMA tickwheel TO clerk;"
        " GRANT SELECT ON tickwheel.inbox_state TO clerk"
    )
    layout_2()
    inbox = open_inbox(database.replace("postgres@", "clerk@"))
    with pytest.raises(InboxTrouble, match="statements of `tickwheel inbox upgrade --dry-run`"):
        await inbox.open()
    await inbox.close()
    await connection.execute("DROP OWNED BY clerk; DROP ROLE clerk")
    await connection.close()
