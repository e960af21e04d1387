"""Each alert fires, and is quiet in the case beside it: one table, evaluated by promtool."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from grafana.boards.events import ANNOTATIONS
from grafana.rules import FILES, main
from observe.prometheus import ROOT, RULES
from observe.test_grafana import promtool
from tickwheel.model.lateness import DAEMON_CAUSES, LATE_MS, Cause

Series = Mapping[str, str]
PAIR = 'topic="o",group="g"'
LATENESS = "tickwheel_delivery_lateness_seconds_count"
BY_CAUSE = "tickwheel_lateness_cause_seconds"
LONG = "4m"
"""The interval of the long ones: less than the five minutes for which Prometheus looks back.
promtool may evaluate an alert before the rule that it rests on."""


@dataclass
class Case:
    """Series as ``name{labels}`` without job and instance; each mapping in ``quiet`` says what is
    otherwise where the alert must not fire. The leader is there unless ``series`` say otherwise."""

    series: Series
    quiet: Sequence[Series]
    labels: Series
    at: str = "60m"
    interval: str = "1m"


def lateness(count: int, **late: int) -> Series:
    """An interval's deliveries, and how many of them were late by cause."""
    result = {LATENESS + '{topic="o"}': f"0+{count}x500"}
    for cause in Cause:
        number = late.get(cause.value, 0)
        result[f'{BY_CAUSE}_count{{cause="{cause}"}}'] = f"0+{number}x500"
        result[f'{BY_CAUSE}_bucket{{cause="{cause}",le="0.1"}}'] = "0x500"
    return result


def budget(late: int, in_time: int, at: str, severity: str, interval: str = "1m") -> Case:
    """``late`` of 10,000 an interval are too many, ``in_time`` are not."""
    return Case(
        lateness(10_000, loop_busy=late),
        [
            lateness(10_000, loop_busy=in_time),
            # Held back by others: none of it is the daemon's.
            lateness(10_000, paused=5_000, rate=1_000, no_subscriber=2_000, no_credit=1_000),
            lateness(10_000, lease_over=500, unknown=2_000, store=in_time // 2),
        ],
        {"severity": severity},
        at,
        interval,
    )


HOUR = 3_600
CASES = {
    "TickwheelEarly": Case(
        {"tickwheel_early_total": "0x5 1x55"},
        [{"tickwheel_early_total": "0x60"}],
        {"severity": "critical"},
    ),
    "TickwheelRowsMissing": Case(
        {"tickwheel_rows_missing_total": "0x40 1x20", "tickwheel_missing_tasks": "0x40 1x20"},
        [{"tickwheel_rows_missing_total": "1x60", "tickwheel_missing_tasks": "0x60"}],
        {"severity": "critical"},
    ),
    "TickwheelLatenessBudgetFast": budget(150, 140, "2h", "critical"),
    "TickwheelLatenessBudgetMedium": budget(65, 55, "8h", "critical", LONG),
    # What is late is as much of all in a part of a day as in the whole of it.
    "TickwheelLatenessBudgetSlow": budget(33, 28, "10h", "warning", LONG),
    "TickwheelLatenessBudgetTrickle": budget(12, 9, "10h", "warning", LONG),
    "TickwheelOldestReady": Case(
        {f"tickwheel_oldest_ready_age_seconds{{{PAIR}}}": "301x60"},
        [
            {f"tickwheel_oldest_ready_age_seconds{{{PAIR}}}": "300x60"},
            {f"tickwheel_paused{{{PAIR}}}": "1x60"},
            # Everything that is ready waits for a key that is held: TickwheelKeysHeld says so.
            {
                f"tickwheel_held_keys{{{PAIR}}}": "1x60",
                f"tickwheel_paused_keys{{{PAIR}}}": "0x60",
                f"tickwheel_ready_tasks{{{PAIR}}}": "3x60",
                f"tickwheel_line_tasks{{{PAIR}}}": "3x60",
            },
        ],
        {"severity": "warning", "topic": "o", "group": "g"},
    ),
    "TickwheelPausedLong": Case(
        {f"tickwheel_paused_seconds{{{PAIR}}}": "86400x60"},
        [{f"tickwheel_paused_seconds{{{PAIR}}}": "86399x60"}],
        {"severity": "warning", "topic": "o", "group": "g"},
    ),
    "TickwheelNobodyConsumes": Case(
        {f"tickwheel_ready_tasks{{{PAIR}}}": "1x60", f"tickwheel_subscribers{{{PAIR}}}": "0x60"},
        [
            {f"tickwheel_subscribers{{{PAIR}}}": "1x60"},
            {f"tickwheel_ready_tasks{{{PAIR}}}": "0x60"},
            {f"tickwheel_subscribers{{{PAIR}}}": "0x50 1 0x10"},
        ],
        {"severity": "warning", "topic": "o", "group": "g"},
    ),
    "TickwheelGroupUnused": Case(
        {f"tickwheel_subscribers{{{PAIR}}}": "0x180"},
        [
            {f"tickwheel_subscribers{{{PAIR}}}": "0x100 1 0x79"},
            {f"tickwheel_subscribers{{{PAIR}}}": "_x100 0x80"},
        ],
        {"severity": "info", "topic": "o", "group": "g"},
        "170h",
        "1h",
    ),
    "TickwheelTransactionsParked": Case(
        {"tickwheel_transactions_parked": "1x60"},
        [{"tickwheel_transactions_parked": "0x60"}, {"tickwheel_transactions_parked": "0x57 1x2"}],
        {"severity": "warning"},
    ),
    "TickwheelDeadLettersRising": Case(
        {f"tickwheel_dead_total{{{PAIR}}}": "4x50 5x10"},
        [{f"tickwheel_dead_total{{{PAIR}}}": "4x10 5x50"}],
        {"severity": "warning", "topic": "o", "group": "g"},
        "57m",
    ),
    "TickwheelConsumersDie": Case(
        {f"tickwheel_consumer_deaths_total{{{PAIR}}}": "4x50 5x10"},
        [{f"tickwheel_consumer_deaths_total{{{PAIR}}}": "4x10 5x50"}],
        {"severity": "warning", "topic": "o", "group": "g"},
        "57m",
    ),
    "TickwheelKeysHeld": Case(
        {f"tickwheel_held_keys{{{PAIR}}}": "0x50 2x10"},
        [
            {f"tickwheel_held_keys{{{PAIR}}}": "0x60"},
            {f"tickwheel_held_keys{{{PAIR}}}": "2x56 0x4"},
            {f"tickwheel_held_keys{{{PAIR}}}": "0x57 2x3"},
        ],
        {"severity": "warning", "topic": "o", "group": "g"},
    ),
    "TickwheelDeadLettersExpire": Case(
        {"tickwheel_dead_expire_timestamp_seconds": f"{49 * HOUR}x120"},
        [
            {"tickwheel_dead_expire_timestamp_seconds": f"{51 * HOUR}x120"},
            {"tickwheel_dead_expire_timestamp_seconds": "0x120"},
            {"tickwheel_leader": "0x120"},
        ],
        {"severity": "warning", "instance": "a"},
        "90m",
    ),
    "TickwheelNoLeader": Case(
        {"tickwheel_leader": "0x60"}, [{"tickwheel_leader": "1x60"}], {"severity": "critical"}
    ),
    "TickwheelGone": Case(
        {"up": "1x5 0x55", "tickwheel_leader": "1x5 stale"},
        [{"tickwheel_leader": "1x60"}],
        {"severity": "critical"},
    ),
    "TickwheelDaemonDown": Case(
        {
            "up": "1x60",
            'up{instance="b"}': "1x30 0x30",
            'tickwheel_leader{instance="b"}': "0x30 stale",
        },
        [
            {'up{instance="b"}': "1x60", 'tickwheel_leader{instance="b"}': "0x60"},
            {'up{instance="b"}': "1x56 0x4", 'tickwheel_leader{instance="b"}': "0x56 stale"},
            # Another program of the same job, and the whole job (TickwheelGone).
            {'tickwheel_leader{instance="b"}': "_"},
            {"up": "1x30 0x30", "tickwheel_leader": "1x30 stale"},
        ],
        {"severity": "warning", "instance": "b"},
    ),
    "TickwheelNodesMissing": Case(
        {'tickwheel_nodes{node="a"}': "3x39 2x21"},
        [
            {'tickwheel_nodes{node="a"}': "3x60"},
            {'tickwheel_nodes{node="a"}': "2x39 3x21"},
            {'tickwheel_nodes{node="a"}': "3x57 2x3"},
        ],
        {"severity": "warning"},
    ),
    "TickwheelStandbysMissing": Case(
        {"tickwheel_standbys": "1x60", "tickwheel_standbys_expected": "2x60"},
        [
            {"tickwheel_standbys": "2x60"},
            {"tickwheel_standbys": "2x57 1x3"},
            {"tickwheel_standbys_expected": "0x60"},
        ],
        {"severity": "warning"},
    ),
    "TickwheelNotServing": Case(
        {"tickwheel_serving": "0x60"},
        [{"tickwheel_serving": "0x58 1x2"}, {"tickwheel_store_full": "1x60"}],
        {"severity": "critical"},
    ),
    "TickwheelFailedOver": Case(
        {"tickwheel_failovers_total": "1x50 2x10"},
        [{"tickwheel_failovers_total": "1x10 2x50"}],
        {"severity": "info"},
    ),
    "TickwheelShardDown": Case(
        {'tickwheel_shard_up{shard="0"}': "1x60", 'tickwheel_shard_up{shard="1"}': "1x50 0x10"},
        [
            {'tickwheel_shard_up{shard="1"}': "1x60"},
            {'tickwheel_shard_up{shard="1"}': "1x50 0x5 1x5"},
        ],
        {"severity": "critical", "instance": "a", "shard": "1"},
    ),
    "TickwheelShardRestarting": Case(
        {'tickwheel_shard_restarts_total{shard="1"}': "0x50 0+1x10"},
        [
            {'tickwheel_shard_restarts_total{shard="1"}': "0x50 2x10"},
            # One planned restart, in which the shard was started several times.
            {'tickwheel_shard_restarts_total{shard="1"}': "0x51 4x9"},
            {'tickwheel_shard_restarts_total{shard="1"}': "0x56 4x4"},
        ],
        {"severity": "warning", "instance": "a", "shard": "1"},
    ),
    "TickwheelShardUnserved": Case(
        {"tickwheel_node_unserved_shards": "0x50 2x10"},
        [
            {"tickwheel_node_unserved_shards": "0x60"},
            {"tickwheel_node_unserved_shards": "0x50 2x1 0x8"},
        ],
        {"severity": "critical"},
    ),
    "TickwheelTwoLeaders": Case(
        {"tickwheel_leader": "1x60", 'tickwheel_leader{instance="b"}': "1x60"},
        [
            {"tickwheel_leader": "_", 'tickwheel_leader{instance="b"}': "_"}
            | {f'tickwheel_leader{{shard="{shard}"}}': "1x60" for shard in range(2)},
            {'tickwheel_leader{instance="b"}': "0x60"},
            {'tickwheel_leader{instance="b"}': "0x58 1 0"},
        ],
        {"severity": "critical"},
    ),
    "TickwheelStoreDown": Case(
        {"tickwheel_store_up": "0x60"},
        [{"tickwheel_store_up": "1x60"}, {"tickwheel_leader": "0x60"}],
        {"severity": "critical", "instance": "a"},
    ),
    "TickwheelStoreFull": Case(
        {"tickwheel_store_full": "1x60"},
        [{"tickwheel_store_full": "0x60"}],
        {"severity": "critical", "instance": "a"},
    ),
    "TickwheelDiskFilling": Case(
        {"tickwheel_disk_used_ratio": "0.86x60", "tickwheel_disk_refuse_ratio": "0.9x60"},
        [
            {"tickwheel_disk_used_ratio": "0.84x60"},
            {"tickwheel_disk_used_ratio": "0x60"},
            {"tickwheel_disk_used_ratio": "0.86x60", "tickwheel_disk_refuse_ratio": "1x60"},
            # Steep for a few minutes, and low; full for a moment.
            {"tickwheel_disk_used_ratio": "0.3+0.005x60"},
            {"tickwheel_disk_used_ratio": "0.5x50 0.95x5 0.5x5"},
        ],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelStoreErrors": Case(
        {'tickwheel_store_errors_total{kind="unknown"}': "0+1x60"},
        [
            {'tickwheel_store_errors_total{kind="unknown"}': "7x60"},
            {
                'tickwheel_store_errors_total{kind="unknown"}': "7x60",
                'tickwheel_store_errors_total{kind="full"}': "0+1x60",
            },
        ],
        {"severity": "warning", "kind": "unknown"},
    ),
    "TickwheelStoreLostData": Case(
        {"tickwheel_store_replays_total": "0x50 1x10", "tickwheel_store_rewrites_total": "3x60"},
        [{"tickwheel_store_replays_total": "1x60"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelHistoryDropped": Case(
        {"tickwheel_history_dropped_total": "0x50 9x10"},
        [{"tickwheel_history_dropped_total": "9x60"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelHistoryWriterRestarting": Case(
        {"tickwheel_history_writer_restarts_total": "0x50 0+1x10"},
        [{"tickwheel_history_writer_restarts_total": "0x50 2x10"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelBackupFailed": Case(
        {"tickwheel_backup_failures_total": "0x50 1x10"},
        [{"tickwheel_backup_failures_total": "1x60"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelBackupOld": Case(
        {"tickwheel_backup_last_success_timestamp_seconds": "60x40"},
        [
            {"tickwheel_backup_last_success_timestamp_seconds": f"{5 * HOUR}x40"},
            {"tickwheel_backup_last_success_timestamp_seconds": "0x40"},
            {"tickwheel_leader": "0x40"},
        ],
        {"severity": "warning", "instance": "a"},
        "27h",
        "1h",
    ),
    "TickwheelBackupMissing": Case(
        {
            "tickwheel_backup_daily": "1x40",
            "tickwheel_backup_last_success_timestamp_seconds": "0x40",
        },
        [
            {"tickwheel_backup_daily": "0x40"},
            {"tickwheel_backup_daily": "_x10 1x30"},
            {"tickwheel_backup_daily": "1x26 0x14"},
            {"tickwheel_backup_last_success_timestamp_seconds": f"0x20 {20 * HOUR}x20"},
        ],
        {"severity": "warning"},
        "27h",
        "1h",
    ),
    "TickwheelLoopLag": Case(
        {
            'tickwheel_loop_lag_seconds_bucket{le="0.05"}': "0+590x60",
            'tickwheel_loop_lag_seconds_bucket{le="+Inf"}': "0+600x60",
            'tickwheel_loop_lag_seconds_bucket{le="0.1"}': "0+600x60",
        },
        [{'tickwheel_loop_lag_seconds_bucket{le="0.05"}': "0+596x60"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelClockHeld": Case(
        {"tickwheel_clock_held": "1x60"},
        [{"tickwheel_clock_held": "0x60"}],
        {"severity": "critical", "instance": "a"},
    ),
    "TickwheelInternalErrors": Case(
        {"tickwheel_internal_errors_total": "0x50 1x10"},
        [{"tickwheel_internal_errors_total": "1x60"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelTokensFileBroken": Case(
        {"tickwheel_tokens_file_ok": "1x50 0x10"},
        [{"tickwheel_tokens_file_ok": "1x60"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelLoginsFail": Case(
        {"tickwheel_login_failures_total": "0x40 0+4x20"},
        [{"tickwheel_login_failures_total": "0+3x60"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelAuditUnwritable": Case(
        {"tickwheel_audit_ok": "1x50 0x10"},
        [{"tickwheel_audit_ok": "1x60"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelEndpointFails": Case(
        {"tickwheel_targets_failing": "0x20 1x40"},
        [{"tickwheel_targets_failing": "0x60"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelBreakerOpen": Case(
        {"tickwheel_targets_open": "0x20 1x40"},
        [{"tickwheel_targets_open": "0x60"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelPushEnded": Case(
        {"tickwheel_targets_ended": "0x20 1x40"},
        [{"tickwheel_targets_ended": "0x60"}],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelCertificateEnds": Case(
        {"tickwheel_certificate_expires_seconds": "1000000x60"},
        [
            {"tickwheel_certificate_expires_seconds": "2000000x60"},
            {"tickwheel_certificate_expires_seconds": "0x60"},
        ],
        {"severity": "warning", "instance": "a"},
    ),
    "TickwheelCertificateBroken": Case(
        {"tickwheel_certificate_ok": "1x50 0x10"},
        [{"tickwheel_certificate_ok": "1x60"}],
        {"severity": "warning", "instance": "a"},
    ),
}


def full(name: str) -> str:
    """The series with job and instance."""
    metric, _, rest = name.rstrip("}").partition("{")
    own = [] if "instance=" in rest else ['instance="a"']
    labels = ",".join(['job="t"', *own, *filter(None, [rest])])
    return f"{metric}{{{labels}}}"


def evaluated(alert: str, case: Case, series: Series, *, fires: bool) -> dict[str, Any]:
    labels = {"alertname": alert, "alertstate": "firing", "job": "t", **case.labels}
    text = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    given = {"tickwheel_leader": "1x500"} | dict(series)
    return {
        "interval": case.interval,
        "input_series": [{"series": full(n), "values": values} for n, values in given.items()],
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{alert}",alertstate="firing"}}',
                "eval_time": case.at,
                "exp_samples": [{"labels": f"ALERTS{{{text}}}", "value": 1}] if fires else [],
            }
        ],
    }


@cache
def rules() -> dict[str, dict[str, Any]]:
    """Every rule as it is shipped, by the name of what it records or of its alert."""
    groups = [g for name in FILES for g in yaml.safe_load((RULES / name).read_text())["groups"]]
    results = [rule for group in groups for rule in group["rules"]]
    return {str(rule.get("record") or rule["alert"]): rule for rule in results}


def resting_on(name: str) -> list[str]:
    """The rules that this one reads, and then itself."""
    expr = rules()[name]["expr"]
    read = [other for other in rules() if other != name and re.search(rf"{other}\b", expr)]
    return list(dict.fromkeys([*(below for item in read for below in resting_on(item)), name]))


def ask(folder: Path, tests: list[dict[str, Any]], interval: str = "1m", alert: str = "") -> None:
    """Of ``alert`` and what it rests on; or of all rules, which costs more than all else at each
    step. JSON is YAML."""
    path = folder / "alerts_test.yml"
    files = [str(RULES / name) for name in FILES]
    if alert:
        files = [str(folder / "rules.yml")]
        group = {"name": alert, "rules": [rules()[name] for name in resting_on(alert)]}
        Path(files[0]).write_text(json.dumps({"groups": [group]}))
    content = {"rule_files": files, "evaluation_interval": interval, "tests": tests}
    path.write_text(json.dumps(content))
    promtool("test", "rules", str(path))


def test_the_table_has_every_alert() -> None:
    alerts = re.findall(r"alert: (\w+)", (RULES / "alerts.yml").read_text())
    assert sorted(CASES) == sorted(alerts)
    assert all(case.quiet for case in CASES.values())


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires(alert: str, tmp_path: Path) -> None:
    case = CASES[alert]
    ask(tmp_path, [evaluated(alert, case, case.series, fires=True)], case.interval, alert)


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_stays_quiet(alert: str, tmp_path: Path) -> None:
    case = CASES[alert]
    tests = [evaluated(alert, case, {**case.series, **other}, fires=False) for other in case.quiet]
    ask(tmp_path, tests, case.interval, alert)


def test_a_filling_disk_fires_a_day_ahead(tmp_path: Path) -> None:
    """At one percent an hour from 60 % on, ``disk_refuse`` is a day away after six hours."""
    alert = "TickwheelDiskFilling"
    case = Case({}, [], {"severity": "warning", "instance": "a"}, "9h", LONG)
    for pace, fires in (("0.001", True), ("0.0001", False)):
        used = {"tickwheel_disk_used_ratio": f"0.6+{pace}x200"}
        series = {**used, "tickwheel_disk_refuse_ratio": "0.9x200"}
        ask(tmp_path, [evaluated(alert, case, series, fires=fires)], LONG, alert)


def test_a_full_store_fires_one_alert(tmp_path: Path) -> None:
    """As at ``disk_refuse``: the store is up, the daemon not ready, and new tasks are refused."""
    given = {
        "tickwheel_leader": "1x60",
        "tickwheel_store_up": "1x60",
        "tickwheel_store_full": "1x60",
        "tickwheel_serving": "0x60",
        'tickwheel_store_errors_total{kind="full"}': "0+1x60",
    }
    labels = '{alertname="TickwheelStoreFull",alertstate="firing",instance="a",job="t",'
    asked = {
        "expr": 'ALERTS{alertstate="firing"}',
        "eval_time": "60m",
        "exp_samples": [{"labels": f'ALERTS{labels}severity="critical"}}', "value": 1}],
    }
    series = [{"series": full(name), "values": values} for name, values in given.items()]
    ask(tmp_path, [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}])


# --- lateness ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "late", "fires"), [(2, 1, True), (1, 1, False), (60, 0, False)])
def test_lateness_alerts_need_a_minimum_of_traffic(
    count: int, late: int, *, fires: bool, tmp_path: Path
) -> None:
    """60 deliveries an hour are too few, though all are late; 120, half of them late, are not."""
    case = Case({}, [], {"severity": "critical"}, "2h")
    series = lateness(count, store=late)
    alert = "TickwheelLatenessBudgetFast"
    ask(tmp_path, [evaluated(alert, case, series, fires=fires)], alert=alert)


def test_nine_late_deliveries_do_not_fire(tmp_path: Path) -> None:
    """Of 400 in an hour, 9 in the last five minutes: more than 14.4 times what is allowed."""
    for late, fires in ((9, False), (12, True)):
        series = dict(lateness(7))
        series[f'{BY_CAUSE}_count{{cause="store"}}'] = f"0x115 {late}x20"
        case = Case({}, [], {"severity": "critical"}, "119m")
        alert = "TickwheelLatenessBudgetFast"
        ask(tmp_path, [evaluated(alert, case, series, fires=fires)], alert=alert)


def test_burn_rate_descriptions_are_correct(tmp_path: Path) -> None:
    """2 % are late: 20 times as many as 0.1 %."""
    given = {"tickwheel_leader": "1x500"} | dict(lateness(1_000, loop_busy=15, store=5, rate=500))
    given[LATENESS + '{topic="o"}'] = "0+1500x500"
    text = (
        "In the last 5 minutes, 20 times as many first deliveries were late as the objective allows"
        " (0.1 % later than 100 ms), and in the last hour more than 14.4 times as many. At a burn"
        " rate of 14.4, the error budget of 30 days lasts 50 hours."
        " The most frequent cause in the last hour: loop_busy."
    )
    fired = {
        "exp_labels": {"job": "t", "severity": "critical"},
        "exp_annotations": {
            "summary": "t delivers too many tasks late",
            "description": text,
            "runbook_url": "docs/operations.md#tickwheellatenessbudgetfast",
        },
    }
    asked = {"alertname": "TickwheelLatenessBudgetFast", "eval_time": "2h", "exp_alerts": [fired]}
    series = [{"series": full(name), "values": values} for name, values in given.items()]
    ask(tmp_path, [{"interval": "1m", "input_series": series, "alert_rule_test": [asked]}])


def test_the_rules_count_the_daemons_causes() -> None:
    text = (RULES / "recording.yml").read_text() + (RULES / "alerts.yml").read_text()
    named = set(re.findall(r"cause[=!]~[\"']([^\"']+)[\"']", text))
    assert named == {"|".join(DAEMON_CAUSES)}
    assert set(re.findall(r'le="([\d.]+)"', text)) == {f"{LATE_MS / 1000:g}"}


def test_burn_rate_alerts_name_how_long_the_budget_lasts() -> None:
    text = (RULES / "alerts.yml").read_text()
    matches = re.findall(
        r"a burn rate of ([\d.]+), the error budget of 30 days lasts (\d+) (hours|days)", text
    )
    assert len(matches) == 4
    for burn, number, unit in matches:
        assert float(burn) * int(number) == 30 * (24 if unit == "hours" else 1)
    for expression, description in re.findall(
        r"burn\w+ > ([\d.]+)\n.*?a burn rate of ([\d.]+),", text, re.DOTALL
    ):
        assert expression == description


@pytest.mark.parametrize("metric", ["tickwheel_leader", "tickwheel_serving"])
def test_a_shard_that_does_not_serve_is_named_while_others_do(metric: str, tmp_path: Path) -> None:
    alert = "TickwheelNoLeader" if metric == "tickwheel_leader" else "TickwheelNotServing"
    series = {f'{metric}{{shard="0"}}': "1x60", f'{metric}{{shard="1"}}': "0x60"}
    case = Case({}, [], {"severity": "critical", "shard": "1"})
    given = {"tickwheel_leader": "_"} | series
    ask(tmp_path, [evaluated(alert, case, given, fires=True)], alert=alert)


# --- runbooks ----------------------------------------------------------------------------------


def runbooks(text: str) -> dict[str, str]:
    return dict(re.findall(r"alert: (\w+)\n(?:(?!alert:).)*?runbook_url: (\S+)", text, re.DOTALL))


def test_every_alert_has_a_runbook_and_its_place_exists() -> None:
    result = runbooks((RULES / "alerts.yml").read_text())
    assert set(result) == set(CASES)
    for alert, place in result.items():
        path, _, anchor = place.partition("#")
        manual = (ROOT / path).read_text()
        assert anchor == alert.lower()
        assert re.search(rf'^\| <a id="{anchor}"></a>`{alert}` \|', manual, re.MULTILINE), place


def test_the_rules_are_written_with_addresses_that_open(tmp_path: Path) -> None:
    main(["--docs", "https://docs.test/", str(tmp_path)])
    result = runbooks((tmp_path / "alerts.yml").read_text())
    assert result["TickwheelEarly"] == "https://docs.test/docs/operations.html#tickwheelearly"
    assert set(result) == set(CASES)
    assert (tmp_path / "recording.yml").read_text() == (RULES / "recording.yml").read_text()
    promtool("check", "rules", *(str(tmp_path / name) for name in FILES))


# --- events ------------------------------------------------------------------------------------


def test_restarts_and_failovers_are_annotated(tmp_path: Path) -> None:
    given = {
        "process_start_time_seconds": "100x10 700x10",
        'process_start_time_seconds{instance="b"}': "100x20",
        "tickwheel_failovers_total": "2x20",
        'tickwheel_failovers_total{instance="b"}': "0x10 1x10",
    }
    series = [{"series": full(name), "values": values} for name, values in given.items()]
    asked = []
    for (name, expression, _, _), instance in zip(ANNOTATIONS, "ab", strict=True):
        query = f"count by (instance) ({expression.replace('$job', 't')})"
        drawn = [{"labels": f'{{instance="{instance}"}}', "value": 1}]
        asked.append({"expr": query, "eval_time": "12m", "exp_samples": drawn})
        asked.append({"expr": query, "eval_time": "9m", "exp_samples": []})
        assert name in ("Restart", "Failover")
    ask(tmp_path, [{"interval": "1m", "input_series": series, "promql_expr_test": asked}])
