"""A lost store again, from a backup and the events since.

``replay`` gives the events in the order of their writing, ``fold`` knows what each of them means
for a task, ``source`` reads the backup, ``target`` fills the new store, ``run`` puts them
together and ``report`` says how exact it is. Unlike the rest of the history this part knows the
store contract and the records; it knows no daemon.
"""

from __future__ import annotations

from tickwheel.history.restore.report import Report
from tickwheel.history.restore.run import Plan, restore

__all__ = ["Plan", "Report", "restore"]
