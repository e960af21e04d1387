"""Tests of the tests: a bug is seeded into a copy of the repository, and must be found there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mutations.access_mutants import ACCESS_MUTANTS
from mutations.bulk_mutants import BULK_MUTANTS
from mutations.client_mutants import CLIENT_MUTANTS
from mutations.delivery_mutants import DELIVERY_MUTANTS
from mutations.filter_mutants import FILTER_MUTANTS
from mutations.history_mutants import HISTORY_MUTANTS
from mutations.http_mutants import HTTP_MUTANTS
from mutations.input_mutants import INPUT_MUTANTS
from mutations.key_mutants import KEY_MUTANTS
from mutations.limits_mutants import LIMITS_MUTANTS
from mutations.mutants import MUTANTS as OTHER_MUTANTS
from mutations.mutants import Mutant
from mutations.order_mutants import ORDER_MUTANTS
from mutations.ownership_mutants import OWNERSHIP_MUTANTS
from mutations.reading_mutants import READING_MUTANTS
from mutations.report_mutants import REPORT_MUTANTS
from mutations.reset_mutants import RESET_MUTANTS
from mutations.schedule_mutants import SCHEDULE_MUTANTS
from mutations.topic_mutants import TOPIC_MUTANTS
from mutations.transaction_mutants import TRANSACTION_MUTANTS

MUTANTS = (
    *OTHER_MUTANTS, *ACCESS_MUTANTS, *CLIENT_MUTANTS, *DELIVERY_MUTANTS, *FILTER_MUTANTS,
    *HISTORY_MUTANTS, *HTTP_MUTANTS, *INPUT_MUTANTS, *KEY_MUTANTS, *LIMITS_MUTANTS,
    *ORDER_MUTANTS, *OWNERSHIP_MUTANTS, *READING_MUTANTS, *REPORT_MUTANTS, *RESET_MUTANTS,
    *SCHEDULE_MUTANTS, *TOPIC_MUTANTS, *TRANSACTION_MUTANTS, *BULK_MUTANTS,
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
FAILED = 1
"""pytest's exit code when tests ran and failed; anything else is not a finding."""


def copy(folder: Path) -> Path:
    """What the tests need of the repository; compiled modules come along, being valid still."""
    for name in ("tickwheel", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def seed(folder: Path, mutant: Mutant) -> None:
    for edit in mutant.edits:
        path = folder / edit.path
        text = path.read_text()
        assert text.count(edit.old) == 1, f"{mutant.name}: look again at {edit.path}"
        path.write_text(text.replace(edit.old, edit.new))


def run(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """pytest in the copy: its package comes first there, for the daemons it starts too."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("COV", "PYTEST", "PYTHON"))}
    clean["EXAMPLES"] = "any-example"
    # Stopped at the first failure; its own temporary folder, for it runs beside others.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--basetemp", str(folder / "tmp"), *tests]
    return subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, check=False,
        timeout=TIMEOUT_S,
    )  # fmt: skip


ONE_OF_EACH_KIND = frozenset((
    "reply-without-its-commit", "dedupe-mark-survives-a-refusal", "sync-off", "early-by-one-tick",
    "recovery-skips-a-chunk",
    "owing-goes-by-due-times-alone", "packs-read-by-a-statement-of-their-own",
    "a-missing-row-is-answered-as-gone", "half-a-change-is-survived",
    "a-decision-rests-on-what-may-be-refused",
))  # fmt: skip
"""The mutants of `make test`: a promise or a border each. `make test-full` has the others too."""
OTHERS = [mutant for mutant in MUTANTS if mutant.name not in ONE_OF_EACH_KIND]
SELECTED = [mutant for mutant in MUTANTS if mutant.name in ONE_OF_EACH_KIND]
PLAIN = next(mutant for mutant in SELECTED if mutant.name == "dedupe-mark-survives-a-refusal")
"""Its tests, one within a process and one with a daemon, show that a copy works; those of the
others are in `make test` themselves."""


@pytest.mark.parametrize(
    "mutants",
    [
        pytest.param([PLAIN], id="plain"),
        pytest.param(MUTANTS, id="all", marks=pytest.mark.slow),
    ],
)
def test_without_a_bug_the_tests_pass(tmp_path: Path, mutants: Sequence[Mutant]) -> None:
    """Otherwise a failure with one would show nothing."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    done = run(copy(tmp_path), tests)
    assert done.returncode == 0, done.stdout[-4_000:]


@pytest.mark.parametrize(
    "mutant",
    [
        *(pytest.param(mutant, id=mutant.name) for mutant in SELECTED),
        *(pytest.param(mutant, id=mutant.name, marks=pytest.mark.slow) for mutant in OTHERS),
    ],
)
def test_a_seeded_bug_is_found(tmp_path: Path, mutant: Mutant) -> None:
    """By each of its tests: what one finds, another must not hide."""
    folder = copy(tmp_path)
    seed(folder, mutant)
    for test in mutant.tests:
        done = run(folder, [test])
        assert done.returncode == FAILED, f"{mutant.why}: {test}\n{done.stdout[-4_000:]}"


def test_every_named_test_exists() -> None:
    """A seeded bug whose test is gone is found by nothing."""
    tests = list(dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests))
    done = run(ROOT, ["--collect-only", *tests])
    assert done.returncode == 0, done.stdout[-4_000:]


def test_every_seeded_bug_fits() -> None:
    """What it replaces stands there once, so that none can rot until all of them are run."""
    for mutant in MUTANTS:
        for edit in mutant.edits:
            found = (ROOT / edit.path).read_text().count(edit.old)
            assert found == 1, f"{mutant.name}: {found} times in {edit.path}: {edit.old}"


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.name for mutant in MUTANTS} >= ONE_OF_EACH_KIND
