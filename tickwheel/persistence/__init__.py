"""Stores: what keeps tasks over a restart, behind one contract (``contract.Store``).

``open_url`` is the only way in for the rest of the package. A store is imported when a URL
names it, not before.
"""

from __future__ import annotations

from tickwheel.persistence.contract import (
    Audit,
    CommitRefused,
    CommitUnknown,
    Fenced,
    Handles,
    Opened,
    Small,
    Store,
    StoreBroken,
    StoredTask,
    StoreError,
    StoreUnusable,
)
from tickwheel.persistence.urls import open_url

__all__ = [
    "Audit",
    "CommitRefused",
    "CommitUnknown",
    "Fenced",
    "Handles",
    "Opened",
    "Small",
    "Store",
    "StoreBroken",
    "StoreError",
    "StoreUnusable",
    "StoredTask",
    "open_url",
]
