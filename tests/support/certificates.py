"""A certificate authority made by ``openssl``."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

LOCAL = "subjectAltName=DNS:localhost,IP:127.0.0.1"


class Pair(NamedTuple):
    """The PEM files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """An authority; clients that trust `ca` accept what ``sign`` makes."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._root = Pair(folder / f"{name}.pem", folder / f"{name}.key")
        _openssl("req", "-x509", *_new_key(self._root.key), "-out", self._root.cert,
                 "-days", "30", "-subj", f"/CN={name}")  # fmt: skip

    @property
    def ca(self) -> Path:
        return self._root.cert

    def sign(self, name: str, *, subject: str = "", extension: str = LOCAL, days: int = 30) -> Pair:
        """Write ``NAME.pem`` and ``NAME.key``, replacing earlier ones."""
        made = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(extension + "\n")
        _openssl("req", *_new_key(made.key), "-out", request, "-subj", subject or f"/CN={name}")
        fresh = made.cert.with_suffix(".fresh")
        _openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._root.key,
                 "-CAcreateserial", "-out", fresh, "-extfile", extensions,
                 "-days", str(days))  # fmt: skip
        fresh.replace(made.cert)
        return made


def _new_key(path: Path) -> tuple[object, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path)


def _openssl(*arguments: object) -> None:
    done = subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
