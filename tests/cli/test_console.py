"""``tickwheel console``: where it is, the link, and what stands in no command line."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from support.daemon import Daemon
from support.stand_in import StandIn
from tickwheel.cli import console
from tickwheel.cli.app import run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    with Daemon(folder, http=True, token="secret", login_delay_s=0) as running:
        yield running
