"""A kind of record that is made up here: one declaration, and every store keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from persistence.store_subject import Subject
from support.redis_server import RedisServer
from support.store_rows import dropped, everything
from tickwheel.model.kinds import GROUP, KINDS, Effects, Kind, keyed
from tickwheel.model.records import GroupRow
from tickwheel.persistence import codec, open_url
from tickwheel.persistence.audit import check
from tickwheel.persistence.codec import RecordUnreadable, key_text
from tickwheel.persistence.redis import RedisStore, options_from


class Remark(NamedTuple):
    """What somebody wrote about a task."""

    topic: str
    task_id: int
    writer: bytes
    text: str


REMARK: Kind[Remark] = Kind(
    77,
    "remark",
    key=lambda row: (row.topic, row.task_id, row.writer),
    fields=lambda row: row,
    builds=(Remark,),
)
REMARKS = (
    Remark("t", 1, b"\x00\xff", "first"),
    Remark("t", 1, b"", "of another"),
    Remark("t 1", 12, b"a", "with a space"),
    Remark("t%201", 12, b"a", "with what a space would become"),
    Remark("t\0", 1, b"", "NUL"),
    Remark('t\0\x01\n"', 1, b"", "more"),
    Remark("ключ", 2**63 - 1, b"a", "long" * 100_000),
)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The declaration: all that a new kind costs."""
    monkeypatch.setitem(KINDS, REMARK.number, REMARK)


async def test_a_new_kind_is_stored_changed_and_dropped(subject: Subject) -> None:
    others = everything()
    await subject.commit(others)
    await subject.commit(Effects(records=keyed(REMARK, REMARKS)))
    for clean in (False, True):
        await subject.reopen(clean)
        small = await subject.small()
        assert sorted(small.of_kind(REMARK)) == sorted(REMARKS)
        assert small.records == others.records | keyed(REMARK, REMARKS)
    changed = REMARKS[0]._replace(text="другое")
    keys = [REMARK.key(row) for row in REMARKS[1:]]
    effects = Effects(records=dropped(REMARK, *keys, ("no", 1, b"")))
    effects.put(REMARK, changed)
    await subject.commit(effects)
    for restart in (False, True):
        if restart:
            await subject.reopen(clean=False)
        assert (await subject.small()).of_kind(REMARK) == [changed]
    await subject.commit(Effects(records=dropped(REMARK, REMARK.key(changed))))
    await subject.reopen(clean=False)
    assert (await subject.small()).records == others.records


async def test_a_new_kind_is_copied_and_checked(subject: Subject, tmp_path: Path) -> None:
    await subject.commit(Effects(records=keyed(REMARK, REMARKS)))
    path = tmp_path / "copy.db"
    await subject.store.backup(str(path))
    copy = Subject(open_url(f"sqlite:///{path}"))
    await copy.open()
    try:
        assert sorted((await copy.small()).of_kind(REMARK)) == sorted(REMARKS)
    finally:
        await copy.store.close(clean=True)
    assert check(f"sqlite:///{path}").problems == []


async def test_a_new_kind_is_rewritten_after_redis_lost_it(shared_redis: RedisServer) -> None:
    shared_redis.call("FLUSHALL")
    subject = Subject(RedisStore(options_from(shared_redis.url())))
    await subject.open()
    await subject.commit(Effects(records=keyed(REMARK, REMARKS)))
    mirror = subject.store._mirror  # type: ignore[attr-defined]
    batches = list(mirror.batches())
    by_key = {key: row for effects in batches for key, row in effects.records.items()}
    assert by_key == keyed(REMARK, REMARKS)
    await subject.store.close(clean=True)


async def test_a_kind_that_this_release_does_not_know_is_refused(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subject.commit(Effects(records=keyed(REMARK, REMARKS)))
    if "memory" in subject.store.durability:
        return  # it keeps rows, and reads nothing
    await subject.reopen()
    monkeypatch.delitem(KINDS, REMARK.number)
    with pytest.raises(RecordUnreadable, match=r"kind (77|'remark'); a newer release wrote it"):
        await subject.small()


def test_different_keys_of_a_kind_are_different_texts() -> None:
    assert len({key_text(REMARK.key(row)) for row in REMARKS}) == len(REMARKS)
    assert key_text(("a b", "c")) != key_text(("a", "b c"))


def test_kind_numbers_and_names_are_unique() -> None:
    kinds = list(KINDS.values())
    assert [KINDS[kind.number] for kind in kinds] == kinds
    assert len({kind.name for kind in kinds}) == len(kinds)
    assert all(kind.name.isidentifier() for kind in kinds)


def test_half_tasks_make_a_batch_that_needs_room() -> None:
    parked: Kind[GroupRow] = Kind(
        78, "parked", GROUP.key, GROUP.fields, GROUP.builds, lambda row: [row.since_ms] * 2
    )
    row = GroupRow("t", "g", 9)
    assert codec.decode_record(parked, codec.encode_record(parked, row)) == row
    assert not Effects(records=keyed(GROUP, [row])).makes_tasks
    assert not Effects(records=dropped(parked, ("t", "g"))).makes_tasks
    effects = Effects(records=keyed(parked, [row]))
    assert effects.makes_tasks
    assert effects.half_task_sizes() == [9, 9]
