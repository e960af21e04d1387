"""Sealed segments of synthetic history, named and laid out as the daemon's own.

Compression runs beside the making of the next hour: zlib lets other threads go on meanwhile.
"""

from __future__ import annotations

import gzip
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

GZIP_LEVEL = 1
SHARD = 0
AHEAD = 2
"""So many segments may wait for their compression; more would only fill memory."""


class SegmentFiles:
    """Writes hours; ``segments`` and ``bytes`` count what is finished."""

    def __init__(self, out: Path, node: str, segment_bytes: int) -> None:
        self._out, self._node, self._segment_bytes = out, node, segment_bytes
        self._number, self._seq, self._epoch = 0, 0, 0
        self._pool = ThreadPoolExecutor(1)
        self._under_way: list[Future[int]] = []
        self.segments = 0
        self.bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            while self._under_way:
                self._finish()
        finally:
            self._pool.shutdown()

    def hour(self, start_ms: int, epoch: int, lines: list[tuple[int, str]]) -> None:
        """One hour's events in order; ``seq`` begins anew with each epoch."""
        if epoch != self._epoch:
            self._epoch, self._seq = epoch, 0
        ends = f',"node":"{self._node}","shard":{SHARD},"epoch":{epoch},"seq":'
        last = ',"synthetic":true}\n'
        texts: list[str] = []
        size = 0
        for seq, (_, text) in enumerate(lines, self._seq + 1):
            texts.append(f"{text}{ends}{seq}{last}")
            size += len(texts[-1])
            if size >= self._segment_bytes:
                self._seal(start_ms, texts)
                texts, size = [], 0
        self._seq += len(lines)
        if texts:
            self._seal(start_ms, texts)

    def _seal(self, start_ms: int, texts: list[str]) -> None:
        self._number += 1
        at = datetime.fromtimestamp(start_ms // 1000, UTC)
        folder = self._out / f"dt={at:%Y-%m-%d}" / f"hour={at:%H}"
        name = f"{self._node}-s{SHARD}-e{self._epoch}-{self._number:06d}.jsonl.gz"
        while len(self._under_way) >= AHEAD:
            self._finish()
        self._under_way.append(self._pool.submit(_write, folder, name, texts))

    def _finish(self) -> None:
        self.bytes += self._under_way.pop(0).result()
        self.segments += 1


def _write(folder: Path, name: str, texts: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".tmp-{name}"
    # Without a time of its own the same history is the same bytes.
    part.write_bytes(gzip.compress("".join(texts).encode(), GZIP_LEVEL, mtime=0))
    part.rename(folder / name)
    return (folder / name).stat().st_size
