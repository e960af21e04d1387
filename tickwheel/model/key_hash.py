"""The 64-bit hash of a task's topic and key, for the index in memory and in the stores.

A store creates a seed once and keeps it, so that hashes can be stored and stay valid after a
restart. Nobody can choose colliding keys without the seed: the key's bytes, as one number, are
reduced modulo a secret 64-bit prime (two keys of 255 characters collide for at most 130 of 10**17
primes). The remainder is then spread by a secret factor and a secret number for the topic. This
costs a third of a keyed BLAKE2 through ``hashlib``; see ``docs/decisions/0014-key-index.md``. Equal
hashes do not imply equal keys, so the key in the row must be compared before a task changes.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tickwheel.model.records import TaskRow

SEED_BYTES = 32
NO_KEY = 0
"""The hash of a task without a key. No key has this hash."""
TOPICS_MAX = 10_000
"""Maximum number of topics whose secret numbers are cached. When it is exceeded, the cache is
cleared."""

_MASK = 2**64 - 1
_number_of: Callable[[bytes], int] = int.from_bytes
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Bases for which the Miller-Rabin test is exact for every number of 64 bits."""


class KeyHash:
    """The hash function for one seed."""

    def __init__(self, seed: bytes) -> None:
        self._seed = hashlib.blake2b(seed, digest_size=64).digest()
        self._prime, self._factor = _secrets_of(self._seed)
        self._topics: dict[str, int] = {}

    def __call__(self, topic: str, key: str) -> int:
        """Return the hash of a topic and a key, from 1 to 2**64 - 1."""
        (number,) = _numbers_of((key,))
        return (number % self._prime * self._factor + self._term(topic)) >> 64 & _MASK or 1

    def of_many(self, topics: Sequence[str], keys: Sequence[str]) -> list[int]:
        """Return the hashes of many topics and keys. This takes half as long as single calls."""
        prime, factor, numbers = self._prime, self._factor, _numbers_of(keys)
        terms = {topic: self._term(topic) for topic in set(topics)}
        if len(terms) == 1:
            (term,) = terms.values()
            return [
                (number % prime * factor + term) >> 64 & _MASK or 1 for number in numbers
            ]  # fmt: skip
        return [
            (number % prime * factor + terms[topic]) >> 64 & _MASK or 1
            for topic, number in zip(topics, numbers, strict=True)
        ]

    def of_rows(self, rows: Iterable[TaskRow]) -> dict[int, int]:
        """Return id → hash of the rows that have a key."""
        keyed = [
            (row[0], row[2], row[4].key)
            for row in rows
            if row[4] is not None and row[4].key is not None
        ]
        if not keyed:
            return {}
        ids, topics, keys = zip(*keyed, strict=True)
        return dict(zip(ids, self.of_many(topics, keys), strict=True))

    def _term(self, topic: str) -> int:
        term = self._topics.get(topic)
        if term is not None:
            return term
        if len(self._topics) >= TOPICS_MAX:
            self._topics.clear()
        name = topic.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(name, digest_size=16, key=self._seed).digest()
        term = self._topics[topic] = int.from_bytes(digest, "big")
        return term


def _numbers_of(keys: Sequence[str]) -> Iterable[int]:
    """Return each key as a number. A leading byte 1 makes leading NUL characters count. All keys
    are encoded at once unless a key contains the separator."""
    try:
        encoded = ("\1" + "\n\1".join(keys)).encode().split(b"\n")
    except UnicodeEncodeError:  # surrogates
        encoded = []
    if len(encoded) != len(keys):
        encoded = [b"\1" + key.encode("utf-8", "surrogatepass") for key in keys]
    return map(_number_of, encoded)


@lru_cache(maxsize=8)
def _secrets_of(seed: bytes) -> tuple[int, int]:
    """Derive (a 64-bit prime, an odd 128-bit factor) from the seed."""
    candidate = int.from_bytes(seed[:8], "big") | 1 << 63 | 1
    while not is_prime(candidate):
        candidate = candidate + 2 if candidate < _MASK - 2 else 1 << 63 | 1
    return candidate, int.from_bytes(seed[8:24], "big") | 1


def is_prime(number: int) -> bool:
    """Return whether an odd number from 41 to 2**64 is a prime."""
    odd, twos = number - 1, 0
    while not odd & 1:
        odd, twos = odd >> 1, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True
