"""What `deploy/` has is whole, and does what it says where that can be had on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

from scripts import settings_page
from support.daemon import Daemon
from support.deployed import COMPOSE
from tickwheel.server.settings import Settings, load

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
EXPOSURE_MAX = 2.0
"""systemd's own scale: 10 is a service without any restriction."""


@pytest.mark.parametrize("name", settings_page.FILES)
def test_generated_settings_files_are_current(name: str) -> None:
    """After a change: .venv/bin/python scripts/settings_page.py"""
    assert (ROOT / name).read_text() == settings_page.FILES[name]()


def test_every_setting_has_a_meaning() -> None:
    assert Settings.model_fields.keys() - settings_page.meanings().keys() == set()


def test_each_setting_has_its_own_explanation() -> None:
    """The page and the sample show each setting alone."""
    means = settings_page.meanings()
    told: dict[str, str] = {}
    for name in Settings.model_fields:
        assert means[name] not in told, f"{name} and {told[means[name]]} say the same"
        told[means[name]] = name
        vague = re.search(
            r"(^|limit: )(the same|their |its |such a|so often)|: the same", means[name]
        )
        assert vague is None, f"{name}: {means[name]}"


@pytest.mark.parametrize("name", settings_page.FILES)
def test_every_default_is_a_value_that_a_user_can_read(name: str) -> None:
    text = settings_page.FILES[name]()
    assert not re.findall(r"Undefined|<\w+ object|\bfunction\b.*\bat 0x|<class", text)


def test_the_sample_has_every_setting_and_gives_the_defaults() -> None:
    text = (DEPLOY / "tickwheel.toml").read_text()
    named = set(re.findall(r"^(?:# )?(\w+)(?:\.\w+)? =", text, re.MULTILINE))
    assert named == Settings.model_fields.keys()
    given, usual = load(str(DEPLOY / "tickwheel.toml"), {}), load(None, {})
    assert given.model_dump() == usual.model_dump()
    # What is commented out may be used as it stands, too.
    further = [line[2:] for line in text.splitlines() if line.startswith("# retry_policies.")]
    tomllib.loads("\n".join(further))


def test_a_daemon_starts_with_the_sample(tmp_path: Path) -> None:
    with Daemon(tmp_path, args=("--config", str(DEPLOY / "tickwheel.toml"))) as daemon:
        assert daemon.url


# --- make and the README's picture ---------------------------------------------------------------

READ_BY_SCRIPTS = sorted(
    {
        name
        for path in (ROOT / "scripts").iterdir()
        if path.is_file()
        for name in re.findall(r"\$\{([A-Z]+):?-", path.read_text())
    }
)
"""Variables by which a user tells a script something."""


@pytest.mark.parametrize("name", READ_BY_SCRIPTS)
def test_make_passes_the_callers_variables_on(tmp_path: Path, name: str) -> None:
    more = tmp_path / "more.mk"
    more.write_text(f'tell-it:\n\t@echo "$${name}"\n')
    # Not the make that runs the tests: below another one it says more.
    above = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    finished = subprocess.run(
        ["make", "-f", "Makefile", "-f", str(more), "tell-it"], cwd=ROOT, capture_output=True,
        text=True, check=True, env={**above, name: "of-the-caller"},
    )  # fmt: skip
    assert finished.stdout == "of-the-caller\n"


def test_texts_of_the_picture_fit_their_boxes() -> None:
    """A letter of a usual font without serifs is 0.55 of its size wide, on average and at most."""
    text = (ROOT / "docs" / "wheel.svg").read_text()
    boxes = re.findall(r'<rect [^>]*width="(\d+)"[^>]*class="b"/>(.*)', text)
    words = [(int(width), *item) for width, rest in boxes for item in _TEXT.findall(rest)]
    assert len(words) >= 6
    for width, kind, said in words:
        size = {"t": 14, "s": 12}[kind]
        assert len(said) * size * 0.55 <= width - 8, said


_TEXT = re.compile(r'<text [^>]*class="(\w)">([^<]*)</text>')


# --- systemd -------------------------------------------------------------------------------------

UNIT = (DEPLOY / "tickwheel.service").read_text()


def with_credentials(unit: str) -> str:
    """The unit with its lines about credentials, which are comments until somebody has some."""
    return re.sub(r"^#(?=LoadCredential=|Environment=)", "", unit, flags=re.MULTILINE)


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine"
)


@needs_systemd
@pytest.mark.parametrize("text", [UNIT, with_credentials(UNIT)], ids=["as it is", "credentials"])
def test_systemd_accepts_the_unit(tmp_path: Path, text: str) -> None:
    command = shutil.which("true")
    unit = tmp_path / "tickwheel.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={command}", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
def test_systemd_finds_little_that_the_unit_may_do() -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(DEPLOY / "tickwheel.service")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    match = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert match is not None, done.stderr
    assert float(match[1]) <= EXPOSURE_MAX


def test_the_unit_does_not_hide_proc() -> None:
    """A leader on the same machine that cannot be seen in /proc would look dead to its standby."""
    settings = [line for line in UNIT.splitlines() if not line.startswith("#")]
    assert not [line for line in settings if line.startswith(("ProtectProc=", "ProcSubset="))]
    assert not [line for line in settings if "@resources" in line]


# --- containers ----------------------------------------------------------------------------------


def test_the_image_has_a_user_a_volume_and_a_health_check() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    words = [line.split()[0] for line in lines if re.match(r"[A-Z]+ ", line)]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert {"HEALTHCHECK", "VOLUME", "EXPOSE"} <= set(words)
    user = next(line.split()[1] for line in lines if line.startswith("USER"))
    assert int(user) > 0
    # Its settings are ones that there are.
    named = {name.lower() for name in re.findall(r"TICKWHEEL_(\w+)=", "\n".join(lines))}
    assert named
    assert named <= Settings.model_fields.keys()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", "\n".join(lines), re.MULTILINE)
    for path in " ".join(copied).split():
        assert (ROOT / path).exists(), path


EXPOSED = set(
    re.findall(r"^EXPOSE (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[0].split()
)


@pytest.mark.parametrize("name", [str(path.relative_to(ROOT)) for path in COMPOSE])
def test_compose_files_name_existing_files(name: str) -> None:
    path = ROOT / name
    services = yaml.safe_load(path.read_text())["services"]
    for service in services.values():
        if "build" in service:
            context = path.parent / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).exists()
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (path.parent / source).exists(), source
        for setting in service.get("environment", {}):
            if setting.startswith("TICKWHEEL_"):
                assert setting.removeprefix("TICKWHEEL_").lower() in Settings.model_fields
        published = {port.rpartition(":")[2] for port in service.get("ports", ())}
        if "build" in service:
            assert published == EXPOSED, "what the image listens on is published, all of it"
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nothing is published to everybody"
    if shutil.which("docker") and _compose_works():
        done = subprocess.run(
            ["docker", "compose", "-f", str(path), "config", "--quiet"],
            capture_output=True, text=True, check=False, env={"TICKWHEEL_SERVE_TOKEN": "x"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def _compose_works() -> bool:
    done = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return done.returncode == 0


# --- the packages --------------------------------------------------------------------------------

BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


@pytest.mark.slow
def test_sdist_and_wheel_install_into_an_empty_environment(tmp_path: Path) -> None:
    """The wheel is made from the sdist: what that has not is in neither. Only what is installed
    here is needed: nothing is fetched."""
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file() and name.startswith(("tickwheel/", "pyproject", "README", "LI")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    sdist = _build("build_sdist", source, tmp_path / "dist")
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = _build("build_wheel", unpacked, tmp_path / "dist")

    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True
    )
    command = tmp_path / "empty" / "bin" / "tickwheel"
    finished = subprocess.run([command, "serve"], capture_output=True, text=True, check=False)
    assert finished.stderr.count("\n") == 1
    assert "pip install 'tickwheel[cli]'" in finished.stderr
    metadata = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(m.metadata('tickwheel'))"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "License-Expression: Apache-2.0" in metadata
    assert "Provides-Extra: all" in metadata
    # With the packages that are here it runs: nothing of the repository is missing.
    here = next(path for path in sys.path if path.endswith("site-packages"))
    site = next((tmp_path / "empty" / "lib").glob("python*")) / "site-packages"
    (site / "others.pth").write_text(f"{here}\n")
    with Daemon(tmp_path, store="memory:") as daemon:
        enqueued = subprocess.run(
            [command, "--url", daemon.url, "enqueue", "t", "x"],
            capture_output=True, text=True, cwd=tmp_path, check=False,
        )  # fmt: skip
        assert enqueued.returncode == 0, enqueued.stderr
    lua = list(site.glob("tickwheel/persistence/redis/lua/*.lua"))
    assert lua
    assert (site / "tickwheel" / "py.typed").exists()


def _build(what: str, folder: Path, out: Path) -> Path:
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(out)],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]
