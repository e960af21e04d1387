"""Settings: flags over environment over file; what is wrong is named."""

from __future__ import annotations

import ast
import errno
import json
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from support.stand_in import stand_in
from tickwheel.cli.app import app
from tickwheel.errors import BadRequest
from tickwheel.protocol import encode
from tickwheel.server import daemon as main
from tickwheel.server.access import tokens
from tickwheel.server.settings import Settings, load, split_address
from tickwheel.server.tcp.connection import hello_answer


def test_defaults_need_no_configuration() -> None:
    settings = load()
    assert settings.store == "sqlite:///tickwheel.db"
    assert settings.listen == "tcp://127.0.0.1:7355"
    assert settings.engine().slots == 3600
    assert settings.limits().body_bytes_max == 1024 * 1024


def test_flags_win_over_the_environment_which_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tickwheel.toml"
    file.write_text('lease_default_s = 1\nretry_max = 2\nnode = "file"\n')
    monkeypatch.setenv("TICKWHEEL_RETRY_MAX", "3")
    monkeypatch.setenv("TICKWHEEL_NODE", "environment")
    settings = load(str(file), {"node": "flag", "serve_token": None})
    assert (settings.lease_default_s, settings.retry_max, settings.node) == (1, 3, "flag")


@pytest.mark.parametrize("name", ["TICKWHEEL_RETRY_MAX", "tickwheel_retry_max"])
def test_the_environment_alone_is_enough_in_any_letters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load().retry_max != 3
    monkeypatch.setenv(name, "3")
    assert load().retry_max == 3


DAEMONS_OWN_FILES = {"TICKWHEEL_FILE_MODE", "TICKWHEEL_HISTORY_DIR", "TICKWHEEL_TOKENS_FILE"}
"""Commands that need no daemon work on its files: they find them by the daemon's own setting."""


def names_that_clients_read() -> set[str]:
    """Names of environment variables in the code of the client and of the command line."""
    package = Path(main.__file__).parents[1]
    folders = ("client", "sync", "cli", "reports", "demo")
    sources = [path for name in folders for path in (package / name).rglob("*.py")]
    trees = [ast.parse(path.read_text()) for path in sources]
    texts = {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {text for text in texts if re.fullmatch("TICKWHEEL_[A-Z_]+[A-Z]", text)}


def test_client_variables_are_not_daemon_settings() -> None:
    """What a shell has for its clients says nothing to a daemon that starts there."""
    settings = {f"TICKWHEEL_{name.upper()}" for name in Settings.model_fields}
    clients = names_that_clients_read()
    assert {"TICKWHEEL_URL", "TICKWHEEL_TOKEN", "TICKWHEEL_CLIENT_CERT"} <= clients
    assert settings & clients == DAEMONS_OWN_FILES


def test_serve_ignores_the_clients_token(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(main, "run", lambda settings: seen.append(settings) or 0)
    monkeypatch.setenv("TICKWHEEL_TOKEN", "of-a-client")
    run = CliRunner().invoke
    assert run(app, ["serve"]).exit_code == 0
    assert run(app, ["serve", "--serve-token", "of-the-daemon"]).exit_code == 0
    assert [item.serve_token for item in seen] == [None, "of-the-daemon"]
    refused = run(app, ["--token", "meant-for-whom", "serve"])
    assert isinstance(refused.exception, BadRequest)
    assert "--serve-token" in str(refused.exception)
    assert len(seen) == 2


def test_a_token_of_the_file_cannot_be_the_serve_token(tmp_path: Path) -> None:
    """Also one that was revoked, and is in the file no more."""
    path = tmp_path / "tokens.json"
    grants = tokens.parse_scopes(["produce=orders.*"])
    made, text = tokens.create(path, "producer", grants, 1, None)
    file = {"tokens_file": str(path)}
    for revoke in (False, True):
        if revoke:
            tokens.revoke(path, made.id)
        with pytest.raises(BadRequest, match="serve_token must not have the form") as caught:
            load(None, {**file, "serve_token": text})
        assert text not in str(caught.value)
    assert load(None, {**file, "serve_token": "one-of-its-own"}).serve_token == "one-of-its-own"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"slots": 1}, ["slots", "2", "1"]),
        ({"delay_levels": "1s 2x"}, ["delay_levels", "level 2", "2x"]),
        ({"delay_levels": " "}, ["delay_levels", "not 0 ", "256"]),
        ({"delay_levels": "1s " * 257}, ["delay_levels", "not 257 ", "256"]),
        ({"delay_levels": "2d", "delay_max_s": 86400}, ["delay_levels", "172800000", "86400"]),
        ({"retry_factor": 0.5}, ["retry_factor", "0.5"]),
        ({"listen": "nowhere"}, ["listen", "nowhere"]),
        ({"http": "127.0.0.1:99999"}, ["http", "99999"]),
        ({"log_format": "xml"}, ["log_format", "xml"]),
        ({"no_such_thing": "1"}, ["no_such_thing"]),
        ({"connections_max": "many"}, ["connections_max", "many"]),
    ],
)
def test_an_invalid_setting_is_named_with_its_value(
    overrides: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(BadRequest) as caught:
        load(None, overrides)
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize("name", Settings.model_fields)
def test_each_setting_can_be_set_to_its_default_as_text(name: str) -> None:
    """So that `--set` can set each."""
    value = getattr(load(), name)
    if value is not None:
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        assert getattr(load(None, {name: text}), name) == value


def test_a_table_is_set_as_json_and_joins_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tickwheel.toml"
    file.write_text('[retry_policies.file]\nkind = "none"\n')
    settings = load(str(file), {"retry_policies": '{"flag": {"kind": "none"}}'})
    assert sorted(settings.retry_policies) == ["file", "flag"]
    for text, said in (("{x", "must be JSON"), ("", "must be JSON"), ("[1]", "valid dictionary")):
        with pytest.raises(BadRequest, match=f"setting retry_policies.* {said}"):
            load(None, {"retry_policies": text})


MAY_BE_BLANK = {"http_hosts", "otlp_endpoint", "push_allow", "route"}


def names_of(*kinds: type) -> list[str]:
    """Return the settings whose value can be of these kinds."""
    fields = Settings.model_fields.items()
    return [name for name, f in fields if {f.annotation, *get_args(f.annotation)} & {*kinds}]


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize("name", sorted({*names_of(str)} - MAY_BE_BLANK))
def test_a_blank_text_is_refused_by_name(name: str, blank: str) -> None:
    with pytest.raises(BadRequest, match=name):
        load(None, {name: blank})


@pytest.mark.parametrize("number", ["inf", "nan", "1e300", "9" * 30])
@pytest.mark.parametrize("name", names_of(int, float))
def test_an_extreme_number_is_refused_by_name_or_can_be_announced(name: str, number: str) -> None:
    try:
        settings = load(None, {name: number})
    except BadRequest as error:
        assert name in error.message
        return
    assert name.endswith("_per_s")
    assert encode((hello_answer(settings, settings.limits(), 0, {}),)) and settings.engine()


@pytest.mark.parametrize(("seconds", "expected_ms"), [(2.01, 2010), (1.0001, 1001)])
def test_seconds_are_rounded_up_to_milliseconds(seconds: float, expected_ms: int) -> None:
    names = (
        "delay_max", "within_max", "lease_max", "retry_base", "retry_cap", "death_retry_base",
        "death_retry_cap", "transaction_check", "transaction_check_every", "bulk_remembered",
        "transactions_remembered", "resident_horizon", "lease_checkpoint", "reconnect_grace",
    )  # fmt: skip
    settings = Settings(delay_levels="1s", **{f"{name}_s": seconds for name in names})
    engine, limits, retry = settings.engine(), settings.limits(), settings.default_policy
    values = [limits.delay_ms_max, limits.within_ms_max, limits.lease_ms_max]
    values += [retry.base_ms, retry.cap_ms, *(getattr(engine, f"{n}_ms") for n in names[5:])]
    assert dict(zip(names, values, strict=True)) == dict.fromkeys(names, expected_ms)


@pytest.mark.parametrize("value", ["true", pytest.param("false", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted({*Settings.model_fields} - {*names_of(bool)}))
def test_a_boolean_is_no_value_of_another_kind(name: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "tickwheel.toml"
    file.write_text(f"{name} = {value}\n")
    with pytest.raises(BadRequest, match=rf"setting {name}: .* \(got |setting {name}: [^(]*$"):
        load(str(file))


def test_disk_shares_must_be_in_order() -> None:
    settings = load()
    assert (settings.history_disk_warn, settings.history_disk_clean, settings.disk_refuse) == (
        0.75,
        0.85,
        0.90,
    )
    load(None, {"disk_refuse": 0.5})  # without history nothing is cleaned first
    with pytest.raises(BadRequest) as caught:
        load(None, {"disk_refuse": 0.5, "history_dir": "h"})
    assert caught.value.message == (
        "history_disk_clean (0.85) must not be above disk_refuse (0.5); 1 is off"
    )
    with pytest.raises(BadRequest, match=r"history_disk_warn \(0.9\) must not be above"):
        load(None, {"history_disk_warn": 0.9, "history_dir": "h"})
    off = {"history_disk_clean": 1, "history_disk_warn": 0.9, "disk_refuse": 0.9}
    assert load(None, {**off, "history_dir": "h"}).history_disk_clean == 1
    for name in ("history_disk_warn", "history_disk_clean", "disk_refuse"):
        for wrong in (0, 1.1, "most"):
            with pytest.raises(BadRequest, match=name):
                load(None, {name: wrong})


def test_a_missing_or_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="the file does not exist"):
        load(str(tmp_path / "absent.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("slots = = 5")
    with pytest.raises(BadRequest, match=r"broken\.toml"):
        load(str(broken))


def test_addresses_are_parsed() -> None:
    assert split_address("tcp://10.1.2.3:7355", "listen") == ("10.1.2.3", 7355)
    assert split_address("[::1]:80", "http") == ("::1", 80)
    for wrong in ("localhost", ":5", "a:b", "a:²", "tcp://x:70000", "a:" + "9" * 5_000):
        with pytest.raises(ValueError, match="listen must be HOST:PORT"):
            split_address(wrong, "listen")


def test_the_token_is_not_shown() -> None:
    assert "sesam" not in repr(load(None, {"serve_token": "sesam"}))
    with pytest.raises(BadRequest, match="serve_token") as caught:
        load(None, {"serve_token": 1234567})
    assert "1234567" not in str(caught.value)


@pytest.mark.parametrize(
    ("soft", "hard", "http", "raised", "connections_max"),
    [
        (1024, 1 << 20, None, 1 << 20, 4096),
        (1 << 20, 1 << 20, None, None, 4096),
        (256, 256, None, None, 192),
        (256, 1024, None, 1024, 960),
        (256, 1024, "127.0.0.1:0", 1024, 896),
        (64, 64, None, None, 1),
        (1024, resource.RLIM_INFINITY, None, 4160, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, None, 4096),
        (4160, 4160, None, None, 4096),
        (4159, 4159, None, None, 4095),
    ],
)
def test_connections_leave_descriptors_to_the_daemon(
    soft: int,
    hard: int,
    http: str | None,
    raised: int | None,
    connections_max: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, int]] = []
    logged: list[str] = []
    log: Any = SimpleNamespace(warning=lambda event, **_: logged.append(event))
    system = stand_in(
        resource,
        getrlimit=lambda _: (soft, hard),
        setrlimit=lambda _, limits: made.append(limits),
    )
    monkeypatch.setattr(main, "resource", system)
    settings = main.within_file_limit(Settings(http=http), log)
    assert settings.connections_max == settings.limits().connections_max == connections_max
    assert made == ([] if raised is None else [(raised, hard)])
    assert logged == ([] if connections_max == 4096 else ["few_file_descriptors"])


def test_failed_accepts_are_logged_at_a_limited_rate() -> None:
    logged: list[str] = []
    passed_on: list[str] = []
    now_s = [0.0]
    log: Any = SimpleNamespace(warning=lambda event, **_: logged.append(event))
    loop: Any = SimpleNamespace(default_exception_handler=lambda c: passed_on.append(c["message"]))
    handle = main.LoopErrors(log, lambda: now_s[0])
    for now_s[0] in (0.0, 0.1, 59.9, 60.0, 60.1):
        handle(loop, {"message": "accept", "exception": OSError(errno.EMFILE, "too many")})
        handle(loop, {"message": "other", "exception": ValueError()})
        handle(loop, {"message": "alone"})
    assert logged == ["no_file_descriptors"] * 2
    assert passed_on == ["other", "alone"] * 5
