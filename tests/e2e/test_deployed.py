"""What the files of ``deploy/`` start is started, without containers: two daemons and a worker as
in the manifests, and the Redis servers of the compose files with a daemon on them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cli_runner import NOWHERE, Cli, tickwheel
from support.daemon import Daemon
from support.deployed import DEPLOY, WORKERS, environment, pod, services, the
from support.ports import free_port
from support.redis_server import RedisServer, program
from support.waiting import until
from tickwheel import Client
from tickwheel.persistence.redis.driver import PORT, SENTINEL_PORT

GUIDE = (DEPLOY / "README.md").read_text().replace("\\\n", " ")
TAKEOVER_S = 5.0
"""What is promised, with the default time to live of 3 s."""
HERE = "127.30."
"""Local addresses that replace the networks of the compose files."""


def status(address: str, path: str) -> int:
    return asked(address, path)[0]


def asked(address: str, path: str) -> tuple[int, str]:
    """(status, text)"""
    try:
        with urllib.request.urlopen(f"{address}{path}", timeout=60) as answer:  # noqa: S310  # our own
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# --- Kubernetes ----------------------------------------------------------------------------------


def token(name: str, file: Path) -> str:
    """Made as the guide says, into this file."""
    [line] = re.findall(rf"^    {name}=\$\((tickwheel token create .*)\)$", GUIDE, re.MULTILINE)
    name, *words = shlex.split(line.replace("tokens.json", str(file)))
    assert name == "tickwheel"
    return Cli(NOWHERE).run(*words).stdout.decode().strip()


@pytest.fixture(scope="module")
def stateful(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[list[Daemon], dict[str, str]]]:
    """The two daemons of the StatefulSet and the tokens of the guide."""
    folder = tmp_path_factory.mktemp("stateful")
    server = RedisServer(folder / "redis").start().lay_out()
    file = folder / "tokens.json"
    tokens = {name: token(name, file) for name in ("ops", "workers")}
    _, container = pod(the("StatefulSet"))
    assert container["args"] == ["serve"]
    elsewhere = {"TICKWHEEL_STORE", "TICKWHEEL_LISTEN", "TICKWHEEL_HTTP", "TICKWHEEL_ADVERTISE"}
    answer = {k: v for k, v in environment(container).items() if k not in elsewhere}
    answer["TICKWHEEL_TOKENS_FILE"] = str(file)
    daemons = [
        Daemon(folder / name, store=server.url(), http=True, env={**answer, "TICKWHEEL_NODE": name})
        for name in ("tickwheel-0", "tickwheel-1")
    ]
    with daemons[0] as first:
        until(lambda: status(first.http, "/readyz") == 200, log=first.log_text)
        with daemons[1]:
            yield daemons, tokens
    server.kill()


@pytest.fixture
def pair(stateful: tuple[list[Daemon], dict[str, str]]) -> tuple[Daemon, Daemon, dict[str, str]]:
    """The leader, its standby, and the tokens; both live."""
    daemons, tokens = stateful
    for daemon in daemons:
        if not daemon.alive:
            daemon.start()
    leader, standby = sorted(daemons, key=lambda daemon: status(daemon.http, "/readyz") != 200)
    return leader, standby, tokens


def probed(daemon: Daemon) -> dict[str, int]:
    """What the kubelet would be answered by each probe."""
    _, container = pod(the("StatefulSet"))
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    return {name: status(daemon.http, container[name]["httpGet"]["path"]) for name in probes}


def test_a_drained_daemon_is_replaced_by_its_standby(
    pair: tuple[Daemon, Daemon, dict[str, str]],
) -> None:
    leader, standby, _ = pair
    assert status(standby.http, "/readyz") == 503, "it does stand by"
    for daemon in (leader, standby):
        assert set(probed(daemon).values()) == {200}
    assert leader.terminate() == 0
    until(lambda: status(standby.http, "/readyz") == 200, TAKEOVER_S)
    assert set(probed(standby).values()) == {200}


def test_a_daemon_without_its_redis_is_alive_and_not_ready(tmp_path: Path) -> None:
    """An update that brings one stops there."""
    http = free_port()
    env = {"TICKWHEEL_HTTP": f"127.0.0.1:{http}"}
    daemon = Daemon(tmp_path / "lost", store=f"redis://127.0.0.1:{free_port()}/0", env=env)
    daemon.spawn()
    try:
        address = f"http://127.0.0.1:{http}"
        until(lambda: _answers(address), log=daemon.log_text)
        _, container = pod(the("StatefulSet"))
        paths = {name: container[name]["httpGet"]["path"] for name in container if "Probe" in name}
        by_name = {name: status(address, path) for name, path in paths.items()}
        assert by_name == {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 503}
    finally:
        daemon.close()


def _answers(address: str) -> bool:
    try:
        return status(address, "/healthz") == 200
    except OSError:
        return False


async def test_a_worker_of_the_manifests_works_and_stops_in_time(
    pair: tuple[Daemon, Daemon, dict[str, str]], tmp_path: Path
) -> None:
    leader, standby, tokens = pair
    _, container = pod(the("Deployment"))
    hosts = ",".join(daemon.url.removeprefix("tcp://") for daemon in (leader, standby))
    env = {**environment(container), "PYTHONPATH": str(WORKERS), "TICKWHEEL_URL": f"tcp://{hosts}"}
    env["TICKWHEEL_TOKEN"] = tokens["workers"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TICKWHEEL_")}
    command = [*tickwheel(), *container["args"], "--json"]
    with (tmp_path / "done").open("wb") as out, (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            command, cwd=WORKERS, env={**clean, **env}, stdout=out, stderr=log
        )
    try:
        # By the standby alone, as behind the Service: it names the leader.
        async with Client(standby.url, token=tokens["ops"]) as client:
            await client.enqueue("orders.close", b"order 42")
        done = await asyncio.to_thread(
            until, (tmp_path / "done").read_text, log=(tmp_path / "log").read_text
        )
        assert json.loads(done)["outcome"] == "acked"
        _metrics_have_what_the_scaling_asks_for(leader)
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, 20) == 0
    finally:
        worker.kill()
        worker.wait()


def _metrics_have_what_the_scaling_asks_for(leader: Daemon) -> None:
    monitor = the("ServiceMonitor")["spec"]["endpoints"][0]["path"]
    _, series = asked(leader.http, monitor)
    queries = [trigger["metadata"]["query"] for trigger in the("ScaledObject")["spec"]["triggers"]]
    named = [found for query in queries for found in re.findall(r"tickwheel_\w+\{[^}]*\}", query)]
    assert len(named) == 4
    for item in named:
        assert f"\n{item} " in series, item


# --- compose -------------------------------------------------------------------------------------


class Composed:
    """The Redis servers of a compose file, with their commands as they stand there, at addresses of
    this machine; and what a daemon of the file has as its store."""

    def __init__(self, name: str, folder: Path) -> None:
        self._services = services(DEPLOY / name)
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {str(PORT): str(free_port()), str(SENTINEL_PORT): str(free_port())}

    def here(self, text: str) -> str:
        """The same for this machine: ``$$`` is compose's way to say ``$``."""
        for theirs, ours in self._ports.items():
            text = re.sub(rf"\b{theirs}\b", ours, text)
        return text.replace("172.30.", HERE).replace("$$", "$")

    @property
    def store(self) -> str:
        """A Sentinel without a port has its usual one, which is taken by others here."""
        store = self._services["tickwheel-a"]["environment"]["TICKWHEEL_STORE"]
        with_ports = re.sub(r"(\d+\.\d+\.\d+\.\d+)(?=[,/])", rf"\1:{SENTINEL_PORT}", store)
        return self.here(with_ports)

    def start(self, name: str) -> None:
        """One of the servers, in a folder of its own, where its volume would be."""
        service = self._services[name]
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        address = self.here(service["networks"]["default"]["ipv4_address"])
        port = self._ports[str(SENTINEL_PORT if "sentinel" in name else PORT)]
        # The image lets other machines in, Redis by itself does not.
        more = ["--bind", address, "--bind-source-addr", address, "--port", port]
        more += ["--protected-mode", "no"]
        command = [self.here(word) for word in service["command"]]
        if command[0] == "sh":
            command[-1] = f"{command[-1]} {shlex.join(more)}"
        else:
            command += more
        with (folder / "log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(lambda: self.ask(address, port, "ping") == "PONG", log=(folder / "log").read_text)

    @staticmethod
    def ask(address: str, port: str, *words: str) -> str:
        command = ["redis-cli", "-h", address, "-p", port, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def replicas_of(self, address: str) -> str:
        """What the master at this address says of its replicas."""
        host, _, port = address.rpartition(":")
        return self.ask(host, port, "info", "replication")

    def run(self, name: str) -> None:
        """A service that does its work once and ends."""
        [shell, how, script] = self._services[name]["command"]
        # redis-cli asks the usual port unless it is told another one.
        port = self._ports[str(PORT)]
        script = self.here(script).replace("redis-cli -h", f"redis-cli -p {port} -h")
        done = subprocess.run(
            [shell, how, script], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def named(self, kind: str) -> list[str]:
        return sorted(name for name in self._services if name.startswith(kind))

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def name_of(self, address: str) -> str:
        """The service at this address, which ends with its port."""
        host = address.rpartition(":")[0].replace(HERE, "172.30.")
        [name] = [
            name
            for name, one in self._services.items()
            if one.get("networks", {}).get("default", {}).get("ipv4_address") == host
        ]
        return name

    def close(self) -> None:
        for name in self._processes:
            self.kill(name)


@contextlib.contextmanager
def composed(name: str, folder: Path) -> Iterator[Composed]:
    assert Path(program()).name == "redis-server", "what the commands of the files name"
    made = Composed(name, folder)
    try:
        yield made
    finally:
        made.close()


async def failed_over(redis: Composed, folder: Path) -> None:
    """A daemon with the store of the file serves, its master is killed, and it serves again."""
    async with Daemon(folder / "daemon", store=redis.store, http=True) as daemon:

        def ready() -> bool:
            return status(daemon.http, "/readyz") == 200

        await asyncio.to_thread(until, ready, log=daemon.log_text)
        async with Client(daemon.url) as client:
            first = await client.enqueue("orders.close", b"before", delay=3600)
            before = _store_at(daemon)

            def in_step() -> bool:  # one that has never been is not promoted
                return "state=online" in redis.replicas_of(before)

            def moved() -> bool:
                return ready() and _store_at(daemon) != before

            await asyncio.to_thread(until, in_step, log=lambda: redis.replicas_of(before))
            redis.kill(redis.name_of(before))
            await asyncio.to_thread(until, moved, log=daemon.log_text)
            second = await client.enqueue("orders.close", b"after", delay=3600)
            ids = [task.id for task in await client.lookup_many([first.id, second.id])]
            assert ids == [first.id, second.id]


def _store_at(daemon: Daemon) -> str:
    return str(json.loads(asked(daemon.http, "/v1/status")[1])["store_at"])


@pytest.mark.slow  # the sentinels below; persistence/redis/test_redis_cluster.py
async def test_the_cluster_of_the_compose_file_fails_over(tmp_path: Path) -> None:
    with composed("compose-cluster.yaml", tmp_path) as redis:
        nodes = redis.named("redis-")
        assert len(nodes) == 6
        for name in nodes:
            redis.start(name)
        redis.run("layout")
        redis.run("layout")  # at each further start of all: it lets the Cluster alone
        await failed_over(redis, tmp_path)


async def test_the_sentinels_of_the_compose_file_fail_over(tmp_path: Path) -> None:
    with composed("compose-sentinel.yaml", tmp_path) as redis:
        for name in [*redis.named("redis-"), *redis.named("sentinel-")]:
            redis.start(name)
        await failed_over(redis, tmp_path)
        # A Sentinel that starts again goes on with what it has learned.
        redis.kill("sentinel-1")
        before = (tmp_path / "sentinel-1" / "sentinel.conf").read_text()
        assert "known-sentinel" in before
        redis.start("sentinel-1")
