"""The proof, before anything is staged, that what a request brings can be stored.

Memory is the truth, and a store that cannot encode a row ends the daemon: so a row that is made of
a client's values is encoded once where these are checked, by the codec that the stores use. What
the encoder cannot say is that request's mistake, whatever else is in its batch. What is made of
nothing but names, bounded whole numbers and bodies needs no such proof: its checks are the proof.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgpack

from tickwheel.errors import BadRequest
from tickwheel.model.bulk import Bulk, BulkRow
from tickwheel.model.kinds import BULK, GROUP, SCHEDULE, Kind
from tickwheel.model.records import GroupRow
from tickwheel.model.schedules import Schedule, ScheduleRow
from tickwheel.persistence import codec

if TYPE_CHECKING:
    from tickwheel.model.records import GroupSettings, TaskOptions

_R = TypeVar("_R")
_pack = msgpack.Packer().pack
"""The packer of the event loop's thread: to make one a task would take longer than its use."""


def check_options(options: TaskOptions | None, field: str) -> None:
    """Prove that checked options can be stored: texts and bounded numbers can, properties and a
    policy of the task's own are packed. Raises BadRequest."""
    if options is not None and (options.properties is not None or options.retry is not None):
        try:
            _pack(codec.extras_record(options))
        except Exception as error:
            raise _refusal(field, error) from error


def check_schedule(schedule: Schedule) -> None:
    """Raises BadRequest if the schedule cannot be stored."""
    row = ScheduleRow(schedule._replace(body=b""))  # bytes need no proof
    _check(SCHEDULE, row, "schedule")


def check_settings(settings: GroupSettings) -> None:
    """Raises BadRequest if the settings of a group or topic cannot be stored."""
    _check(GROUP, GroupRow("", "", 0, settings), "settings")


def check_bulk(bulk: Bulk) -> None:
    """Raises BadRequest if the bulk operation cannot be stored."""
    _check(BULK, BulkRow(bulk), "bulk")


def _check(kind: Kind[_R], row: _R, field: str) -> None:
    try:
        codec.encode_record(kind, row)
    except Exception as error:
        raise _refusal(field, error) from error


def _refusal(field: str, error: Exception) -> BadRequest:
    return BadRequest(f"{field} cannot be stored: {type(error).__name__}: {error}")
