"""The ways in which a verb can be asked: TCP, HTTP, HTTP of all shards, both clients, the command
line.

``Way.ask(scene, values)`` says it as the declaration has it, or as the scene says (``Saying``), and
returns what came, with what that is of an answer over TCP. Raises the daemon's error, and Unsayable
when this way has no words for it.
"""

from __future__ import annotations

import contextlib
import http.client
import inspect
import io
import json
import re
import shlex
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import UnionType
from typing import Any, NamedTuple, get_args
from urllib.parse import quote, urlencode

import msgspec

from support.raw import Raw
from tickwheel.api.kinds import (
    Body,
    FieldKind,
    Id,
    Ids,
    Moment,
    Name,
    Policy,
    Rule,
    Since,
    Span,
    Text,
)
from tickwheel.api.policies import IfPending, Retry
from tickwheel.api.shapes import Block, Request
from tickwheel.api.tasks import PAGE, AcceptedIds, LetterPlace, Selection, TaskInfo, TaskOutcome
from tickwheel.api.verb import Method, Verb
from tickwheel.cli import app
from tickwheel.cli.call import exit_code
from tickwheel.client import Client
from tickwheel.errors import BY_CODE, TickwheelError, from_wire
from tickwheel.server.http.routes import ROUTES, Router
from tickwheel.sync import Client as SyncClient
from verbs.house import House
from verbs.scene import Scene, Values, elements

TIMEOUT_S = 60.0
Of = Callable[[Any], Any]


class Unsayable(Exception):
    """This way has no words for the verb, or for these values."""


class Said(NamedTuple):
    """An answer, and the part of it in TCP's form."""

    value: Any
    of: Of


def same(answer: Any) -> Any:
    return answer


def canonical(verb: Verb, answer: Any) -> Any:
    """An answer over TCP in the one form that all others are compared with: of new tasks their
    ids; outcomes without the due time that they have not."""
    if verb.answer is AcceptedIds:
        return list(answer[1])
    if verb.answer == list[TaskOutcome]:
        return [tuple(item if item[2:] != (None,) else item[:2]) for item in map(tuple, answer)]
    return answer


class Way:
    """One way, with the token of somebody; at the daemon that leads, or at the other one."""

    name = ""

    def __init__(self, house: House, token: str, *, standby: bool = False) -> None:
        self.house = house
        self.token = house.tokens[token]
        self.port = house.standby_port if standby else house.port
        self.http_port = house.standby_http_port if standby else house.http_port

    def ask(self, scene: Scene, values: Values) -> Said:
        raise NotImplementedError

    def close(self) -> None:
        """Leave."""


class Tcp(Way):
    name = "tcp"

    def __init__(self, house: House, token: str, *, standby: bool = False) -> None:
        super().__init__(house, token, standby=standby)
        self._raw = Raw(self.port, token=self.token)

    def ask(self, scene: Scene, values: Values) -> Said:
        verb = scene.verb
        if verb.frame is None or scene.saying.is_of_http:
            raise Unsayable
        of_scene = scene.saying.frame
        fields = of_scene(values) if of_scene is not None else elements(verb, values)
        if verb.name in ("enqueue", "enqueue_columns"):  # the floor of what was answered
            fields = (self._raw.request + 1, *fields)
        answer = self._raw.call(verb.frame, *fields)
        if len(answer) > 3:
            raise from_wire(answer[2], answer[3])
        means = scene.saying.means
        return Said(means(answer[2]) if means else canonical(verb, answer[2]), same)

    def close(self) -> None:
        self._raw.close()


# --- HTTP ----------------------------------------------------------------------------------------


ROUTER = Router(ROUTES)


class _InOnePiece(http.client.HTTPConnection):
    """Head and body are sent together: who refuses a request by its head ends the connection when
    the body is still on its way."""

    _pieces = b""

    def send(self, data: Any) -> None:
        self._pieces += data

    def getresponse(self) -> http.client.HTTPResponse:
        data, self._pieces = self._pieces, b""
        super().send(data)
        return super().getresponse()


class OverHttp(Way):
    name = "http"

    def __init__(self, house: House, token: str, *, standby: bool = False) -> None:
        super().__init__(house, token, standby=standby)
        self._connection = _InOnePiece("127.0.0.1", self.http_port, timeout=TIMEOUT_S)

    def ask(self, scene: Scene, values: Values) -> Said:
        verb, saying = scene.verb, scene.saying
        method, _, path = _route(saying.http or verb.path, values).partition(" ")
        if not path:
            raise Unsayable
        named = _names_in(path)
        in_text = named if method not in ("GET", "DELETE") else values
        if any(values.get(name) in (None, "") for name in named):
            raise Unsayable  # a path has a name in each place
        if any(_is_no_text(verb, name, values[name]) for name in in_text):
            raise Unsayable  # what is text is of the right type
        rest = {name: one for name, one in values.items() if name not in named}
        path = path.format(**{n: _in_path(values[n]) for n in named})
        given = (
            saying.body(rest) if saying.body is not None else _json_of(verb, rest, method, named)
        )
        if method in ("GET", "DELETE"):
            return self._answer(scene, method, _with_query(path, given), None)
        return self._answer(scene, method, path, given)

    def _answer(self, scene: Scene, method: str, path: str, body: Any) -> Said:
        headers = {"authorization": f"Bearer {self.token}"}
        data = None
        if body is not None:
            data, headers["content-type"] = json.dumps(body), "application/json"
        self._connection.request(method, path, data, headers)
        response = self._connection.getresponse()
        answer = json.loads(response.read())
        if response.status >= 400:
            self._connection.close()  # the daemon may: it has not read what it refused
            assert response.headers["content-type"] == "application/problem+json"
            assert response.status == answer["status"] == BY_CODE[answer["code"]].http_status, (
                answer
            )
            raise from_wire(answer["code"], answer["detail"])
        route, _ = ROUTER.find(method, path.partition("?")[0].encode())
        is_new = method != "PUT" or answer.get("created", answer.get("outcome") == "created")
        assert response.status == (route.status if is_new else 200), (response.status, answer)
        is_union = isinstance(route.answer, UnionType)
        kinds = get_args(route.answer) if is_union else (route.answer,)
        assert any(_is_of(kind, answer) for kind in kinds), answer
        reply = scene.saying.reply
        return Said(
            reply(answer) if reply is not None else _of_json(scene.verb.answer, answer), same
        )

    def close(self) -> None:
        self._connection.close()


class OverGateway(OverHttp):
    """HTTP of all shards, which asks the daemon as a client."""

    name = "http of all shards"

    def __init__(self, house: House, token: str, *, standby: bool = False) -> None:
        super().__init__(house, token, standby=standby)
        self._connection = _InOnePiece("127.0.0.1", house.gateway_port, timeout=TIMEOUT_S)

    def ask(self, scene: Scene, values: Values) -> Said:
        if scene.verb.frame is None and scene.verb.name != "settle_callback":
            raise Unsayable
        return super().ask(scene, values)


def _route(known: str | tuple[str, str], values: Values) -> str:
    """METHOD and path. Of a selection that has two the one of what it names; it cannot be said that
    it names anything else."""
    if isinstance(known, str):
        return known
    of_key, of_ids = known
    ways = {("key", "topic"): of_key, ("ids",): of_ids, ("id",): of_ids}
    return ways.get(_selected(values), "")


def _selected(values: Values) -> tuple[str, ...]:
    return tuple(sorted(values.keys() & {"id", "ids", "topic", "key"}))


def _names_in(path: str) -> list[str]:
    return re.findall(r"{(\w+)", path)


def _in_path(value: Any) -> Any:
    return value if isinstance(value, tuple) else quote(str(value), safe="")


def _is_no_text(verb: Verb, name: str, value: Any) -> bool:
    """Whether a value of another type stands for a text, which a path or a query cannot say."""
    if verb.request is None or isinstance(value, str):
        return False
    kinds = {field.name: field.kind for field in verb.request.fields()}
    return isinstance(kinds.get(name), (Text, Name))


def _is_of(kind: Any, said: Any) -> bool:
    """Whether an answer is of the type that the document has."""
    try:
        msgspec.convert(said, kind)
    except msgspec.ValidationError:
        return False
    return True


def _with_query(path: str, fields: Any) -> str:
    answer = {n: str(v).lower() if isinstance(v, bool) else v for n, v in (fields or {}).items()}
    return f"{path}?{urlencode(answer)}" if answer else path


def _json_of(verb: Verb, values: Values, method: str, named: list[str]) -> Any:
    """The fields of a request in JSON; None: it has none beside those that the path names."""
    if verb.request is None:
        raise Unsayable
    kinds = {field.name: field.kind for field in verb.request.fields()}
    answer = {n: _in_json(kinds.get(n, FieldKind()), v) for n, v in values.items()}
    if any(field.name not in named for field in verb.request.fields()):
        return answer
    if answer and method not in ("GET", "DELETE"):
        raise Unsayable  # nobody reads a body
    return answer


def _in_json(kind: FieldKind, value: Any) -> Any:
    if isinstance(kind, Id) and value is not None:
        return str(value)
    if isinstance(kind, Ids) and value is not None:
        return [str(item) for item in value]
    if isinstance(kind, LetterPlace) and isinstance(value, tuple):
        return ".".join(map(str, value))
    if isinstance(value, bytes):
        return value.decode()
    return value


def outcome_of(said: Any) -> Any:
    """What JSON says of a task, as TCP has it."""
    return tuple(said[name] for name in ("id", "result", "due_ms") if name in said)


def _of_json(answer: Any, said: Any) -> Any:
    if answer is AcceptedIds:
        return said["ids"]
    if answer == list[TaskInfo]:
        return said["tasks"]
    if answer == list[str]:
        return [result["result"] for result in said["results"]]
    if answer == list[TaskOutcome]:
        return [outcome_of(result) for result in said["results"]]
    return said


# --- the clients ---------------------------------------------------------------------------------


class Python(Way):
    """What both clients have in common: which method, with which keywords."""

    def ask(self, scene: Scene, values: Values) -> Said:
        saying, verb = scene.saying, scene.verb
        if callable(saying.python):
            return Said(self._call(saying.python, values), saying.gives or same)
        assert verb.request is not None or saying.python is None
        if saying.python is not None and verb.request is not None:
            method, named, of = saying.python, keywords(verb.request, values), same
        else:
            its, named = _method(verb, values)
            method, of = its.name, _giving(verb, its)
            if its.word:
                method, named, of = _for_a_word(verb, method, named)
        if verb.request is not None and issubclass(verb.request, Selection):
            method, named = _selecting(method, named)
        of = saying.gives or of
        return Said(self._call(lambda client, _: _called(client, method, named), values), of)

    def _call(self, call: Callable[[Any, Values], Any], values: Values) -> Any:
        raise NotImplementedError


def _called(client: Any, method: str, named: Values) -> Any:
    function = getattr(client, method)
    parameters = inspect.signature(function).parameters
    can_receive = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not can_receive and named.keys() - parameters.keys():
        raise Unsayable
    return function(**named)


class AsyncPython(Python):
    name = "async client"

    def __init__(self, house: House, token: str, *, standby: bool = False) -> None:
        super().__init__(house, token, standby=standby)
        self._client = house.do(self._made())

    async def _made(self) -> Client:
        return Client(f"tcp://127.0.0.1:{self.port}", token=self.token, retries=0)

    def _call(self, call: Callable[[Any, Values], Any], values: Values) -> Any:
        async def asked() -> Any:
            answer = call(self._client, values)
            if inspect.isasyncgen(answer) or hasattr(answer, "__aiter__"):
                return [item async for item in answer]
            return await answer

        return self.house.do(asked())

    def close(self) -> None:
        self.house.do(self._client.close())


class SyncPython(Python):
    name = "sync client"

    def __init__(self, house: House, token: str, *, standby: bool = False) -> None:
        super().__init__(house, token, standby=standby)
        self._client = SyncClient(f"tcp://127.0.0.1:{self.port}", token=self.token, retries=0)

    def _call(self, call: Callable[[Any, Values], Any], values: Values) -> Any:
        answer = call(self._client, values)
        return list(answer) if hasattr(answer, "__next__") else answer

    def close(self) -> None:
        self._client.close()


def _method(verb: Verb, values: Values) -> tuple[Method, Values]:
    """The generated method that says it, with its keywords."""
    if verb.pages and not 1 <= values.get("limit", 1) <= PAGE.high:
        raise Unsayable  # it is how many in all
    for method in verb.methods:
        if all(values.get(name) == one for name, one in method.fixed):
            fixed = [name for name, _ in method.fixed]
            rest = {name: one for name, one in values.items() if name not in fixed}
            assert verb.request is not None
            return method, keywords(method.fields or verb.request, rest)
    raise Unsayable


def _selecting(method: str, named: Values) -> tuple[str, Values]:
    """The method, and its keywords, that says it of a selection: of ids the one for many."""
    if "ids" not in named:
        return method, named
    if not named.keys() & {"topic", "key"}:
        return f"{method}_many", named
    rest = {name: one for name, one in named.items() if name != "ids"}
    return method, rest | {"task_id": _only(named["ids"])}


def _for_a_word(verb: Verb, method: str, named: Values) -> tuple[str, Values, Of]:
    """The same for a method that returns a single status."""
    if verb.answer != list[TaskOutcome]:
        return method, named, same
    if not verb.bulk:
        rest = {name: one for name, one in named.items() if name != "ids"}
        ids = {"task_id": _only(named["ids"])} if named.get("ids") is not None else {}
        return method, rest | ids, lambda answer: answer[0][1]
    return method, named, _words if "ids" in named else same


def _words(answer: Any) -> Any:
    return [row[1] for row in answer]


def _only(ids: Any) -> Any:
    if len(ids) != 1:
        raise Unsayable  # it takes one
    return ids[0]


def _giving(verb: Verb, method: Method) -> Of:
    field = method.gives or verb.pages
    return same if not field else lambda answer: answer[field]


def keywords(request: type[Request], values: Values) -> Values:
    """Values in the form of the wire as keywords of the clients."""
    result: Values = {}
    for name, value in values.items():
        field = next((item for item in request.fields() if item.name == name), None)
        if field is None:
            raise Unsayable
        if isinstance(field.kind, Block):
            result |= keywords(field.kind.block, value)
        else:
            result[field.python] = _in_python(field.kind, value)
    return result


def _in_python(kind: FieldKind, value: Any) -> Any:
    if isinstance(kind, Policy) and value is not None:
        return Retry.of(value) if isinstance(value, dict) else Retry.named(value)
    if isinstance(kind, Rule) and isinstance(value, dict):
        return IfPending.of(value)
    is_moment = isinstance(kind, Moment) or (isinstance(kind, Since) and type(value) is int)
    if type(value) is float and isinstance(kind, Span):
        raise Unsayable  # it would be seconds
    if type(value) is not int or not (is_moment or isinstance(kind, Span)):
        return bytes(value) if isinstance(kind, Body) and isinstance(value, bytes) else value
    try:
        span = timedelta(milliseconds=value)
        return datetime.fromtimestamp(0, UTC) + span if is_moment else span
    except OverflowError:
        raise Unsayable from None


# --- the command line ----------------------------------------------------------------------------


class Cli(Way):
    """Each command in this process, as ``tickwheel ARGUMENTS --json``."""

    name = "cli"

    def ask(self, scene: Scene, values: Values) -> Said:
        saying = scene.saying
        command = shlex.split(_command(saying.cli, values))
        url = f"tcp://127.0.0.1:{self.port}"
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = app.run(["--url", url, "--token", self.token, "--json", *command])
        lines = [json.loads(line) for line in out.getvalue().splitlines()]
        if code and not lines:
            _, name, text = err.getvalue().strip().split(": ", 2)
            error = from_wire(name, text)
            assert name in BY_CODE and code == exit_code(error), err.getvalue()
            raise error
        return Said(lines, saying.shows or _lines_of(scene.verb))


def _command(template: str, values: Values) -> str:
    """The command with these values, each of which must have its place: ``{name}``, or
    ``[name: text]`` for what is said when the value is there. Raises Unsayable."""
    answer = re.sub(r"\[(\w+): ([^]]*)\]", lambda it: it[2] if values.get(it[1]) else "", template)
    named = set(re.findall(r"[{[](\w+)", template))
    if not template or values.keys() - named:
        raise Unsayable
    try:
        return answer.format(**values)
    except (KeyError, TypeError):
        raise Unsayable from None


def _lines_of(verb: Verb) -> Of:
    """What a command shows of an answer: a line, or one for each item; see ``agree``."""
    if verb.pages:
        return lambda answer: answer[verb.pages]
    if verb.answer == list[str]:
        return lambda answer: [{"status": word} for word in answer]
    if verb.answer == list[TaskOutcome]:
        return lambda answer: [dict(zip(("id", "status", "due_ms"), item)) for item in answer]  # noqa: B905  # a due time may be left out
    if verb.answer is AcceptedIds:
        return lambda ids: [{"id": task_id} for task_id in ids]
    return lambda answer: answer if isinstance(answer, list) else [answer]


WAYS: tuple[type[Way], ...] = (Tcp, OverHttp, OverGateway, AsyncPython, SyncPython, Cli)


def error_of(way: Way, scene: Scene, values: Values) -> TickwheelError | None:
    """The error with which it is refused; None: it is not. Raises Unsayable."""
    try:
        way.ask(scene, values)
    except TickwheelError as error:
        return error
    return None
