"""Pages of transactions: lists by state, one transaction, and branches of XA."""

from __future__ import annotations

from typing import Any

from txmq.admin.console.bodies import decode_message
from txmq.admin.console.page import Page, PageRequest, Refused, View
from txmq.errors import MessagesDamaged

STATES = {
    "in-doubt": "in doubt",
    "undecided": "undecided",
    "waiting": "waiting behind others of their keys",
    "open": "without their last part",
    "conflicts": "decisions that were refused",
}
MESSAGES = 50  # of one transaction, on one page


async def transactions(request: PageRequest) -> View:
    """List the transactions of one state; without one, the undecided ones."""
    shown = await request.ask("broker.show")
    state = request.text("state")
    if state not in STATES:
        state = "undecided"
    reply = await request.ask("tx.list", state=state, limit=request.limit)
    return View(
        "transactions.html",
        {
            "state": state,
            "states": STATES,
            "rows": reply["transactions"],
            "undecided": shown["undecided"],
        },
    )


async def transaction(request: PageRequest) -> View:
    """Show a transaction: origin, checks, messages, order, operations."""
    [token] = request.names
    after = request.number("after", 0)
    may_read = request.may("tx.show", token=token, detail=True, bodies=True)
    bodies = {"bodies": True} if may_read.allowed else {}
    args = {"token": token, "detail": True, "limit": MESSAGES, **bodies}
    damaged = ""
    try:
        shown = await request.ask("tx.show", **args, after=after)
    except Refused as refused:
        if refused.kind is not MessagesDamaged:
            raise
        damaged = refused.message
        # all but its messages, so that it can be decided
        total = (await request.ask("tx.show", token=token))["messages"]
        shown = await request.ask("tx.show", **args, after=total)
    heuristics = await _heuristics(request, shown["token"])
    return View(
        "transaction.html",
        {
            "one": shown,
            "rows": [row | {"shown": decode_message(row)} for row in shown["rows"]],
            "damaged": damaged,
            "may_read": may_read,
            "is_undecided": not shown["decided_at"],
            "heuristics": heuristics,
            "advice": advice(shown | {"heuristics": heuristics}),
        },
    )


async def _heuristics(request: PageRequest, token: str) -> list[dict[str, Any]]:
    """Return what was decided by hand, or found mixed, of one transaction."""
    number = int(token, 16)
    if not number or not request.may("xa.list").allowed:
        return []
    before = f"{number - 1:032x}"  # the page begins behind it
    reply = await request.ask("xa.list", heuristic=True, after=before, limit=1)
    found: list[dict[str, Any]] = [
        each for one in reply["transactions"] if one["token"] == token for each in one["heuristics"]
    ]
    return found


async def xa(request: PageRequest) -> View:
    """List undecided branches and heuristics, with what to do about each."""
    heuristic = bool(request.text("heuristic"))
    after = request.text("after")
    args: dict[str, Any] = {"heuristic": heuristic, "limit": request.limit}
    reply = await request.ask("xa.list", **args, **({"after": after} if after else {}))
    rows = [one | {"advice": advice(one)} for one in reply["transactions"]]
    return View("xa.html", {"rows": rows, "following": reply["next"], "heuristic": heuristic})


def advice(one: dict[str, Any]) -> str:
    """Return what to do about a transaction with branches, as `txmq xa doctor` says it;
    "" = nothing. The doctor also looks into the databases.
    """
    kind = str(one["decider"][0]) if one["decider"] else ""
    if one["heuristics"]:
        return (
            "Data differ from the decision. Compare the databases (txmq xa doctor), mend the data,"
            " then forget the heuristic here."
        )
    if one["decided_at"] or not (one["participants"] or kind in ("home", "foreign")):
        return ""
    if kind == "foreign":
        return (
            "Another transaction manager decides: recover it there. Prepared branches hold locks"
            " until then (txmq xa doctor)."
        )
    if one["in_doubt"]:
        return (
            "No answer came: txmq xa doctor looks into the databases, and says which branches"
            " exist; decide by hand only after that."
        )
    return "Recovery decides it by itself: txmq xa recover runs a pass now."


PAGES = (
    Page("transactions", "Transactions", transactions, "Transactions", "x", needs="tx.list"),
    Page("transactions/xa", "XA branches", xa),
    Page("transactions/*", "Transaction", transaction),
)
