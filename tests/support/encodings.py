"""Encodings at and beyond their limits, for tests of every way in."""

from __future__ import annotations

ENCODING = "json;v=2,zlib,aesgcm;key=2026-11"
LONGEST = "x" * 253 + ",y"
RIGHT = (ENCODING, LONGEST, "json", "zlib", "0;a=B", "application.x+json,zstd;level=3;x=a/b")
WRONG_TEXTS = (
    LONGEST + "z",
    "json,",
    ",json",
    "json,,zlib",
    "json;",
    "json;v",
    "json;v=",
    "json;=2",
    "json;V=2",
    "json; v=2",
    "json, zlib",
    "JSON",
    "json\n",
    "-json",
    "json;v=\N{ARABIC-INDIC DIGIT SEVEN}",
)
WRONG = (*WRONG_TEXTS, "", ENCODING.encode(), 7, True)
MUST_BE = "encoding must be 1 to 255 characters: the body's type"
"""How the error of each of them goes on behind the name of the task."""
