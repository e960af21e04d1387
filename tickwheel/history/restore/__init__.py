"""A lost store again, from a backup and the events since.

``replay`` gives the events in the order of their writing. ``fold`` knows what each of them means
for a task, with the rules of ``owners`` and the values that ``event_values`` reads out of events.
``source_and_target`` reads the backup and fills the new store. ``run`` puts them together and
reports how exact the result is. Unlike the rest of the history this part knows the store contract
and the records. It knows no daemon. ``python -m tickwheel.history.restore`` is a restore that a
daemon has started, and watches.
"""

from __future__ import annotations

from tickwheel.history.restore.run import LISTED_MAX, Plan, Report, restore
from tickwheel.history.restore.source_and_target import remove_leftovers

__all__ = ["LISTED_MAX", "Plan", "Report", "remove_leftovers", "restore"]
