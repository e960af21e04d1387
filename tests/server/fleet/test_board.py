"""What processes of several shards know of each other, in memory that they share."""

from __future__ import annotations

import os

import pytest

from tickwheel.server.fleet import board
from tickwheel.server.fleet.board import (
    BULLETIN_BYTES,
    Board,
    Bulletin,
    ProcessState,
    Role,
    RoleReport,
    State,
    how_ended,
)


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (-9, "signal SIGKILL"), (-40, "signal 40")]
)
def test_every_end_of_a_process_has_a_text(code: int, text: str) -> None:
    assert how_ended(code) == text


def test_a_boards_entry_is_valid_while_its_process_runs() -> None:
    board = Board(2)
    part = RoleReport(17, Role.ACTIVE, 3, 1_000)
    board.write_role(1, part)
    assert board.read_role(1) is None, "the parent does not know it yet"
    board.write(1, ProcessState(17, State.STARTING, 900, 0, 0))
    assert (board.read_role(1), board.read_role(0)) == (part, None)
    board.write(1, ProcessState(18, State.STARTING, 1_100, 1, -9))
    assert board.read_role(1) is None, "another one runs now"
    board.write(1, ProcessState(0, State.DOWN, 1_200, 1, -9))
    assert board.read_role(1) is None


def test_a_bulletin_is_read_by_another_process() -> None:
    bulletin = Bulletin()
    assert bulletin.read() == {}
    pid = os.fork()
    if not pid:
        bulletin.write({"wanted": [1, 2]})
        os._exit(0)
    os.waitpid(pid, 0)
    assert bulletin.read() == {"wanted": [1, 2]}
    bulletin.write({"wanted": []})
    assert bulletin.read() == {"wanted": []}
    assert bulletin.read() is bulletin.read(), "it is taken apart once"


def test_a_half_written_bulletin_leaves_the_previous_readable() -> None:
    """Who writes may die at any moment."""
    bulletin = Bulletin()
    bulletin.write({"wanted": [1]})
    assert bulletin.read() == {"wanted": [1]}
    whole = bytes(bulletin._memory[:64])
    bulletin.write({"wanted": [2]})
    newer = bytes(bulletin._memory[:64])
    for cut in range(64):
        bulletin._memory[:64] = newer[:cut] + whole[cut:]
        assert bulletin.read() in ({"wanted": [1]}, {"wanted": [2]})
    bulletin._memory[:64] = newer
    assert bulletin.read() == {"wanted": [2]}


def test_an_unread_bulletin_is_replaced_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent reads when it is told to, and is told once."""
    bulletin = Bulletin()
    bulletin.write({"wanted": [1]})
    assert bulletin.read() == {"wanted": [1]}
    bulletin.write({"wanted": [2]})

    def killed(data: bytes) -> int:
        raise SystemExit

    with monkeypatch.context() as cut:
        cut.setattr(board, "crc32", killed)
        with pytest.raises(SystemExit):
            bulletin.write({"wanted": [2], "version": 3})
    assert bulletin.read() == {"wanted": [2]}
    bulletin.write({"wanted": [2], "version": 3})
    assert bulletin.read() == {"wanted": [2], "version": 3}


def test_an_oversized_bulletin_is_refused() -> None:
    bulletin = Bulletin()
    bulletin.write({"wanted": [1]})
    with pytest.raises(ValueError, match=str(BULLETIN_BYTES)):
        bulletin.write({"listing": "x" * BULLETIN_BYTES})
    assert bulletin.read() == {"wanted": [1]}
