"""What is wrong with the text of a filter, and where."""

from __future__ import annotations

BEFORE_MAX = 40
AFTER_MAX = 20
"""How many characters a message shows before the place of the error, and behind it."""


class FilterError(ValueError):
    """A filter that cannot be read, with the place in its text and a caret under it; or, without
    a place, one that is over a limit."""

    def __init__(self, field: str, message: str, text: str, position: int | None) -> None:
        self.field = field
        """The field of the error: ``tags`` or ``where``."""
        self.position = position
        """The index of the first wrong character; None: the whole text is over a limit."""
        if position is None:
            super().__init__(f"{field}: {message}")
        else:
            place = f"{field}, character {position + 1}"
            super().__init__(f"{place}: {message}\n{_pointed(text, position)}")


def _pointed(text: str, position: int) -> str:
    """The part of ``text`` around the place, as one line, and a line with a caret below it."""
    first, end = max(0, position - BEFORE_MAX), position + AFTER_MAX
    before, after = "..." if first else "", "..." if end < len(text) else ""
    # One column a character, or the caret points elsewhere.
    part = "".join(char if char.isprintable() else " " for char in text[first:end])
    caret = " " * (len(before) + position - first) + "^"
    return f"  {before}{part}{after}\n  {caret}"
