"""The files of ``deploy/`` hold together: their own tools take them, and what they name exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import latest_version
from typer.main import get_command

from observe.test_grafana import DASHBOARDS, need_prometheus, promtool
from support.deployed import (
    COMPOSE,
    DEPLOY,
    KUBERNETES,
    MANIFESTS,
    ROOT,
    WORKERS,
    environment,
    objects,
    pod,
    services,
    texts,
    the,
)
from tickwheel.cli.app import app, run
from tickwheel.persistence.postgresql import driver as postgresql
from tickwheel.persistence.redis.driver import PORT, SCHEMES, SENTINEL_PORT, options_from
from tickwheel.server import companion, daemon
from tickwheel.server.settings import Settings, load, split_address
from tickwheel.version import __version__

OLDEST = "1.30"
"""Of Kubernetes, as ``deploy/README.md`` says."""
CLIENTS_OWN = {"TICKWHEEL_URL", "TICKWHEEL_TOKEN"}
"""Variables that a client or the command line reads, and no daemon."""
TEXTS = dict(texts())
OPERATORS = {"ServiceMonitor", "ScaledObject"}
"""Kinds that Kubernetes itself does not know."""
YAML_RULES = """
extends: default
rules:
  document-start: disable
  line-length: {max: 110}
  comments: {min-spaces-from-content: 1}
"""


def tool(name: str) -> str:
    """A program beside this Python."""
    return str(Path(sys.executable).parent / name)


def checked(*command: str) -> None:
    """Run a tool that has to be content. It sees no other settings than its own."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# --- their own tools ------------------------------------------------------------------------------


def test_yamllint_accepts_all_files() -> None:
    results = [str(path) for path in (*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml"))]
    assert len(results) >= 12
    checked(tool("yamllint"), "--strict", "-d", YAML_RULES, *results)


def test_compose_files_follow_the_schema_of_compose() -> None:
    names = map(str, COMPOSE)
    checked(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *names)


@pytest.mark.parametrize("version", [OLDEST, "the newest"])
def test_manifests_follow_the_schemas_of_kubernetes(version: str) -> None:
    version = latest_version() if version == "the newest" else version
    kinds = set()
    for path in MANIFESTS:
        for entry in yaml.safe_load_all(path.read_text()):
            kinds.add(entry["kind"])
            if entry["kind"] not in OPERATORS:
                kubernetes_validate.validate(entry, version, strict=True)
    assert kinds >= {"StatefulSet", "Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"}


def test_a_field_that_kubernetes_does_not_know_is_refused() -> None:
    wrong = the("StatefulSet")
    wrong["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


@pytest.mark.parametrize("folder", [KUBERNETES, WORKERS], ids=lambda path: str(path.name))
def test_a_kustomization_names_existing_files(folder: Path) -> None:
    answer = yaml.safe_load((folder / "kustomization.yaml").read_text())
    files = [name for entry in answer.get("configMapGenerator", ()) for name in entry["files"]]
    for name in [*answer["resources"], *files]:
        assert (folder / name).is_file(), name
    if shutil.which("kubectl"):
        checked("kubectl", "kustomize", str(folder))
    [image] = answer["images"]
    kind = "StatefulSet" if folder == KUBERNETES else "Deployment"
    assert pod(the(kind))[1]["image"] == image["name"], "the image is replaced"


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-nodes.yml"])
def test_promtool_accepts_the_mounted_configuration(name: str, tmp_path: Path) -> None:
    need_prometheus()
    compose = [path for path in COMPOSE if f"./{name}:" in path.read_text()]
    assert compose
    for path in compose:
        for volume in services(path)["prometheus"]["volumes"]:
            source, place = volume.split(":")[:2]
            if source.startswith("."):
                shutil.copy(path.parent / source, tmp_path / Path(place).name)
        checked("promtool", "check", "config", str(tmp_path / "prometheus.yml"))
        daemons = {host for host, one in services(path).items() if "build" in one}
        [job] = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
        [static] = job["static_configs"]
        assert {target.split(":")[0] for target in static["targets"]} == daemons


# --- settings, commands, places -------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_variables_and_commands_that_are_named_exist(name: str) -> None:
    text = TEXTS[name]
    settings = {f"TICKWHEEL_{field.upper()}" for field in Settings.model_fields}
    assert set(re.findall(r"\bTICKWHEEL_[A-Z][A-Z_]*[A-Z]", text)) <= settings | CLIENTS_OWN
    for line in _commands(text):
        _is_a_command(line)
    for path in re.findall(r"\bdeploy/[\w./@-]*\w", text):
        assert (ROOT / path).exists(), path


def _commands(text: str) -> list[str]:
    """Lines of a shell that run ``tickwheel``: in blocks that are set in, in units, in quotes."""
    matches = re.findall(
        r"^(?:    .*?|ExecStart=\S*)\btickwheel ((?:--url|[a-z]).*)$", text, re.MULTILINE
    )
    matches += re.findall(r"`tickwheel ([a-z][^`]*)`", text)
    return [re.split(r"[)|;&#]|\\$", line)[0] for line in matches]


def _is_a_command(line: str) -> None:
    """Fail if the command line would not know a command or an option of it."""
    here: Any = get_command(app)
    options = {name for parameter in here.params for name in parameter.opts}
    words = shlex.split(line)
    for place, word in enumerate(words):
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"tickwheel {line}"
        elif not (place and words[place - 1].startswith("--")) and hasattr(here, "commands"):
            assert word in here.commands, f"tickwheel {line}"
            here = here.commands[word]
            options |= {name for parameter in here.params for name in parameter.opts}
    assert not hasattr(here, "commands"), f"tickwheel {line}"


def test_metrics_and_events_of_the_operations_page_exist() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    metrics = re.findall(r"`(tickwheel_\w+)[`{]", (ROOT / "docs" / "metrics.md").read_text())
    named = set(re.findall(r"`(tickwheel_\w+)`", text))
    assert "tickwheel_leases_over_total" in named
    assert named - set(metrics) == set()
    [symptoms] = re.findall(r"^## Symptoms first$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    rows = [line.strip("| ").split(" | ") for line in symptoms.splitlines() if line[:1] == "|"]
    assert len(rows) > 12 and {len(row) for row in rows[2:]} == {3}, "symptom, check, action"


def test_security_documents_agree() -> None:
    """What SECURITY.md names are settings, and quotas are told of where they are."""
    text = (ROOT / "SECURITY.md").read_text()
    named = set(re.findall(r"`([a-z_]+)`", text))
    assert {"serve_token", "tokens_file", "file_mode", "insecure"} <= named
    assert named - {"rediss"} <= Settings.model_fields.keys()
    assert "docs/security.md#quotas" in text
    told = (ROOT / "docs" / "security.md").read_text()
    assert "`serve_token`, the one password, has none" in told
    assert "`serve_token` has none" in text


def test_commands_are_found_where_they_stand() -> None:
    results = {line.split()[0] for text in TEXTS.values() for line in _commands(text)}
    assert results >= {"serve", "token", "load", "backup"}


@pytest.mark.parametrize("line", ["serve --shop x", "no-such-thing", "token make x"])
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    with pytest.raises(AssertionError):
        _is_a_command(line)


def settings_of(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: Path
) -> Settings:
    """As a container of the image with these variables reads them, or it would not start."""
    for name in [name for name in os.environ if name.startswith("TICKWHEEL_")]:
        monkeypatch.delenv(name)
    image = (DEPLOY / "Dockerfile").read_text()
    tokens = folder / "tokens.json"
    tokens.write_text("{}")
    for name, value in (re.findall(r"(TICKWHEEL_\w+)=(\S+)", image)) + list(variables.items()):
        monkeypatch.setenv(name, str(tokens) if name == "TICKWHEEL_TOKENS_FILE" else value)
    return load()


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_daemons_of_compose_files_have_valid_settings(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    daemons = {name: one for name, one in services(path).items() if "build" in one}
    stores, nodes = set(), set()
    for name, one in daemons.items():
        settings = settings_of(monkeypatch, one["environment"], tmp_path)
        assert split_address(settings.listen, "listen") == ("0.0.0.0", 7355)
        assert split_address(settings.http or "", "http") == ("0.0.0.0", 7356)
        assert {port.split(":")[-1] for port in one["ports"]} == {"7355", "7356"}
        assert settings.node == name
        assert settings.advertise == (f"tcp://{name}:7355" if len(daemons) > 1 else None)
        assert int(one["stop_grace_period"].removesuffix("s")) >= stop_s(settings)
        stores.add(settings.store)
        nodes.add(settings.node)
    assert len(nodes) == len(daemons)
    [store] = stores
    if store.partition(":")[0] in SCHEMES:
        hosts = {place for item in services(path).items() for place in _places(*item)}
        assert {host for host, _ in options_from(store).seeds} <= hosts


def _places(name: str, service: dict[str, Any]) -> list[str]:
    """By which a service is found by others."""
    networks = service.get("networks", {})
    return [name, *(network["ipv4_address"] for network in networks.values())]


def stop_s(settings: Settings) -> float:
    """How long a stop may take: goodbyes before and after, pushes under way, the last commit."""
    return 2 * daemon.GOODBYE_WAIT_S + companion.STOP_S + settings.drain_timeout_s


# --- without a clone ------------------------------------------------------------------------------


def test_deploy_files_overwrites_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ops"
    assert run(["deploy-files", str(folder), "--json"]) == 0
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(json.loads(capsys.readouterr().out)["files"]) == written
    assert written >= {*TEXTS, "deploy/tickwheel.toml", "grafana/prometheus/alerts.yml"}
    assert written >= {f"grafana/dashboards/{path.name}" for path in DASHBOARDS}
    for name in written - {"deploy/Dockerfile"}:
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()
    mine = folder / "deploy" / "tickwheel.service"
    mine.write_text("mine")
    for path in folder.rglob("*.json"):
        path.unlink()
    assert run(["deploy-files", str(folder)]) == 1
    error = capsys.readouterr().err
    assert "--force" in error and error.count("\n") == 1
    assert mine.read_text() == "mine" and not list(folder.rglob("*.json"))
    assert run(["deploy-files", str(folder), "--force"]) == 0
    assert mine.read_text() == ONE.read_text() and list(folder.rglob("*.json"))


def test_the_written_image_needs_no_clone(tmp_path: Path) -> None:
    assert run(["deploy-files", str(tmp_path)]) == 0
    text = (tmp_path / "deploy" / "Dockerfile").read_text()
    assert re.findall(r"^COPY (?!--from=)", text, re.MULTILINE) == []
    assert f'pip install --no-cache-dir "tickwheel[all]=={__version__}"' in text
    for path in (tmp_path / item.relative_to(ROOT) for item in COMPOSE):
        for service in services(path).values():
            if "build" in service:
                context = path.parent / service["build"]["context"]
                assert (context / service["build"]["dockerfile"]).is_file()
            for volume in service.get("volumes", ()):
                source = volume.partition(":")[0]
                assert not source.startswith(".") or (path.parent / source).exists(), source


# --- systemd --------------------------------------------------------------------------------------

ONE, MANY = DEPLOY / "tickwheel.service", DEPLOY / "tickwheel@.service"


def test_the_template_unit_is_the_unit_with_places_of_its_own() -> None:
    one = [line for line in ONE.read_text().splitlines() if not line.startswith("#")]
    many = [line for line in MANY.read_text().splitlines() if not line.startswith("#")]
    assert len(one) == len(many)
    differing = {(a, b) for a, b in zip(one, many, strict=True) if a != b}
    for before, after in differing:
        assert "%i" not in before
        assert after.count("%i") == 1
    changed = {after.partition("=")[0] for _, after in differing}
    places = {"ExecStart", "EnvironmentFile", "StateDirectory", "WorkingDirectory"}
    assert changed == {"Description", *places}


def test_a_unit_waits_for_a_stop_and_puts_state_where_it_works() -> None:
    for path in (ONE, MANY):
        matches = dict(re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE))
        assert float(matches["TimeoutStopSec"]) >= stop_s(load())
        assert matches["WorkingDirectory"] == f"/var/lib/{matches['StateDirectory']}"
        assert matches["ExecStart"].split()[1:3] == ["serve", "--config"]
        assert Path(matches["ExecStart"].split()[3]).parent == Path("/etc/tickwheel")


def test_files_of_root_are_passed_as_credentials() -> None:
    for path, folder in ((ONE, "/etc/tickwheel"), (MANY, "/etc/tickwheel/%i")):
        text = path.read_text()
        files = dict(re.findall(r"^#LoadCredential=(\S+):(\S+)$", text, re.MULTILINE))
        assert files == {name: f"{folder}/{name}" for name in files}
        used = dict(re.findall(r"TICKWHEEL_(\w+)=%d/(\S+)", text))
        assert used.keys() == {"TOKENS_FILE", "TLS_CERT", "TLS_KEY"}
        assert set(used.values()) == set(files)


def test_services_restart_after_a_crash_and_a_reboot() -> None:
    for unit in (ONE, MANY):
        matches = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))
        assert (matches["Restart"], matches["WantedBy"]) == ("on-failure", "multi-user.target")
        assert matches["StartLimitIntervalSec"] == "0", "systemd gives up after five starts in 10 s"
    for path in COMPOSE:
        for name, service in services(path).items():
            is_done = {"condition": "service_completed_successfully"}
            once = any(
                other.get("depends_on", [])[name] == is_done
                for other in services(path).values()
                if name in other.get("depends_on", []) and type(other["depends_on"]) is dict
            )
            assert service.get("restart") == (None if once else "unless-stopped"), f"{path} {name}"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and not os.environ.get("CI"),
    reason="systemd-analyze is not on this machine (apt-get install systemd)",
)
def test_systemd_accepts_an_instance_of_the_template(tmp_path: Path) -> None:
    command = shutil.which("true")
    unit = tmp_path / "tickwheel@.service"
    unit.write_text(
        re.sub(r"^ExecStart=\S+", f"ExecStart={command}", MANY.read_text(), flags=re.MULTILINE)
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "tickwheel@a.service")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    unit.write_text(unit.read_text() + "NoSuchThing=1\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "tickwheel@a.service")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "NoSuchThing" in done.stderr


# --- Kubernetes: what has to agree ----------------------------------------------------------------


def test_daemons_of_the_manifests_have_valid_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    daemons = the("StatefulSet")
    spec, container = pod(daemons)
    answer = environment(container)
    service = the("Service", daemons["spec"]["serviceName"])
    settings = settings_of(
        monkeypatch, {**answer, "TICKWHEEL_STORE": "redis://redis.example:6379/0"}, tmp_path
    )
    assert settings.advertise == (
        f"tcp://<TICKWHEEL_NODE>.{service['metadata']['name']}.<POD_NAMESPACE>:7355"
    )
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert split_address(settings.listen, "listen")[1] == ports["tcp"]
    assert split_address(settings.http or "", "http")[1] == ports["http"]
    # Twice the bodies: what the tasks themselves take is about as much.
    memory = container["resources"]["limits"]["memory"]
    assert 2 * settings.resident_bytes_max <= int(memory.removesuffix("Gi")) << 30
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"] + stop_s(settings)
    assert spec["terminationGracePeriodSeconds"] >= stop
    tokens = Path(answer["TICKWHEEL_TOKENS_FILE"])
    [mount] = [
        mount for mount in container["volumeMounts"] if mount["mountPath"] == str(tokens.parent)
    ]
    [volume] = [entry for entry in spec["volumes"] if entry["name"] == mount["name"]]
    assert tokens.name in [item["path"] for item in volume["secret"]["items"]]


def test_services_and_probes_use_ports_of_the_daemons() -> None:
    daemons = the("StatefulSet")
    labels = daemons["spec"]["template"]["metadata"]["labels"]
    _, container = pod(daemons)
    ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    assert set(ports.values()) == {7355, 7356}
    result = objects("Service")
    assert len(result) == 2
    for service in result:
        assert service["spec"]["selector"].items() <= labels.items()
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    headless = the("Service", daemons["spec"]["serviceName"])["spec"]
    assert headless["clusterIP"] == "None"
    assert headless["publishNotReadyAddresses"], "who is sent to a daemon finds it"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    for entry in (the("PodDisruptionBudget"), the("ServiceMonitor")):
        assert entry["spec"]["selector"]["matchLabels"].items() <= labels.items()
    [endpoint] = the("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] in ports
    assert the("ServiceMonitor")["spec"]["jobLabel"] in labels


def test_the_disruption_budget_keeps_one_daemon() -> None:
    assert the("StatefulSet")["spec"]["replicas"] == 2
    assert the("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_the_network_lets_clients_prometheus_and_redis_through() -> None:
    policy = the("NetworkPolicy")["spec"]
    _, container = pod(the("StatefulSet"))
    ports = {entry["containerPort"] for entry in container["ports"]}
    let_in = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert let_in == ports
    let_out = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert let_out == {53, PORT, SENTINEL_PORT, postgresql.PORT}
    workers = the("Deployment")["spec"]["template"]["metadata"]["labels"]
    allowed = [
        entry["podSelector"]["matchLabels"].items() <= workers.items()
        for rule in policy["ingress"]
        for entry in rule["from"]
        if "podSelector" in entry
    ]
    assert allowed == [True]
    assert (
        policy["podSelector"]["matchLabels"]
        == (the("StatefulSet")["spec"]["selector"]["matchLabels"])
    )


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
def test_containers_never_run_as_root(kind: str) -> None:
    spec, container = pod(the(kind))
    whole, own = spec["securityContext"], container["securityContext"]
    user = re.findall(r"^USER (\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert [str(whole["runAsUser"])] == user
    assert whole["runAsNonRoot"]
    assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "their variables would look like settings"
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]


def test_workers_know_both_daemons_and_their_grace() -> None:
    spec, container = pod(the("Deployment"))
    daemons = the("StatefulSet")
    url = environment(container)["TICKWHEEL_URL"]
    name, service = daemons["metadata"]["name"], daemons["spec"]["serviceName"]
    hosts = [f"{name}-{number}.{service}:7355" for number in range(daemons["spec"]["replicas"])]
    assert url == f"tcp://{','.join(hosts)}"
    assert url in (KUBERNETES / "services.yaml").read_text()
    assert url in (DEPLOY / "README.md").read_text()
    _is_a_command(shlex.join(container["args"]))
    grace = container["args"][container["args"].index("--grace") + 1]
    assert spec["terminationGracePeriodSeconds"] >= int(grace.removesuffix("s")) + 5
    module = container["args"][1].partition(":")[0]
    assert (WORKERS / f"{module}.py").is_file()
    [generated] = yaml.safe_load((WORKERS / "kustomization.yaml").read_text())["configMapGenerator"]
    [volume] = spec["volumes"]
    assert volume["configMap"]["name"] == generated["name"]
    [mount] = container["volumeMounts"]
    assert environment(container)["PYTHONPATH"] == mount["mountPath"]
    scaled = the("ScaledObject")["spec"]["scaleTargetRef"]["name"]
    assert scaled == the("Deployment")["metadata"]["name"]


def test_the_guide_makes_every_secret_that_is_used() -> None:
    guide = (DEPLOY / "README.md").read_text().replace("\\\n", " ")
    made = {
        name: set(re.findall(r"--from-(?:literal|file)=([\w.]+)", rest))
        for name, rest in re.findall(r"create secret generic (\S+) (.*)", guide)
    }
    used: dict[str, set[str]] = {}
    for kind in ("StatefulSet", "Deployment"):
        spec, container = pod(the(kind))
        for element in container["env"]:
            if secret := element.get("valueFrom", {}).get("secretKeyRef"):
                used.setdefault(secret["name"], set()).add(secret["key"])
        for volume in spec["volumes"]:
            if secret := volume.get("secret"):
                keys = {item["key"] for item in secret["items"]}
                used.setdefault(secret["secretName"], set()).update(keys)
    assert used == made
    for path in re.findall(r"apply -[fk] (\S+)", guide):
        assert (ROOT / path).exists(), path


# --- KEDA -----------------------------------------------------------------------------------------

QUARTER_PAST, TEN_TO = "15m", "50m"
SERIES = {
    'tickwheel_load_tasks{hour="0",instance="a"}': 4500,
    'tickwheel_load_tasks{hour="1",instance="a"}': 60_000,
    'tickwheel_ready_tasks{topic="orders.close",group="closer",instance="a"}': 70,
    'tickwheel_in_flight_tasks{topic="orders.close",group="closer",instance="a"}': 7,
    # A standby that led before shows counts of then, and no states.
    'tickwheel_delivered_total{topic="orders.close",group="closer",instance="b"}': 9,
}
COMING = {
    # 4,500 in 45 minutes; the next hour does not count yet, then as 1,000 a minute.
    "this-hour": {QUARTER_PAST: 100, TEN_TO: 450, "58m": 900},
    "next-hour": {QUARTER_PAST: 0, TEN_TO: 1000, "58m": 1000},
    "backlog": {QUARTER_PAST: 77, TEN_TO: 77, "58m": 77},
}


def test_workers_are_scaled_by_the_upcoming_load(tmp_path: Path) -> None:
    need_prometheus()
    triggers = the("ScaledObject")["spec"]["triggers"]
    assert [trigger["name"] for trigger in triggers] == list(COMING)
    tests = [
        {"expr": trigger["metadata"]["query"], "eval_time": at,
         "exp_samples": [{"labels": "{}", "value": value}]}
        for trigger in triggers
        for at, value in COMING[trigger["name"]].items()
    ]  # fmt: skip
    series = [{"series": name, "values": f"{value}x60"} for name, value in SERIES.items()]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    promtool("test", "rules", str(path))


def test_every_trigger_has_the_fields_of_its_scaler() -> None:
    for trigger in the("ScaledObject")["spec"]["triggers"]:
        assert trigger["type"] == "prometheus"
        assert {"serverAddress", "query", "threshold"} == trigger["metadata"].keys()
        assert float(trigger["metadata"]["threshold"]) > 0
        assert isinstance(trigger["metadata"]["threshold"], str), "KEDA takes texts"
