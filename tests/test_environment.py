"""Environment variables: those of the product are known everywhere, and mistakes are refused."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from tickwheel import environment
from tickwheel.cli import app
from tickwheel.client.connection import Trust
from tickwheel.errors import BadRequest
from tickwheel.server.settings import Settings, load

PACKAGE = Path(environment.__file__).parent
LINKS = {
    "TICKWHEEL_SERVICE_HOST": "10.0.0.1",
    "TICKWHEEL_SERVICE_PORT": "7355",
    "TICKWHEEL_SERVICE_PORT_CLIENTS": "7355",
    "TICKWHEEL_PORT": "tcp://10.0.0.1:7355",
    "TICKWHEEL_PORT_7355_TCP": "tcp://10.0.0.1:7355",
    "TICKWHEEL_PORT_7355_TCP_PROTO": "tcp",
    "TICKWHEEL_PORT_7355_TCP_PORT": "7355",
    "TICKWHEEL_PORT_7355_TCP_ADDR": "10.0.0.1",
    "TICKWHEEL_NODES_SERVICE_HOST": "None",
    "TICKWHEEL_NODES_PORT_53_UDP": "udp://[fd00::1]:53",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(environment.PREFIX):
            monkeypatch.delenv(name)


def check(*, is_installed: bool = True) -> None:
    environment.check(lambda: Settings.model_fields if is_installed else None)


def test_every_name_in_the_code_is_known() -> None:
    texts = {
        node.value
        for path in PACKAGE.rglob("*.py")
        if environment.PREFIX in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {text for text in texts if re.fullmatch("TICKWHEEL_[A-Z_]*[A-Z]", text)}
    settings = {f"{environment.PREFIX}{name.upper()}" for name in Settings.model_fields}
    assert len(names) > 8
    assert names <= environment.KNOWN | settings


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TICKWHEEL_BACKUP_DAILY_HR", "TICKWHEEL_BACKUP_DAILY_HOUR"),
        ("tickwheel_lisen", "TICKWHEEL_LISTEN"),
        ("TICKWHEEL_TOKN", "TICKWHEEL_TOKEN"),
    ],
)
def test_a_mistyped_name_is_refused_by_daemon_and_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "3")
    text = f"there is no environment variable {name}; did you mean {meant}?"
    with pytest.raises(BadRequest) as refused:
        load()
    assert refused.value.message == text
    assert app.run(["status"]) != 0
    assert text in capsys.readouterr().err


def test_names_of_scripts_around_the_product_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in environment.SURROUNDING:
        monkeypatch.setenv(name, "/opt/tickwheel")
    check()
    check(is_installed=False)
    settings = {f"{environment.PREFIX}{name.upper()}" for name in Settings.model_fields}
    assert not environment.SURROUNDING & (environment.KNOWN | settings)


def test_daemon_settings_do_not_resemble_client_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that do not know the daemon's settings run beside it, in its environment."""
    for name in Settings.model_fields:
        monkeypatch.setenv(f"TICKWHEEL_{name.upper()}", "1")
    environment.check(lambda: None)


def test_client_only_installs_refuse_misspelt_client_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TICKWHEEL_LOG_LEVEL", "info")
    check(is_installed=False)
    monkeypatch.setenv("TICKWHEEL_TOKN", "x")
    with pytest.raises(BadRequest, match="did you mean TICKWHEEL_TOKEN"):
        check(is_installed=False)


def test_variables_of_daemons_and_clients_are_known_to_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TICKWHEEL_LOG_LEVEL", "warning")
    for name in environment.KNOWN:
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("TICKWHEEL_TEST_CLOCK")
    check()
    assert load().log_level == "warning"


def test_kubernetes_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    check()
    assert load().node


@pytest.mark.parametrize("name", LINKS)
def test_kubernetes_variables_are_recognised_by_value(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "on, please")
    with pytest.raises(BadRequest, match=f"no environment variable {name}"):
        check()


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.setenv(f"{environment.PREFIX}{name.upper()}", "")
    for name in environment.KNOWN:
        monkeypatch.setenv(name, "")
    assert load() == Settings.model_construct(**load().model_dump())
    assert load().retry_max == Settings.model_fields["retry_max"].default
    assert environment.value("TICKWHEEL_CA") is None
    Trust().context()


@pytest.mark.parametrize("text", ["{x", "[" * 5_000, "9" * 5_000])
def test_a_variable_with_an_odd_value_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    refused = set()
    for name in Settings.model_fields:
        with monkeypatch.context() as patch:
            patch.setenv(f"{environment.PREFIX}{name.upper()}", text)
            try:
                load()
            except BadRequest as error:
                assert name in error.message
                refused.add(name)
    assert {"retry_policies", "retry_max", "insecure", "log_level", "listen"} <= refused


def test_variables_are_read_only_through_environment() -> None:
    """``os.environ.get("TICKWHEEL_…")`` would take an empty one for a value."""
    names = [
        path.name
        for folder in ("client", "cli", "contrib", "sync.py", "inside.py")
        for path in ((PACKAGE / folder).rglob("*.py") if "." not in folder else [PACKAGE / folder])
        if re.search(r"environ(?:\.get\(|\[)\"TICKWHEEL_[A-Z_]+\"\)", path.read_text())
    ]
    assert not names
