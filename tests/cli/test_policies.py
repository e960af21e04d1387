"""Retry policies as text: every kind, every field, and a named mistake for all the rest."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.cli.options import parse_retry
from tickwheel.cli.output import describe_policy, format_policy, short_policy
from tickwheel.client import Retry
from tickwheel.model.policies import (
    RETRIES_MAX,
    SPEC_FIELDS,
    duration_spec,
    parse_policy,
    policy_of_json,
)

EXPONENTIAL = {
    "kind": "exponential", "base_ms": 10_000, "factor": 2.0, "cap_ms": 7_200_000, "retries": 16,
    "jitter": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1", EXPONENTIAL),
        ("exponential", {"kind": "exponential"}),
        ("exponential: base=5ms , retries=0", {"kind": "exponential", "base_ms": 5, "retries": 0}),
        ("fixed:delay=30s,retries=5", {"kind": "fixed", "delay_ms": 30_000, "retries": 5}),
        ("fixed:delay=1m30s,jitter=1", {"kind": "fixed", "delay_ms": 90_000, "jitter": 1.0}),
        ("table:10s,30s,1m;retries=8",
         {"kind": "table", "delays_ms": [10_000, 30_000, 60_000], "retries": 8}),
        ("table:0", {"kind": "table", "delays_ms": [0]}),
        ("rocketmq", "rocketmq"), ("none", "none"), ("default", "default"),
        ("My.own-1", "My.own-1"),
    ],
)  # fmt: skip
def test_policy_specs_are_parsed(spec: str, policy: Any) -> None:
    assert parse_policy(spec) == policy
    assert policy_of_json(spec) == policy
    sent = parse_retry(spec).to_wire()
    assert (sent if isinstance(sent, str) else {**sent, **_lists(sent)}) == policy


def _lists(sent: dict[str, Any]) -> dict[str, Any]:
    return {"delays_ms": list(sent["delays_ms"])} if "delays_ms" in sent else {}


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("", "'' is not a retry policy"),
        ("often:x=1", "'often:x=1' is not a retry policy"),
        ("5 times", "'5 times' is not a retry policy"),
        ("exponential:speed=1", "'speed=1' is not valid for exponential; write base=…, factor=…"),
        ("exponential:base", "'base' is not valid for exponential; write"),
        ("fixed:base=10s", "'base=10s' is not valid for fixed; write delay=…, retries=…, jitter=…"),
        ("fixed:delay=soon", "delay: 'soon' is not a duration"),
        ("fixed:delay=1s,delay=2s", "delay is given twice"),
        ("fixed:retries=-1", "retries must be between 0 and 65535, not '-1'"),
        ("fixed:retries=65536", "retries must be between 0 and 65535, not '65536'"),
        (f"fixed:retries={'9' * 5_000}", "retries must be between 0 and 65535, not '999"),
        ("exponential:factor=0.5", "factor must be finite and at least 1, not 0.5"),
        ("exponential:factor=inf", "factor must be finite and at least 1, not inf"),
        ("exponential:factor=nan", "factor must be finite and at least 1, not nan"),
        ("exponential:factor=fast", "factor must be a number, not 'fast'"),
        ("exponential:jitter=2", "jitter must be between 0 and 1, not 2"),
        ("table", "table must have delays"),
        ("table:;retries=8", "table must have delays"),
        ("table:10s,,1m", "table: '' is not a duration"),
        ("table:10s,retries=8", "table: 'retries=8' is not a duration"),
        ("table:10s;delay=1s", "'delay=1s' is not valid for table; write retries=…"),
    ],
)
def test_a_bad_spec_names_the_field_and_the_value(spec: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_policy(spec)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (5, "a retry policy must be a SPEC or an object, not 5"),
        ({}, "kind must be one of none, exponential, fixed, table, not None"),
        ({"kind": "often"}, "not 'often'"),
        ({"kind": "fixed", "base_ms": 5}, "base_ms is not a valid field of kind fixed"),
        ({"kind": "fixed", "delay_ms": "5s"}, "delay_ms must be an integer, not '5s'"),
        ({"kind": "fixed", "retries": True}, "retries must be an integer, not True"),
        ({"kind": "table", "delays_ms": [1.5]}, "must be an array of integers, not [1.5]"),
        ({"kind": "none", "delays_ms": [1]}, "delays_ms is not a valid field of kind none"),
    ],
)
def test_an_invalid_policy_in_json_is_refused(value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        policy_of_json(value)


@pytest.mark.parametrize(
    "value",
    [EXPONENTIAL, {"kind": "none"}, {"kind": "table", "delays_ms": [1, 2], "retries": 3}],
)
def test_a_policy_map_in_json_is_passed_unchanged(value: dict[str, Any]) -> None:
    assert policy_of_json(value) == value


def test_policies_are_formatted_for_people() -> None:
    assert format_policy(None) == "-"
    assert (
        format_policy(EXPONENTIAL) == "exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1"
    )
    named = {**EXPONENTIAL, "name": "default"}
    assert format_policy(named) == "default"
    assert describe_policy(named).startswith("default (exponential:base=10s")
    assert describe_policy({"kind": "none", "name": "none"}) == "none"
    assert describe_policy("own") == "own"


ONE_OF = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.just("exponential")},
        optional={
            "base_ms": st.integers(0, 10**10), "cap_ms": st.integers(0, 10**10),
            "factor": st.floats(1, 1e6), "retries": st.integers(0, RETRIES_MAX),
            "jitter": st.floats(0, 1),
        },
    ),
    st.fixed_dictionaries(
        {"kind": st.just("fixed")},
        optional={"delay_ms": st.integers(0, 10**10), "retries": st.integers(0, RETRIES_MAX)},
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("table"),
            "delays_ms": st.lists(st.integers(0, 10**10), min_size=1, max_size=9),
        },
        optional={"retries": st.integers(0, RETRIES_MAX)},
    ),
    st.sampled_from(["none", "default", "rocketmq", "x"]),
)  # fmt: skip


@given(ONE_OF)
def test_a_formatted_policy_parses_to_itself(policy: Any) -> None:
    assert parse_policy(format_policy(policy)) == policy


@given(st.text(max_size=60))
def test_any_text_is_a_policy_or_a_value_error(text: str) -> None:
    try:
        assert isinstance(parse_retry(text), Retry)
    except ValueError:
        return


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0s"), (500, "500ms"), (90_000, "1m30s"), (7_200_000, "2h"), (86_400_001, "1d1ms")],
)
def test_exact_durations(ms: int, text: str) -> None:
    assert duration_spec(ms) == text


def test_every_kind_of_the_client_can_be_written() -> None:
    made = (Retry.exponential(), Retry.fixed(1), Retry.table([1, 2]))
    assert {retry.kind for retry in made} == set(SPEC_FIELDS)
    for retry in made:
        sent = retry.to_wire()
        assert parse_policy(format_policy(sent)) == {**sent, **_lists(sent)}  # type: ignore[arg-type,dict-item]  # these three are maps


def test_policies_in_a_narrow_column() -> None:
    assert short_policy(None) == "-"
    assert short_policy(EXPONENTIAL) == "exponential x16"
    assert short_policy({**EXPONENTIAL, "name": "default"}) == "default"
    assert short_policy({"kind": "none"}) == "none"
