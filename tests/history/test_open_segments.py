"""Sealing: nothing is lost on the way, and nothing half is left."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import pytest

from support.history_rig import (
    NODE,
    NOW_MS,
    drain,
    enqueued,
    make_id,
    numbers,
    read_all,
    segment_names,
    spool_of,
    writer_of,
)
from support.stand_in import stand_in
from tickwheel.history import writer as writing
from tickwheel.history.segments import hour_folder
from tickwheel.history.writer import Sealer


def open_segment(folder: Path, text: str) -> Path:
    path = folder / f"{NODE}-s0-e1-000001.jsonl"
    path.write_text(text)
    return path


def seal(path: Path) -> None:
    sealer = Sealer()
    sealer.add(path)
    while sealer.step():
        pass
    assert not sealer.busy


def test_sealing_keeps_lines_and_drops_a_torn_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "PIECE_BYTES", 10)
    text = "".join(f'{{"time_ms":{n}}}\n' for n in range(100))
    path = open_segment(tmp_path, text + '{"time_ms":1')
    seal(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name + ".gz"]
    assert gzip.decompress((tmp_path / (path.name + ".gz")).read_bytes()).decode() == text


@pytest.mark.parametrize("text", ["", "torn"])
def test_an_empty_segment_is_removed(tmp_path: Path, text: str) -> None:
    seal(open_segment(tmp_path, text))
    assert list(tmp_path.iterdir()) == []


def test_an_already_sealed_segment_is_removed(tmp_path: Path) -> None:
    path = open_segment(tmp_path, "{}\n")
    seal(path)
    kept = path.with_name(path.name + ".gz").read_bytes()
    seal(open_segment(tmp_path, "{}\n{}\n"))
    assert [(e.name, e.read_bytes()) for e in tmp_path.iterdir()] == [(path.name + ".gz", kept)]


def test_sealing_a_missing_segment_does_not_raise(tmp_path: Path) -> None:
    seal(tmp_path / f"{NODE}-s0-e1-000001.jsonl")


def test_a_full_disk_restarts_the_sealing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_segment(tmp_path, '{"time_ms":1}\n' * 50)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sealer = Sealer()
    sealer.add(path)
    with monkeypatch.context() as patch:
        patch.setattr(writing, "os", stand_in(os, fdatasync=full))
        with pytest.raises(OSError, match="No space"):
            while sealer.step():
                pass
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    while sealer.step():
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name + ".gz"]


def test_an_interrupted_sealing_is_completed_by_the_next_writer(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    spool.append(1, [enqueued([make_id(1)])])
    writer = writer_of(tmp_path, segment_bytes=10)
    writer.step()
    assert writer.sealer.busy
    part = tmp_path / hour_folder(NOW_MS) / f".tmp-{NODE}-s0-e1-000001.jsonl.gz"
    assert part.exists()
    writer.output.release()  # and nothing else, as a kill would
    spool.close()
    drain(tmp_path)
    assert not part.exists()
    assert numbers(read_all(tmp_path)) == [(1, 1)]


def test_an_open_copy_of_a_sealed_segment_is_removed(tmp_path: Path) -> None:
    """Sealed and named, and then killed: readers that take every file would see it twice."""
    spool = spool_of(tmp_path)
    spool.append(1, [enqueued([make_id(1)])])
    spool.close()
    drain(tmp_path)
    (path,) = tmp_path.glob("dt=*/hour=*/*")
    left = path.with_name(path.name.removesuffix(".gz"))
    left.write_bytes(gzip.decompress(path.read_bytes()))
    drain(tmp_path)
    assert segment_names(tmp_path) == [path.name]
    assert numbers(read_all(tmp_path)) == [(1, 1)]
