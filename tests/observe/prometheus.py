"""A Prometheus server on a free port of 127.0.0.1, with the rules of ``grafana/``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

from support.ports import free_port

ROOT = Path(__file__).parents[2]
RULES = ROOT / "grafana" / "prometheus"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
PROGRAMS = ("prometheus", "promtool")


def missing() -> str:
    """Why no Prometheus can be had; empty when it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{' and '.join(absent)} not installed (apt-get install prometheus)" if absent else ""


class QueryFailed(Exception):
    """Prometheus did not answer a query with data."""


class Prometheus:
    """``with Prometheus(folder, ["127.0.0.1:7356"]) as server``; ended by its own pid."""

    def __init__(self, folder: Path, targets: list[str], interval: str = "5s") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._config = folder / "prometheus.yml"
        self._config.write_text(_config(targets, interval))
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{free_port()}"

    def __enter__(self) -> Self:
        command = ["prometheus", f"--config.file={self._config}", "--log.level=warn"]
        command.append(f"--storage.tsdb.path={self._folder / 'data'}")
        command.append(f"--web.listen-address={self.url.removeprefix('http://')}")
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(self.url + "/-/ready", timeout=30):  # noqa: S310
                    return
            except OSError:
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    log = (self._folder / "log").read_text(errors="replace")
                    raise QueryFailed(f"Prometheus did not start:\n{log[-2000:]}") from None
                time.sleep(0.05)  # real time: another process

    # --- asking ----------------------------------------------------------------------------

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now. Raises QueryFailed when it cannot be evaluated."""
        result = self._get("query", query=expression)["result"]
        assert isinstance(result, list)
        return result

    def label_values(self, label: str, selector: str) -> list[str]:
        """What ``label_values(selector, label)`` of a dashboard gives."""
        value = self._get(f"label/{label}/values", **{"match[]": selector})
        return list(value)

    def rules(self) -> list[dict[str, Any]]:
        """Every rule: ``type`` (recording, alerting), ``name``, ``query``, ``health``, …"""
        groups = self._get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310  # our own
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryFailed(error.read().decode(errors="replace")) from None


def _config(targets: list[str], interval: str) -> str:
    rules = "\n".join(f"  - {RULES / name}" for name in ("recording.yml", "alerts.yml"))
    return f"""\
global:
  scrape_interval: {interval}
  scrape_timeout: {interval}
  evaluation_interval: {interval}
rule_files:
{rules}
scrape_configs:
  - job_name: tickwheel
    static_configs:
      - targets: {json.dumps(targets)}
"""


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment, with the tests' modules on the path of a child."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**os.environ, "PYTHONPATH": path, **more}
