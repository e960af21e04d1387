"""Names in order, against a set that is sorted each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.engine import transaction_registry
from tickwheel.engine.transaction_registry import SortedNames

texts = st.text("abc", max_size=4)


@given(st.lists(st.tuples(st.booleans(), texts), max_size=200), texts, st.integers(1, 8))
def test_sorted_names_equal_a_sorted_set(
    changes: list[tuple[bool, str]], after: str, run_max: int
) -> None:
    before, transaction_registry.RUN_MAX = transaction_registry.RUN_MAX, run_max
    names, expected = SortedNames(), set[str]()
    try:
        for is_added, name in changes:
            (names.add if is_added else names.discard)(name)
            (expected.add if is_added else expected.discard)(name)
    finally:
        transaction_registry.RUN_MAX = before
    assert list(names.after(after)) == sorted(name for name in expected if name > after)
