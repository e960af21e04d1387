"""Tasks from JSON lines: every field, its default, and a named mistake for all the rest."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.cli.enqueue import BadLine, read_csv, read_task, read_tasks
from tickwheel.cli.options import rule_of
from tickwheel.cli.output import body_fields
from tickwheel.client import IfPending, Retry, Task
from tickwheel.errors import BadRequest
from tickwheel.model.policies import DELAY_MS_MAX

TOPIC: dict[str, Any] = {"topic": "orders"}


def _line(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_line_can_set_every_field() -> None:
    task = read_task(
        _line(
            topic="t", body="hello", delay="1m", key="k", tag="g", properties={"a": "b"},
            priority=9, ttl=60, retry="fixed:delay=5s,retries=2",
        ),
        {},
    )  # fmt: skip
    assert (task.topic, task.body, task.delay, task.at) == ("t", b"hello", 60.0, None)
    assert (task.key, task.tag, task.properties) == ("k", "g", {"a": "b"})
    assert (task.priority, task.ttl) == (9, 60.0)
    assert task.retry == Retry.of({"kind": "fixed", "delay_ms": 5000, "retries": 2})


def test_an_order_key_in_a_line_overrides_the_option() -> None:
    defaults = {**TOPIC, "order_key": "a"}
    assert read_task(_line(body="x", order_key="b"), defaults).order_key == "b"
    assert read_task(_line(body="x"), defaults).order_key == "a"
    assert read_task(_line(body="x"), TOPIC).order_key is None
    with pytest.raises(ValueError, match="task.order_key must be a string, not 7"):
        read_task(_line(body="x", order_key=7), TOPIC)


def test_a_retry_policy_can_be_a_map_or_an_option() -> None:
    given = {"kind": "table", "delays_ms": [1, 2]}
    assert read_task(_line(body="x", retry=given), TOPIC).retry == Retry.of(given)
    defaults = {**TOPIC, "retry": Retry.named("none")}
    assert read_task(_line(body="x"), defaults).retry == Retry.named("none")
    assert read_task(_line(body="x", retry="rocketmq"), defaults).retry == Retry.named("rocketmq")


def test_if_pending_can_be_a_word_or_an_object() -> None:
    given = {"action": "replace", "window": "10m", "due": "later", "max_wait": 90}
    rule = IfPending("replace", window=600.0, due="later", max_wait=90.0)
    assert read_task(_line(body="x", key="k", if_pending=given), TOPIC).if_pending == rule
    keep = _line(body="x", key="k", if_pending="keep")
    assert read_task(keep, TOPIC).if_pending == IfPending("keep")
    defaults = {**TOPIC, "if_pending": rule}
    assert read_task(_line(body="x", key="k"), defaults).if_pending == rule
    assert read_task(_line(body="x", if_pending="add"), defaults).if_pending == IfPending("add")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "the rule must be one of add, keep, replace, reject, or a map, not 5"),
        ({"window": 5}, "the rule must be one of add, keep, replace, reject, not None"),
        (
            {"action": "keep", "windows": 5},
            "the rule: keep has no option 'windows'; its options: window_ms, unique_until",
        ),
        ({"action": "keep", "window": "soon"}, "if_pending: window: 'soon'"),
        ({"action": "keep", "window": True}, "window: True is not a duration"),
    ],
)
def test_an_invalid_if_pending_names_the_field(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match="field if_pending: ") as caught:
        read_task(_line(body="x", key="k", if_pending=value), TOPIC)
    assert said in str(caught.value)


def test_coalescing_options_need_if_pending() -> None:
    assert rule_of(None, {}) is None
    assert rule_of("keep", {"window": 5.0, "unique_until": "started"}) == IfPending(
        "keep", window=5.0, unique_until="started"
    )
    with pytest.raises(BadRequest, match="--max-wait requires --if-pending"):
        rule_of(None, {"max_wait": 5.0})


def test_options_are_defaults_for_fields_missing_in_a_line() -> None:
    defaults = TOPIC | {
        "delay": 5.0, "tag": "tag", "properties": {"a": "1", "b": "2"}, "priority": 3, "ttl": 60.0,
    }  # fmt: skip
    task = read_task(_line(body="x", properties={"b": "3"}), defaults)
    assert (task.topic, task.delay, task.tag, task.priority) == ("orders", 5.0, "tag", 3)
    assert (task.properties, task.ttl) == ({"a": "1", "b": "3"}, 60.0)


def test_a_lines_time_wins_over_the_options_delay() -> None:
    task = read_task(_line(body="x", at="2030-01-01T00:00:00Z"), {**TOPIC, "delay": 5.0})
    assert (task.delay, task.at) == (None, datetime(2030, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", "must be a JSON object, not list"),
        (b'{"body": "x", "delay": "5m", "delay": "5h"}', "'delay' occurs more than once"),
        (_line(body="x", dealy=1), "field dealy is not a valid field"),
        (
            _line(body="x", body_base64="eA=="),
            "field body_base64: give either body or body_base64, not both",
        ),
        *((_line(body=body), "field body: must be a string") for body in (1, 0, [], {}, False)),
        (_line(body="\ud800"), "field body: must not contain half a surrogate pair"),
        (_line(body_base64="!"), "field body_base64: not valid base64"),
        (_line(body_base64=1), "field body_base64: not valid base64"),
        (_line(body="x", delay=-1), "field delay: -1 is not a duration"),
        (_line(body="x", delay=float("nan")), "field delay: nan is not a duration"),
        (_line(body="x", delay=True), "field delay: True is not a duration"),
        (_line(body="x", delay="soon"), "field delay: 'soon' is not a duration"),
        (_line(body="x", at=5), "field at: must be a string, not 5"),
        (_line(body="x", at="soon"), "field at: 'soon' is not an ISO-8601"),
        (_line(body="x", at="2030-01-01", delay=1), "task must have only one of delay and at"),
        (_line(body="x", topic=""), "task.topic must be 1 to 255 characters from"),
        (_line(body="x", key=7), "task.key must be a string, not 7"),
        (_line(body="x", key="k" * 256), "task.key has 256 characters; the limit is 255"),
        (_line(body="x", if_pending="keep"), "task.if_pending is keep, which needs a key"),
        (
            _line(body="x", priority=256),
            "task.priority must be an integer between 0 and 255, not 256",
        ),
        (_line(body="x", priority=True), "task.priority must be an integer between 0 and 255"),
        (_line(body="x", properties=[]), "field properties: must be an object, not []"),
        (_line(body="x", properties={"a": [1]}), "task.properties['a'] must be a string, number"),
        (
            _line(body="x", delay=1, delay_ms=1),
            "field delay_ms: give either delay or delay_ms, not both",
        ),
        (_line(body="x", delay_ms="5m"), "field delay_ms: must be a number of milliseconds"),
        (
            _line(body="x", at="2030-01-01", due_ms=1),
            "field due_ms: give either at or due_ms, not both",
        ),
        (_line(body="x", due_ms=2**51), "field due_ms: 2251799813685248 is not a valid time"),
        (_line(body="x", ttl="x"), "field ttl: 'x' is not a duration"),
        (
            _line(body="x", delay_level=0),
            "task.delay_level must be an integer between 1 and 214748",
        ),
        (
            _line(body="x", delay_level=1, delay=1),
            "task must have only one of delay_level, delay and at",
        ),
        (_line(body="x", retry=5), "field retry: a retry policy must be a SPEC or an object"),
        (
            _line(body="x", retry="fixed:x=1"),
            "field retry: 'x=1' is not valid for fixed; write delay=",
        ),
    ],
)
def test_a_bad_line_names_line_and_field(line: bytes, problem: str) -> None:
    good = _line(body="fine")
    with pytest.raises(BadLine) as caught:
        list(read_tasks([good, b"\n", line], TOPIC))
    assert caught.value.message.startswith(f"line 3: {problem}")


@pytest.mark.parametrize(
    ("retry", "problem"),
    [
        ({"kind": "fixed", "delay_ms": -1}, "delay_ms must be an integer between 0 and"),
        ({"kind": "fixed", "delay_ms": DELAY_MS_MAX + 1}, f" and {DELAY_MS_MAX}, not 315576000001"),
        ("fixed:delay=400000d", f" and {DELAY_MS_MAX}, not 34560000000000"),
        ({"kind": "fixed", "retries": -1}, "retries must be an integer between 0 and 65535, not"),
        ({"kind": "none", "retries": 1}, "retries is not a valid field of kind none"),
        ({"kind": "table", "delays_ms": [1], "retries": 65_536}, "and 65535, not 65536"),
        ({"kind": "table", "delays_ms": [1, -1]}, "delays_ms[1] must be an integer between 0 and"),
        ({"kind": "table", "delays_ms": [0] * 1025}, "has 1025 delays; the limit is 1024"),
        ({"kind": "table", "delays_ms": []}, "delays_ms must be an array of delays, not []"),
        ({"kind": "table"}, "delays_ms must be an array of delays, not None"),
        ({"kind": "exponential", "jitter": 1.01}, "jitter must be a number between 0 and 1, not"),
        ({"kind": "exponential", "factor": 0.9}, "factor must be a number between 1 and 1e+06"),
        ("exponential:factor=1e9", "factor must be a number between 1 and 1e+06, not 1000000000.0"),
        ("exponential:base=10s,cap=9s", "cap_ms must be at least base_ms (10000), not 9000"),
    ],
)
def test_a_policys_numbers_are_checked_without_a_daemon(retry: Any, problem: str) -> None:
    with pytest.raises(BadLine, match=f"line 1: field retry: .*{re.escape(problem)}"):
        list(read_tasks([_line(body="x", retry=retry)], TOPIC))


@pytest.mark.parametrize(
    "retry",
    [
        {"kind": "fixed", "delay_ms": DELAY_MS_MAX, "retries": 65_535, "jitter": 1},
        {"kind": "exponential", "base_ms": 0, "cap_ms": 0, "factor": 1_000_000, "jitter": 0},
        {"kind": "exponential", "cap_ms": 1},  # the daemon's base may be smaller
    ],
)
def test_a_policys_numbers_reach_their_bounds(retry: Any) -> None:
    assert read_task(_line(body="x", retry=retry), TOPIC).retry == Retry.of(retry)


def test_a_delay_level_in_a_line_overrides_the_option() -> None:
    assert read_task(_line(body="x", delay_level=3), TOPIC).delay_level == 3
    defaults = {**TOPIC, "delay_level": 4}
    assert read_task(_line(body="x"), defaults).delay_level == 4
    timed = read_task(_line(body="x", delay=5), defaults)
    assert (timed.delay, timed.delay_level) == (5, None)


def test_a_line_without_any_topic_is_refused() -> None:
    with pytest.raises(ValueError, match="field topic: missing"):
        read_task(_line(body="x"), {})


def test_sizes_add_up_to_the_input_with_its_empty_lines() -> None:
    lines = [b"\n", _line(body="a") + b"\n", b"  \n", _line(body="b")]
    assert sum(size for _, size in read_tasks(lines, TOPIC)) == sum(map(len, lines))


@given(st.binary(max_size=40))
def test_any_line_is_a_task_or_a_value_error(line: bytes) -> None:
    try:
        result = read_task(line, TOPIC)
    except ValueError:
        return
    assert isinstance(result, Task)


@given(st.binary(max_size=60))
def test_a_body_that_subscribe_prints_is_read_back(body: bytes) -> None:
    assert read_task(_line(**body_fields(body)), TOPIC).body == body


# --- CSV -----------------------------------------------------------------------------------------

CSV = (
    b"\xef\xbb\xbftopic,body,key,delay,priority,properties,due_ms,retry\r\n"
    b't,"a ""b"",\n c",k1,5m,3,"{""n"": 1, ""eu"": true}",,"fixed:delay=1s,retries=2"\r\n'
    b"\r\n"
    b",,k2,,,,1800000000000,\n"
)
AS_JSON = (
    {"topic": "t", "body": 'a "b",\n c', "key": "k1", "delay": "5m", "priority": 3,
     "properties": {"n": 1, "eu": True}, "retry": "fixed:delay=1s,retries=2"},
    {"key": "k2", "due_ms": 1_800_000_000_000},
)  # fmt: skip


def test_csv_rows_equal_json_lines() -> None:
    results = list(read_csv(CSV.splitlines(keepends=True), TOPIC))
    lines = [json.dumps(item).encode() for item in AS_JSON]
    assert [task for task, _ in results] == [read_task(line, TOPIC) for line in lines]
    head = len(CSV) - sum(size for _, size in results)
    assert head == 0, "all bytes are counted"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"topic,colour\n", "line 1: field colour is not a valid field"),
        (b"topic,body,topic\n", "line 1: field topic is repeated"),
        (b"key,ttl\na,5m\nb,soon\n", "line 3: field ttl: 'soon' is not a duration"),
        (b"key,priority\na,1\nb,high\n", "line 3: field priority: must be an integer"),
        (b"key,priority\na,1.0\n", "line 2: field priority: must be an integer"),
        (b"key,due_ms\na,soon\n", "line 2: field due_ms: must be an integer"),
        (b"key,delay\na,soon\n", "line 2: field delay: 'soon' is not a duration"),
        (b"key,at\na,tomorrow\n", "line 2: field at: "),
        (b"key,properties\na,eu\n", "line 2: field properties: not valid JSON"),
        (b'properties\n"{""a"": 1, ""a"": 2}"\n', "line 2: field properties: 'a' occurs more than"),
        (b"key,body\na,b,c\n", "line 2: has 3 cells, but the first line has 2 fields"),
        (b'key,body\na,"b\nc\n', "line 2: not CSV"),
        (b'key,body\na,"b\n"c\n', "line 2: not CSV"),
        (b"key,body\na,b\nc,\xff\n", "line 3: not UTF-8"),
    ],
)
def test_invalid_csv_names_line_and_field(text: bytes, words: str) -> None:
    with pytest.raises(BadLine) as refused:
        list(read_csv(text.splitlines(keepends=True), TOPIC))
    assert words in refused.value.message
