"""The benchmark of the first sight still runs; its figures are not judged here. What they rest on
is: how little a browser has to ask for."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from benchmarks.console import visit
from support.daemon import Daemon

ROOT = Path(__file__).parents[2]
REQUESTS_MAX = 16
BYTES_MAX = 160 * 1024


@pytest.mark.slow
def test_the_first_page_benchmark_runs(tmp_path: Path, chromium: Browser) -> None:
    """``chromium``: where there is none, that is said once and for all."""
    command = [sys.executable, "-m", "benchmarks.console", "--runs", "1", "--tasks", "20"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 tasks, 1 first visits" in done.stdout
    for words in ("first contentful paint", "counts shown"):
        assert re.search(rf"^{words}: median \d+ ms", done.stdout, re.MULTILINE), done.stdout


def test_the_first_page_needs_few_requests(shop: Daemon, chromium: Browser) -> None:
    result = visit(chromium, shop.http)
    assert result["requests"] <= REQUESTS_MAX
    assert result["bytes"] <= BYTES_MAX
    assert 0 < result["paint_ms"] <= result["counted_ms"]


def test_files_are_compressed_and_cached(shop: Daemon) -> None:
    url = f"{shop.http}/console/main.js"
    with urllib.request.urlopen(url, timeout=30) as plain:  # noqa: S310
        text, tag = plain.read(), plain.headers["etag"]
        assert plain.headers["content-encoding"] is None
    packed = urllib.request.Request(url, headers={"accept-encoding": "gzip"})  # noqa: S310
    with urllib.request.urlopen(packed, timeout=30) as answer:  # noqa: S310
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(answer.read()) == text
        policy = answer.headers["content-security-policy"]
    known = urllib.request.Request(url, headers={"if-none-match": tag})  # noqa: S310
    with pytest.raises(urllib.error.HTTPError) as same:
        urllib.request.urlopen(known, timeout=30)  # noqa: S310
    with same.value as answer:
        assert answer.status == 304 and answer.read() == b""
        assert answer.headers["content-security-policy"] == policy
