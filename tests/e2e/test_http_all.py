"""HTTP of all shards together (``--http-all``), over real daemons, killed and frozen ones."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families

from e2e.test_processes import Shards, is_over, listens
from observe.test_grafana import need_prometheus
from support.certificates import Authority
from support.daemon import Daemon
from support.http_asking import Answer, ask
from support.waiting import until
from tickwheel.server.http.all_shards import METRICS_S, READY_S
from tickwheel.server.metrics import catalogue

LONG_S = 15.0
"""More than an answer takes on the busiest machine, and less than a shard stands still."""
MakeDaemon = Callable[..., Daemon]


class Whole:
    """Two shards, and the address of all of them together."""

    def __init__(
        self, make_daemon: MakeDaemon, folder: Path, where: str = "127.0.0.1:0", **options: Any
    ) -> None:
        args = ("--http-all", where)
        self.shards = Shards(make_daemon, folder, http=True, args=args, **options).start()
        self.ready = json.loads((self.shards.parent.folder / "ready.json").read_text())
        self.url = self.shards.parent.http_all

    def get(self, path: str, url: str | None = None, **headers: str) -> Answer:
        return ask(url or self.url, "GET", path, **headers)

    def heard(self, path: str, **headers: str) -> Answer:
        """An answer for which no shard was too slow, as any may be on a busy machine."""
        answer = until(
            lambda: (got := self.get(path, **headers)) and b"silent" not in got.body and got
        )
        assert isinstance(answer, Answer)
        return answer

    def metric(self, name: str) -> dict[str, float]:
        """The values of a metric of shards, by shard."""
        result = families(self.get("/metrics").body.decode())
        samples = [sample for metric in result for sample in metric.samples if sample.name == name]
        return {sample.labels["shard"]: sample.value for sample in samples}

    def state(self, shard: int) -> str:
        return str(self.get("/readyz").json["shards"][str(shard)])

    @property
    def process(self) -> int:
        """The process that answers."""
        parent = self.shards.parent.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        (found,) = set(map(int, children)) - set(self.shards.pids())
        return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    with ExitStack() as stack:

        def make(**options: Any) -> Daemon:
            daemon = Daemon(tmp_path_factory.mktemp("parent"), **options)
            stack.callback(daemon.close)
            return daemon

        yield Whole(make, tmp_path_factory.mktemp("folder"))


# --- all is well ----------------------------------------------------------------------------------


def test_health_and_readiness_cover_all_shards(running: Whole) -> None:
    assert running.get("/healthz").json == {"status": "alive"}
    ready = running.heard("/readyz")
    assert (ready.status, ready.json["status"]) == (200, "ready")
    assert ready.json["shards"] == {"0": "ready", "1": "ready"}


def test_shards_are_listed_with_their_addresses(running: Whole) -> None:
    shards = running.heard("/v1/shards").json["shards"]
    texts = [{name: shard[name] for name in ("url", "http", "pid")} for shard in shards]
    assert texts == running.ready["shards"]
    assert [(entry["shard"], entry["state"], entry["restarts"]) for entry in shards] == [
        (0, "ready", 0),
        (1, "ready", 0),
    ]
    now_ms = time.time() * 1000
    assert all(0 < now_ms - entry["since_ms"] < 600_000 for entry in shards)


def test_the_start_page_links_the_consoles(running: Whole) -> None:
    page = running.heard("/")
    assert page.headers["content-type"].startswith("text/html")
    links = re.findall(r'<a href="([^"]+)">shard (\d)</a>: ready', page.body.decode())
    assert [int(number) for _, number in links] == [0, 1]
    for link, _ in links:
        assert b"<title>" in running.get("", link).body


def test_unknown_paths_and_hosts_are_refused(running: Whole) -> None:
    for path in ("/v1/nothing", "/nothing"):
        assert running.get(path).status == 404
    for path in ("/metrics", "/v1/stats"):
        assert running.get(path, Host="evil.example").status == 403


def test_metrics_of_all_shards_are_one_valid_text(running: Whole) -> None:
    answer = running.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    by_name = {metric.name: metric for metric in families(answer.body.decode())}
    of_door = {name.removesuffix("_total") for name, _, _ in catalogue.CONNECTION_METRICS}
    for metric in by_name.values():
        also = {"http"} if metric.name in of_door else set()
        assert {sample.labels["shard"] for sample in metric.samples} <= {"0", "1"} | also
        assert also <= {sample.labels["shard"] for sample in metric.samples}, metric.name
    for shard in running.ready["shards"]:
        for own in families(running.get("/metrics", shard["http"]).body.decode()):
            assert by_name[own.name].documentation == own.documentation
            assert by_name[own.name].type == own.type
    heads = re.findall(r"^# (?:HELP|TYPE) \S+", answer.body.decode(), re.MULTILINE)
    assert len(heads) == len(set(heads))
    assert running.metric("tickwheel_serving") == {"0": 1, "1": 1}
    assert running.metric("tickwheel_shard_up") == {"0": 1, "1": 1}
    assert running.metric("tickwheel_shard_restarts_total") == {"0": 0, "1": 0}
    assert {name for name, _ in catalogue.SHARD_METRICS} == {
        "tickwheel_shard_up",
        "tickwheel_shard_restarts_total",
    }


def test_promtool_accepts_the_metrics(running: Whole) -> None:
    need_prometheus()
    text = running.get("/metrics").body
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_openmetrics_cover_all_shards(running: Whole) -> None:
    kind = "application/openmetrics-text; version=1.0.0"
    answer = running.get("/metrics", Accept=kind)
    assert answer.headers["content-type"].startswith(kind)
    by_name = {metric.name: metric for metric in open_families(answer.body.decode())}
    assert [sample.name for sample in by_name["tickwheel_shard_restarts"].samples] == [
        "tickwheel_shard_restarts_total"
    ] * 2
    labels = [sample.labels for sample in by_name["tickwheel_leader"].samples]
    assert labels == [{"shard": "0"}, {"shard": "1"}]


# --- one is not -----------------------------------------------------------------------------------


def test_a_killed_shard_is_named_and_the_others_serve(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    whole = Whole(make_daemon, tmp_path)
    database = whole.shards.folder / "shard-1.db"
    database.rename(database.with_suffix(".away"))
    database.mkdir()  # it dies again as soon as it is started
    os.kill(whole.shards.pids()[1], signal.SIGKILL)
    until(lambda: whole.shards.log.count("restarting in") >= 2, log=lambda: whole.shards.log)

    def refused() -> Answer | None:
        answer = whole.get("/readyz")
        named = "shard 1: down (exit code 1; restarted" in answer.json.get("reason", "")
        return answer if named else None

    answer = until(refused)
    assert answer is not None
    assert (answer.status, answer.json["status"]) == (503, "not_ready")
    until(lambda: whole.state(0) == "ready")
    assert whole.get("/healthz").status == 200
    until(lambda: whole.metric("tickwheel_shard_up") == {"0": 1, "1": 0})
    until(lambda: whole.metric("tickwheel_serving") == {"0": 1})
    (away,) = [shard for shard in whole.get("/v1/shards").json["shards"] if shard["shard"] == 1]
    assert away["restarts"] > 0
    status = whole.get("/v1/status").json
    assert (status["state"], status["shard"]) == ("unreachable", 0)
    assert [entry["state"] for entry in status["statuses"]] == ["ready", "unreachable"]
    assert status["statuses"][1]["message"] in status["detail"]
    database.rmdir()
    database.with_suffix(".away").rename(database)
    until(lambda: whole.get("/readyz").status == 200, log=lambda: whole.shards.log)
    assert whole.metric("tickwheel_shard_up") == {"0": 1, "1": 1}
    until(lambda: whole.get("/v1/status").json["state"] == "ready")
    restarts = whole.metric("tickwheel_shard_restarts_total")
    assert restarts["0"] == 0 < restarts["1"]


def test_a_frozen_shard_delays_answers_by_a_bounded_time(running: Whole) -> None:
    whole = running
    frozen = whole.shards.pids()[1]
    os.kill(frozen, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        answer = whole.get("/readyz")
        assert READY_S <= time.monotonic() - began_s < LONG_S
        assert answer.status == 503
        text = f"shard 1: silent (no answer within {READY_S:g} s)"
        assert text in answer.json["reason"]
        until(lambda: whole.get("/readyz").json["reason"] == text)
        began_s = time.monotonic()
        assert whole.metric("tickwheel_shard_up")["1"] == 0
        assert METRICS_S <= time.monotonic() - began_s < LONG_S
        until(lambda: whole.metric("tickwheel_leader") == {"0": 1})
        assert len(re.findall("shard_without_metrics .* shard=1", whole.shards.log)) == 1
    finally:
        os.kill(frozen, signal.SIGCONT)
    until(lambda: whole.get("/readyz").status == 200)
    assert whole.metric("tickwheel_shard_up") == {"0": 1, "1": 1}


def test_the_http_process_restarts_and_ends_with_its_parent(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    whole = Whole(make_daemon, tmp_path)
    first, port = whole.process, int(whole.url.rpartition(":")[2])
    pids = whole.shards.pids()
    os.kill(first, signal.SIGKILL)
    until(lambda: "http_all_ended" in whole.shards.log and listens(port))
    until(lambda: whole.get("/readyz").status == 200)
    assert whole.shards.pids() == pids, "the shards were left alone"
    second = whole.process
    assert second != first
    os.kill(whole.shards.parent.pid, signal.SIGUSR1)  # of the clock: it is not for this process
    assert whole.get("/healthz").status == 200
    whole.shards.parent.kill()
    until(lambda: is_over(second) and not listens(port))


def test_sigterm_ends_all_processes(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    whole = Whole(make_daemon, tmp_path)
    process = whole.process
    assert whole.shards.parent.terminate() == 0
    assert is_over(process)
    assert "Traceback" not in whole.shards.log


# --- who may ask ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_required", [False, True])
def test_tokens_and_tls_are_those_of_the_daemons(
    make_daemon: MakeDaemon, tmp_path: Path, *, is_required: bool
) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("daemon")
    whole = Whole(
        make_daemon,
        tmp_path,
        "https://127.0.0.1:0",
        serve_token="of-everything",
        login_delay_s=0,
        tls_cert=pair.cert,
        tls_key=pair.key,
        tls_client_ca=authority.ca,
        tls_client_required=is_required,
    )
    assert whole.url.startswith("https://")
    assert whole.metric("tickwheel_shard_up") == {"0": 1, "1": 1}
    assert whole.heard("/readyz").status == 200
    shown = "Bearer of-everything"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {shown}"}):
        refused = whole.get("/v1/shards", **headers)
        assert (refused.status, refused.json["code"]) == (401, "unauthorized")
        assert refused.headers["www-authenticate"] == 'Bearer realm="tickwheel"'
    result = whole.heard("/v1/shards", Authorization=shown)
    if is_required:
        assert "certificate is required" in result.json["detail"]
    else:
        assert [shard["state"] for shard in result.json["shards"]] == ["ready", "ready"]
