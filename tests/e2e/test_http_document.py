"""The OpenAPI document against a real daemon: whatever follows from it is tried, and nothing that
comes back is a failure of the daemon, or is not in the document."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from support.daemon import Daemon, TwoShards
from tickwheel.server.access import tokens

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)
"""All but that what fits the document is accepted: no document says which receipts there are."""
ENDLESS = ("/v1/topics/{topic}/deliveries", "/v1/overview/stream")
"""A stream has no end to wait for; tests/server/http has them."""
REFUSALS = """
[checks]
negative_data_rejection.expected-statuses = [400, 403, 404, 405, 409, 410, 413, 415, 422, 429, 503]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503]
"""
"""Refusals include oversized bodies and a topic being deleted (503, retryable)."""
SHOWN_MAX = 1_000
TOKEN = "from the document"
WHO = ("all", "small")
OURS = "orders"
SCOPES = (f"produce={OURS}", f"consume={OURS}", f"operate={OURS}", f"read={OURS}")
QUOTAS = ("connections=50", "pending=500", "tasks_per_s=200")
TESTS = Path(__file__).parents[1]
HOOKS = {
    "SCHEMATHESIS_HOOKS": "e2e.document_hooks",
    "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))),
}
"""Values at and beyond the bounds, too: ``document_hooks.py``."""


@pytest.mark.parametrize(
    ("kind", "who", "phases", "examples", "timeout_s"),
    [
        (Daemon, "all", "fuzzing", 1, 400),
        *(
            pytest.param(
                kind, who, "examples,coverage,fuzzing,stateful", 50, 1_200, marks=pytest.mark.slow
            )
            for kind in (Daemon, TwoShards)
            for who in WHO
        ),
    ],
)
def test_responses_match_the_openapi_document(
    make_daemon: Callable[..., Daemon], kind: type[Daemon], who: str, phases: str, examples: int,
    timeout_s: float
) -> None:  # fmt: skip
    """By somebody with all rights, and by a token with quotas and the rights of one topic."""
    daemon = make_daemon(kind, http=True, serve_token=TOKEN, http_wait_max_s=0.02)
    tokens_file = daemon.folder / "tokens.json"
    grants, quotas = tokens.parse_scopes(SCOPES), tokens.parse_quotas(QUOTAS)
    now_ms = time.time_ns() // 1_000_000
    _, small = tokens.create(tokens_file, "small", grants, now_ms, None, None, quotas)
    daemon.settings["tokens_file"] = str(tokens_file)
    daemon.start()
    token, env = (TOKEN, {}) if who == "all" else (small, {"DOCUMENT_TOPIC": OURS})
    (daemon.folder / "schemathesis.toml").write_text(REFUSALS)
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run", f"{daemon.http}/openapi.json",
            "--phases", phases, "--max-examples", str(examples), "--checks", ",".join(CHECKS),
            *(word for path in ENDLESS for word in ("--exclude-path", path)),
            "--header", f"Authorization: Bearer {token}",
            "--max-response-time", "10", "--request-timeout", "30", "--no-color",
            "--suppress-health-check", "all", "--generation-database", ":memory:",
        ],
        cwd=daemon.folder, capture_output=True, text=True, timeout=timeout_s, check=False,
        env=os.environ | HOOKS | env,
    )  # fmt: skip
    # What it tries may have megabytes.
    texts = [line[:SHOWN_MAX] for line in (done.stdout + done.stderr).splitlines()]
    assert daemon.alive, daemon.log_text()
    assert done.returncode == 0, "\n".join(texts)
    assert "internal_error" not in daemon.log_text(), daemon.log_text()
    assert "Traceback" not in daemon.log_text(), daemon.log_text()


KINDS = {
    "/openapi.json": "application/json",
    "/docs/": "text/html; charset=utf-8",
    "/docs": "text/html; charset=utf-8",
    "/docs/start.js": "text/javascript; charset=utf-8",
    "/docs/swagger-ui.js": "text/javascript; charset=utf-8",
    "/docs/swagger-ui.css": "text/css; charset=utf-8",
}


def test_the_openapi_page_loads_no_other_host(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(http=True, serve_token=TOKEN).start()
    for path, kind in KINDS.items():
        with urllib.request.urlopen(f"{daemon.http}{path}", timeout=30) as response:  # noqa: S310
            assert response.headers["content-type"] == kind, path
            text = response.read().decode()
            if kind.startswith("text/html"):
                assert "default-src 'none'" in response.headers["content-security-policy"]
                assert "http" not in text.replace("http-", "").replace("HTTP", "")
