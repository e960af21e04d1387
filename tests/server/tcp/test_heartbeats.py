"""Who is asked whether it is there, and who is given up, with a clock that the test moves."""

from __future__ import annotations

import pytest

from tickwheel.clock import Clock
from tickwheel.errors import BadRequest
from tickwheel.server.settings import load
from tickwheel.server.tcp.connection import Heartbeats

INTERVAL_S, TIMEOUT_S = 10.0, 30.0


class Sources:
    def __init__(self) -> None:
        self.mono = 1_000_000

    def wall_ms(self) -> int:
        return 1_800_000_000_000 + self.mono

    def mono_ms(self) -> int:
        return self.mono


class Peer:
    def __init__(self, rig: HeartbeatRig, *, answers: bool = True) -> None:
        self._rig = rig
        self.answers_heartbeats = answers
        self.last_data_mono_ms = rig.sources.mono
        self.last_heartbeat_mono_ms = 0
        self.is_read = True
        self.asked: list[int] = []
        """After how many seconds."""
        self.gone_ms: int | None = None

    def send_heartbeat(self) -> None:
        self.asked.append(self._rig.passed_s)

    def end_silent(self, quiet_ms: int) -> None:
        self.gone_ms = quiet_ms
        self._rig.peers.remove(self)

    def says_something(self) -> None:
        self.last_data_mono_ms = self._rig.sources.mono


class HeartbeatRig:
    def __init__(self) -> None:
        self.sources = Sources()
        self.peers: set[Peer] = set()
        clock = Clock(10**12, self.sources)
        self.beats = Heartbeats(self.peers, clock, interval_s=INTERVAL_S, timeout_s=TIMEOUT_S)
        self._began = self.sources.mono

    @property
    def passed_s(self) -> int:
        return (self.sources.mono - self._began) // 1000

    def peer(self, *, answers: bool = True) -> Peer:
        made = Peer(self, answers=answers)
        self.peers.add(made)
        return made

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.sources.mono += 1000
            self.beats.sweep()


def test_a_silent_peer_is_pinged_and_disconnected() -> None:
    rig = HeartbeatRig()
    silent, talks = rig.peer(), rig.peer()
    for _ in range(29):
        rig.run(1)
        talks.says_something()
    assert (silent.asked, silent.gone_ms) == ([10, 20], None)
    rig.run(1)
    assert silent.gone_ms == 30_000
    assert (talks.asked, talks.gone_ms) == ([], None)


def test_any_frame_answers_a_heartbeat() -> None:
    rig = HeartbeatRig()
    peer = rig.peer()
    for _ in range(10):
        rig.run(29)
        peer.says_something()
    assert peer.gone_ms is None
    assert len(peer.asked) == 20


def test_a_peer_without_the_heartbeat_option_is_left_alone() -> None:
    rig = HeartbeatRig()
    old = rig.peer(answers=False)
    rig.run(100)
    assert (old.asked, old.gone_ms) == ([], None)


def test_a_paused_reader_is_not_disconnected() -> None:
    """More waits for it than it takes: its answers lie in the line."""
    rig = HeartbeatRig()
    peer = rig.peer()
    peer.is_read = False
    rig.run(100)
    assert (peer.asked, peer.gone_ms) == ([], None)


@pytest.mark.parametrize("stood_still_s", [3, 25, 1_000])
def test_a_pause_of_the_daemon_disconnects_no_peer(stood_still_s: int) -> None:
    """Stopped, suspended, blocked: what came meanwhile lies unread in the first sweep after it."""
    rig = HeartbeatRig()
    peer = rig.peer()
    rig.run(15)
    rig.sources.mono += stood_still_s * 1000
    rig.beats.sweep()
    assert peer.gone_ms is None
    rig.run(29)
    assert peer.gone_ms is None
    rig.run(1)
    assert peer.gone_ms == 30_000


def test_the_time_out_leaves_room_for_a_second_question() -> None:
    with pytest.raises(BadRequest, match=r"heartbeat_timeout_s \(30\) must be at least twice"):
        load(None, {"heartbeat_interval_s": 15.1})
    assert load(None, {"heartbeat_interval_s": 15}).heartbeat_timeout_s == 30
