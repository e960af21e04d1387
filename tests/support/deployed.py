"""Read the files of ``deploy/``: Kubernetes objects and compose services."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
WORKERS = KUBERNETES / "workers"
COMPOSE = (
    DEPLOY / "compose.yaml",
    DEPLOY / "compose-cluster.yaml",
    DEPLOY / "compose-sentinel.yaml",
    ROOT / "grafana" / "compose.yaml",
)
MANIFESTS = tuple(
    path
    for path in sorted(KUBERNETES.rglob("*.yaml"))
    if path.name != "kustomization.yaml"
)  # fmt: skip


def objects(kind: str) -> list[dict[str, Any]]:
    """Return all objects of a kind in the manifests."""
    items = (item for path in MANIFESTS for item in yaml.safe_load_all(path.read_text()))
    return [entry for entry in items if entry["kind"] == kind]


def the(kind: str, name: str = "") -> dict[str, Any]:
    """Return the only object of a kind, or the one with this name."""
    [found] = [item for item in objects(kind) if not name or item["metadata"]["name"] == name]
    return found


def pod(workload: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod specification of an object and its only container."""
    spec = workload["spec"]["template"]["spec"]
    [container] = spec["containers"]
    return spec, container


def environment(container: dict[str, Any]) -> dict[str, str]:
    """Return the environment that Kubernetes would set.

    Values from a Secret or the pod itself are ``<their name>``; ``$(NAME)`` is replaced by an
    earlier value."""
    values: dict[str, str] = {}
    for entry in container["env"]:
        value = entry.get("value", f"<{entry['name']}>")
        for name, earlier in values.items():
            value = value.replace(f"$({name})", earlier)
        values[entry["name"]] = value
    return values


def services(path: Path) -> dict[str, dict[str, Any]]:
    """Return the services of a compose file, with what they inherit by ``extends``."""
    return {name: _whole(path, one) for name, one in _read(path)["services"].items()}


def _whole(path: Path, service: dict[str, Any]) -> dict[str, Any]:
    above = service.get("extends")
    if above is None:
        return service
    extended = services(path.parent / above["file"])[above["service"]]
    whole = {**extended, **{name: value for name, value in service.items() if name != "extends"}}
    # The last mount at a path wins.
    mounted = [*extended.get("volumes", ()), *service.get("volumes", ())]
    whole["volumes"] = list({item.split(":")[1]: item for item in mounted}.values())
    return whole


def _read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = yaml.safe_load(path.read_text())
    return result


def texts() -> Iterator[tuple[str, str]]:
    """Return (path, text) of every hand-written file of ``deploy/``."""
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file() and path.name != "tickwheel.toml" and "__pycache__" not in path.parts:
            yield str(path.relative_to(ROOT)), path.read_text()
