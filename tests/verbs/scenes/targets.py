"""Scenes of targets. The house has a sender that sends nothing, see ``support/sender.py``."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from support.sender import SENT
from support.shard_rig import NOW_MS
from tickwheel.api.verbs import VERBS
from tickwheel.webhooks import Callback, callback_token
from verbs.scene import Stage, Values, refusal, scene

URL = "https://93.184.216.34/hook"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
FILE = Path(__file__).with_name("secret.txt")
"""The secret as the command line has it."""
BROKER = "redis://93.184.216.34/0?stream=orders"
GOES = {"state": "sending", "sent": 3, "acked": 2, "failed": 1, "in_flight": 0}


def pushed(stage: Stage) -> Values:
    """The names of a group that is pushed."""
    fields = {"topic": stage.topic, "group": stage.group}
    stage.ask("set_push", **fields, url=URL, secrets=(SECRET,))
    return fields


@scene(
    "set_push",
    cli=f"push set {{topic}} {{group}} --to {{url}} [secrets: --secret-file {FILE}]"
    " --format {format}"
    " --concurrency {concurrency} --request-timeout {request_timeout_ms}ms"
    " --connect-timeout {connect_timeout_ms}ms --callback-lease {callback_lease_ms}ms",
)
def set_push(stage: Stage) -> Any:
    options = {
        "format": "cloudevents", "concurrency": 5, "request_timeout_ms": 2_000,
        "connect_timeout_ms": 1_000, "callback_lease_ms": 60_000,
    }  # fmt: skip
    fields = {"topic": stage.topic, "group": stage.group, "url": f"{URL}?code=1"}
    yield fields | {"secrets": (SECRET,)} | options, {
        "topic": "t", "group": "g", "kind": "push", "url": f"{URL}?code=…", "created": True,
        "since_ms": NOW_MS, "by": "token all", "secrets": 1, **options, **GOES,
    }  # fmt: skip
    again = stage.ask("set_push", topic=stage.topic, group=stage.group, url=URL)
    assert (again["created"], again["secrets"], again["format"]) == (False, 1, "plain")


@scene(
    "set_forward",
    cli=f"forward set {{topic}} {{group}} --to {{url}} [secret: --secret-file {FILE}]"
    " --batch {batch} --concurrency {concurrency}",
)
def set_forward(stage: Stage) -> Any:
    fields = {"topic": stage.topic, "group": stage.group, "url": BROKER, "secret": SECRET}
    yield fields | {"batch": 100, "concurrency": 2}, {
        "topic": "t", "group": "g", "kind": "forward", "url": BROKER, "created": True,
        "since_ms": NOW_MS, "by": "token all", "secrets": 1, "batch": 100, "concurrency": 2, **GOES,
    }  # fmt: skip
    assert stage.ask("targets", topic=stage.topic)["targets"][0]["kind"] == "forward"


@scene("remove_target", cli="push remove {topic} {group}")
def remove_target(stage: Stage) -> Any:
    yield pushed(stage), {"kind": "push", "url": URL}
    assert not stage.ask("targets", topic=stage.topic)["targets"]
    assert stage.pull() == []


@scene("targets", cli="push list {topic}", gives=lambda answer: answer["targets"],
       shows=lambda answer: answer["targets"])  # fmt: skip
def targets(stage: Stage) -> Any:
    pushed(stage)
    yield {"topic": stage.topic}, {
        "targets": [{
            "topic": "t", "group": "g", "kind": "push", "url": URL, "since_ms": NOW_MS,
            "by": "token stage", "secrets": 1, "format": "plain", "concurrency": 32, **GOES,
        }],
    }  # fmt: skip


@scene("test_push", cli=f"push test {{url}} [secrets: --secret-file {FILE}] --format {{format}}")
def test_push(stage: Stage) -> Any:
    yield {"url": URL, "secrets": (SECRET,), "format": "plain"}, SENT


@scene(
    "push_log",
    cli="push log {topic} {group} --limit {limit}",
    gives=lambda answer: answer["requests"],
    shows=lambda answer: answer["requests"],
)
def push_log(stage: Stage) -> Any:
    yield pushed(stage) | {"limit": 1}, {"requests": [SENT | {"number": 2}]}


@scene("resend", cli="push resend {topic} {group} {number}")
def resend(stage: Stage) -> Any:
    yield pushed(stage) | {"number": 2}, SENT | {"number": 2, "again": True}


def waiting(stage: Stage) -> str:
    """The token of a task that waits for a callback."""
    fields = {"topic": stage.topic, "group": stage.group}
    [(task_id, epoch, attempt)] = stage.deliver()
    stage.ask("set_push", **fields, url=URL, secrets=(SECRET,), callback_lease_ms=60_000)
    return callback_token(Callback(stage.topic, stage.group, task_id, epoch, attempt), SECRET)


@scene("settle_callback")
def settle_callback(stage: Stage) -> Any:
    yield (
        {"token": waiting(stage), "result": "nack", "delay_ms": 5, "reason": "busy"},
        {"result": "retrying"},
    )


@scene("settle_callback", "done")
def settle_done(stage: Stage) -> Any:
    yield {"token": waiting(stage)}, {"result": "acked"}


@scene("settle_callback", "never")
def settle_never(stage: Stage) -> Any:
    yield {"token": waiting(stage), "result": "reject", "reason": "bad"}, {"result": "dead"}


@scene("settle_callback", "not yet")
def settle_later(stage: Stage) -> Any:
    yield {"token": waiting(stage), "result": "extend", "lease_ms": 5_000}, {"result": "extended"}


# --- refused -------------------------------------------------------------------------------------


def of_group(stage: Stage, **said: Any) -> Values:
    return {"topic": stage.topic, "group": stage.group, **said}


FORBIDDEN = "http://127.0.0.1:9/hook"
for _name in ("set_push", "test_push"):
    refusal(_name, "bad_request", cli=False)(
        lambda stage, name=_name: (
            {"url": FORBIDDEN, "secrets": (SECRET,)}
            | ({} if name == "test_push" else of_group(stage))
        )
    )
    refusal(_name, "bad_request", cli=False)(
        lambda stage, name=_name: (
            {"url": "https://me:pw@host/", "secrets": (SECRET,)}
            | ({} if name == "test_push" else of_group(stage))
        )
    )
    refusal(_name, "bad_request", cli=False)(
        lambda stage, name=_name: (
            {"url": URL, "secrets": ("whsec_short",)}
            | ({} if name == "test_push" else of_group(stage))
        )
    )
refusal("set_push", "bad_request", cli=False)(lambda stage: of_group(stage, url=URL))
refusal("set_forward", "bad_request", cli=False)(
    lambda stage: of_group(stage, url="redis://[::ffff:10.0.0.1]/0?stream=s")
)


def subscribed(stage: Stage) -> Values:
    """A group that somebody is subscribed to, on the stage's own connection."""
    stage.make_group()
    stage.say(VERBS["subscribe"], next(_numbers), stage.topic, stage.group, 5, None)
    return of_group(stage)


_numbers = count(1)
refusal("set_push", "conflict", cli=False)(
    lambda stage: subscribed(stage) | {"url": URL, "secrets": (SECRET,)}
)
refusal("set_forward", "conflict", cli=False)(lambda stage: subscribed(stage) | {"url": BROKER})


@refusal("remove_target", "not_found")
def no_target(stage: Stage) -> Values:
    stage.make_group()
    return of_group(stage)


refusal("push_log", "not_found", cli=False)(no_target)
refusal("resend", "not_found", cli=False)(lambda stage: no_target(stage) | {"number": 1})


def forwarded(stage: Stage) -> Values:
    stage.ask("set_forward", **of_group(stage), url=BROKER)
    return of_group(stage)


refusal("push_log", "conflict", cli=False)(forwarded)
refusal("resend", "conflict", cli=False)(lambda stage: forwarded(stage) | {"number": 1})
refusal("settle_callback", "not_found")(lambda stage: {"token": "none"})
refusal("settle_callback", "bad_request")(lambda stage: {"token": "none", "result": "odd"})


@refusal("settle_callback", "not_found")
def of_another(stage: Stage) -> Values:
    pushed(stage)
    other = "whsec_" + "A" * 32
    return {"token": callback_token(Callback(stage.topic, stage.group, 1, 1, 1), other)}
