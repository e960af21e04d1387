"""Lines for a log whose reader stands still."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from support.stand_in import stand_in
from support.waiting import until
from tickwheel import log_writer
from tickwheel.log_writer import StreamWriter, ends_torn, unblocked, writer_of
from tickwheel.server import logs

PIPE_BYTES = 4_096


class Pipe:
    """A small pipe; ``fill`` it, and nobody can write to it without waiting."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()
        if sys.platform == "linux":
            import fcntl

            fcntl.fcntl(self.writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.stream = io.TextIOWrapper(io.FileIO(self.writes, "w", closefd=False))
        self.filled = 0

    def fill(self) -> None:
        os.set_blocking(self.writes, False)
        for size in (PIPE_BYTES, 1):
            with suppress(BlockingIOError):
                while True:
                    self.filled += os.write(self.writes, b"-" * size)
        os.set_blocking(self.writes, True)

    def read(self, count: int) -> list[str]:
        """The next lines, without the filling."""
        while self.filled:
            self.filled -= len(os.read(self.reads, self.filled))
        text = b""
        while text.count(b"\n") < count:
            text += os.read(self.reads, 1)
        return text.decode().splitlines()

    def close(self) -> None:
        for fd in (self.reads, self.writes):
            with suppress(OSError):
                os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_lines_are_written_whole_and_in_order(pipe: Pipe) -> None:
    stream = unblocked(pipe.stream, "test")
    assert unblocked(stream, "test") is stream and stream.fileno() == pipe.writes
    lines = [f"{number} {'x' * 100}" for number in range(100)]
    for line in lines:
        print(line, file=stream)
    assert pipe.read(len(lines)) == lines
    writer = writer_of(stream)
    assert writer is not None and writer.flush(20) and writer.dropped == 0


def test_beyond_the_limit_lines_are_dropped_and_counted(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe.fill()
    stream = unblocked(pipe.stream, "test")
    writer = writer_of(stream)
    assert writer is not None
    print("taken", file=stream)
    until(lambda: writer._is_writing)  # it waits for the reader now
    monkeypatch.setattr(log_writer, "WAITING_BYTES_MAX", 10)
    for line in ("fits", "fits2"):  # 11 bytes with their ends
        print(line, file=stream)
    stream.write("two\nlines\n")
    print("last", file=stream)
    assert writer.dropped == 3 and not writer.flush(0)
    text = "tickwheel: 3 lines of this log were dropped"
    assert pipe.read(4) == ["taken", text, "fits", "last"]
    print("later", file=stream)
    assert pipe.read(1) == ["later"]


def test_a_closed_pipe_loses_only_lines(pipe: Pipe) -> None:
    os.close(pipe.reads)
    stream = unblocked(pipe.stream, "test")
    writer = writer_of(stream)
    assert writer is not None
    failures: list[OSError] = []
    writer.failed = failures.append
    print("lost", file=stream)
    assert writer.flush(20)
    assert writer.dropped == 1 and isinstance(failures[0], BrokenPipeError)


def test_a_line_begins_after_a_torn_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sizes = tmp_path / "log", [4]

    def write(fd: int, data: bytes) -> int:
        if sizes:
            return os.write(fd, data[: sizes.pop()])
        raise OSError(28, "No space left on device")

    with path.open("wb") as file:
        writer = StreamWriter(file.fileno(), "test")
        with monkeypatch.context() as full:
            full.setattr(log_writer, "os", stand_in(os, write=write))
            writer.put(b"first\n")
            assert writer.flush(20)
        writer.put(b"second\n")
        assert writer.flush(20)
    lines = ["firs", "tickwheel: 1 lines of this log were dropped", "second"]
    assert path.read_text().splitlines() == lines


def test_a_non_blocking_shared_file_is_waited_for(pipe: Pipe) -> None:
    pipe.fill()
    os.set_blocking(pipe.writes, False)
    writer = StreamWriter(pipe.writes, "test")
    writer.put(b"line\n")
    assert not writer.flush(0)
    assert pipe.read(1) == ["line"]
    assert writer.flush(20) and writer.dropped == 0


def test_a_forked_process_has_its_own_log_writer(pipe: Pipe) -> None:
    """It has no copies of its parent's lines, and does not wait for its parent's thread."""
    pipe.fill()
    stream = unblocked(pipe.stream, "test")
    print("of the parent", file=stream)
    child = os.fork()
    if child == 0:
        print("of the child", file=stream)
        writer = writer_of(stream)
        os._exit(0 if writer is not None and writer.flush(20) else 1)
    assert sorted(pipe.read(2)) == ["of the child", "of the parent"]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_stream_without_a_descriptor_is_unchanged() -> None:
    stream = io.StringIO()
    assert unblocked(stream, "test") is stream and writer_of(stream) is None


@pytest.mark.parametrize("form", ["json", "console"])
def test_the_log_says_how_many_lines_were_dropped(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(sys, "stderr", pipe.stream)
    monkeypatch.setattr(logging.root, "handlers", [])
    log_writer.unblock_stderr()
    with structlog.contextvars.bound_contextvars(shard=3):
        log = logs.configure(form, "error", "node-a")  # type: ignore[arg-type]
    pipe.fill()
    log.error("first")
    writer = writer_of(sys.stderr)
    assert writer is not None
    until(lambda: writer._is_writing)
    with monkeypatch.context() as bounded:
        bounded.setattr(log_writer, "WAITING_BYTES_MAX", 0)
        log.error("second")
        logging.getLogger("library").error("third")
    assert logs.dropped() == 2
    log.error("fourth")
    _, said, _ = pipe.read(3)
    for word in ("log_lines_dropped", "warning", "node-a", "2", "3"):
        assert word in said
    if form == "json":
        fields = json.loads(said)
        assert (fields["count"], fields["shard"]) == (2, 3)


def test_the_last_lines_are_written_before_a_process_ends(tmp_path: Path) -> None:
    from subprocess import run

    program = (
        "import sys; from tickwheel import log_writer; log_writer.unblock_stderr()\n"
        "for number in range(1000): print(number, file=sys.stderr)\n"
        "raise SystemExit('last words')"
    )
    done = run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines() == [*map(str, range(1000)), "last words"]


@pytest.mark.parametrize(
    ("content", "is_torn"), [(b"", False), (b"a\n", False), (b"a\nb", True), (None, False)]
)
def test_a_torn_end_is_seen_if_the_file_can_be_read(
    tmp_path: Path, content: bytes | None, is_torn: bool
) -> None:
    path = tmp_path / "log"
    if content is not None:
        path.write_bytes(content)
    assert ends_torn(path) is is_torn
