"""The file of tokens and their rights.

A token has the form ``tw_ID_SECRET``. The file contains a SHA-256 of the secret, not the secret
itself. The secret has 256 random bits and cannot be guessed, so a slow hash would not help
(docs/decisions/0026). ``create`` and ``revoke`` do not need a daemon. The daemon writes each
token's last use to a second file, so it does not need write access to the first. This module does
not know connections or clocks.

Invariants: both files are replaced atomically, and only their owner can read them. A file with any
invalid content is refused as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import fsync
from pathlib import Path
from typing import Any, Final, NamedTuple

from tickwheel import disk
from tickwheel.api.verb import Right
from tickwheel.errors import BadRequest, Conflict, LimitExceeded, NotFound, shown
from tickwheel.server.access.tls import required_parts
from tickwheel.server.shard.callers import ALL_TOPICS, Grants, Principal, Quotas

FILE_BYTES_MAX: Final = 4 * 1024 * 1024
TOKENS_MAX: Final = 10_000
NAME_LENGTH_MAX: Final = 64
PATTERNS_MAX: Final = 100
"""Maximum patterns for each right of a token."""
VERSION: Final = 1
PREFIX: Final = "tw"
SECRET_BYTES: Final = 32
ID_BYTES: Final = 6
ALL_RIGHTS: Final = "all"
QUOTA_MAX: Final = 1 << 53
EXPIRES_MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999, the last date that can be shown."""
_NAME = re.compile(rf"[A-Za-z0-9._:/-]{{1,{NAME_LENGTH_MAX}}}")
_PATTERN = re.compile(r"[A-Za-z0-9._:/-]{1,255}\*?|\*")
_ID = re.compile(r"[0-9a-f]{12}")
_HASH = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("id", "name", "sha256", "scopes", "created_ms", "expires_ms")
_OPTIONAL = ("certificate", "quotas")
_NO_HASH = hashlib.sha256(secrets.token_bytes(SECRET_BYTES)).hexdigest()
"""Compared with a secret's hash if no token has the id, so that both cases take the same time."""


class Token(NamedTuple):
    """A token in the file. Times are milliseconds since 1970."""

    id: str
    name: str
    sha256: str
    grants: Grants
    created_ms: int
    expires_ms: int | None
    """Expiry; None if the token does not expire."""
    certificate: str | None = None
    """Parts of the client certificate that replaces the secret; None without such a certificate."""
    quotas: Quotas | None = None
    """Quotas that override those of the settings."""

    @property
    def principal(self) -> Principal:
        """The token's principal. Tokens with the same name share HTTP idempotency keys."""
        return Principal(f"token {self.name}", self.grants, self.id)

    def is_over(self, now_ms: int) -> bool:
        return self.expires_ms is not None and now_ms >= self.expires_ms

    def to_map(self) -> dict[str, Any]:
        """Return the token in the form in which the file stores it."""
        fields: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "sha256": self.sha256,
            "scopes": {str(right): list(patterns) for right, patterns in self.grants},
            "created_ms": self.created_ms,
            "expires_ms": self.expires_ms,
        }
        # These fields are written only if set, because older daemons refuse unknown fields.
        if self.certificate is not None:
            fields["certificate"] = self.certificate
        if self.quotas is not None:
            fields["quotas"] = {n: v for n, v in self.quotas._asdict().items() if v is not None}
        return fields


Tokens = Mapping[str, Token]
"""Tokens by id."""


def find(tokens: Tokens, text: str) -> Token | None:
    """Return the token with this text, even if it has expired, or None if there is none."""
    prefix, _, rest = text.partition("_")
    token_id, _, secret = rest.partition("_")
    token = tokens.get(token_id) if prefix == PREFIX else None
    expected = _NO_HASH if token is None else token.sha256
    is_right = hmac.compare_digest(hash_of(secret), expected)
    return token if is_right else None


def id_of(text: str) -> str | None:
    """Return the id in a token's text, even if there is no such token, or None for other texts."""
    prefix, _, rest = text.partition("_")
    token_id, underscore, _ = rest.partition("_")
    return token_id if prefix == PREFIX and underscore and _ID.fullmatch(token_id) else None


def hash_of(secret: str) -> str:
    """Return the hash that is stored and compared instead of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


# --- scopes --------------------------------------------------------------------------------------


def parse_scopes(texts: Sequence[str]) -> Grants:
    """Return the rights that texts ``RIGHT`` or ``RIGHT=PATTERN,PATTERN`` describe; ``all`` means
    every right. Raise BadRequest or LimitExceeded for invalid texts."""
    scopes: dict[Right, dict[str, None]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        rights = list(Right) if name == ALL_RIGHTS else [_right(name)]
        patterns = rest.split(",") if equals else [ALL_TOPICS]
        for right in rights:
            scopes.setdefault(right, {}).update(dict.fromkeys(patterns))
    if not scopes:
        raise BadRequest(
            f"a token needs at least one of {_known_rights()}, each optionally with =PATTERN"
        )
    return _grants(scopes)


def _grants(scopes: Mapping[Right, Iterable[Any]]) -> Grants:
    grants = []
    for right in Right:
        patterns = tuple(scopes.get(right, ()))
        if len(patterns) > PATTERNS_MAX:
            raise LimitExceeded(
                f"{right} has {len(patterns)} patterns; the limit is {PATTERNS_MAX} (PATTERNS_MAX)"
            )
        for pattern in patterns:
            if type(pattern) is not str or not _PATTERN.fullmatch(pattern):
                raise BadRequest(
                    f"{right}: a pattern must be a topic's name, a prefix followed by *, or *, not"
                    f" {shown(pattern)}"
                )
        if patterns:
            grants.append((right, patterns))
    return tuple(grants)


def _right(name: str) -> Right:
    try:
        return Right(name)
    except ValueError:
        raise BadRequest(f"a right must be one of {_known_rights()}, not {shown(name)}") from None


def _known_rights() -> str:
    return ", ".join((*Right, ALL_RIGHTS))


# --- reading -------------------------------------------------------------------------------------


def stamp(path: Path) -> tuple[int, int, int]:
    """Return the modification time (ns), size and inode of the file. Raise OSError on failure."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def read(path: Path) -> dict[str, Token]:
    """Return the tokens of the file by id. Raise OSError, BadRequest or LimitExceeded on
    failure."""
    content = _load(path)
    if type(content) is not dict or content.keys() != {"version", "tokens"}:
        raise BadRequest(f"{path} must have exactly the fields version and tokens")
    if content["version"] != VERSION:
        raise BadRequest(f"{path}: version must be {VERSION}, not {shown(content['version'])}")
    entries = content["tokens"]
    if type(entries) is not list:
        raise BadRequest(f"{path}: tokens must be an array, not {shown(entries)}")
    if len(entries) > TOKENS_MAX:
        raise LimitExceeded(
            f"{path} has {len(entries)} tokens; the limit is {TOKENS_MAX} (TOKENS_MAX)"
        )
    tokens: dict[str, Token] = {}
    for index, entry in enumerate(entries):
        token = _token(entry, f"{path}: tokens[{index}]")
        if token.id in tokens:
            raise BadRequest(f"{path} has the id {token.id} more than once")
        tokens[token.id] = token
    return tokens


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    _check_size(path, data)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path} is not valid JSON: {error}") from None


def _check_size(path: Path, data: bytes) -> None:
    if len(data) > FILE_BYTES_MAX:
        raise LimitExceeded(f"{path} exceeds the limit of {FILE_BYTES_MAX} bytes (FILE_BYTES_MAX)")


def _token(entry: Any, field: str) -> Token:
    if type(entry) is not dict or entry.keys() - set(_OPTIONAL) != set(_FIELDS):
        raise BadRequest(
            f"{field} must have {', '.join(_FIELDS)}, and optionally {', '.join(_OPTIONAL)}"
        )
    for name, pattern in (("id", _ID), ("name", _NAME), ("sha256", _HASH)):
        if type(entry[name]) is not str or not pattern.fullmatch(entry[name]):
            raise BadRequest(f"{field}.{name} is not valid: {shown(entry[name])}")
    for name in ("created_ms", "expires_ms"):
        value = entry[name]
        if not (name == "expires_ms" and value is None) and (type(value) is not int or value < 0):
            raise BadRequest(f"{field}.{name} must be milliseconds since 1970, not {shown(value)}")
    certificate = entry.get("certificate")
    if certificate is not None:
        if type(certificate) is not str:
            raise BadRequest(f"{field}.certificate must be a string, not {shown(certificate)}")
        required_parts(certificate)
    scopes = entry["scopes"]
    if type(scopes) is not dict or not all(type(texts) is list for texts in scopes.values()):
        raise BadRequest(f"{field}.scopes must be a map of arrays, not {shown(scopes)}")
    return Token(
        entry["id"],
        entry["name"],
        entry["sha256"],
        _grants({_right(name): patterns for name, patterns in scopes.items()}),
        entry["created_ms"],
        entry["expires_ms"],
        certificate,
        None if entry.get("quotas") is None else _quotas(entry["quotas"], f"{field}.quotas"),
    )


def _quotas(quotas: Any, field: str) -> Quotas:
    if type(quotas) is not dict or not quotas.keys() <= set(Quotas._fields):
        raise BadRequest(f"{field} can only have {', '.join(Quotas._fields)}, not {shown(quotas)}")
    for name, value in quotas.items():
        is_rate = name.endswith("_per_s")
        if type(value) not in ((int, float) if is_rate else (int,)) or not 0 < value < QUOTA_MAX:
            kind = f"{'a number' if is_rate else 'an integer'} above 0 and below {QUOTA_MAX}"
            raise BadRequest(f"{field}.{name} must be {kind}, not {shown(value)}")
    return Quotas(**quotas)


def parse_quotas(texts: Sequence[str]) -> Quotas | None:
    """Return the quotas that texts ``NAME=NUMBER`` set. Raise BadRequest for an invalid text."""
    quotas: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            quotas[name] = float(number) if name.endswith("_per_s") else int(number)
        except ValueError:
            form = "NAME=INTEGER, or NAME_per_s=NUMBER"
            raise BadRequest(f"a quota must be {form}, not {shown(text)}") from None
    return _quotas(quotas, "quota") if quotas else None


# --- changing ------------------------------------------------------------------------------------


def create(
    path: Path,
    name: str,
    grants: Grants,
    now_ms: int,
    expires_ms: int | None,
    certificate: str | None = None,
    quotas: Quotas | None = None,
) -> tuple[Token, str]:
    """Add a token to the file, which is created if it does not exist. Return the token and its
    text, which cannot be recovered later; the text is "" with ``certificate``. Other tokens with
    the name stay valid. Raise OSError, BadRequest or LimitExceeded on failure."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"name must have 1 to {NAME_LENGTH_MAX} characters from A-Z a-z 0-9 . _ : / -, not"
            f" {shown(name)}"
        )
    if expires_ms is not None and expires_ms > EXPIRES_MS_MAX:
        raise BadRequest(
            f"expires must be at most {EXPIRES_MS_MAX} ms after 1970 (the end of 9999), not"
            f" {expires_ms}"
        )
    if certificate is not None:
        required_parts(certificate)
    secret = secrets.token_urlsafe(SECRET_BYTES)
    with _locked(path):
        tokens = read(path) if path.exists() else {}
        if len(tokens) >= TOKENS_MAX:
            raise LimitExceeded(f"{path} has {len(tokens)} tokens; the limit is {TOKENS_MAX}")
        while (token_id := secrets.token_hex(ID_BYTES)) in tokens:
            pass
        token = Token(
            token_id, name, hash_of(secret), grants, now_ms, expires_ms, certificate, quotas
        )
        _write(path, {**tokens, token_id: token})
    return token, f"{PREFIX}_{token_id}_{secret}" if certificate is None else ""


def revoke(path: Path, which: str, *, every: bool = False) -> list[Token]:
    """Remove the token with this id or name, or with ``every``, all tokens with the name. Return
    the removed tokens. Raise OSError, BadRequest, NotFound or Conflict on failure."""
    with _locked(path):
        tokens = read(path)
        revoked = [t for t in tokens.values() if which in (t.id, t.name)]
        if not revoked:
            raise NotFound(f"{path} has no token {shown(which)}")
        if len(revoked) > 1 and not every:
            ids = ", ".join(token.id for token in revoked)
            raise Conflict(f"{len(revoked)} tokens have this name: {ids}; use an id, or --all")
        _write(path, {t.id: t for t in tokens.values() if t not in revoked})
    return revoked


def _write(path: Path, tokens: Tokens) -> None:
    _replace(path, {"version": VERSION, "tokens": [token.to_map() for token in tokens.values()]})


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file's folder, so that no other command changes the file meanwhile."""
    folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, value: object) -> None:
    """Replace the file, or the target of a link, atomically and durably. When run by root, keep the
    owner, or give a new file to the owner of the folder, so that the daemon can read it. Raise
    OSError, or LimitExceeded for a file that could not be read again."""
    data = json.dumps(value, indent=1).encode() + b"\n"
    _check_size(path, data)
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "wb") as file:
            if os.geteuid() == 0:
                before = os.stat(path if path.exists() else path.parent)
                os.fchown(fd, before.st_uid, before.st_gid)
            file.write(data)
            file.flush()
            fsync(fd)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    disk.sync(path.parent)


# --- last use ------------------------------------------------------------------------------------


def used_path(path: Path) -> Path:
    """Return the path of the file with the tokens' last use."""
    return path.with_name(f"{path.name}.used")


def read_used(path: Path) -> dict[str, int]:
    """Return each token's last use, in ms since 1970, by id; empty if the file is unreadable."""
    try:
        content = _load(used_path(path))
    except (OSError, BadRequest, LimitExceeded):
        return {}
    if type(content) is not dict:
        return {}
    return {i: ms for i, ms in content.items() if _ID.fullmatch(i) and type(ms) is int}


def write_used(path: Path, used: Mapping[str, int], tokens: Tokens) -> None:
    """Update the file of last uses and remove former tokens from it. Raise OSError on failure."""
    before = read_used(path)
    newest = {i: max(used.get(i, 0), before.get(i, 0)) for i in tokens if i in used or i in before}
    _replace(used_path(path), newest)
