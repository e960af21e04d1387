"""Verbs on transactions of producers: prepare, commit, roll back, list, show."""

from __future__ import annotations

from typing import Annotated, Any, Final

from tickwheel.api.frames import FrameType
from tickwheel.api.kinds import ID, NAME, Choice, Moment
from tickwheel.api.schedules import ClaimName, NameClaimed
from tickwheel.api.shapes import Answer, Request, maybe_when, when
from tickwheel.api.tasks import PAGE, AcceptedIds
from tickwheel.api.verb import Audit, Home, Method, Need, Of, Right, Routing, Unique, Verb


class TransactionName(Request):
    """The request names a transaction."""

    transaction: Annotated[str, NAME, "The name of the transaction."]


class TransactionsPage(Request):
    """The request asks for the undecided transactions, or the transactions in ``state``."""

    group: Annotated[str | None, NAME, "Only transactions of this producer group."] = None
    state: Annotated[
        str | None,
        Choice("TransactionState", "open", "parked", "committed", "rolled_back"),
        "Only transactions in this state; by default open and parked.",
    ] = None
    after: Annotated[str | None, NAME, "``next`` from the previous page."] = None
    limit: Annotated[int, PAGE, "Maximum number of items in the answer."] = 100


class HalfTask(Answer):
    """A half task of an undecided transaction."""

    topic: Annotated[str, NAME, "The topic of the task."]
    due_ms: Annotated[
        int | None,
        Moment(),
        "When the task is due, in milliseconds since 1970; None if it has a delay.",
    ]
    delay_ms: Annotated[
        int | None,
        "The delay, counted from the commit, in milliseconds; None if it has a due time.",
    ]
    bytes: Annotated[int, "The size of its body, in bytes."]
    key: Annotated[str | None, "The key of the task."]
    tag: Annotated[str | None, "The tag of the task."]


class TransactionInfo(Answer):
    """A transaction and its state."""

    id: Annotated[str, NAME, "The name of the transaction."]
    group: Annotated[str, NAME, "The producer group of the transaction."]
    state: Annotated[str, "The state: open, parked, committed or rolled_back."]
    began_ms: Annotated[
        int, Moment(), "When its first half tasks arrived, in milliseconds since 1970."
    ]
    touched_ms: Annotated[
        int, Moment(), "When half tasks last arrived, or its group was last asked."
    ]
    tasks: Annotated[int, "Number of half tasks."]
    bytes: Annotated[int, "The size of its half tasks, in bytes."]
    topics: Annotated[tuple[str, ...], "The topics of its half tasks."]
    checks: Annotated[int, "How many checks of its producer group were due."]
    asked: Annotated[int, "How many times a member of the group was asked."]
    checked_ms: Annotated[
        int | None,
        Moment(),
        "When a check of its producer group was last due, in milliseconds since 1970; None if"
        " never.",
    ]
    decided_ms: Annotated[
        int | None,
        Moment(),
        "When it was committed or rolled back, in milliseconds since 1970; None while undecided.",
    ]
    first_id: Annotated[int | None, ID, "The id of its first task, once it is committed."]
    halves: Annotated[
        list[HalfTask] | None,
        "Its half tasks without bodies, only when a single transaction is shown.",
    ] = None

    began = when("began_ms", "When its first half tasks arrived.")
    decided = maybe_when("decided_ms", "When it was decided.")


class TransactionList(Answer):
    """A page of transactions, by name."""

    transactions: Annotated[list[TransactionInfo], "The transactions of this page."]
    next: Annotated[str | None, NAME, "``after`` for the next page; None on the last page."]


_TAG, _PATH, _UNKNOWN = "transactions", "/v1/transactions/{transaction}", ("unknown_transaction",)
_READ, _PRODUCE = Need(Right.READ, Of.FOUND), Need(Right.PRODUCE, Of.FOUND)

VERBS: Final[tuple[Any, ...]] = (
    Verb("prepare", None, tuple, Need(Right.PRODUCE, Of.EACH_TASK),
         "Store half tasks of a transaction", frame=FrameType.PREPARE, changes=True,
         fields="transaction: str, group: str, part: int, array of task, options: map "
                "{`from`: `enqueue` or `commit`, `claim`: int} or nil",
         result="[accepted_ms, empty array]", errors=("conflict",), routing=Routing.BASIS,
         unique=Unique("transaction", Home.NAME)),
    Verb("claim_transaction", ClaimName, NameClaimed, _PRODUCE,
         "Claim the name of a transaction among several shards",
         "", FrameType.CLAIM, "transaction", errors=("conflict",), changes=True,
         routing=Routing.CLAIM),
    Verb("commit_transaction", TransactionName, AcceptedIds, _PRODUCE,
         "Commit a transaction",
         "Turn its half tasks into tasks. Committing it again returns the same answer.",
         FrameType.COMMIT, path=f"POST {_PATH}/commit", tag=_TAG,
         errors=(*_UNKNOWN, "transaction_rolled_back", "store_full"),
         audit=Audit.OF_OTHERS, changes=True,
         result="as ENQUEUE", command="transactions commit TRANSACTION", routing=Routing.NAME),
    Verb("rollback_transaction", TransactionName, AcceptedIds, _PRODUCE,
         "Roll back a transaction",
         "Drop its half tasks. Rolling it back again returns the same answer.",
         FrameType.ROLLBACK,
         path=f"POST {_PATH}/rollback", tag=_TAG, errors=(*_UNKNOWN, "transaction_committed"),
         audit=Audit.OF_OTHERS, changes=True,
         result="[decided_ms, empty array]", command="transactions rollback TRANSACTION",
         routing=Routing.NAME),
    Verb("answer_checks", None, None, _PRODUCE, "Register to answer checks of producer groups",
         frame=FrameType.CHECKS,
         fields="groups: array of str, up to 1,000",
         result="nil", routing=Routing.EACH),
    Verb("list_transactions", TransactionsPage, TransactionList, _READ,
         "List undecided transactions",
         "Return undecided transactions, or transactions in ``state``, ordered by name.",
         FrameType.TRANSACTION_LIST, path="GET /v1/transactions", tag=_TAG, prompt=False,
         pages="transactions", methods=(Method("list_transactions"),),
         command="transactions list", routing=Routing.PAGES),
    Verb("show_transaction", TransactionName, TransactionInfo, _READ,
         "Show a transaction and its half tasks",
         "Return one transaction with its half tasks. Raise UnknownTransaction if there is none.",
         FrameType.TRANSACTION_SHOW, path=f"GET {_PATH}", tag=_TAG, errors=_UNKNOWN,
         result="transaction map and `halves`",
         methods=(Method("show_transaction"),), command="transactions show TRANSACTION",
         routing=Routing.NAME),
)  # fmt: skip
