"""What people who join expect to find in the root is there, and says what this repository does."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from tickwheel.cli.app import app
from tickwheel.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git clone: there is no list of files to look through")
    return [name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()]


# --- .editorconfig -------------------------------------------------------------------------------

INDENTED_OTHERWISE = (".py", ".md")
"""ruff formats Python; what Markdown shows in blocks is indented by its own language's rules."""


def test_every_tracked_file_follows_the_editorconfig() -> None:
    sections = _sections((ROOT / ".editorconfig").read_text())
    broken = []
    for name in _tracked():
        data = (ROOT / name).read_bytes()
        if b"\0" not in data and not name.endswith(".gz"):
            broken += [f"{name}: {wrong}" for wrong in _breaks(name, data, _rules(sections, name))]
    assert broken == []


@pytest.mark.parametrize(
    ("name", "data", "rule"),
    [
        ("a.py", b"x = 1", "insert_final_newline"),
        ("a.py", b"x = 1\r\n", "end_of_line"),
        ("a.md", b"two \nlines\n", "trim_trailing_whitespace"),
        ("a.md", b"\xff\n", "charset"),
        ("Makefile", b"all:\n    true\n", "indent_style"),
        ("a.js", b"{\n\treturn;\n}\n", "indent_style"),
        (".github/workflows/a.yml", b"a:\n   b: 1\n", "indent_size"),
        ("scripts/a", b"if true; then\n  true\nfi\n", "indent_size"),
    ],
)
def test_a_file_that_breaks_a_rule_is_found(name: str, data: bytes, rule: str) -> None:
    rules = _rules(_sections((ROOT / ".editorconfig").read_text()), name)
    assert [wrong.split(" ")[0] for wrong in _breaks(name, data, rules)] == [rule]


def _sections(text: str) -> list[tuple[list[str], dict[str, str]]]:
    """The patterns of each section with its rules, in the order of the file."""
    sections: list[tuple[list[str], dict[str, str]]] = []
    for line in text.splitlines():
        if line.startswith("["):
            sections.append((_without_braces(line[1:-1]), {}))
        elif sections and (rule := re.match(r"(\w+) = (\w[\w-]*)$", line)):
            sections[-1][1][rule[1]] = rule[2]
        else:
            assert not line or line.startswith("#") or line == "root = true", line
    return sections


def _without_braces(pattern: str) -> list[str]:
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        return [pattern]
    return [
        plain
        for choice in braces[1].split(",")
        for plain in _without_braces(pattern[: braces.start()] + choice + pattern[braces.end() :])
    ]


def _rules(sections: list[tuple[list[str], dict[str, str]]], name: str) -> dict[str, str]:
    """What holds for one file: a later section wins; a pattern without a slash means any folder."""
    rules: dict[str, str] = {}
    for patterns, own in sections:
        if any(
            fnmatchcase(name if "/" in pattern else Path(name).name, pattern)
            for pattern in patterns
        ):
            rules |= own
    return rules


def _breaks(name: str, data: bytes, rules: dict[str, str]) -> Iterator[str]:
    """Every rule that the file breaks, with the number of the line that breaks it."""
    assert rules["charset"] == "utf-8"
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError:
        yield "charset"
        return
    if data and lines[-1] and rules["insert_final_newline"] == "true":
        yield f"insert_final_newline {len(lines)}"
    size = rules.get("indent_size", "unset")
    step = 1 if size == "unset" or name.endswith(INDENTED_OTHERWISE) else int(size)
    # The further lines of a comment stand one column in: ` * like this`.
    is_even = re.compile(rf"(?: {{{step}}})*(?: (?=\*)|(?! ))")
    for number, line in enumerate(lines, 1):
        text = line.lstrip(" \t")
        indent = line[: len(line) - len(text)]
        if "\r" in line and rules["end_of_line"] == "lf":
            yield f"end_of_line {number}"
        elif line.endswith((" ", "\t")) and rules["trim_trailing_whitespace"] == "true":
            yield f"trim_trailing_whitespace {number}"
        elif (" " if rules["indent_style"] == "tab" else "\t") in indent:
            yield f"indent_style {number}"
        elif rules["indent_style"] == "space" and not is_even.match(line):
            yield f"indent_size {number}"


# --- .pre-commit-config.yaml ---------------------------------------------------------------------


def test_hooks_equal_the_parts_of_the_check() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (local,) = config["repos"]
    assert local["repo"] == "local", "what is fetched from elsewhere is declared a second time"
    entries = [hook["entry"].split() for hook in local["hooks"]]
    assert [script for script, _ in entries] == ["scripts/check"] * len(entries)
    assert [part for _, part in entries] == _parts_of_the_check()
    for hook, (_, part) in zip(local["hooks"], entries, strict=True):
        assert hook["id"] == part
        assert hook["language"] == "script"
        assert hook["pass_filenames"] is False, "a part looks at all files"
        assert re.search(hook["files"], "tickwheel/errors.py")
        assert re.search(hook["files"], "pyproject.toml"), "it has the settings of every part"


def test_a_part_of_the_check_runs_alone() -> None:
    """The quickest one. That each of them runs is what `make check` shows."""
    done = _check("format")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _parts_of_the_check() -> list[str]:
    """As the script itself names them to somebody who asks for another."""
    done = _check("format", "none-such")
    assert done.returncode == 2
    match = re.fullmatch(r"check: no part 'none-such'; there are: (.*)\n", done.stderr)
    assert match is not None, done.stderr
    return match[1].split()


def _check(*parts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts/check", *parts], capture_output=True, text=True, check=False, timeout=60
    )


# --- .github/workflows/test.yml ------------------------------------------------------------------

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
JOBS = WORKFLOW["jobs"]
OF_THE_MACHINE = "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
"""The one command that is neither of make nor of the repository."""


def test_the_versions_that_are_tested_are_those_that_are_claimed() -> None:
    """One that is tried ahead of its classifier may fail; it is allowed by ``requires-python``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    claimed = [
        name.removeprefix(prefix)
        for name in project["classifiers"]
        if re.fullmatch(prefix + r"3\.\d+", name)
    ]
    matrix = JOBS["linux"]["strategy"]["matrix"]
    assert matrix["python"] == claimed
    assert project["requires-python"] == f">={claimed[0]}"
    for tried in matrix["include"]:
        assert tried == {"python": tried["python"], "ahead": True}
        assert _minor(tried["python"]) > _minor(claimed[-1])
    assert JOBS["linux"]["continue-on-error"] == "${{ matrix.ahead == true }}"
    for step in _steps("actions/setup-python@"):
        assert step["with"]["python-version"] in {"${{ matrix.python }}", *claimed}


def test_workflow_commands_are_scripts_of_the_repository() -> None:
    commands = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    assert "make test" in commands
    for command in commands:
        if command == OF_THE_MACHINE:
            continue
        program, *arguments = shlex.split(command)
        if program == "make":
            makefile = (ROOT / "Makefile").read_text()
            for target in arguments:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), command
        elif program == ".venv/bin/python":
            folders = [ROOT / word for word in arguments if word.startswith("tests")]
            assert arguments[:2] == ["-m", "pytest"]
            assert folders, command
            assert all(folder.is_dir() for folder in folders), command
        else:
            assert program.startswith("scripts/"), command
            assert os.access(ROOT / program, os.X_OK), command


def test_the_workflow_may_read_only_and_ends_by_itself() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert WORKFLOW["concurrency"]["cancel-in-progress"] is True
    assert "github.ref" in WORKFLOW["concurrency"]["group"]
    for name, job in JOBS.items():
        assert "permissions" not in job, name
        assert 0 < job["timeout-minutes"] <= 60, name
    for step in _steps("actions/checkout@"):
        assert step["with"]["persist-credentials"] is False


def test_actions_are_few_and_have_a_major_version() -> None:
    used = {step["uses"] for step in _steps("")}
    assert {name.partition("@")[0] for name in used} == {"actions/checkout", "actions/setup-python"}
    assert len(used) == 2, "one version of each"
    assert all(re.fullmatch(r"[\w/-]+@v\d+", name) for name in used)


def _steps(action: str) -> list[dict[str, Any]]:
    """The steps that use an action whose name begins so."""
    return [
        step
        for job in JOBS.values()
        for step in job["steps"]
        if "uses" in step and step["uses"].startswith(action)
    ]


def _minor(version: str) -> int:
    return int(version.removeprefix("3."))


@pytest.mark.parametrize(
    ("user", "ci", "installs"),
    [("0", "", "as it is"), ("1000", "true", "by sudo"), ("1000", "", "not at all")],
    ids=["root", "CI", "somebody's machine"],
)
def test_setup_uses_sudo_without_asking_only_on_ci(
    user: str, ci: str, installs: str, tmp_path: Path
) -> None:
    """Nothing is installed here: the programs that would are stood in for, and Python is absent."""
    programs, said = tmp_path / "bin", tmp_path / "said"
    programs.mkdir()
    for name, does in {
        "id": f"echo {user}",
        "sudo": 'shift; BY_SUDO=" sudo" exec "$@"',
        "apt-get": f'echo "as${{BY_SUDO:-}} $DEBIAN_FRONTEND ${{RUNLEVEL:-}} $*" >>{said}',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    for name in ("dirname", "env", "ls", "sh", "tr", "true"):
        (programs / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup", tmp_path / "scripts")
    done = subprocess.run(
        [tmp_path / "scripts/setup", "dev"], env={"PATH": str(programs), "CI": ci},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith("Python 3.11 or newer is needed\n"), done.stderr
    calls = said.read_text().splitlines() if said.exists() else []
    if installs == "not at all":
        assert calls == []
        return
    update, install = calls
    begin = ["as", "sudo"] if installs == "by sudo" else ["as"]
    assert update.split() == [*begin, "noninteractive", "update", "-qq"]
    assert install.startswith(" ".join([*begin, "noninteractive", "1", "install "]))
    assert " redis-server " in install


# --- templates -----------------------------------------------------------------------------------

FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*_*.yml"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_valid(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 1
    for part in form["body"]:
        assert part["type"] in {"markdown", "textarea", "input", "dropdown"}
        assert part["attributes"]["value" if part["type"] == "markdown" else "label"]
        assert part["type"] != "dropdown" or len(part["attributes"]["options"]) > 1


def test_the_bug_report_asks_for_a_promise_that_is_made() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml").read_text())
    parts = {part.get("id"): part["attributes"] for part in form["body"]}
    promises = re.findall(
        r"^\d+\. \*\*(.+)\.\*\*", (ROOT / "docs/durability.md").read_text(), re.MULTILINE
    )
    assert len(promises) > 3
    assert parts["promise"]["options"] == ["None of them", *promises]


def test_commands_and_files_of_the_templates_exist() -> None:
    paths = [*FORMS, ROOT / ".github/PULL_REQUEST_TEMPLATE.md", ROOT / "CONTRIBUTING.md"]
    text = "\n".join(path.read_text() for path in paths)
    commands = re.findall(r"\btickwheel (?!--)([a-z]+)\b", text)
    assert {"stats", "show"} <= set(commands)
    assert set(commands) <= get_command(app).commands.keys()
    for name in re.findall(r"\b(?:docs/|scripts/)?[\w-]+\.md\b|\bscripts/\w+", text):
        assert (ROOT / name).exists() or (ROOT / "docs" / name).exists(), name


# --- a release -----------------------------------------------------------------------------------


def _committed(*paths: str) -> list[str]:
    command = ["git", "ls-tree", "-r", "--name-only", "-z", "HEAD", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_a_release_publishes_the_committed_package(tmp_path: Path) -> None:
    """Neither more nor less, although an earlier build has left a file; and under one version."""
    _tracked()  # without a clone there is no last commit
    (tmp_path / "tickwheel-0.0.1-py3-none-any.whl").touch()
    done = subprocess.run(
        [ROOT / "scripts/package", tmp_path], capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name = f"tickwheel-{__version__}"
    assert sorted(os.listdir(tmp_path)) == [f"{name}-py3-none-any.whl", f"{name}.tar.gz"]
    committed = _committed("tickwheel", "LICENSE")
    deployed = {name for name in _committed("deploy", "grafana")
                if name.startswith("deploy/") or not name.endswith(".py")}  # fmt: skip
    assert {"deploy/tickwheel.service", "grafana/prometheus/alerts.yml"} <= deployed
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl") as wheel:
        packed = wheel.namelist()
    info = f"{name}.dist-info/"
    modules = {*committed} - {"LICENSE"}
    copies = {f"tickwheel/deployment_files/{name}" for name in deployed}
    assert {path for path in packed if not path.startswith(info)} == modules | copies
    assert f"{info}licenses/LICENSE" in packed
    with tarfile.open(tmp_path / f"{name}.tar.gz") as sdist:
        files = {path.name.removeprefix(f"{name}/") for path in sdist if path.isfile()}
    assert {*committed, *deployed} <= files
    assert not [path for path in files if path.startswith("tests/")]


def test_the_changelog_starts_with_the_current_version() -> None:
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "Unreleased" or heads[0].startswith(f"{__version__} (")
    for head in heads[1:]:
        assert re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", head), head


def test_vectors_of_others_name_their_source_and_their_licence() -> None:
    folder = ROOT / "tests/vectors"
    readme = (folder / "README.md").read_text("utf-8")
    licences = readme.partition("## Licences")[2]
    for path in sorted(folder.glob("*.json")):
        given = json.loads(path.read_text("utf-8"))
        row = next(line for line in readme.splitlines() if f"`{path.name}`" in line)
        assert given["source"] and given["copyright"] and given["rows"], path.name
        assert f"| {given['license']} |" in row and f"{given['license']} (" in licences, path.name
