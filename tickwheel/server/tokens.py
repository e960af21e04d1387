"""The file of tokens: who may come in, and with which rights.

A token reads ``tw_ID_SECRET``. The file has a SHA-256 of the secret, never the secret: that has 256
bits from the system's generator, so there is nothing to guess and a slow hash would protect nothing
(docs/decisions/0026). ``create`` and ``revoke`` need no daemon. When the daemon noted a token last
stands in a second file beside it, so that the daemon needs no right to write the first. Knows no
connection and no clock.

Invariants: both files are replaced as a whole or not at all, and only their owner may read them; a
file with anything in it that is not understood is refused as a whole.
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

from tickwheel.api.verb import Right
from tickwheel.errors import BadRequest, Conflict, LimitExceeded, NotFound, shown
from tickwheel.server.shard.callers import ALL_TOPICS, Grants, Principal, Quotas
from tickwheel.server.tls import required_parts

FILE_BYTES_MAX: Final = 4 * 1024 * 1024
TOKENS_MAX: Final = 10_000
NAME_LENGTH_MAX: Final = 64
PATTERNS_MAX: Final = 100
"""Patterns of one right of one token."""
VERSION: Final = 1
PREFIX: Final = "tw"
SECRET_BYTES: Final = 32
ID_BYTES: Final = 6
ALL_RIGHTS: Final = "all"
QUOTA_MAX: Final = 1 << 53
_NAME = re.compile(rf"[A-Za-z0-9._:/-]{{1,{NAME_LENGTH_MAX}}}")
_PATTERN = re.compile(r"[A-Za-z0-9._:/-]{1,255}\*?|\*")
_ID = re.compile(r"[0-9a-f]{12}")
_HASH = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("id", "name", "sha256", "scopes", "created_ms", "expires_ms")
_OPTIONAL = ("certificate", "quotas")
_NO_HASH = hashlib.sha256(secrets.token_bytes(SECRET_BYTES)).hexdigest()
"""Compared with the hash of a secret when no token has the id, so that this takes as long."""


class Token(NamedTuple):
    """A token of the file; times are milliseconds since 1970."""

    id: str
    name: str
    sha256: str
    grants: Grants
    created_ms: int
    expires_ms: int | None
    """When the token ends; None: never."""
    certificate: str | None = None
    """What a client's certificate must say to open the token, whose secret nobody knows then."""
    quotas: Quotas | None = None
    """The token's own quotas; the settings' stand for those that it leaves out."""

    @property
    def principal(self) -> Principal:
        """The token's principal. Tokens of one name are one principal to idempotency keys of
        HTTP."""
        return Principal(f"token {self.name}", self.grants, self.id)

    def is_over(self, now_ms: int) -> bool:
        return self.expires_ms is not None and now_ms >= self.expires_ms

    def to_map(self) -> dict[str, Any]:
        """The token in the form of the file."""
        found: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "sha256": self.sha256,
            "scopes": {str(right): list(patterns) for right, patterns in self.grants},
            "created_ms": self.created_ms,
            "expires_ms": self.expires_ms,
        }
        # An older daemon refuses fields that it does not know: only where they are used.
        if self.certificate is not None:
            found["certificate"] = self.certificate
        if self.quotas is not None:
            found["quotas"] = {n: v for n, v in self.quotas._asdict().items() if v is not None}
        return found


Tokens = Mapping[str, Token]
"""Tokens by their ids."""


def find(tokens: Tokens, text: str) -> Token | None:
    """The token of a text, which may be over; None: it is no token of the file."""
    prefix, _, rest = text.partition("_")
    token_id, _, secret = rest.partition("_")
    found = tokens.get(token_id) if prefix == PREFIX else None
    wanted = _NO_HASH if found is None else found.sha256
    is_right = hmac.compare_digest(hash_of(secret), wanted)
    return found if is_right else None


def id_of(text: str) -> str | None:
    """The id in a token's text, whether there is such a token or not; None: it is no such text."""
    prefix, _, rest = text.partition("_")
    token_id, underscore, _ = rest.partition("_")
    return token_id if prefix == PREFIX and underscore and _ID.fullmatch(token_id) else None


def hash_of(secret: str) -> str:
    """What is kept in place of a secret, and compared."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


# --- scopes --------------------------------------------------------------------------------------


def parse_scopes(texts: Sequence[str]) -> Grants:
    """The rights in texts ``RIGHT`` or ``RIGHT=PATTERN,PATTERN``; the right ``all`` stands for
    every one. Raises BadRequest, LimitExceeded."""
    found: dict[Right, dict[str, None]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        rights = list(Right) if name == ALL_RIGHTS else [_right(name)]
        patterns = rest.split(",") if equals else [ALL_TOPICS]
        for right in rights:
            found.setdefault(right, {}).update(dict.fromkeys(patterns))
    if not found:
        raise BadRequest(f"a token needs a scope: {_known_rights()}, each with =PATTERN if limited")
    return _grants(found)


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
                    f"{right}: a topic's name, the beginning of one and *, or * is needed, not"
                    f" {shown(pattern)}"
                )
        if patterns:
            grants.append((right, patterns))
    return tuple(grants)


def _right(name: str) -> Right:
    try:
        return Right(name)
    except ValueError:
        raise BadRequest(f"{shown(name)} is not a right; known are {_known_rights()}") from None


def _known_rights() -> str:
    return ", ".join((*Right, ALL_RIGHTS))


# --- reading -------------------------------------------------------------------------------------


def stamp(path: Path) -> tuple[int, int, int]:
    """The time of change (ns), size and inode of the tokens file. Raises OSError."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def read(path: Path) -> dict[str, Token]:
    """The tokens of the file, by id. Raises OSError, BadRequest, LimitExceeded."""
    given = _load(path)
    if type(given) is not dict or given.keys() != {"version", "tokens"}:
        raise BadRequest(f"{path} must have version and tokens, and nothing else")
    if given["version"] != VERSION:
        raise BadRequest(f"{path} has version {shown(given['version'])}; known is {VERSION}")
    many = given["tokens"]
    if type(many) is not list:
        raise BadRequest(f"{path}: tokens must be an array, not {shown(many)}")
    if len(many) > TOKENS_MAX:
        raise LimitExceeded(
            f"{path} has {len(many)} tokens; the limit is {TOKENS_MAX} (TOKENS_MAX)"
        )
    tokens: dict[str, Token] = {}
    for index, one in enumerate(many):
        token = _token(one, f"{path}: tokens[{index}]")
        if token.id in tokens:
            raise BadRequest(f"{path} has the id {token.id} twice")
        tokens[token.id] = token
    return tokens


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise LimitExceeded(f"{path} has more than {FILE_BYTES_MAX} bytes (FILE_BYTES_MAX)")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path} is not valid JSON: {error}") from None


def _token(given: Any, field: str) -> Token:
    if type(given) is not dict or given.keys() - set(_OPTIONAL) != set(_FIELDS):
        raise BadRequest(f"{field} must have {', '.join(_FIELDS)}, and nothing else")
    for name, pattern in (("id", _ID), ("name", _NAME), ("sha256", _HASH)):
        if type(given[name]) is not str or not pattern.fullmatch(given[name]):
            raise BadRequest(f"{field}.{name} is not right: {shown(given[name])}")
    for name in ("created_ms", "expires_ms"):
        value = given[name]
        if not (name == "expires_ms" and value is None) and (type(value) is not int or value < 0):
            raise BadRequest(f"{field}.{name} must be milliseconds since 1970, not {shown(value)}")
    certificate = given.get("certificate")
    if certificate is not None:
        if type(certificate) is not str:
            raise BadRequest(f"{field}.certificate must be text, not {shown(certificate)}")
        required_parts(certificate)
    scopes = given["scopes"]
    if type(scopes) is not dict or not all(type(one) is list for one in scopes.values()):
        raise BadRequest(f"{field}.scopes must be a map of arrays, not {shown(scopes)}")
    return Token(
        given["id"],
        given["name"],
        given["sha256"],
        _grants({_right(name): patterns for name, patterns in scopes.items()}),
        given["created_ms"],
        given["expires_ms"],
        certificate,
        None if given.get("quotas") is None else _quotas(given["quotas"], f"{field}.quotas"),
    )


def _quotas(given: Any, field: str) -> Quotas:
    if type(given) is not dict or not given.keys() <= set(Quotas._fields):
        raise BadRequest(f"{field} may have {', '.join(Quotas._fields)}, not {shown(given)}")
    for name, value in given.items():
        kinds = (int, float) if name.endswith("_per_s") else (int,)
        if type(value) not in kinds or not 0 < value < QUOTA_MAX:
            raise BadRequest(f"{field}.{name} must be a number above 0, not {shown(value)}")
    return Quotas(**given)


def parse_quotas(texts: Sequence[str]) -> Quotas | None:
    """The quotas in texts ``NAME=NUMBER``. Raises BadRequest."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            found[name] = float(number) if name.endswith("_per_s") else int(number)
        except ValueError:
            raise BadRequest(f"a quota is NAME=NUMBER, not {shown(text)}") from None
    return _quotas(found, "quota") if found else None


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
    """Make a token in the file, which is made if there is none; returns also its text, which nobody
    can say again; "" with ``certificate``, which opens it instead. Others of the same name stay.
    Raises OSError, BadRequest, LimitExceeded."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"name must be 1 to {NAME_LENGTH_MAX} of A-Z a-z 0-9 . _ : / -, not {shown(name)}"
        )
    if certificate is not None:
        required_parts(certificate)
    secret = secrets.token_urlsafe(SECRET_BYTES)
    with _alone(path):
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
    """Take the token with this id, or name, out of the file. ``every``: all with the name. Raises
    OSError, BadRequest, NotFound, Conflict."""
    with _alone(path):
        tokens = read(path)
        found = [t for t in tokens.values() if which in (t.id, t.name)]
        if not found:
            raise NotFound(f"{path} has no token {shown(which)}")
        if len(found) > 1 and not every:
            ids = ", ".join(token.id for token in found)
            raise Conflict(f"{len(found)} tokens have this name: {ids}; give an id, or --all")
        _write(path, {t.id: t for t in tokens.values() if t not in found})
    return found


def _write(path: Path, tokens: Tokens) -> None:
    _replace(path, {"version": VERSION, "tokens": [token.to_map() for token in tokens.values()]})


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other commands from changing the file meanwhile."""
    folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, value: object) -> None:
    """Replace the file as a whole and synced, or not at all; behind a link it is the link's
    file. Root leaves it to whom it belongs, a new one to the owner of the folder: the daemon
    has to read it."""
    path = Path(os.path.realpath(path))
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            if os.geteuid() == 0:
                before = os.stat(path if path.exists() else path.parent)
                os.fchown(fd, before.st_uid, before.st_gid)
            file.write(json.dumps(value, indent=1) + "\n")
            file.flush()
            fsync(fd)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fsync(folder)
    finally:
        os.close(folder)


# --- last use ------------------------------------------------------------------------------------


def used_path(path: Path) -> Path:
    """The file in which the daemon notes when tokens were last used."""
    return path.with_name(f"{path.name}.used")


def read_used(path: Path) -> dict[str, int]:
    """Id of a token → its last use, in ms since 1970; empty when the file cannot be read."""
    try:
        given = _load(used_path(path))
    except (OSError, BadRequest):
        return {}
    if type(given) is not dict:
        return {}
    return {i: ms for i, ms in given.items() if _ID.fullmatch(i) and type(ms) is int}


def write_used(path: Path, used: Mapping[str, int], tokens: Tokens) -> None:
    """Add last uses to the notes, without those of tokens that are gone. Raises OSError."""
    noted = read_used(path)
    newest = {i: max(used.get(i, 0), noted.get(i, 0)) for i in tokens if i in used or i in noted}
    _replace(used_path(path), newest)
