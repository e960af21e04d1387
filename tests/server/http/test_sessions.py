"""Browsers log in: cookies that count for nothing without our header, links that work once."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from server.access.access_rig import AccessRig, id_of
from server.http.rig import HttpRig, Request
from support.shard_rig import started
from tickwheel.api.verb import Right
from tickwheel.server.access import tokens
from tickwheel.server.access.logins import (
    LINK_S,
    LINKS_EACH_MAX,
    SESSION_S,
    SESSIONS_EACH_MAX,
    SESSIONS_MAX,
    Sessions,
    cookie_name,
)
from tickwheel.server.http import api as apis
from tickwheel.server.shard.callers import Principal

HOST = "127.0.0.1:7356"
COOKIE = "tickwheel_7356"


rig = started(lambda: AccessRig(login_delay_s=0))


async def log_in(rig: AccessRig, token: str) -> dict[str, str]:
    """The headers of the page that has logged in."""
    response = await rig.call("POST", "/v1/sessions", host=HOST, authorization=f"Bearer {token}")
    assert response.status == 201, response.body
    return {"host": HOST, "cookie": cookie_of(response), "tickwheel-console": "1"}


def cookie_of(response: Any) -> str:
    return str(response.headers["set-cookie"]).partition(";")[0]


async def status(rig: AccessRig, target: str, headers: dict[str, str], method: str = "GET") -> int:
    response = await rig.call(method, target, **headers)
    return response.status


async def test_a_login_cookie_is_http_only_and_same_site(rig: AccessRig) -> None:
    token = await rig.token("read", name="ops")
    response = await rig.call("POST", "/v1/sessions", host=HOST, authorization=f"Bearer {token}")
    value, *flags = [part.strip() for part in response.headers["set-cookie"].split(";")]
    name, _, text = value.partition("=")
    assert name == COOKIE and len(text) >= 43 and token not in value
    assert set(flags) == {"Path=/v1", f"Max-Age={SESSION_S}", "HttpOnly", "SameSite=Strict"}
    assert response.json["name"] == "token ops"
    assert response.json["rights"] == {"read": ["*"]}
    headers = {"host": HOST, "cookie": f"other=1; {value}", "tickwheel-console": "1"}
    assert await status(rig, "/v1/stats", headers) == 200
    assert await status(rig, "/v1/topics/t", headers, "DELETE") == 403


@pytest.mark.parametrize(
    "target",
    ["/v1/stats", "/v1/tasks/5", "/v1/topics/t/deliveries", "/v1/overview/stream"],
)
async def test_a_cookie_needs_the_console_header(rig: AccessRig, target: str) -> None:
    """Pages on other ports of this host send the cookie, but cannot send the header."""
    headers = await log_in(rig, await rig.token("all"))
    del headers["tickwheel-console"]
    assert await status(rig, target, headers) == 401
    for method in ("POST", "DELETE", "PATCH"):
        assert await status(rig, "/v1/tasks/5", headers, method) in (401, 405)


async def test_another_origin_is_refused_despite_cookie_and_header(rig: AccessRig) -> None:
    headers = await log_in(rig, await rig.token("all")) | {"origin": "http://127.0.0.1:9999"}
    assert await status(rig, "/v1/stats", headers) == 403


@pytest.mark.parametrize(
    ("site", "wanted"),
    [("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)],
)
async def test_an_image_of_another_site_is_refused(rig: AccessRig, site: str, wanted: int) -> None:
    """It has no Origin."""
    headers = {"authorization": f"Bearer {await rig.token('all')}", "sec-fetch-site": site}
    assert await status(rig, "/v1/stats", headers) == wanted


async def test_a_report_is_opened_as_a_page_and_needs_the_cookie(rig: AccessRig) -> None:
    headers = await log_in(rig, await rig.token("read"))
    del headers["tickwheel-console"]
    assert await status(rig, "/v1/report", headers) == 404  # there is none
    assert await status(rig, "/v1/report", {"host": HOST}) == 401


async def test_a_session_request_without_login_reveals_nothing(rig: AccessRig) -> None:
    failures = rig.observed.login_failures
    response = await rig.call("GET", "/v1/session", host=HOST)
    assert response.status == 200
    nobody = {"name": None, "is_login_needed": True, "until_ms": None, "rights": {}}
    assert response.json == nobody
    assert rig.observed.login_failures == failures
    again = await rig.call("DELETE", "/v1/session", host=HOST)
    assert (again.status, again.json) == (200, nobody)


async def test_a_session_ends_by_logging_out(rig: AccessRig) -> None:
    headers = await log_in(rig, await rig.token("read"))
    other = await log_in(rig, await rig.token("read"))
    gone = await rig.call("DELETE", "/v1/session", **headers)
    assert gone.json["name"] is None and "Max-Age=0" in gone.headers["set-cookie"]
    assert await status(rig, "/v1/stats", headers) == 401
    assert await status(rig, "/v1/stats", other) == 200


async def test_a_logout_needs_the_console_header(rig: AccessRig) -> None:
    headers = await log_in(rig, await rig.token("read"))
    bare = {name: text for name, text in headers.items() if name != "tickwheel-console"}
    await rig.call("DELETE", "/v1/session", **bare)
    assert await status(rig, "/v1/stats", headers) == 200


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/session-links"])
async def test_a_session_cannot_log_in_again(rig: AccessRig, path: str) -> None:
    """A new session would outlive the end of the first one."""
    token = await rig.token("all")
    headers = await log_in(rig, token)
    assert await status(rig, path, headers, "POST") == 401
    assert await status(rig, path, headers | {"authorization": f"Bearer {token}"}, "POST") == 201


async def test_a_session_ends_at_its_expiry_and_with_its_token(rig: AccessRig) -> None:
    token = await rig.token("read", name="a")
    first, second = await log_in(rig, token), await log_in(rig, await rig.token("read", name="b"))
    tokens.revoke(rig.path, id_of(token))
    await rig.reload()
    assert await status(rig, "/v1/stats", first) == 401
    assert await status(rig, "/v1/stats", second) == 200
    rig.sources.now_ms += SESSION_S * 1000
    assert await status(rig, "/v1/stats", second) == 401


async def test_a_request_looks_up_its_session_once(
    rig: AccessRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = await log_in(rig, await rig.token("read"))
    find = Mock(wraps=rig.api._sessions.find)
    monkeypatch.setattr(rig.api._sessions, "find", find)
    assert await status(rig, "/v1/stats", headers) == 200
    find.assert_called_once()


@pytest.mark.parametrize("target", ["/v1/overview/stream", "/v1/topics/t/deliveries"])
@pytest.mark.parametrize("is_logout", [True, False])
async def test_a_stream_ends_with_its_session(
    rig: AccessRig, monkeypatch: pytest.MonkeyPatch, target: str, *, is_logout: bool
) -> None:
    monkeypatch.setattr(apis, "SESSION_CHECK_S", 0.001)
    token = await rig.token("all")
    headers = await log_in(rig, token)
    other = rig.begin("GET", target, authorization=f"Bearer {token}", **headers)
    stream = rig.begin("GET", target, **headers)
    for request in (other, stream):
        await request.until(lambda response: response.body)
    if is_logout:
        await rig.call("DELETE", "/v1/session", **headers)
    else:
        rig.sources.now_ms += SESSION_S * 1000
    ended = await stream.until(lambda response: response.whole)
    assert b"event: end" in ended.body and apis.SESSION_OVER.encode() in ended.body
    assert not other.task.done(), "it was not asked in the session"
    other.leave()
    await other.done()


async def test_a_link_logs_in_once(rig: AccessRig) -> None:
    token = await rig.token("read", name="ops")
    made = await rig.call("POST", "/v1/session-links", authorization=f"Bearer {token}")
    assert made.status == 201
    code = made.json["code"]
    headers = await log_in(rig, code)
    who = await rig.call("GET", "/v1/session", **headers)
    assert who.json["name"] == "token ops"
    again = await rig.call("POST", "/v1/sessions", host=HOST, authorization=f"Bearer {code}")
    assert again.status == 401 and "already used" in again.json["detail"]


async def test_a_login_link_is_valid_only_for_a_login(rig: AccessRig) -> None:
    token = await rig.token("read")
    code = (await rig.call("POST", "/v1/session-links", authorization=f"Bearer {token}")).json[
        "code"
    ]
    assert await status(rig, "/v1/stats", {"authorization": f"Bearer {code}"}) == 401
    foreign = {"authorization": f"Bearer {code}", "origin": "http://evil.example", "host": HOST}
    assert await status(rig, "/v1/sessions", foreign, "POST") == 403
    await log_in(rig, code)  # neither has used it up


async def test_a_link_is_short_lived_and_ends_with_its_token(rig: AccessRig) -> None:
    async def code_of(token: str) -> str:
        made = await rig.call("POST", "/v1/session-links", authorization=f"Bearer {token}")
        return f"Bearer {made.json['code']}"

    token = await rig.token("read")
    late, revoked = await code_of(token), await code_of(token)
    tokens.revoke(rig.path, id_of(token))
    await rig.reload()
    assert await status(rig, "/v1/sessions", {"authorization": revoked}, "POST") == 401
    late = await code_of(await rig.token("read", name="b"))
    rig.sources.now_ms += LINK_S * 1000
    rig.sources.ahead_ms -= LINK_S * 1000  # a clock that is set back prolongs nothing
    assert await status(rig, "/v1/sessions", {"authorization": late}, "POST") == 401


async def test_each_token_has_a_few_sessions_and_links_at_a_time(rig: AccessRig) -> None:
    first = await rig.token("read", name="a")
    others = await log_in(rig, await rig.token("read", name="b"))
    mine = [await log_in(rig, first) for _ in range(SESSIONS_EACH_MAX)]
    assert await status(rig, "/v1/stats", mine[0]) == 200
    mine.append(await log_in(rig, first))
    assert await status(rig, "/v1/stats", mine[0]) == 401
    assert [await status(rig, "/v1/stats", item) for item in (mine[1], mine[-1], others)] == [
        200
    ] * 3

    asked = {"authorization": f"Bearer {first}"}
    codes = [
        (await rig.call("POST", "/v1/session-links", **asked)).json["code"]
        for _ in range(LINKS_EACH_MAX + 1)
    ]
    texts = [
        await status(rig, "/v1/sessions", {"authorization": f"Bearer {code}"}, "POST")
        for code in codes
    ]
    assert texts == [401] + [201] * LINKS_EACH_MAX


def test_all_sessions_together_are_limited(rig: AccessRig) -> None:
    sessions = Sessions(rig.logins, rig.shard.clock)
    for number in range(SESSIONS_MAX):
        sessions.begin(Principal(f"p{number}", ((Right.READ, ("*",)),)))
    with pytest.raises(Exception, match=f"the limit is {SESSIONS_MAX}"):
        sessions.begin(Principal("one more", None))
    rig.sources.now_ms += SESSION_S * 1000
    sessions.begin(Principal("one more", None))


@pytest.mark.parametrize(("rule", "name"), [("CN=anna", "token anna"), ("CN=bert", None)])
async def test_a_certificate_needs_no_login(rig: AccessRig, rule: str, name: str | None) -> None:
    tokens.create(rig.path, "anna", tokens.parse_scopes(["read"]), 1, None, rule)
    await rig.reload()
    peer = {"subject": ((("commonName", "anna"),),)}
    asked = Request(
        rig.api, "GET", "/v1/session", None, {"host": HOST}, connection={"certificate": peer}
    )
    response = await asked.done()
    assert response.status == 200 and response.json["name"] == name


async def test_logins_need_tokens() -> None:
    running = await HttpRig().start()
    try:
        made = await running.call("POST", "/v1/sessions", host=HOST)
        assert made.status == 201 and "set-cookie" not in made.headers
        assert made.json["is_login_needed"] is False and made.json["name"] == ""
        assert (await running.post("/v1/session-links"))["code"] is None
        who = (await running.call("GET", "/v1/session")).json
        assert who["rights"] == {right: ["*"] for right in Right}
    finally:
        await running.stop()


@pytest.mark.parametrize(
    ("host", "name"),
    [("a:1", "tickwheel_1"), ("[::1]:80", "tickwheel_80"), ("a", "tickwheel"), ("", "tickwheel")],
)
def test_daemons_on_one_host_have_separate_cookies(host: str, name: str) -> None:
    assert cookie_name(host.encode()) == name
