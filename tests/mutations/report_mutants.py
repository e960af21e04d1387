"""The seeded bugs of reports that are not made again."""

from __future__ import annotations

from mutations.mutants import Edit, Mutant

LAST = "tickwheel/reports/state.py"
TESTS = "tests/reports/test_last.py::"

REPORT_MUTANTS = (
    Mutant(
        "a-report-that-does-not-look-at-the-history",
        "what is new in the history is in no report until an option changes",
        (Edit(LAST, ' or _news(settings, kept["run"])', ""),),
        (TESTS + "test_any_change_of_the_files_makes_another",),
    ),
    Mutant(
        "a-report-of-another-version-holds",
        "an update that mends a figure leaves the wrong one on the page",
        (Edit(LAST, '"program": _program(),', '"program": "",'),),
        (TESTS + "test_any_other_version_makes_another",),
    ),
    Mutant(
        "figures-of-a-killed-run-hold",
        "half of the figures are of one report and half of another, and stay so",
        (Edit("tickwheel/reports/job.py", "        state.forget_last(settings)\n", ""),),
        (TESTS + "test_a_run_that_fails_while_it_writes_leaves_no_report_that_holds",),
    ),
)
