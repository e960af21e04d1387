"""The hash of topic and key: the same for one seed, another for another, never 0."""

from __future__ import annotations

import pytest

from tickwheel.model.key_hash import KeyHash, is_prime
from tickwheel.model.records import TaskOptions, TaskRow


def test_hashes_depend_only_on_the_seed() -> None:
    """Stored hashes rest on these values: they never change."""
    key_hash = KeyHash(bytes(range(32)))
    assert key_hash("orders.close", "order-42") == 0x94118DED8FBE3700
    assert key_hash("orders.close", "ключ") == 0xD600EE7E3871BB0D


def test_topic_key_and_seed_each_make_a_difference() -> None:
    key_hash = KeyHash(b"a")
    hashes = {
        key_hash("t", "k"),
        key_hash("t", "l"),
        key_hash("u", "k"),
        key_hash("t", ""),
        key_hash("t", "\0k"),
        key_hash("t", "k\0"),
        key_hash("tk", ""),
        KeyHash(b"b")("t", "k"),
    }
    assert len(hashes) == 8


def test_hashes_are_64_bits_spread_evenly_and_never_0() -> None:
    key_hash = KeyHash(b"")
    results = [key_hash("t", f"order-{n}") for n in range(64_000)]
    assert len(set(results)) == len(results)
    assert all(0 < hashed < 2**64 for hashed in results)
    for shift in (0, 29, 58):
        buckets = [0] * 64
        for hashed in results:
            buckets[hashed >> shift & 63] += 1
        assert min(buckets) > 800 and max(buckets) < 1_200


def test_more_topics_than_are_remembered_keep_their_hashes() -> None:
    key_hash = KeyHash(b"")
    first = key_hash("t0", "k")
    for n in range(10_001):
        key_hash(f"t{n}", "k")
    assert key_hash("t0", "k") == first


def test_rows_without_a_key_have_none() -> None:
    key_hash = KeyHash(b"")
    rows = [
        TaskRow(1, 0, "t", b""),
        TaskRow(2, 0, "t", b"", TaskOptions(tag="x")),
        TaskRow(3, 0, "t", b"", TaskOptions(key="k")),
        TaskRow(4, 0, "t", b"", TaskOptions(key="")),
    ]
    assert key_hash.of_rows(rows) == {3: key_hash("t", "k"), 4: key_hash("t", "")}


def test_is_prime_recognises_primes() -> None:
    sieve = bytearray([1]) * 2_000
    for n in range(2, 45):
        sieve[n * n :: n] = bytes(len(range(n * n, 2_000, n)))
    assert [n for n in range(41, 2_000, 2) if is_prime(n)] == [
        n for n in range(41, 2_000, 2) if sieve[n]
    ]
    assert is_prime(2**64 - 59)
    assert not is_prime(3_215_031_751)  # passes for the witnesses 2, 3, 5 and 7
    assert not is_prime((2**32 - 5) * (2**32 - 17))


def test_hashing_many_equals_hashing_each() -> None:
    key_hash = KeyHash(b"")
    topics, keys = ["t", "u", "t"], ["k", "ключ", "\0"]
    one_by_one = [key_hash(topic, key) for topic, key in zip(topics, keys, strict=True)]
    assert key_hash.of_many(topics, keys) == one_by_one


@pytest.mark.parametrize("odd", ["\n", "a\nb", "\n\1k", "\ud800", "", "ключ"])
def test_neighbouring_keys_do_not_change_a_hash(odd: str) -> None:
    """Many keys are encoded as one text, which is cut up again."""
    key_hash = KeyHash(b"")
    keys = ["k", odd, "l"]
    alone = [key_hash.of_many(["t"], [key])[0] for key in keys]
    assert key_hash.of_many(["t"] * 3, keys) == alone == [key_hash("t", key) for key in keys]
    assert len(set(alone)) == 3
