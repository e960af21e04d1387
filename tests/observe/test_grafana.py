"""Every query of every dashboard and rule, asked of a real Prometheus over a real daemon."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from grafana.generate import files
from observe.prometheus import ROOT, RULES, Prometheus, QueryFailed, missing
from observe.run import load, observed_daemon
from support.nodes import Node
from support.redis_server import RedisServer
from support.waiting import until
from tickwheel.server.metrics import catalogue as metrics

DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
DATA_TIMEOUT_S = 25.0
LASTING_S = 10.0
"""A scrape that a busy machine was too slow for leaves its series without data until the next."""
VARIABLES = {
    "job": "tickwheel", "instance": ".*", "topic": ".*", "group": ".*",
    "__rate_interval": "5s", "__range": "1m",
}  # fmt: skip
SERIES = re.compile(r"(?<![\w:])((?:\w+:)?(?:tickwheel|process)_\w+(?::\w+)?)(\{[^}]*\})?(?![\w:])")
ARRIVED = (
    "sum(tickwheel_dead_total) > 0",
    "sum(tickwheel_expired_total) > 0",
    "sum(tickwheel_broadcast_total) > 0",
    "sum(tickwheel_history_spool_bytes) > 0",
    "sum(tickwheel_backup_last_success_timestamp_seconds) > 0",
    "job:tickwheel_deliveries_late:ratio_rate3d >= 0",
    "sum(tickwheel_shard_up) == 2",
    "count(count_over_time(instance:tickwheel_commit_seconds:p99_rate5m[10s]) > 2)",
)
"""When all of these hold, the load has shown everything, and everything was evaluated."""


def need_prometheus() -> None:
    if reason := missing():
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


def queries(path: Path) -> Iterator[tuple[str, str]]:
    """(panel, expression)"""
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def filled_in(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = re.sub(rf"\${name}\b", value, expression)
    assert "$" not in expression, expression
    return expression


def selectors(expression: str) -> set[str]:
    """The series an expression is made of; names of labels and functions are not among them."""
    return {name + (matchers or "") for name, matchers in SERIES.findall(expression)}


# --- what needs no server ---------------------------------------------------------------------


def test_dashboards_match_their_generator() -> None:
    for path, text in files().items():
        assert path.read_text() == text, f"{path.name}: run python -m grafana.generate"
    assert {path.name for path in files()} <= {path.name for path in DASHBOARDS}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_complete(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    known = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
    assert used - known <= {"__rate_interval", "__range", "__field", "__url_time_range"}
    for panel in board["panels"]:
        assert panel.get("description") or panel["type"] == "text", panel["title"]


def panels(path: Path) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return result


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_states_are_shown_as_words(path: Path) -> None:
    """No panel says 0 or 1 where that stands for a state."""
    state = re.compile(
        r"^(max|min|sum)?[ \w(),]*tickwheel_"
        r"(leader|serving|paused|throttled|clock_held|store_up|store_full)\{"
    )
    results = [
        panel
        for panel in panels(path)
        if any(state.match(target["expr"]) for target in panel.get("targets", ()))
    ]
    assert results or path.stem == "tickwheel-topic"
    for panel in results:
        (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
        assert {"0", "1"} <= set(mapping["options"]), panel["title"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_link_to_existing_console_pages(path: Path) -> None:
    """From a line of a topic to the topic, from a number of tasks to the tasks."""
    board = json.loads(path.read_text())
    (address,) = [v for v in board["templating"]["list"] if v["name"] == "console"]
    assert address["type"] == "textbox"
    main = (ROOT / "tickwheel/server/http/console/main.js").read_text()
    views = set(re.findall(r'^  \["(\w+)", "[^"]+", \(\) =>', main, re.MULTILINE))
    links = [
        (panel, link)
        for panel in panels(path)
        for link in panel.get("fieldConfig", {}).get("defaults", {}).get("links", ())
    ]
    addresses = [link["url"] for _, link in links if "console" in link["url"]]
    addresses += [link["url"] for link in board["links"] if link["title"] == "Console"]
    assert addresses
    for url in addresses:
        match = re.fullmatch(r"\$\{console:raw\}/console/#/(\w*)(\?[\w=&${}.:]+)?", url)
        assert match, url
        assert match[1] in views | {""}, url
    linked = {panel["title"] for panel, link in links if "console" in link["url"]}
    by_topic = {panel["title"] for panel in panels(path) for target in panel.get("targets", ())
                if "{{topic}}" in target["legendFormat"]}  # fmt: skip
    assert by_topic <= linked
    if path.stem == "tickwheel-overview":
        assert {"Scheduled", "Ready", "In flight", "Waiting for a retry", "Dead letters"} <= linked


@pytest.mark.parametrize("name", ["tickwheel-overview", "tickwheel-store"])
def test_two_active_daemons_are_red(name: str) -> None:
    path = ROOT / "grafana/dashboards" / f"{name}.json"
    (panel,) = [entry for entry in panels(path) if entry["title"] == "Active daemons"]
    defaults = panel["fieldConfig"]["defaults"]
    words = defaults["mappings"][0]["options"]
    assert {value: word["color"] for value, word in words.items()} == {
        "0": "red", "1": "green", "2": "red", "3": "red",
    }  # fmt: skip
    assert defaults["thresholds"]["steps"][-1] == {"color": "red", "value": 2}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_limit_their_lines_by_topic(path: Path) -> None:
    for panel in panels(path):
        for target in panel.get("targets", ()):
            if re.search(r"by \([^)]*topic", target["expr"]):
                assert target["expr"].startswith("topk("), panel["title"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_restarts_and_failovers_are_marked(path: Path) -> None:
    events = json.loads(path.read_text())["annotations"]["list"]
    assert [event["name"] for event in events] == ["Restart", "Failover"]
    assert all(event["enable"] and "$job" in event["expr"] for event in events)


def used_names() -> dict[str, str]:
    """Every metric that stands in a file of ``grafana/``, and the file."""
    return {
        name: path.name
        for path in (ROOT / "grafana").rglob("*")
        if path.suffix in {".json", ".yml", ".md"}
        for name in re.findall(
            r"(?<![\w:/-])(?:\w+:)?(?:tickwheel|process)_\w+(?::\w+)?", path.read_text()
        )
    }


def test_every_metric_named_in_grafana_exists() -> None:
    recorded = set(re.findall(r"record: (\S+)", (RULES / "recording.yml").read_text()))
    of_nodes = {name for name, _, _ in metrics.NODE_METRICS}
    existing = {*metrics.names(), *metrics.PROCESS, *recorded, *of_nodes}
    existing |= dict(metrics.SHARD_METRICS).keys()
    for name, where in used_names().items():
        plain = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in existing or plain in existing, f"{where}: {name}"


def test_every_metric_is_used_somewhere_in_grafana() -> None:
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used_names()}
    of_nodes = {name for name, _, _ in metrics.NODE_METRICS}
    named = {*metrics.names(), *dict(metrics.SHARD_METRICS), *of_nodes}
    assert named - used == {"tickwheel_topics"}


def test_every_alert_has_its_line_in_the_manual() -> None:
    alerts = re.findall(r"alert: (\w+)", (RULES / "alerts.yml").read_text())
    manual = (ROOT / "docs" / "operations.md").read_text()
    row = r"^\| <a id=\"\w+\"></a>`(Tickwheel\w+)` \| .+ \| .+ \|$"
    documented = re.findall(row, manual, re.MULTILINE)
    assert len(alerts) > 10
    assert sorted(documented) == sorted(alerts)


# --- promtool ---------------------------------------------------------------------------------


def promtool(*arguments: str) -> None:
    need_prometheus()
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_well_formed() -> None:
    promtool("check", "rules", str(RULES / "recording.yml"), str(RULES / "alerts.yml"))


def test_the_configuration_is_well_formed() -> None:
    promtool("check", "config", str(RULES / "prometheus.yml"))


RULES_TESTS = [
    pytest.param(path, marks=[] if path.stem == "rules_test" else [pytest.mark.slow], id=path.stem)
    for path in sorted(Path(__file__).parent.glob("rules*_test.yml"))
]
"""Alerts that need a day or a week are quick in test_alerts.py."""


@pytest.mark.parametrize("path", RULES_TESTS)
def test_the_alerts_fire_when_they_should_and_not_before(path: Path) -> None:
    promtool("test", "rules", str(path))


# --- a real server ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a daemon under load, and the two idle shards of a node, for
    some seconds."""
    need_prometheus()
    folder = tmp_path_factory.mktemp("observe")
    redis = RedisServer(folder / "redis").start().lay_out(2)
    node = Node(folder / "node", "n", redis.url(), 2, http=True)
    with ExitStack() as stack:
        stack.callback(redis.kill)
        daemon = stack.enter_context(observed_daemon(folder / "daemon"))
        stack.enter_context(node)
        stack.enter_context(load(daemon.url, 200))
        addresses = [str(url).removeprefix("http://") for url in (daemon.http, node.http)]
        with Prometheus(folder / "prometheus", addresses, "1s") as prometheus:
            wait_for_data(prometheus)
            yield prometheus


def wait_for_data(prometheus: Prometheus) -> None:
    for expression in ARRIVED:
        until(lambda e=expression: prometheus.query(e), DATA_TIMEOUT_S, lambda e=expression: e)  # type: ignore[misc]  # e is bound


def trouble(prometheus: Prometheus, expression: str) -> str | None:
    """Why a query is no good: it fails, has no series, or no numbers."""
    try:
        rows = prometheus.query(expression)
    except QueryFailed as error:
        return str(error)
    if not rows:
        return "no data"
    numbers = [series["value"][1] for series in rows]
    return "not a number" if all(number == "NaN" for number in numbers) else None


def lasting_trouble(prometheus: Prometheus, expression: str) -> str | None:
    """The same, of a query that is no good for longer than a scrape that was left out."""
    try:
        until(lambda: trouble(prometheus, expression) is None, LASTING_S)
    except AssertionError:
        return trouble(prometheus, expression)
    return None


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_has_data(server: Prometheus, path: Path) -> None:
    asked = [(panel, filled_in(expression)) for panel, expression in queries(path)]
    assert len(asked) > 10
    result = {
        (panel, expression): lasting_trouble(server, expression) for panel, expression in asked
    }
    assert {key: why for key, why in result.items() if why is not None} == {}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_variable_of_a_dashboard_has_values(server: Prometheus, path: Path) -> None:
    for variable in json.loads(path.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert asked is not None, variable
            assert server.label_values(asked[2], filled_in(asked[1])), variable["name"]


def test_annotation_queries_are_valid(server: Prometheus) -> None:
    """Nothing was restarted here; what they count is there."""
    for path in DASHBOARDS:
        for event in json.loads(path.read_text())["annotations"]["list"]:
            expression = filled_in(event["expr"])
            assert server.query(expression) == []
            counted = expression.removesuffix(" > 0")
            assert lasting_trouble(server, counted) is None, expression


def test_every_rule_is_evaluated_and_its_series_exist(server: Prometheus) -> None:
    rules: list[dict[str, Any]] = server.rules()
    assert len(rules) > 30
    wrong: dict[str, str] = {}
    for rule in rules:
        if rule["health"] != "ok":
            wrong[rule["name"]] = rule.get("lastError", rule["health"])
        if rule["type"] == "recording" and (why := lasting_trouble(server, rule["name"])):
            wrong[rule["name"]] = why
        for selector in selectors(rule["query"]):
            if not server.query(f"last_over_time({selector}[10s])"):
                wrong[f"{rule['name']}: {selector}"] = "no series"
    assert wrong == {}


def test_a_healthy_run_fires_no_alert(server: Prometheus) -> None:
    early = until(lambda: server.query("tickwheel_early_total"), LASTING_S)
    assert {entry["metric"].get("shard") for entry in early} == {None, "0", "1"}
    assert {entry["value"][1] for entry in early} == {"0"}
    # The load makes dead letters, and leaves tasks to nobody, on purpose; the rest is timing.
    troubles = {
        "TickwheelEarly", "TickwheelNoLeader", "TickwheelGone", "TickwheelNotServing",
        "TickwheelStoreDown", "TickwheelStoreFull", "TickwheelStoreLostData",
        "TickwheelStoreErrors", "TickwheelClockHeld", "TickwheelFailedOver",
        "TickwheelHistoryDropped", "TickwheelHistoryWriterRestarting", "TickwheelBackupFailed",
        "TickwheelBackupOld", "TickwheelShardDown", "TickwheelShardRestarting",
        "TickwheelTwoLeaders", "TickwheelDaemonDown", "TickwheelNodesMissing",
        "TickwheelStandbysMissing",
        "TickwheelBackupMissing", "TickwheelPausedLong",
    }  # fmt: skip

    def alerts() -> set[str]:
        return {series["metric"]["alertname"] for series in server.query("ALERTS")} & troubles

    until(lambda: not alerts(), LASTING_S, alerts)


def test_delivery_counters_add_up(server: Prometheus) -> None:
    """A group is read in one step, so nothing is counted twice or missed, whatever goes on."""
    ends = ("tickwheel_acked_total", "tickwheel_nacked_total", "tickwheel_in_flight_tasks")
    until(lambda: server.query("tickwheel_acked_total > 10"), LASTING_S)
    assert server.query(f"tickwheel_delivered_total != {' + '.join(ends)}") == []
