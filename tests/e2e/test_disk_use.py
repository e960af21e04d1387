"""A real daemon whose disk is used beyond its limit: reported everywhere, and only new tasks wait.

The smallest limit makes any disk too full.
"""

from __future__ import annotations

from collections.abc import Callable

from e2e.cli_runner import Cli
from support.daemon import Daemon
from support.http_asking import ask
from support.raw import Raw
from tickwheel.api.frames import FrameType as T
from tickwheel.errors import BY_CODE

ANY = "0.0000001"
FAR_MS = 3_600_000


def test_a_full_disk_refuses_only_new_tasks(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(http=True).start()
    with Raw(daemon.port) as raw:
        due, far = raw.enqueue(("t", b"due", 0), ("t", b"far", FAR_MS))[2][1]
    assert daemon.terminate() == 0
    daemon.settings["disk_refuse"] = ANY
    daemon.start()
    with Raw(daemon.port) as raw:
        raw.call(T.STATS)  # waits until everything is loaded
        frame = raw.enqueue(("t", b"new", FAR_MS))
        assert (frame[0], frame[2]) == (T.ERROR, "store_full")
        assert BY_CODE[frame[2]].retryable
        assert "full; the limit is 0.0% (disk_refuse)" in frame[3]
        answer = raw.call(T.STATUS)[2]
        assert (answer["state"], answer["store_ok"]) == ("store_full", False)
        assert "disk_refuse" in answer["detail"]
        ready = ask(daemon.http, "GET", "/readyz")
        assert (ready.status, ready.json["status"]) == (503, "store_full")
        assert b"\ntickwheel_store_full 1\n" in ask(daemon.http, "GET", "/metrics").body
        # Deliveries, acks, cancels.
        raw.call(T.SUBSCRIBE, 1, "t", "g", 10, {})
        deliver = raw.next()
        while deliver[0] != T.DELIVER:
            deliver = raw.next()
        assert [item[0] for item in deliver[4]] == [due]
        assert raw.call(T.ACK, "t", "g", deliver[2], [due], [1])[2] is None
        assert raw.call(T.CANCEL, [far])[2] == ((far, "cancelled"),)
        assert raw.enqueue(("t", b"new", FAR_MS))[2] == "store_full"
    lines = [line for line in daemon.log_text().splitlines() if "[warning" in line]
    assert len(lines) == 1 and "store_full" in lines[0] and "disk_refuse" in lines[0], lines
    assert "store_full" in Cli(daemon).fails(1, "enqueue", "t", "x")
    assert daemon.terminate() == 0
    daemon.settings["disk_refuse"] = 1
    daemon.start()
    with Raw(daemon.port) as raw:
        assert raw.call(T.LOOKUP, [due, far])[2] == (
            {"id": due, "state": "acked"},
            {"id": far, "state": "cancelled"},
        )
        assert raw.enqueue(("t", b"new", FAR_MS))[0] == T.OK
        assert raw.call(T.STATUS)[2]["state"] == "ready"
