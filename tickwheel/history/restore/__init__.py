"""A lost store again, from a backup and the events since.

``replay`` gives the events in the order of their writing. ``fold`` knows what each of them means
for a task, with the rules of ``owners`` and the values that ``event_values`` reads out of events.
``source_and_target`` reads the backup and fills the new store. ``run`` puts them together and
reports how exact the result is. Unlike the rest of the history this part knows the store contract
and the records. It knows no daemon.
"""

from __future__ import annotations

from tickwheel.history.restore.run import Plan, Report, restore

__all__ = ["Plan", "Report", "restore"]
