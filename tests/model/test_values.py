"""The one check of values: what it lets through can be encoded, and what it refuses says why."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.api.kinds import PROPERTIES
from tickwheel.client.task_options import Task
from tickwheel.client.tasks import TaskChecker
from tickwheel.errors import BadRequest
from tickwheel.limits import Limits
from tickwheel.model.policies import RetryPolicy
from tickwheel.model.records import TaskOptions, options_bytes
from tickwheel.model.values import (
    INTEGER_MAX,
    INTEGER_MIN,
    InvalidValue,
    check_properties,
    check_text,
    stored_bytes,
    whole_number,
)

LIMITS = Limits()
ANY_TEXT = st.text(st.characters(codec=None, categories=None), max_size=300)
LARGE = st.integers(2**62, 2**66) | st.integers(-(2**66), -(2**62))
ANY_VALUE = st.one_of(ANY_TEXT, LARGE, st.integers(), st.floats(), st.booleans(), st.none())


def check(given: Any) -> None:
    check_properties(
        given, "props", properties_max=4, name_length_max=255, value_bytes_max=LIMITS.body_bytes_max
    )


@pytest.mark.parametrize("text", ["", "-1", "1_0", " 1", "٣", "²", "9" * 20, "9" * 5_000])
def test_a_whole_number_has_up_to_19_ascii_digits(text: str) -> None:
    assert whole_number(text) is None
    assert whole_number("9" * 19) == 10**19 - 1


@given(st.dictionaries(st.sampled_from("abcdef") | ANY_TEXT, ANY_VALUE, max_size=6))
def test_valid_values_can_be_encoded(given: dict[str, Any]) -> None:
    try:
        check(given)
    except InvalidValue as error:
        assert error.message().startswith("props")
        return
    assert msgpack.unpackb(msgpack.packb(given)) == given


@given(ANY_TEXT)
def test_a_text_that_passes_is_utf8(given: str) -> None:
    try:
        check_text(given, "key", 255)
    except InvalidValue:
        assert len(given) > 255 or any("\ud800" <= letter <= "\udfff" for letter in given)
    else:
        given.encode()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (INTEGER_MAX + 1, ("props['n']", str(INTEGER_MIN), str(INTEGER_MAX), str(2**63))),
        (INTEGER_MIN - 1, ("props['n']", str(INTEGER_MIN - 1))),
        (10**400, ("props['n']", "1000000")),
        (float("nan"), ("props['n']", "finite", "nan")),
        (float("-inf"), ("props['n']", "finite")),
        ("\udc00", ("props['n']", "UTF-8")),
        (None, ("props['n']", "string, number or boolean", "None")),
        (b"x", ("props['n']", "string, number or boolean")),
        ("é" * LIMITS.property_value_bytes_max, ("8192", "4096 (property_value_bytes_max)")),
    ],
)
def test_invalid_values_name_the_field(value: Any, words: tuple[str, ...]) -> None:
    """By the daemon and by the client in the same words."""
    with pytest.raises(BadRequest) as found:
        PROPERTIES.check({"n": value}, "props", LIMITS)
    message = found.value.message
    assert all(word in message for word in words), message
    assert len(message) < 250
    with pytest.raises(BadRequest) as at_client:
        TaskChecker().check(Task("t", b"", properties={"n": value}))
    assert at_client.value.message == message.replace("props", "task.properties", 1)
    assert at_client.value.code == found.value.code


@pytest.mark.parametrize("value", [INTEGER_MIN, INTEGER_MAX, 0, True, 1.5, "é" * 2_048, "\0"])
def test_values_within_their_bounds_pass(value: Any) -> None:
    assert PROPERTIES.check({"n": value}, "props", LIMITS) == {"n": value}
    TaskChecker().check(Task("t", b"", properties={"n": value}))


TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


@pytest.mark.parametrize(
    "options",
    [
        {"key": "ä", "tag": "t", "properties": {"ä": "ö", "n": 2**60, "b": True}},
        {"order_key": "ä", "shard_by": "ä", "encoding": "json,zlib", "trace": TRACE},
        {"priority": 7, "ttl_ms": 5, "within_ms": 5, "retry": "slow"},
        {"retry": {"kind": "table", "delays_ms": [1, 2, 3]}},
        {"retry": {"kind": "fixed", "delay_ms": 5}},
    ],
)
def test_options_on_the_wire_count_as_many_bytes_as_in_a_record(options: dict[str, Any]) -> None:
    retry = options.get("retry")
    policy = RetryPolicy.of_map(retry) if isinstance(retry, dict) else retry
    assert stored_bytes(options) == options_bytes(TaskOptions(**options | {"retry": policy}))
