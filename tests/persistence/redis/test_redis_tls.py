"""Redis over TLS: with certificates that are trusted it works, and without it says why not."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from persistence.redis.subjects import commit, store
from persistence.store_subject import OWNER, Subject
from support.redis_groups import Cluster, SentinelGroup, slot_of
from support.redis_proxy import Proxy
from support.redis_server import RedisServer
from support.store_rows import tasks
from tickwheel.persistence.contract import StoreUnusable
from tickwheel.persistence.redis import RedisStore, options_from


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of 127.0.0.1; its key is in the same folder."""
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    key = path.with_name("key.pem")
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {path} -days 2"
    names = "-subj /CN=tickwheel -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), *names.split()], check=True, capture_output=True)
    return path


@pytest.fixture
async def secured(shared_redis: RedisServer, certificate: Path) -> AsyncIterator[str]:
    """The URL of a Redis that speaks TLS, and asks its clients for a certificate."""
    shared_redis.call("FLUSHALL")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificate)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    context.verify_mode = ssl.CERT_REQUIRED
    proxy = await Proxy(shared_redis.port, context).start()
    yield f"rediss://127.0.0.1:{proxy.port}/0?connect_ms=5000"
    await proxy.stop()


def _files(certificate: Path) -> str:
    return f"&tls_ca={certificate}&tls_cert={certificate}&tls_key={certificate.parent}/key.pem"


async def test_tasks_are_kept(secured: str, certificate: Path) -> None:
    subject = Subject(RedisStore(options_from(secured + _files(certificate))))
    assert (await subject.open()).created
    await subject.commit(tasks(range(1, 6_000)))
    await subject.reopen()
    assert len(await subject.ids()) == 5_999
    await subject.store.close(clean=True)


@pytest.mark.parametrize("kind", [SentinelGroup, Cluster])
async def test_a_group_that_speaks_tls_is_followed(
    tmp_path: Path, certificate: Path, kind: type[SentinelGroup | Cluster]
) -> None:
    """With those who are asked for the master, with the master, and with the next one."""
    group = kind(tmp_path / "group", certificate=certificate)
    try:
        await asyncio.to_thread(group.start)
        query = f"connect_ms=5000&tls_ca={certificate}"
        subject = Subject(RedisStore(options_from(group.url(query))))
        await subject.open()
        await subject.commit(tasks(range(1, 10)))
        if isinstance(group, Cluster):
            await asyncio.to_thread(group.switch, slot_of("tw:default:0"))
        else:
            await asyncio.to_thread(group.switch)
        await asyncio.to_thread(group.heal)
        await commit(subject, 10)
        assert store(subject).server_changes == 1
        assert len(await subject.ids()) == 19
        await subject.store.close(clean=True)
    finally:
        await asyncio.to_thread(group.stop)


async def _refused(url: str, match: str) -> None:
    with pytest.raises(StoreUnusable, match=match):
        await RedisStore(options_from(url)).open(OWNER, 0)


async def test_tls_errors_name_the_reason(secured: str, certificate: Path) -> None:
    # The relay's failed handshake is not the store's error.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    await _refused(secured, "CERTIFICATE_VERIFY_FAILED")
    gone = certificate.with_name("gone.pem")
    for name in ("tls_ca", "tls_cert", "tls_key"):
        await _refused(f"{secured}&{name}={gone}", f"{name}: the file .*gone.pem does not exist")
        plain = secured.replace("rediss", "redis")
        await _refused(f"{plain}&{name}={certificate}", f"{name} needs TLS; use rediss://")
