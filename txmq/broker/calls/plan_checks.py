"""The dry run of a replay plan: its letters that are not put back yet, judged as of
now.
"""

from __future__ import annotations

from base64 import b64decode
from collections import Counter
from typing import TYPE_CHECKING, Any

from txmq.core.consumers import letter_views
from txmq.core.consumers.key_fences import FailureChanges, is_head
from txmq.core.replay import putting_back
from txmq.core.replay.orders import find_plan
from txmq.core.state import failed_messages, plan_letters
from txmq.core.state.plans import LetterOutcome, Plan
from txmq.model.schemas.bodies import CONTENT_TYPE, mistake_in

if TYPE_CHECKING:
    from txmq.broker.calls.letters import DeadLetterCalls
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.plan_letters import PlacedLetter
    from txmq.core.state.state import State
    from txmq.core.steps import Steps
    from txmq.wire.calls import plans as wire

CHECKED = 500  # letters that a call checks at most: their messages are read
CHECKED_BYTES = 4 << 20  # of their batches, and of one more
MISTAKES = 20  # different ones of bodies that a reply has
MISTAKE = 200  # characters


class PlanChecks:
    """Checks of plans."""

    def __init__(self, state: State, letters: DeadLetterCalls) -> None:
        self._state, self._letters = state, letters

    def check(self, args: wire.PlanCheck) -> Steps[dict[str, Any]]:
        """Return what a plan would do with the letters behind a cursor, in steps."""
        plan = find_plan(self._state, args.name)
        after = bytes.fromhex(args.cursor or "") or plan.cursor
        found, complete = self._part(plan, after)
        group = self._state.groups.by_id.get(plan.group_id)
        counts, reasons, mistakes = Counter[str](), Counter[str](), Counter[str]()
        for placed in found:
            if placed.letter.outcome in (LetterOutcome.PLANNED, LetterOutcome.SKIPPED):
                counts["checked"] += 1
                self._judge(plan, group, placed, counts, reasons, mistakes)
            yield  # its batch may be far larger than in the log
        return {
            "checked": counts["checked"],
            "edited": counts["edited"],
            "fenced": counts["fenced"],
            "out_of_order": counts["out_of_order"],
            "would_replay": counts["checked"] - reasons.total(),
            "would_skip": dict(reasons),
            "schema_mistakes": dict(mistakes.most_common(MISTAKES)),
            "invalid": mistakes.total(),
            "next": None if complete else found[-1].key.hex(),
        }

    def _part(self, plan: Plan, after: bytes) -> tuple[list[PlacedLetter], bool]:
        """Return the letters behind a key that one call checks, and whether these are
        all.
        """
        group = self._state.groups.by_id.get(plan.group_id)
        found: list[PlacedLetter] = []
        size = 0
        for placed in plan_letters.letters_of(self._state, plan.plan_id, after):
            if len(found) == CHECKED or size >= CHECKED_BYTES:
                return found, False
            found.append(placed)
            row = None if group is None else failed_messages.get(self._state, group, placed.ref)
            size += 0 if row is None else row.length
        return found, True

    def _judge(
        self,
        plan: Plan,
        group: ConsumerGroup | None,
        placed: PlacedLetter,
        counts: Counter[str],
        reasons: Counter[str],
        mistakes: Counter[str],
    ) -> None:
        if placed.letter.outcome == LetterOutcome.SKIPPED:
            reasons[placed.letter.why] += 1
            return
        if group is None:
            reasons["its group was deleted"] += 1
            return
        row = failed_messages.get(self._state, group, placed.ref)
        if why := putting_back.reason_to_skip(self._state, plan, placed, row):
            reasons[why] += 1
            return
        assert row is not None, "there is no reason to skip it"
        counts["edited"] += row.edits > 0
        counts[self._place_of(group, placed.ref, row)] += 1
        schema = self._state.topics_by_id[placed.ref[0]].settings.schema
        view = letter_views.view_of(self._state, group, placed.ref, row)
        fields = self._letters.fields_of(view, bodies=bool(schema))
        if "damaged" in fields:
            reasons[f"damaged: {fields['damaged']}"] += 1
        elif schema:
            content_type = fields["headers"].get(CONTENT_TYPE, "")
            mistake = mistake_in(schema, b64decode(fields["body"]), content_type)
            mistakes.update([mistake[:MISTAKE]] if mistake else ())

    def _place_of(self, group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> str:
        """Return what the key of a letter does meanwhile, in an ordered group."""
        if not group.ordered or row.key_hash is None:
            return ""
        if FailureChanges(self._state, group, 0).is_fenced(ref, row.key_hash):
            return "fenced"  # another message of its key comes first
        fence = group.fence(ref[0], row.key_hash)
        is_first = fence is not None and is_head(fence, ref)
        return "" if is_first else "out_of_order"  # the key has gone on without it
