"""The live view: rates from deltas, restarts, order, what fits on a screen; the tables of stats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.fake_daemon import overview
from tickwheel.cli.output import Output
from tickwheel.cli.top import (
    DOWN,
    END,
    ENTER,
    ESCAPE,
    HOME,
    NOTHING,
    PAGE_DOWN,
    SORTS,
    UP,
    Controls,
    Frame,
    Meter,
    arranged,
    head_text,
    keys_of,
    rows_grid,
    stats_grids,
    stats_topics_grid,
)
from tickwheel.client import Stats
from tickwheel.client.merging import MERGED


def frame_text(frame: Frame) -> str:
    return "\n".join([head_text(frame), rows_grid(frame).plain()])


def _group(**counts: Any) -> dict[str, Any]:
    zero = dict.fromkeys(("ready", "in_flight", "waiting", "dead", "delivered", "acked"), 0)
    return {**zero, "subscribers": 1, **counts}


def _topic(**counts: Any) -> dict[str, Any]:
    return {**_group(), "scheduled": 0, "enqueued": 0, "groups": {}, **counts}


def _stats(uptime_s: float = 10.0, epoch: int = 1, **topics: Any) -> dict[str, Any]:
    sums = {
        name: sum(topic[name] for topic in topics.values())
        for name in (
            "scheduled", "ready", "in_flight", "waiting", "dead", "enqueued", "delivered", "acked",
        )
    }  # fmt: skip
    return {
        "node": "n1", "version": "1", "epoch": epoch, "uptime_s": uptime_s, "store_ok": True,
        "early": 0, "connections": 2, "subscribers": 1, "topics": topics, **sums,
        "lateness": {"p50_ms": 1, "p99_ms": 3},
    }  # fmt: skip


def test_troubles_are_shown_above_the_table() -> None:
    frame = Meter().read(_stats(10.0, a=_topic()))
    assert frame.fields()["troubles"] == []
    troubles = [("error", "Topic a is full"), *[("note", f"note {n}") for n in range(4)]]
    frame = replace(frame, overview=overview(troubles, left_out=7))
    lines = frame_text(frame).splitlines()
    assert lines[3:7] == ["error: Topic a is full", "note: note 0", "note: note 1", "and 9 more"]
    assert lines[8].startswith("topic")
    assert frame.fields()["troubles"][0]["text"] == "Topic a is full"


def test_rates_divide_by_the_daemons_clock() -> None:
    meter = Meter()
    first = meter.read(_stats(10.0, a=_topic(enqueued=100, groups={"g": _group(acked=7)})))
    names = ("enqueued_per_s", "delivered_per_s", "acked_per_s")
    assert first.rates == dict.fromkeys(names)
    second = meter.read(
        _stats(12.0, a=_topic(enqueued=150, delivered=10, groups={"g": _group(acked=17)}))
    )
    assert second.rates == dict(zip(names, (25.0, 5.0, 0.0), strict=True))
    (topic,) = second.topics
    (group,) = topic["groups"]
    assert (topic["enqueued_per_s"], topic["delivered_per_s"]) == (25.0, 5.0)
    assert group["acked_per_s"] == 5.0


def test_a_new_topic_counts_from_zero() -> None:
    meter = Meter()
    meter.read(_stats(10.0))
    frame = meter.read(_stats(11.0, new=_topic(enqueued=8)))
    assert frame.topics[0]["enqueued_per_s"] == 8.0


@pytest.mark.parametrize(
    "after",
    [
        _stats(0.5, a=_topic(enqueued=1)),  # its uptime began anew
        _stats(60.0, epoch=2, a=_topic(enqueued=1)),  # a takeover
        _stats(10.0, a=_topic(enqueued=5)),  # no time has passed
    ],
)
def test_a_restart_leaves_rates_unknown(after: dict[str, Any]) -> None:
    meter = Meter()
    meter.read(_stats(10.0, a=_topic(enqueued=5)))
    assert meter.read(after).rates["enqueued_per_s"] is None


def test_a_restart_of_any_shard_leaves_rates_unknown() -> None:
    meter, stats = Meter(), MERGED["stats"]
    shards = [_stats(10.0, a=_topic(enqueued=5)), _stats(10.0, a=_topic(enqueued=500))]
    meter.read(stats(shards, {}))
    shards = [_stats(13.0, a=_topic(enqueued=6)), _stats(0.5, a=_topic(enqueued=1))]
    frame = meter.read(stats(shards, {}))
    assert frame.fields()["uptime_s"] == 0.5
    assert frame.rates["enqueued_per_s"] is None
    shards = [_stats(14.0, a=_topic(enqueued=7)), _stats(1.5, a=_topic(enqueued=4))]
    assert meter.read(stats(shards, {})).rates["enqueued_per_s"] == 4.0


def _order(frame: Frame) -> list[str]:
    return [topic["topic"] for topic in frame.topics]


def test_rows_are_sorted_largest_first_and_by_name_where_equal() -> None:
    topics = {
        "b": _topic(ready=5, dead=1, oldest_ready_ms=9),
        "a": _topic(ready=5, in_flight=3, waiting=1),
        "c": _topic(ready=9, scheduled=4, delivered=50),
    }
    expected = {
        "name": "abc", "scheduled": "cab", "ready": "cab", "in-flight": "abc", "waiting": "abc",
        "dead": "bac", "age": "bac", "busy": "cab",
    }  # fmt: skip
    for sort in SORTS:
        meter = Meter(sort)
        meter.read(_stats(9.0))
        assert "".join(_order(meter.read(_stats(10.0, **topics)))) == expected[sort], sort
    assert set(expected) == set(SORTS)


def test_groups_are_listed_under_their_topic() -> None:
    groups = {"slow": _group(ready=1), "quick": _group(ready=2, paused=True)}
    text = frame_text(Meter("ready").read(_stats(a=_topic(ready=3, groups=groups))))
    lines = text.splitlines()
    assert lines[0].startswith("n1  active  up 10 s")
    assert "late p50 / p99 1 / 3 ms  early 0" in text
    names = [line.split()[0] for line in lines[5:]]
    assert names == ["a", "quick", "slow"]
    assert lines[6].split()[-1] == "paused"


def test_rows_that_do_not_fit_are_counted() -> None:
    frame = Meter().read(_stats(**{f"t{n:02d}": _topic() for n in range(20)}))
    grid = rows_grid(frame, 6)
    assert len(grid.rows) == 6
    assert grid.rows[-1][0] == "… 15 more"
    assert len(rows_grid(frame, 20).rows) == 20


def test_a_lost_daemon_shows_its_last_figures_and_the_trouble() -> None:
    frame = Meter().read(_stats(a=_topic(ready=3)))
    frame = replace(frame, trouble="reconnecting: gone")
    assert frame_text(frame).splitlines()[0] == "reconnecting: gone"
    assert frame.fields()["reconnecting"] is True
    assert frame.fields()["topics"][0]["ready"] == 3
    assert "reconnecting" in frame_text(replace(NOTHING, trouble="reconnecting"))


def test_json_has_topics_with_their_groups() -> None:
    frame = Meter().read(_stats(a=_topic(scheduled=2, groups={"g": _group(dead=1)})), "standby")
    fields = frame.fields()
    assert (fields["node"], fields["role"], fields["scheduled"]) == ("n1", "standby", 2)
    (topic,) = fields["topics"]
    assert (topic["topic"], topic["scheduled"]) == ("a", 2)
    assert topic["groups"][0]["group"] == "g"
    assert topic["groups"][0]["dead"] == 1
    assert "scheduled" not in topic["groups"][0]


def test_global_counters_are_a_dash_without_rights_to_all_topics() -> None:
    raw = _stats(a=_topic(ready=3))
    for name in ("early", "connections", "lateness"):
        del raw[name]
    frame = Meter().read(raw | {"partial": True})
    text = frame_text(frame)
    assert "connections -  " in text and "late p50 / p99 - / - ms  early -" in text
    assert frame.fields()["connections"] is None
    names = ("dead_total", "dead_expired", "dropped_once")
    result = Stats.of({**raw, "partial": True, "topics": {}})
    assert not any(getattr(result, name) for name in names)
    shown = "\n".join(" ".join(row) for row in stats_grids(result)[0].rows)
    assert "counts only topics that the token can read" in shown and "lateness" not in shown


# --- keys ----------------------------------------------------------------------------------------


def test_keys_are_decoded_and_unknown_sequences_ignored() -> None:
    assert keys_of("s/é\r") == ["s", "/", "é", ENTER]
    assert keys_of("\x1b[A\x1bOB\x1b[6~\x1b[1~\x1b[F\x1b") == [
        UP, DOWN, PAGE_DOWN, HOME, END, ESCAPE,
    ]  # fmt: skip
    assert keys_of("\x1b[15~\x1b[1;5C\x01x") == ["x"]


def test_keys_choose_the_order_and_the_end() -> None:
    controls = Controls("busy")
    assert controls.press(["s"]) is False
    assert (controls.sort, "sort: name" in controls.line) == ("name", True)
    controls.press(["S", "S"])
    assert controls.sort == SORTS[-1]
    assert controls.press(["s", "q"]) is True
    assert controls.sort == "busy"


def test_a_filter_is_typed_kept_and_cleared() -> None:
    controls = Controls()
    assert controls.press(["/", "q", "s", "x"]) is False
    controls.press([*keys_of("\x7f"), UP])
    assert (controls.filter, controls.is_typing) == ("qs", True)
    assert controls.line.startswith("filter: qs_")
    controls.press([ENTER])
    assert (controls.filter, controls.is_typing, controls.sort) == ("qs", False, "busy")
    assert "/ filter: qs" in controls.line
    controls.press([ESCAPE])
    assert controls.filter == ""
    controls.press(["/", "a", ESCAPE])
    assert (controls.filter, controls.is_typing) == ("", False)
    controls.press(["/", *"x" * 300])
    assert len(controls.filter) == 255


def test_keys_scroll_and_stop_at_both_ends() -> None:
    controls = Controls()
    assert controls.place(50, 10) == 0
    seen = []
    for key in (UP, DOWN, "j", PAGE_DOWN, "k", END, DOWN, HOME):
        controls.press([key])
        seen.append(controls.first)
    assert seen == [0, 1, 2, 12, 11, 40, 40, 0]
    controls.press([END])
    assert "41 of 50" in controls.line
    assert controls.place(45, 10) == 35, "some have gone"
    assert controls.place(3, 10) == 0
    assert "of 3" not in controls.line, "all are shown"


def test_a_filter_keeps_topics_for_their_groups() -> None:
    groups = {"Mail": _group(ready=1), "bills": _group(ready=2)}
    frame = Meter().read(_stats(orders=_topic(groups=groups), mailing=_topic(), x=_topic(ready=9)))
    result = arranged(frame, "name", "mail")
    shown = [(row["topic"], [group["group"] for group in row["groups"]]) for row in result.topics]
    assert shown == [("mailing", []), ("orders", ["Mail"])]
    assert _order(arranged(frame, "ready")) == ["x", "mailing", "orders"]
    (whole,) = arranged(frame, "ready", "ORDER").topics
    assert [group["group"] for group in whole["groups"]] == ["bills", "Mail"]


def test_a_screen_that_begins_among_groups_names_their_topic() -> None:
    groups = {name: _group() for name in "abc"}
    frame = Meter("name").read(_stats(t=_topic(groups=groups), u=_topic()))
    assert [row[:2] for row in rows_grid(frame, 10, 2).rows] == [("t", "b"), ("", "c"), ("u", "")]
    assert [row[:2] for row in rows_grid(frame, 2, 1).rows] == [("t", "a"), ("… 3 more", "")]


# --- stats ---------------------------------------------------------------------------------------

TOPICS = {
    "orders": {
        "scheduled": 1234, "ready": 0, "in_flight": 2, "waiting": 0, "dead": 1, "delivered": 5,
        "acked": 3, "groups": {"billing": {"ready": 0, "in_flight": 2, "dead": 1}},
    }
}  # fmt: skip


def test_stats_have_a_row_per_topic_and_per_group() -> None:
    lines = stats_topics_grid(TOPICS).plain().splitlines()
    assert lines[0] == "Topics"
    assert lines[2].split() == ["orders", "1,234", "0", "2", "0", "1", "5", "3"]
    assert lines[3].split() == ["billing", "0", "2", "1"]


def test_a_table_in_a_pipe_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).grid(stats_topics_grid(TOPICS))
    assert capsys.readouterr().out.isascii()
