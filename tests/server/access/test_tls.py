"""Certificates: files that are right, wrong, and changed while they are used; whom they name."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import pytest

from support.certificates import Authority, Pair
from tickwheel.errors import BadRequest
from tickwheel.server.access import tls
from tickwheel.server.access.tls import Certificates, Files, Pace, load, parts_of, required_parts
from tickwheel.server.metrics.observed import Observed
from tickwheel.server.settings import Settings
from tickwheel.server.settings import load as load_settings


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def files(pair: Pair, client_ca: Path | None = None) -> Files:
    return Files(str(pair.cert), str(pair.key), None if client_ca is None else str(client_ca))


def test_a_certificate_says_until_when_it_is_valid(authority: Authority) -> None:
    context, until_s = load(files(authority.sign("right")))
    assert context.verify_mode == ssl.CERT_NONE
    assert 29 * 86_400 < until_s - time.time() < 31 * 86_400


def test_key_and_certificate_can_share_a_file(authority: Authority, tmp_path: Path) -> None:
    pair = authority.sign("both")
    both = tmp_path / "both.pem"
    comment, ca = "# für Köln\n", tmp_path / "ca.pem"  # PEM files may contain other text
    both.write_text(comment + pair.key.read_text() + pair.cert.read_text() + comment)
    ca.write_text(comment + authority.ca.read_text())
    assert load(Files(str(both), None, str(ca)))[0].get_ca_certs()


def test_files_that_vanish_while_they_are_read_are_named(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, read = authority.sign("vanishing"), tls._text
    monkeypatch.setattr(tls, "_text", lambda *args: (read(*args), Path(args[1]).unlink())[0])
    with pytest.raises(BadRequest, match=r"tls_cert .*vanishing.* or .*No such file"):
        load(files(pair))


def test_certificate_errors_are_one_line_naming_the_file(
    authority: Authority, tmp_path: Path
) -> None:
    right, other = authority.sign("right"), authority.sign("other")
    expired = authority.sign("expired", days=-1)
    for_clients = authority.sign("for-clients", extension="extendedKeyUsage=clientAuth")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    locked = tmp_path / "locked.key"
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n")
    for given, words in (
        (Files("no/such.pem", None, None), ("tls_cert no/such.pem", "No such file")),
        (Files(str(right.cert), "no/such.key", None), ("tls_key no/such.key", "No such file")),
        (Files(str(text), None, None), ("tls_cert", "text.pem must contain a certificate")),
        (Files(str(right.key), str(right.cert), None), ("tls_cert", "must contain a certificate")),
        (Files(str(right.cert), str(right.cert), None), ("tls_key", "must contain a private key")),
        (Files(str(right.cert), str(locked), None), ("tls_key", "passphrase")),
        (Files(str(right.cert), str(other.key), None), ("tls_key", "is not the key of tls_cert")),
        (Files(str(broken), str(right.key), None), ("tls_cert", "broken.pem")),
        (files(expired), ("tls_cert", "certificate has expired")),
        (files(for_clients), ("tls_cert", "unsuitable certificate purpose")),
        (files(right, text), ("tls_client_ca", "text.pem must contain a certificate")),
        (files(right, broken), ("tls_client_ca", "broken.pem")),
    ):
        with pytest.raises(BadRequest) as raised:
            load(given)
        message = raised.value.message
        assert all(word in message for word in words) and "\n" not in message, message


async def test_changed_certificates_apply_to_new_connections(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    observed = Observed()
    pair = authority.sign("changing")
    certificates = Certificates(files(pair), lambda event, _: texts.append(event), observed)
    await certificates.start()
    first = certificates.context
    await certificates.reload_if_changed()
    assert certificates.context is first and texts == []
    pair.cert.write_text("half a file")
    for _ in range(2):
        await certificates.reload_if_changed()
    assert certificates.context is first and texts == ["certificate_broken"]
    assert not observed.certificate_ok
    authority.sign("changing")
    await certificates.reload_if_changed()
    assert certificates.context is not first and texts[1:] == ["certificate_read"]
    assert observed.certificate_ok
    second = certificates.context
    pair.key.unlink()
    await certificates.reload_if_changed()
    assert certificates.context is second and not observed.certificate_ok
    observed.certificate_ok = True
    monkeypatch.setattr(tls, "load", lambda _: 1 / 0)
    await certificates.reload_if_changed()  # an unexpected error does not end the checks
    assert certificates.context is second and not observed.certificate_ok


def test_a_certificate_names_its_holder_by_parts() -> None:
    subject = ((("countryName", "DE"),), (("organizationName", "shop"), ("commonName", "billing")))
    names = (("DNS", "billing.shop"), ("URI", "spiffe://shop"), ("IP Address", "10.0.0.9"))
    parts = parts_of({"subject": subject, "subjectAltName": names})
    for rule in ("CN=billing", "O=shop, CN=billing", "URI=spiffe://shop", "IP Address=10.0.0.9"):
        assert required_parts(rule) <= parts, rule
    for rule in ("CN=bill", "CN=billing,O=other", "DNS=shop", "cn=billing"):
        assert not required_parts(rule) <= parts, rule
    assert parts_of(None) == parts_of({}) == frozenset()
    for rule in ("", "billing", "CN=", "CN=a,", "=a", "C N=a"):
        with pytest.raises(BadRequest, match="CN=billing"):
            required_parts(rule)


# --- which addresses are taken -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"listen": "tls://127.0.0.1:1"}, "needs tls_cert"),
        ({"http": "https://127.0.0.1:1"}, "needs tls_cert"),
        ({"tls_key": "k"}, "tls_key needs tls_cert"),
        ({"tls_client_ca": "c"}, "tls_client_ca needs tls_cert"),
        ({"tls_cert": "c"}, "no port uses TLS"),
        ({"listen": "ftp://127.0.0.1:1"}, "tcp:// or tls://"),
        ({"http": "tls://127.0.0.1:1"}, "http:// or https://"),
        ({"advertise": "http://127.0.0.1:1"}, "tcp:// or tls://"),
        (
            {"listen": "tls://127.0.0.1:1", "tls_cert": "c", "tls_client_required": True},
            "tls_client_required needs tls_client_ca",
        ),
        (
            {"listen": "tcp://0.0.0.0:1"},
            "without tokens (serve_token, tokens_file) and without TLS (tls_cert)",
        ),
        ({"listen": "0.0.0.0:1", "serve_token": "t"}, "without TLS"),
        ({"listen": "tls://[::]:1", "tls_cert": "c"}, "without tokens"),
        ({"http": "10.0.0.1:1", "serve_token": "t"}, "http (10.0.0.1:1)"),
        ({"listen": "tcp://wheel.internal:1", "tokens_file": "t"}, "without TLS"),
    ],
)
def test_a_tls_port_without_its_files_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(BadRequest) as raised:
        load_settings(None, given)
    assert words in raised.value.message and "\n" not in raised.value.message


@pytest.mark.parametrize(
    "given",
    [
        {"listen": "tcp://localhost:1", "http": "127.0.0.9:1"},
        {"listen": "tcp://[::1]:1"},
        {"listen": "tcp://0.0.0.0:1", "insecure": True},
        {
            "listen": "tls://0.0.0.0:1",
            "http": "https://[::]:1",
            "tls_cert": "c",
            "serve_token": "t",
        },
        {"listen": "tls://0.0.0.0:1", "http": "127.0.0.1:1", "tls_cert": "c", "tokens_file": "t"},
        {
            "listen": "tls://0.0.0.0:1",
            "tls_cert": "c",
            "tls_client_ca": "a",
            "tls_client_required": True,
        },
    ],
)
def test_a_tls_port_with_its_files_is_accepted(given: dict[str, object]) -> None:
    assert isinstance(load_settings(None, given), Settings)


def test_handshakes_per_second_are_limited() -> None:
    pace = Pace(per_s=10, in_progress_max=5)
    for _ in range(5):
        assert pace.wait_s(1.0) == 0
        pace.count()
    assert pace.wait_s(1.0) == pytest.approx(0.1)
    assert pace.wait_s(1.05) == pytest.approx(0.05)
    assert pace.wait_s(1.1001) == 0
    pace.count()
    assert pace.wait_s(1.1001) > 0.09
    assert pace.wait_s(1_000.0) == 0
    for _ in range(5):  # what nobody used is not kept for later
        pace.count()
    assert pace.wait_s(1_000.0) > 0
