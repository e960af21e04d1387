"""Retry policies: arithmetic, and what a client or the settings may say of them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.api.groups import SettingsFields
from tickwheel.errors import BadRequest, TickwheelError
from tickwheel.limits import Limits
from tickwheel.model import policies as retry
from tickwheel.model.policies import BUILT_IN, RetryPolicy
from tickwheel.model.records import GroupSettings
from tickwheel.server import checks
from tickwheel.server.settings import Settings, load
from tickwheel.server.shard.views import policy_map

DEFAULT = RetryPolicy(jitter=0.0)
KNOWN = {**BUILT_IN, "default": DEFAULT, "slow": RetryPolicy(base_ms=60_000, retries_max=2)}


def delays(policy: RetryPolicy, count: int) -> list[int]:
    return [policy.delay_ms(attempt, 7) for attempt in range(1, count + 1)]


def parsed(value: Any) -> RetryPolicy:
    result = checks.policy(value, "retry", KNOWN)
    assert isinstance(result, RetryPolicy)
    return result


def test_exponential_doubles_up_to_its_cap() -> None:
    assert delays(DEFAULT, 12) == [
        10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 640_000, 1_280_000, 2_560_000,
        5_120_000, 7_200_000, 7_200_000,
    ]  # fmt: skip
    assert DEFAULT.delay_ms(10**6, 7) == 7_200_000


EXTREMES = {
    "base_ms": (0, 1, 2, retry.DELAY_MS_MAX - 1, retry.DELAY_MS_MAX),
    "factor": (1, 1.0, 1.0000001, 2, 1e3, retry.FACTOR_MAX),
    "cap_ms": (0, 1, 2**31, retry.DELAY_MS_MAX),
    "delay_ms": (0, 1, retry.DELAY_MS_MAX),
    "delays_ms": ([0], [retry.DELAY_MS_MAX] * retry.STEPS_MAX, [1, 0]),
    "retries": (0, 1, retry.RETRIES_MAX),
    "jitter": (0, 0.0, 1e-300, 0.5, 1, 1.0),
}
"""What a client may say of each number, at its edges."""


@st.composite
def extreme(draw: st.DrawFn) -> RetryPolicy:
    kind = draw(st.sampled_from(("exponential", "fixed", "table", "none")))
    value = {"kind": kind}
    for name in retry.FIELDS[kind]:
        value[name] = draw(st.sampled_from(EXTREMES[name]))
    try:
        return parsed(value)
    except BadRequest as error:
        assert "must be at least base_ms" in error.message
        return parsed(value | {"cap_ms": value["base_ms"]})


@given(
    policy=extreme(),
    attempt=st.integers(1, 100) | st.integers(1, 10**6),
    task_id=st.integers(0, 2**63 - 1),
)
def test_every_valid_policy_has_a_delay_for_every_attempt(
    policy: RetryPolicy, attempt: int, task_id: int
) -> None:
    top_ms = max(policy.base_ms, policy.cap_ms, *policy.delays_ms, 0)
    delay_ms = policy.delay_ms(attempt, task_id)
    assert 0 <= delay_ms <= 2 * top_ms
    if policy.kind == "exponential":
        assert delay_ms <= policy.cap_ms
    calm = replace(policy, jitter=0.0)
    assert calm.delay_ms(attempt, task_id) <= calm.delay_ms(attempt + 1, task_id) or (
        policy.kind == "table"
    )
    assert 0 <= policy.retries_left(attempt) <= policy.retries_max


@pytest.mark.parametrize("factor", [1.5, 2.0, 10.0, 1e6])
def test_growth_is_exact_until_the_cap(factor: float) -> None:
    policy = RetryPolicy(base_ms=3, factor=factor, cap_ms=10**9, jitter=0.0)
    exact = [min(3 * Fraction(factor) ** n, 10**9) for n in range(60)]
    result = delays(policy, 60)
    assert all(abs(one - two) <= 1 + two / 10**12 for one, two in zip(result, exact, strict=True))


def test_the_default_table_has_sixteen_steps_then_two_hours() -> None:
    minutes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120, 120, 120]
    expected = [10_000, 30_000, *(60_000 * m for m in minutes)]
    assert delays(BUILT_IN["rocketmq"], 18) == expected
    assert BUILT_IN["rocketmq"].allows(16)
    assert not BUILT_IN["rocketmq"].allows(17)


def test_retries_left_count_down_from_all_to_none() -> None:
    left = [DEFAULT.retries_left(attempt) for attempt in range(19)]
    assert left == [16, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]


def test_fixed_and_none_have_their_delays() -> None:
    fixed = parsed({"kind": "fixed", "delay_ms": 5, "retries": 2, "jitter": 0})
    assert delays(fixed, 3) == [5, 5, 5]
    assert [fixed.allows(n) for n in (2, 3)] == [True, False]
    assert not parsed({"kind": "none"}).allows(1)


def test_jitter_is_bounded_and_repeatable() -> None:
    policy = parsed({"kind": "fixed", "delay_ms": 10_000, "jitter": 0.5})
    results = {policy.delay_ms(1, task_id) for task_id in range(0, 10**6, 1_009)}
    assert 5_000 <= min(results) < 6_000
    assert 14_000 < max(results) <= 15_000
    assert policy.delay_ms(3, 9) == policy.delay_ms(3, 9)
    capped = RetryPolicy(base_ms=1_000, cap_ms=1_000, jitter=1.0)
    assert max(capped.delay_ms(1, i) for i in range(999)) <= 1_000


def test_omitted_numbers_have_defaults() -> None:
    assert parsed({"kind": "exponential"}) == DEFAULT
    assert parsed({"kind": "exponential", "base_ms": 10**8}).cap_ms == 10**8
    assert parsed({"kind": "table", "delays_ms": (1, 2)}).retries_max == 16
    assert parsed({"kind": "fixed", "retries": None}).base_ms == 10_000


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "a policy's name or a map"),
        ("never", "'never' does not exist; known: default, none, rocketmq, slow"),
        ({}, "retry.kind must be one of"),
        ({"kind": ["table"]}, "retry.kind must be one of"),
        ({"kind": "fixed", "base_ms": 1}, "unknown key 'base_ms'"),
        ({"kind": "none", "retries": 1}, "unknown key 'retries'"),
        ({"kind": "fixed", "delay_ms": -1}, "retry.delay_ms must be an integer between 0"),
        ({"kind": "fixed", "delay_ms": 315_576_000_001}, "retry.delay_ms"),
        ({"kind": "fixed", "delay_ms": True}, "retry.delay_ms"),
        ({"kind": "fixed", "retries": 65_536}, "retries must be an integer between 0 and 65535"),
        ({"kind": "fixed", "jitter": 1.1}, "retry.jitter must be a number between 0 and 1"),
        ({"kind": "fixed", "jitter": float("nan")}, "retry.jitter"),
        ({"kind": "exponential", "factor": 0.9}, "retry.factor must be a number between 1 and 1e"),
        ({"kind": "exponential", "base_ms": 5, "cap_ms": 4}, "must be at least base_ms"),
        ({"kind": "table"}, "retry.delays_ms must be an array"),
        ({"kind": "table", "delays_ms": ()}, "retry.delays_ms must be an array"),
        ({"kind": "table", "delays_ms": (1,) * 1_025}, "the limit is 1024"),
        ({"kind": "table", "delays_ms": (1, "x")}, r"retry.delays_ms\[1\]"),
    ],
)
def test_invalid_policies_name_the_field(value: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        checks.policy(value, "retry", KNOWN)


def test_policy_limits_are_inclusive() -> None:
    parsed({"kind": "fixed", "delay_ms": 315_576_000_000, "retries": 65_535, "jitter": 1})
    parsed({"kind": "table", "delays_ms": (0,) * 1_024, "retries": 0})


def test_a_policy_is_answered_with_all_its_numbers_and_its_name() -> None:
    assert policy_map(None, KNOWN) is None
    assert policy_map("slow", KNOWN) == {
        "kind": "exponential", "name": "slow", "base_ms": 60_000, "factor": 2.0,
        "cap_ms": 7_200_000, "retries": 2, "jitter": 0.1,
    }  # fmt: skip
    assert policy_map(BUILT_IN["none"], KNOWN) == {"kind": "none"}
    fields = policy_map("gone", KNOWN)
    assert fields is not None
    assert (fields["name"], fields["base_ms"]) == ("gone", 10_000), "the daemon's own holds"
    for ref in ("default", "rocketmq", "slow"):
        fields = policy_map(ref, KNOWN) or {}
        del fields["name"]
        assert checks.policy(fields, "retry", KNOWN) == KNOWN[ref], "what is answered can be sent"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"paused": 1}, "paused must be true or false"),
        ({"rate": 0}, "rate must be a number between 1e-06 and 1000000000"),
        ({"rate": float("inf")}, "rate must be"),
        ({"rate": "5"}, "rate must be"),
        ({"burst": 0}, "burst must be an integer between 1"),
        ({"burst": 2.0}, "burst must be an integer between 1"),
        ({"burst": 5}, r"burst \(5\) needs rate"),
        ({"burst": 5, "rate": None}, r"burst \(5\) needs rate"),
        ({"retry": "x"}, "does not exist"),
    ],
)
def test_invalid_group_settings_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TickwheelError, match=said):
        asked = SettingsFields.checked(given, Limits())
        checks.settings(asked.values(), GroupSettings(), KNOWN, 5)


def test_configure_changes_only_the_named_settings() -> None:
    before = GroupSettings(True, 5.0, 7, "slow", paused_ms=3)
    assert checks.settings({}, before, KNOWN, 5) == before
    assert checks.settings({"rate": None}, before, KNOWN, 5) == (
        before._replace(rate=None, burst=None)
    )
    assert SettingsFields.checked({"rate": 3}, Limits()).values() == {"rate": 3.0}
    assert checks.settings({"retry": None, "paused": False}, before, KNOWN, 5) == (
        GroupSettings(False, 5.0, 7, None)
    )


def test_the_settings_define_policies_by_name() -> None:
    given = {"slow": {"kind": "fixed", "delay_ms": 60_000}}
    settings = Settings(retry_policies=given, retry_max=3)
    assert settings.engine().policies["slow"] == RetryPolicy(60_000, 1.0, 0, 3, 0.1, "fixed")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rocketmq", {"kind": "none"}, "is built in; choose another name"),
        ("default", {"kind": "none"}, "is built in; choose another name"),
        ("a b", {"kind": "none"}, "a policy's name in retry_policies must be"),
        ("x", {"kind": "often"}, "retry_policies.x.kind must be one of"),
        ("x", "none", "retry_policies"),
    ],
)
def test_invalid_policies_in_the_settings_are_named(name: str, value: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        load(None, {"retry_policies": {name: value}})


@pytest.mark.parametrize("retry_cap_s", [0, 1, 60, 7_200])
@pytest.mark.parametrize("retry_base_s", [0, 1, 60, 7_200])
@pytest.mark.parametrize("given", [{}, {"cap_ms": 5_000}, {"base_ms": 5_000}, {"factor": 3.0}])
def test_policies_in_the_settings_are_checked_with_the_default_of_the_settings(
    given: dict[str, Any], retry_base_s: int, retry_cap_s: int
) -> None:
    policies = {"x": {"kind": "exponential", **given}}
    settings = {"retry_base_s": retry_base_s, "retry_cap_s": retry_cap_s, "retry_max": 65_535}
    base_ms = retry_base_s * 1000
    if given.get("cap_ms", base_ms) < base_ms:
        with pytest.raises(BadRequest, match=rf"x.cap_ms must be at least base_ms \({base_ms}\)"):
            load(None, {"retry_policies": policies, **settings})
        return
    policy = load(None, {"retry_policies": policies, **settings}).engine().policies["x"]
    assert policy.base_ms == given.get("base_ms", base_ms)
    assert policy.cap_ms == given.get("cap_ms", max(retry_cap_s * 1000, policy.base_ms))


def test_policies_come_from_the_configuration_file(tmp_path: Path) -> None:
    config = tmp_path / "tickwheel.toml"
    config.write_text(
        "[retry_policies.payments]\nkind = 'table'\ndelays_ms = [1_000, 60_000]\nretries = 3\n"
        "[retry_policies.once-more]\nkind = 'fixed'\ndelay_ms = 30_000\nretries = 1\njitter = 0\n"
    )
    known = load(str(config)).engine().policies
    assert delays(known["payments"], 3) == [1_000, 60_000, 60_000]
    assert known["once-more"] == RetryPolicy(30_000, 1.0, 0, 1, 0.0, "fixed")
