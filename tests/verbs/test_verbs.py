"""Every verb, in every way in which it can be asked: the same answer, the same errors, the same
rights, the same line in the log.

What is asked follows from the table of declared verbs and its scenes (``scene.py``): a new verb
needs a scene, and nothing else here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
import typer

from support.raw import Raw
from tickwheel.api.kinds import DeadLetterPairs, Flag, Id, Ids, Number, Since
from tickwheel.api.shapes import Field, Request
from tickwheel.api.tasks import LetterPlace, LookUp, MoveFields, Selection
from tickwheel.api.verb import Audit, Right, Verb
from tickwheel.api.verbs import VERBS
from tickwheel.cli.app import app
from tickwheel.errors import BadRequest, TickwheelError
from tickwheel.server.http.pages import ALWAYS, WITH_BODY
from tickwheel.server.http.routes import ROUTES
from tickwheel.server.shard import backups
from verbs import scenes
from verbs.bounds import Bound, beyond, within
from verbs.house import House
from verbs.scene import REFUSALS, SCENES, VARIANTS, Refusal, Scene, Stage, Values, differences
from verbs.ways import (
    WAYS,
    AsyncPython,
    Cli,
    OverGateway,
    OverHttp,
    Python,
    Tcp,
    Unsayable,
    Way,
    error_of,
)

assert scenes.__all__, "they are known when their files have been read"

ELSEWHERE = {
    "enqueue_once": "tests/server/http/test_tasks.py: the header Idempotency-Key",
    "enqueue_plain": "tests/server/test_values.py: a run of frames",
    "enqueue_unanswered": "tests/server/tcp: it has no answer",
    "subscribe": "tests/client/test_client_subscribing.py: a stream",
    "set_prefetch": "tests/client/test_client_subscribing.py: it is about a stream",
    "unsubscribe": "tests/client/test_client_subscribing.py: it is about a stream",
    "leave": "tests/server/tcp: the end of a conversation",
    "answer_checks": "tests/e2e/test_transactions.py: a conversation",
    "claim_schedule": "tests/client/test_shards_names.py: a step of put_schedule over shards",
    "claim_transaction": "tests/client/test_shards_names.py: a step of prepare over shards",
    "report": "tests/server/http/test_watching.py: a page",
}
"""Verbs without a request and answer, and where they are tested."""
NOT_ASKED = {
    ("commit_transaction", "store_full"),
    ("run_schedule", "store_full"),
    ("backfill_schedule", "store_full"),
    ("test_push", "conflict"),
    ("put_schedule", "conflict"),
    ("prepare", "conflict"),
}
"""Errors that no values lead to: tests/crash/test_disk.py fills the disk, tests/server/shard/
test_targets.py has a daemon without a process that sends, and tests/client/test_shards_names.py has
several shards."""
VOLATILE = frozenset(("uptime_s", "memory_bytes", "disk_used", "disk_free_bytes", "connections"))
"""Fields of which nobody can say what they are a moment later."""
_PREFIX = re.compile(r"s\d+\.")
"""Prefix of the names of a stage."""
SCENE_NAMES = sorted(SCENES)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    command = typer.main.get_command(app)  # made once, for all commands
    with pytest.MonkeyPatch.context() as patch, House(tmp_path_factory.mktemp("house")) as found:
        patch.setattr(typer.main, "get_command", lambda app: command)
        patch.setattr(backups, "COMMAND", (sys.executable, "-S", "-c", WORKS))
        yield found


WORKS = "import sys; sys.stdin.readline(); sys.stdin.read()"
"""In the place of the process of a restore: it works until it shall end."""


class Ways:
    """The ways of each principal, made when they are needed."""

    def __init__(self, house: House) -> None:
        self.house = house
        self._raw = Raw(house.port, token=house.tokens["stage"])
        self._known: dict[Any, Way] = {}

    def of(self, who: str = "all", *, standby: bool = False) -> list[Way]:
        return [self.one(kind, who, standby=standby) for kind in WAYS]

    def one(self, kind: type[Way], who: str = "all", *, standby: bool = False) -> Way:
        key = kind, who, standby
        if key not in self._known:
            self._known[key] = kind(self.house, who, standby=standby)
        return self._known[key]

    def stage(self) -> Stage:
        return Stage(self.house, self._raw)

    def close(self) -> None:
        for way in self._known.values():
            way.close()
        self._raw.close()


@pytest.fixture(scope="module")
def ways(house: House) -> Iterator[Ways]:
    result = Ways(house)
    yield result
    result.close()


Begun = tuple[Stage, Values, Any, Any]
"""A stage where a scene is about to be asked: the values, what is expected, the rest of it."""
Begin = Callable[[Scene], Begun]


@pytest.fixture
def begin(ways: Ways) -> Iterator[Begin]:
    """Begins a scene, which is over with the test at the latest."""
    with ExitStack() as stack:

        def begun(scene: Scene) -> Begun:
            stage = ways.stage()
            play = scene.play(stage)
            stack.callback(play.close)
            values, expected = next(play)
            return stage, values, expected, play

        yield begun


# --- nothing is left out -------------------------------------------------------------------------


def test_every_verb_has_a_scene() -> None:
    assert SCENES.keys() | ELSEWHERE.keys() == VERBS.keys()
    assert not SCENES.keys() & ELSEWHERE.keys()


def test_every_routed_verb_is_tested_over_http() -> None:
    over_http = {name for route in ROUTES for name in route.operations}
    texts = {n for n, it in SCENES.items() if it.saying.http or it.verb.path}
    assert texts == over_http & SCENES.keys()


def test_every_declared_error_is_tested() -> None:
    asked = {(refusal.scene, refusal.code) for refusal in REFUSALS}
    declared = {(n, code) for n, it in SCENES.items() for code in it.verb.errors}
    assert declared - asked == NOT_ASKED


# --- scenes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCENES | VARIANTS))
def test_all_clients_get_the_same_answer(name: str, ways: Ways, begin: Begin) -> None:
    """What changes nothing is asked in all ways on one stage, what does on one of its own in each
    way."""
    scene, reference = (SCENES | VARIANTS)[name], None
    is_read = not scene.verb.changes and scene.verb.audit is Audit.NEVER
    set_up = begin(scene) if is_read else None
    ways.house.logged()
    for way in ways.of():
        stage, values, expected, play = set_up or begin(scene)
        try:
            answer = way.ask(scene, values)
        except Unsayable:
            if not is_read:
                play.close()
            continue
        logged = ways.house.logged()
        # The process that answers for all shards has a log of its own beside the shard's.
        lines = 2 if way.name == "http of all shards" else 1
        assert logged == [scene.verb.name] * lines * (scene.verb.audit is not Audit.NEVER), way.name
        result = steady(stage.plain(answer.value))
        if reference is None:
            reference = result
            assert not list(differences(expected, result)), result
        same = steady(stage.plain(answer.of(reference)))
        assert not list(disagreements(same, result, way)), way.name
        if not is_read:
            rest(play)
    if set_up:
        rest(set_up[3])
    assert reference is not None or scene.verb.answer is None, "nobody has said it"


def rest(play: Any) -> None:
    """Check the conditions after a scene."""
    with pytest.raises(StopIteration):
        next(play)


def steady(answer: Any) -> Any:
    """An answer without what changes from moment to moment, and without what is of other stages."""
    if isinstance(answer, dict):
        return {n: steady(one) for n, one in answer.items() if n not in VOLATILE}
    return (
        [steady(item) for item in answer if not _is_foreign(item)]
        if isinstance(answer, list)
        else answer
    )


def _is_foreign(item: Any) -> bool:
    return isinstance(item, dict) and any(
        isinstance(element, str) and _PREFIX.match(element) for element in item.values()
    )


def disagreements(expected: Any, found: Any, way: Way) -> Iterator[str]:
    """Where a way does not say what TCP says. The lines of a command are for people as well: what
    each has in common with the answer must be the same."""
    if isinstance(way, Cli):
        expected = [_in_common(one, line) for one, line in zip(expected, found, strict=True)]
    else:
        yield from differences(found, expected)
    yield from differences(expected, found)


def _in_common(expected: Any, line: Any) -> Any:
    if not isinstance(expected, dict):
        return expected
    names = expected.keys() & line.keys()
    both = {n: expected[n] for n in names if not isinstance(expected[n], (dict, list))}
    assert both, (expected, line)
    return both


# --- looking owns nothing ------------------------------------------------------------------------

LOOKING = sorted(
    name
    for name, it in (SCENES | VARIANTS).items()
    if not it.verb.changes and it.verb.need is not None and it.verb.need.right is Right.READ
)


@pytest.mark.parametrize("name", LOOKING)
def test_reading_changes_no_group_and_no_lease(name: str, ways: Ways, begin: Begin) -> None:
    """Groups, leases and attempts are the same after a read as before it, in each way."""
    scene = (SCENES | VARIANTS)[name]
    stage, values, _, _ = begin(scene)
    stage.enqueue(delay_ms=0)
    before = ways.house.do(held(ways.house))
    for way in ways.of():
        with suppress(Unsayable):
            way.ask(scene, values)
        ways.house.settle()
        assert ways.house.do(held(ways.house)) == before, way.name


async def held(house: House) -> dict[str, Any]:
    """Each topic, and its groups with all that they hold, as the engine has it."""
    result: dict[str, Any] = {}
    for topic in house.running.shard.core.topics.values():
        groups = [*topic.groups.values()]
        if topic.default_backlog is not None:
            groups.append(topic.default_backlog)
        result[topic.name] = topic.settings, [
            (
                group.row(), group.ready_count, {**group.flight}, {**group.waiting},
                {**group.delivery_attempts}, {**group.numbers}, group.dead, group.delivered,
                group.acked, group.nacked, len(group.subscribers),
            )
            for group in groups
        ]  # fmt: skip
    return result


@pytest.mark.parametrize("kind", [OverHttp, OverGateway])
def test_a_pull_that_creates_its_group_reports_it(kind: type[Way], ways: Ways) -> None:
    stage = ways.stage()
    stage.enqueue(2, delay_ms=0)
    made = pulled(ways.one(kind), stage, "g")
    assert made["new_group"] == {"adopted": 2, "idle": {}} and len(made["deliveries"]) == 1
    assert "new_group" not in pulled(ways.one(kind), stage, "g")
    other = pulled(ways.one(kind), stage, "h")
    assert other["new_group"] == {"adopted": 0, "idle": {"g": 2}}


def pulled(way: Way, stage: Stage, group: str) -> Any:
    """The whole answer to a pull over HTTP, as it came."""
    scene = SCENES["pull"]
    whole = replace(scene, saying=replace(scene.saying, reply=dict))
    return way.ask(whole, {"topic": stage.topic, "group": group, "max": 1}).value


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("one", REFUSALS, ids=lambda one: f"{one.scene}-{one.code}")
def test_all_clients_get_the_same_error(one: Refusal, ways: Ways) -> None:
    scene, found = (SCENES | VARIANTS)[one.scene], {}
    for way in ways.of():
        if isinstance(way, Cli) and not one.cli:
            continue
        stage = ways.stage()
        values = one.values(stage)
        try:
            error = error_of(way, scene, values)
        except Unsayable:
            continue
        assert error is not None and error.code == one.code, (way.name, error)
        check_declared(scene.verb, error)
        if one.code != "bad_request" or not isinstance(way, Python):  # clients have own words
            found[way.name] = stage.plain(error.message)
    texts = {text.partition(";")[0] for text in found.values()}
    assert len(texts) == 1, found


def check_declared(verb: Verb, error: TickwheelError) -> None:
    """Its code is one that the documents name."""
    codes = (*ALWAYS, *WITH_BODY, *verb.errors, "not_active")
    is_bad = isinstance(error, BadRequest) and error.http_status == 400
    assert error.code in codes or is_bad, (verb.name, error.code)


def _has_pages(verb: Verb) -> bool:
    request = verb.request
    return request is not None and {"after", "limit"} <= {field.name for field in request.fields()}


# --- bounds --------------------------------------------------------------------------------------

BOUNDED = [name for name in SCENE_NAMES if VERBS[name].request is not None]


@pytest.mark.parametrize("name", BOUNDED)
def test_fields_are_accepted_up_to_their_bounds(name: str, ways: Ways, begin: Begin) -> None:
    """At each bound of each field, and one beyond it."""
    scene = SCENES[name]
    assert scene.verb.request is not None
    _, values, _, _ = begin(scene)
    limits = ways.house.running.shard.settings.limits()
    for field in scene.verb.request.fields():
        rest = beside(field, scene.verb.request, values)
        for item in beyond(field, limits):
            check_refused(scene, field, item, rest | {field.name: item.value}, ways)
        for item in within(field, limits):
            for kind in (Tcp, OverHttp):
                check_taken(ways.one(kind), scene, item, rest | {field.name: item.value})


def beside(field: Field, request: type[Request], values: Values) -> Values:
    """The values that may be said beside the field: no other of which it is one, and where it is
    about a key, one is named."""
    without: set[str] = set()
    more: Values = {}
    if field.name in request.one_of:
        without |= set(request.one_of)
    if issubclass(request, MoveFields) and field in MoveFields.fields():
        without |= {item.name for item in MoveFields.fields()}
    if issubclass(request, Selection) and field.name in OF_KEY:
        without, more = without | {"ids"}, {"topic": "t", "key": "k"}
    return {name: one for name, one in values.items() if name not in without} | more


OF_KEY = {field.name for field in LookUp.fields()} - {"ids"}
"""Fields of a selection that are about a topic and a key."""


def check_refused(scene: Scene, field: Field, bound: Bound, values: Values, ways: Ways) -> None:
    """Each way names the field; those that have the daemon's form of it say the same."""
    texts: dict[str, str] = {}
    is_of_ids = isinstance(field.kind, OF_IDS)
    for way in ways.of():
        is_split = isinstance(way, Python) and isinstance(field.kind, Ids) and len(bound.value) > 1
        if isinstance(way, Cli) or is_split:
            continue  # what people write has words of its own; clients ask for many ids in parts
        try:
            error = error_of(way, scene, values)
        except Unsayable:
            continue
        outcome = (scene.verb.name, way.name, field.name, bound.value, error)
        assert error is not None and error.code in ("bad_request", "limit_exceeded"), outcome
        check_declared(scene.verb, error)
        names = (field.name, field.python, *(("id", "items") if is_of_ids else ()))
        assert any(name in error.message for name in names), outcome
        is_same = isinstance(way, (Tcp, OverHttp)) or not has_own_words(field)
        assert not is_same or all(word in error.message for word in bound.words), outcome
        if is_same and not is_of_ids:
            texts[way.name] = error.message
    assert not bound.words or len(set(texts.values())) <= 1, (scene.verb.name, texts)


OF_IDS = (Id, Ids, LetterPlace, DeadLetterPairs)
"""Kinds that JSON says in another form, in whose errors their place is another one."""


def has_own_words(field: Field) -> bool:
    """Whether the clients take the field in another form, and say of that what is wrong."""
    return field.python != field.name or isinstance(field.kind, (Number, *OF_IDS, Since, Flag))


def check_taken(way: Way, scene: Scene, bound: Bound, values: Values) -> None:
    """Whatever else is wrong with the values, it is not this bound."""
    try:
        error = error_of(way, scene, values)
    except Unsayable:
        return
    if error is not None:
        check_declared(scene.verb, error)
        assert not any(word in error.message for word in bound.words), (scene.verb.name, error)


@pytest.mark.parametrize("name", BOUNDED)
def test_unknown_fields_are_named(name: str, ways: Ways, begin: Begin) -> None:
    scene = SCENES[name]
    assert scene.verb.request is not None
    _, values, _, _ = begin(scene)
    for kind in (Tcp, OverHttp):
        if kind is Tcp and not scene.verb.request.options():
            continue  # its places are counted
        if kind is OverHttp and scene.saying.body is not None:
            continue  # its body has a form of its own
        try:
            error = error_of(ways.one(kind), scene, values | {"colour": "red"})
        except Unsayable:
            continue
        assert error is not None and error.code == "bad_request", (kind.name, error)
        assert "colour" in error.message, (kind.name, error)


# --- lists ---------------------------------------------------------------------------------------

PAGED = [name for name in BOUNDED if _has_pages(VERBS[name])]


@pytest.mark.parametrize("name", PAGED)
def test_pages_add_up_to_the_list(name: str, ways: Ways, begin: Begin) -> None:
    """Several pages, each asked for by the place that the one before has said."""
    scene = SCENES[name]
    _, values, _, _ = begin(scene)
    for kind in (Tcp, OverHttp):
        way = ways.one(kind)
        try:
            whole = way.ask(scene, values | {"limit": 1_000}).value
        except Unsayable:
            continue
        items = next(one for field, one in whole.items() if field != "next")
        assert whole["next"] is None and len(items) > 1, (kind.name, whole)
        found, after = list[Any](), {}
        while True:
            answer = values | {"limit": len(items) // 2, **after}
            page = way.ask(scene, answer).value
            found += next(one for field, one in page.items() if field != "next")
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        assert after and found == list(items), kind.name


# --- rights --------------------------------------------------------------------------------------

GUARDED = sorted(n for n, it in (SCENES | VARIANTS).items() if it.verb.need is not None)


@pytest.mark.parametrize("name", GUARDED)
def test_a_verb_without_its_right_is_forbidden(name: str, ways: Ways, begin: Begin) -> None:
    scene = (SCENES | VARIANTS)[name]
    need = scene.verb.need
    assert need is not None
    _, values, _, play = begin(scene)
    for way in ways.of(f"but-{need.right}"):
        try:
            error = error_of(way, scene, values)
        except Unsayable:
            continue
        assert error is not None and error.code == "forbidden", (way.name, error)
        assert f"the right {need.right}" in error.message, (way.name, error)


# --- a daemon that stands by ---------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENE_NAMES)
def test_a_standby_answers_or_names_the_leader(name: str, ways: Ways, begin: Begin) -> None:
    scene = SCENES[name]
    _, values, _, play = begin(scene)
    for kind in (Tcp, OverHttp):
        try:
            error = error_of(ways.one(kind, standby=True), scene, values)
        except Unsayable:
            continue
        if scene.verb.standby:
            assert error is None
            continue
        assert error is not None and error.code == "not_active", (kind.name, error)
        port = ways.house.port if kind is Tcp else ways.house.http_port
        assert f":{port}" in error.message, (kind.name, error)
    try:
        ways.one(AsyncPython, standby=True).ask(scene, values)
    except Unsayable:
        return
    rest(play)
