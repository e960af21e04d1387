"""The spool: whole arrays whatever happens, a bound, and what the writer may believe."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from support.history_rig import enqueued, make_id
from support.stand_in import stand_in
from tickwheel.history import spool as spool_module
from tickwheel.history.spool import Spool
from tickwheel.model.policies import RetryPolicy


def records(count: int = 1, first: int = 0) -> list[Any]:
    return [enqueued([make_id(first + i) for i in range(count)])]


def arrays(folder: Path) -> list[tuple[int, list[Any]]]:
    results = []
    for name in spool_module.files(folder):
        offset = 0
        while (chunk := spool_module.read_chunk(folder / str(name), offset, 64)).arrays:
            results += chunk.arrays
            offset = chunk.offset
        assert not chunk.damage
    return results


def test_spooled_records_are_read_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", 7)
    batches = [(n, records(n)) for n in range(1, 50)]
    for n, some in batches:
        assert spool.append(n, some)
    assert [(n, [list(r) for r in some]) for n, some in batches] == arrays(tmp_path / "s")
    assert spool.measure() == sum(p.stat().st_size for p in (tmp_path / "s").glob("spool-7-*"))


def test_a_torn_tail_at_any_byte_is_ignored(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1)
    for n in range(1, 4):
        spool.append(n, records(3, n))
    spool.close()
    path = tmp_path / str(spool_module.files(tmp_path)[0])
    data = path.read_bytes()
    ends = []
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        chunk = spool_module.read_chunk(path, 0)
        assert not chunk.damage
        assert [n for n, _ in chunk.arrays] == list(range(1, len(chunk.arrays) + 1))
        assert chunk.offset <= size
        ends.append(chunk.offset)
    assert ends == sorted(ends) and ends[-1] == len(data)


def test_spool_files_rotate_and_are_read_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1, bytes_max=4_000)
    for n in range(1, 31):
        assert spool.append(n, records())
    names = spool_module.files(tmp_path)
    assert [name.number for name in names] == list(range(1, len(names) + 1)) and len(names) >= 2
    assert [n for n, _ in arrays(tmp_path)] == list(range(1, 31))


def test_numbers_of_files_are_never_used_again(tmp_path: Path) -> None:
    first = Spool(tmp_path, 1)
    first.append(1, records())
    first.close()
    (tmp_path / str(spool_module.files(tmp_path)[0])).unlink()
    again = Spool(tmp_path, 1)
    again.append(1, records())
    assert [name.number for name in spool_module.files(tmp_path)] == [2]


def test_over_the_bound_it_refuses_until_there_is_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1, bytes_max=2_000)
    n = 0
    while spool.append(n, records()):
        n += 1
    total = sum(path.stat().st_size for path in tmp_path.glob("spool-*"))
    one = total // n
    assert 2_000 - one < total <= 2_000
    assert spool.trouble is not None and "2000 bytes" in spool.trouble
    assert not spool.append(n, records())
    assert spool.refused == 2
    oldest = spool_module.files(tmp_path)[0]
    (tmp_path / str(oldest)).unlink()  # as the writer does
    assert spool.append(n, records())
    assert spool.trouble is None


@pytest.mark.parametrize("written", [0, 1, 40])
def test_a_full_disk_leaves_whole_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    spool = Spool(tmp_path, 1)
    assert spool.append(1, records())
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if not written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:written])

    monkeypatch.setattr(spool_module, "os", stand_in(os, write=full))
    assert not spool.append(2, records())
    monkeypatch.undo()
    assert spool.trouble is not None
    assert [n for n, _ in arrays(tmp_path)] == [1]
    assert spool.append(3, records())
    assert [n for n, _ in arrays(tmp_path)] == [1, 3]


def test_a_file_that_cannot_be_truncated_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, 1)
    assert spool.append(1, records())
    real = os.write

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    torn = stand_in(os, write=lambda fd, data: real(fd, data[:9]), ftruncate=broken)
    monkeypatch.setattr(spool_module, "os", torn)
    assert not spool.append(2, records())
    monkeypatch.undo()
    assert spool.append(3, records())
    assert len(spool_module.files(tmp_path)) == 2
    assert [n for n, _ in arrays(tmp_path)] == [1, 3]


def test_an_uncreatable_spool_folder_does_not_raise(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file" / "below", 1)
    assert not spool.append(1, records())
    assert spool.trouble
    spool.close()


def test_unpackable_records_are_refused(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1)
    assert not spool.append(1, [[1, object()]])
    assert not spool.append(1, [[1, 2**70]])
    assert spool.append(1, [[1, "\ud800"]])
    assert arrays(tmp_path) == [(1, [[1, "\ud800"]])]


def test_retry_policies_are_packed_as_the_wire_has_them(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1)
    fixed = RetryPolicy(5_000, 1.0, 0, 3, 0.0, "fixed")
    assert spool.append(1, [[1, {0: {"retry": fixed}}]])
    numbers = {"kind": "fixed", "delay_ms": 5_000, "retries": 3, "jitter": 0.0}
    assert arrays(tmp_path) == [(1, [[1, {0: {"retry": numbers}}]])]


def test_the_writer_sees_whether_its_daemon_lives(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1)
    spool.append(1, records())
    path = tmp_path / str(spool_module.files(tmp_path)[0])
    assert spool_module.is_held(path)
    spool.close(clean=True)
    assert not spool_module.is_held(path)
    assert not spool_module.is_held(tmp_path / "gone")
    assert not spool.append(1, records()) or len(spool_module.files(tmp_path)) == 2


@pytest.mark.parametrize("damage", [b"\x00" * 30, b"\xc1", b"\x93\x01\x02\x03", b"\x92\xa1x\x90"])
def test_damage_is_not_mistaken_for_a_torn_tail(tmp_path: Path, damage: bytes) -> None:
    spool = Spool(tmp_path, 1)
    spool.append(1, records())
    path = tmp_path / str(spool_module.files(tmp_path)[0])
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(damage)
    chunk = spool_module.read_chunk(path, 0)
    if chunk.arrays and not chunk.damage:
        chunk = spool_module.read_chunk(path, chunk.offset)
    assert chunk.damage
    assert chunk.offset == size
