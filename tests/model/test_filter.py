"""What a filter says of a task, what is wrong with one, and what it costs to judge."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from support.vectors import vectors
from tickwheel.api.kinds import TAG
from tickwheel.errors import BadRequest
from tickwheel.limits import Limits
from tickwheel.model.conditions import FilterError
from tickwheel.model.filters import (
    FILTER_COST_MAX,
    FILTER_DEPTH_MAX,
    Filter,
    why_never,
)
from tickwheel.model.records import PropertyValue, TaskOptions, TaskRow
from tickwheel.model.values import FILTER_LENGTH_MAX


def task(
    tag: str | None = None, key: str | None = None, priority: int = 0, **properties: PropertyValue
) -> TaskRow:
    options = TaskOptions(key, tag, properties or None, priority)
    return TaskRow(1, 1_000, "orders", b"", options)


def passes(where: str, row: TaskRow) -> bool:
    """Also that NOT of it says the opposite; UNKNOWN is neither."""
    yes, no = Filter(where=where).passes(row), Filter(where=f"NOT ({where})").passes(row)
    assert not (yes and no)
    return yes


def unknown(where: str, row: TaskRow) -> bool:
    return not passes(where, row) and not passes(f"NOT ({where})", row)


def failure(**filtered: str) -> FilterError:
    with pytest.raises(FilterError) as failed:
        Filter(**filtered)
    return failed.value


# --- tags ------------------------------------------------------------------------------------


def test_a_tag_list_matches_any_of_its_tags() -> None:
    wanted = Filter("eu || us")
    assert wanted.passes(task("eu")) and wanted.passes(task("us"))
    assert not wanted.passes(task("eur"))
    assert not wanted.passes(task())
    assert not wanted.passes(TaskRow(1, 1_000, "orders", b""))


def test_a_star_matches_any_task() -> None:
    for row in (task("eu"), task(), TaskRow(1, 1_000, "orders", b"")):
        assert Filter(" * ").passes(row)
        assert Filter().passes(row)
    assert Filter("*").is_open and Filter().is_open
    assert not Filter("eu").is_open and not Filter(where="TRUE").is_open


def test_tags_are_texts_and_may_have_spaces_and_single_bars() -> None:
    wanted = Filter("  new order||a|b  ")
    assert wanted.passes(task("new order")) and wanted.passes(task("a|b"))
    assert not wanted.passes(task("order"))


@pytest.mark.parametrize(
    ("tags", "position", "said"),
    [
        ("", 0, "expected a tag"),
        ("eu ||", 5, "expected a tag"),
        ("eu || || us", 6, "expected a tag"),
        ("|| us", 0, "expected a tag"),
        ("eu || *", 6, "* means any tag and must be alone"),
    ],
)
def test_wrong_tags_name_the_place(tags: str, position: int, said: str) -> None:
    error = failure(tags=tags)
    assert (error.field, error.position) == ("tags", position)
    message, text, caret = str(error).split("\n")
    assert message == f"tags, character {position + 1}: {said}"
    assert text == f"  {tags}" and caret == "  " + " " * position + "^"


def test_tags_and_condition_must_both_match() -> None:
    wanted = Filter("eu || us", "amount > 10")
    assert wanted.passes(task("eu", amount=12))
    assert not wanted.passes(task("eu", amount=9))
    assert not wanted.passes(task("uk", amount=12))


# --- conditions ------------------------------------------------------------------------------

ORDER = task("eu", "order-7", 5, amount=12, rate=0.5, region="Sur_eu", paid=True, open=False)


@pytest.mark.parametrize(
    "where",
    [
        "amount = 12", "amount <> 13", "amount > 11", "amount >= 12", "amount < 12.5",
        "amount <= 12.0", "amount = 1.2e1", "12 = amount", "11 < amount", "rate = .5",
        "rate > -1", "rate >= + 0.5", "amount > rate", "1 < 2", "'a' < 'b'",
        "tag = 'eu'", "TAG = 'eu'", "key LIKE 'order-%'", "priority BETWEEN 1 AND 5",
        "paid", "paid = TRUE", "paid <> open", "NOT open", "open = false",
        "amount BETWEEN 12 AND 12", "amount NOT BETWEEN 13 AND 20",
        "amount IN (1, 12)", "amount NOT IN (1, 2)", "tag in ('us', 'eu')", "paid IN (TRUE)",
        "missing IS NULL", "amount IS NOT NULL", "NULL IS NULL", "tag is not null",
        "region LIKE 'S%eu'", "region LIKE '%r!_e%' ESCAPE '!'",
        r"region LIKE '_ur\_eu' ESCAPE '\'",
        "region NOT LIKE 's%'", "region LIKE 'Sur_eu'", "region LIKE '%'", "region LIKE '%%%'",
        "amount = 1 OR amount = 12 AND paid", "(amount = 12 OR missing) AND paid",
        "not amount = 1 and not open", "TRUE", "amount>10AND paid", "order IS NULL",
        "notes IS NULL AND inner IS NULL AND android IS NULL",
    ],
)  # fmt: skip
def test_conditions_that_are_true(where: str) -> None:
    assert passes(where, ORDER)


@pytest.mark.parametrize(
    "where",
    [
        "missing = 1", "missing <> 1", "amount = NULL", "NULL = NULL", "NULL", "missing",
        "amount = '12'", "amount <> '12'", "tag > 1", "paid = 1", "amount = TRUE", "paid > FALSE",
        "open < paid", "region BETWEEN 1 AND 2", "amount LIKE '1%'", "missing LIKE '%'", "amount",
        "region", "amount IN ('12')", "amount IN (1, NULL)", "amount NOT IN (1, NULL)",
        "paid IN (1)", "1 IN (TRUE)", "missing IN (1)", "missing NOT IN (1)", "NULL IN (1)",
        "amount BETWEEN 1 AND NULL", "amount BETWEEN missing AND 20",
        "missing = 1 AND paid", "missing = 1 OR open", "tag = amount",
    ],
)  # fmt: skip
def test_conditions_that_are_unknown(where: str) -> None:
    assert unknown(where, ORDER)


@pytest.mark.parametrize(
    "where",
    [
        "missing = 1 AND open", "NOT (missing = 1 OR paid)", "amount BETWEEN 13 AND NULL",
        "amount IN (1, 2)", "region LIKE 'Sur'", "region LIKE '_'", "region LIKE ''", "FALSE",
    ],
)  # fmt: skip
def test_conditions_that_are_false(where: str) -> None:
    assert not passes(where, ORDER) and not unknown(where, ORDER)


def test_double_quotes_name_a_property() -> None:
    properties = {"tag": "of the property", "select all": 1, 'a"b': 2, "and": 3, "Tag": 4}
    row = TaskRow(1, 1_000, "orders", b"", TaskOptions(tag="eu", properties=properties))
    assert passes("tag = 'eu' AND \"tag\" = 'of the property'", row)
    assert passes('"select all" = 1 AND "a""b" = 2 AND "and" = 3 AND "Tag" = 4', row)


def test_names_of_properties_have_case_and_dots() -> None:
    row = task(**{"Amount": 1, "user.id": 2, "_x": 3})
    assert passes("Amount = 1 AND user.id = 2 AND _x = 3 AND amount IS NULL", row)


def test_a_quote_in_a_text_is_doubled() -> None:
    assert passes("name = 'O''Neil'", task(name="O'Neil"))
    assert passes("name LIKE '%''%'", task(name="O'Neil"))


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("a%a", "a", False), ("a%a", "aa", True), ("%ab%ab%", "abab", True),
        ("%ab%ab%", "aba", False), ("a%b%c", "a--b--c", True), ("a%b%c", "a--c--b", False),
        ("_%_", "x", False), ("_%_", "xy", True), ("%_a_%", "xay", True), ("%_a_%", "ay", False),
        ("%aab%", "aaab", True), ("a_c", "a\nc", True), ("%.%", "abc", False), ("_", "ß", True),
        ("a%", "A", False), ("%b_%_b", "abcb", False), ("%b_%_b", "abccb", True),
    ],
)  # fmt: skip
def test_like_patterns_match(pattern: str, text: str, matches: bool) -> None:
    assert passes(f"x LIKE '{pattern}'", task(x=text)) is matches


def test_large_numbers_are_compared_exactly() -> None:
    large = 2**53 + 1
    assert passes(f"x = {large}", task(x=large))
    assert not passes(f"x = {large - 1}.0", task(x=large))
    assert passes(f"x = {2**64 - 1} AND x > {-(2**63)}", task(x=2**64 - 1))


# --- sameness --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Filter("eu || us"), Filter("us||eu")),
        (Filter("*"), Filter()),
        (Filter(where="a > 1 and b"), Filter(where="( (a>1) ) AND b")),
        (Filter(where="TAG = 'a'"), Filter(where="tag = 'a'")),
        (Filter(where="a NOT IN (1)"), Filter(where="NOT a IN (1)")),
    ],
)
def test_filters_are_equal_however_they_are_written(one: Filter, other: Filter) -> None:
    assert one == other and hash(one) == hash(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Filter("eu"), Filter("EU")),
        (Filter("eu"), Filter()),
        (Filter(where="a = 1"), Filter(where="a = TRUE")),
        (Filter(where="a IN (0)"), Filter(where="a IN (FALSE)")),
        (Filter(where="a = 1"), Filter("eu", "a = 1")),
        (Filter(where="tag = 'a'"), Filter(where="\"tag\" = 'a'")),
        (Filter(where="A = 1"), Filter(where="a = 1")),
        (Filter(where="a LIKE '%'"), Filter(where="a LIKE '!%' ESCAPE '!'")),
        (Filter(where="a OR b"), Filter(where="a AND b")),
        (Filter(where="a BETWEEN 1 AND 2"), Filter(where="a NOT BETWEEN 1 AND 2")),
        (Filter(where="a IS NULL"), Filter(where="a")),
    ],
)
def test_filters_that_may_differ_about_a_task_are_not_equal(one: Filter, other: Filter) -> None:
    assert one != other


def test_a_filter_shows_its_text() -> None:
    assert str(Filter("eu||us", "a > 1")) == "tags eu||us, where a > 1"
    assert str(Filter()) == "none"


# --- what is wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "position", "said"),
    [
        ("", 0, "expected a condition, found the end"),
        ("amount > )", 9, "expected a name or a value, found )"),
        ("amount >", 8, "expected a name or a value, found the end"),
        ("a == 1", 3, "equal is written ="),
        ("a != 1", 2, "not equal is written <>"),
        ("a && b", 2, "and is written AND"),
        ("a || b", 2, "or is written OR"),
        ("a = 'x", 4, "the string that begins here has no end"),
        ('"" = 1', 0, "the name that begins here is empty or has no end"),
        ("a # b", 2, "'#' is not part of the language"),
        ("or = 1", 0, "expected a condition, found or"),
        ("a 5", 2, "expected an operator, AND, OR or the end, found 5"),
        ("5 AND a", 2, "expected an operator, found AND"),
        ("a = 1 b", 6, "expected AND, OR or the end, found b"),
        ("a = 1)", 5, "expected AND, OR or the end, found )"),
        ("(a = 1", 6, 'expected AND, OR or ")", found the end'),
        ("a BETWEEN 1 OR 2", 12, "expected AND, found OR"),
        ("a IN 1", 5, 'expected "(", found 1'),
        ("a IN ()", 6, "expected a value, found )"),
        ("a IN (1 2)", 8, 'expected "," or ")", found 2'),
        ("a NOT 5", 6, "expected BETWEEN, IN or LIKE, found 5"),
        ("a IS 5", 5, "expected NULL or NOT NULL, found 5"),
        ("a IS NOT 5", 9, "expected NULL, found 5"),
        ("a LIKE b", 7, "expected a string in single quotes, found b"),
        ("a = -b", 5, "expected a number, found b"),
        ("a = b = c", 6, "expected AND, OR or the end, found ="),
        ("a LIKE 'x' ESCAPE 'ab'", 18, "ESCAPE takes one character, not 2"),
        ("a LIKE 'x!' ESCAPE '!'", 7, "the pattern must not end with its escape character !"),
        ("a LIKE '!x' ESCAPE '!'", 7, "! in the pattern must precede %, _ or itself"),
        (f"a = {2**64}", 4, f"an integer must be between {-(2**63)} and {2**64 - 1}"),
        (f"a > -{2**63 + 1}", 4, f"an integer must be between {-(2**63)} and {2**64 - 1}"),
        ("a = 1e999", 4, "the number is too large"),
    ],
)
def test_syntax_errors_name_the_position(where: str, position: int, said: str) -> None:
    error = failure(where=where)
    assert (error.field, error.position) == ("where", position)
    message, text, caret = str(error).split("\n")
    assert message == f"where, character {position + 1}: {said}"
    assert text == f"  {where}" and caret == "  " + " " * position + "^"


def test_a_syntax_error_in_a_long_text_shows_its_surroundings() -> None:
    where = "a = 1 AND\n" * 20 + "b = = 1" + " AND a = 1" * 20
    _, text, caret = str(failure(where=where)).split("\n")
    assert text[caret.index("^") :].startswith("= 1 AND") and len(text) < 80
    assert text.startswith("  ...") and text.endswith("...")


@pytest.mark.parametrize(
    "where",
    [
        "a l\u0131ke 'x'",
        "a \u0131s null",
        "NOT fal\u017fe",
        "\u212aey = 'x'",
        "\u017f = 1",
        "a \u0130N (1)",
    ],
)
def test_words_and_names_have_letters_of_ascii(where: str) -> None:
    """Others are equal to them in some case; in texts and in double quotes they are letters."""
    assert failure(where=where).field == "where"
    other = next(char for char in where if not char.isascii())
    row = TaskRow(1, 1_000, "orders", b"", TaskOptions(properties={f"{other}x": other}))
    assert passes(f"\"{other}x\"\xa0=\u2003'{other}'", row)


# --- what no task can meet -------------------------------------------------------------------

UNKNOWN = (
    ("a = NULL", "a = NULL is UNKNOWN for every task: nothing compares with NULL; write IS NULL"),
    ("NULL <> a", "NULL <> a is UNKNOWN"),
    ("NOT a = NULL", "a = NULL is UNKNOWN"),
    ("b OR a > NULL", "a > NULL is UNKNOWN"),
    ("a BETWEEN 1 AND NULL", "a <= NULL is UNKNOWN"),
    ("a IN (NULL)", "a IN (NULL) is UNKNOWN for every task: nothing compares with NULL"),
    ("NULL", "NULL is UNKNOWN for every task: it is not TRUE or FALSE"),
    ("NULL IN (1, 2)", "NULL IN (1, 2) is UNKNOWN"),
    ("NULL LIKE 'a'", "NULL LIKE 'a' is UNKNOWN for every task: LIKE is for strings"),
    ("TRUE > 0", "TRUE > 0 is UNKNOWN for every task"),
    ("1 = 'a'", "1 = 'a' is UNKNOWN for every task: it compares values of two kinds"),
    ("a > TRUE", "a > TRUE is UNKNOWN for every task: truth values have no order"),
    ("a BETWEEN FALSE AND TRUE", "a >= FALSE is UNKNOWN"),
    ("tag > 1", "tag > 1 is UNKNOWN for every task: it compares values of two kinds"),
    ("key IN (1, TRUE)", "key IN (1, TRUE) is UNKNOWN for every task: it compares values of two"),
    ("priority = 'high'", "priority = 'high' is UNKNOWN"),
    ("priority = tag", "priority = tag is UNKNOWN"),
    ("priority LIKE '1%'", "priority LIKE '1%' is UNKNOWN for every task: LIKE is for strings"),
    ("tag", "tag is UNKNOWN for every task: it is not TRUE or FALSE"),
)
NEVER = (
    ("a BETWEEN 10 AND 0", "a >= 10 AND a <= 0 cannot be TRUE for any value of a"),
    ("a BETWEEN 'z' AND 'a'", "a >= 'z' AND a <= 'a' cannot be TRUE for any value of a"),
    ("a BETWEEN 1 AND 'z'", "a >= 1 AND a <= 'z' cannot be TRUE"),
    ("b = 1 AND (a > 5 AND c) AND a < 5", "a > 5 AND a < 5 cannot be TRUE for any value of a"),
    ("a = 1 AND a = 2", "a = 1 AND a = 2 cannot"),
    ("a = 1 AND a = 'x'", "a = 1 AND a = 'x' cannot"),
    ("a = 1 AND a = TRUE", "a = 1 AND a = TRUE cannot"),
    ("a = 1 AND a IS NULL", "a = 1 AND a IS NULL cannot"),
    ("a AND NOT a", "a AND NOT a cannot"),
    ("a = TRUE AND a = FALSE", "a = TRUE AND a = FALSE cannot"),
    ("a LIKE 'x%' AND a > 5", "a LIKE 'x%' AND a > 5 cannot"),
    ("a IN (1, 2) AND a NOT IN (1, 2, 3)", "a IN (1, 2) AND NOT a IN (1, 2, 3) cannot"),
    ("a NOT IN (1, NULL)", "NOT a IN (1, NULL) cannot be TRUE for any value of a"),
    ("a NOT IN (1, 'x')", "NOT a IN (1, 'x') cannot"),
    ("NOT (a > 5 OR a <= 5)", "NOT a > 5 AND NOT a <= 5 cannot"),
    ("a IS NULL AND a IS NOT NULL", "a IS NULL AND a IS NOT NULL cannot"),
    ("a < a", "a < a cannot be TRUE for any value of a"),
    ("priority IS NULL", "priority IS NULL cannot be TRUE for any value of priority"),
    ("priority > 255", "priority > 255 cannot"),
    ("priority = 1.5", "priority = 1.5 cannot"),
    ("FALSE", "FALSE cannot be TRUE"),
    ("1 = 2", "1 = 2 cannot be TRUE"),
    ("'a' LIKE 'b%'", "'a' LIKE 'b%' cannot be TRUE"),
    ("a > 9007199254740992 AND a < 9007199254740993", "cannot be TRUE for any value of a"),
    ("a BETWEEN 5 AND 1 OR b BETWEEN 6 AND 2", "a >= 5 AND a <= 1 cannot"),
    ("(a < 1 OR a = 5) AND a > 1 AND a < 5", "(a < 1 OR a = 5) AND a > 1 AND a < 5 cannot"),
    ("a IS NULL AND a NOT BETWEEN 0 AND 1", "a IS NULL AND (NOT a >= 0 OR NOT a <= 1) cannot"),
    ("b AND (a < 1 AND a > 2 OR FALSE)", "((a < 1 AND a > 2) OR FALSE) cannot"),
    ('"tag" = 1 AND "tag" = 2', '"tag" = 1 AND "tag" = 2 cannot be TRUE for any value of "tag"'),
)


@pytest.mark.parametrize(("where", "reason"), [*UNKNOWN, *NEVER])
def test_why_never_explains_an_unsatisfiable_condition(where: str, reason: str) -> None:
    """It can be read all the same: a store may hold it."""
    wanted = Filter(where=where)
    assert reason in (why_never(wanted) or "")
    assert not wanted.passes(ORDER)


@pytest.mark.parametrize(
    "where",
    [
        "a > 1 AND a < 2", "a > 9007199254740992 AND a < 9007199254740994", "a >= 5 AND a <= 5",
        "a > 1.7e308", "a < -1.7e308", "a > 'a' AND a < 'aa'", "a < 'a'", "a >= '' AND a <= ''",
        "a > 18446744073709551614", "a < -9223372036854775807", "a <> 0 AND a <> 1",
        "a LIKE 'x%' AND a LIKE '%y'", "a IN (1, 'x')", "a IN (1, NULL)", "a NOT IN (1, 2)",
        "a IS NULL OR a > 5", "a = b", "a < b AND b < a", "priority BETWEEN 0 AND 255",
        "priority = 1.0", "tag IS NULL", "tag < 'a'", "TRUE", "1 < 2", "NOT FALSE",
        "FALSE OR a = 1", "a BETWEEN 5 AND 1 OR b", "NOT a BETWEEN 10 AND 0", "a", "NOT a",
        " AND ".join(f"a<>{n}" for n in range(150)) + " AND a IN (1,2,3)",  # not looked for
    ],
)  # fmt: skip
def test_why_never_accepts_a_satisfiable_condition(where: str) -> None:
    assert why_never(Filter(where=where)) is None


# --- what others answer ----------------------------------------------------------------------

ARITHMETIC = re.compile(r" ([+*/-]) [\w']|([+-])unknown")
"""Selectors of ActiveMQ that calculate. Conditions here compare values that a task has, and nothing
else, so that their cost is that of their comparisons."""


def of_activemq() -> list[Any]:
    given = vectors("activemq_selectors")
    rows = []
    for message, further, selector, expected in given["matches"]:
        rows.append((given["messages"][message] | further, selector, expected))
    return rows


@pytest.mark.parametrize(("properties", "where", "expected"), of_activemq())
def test_selectors_of_activemq(
    properties: dict[str, PropertyValue], where: str, expected: bool | None
) -> None:
    row = TaskRow(1, 1_000, "orders", b"", TaskOptions(properties=properties))
    calculates = ARITHMETIC.search(where)
    if calculates:
        answer = "is not part of the language" if calculates[1] in ("*", "/") else ": expected "
        assert answer in str(failure(where=where))
    elif expected is None:
        assert unknown(where, row)
    else:
        assert passes(where, row) is expected


NUMERALS = {"a > 3.14", "a > 3.1E10", "a between 2 and 10", "a not between 2 and 10"} | {
    "a=TRUE OR b=FALSE", "a=3 and b<>4 And c>5 AND d<=4",
}  # fmt: skip
"""Selectors of RocketMQ that compare a text with a number or a truth value. Properties of RocketMQ
are texts, and are read as what they are compared with; here they have a type, and another type is
UNKNOWN."""


def of_rocketmq() -> list[Any]:
    return list(vectors("rocketmq_selectors")["matches"])


@pytest.mark.parametrize(("properties", "where", "expected"), of_rocketmq())
def test_selectors_of_rocketmq(
    properties: dict[str, PropertyValue], where: str, expected: bool
) -> None:
    row = TaskRow(1, 1_000, "orders", b"", TaskOptions(properties=properties))
    if where in NUMERALS and any(isinstance(value, str) for value in properties.values()):
        assert unknown(where, row)
        typed = {name: json.loads(str(value).lower()) for name, value in properties.items()}
        row = TaskRow(1, 1_000, "orders", b"", TaskOptions(properties=typed))
    assert passes(where, row) is expected


def test_selectors_are_accepted_and_refused_as_by_others() -> None:
    of_rocket, of_active = vectors("rocketmq_selectors"), vectors("activemq_selectors")
    for where in of_rocket["accepted"]:
        assert why_never(Filter(where=where)) is None
    # What RocketMQ calls now is a property here, as every name is.
    assert unknown("a <= now", task(a=1)) and passes("a <= now", task(a=1, now=2))
    for where in of_rocket["refused"] + of_active["refused"]:
        try:
            wanted = Filter(where=where)
        except FilterError:
            continue
        assert why_never(wanted) is not None  # it is not accepted of a client
    for texts in of_rocket["same"] + of_active["same"]:
        assert len({Filter(where=text) for text in texts}) == 1
    for one, other in of_rocket["other"]:
        assert Filter(where=one) != Filter(where=other)


# --- limits ----------------------------------------------------------------------------------


def padded(where: str, length: int) -> str:
    return where + " " * (length - len(where))


def test_the_length_of_a_filter_is_limited() -> None:
    limit = FILTER_LENGTH_MAX
    assert Filter(where=padded("a = 1", limit)).passes(task(a=1))
    assert Filter("x" * limit).passes(task("x" * limit))
    text = f"{limit + 1} characters; the limit is {limit} (FILTER_LENGTH_MAX)"
    assert str(failure(where=padded("a = 1", limit + 1))) == f"where: {text}"
    assert str(failure(tags=padded("a", limit + 1))) == f"tags: {text}"
    assert failure(tags=padded("a", limit + 1)).position is None


def nested(depth: int) -> str:
    """AND and OR in turn, ``depth`` of them, each within another."""
    where = "a = 1"
    for level in range(depth):
        where = f"({where} {'AND' if level % 2 else 'OR'} b)"
    return where


def test_the_depth_of_a_filter_is_limited() -> None:
    limit = FILTER_DEPTH_MAX
    assert Filter(where=nested(limit)).passes(task(a=1, b=True))
    assert Filter(where="NOT " * limit + "a = 1").passes(task(a=1))
    text = f"nested {limit + 1} deep; the limit is {limit} (FILTER_DEPTH_MAX)"
    for where in (nested(limit + 1), "NOT " * (limit + 1) + "a = 1"):
        assert str(failure(where=where)) == f"where: AND, OR and NOT are {text}"


@pytest.mark.parametrize(
    "where",
    [
        "(" * 1_000 + "a = 1" + ")" * 1_000,
        "a=1" + " or a=1" * (FILTER_COST_MAX - 1),
    ],
)
def test_a_long_flat_filter_is_accepted(where: str) -> None:
    assert Filter(where=where).passes(task(a=1))


@pytest.mark.parametrize("where", ["NOT " * 510 + "a = 1", "(NOT " * 340 + "a" + ")" * 340])
def test_any_nesting_over_the_limit_is_the_same_error(where: str) -> None:
    assert "FILTER_DEPTH_MAX" in str(failure(where=where))


def test_the_cost_of_a_filter_is_limited() -> None:
    limit = FILTER_COST_MAX
    at_the_limit = [
        " OR ".join(["a=1"] * limit),
        f"a LIKE '%{'x' * (limit - 1)}%'",
        f"a LIKE '%{'x_' * (limit // 8 - 1)}x%' OR a IN (1) OR b OR c",
        f"a LIKE '{'x_' * limit}%{'_' * limit}'",
    ]
    for where in at_the_limit:
        assert Filter(where=where)
    error = failure(where=at_the_limit[0] + " OR a=1")
    text = (
        f"evaluating the condition takes {limit + 1} steps; the limit is {limit} (FILTER_COST_MAX)"
    )
    assert str(error) == f"where: {text}"
    assert f"{limit + 1} steps" in str(failure(where=f"a LIKE '%{'x' * limit}%'"))


# --- what is loaded --------------------------------------------------------------------------


def test_the_parser_is_loaded_with_the_first_condition() -> None:
    code = (
        "import sys\n"
        "from tickwheel.model.filters import Filter\n"
        "Filter('eu || us')\n"
        "print('lark' in sys.modules)\n"
        "Filter(where='a = 1')\n"
        "print('lark' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("tag", ["", "*", "a||b", "||", " ", " a", "a ", "\ta", "a b", "a|b", "ü"])
def test_a_tag_is_accepted_only_if_a_filter_can_name_it(tag: str) -> None:
    try:
        can_be_named = Filter(tag)._tags == {tag}
    except FilterError:
        can_be_named = False
    if can_be_named:
        assert TAG.check(tag, "tag", Limits()) == TAG.of_task(tag, "tag", Limits()) == tag
        return
    for check in (TAG.check, TAG.of_task):
        with pytest.raises(BadRequest, match="tag must be a tag"):
            check(tag, "tag", Limits())


# --- why a task is left out --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filtered", "row", "why"),
    [
        ({"tags": "eu || uk"}, task("us"), "the filter's tags are eu || uk, and its tag is 'us'"),
        ({"tags": "eu || uk"}, task(), "the filter's tags are eu || uk, and it has no tag"),
        ({"where": "n > 10"}, task(n=5), "n > 10 is FALSE (n is 5)"),
        ({"where": "n > 10"}, task(), "n > 10 is UNKNOWN (the task has no property n)"),
        ({"where": "n > 10"}, task(n="11"), "n > 10 is UNKNOWN (n is '11')"),
        ({"where": "NOT n > 10"}, task(n=11), "n > 10 is TRUE (n is 11)"),
        ({"where": "n = 1 AND tag = 'eu'"}, task("us", n=1), "tag = 'eu' is FALSE (tag is 'us')"),
        (
            {"where": "n = 1 OR m = 2"}, task(n=3, m=4),
            "n = 1 is FALSE (n is 3) and m = 2 is FALSE (m is 4)",
        ),
        ({"where": "key IS NOT NULL"}, task(), "key IS NULL is TRUE (the task has no key)"),
        ({"where": "n = 1"}, task(n=1), ""),
    ],
)  # fmt: skip
def test_why_not_explains_a_filtered_task(filtered: dict[str, str], row: TaskRow, why: str) -> None:
    assert Filter(**filtered).why_not(row) == why


def test_why_not_names_some_of_many_failing_parts() -> None:
    where = " OR ".join(f"n = {value}" for value in range(9))
    assert Filter(where=where).why_not(task(n=10)).endswith("n = 4 is FALSE (n is 10) and 4 more")
