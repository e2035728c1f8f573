"""A group with dead letters of many kinds, and an operator who changes them."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from tests.core.consumers.invariants import moved_rows
from tests.core.consumers.world import ConsumersWorld
from txmq.core.consumers.commands import (
    AbandonLetters,
    NackMessage,
    ReplayLetters,
    ReportStored,
    StoredEntry,
)
from txmq.core.consumers.letter_selection import LetterScan, LetterSelection, ScanPosition
from txmq.core.replay.abandoning import AbandonNextLetters, AbandonPlan
from txmq.core.replay.building import AddPlanLetters, FreezePlan
from txmq.core.replay.orders import CancelPlan, CreatePlan
from txmq.core.replay.putting_back import AdvancePlan
from txmq.core.state import failed_rows
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.core.state.letter_cells import LetterState
from txmq.core.state.plans import PlanSettings
from txmq.model.retry import FailureReport, RetryPolicy
from txmq.model.units import MINUTE, SECOND

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import MessageRef

TOPICS = ("a", "b")
KEYS = (-(1 << 62), -1, 0, 5, None)
TYPES = ("ValueError", "billing.Refused", "")
PRINTS = ("f1", "f2", "")
TEXTS = ("no such order", "No Such Key", "İx")
Place = tuple[str, int, int]
Found = tuple["MessageRef", int]  # a message, and the number of its death


class LettersWorld(ConsumersWorld):
    """Letters in two topics; `turn` makes a random change."""

    def __init__(self, seed: int) -> None:
        super().__init__(a=2, b=1)
        self.random = Random(seed)
        self.join("m", *TOPICS, mode="concurrent", retry=RetryPolicy((1,) * 9))

    def turn(self) -> None:
        """Do something that happens to letters."""
        choice = self.random.choice
        kill = self.kill
        act = (self.replay, self.plan_some, self.abandon, self.process, self.report)
        choice((kill, kill, kill, *act))()
        # a clock that is set back puts later deaths before earlier ones
        self.now += choice((1, SECOND, 7 * MINUTE, 90 * MINUTE, -3 * MINUTE))

    def kill(self) -> None:
        """Publish messages; most of them die."""
        topic = self.random.choice(TOPICS)
        partition = self.random.randrange(len(self.state.topics[topic].end_offsets))
        keys = self.random.choices(KEYS, k=self.random.randint(1, 4))
        self.publish(topic, *keys, partition=partition)
        for got in self.fetch("m"):
            self.fail(got.topic, got.partition, got.offset, dead=self.random.random() < 0.8)

    def fail(self, topic: str, partition: int, offset: int, *, dead: bool) -> None:
        choice = self.random.choice
        failure = FailureReport(choice(TYPES), choice(TEXTS), choice(PRINTS))
        topic_id = self.state.topics[topic].topic_id
        key = self.keys[topic_id, partition, offset]
        self.do(
            NackMessage(
                "g", "m", self.generation(), topic, partition, offset, key, None, failure, dead
            )
        )

    def report(self) -> None:
        """Let the member's store keep what the member gets, and tell of what it has."""
        choice = self.random.choice
        for got in self.fetch("m"):
            self.tell(got.topic, got.partition, got.offset, "stored")
        for (topic_id, *at), row in self.rows().items():
            if row.kind == FailedKind.LOCAL and self.random.random() < 0.5:
                state = choice(("stored", "acked", "dead", "returned"))
                self.tell(self.state.topics_by_id[topic_id].name, at[0], at[1], state)

    def tell(self, topic: str, partition: int, offset: int, state: str) -> None:
        choice, topic_id = self.random.choice, self.state.topics[topic].topic_id
        entry = StoredEntry(
            topic, topic_id, partition, offset, state, 1,
            failure=FailureReport(choice(TYPES), choice(TEXTS), choice(PRINTS)),
            key_hash=self.keys[topic_id, partition, offset],
        )  # fmt: skip
        self.do(ReportStored("g", "m", self.generation(), b"s" * 16, "host", (entry,)))

    def process(self) -> None:
        """Process what is due, or let it fail again."""
        for got in self.fetch("m"):
            if self.random.random() < 0.5:
                self.ack(
                    "m", (got.offset, got.offset + 1), topic=got.topic, partition=got.partition
                )
            else:
                self.fail(got.topic, got.partition, got.offset, dead=True)

    def replay(self) -> None:
        self.do(ReplayLetters("g", self._some()))

    def plan_some(self) -> None:
        """Put letters back by a plan, which then ends, or let it abandon them."""
        name = f"plan-{len(self.state.plans.by_id)}"
        starts = self.random.random() < 0.6
        settings = PlanSettings(0, 0, in_flight=0, stop_after=0, start=starts)
        self.do(CreatePlan(name, "g", settings))
        self.do(AddPlanLetters(name, self._some(), complete=True))
        plan_id = self.state.plans.by_name[name].plan_id
        self.do(FreezePlan(plan_id, ""))
        if starts:
            self.do(AdvancePlan(plan_id, 2))
        else:
            self.do(AbandonPlan(name, "tidy"))
            self.do(AbandonNextLetters(plan_id))
        self.do(CancelPlan(name))

    def abandon(self) -> None:
        self.do(AbandonLetters("g", self._some(), "tidy"))

    def _some(self) -> tuple[Place, ...]:
        places = [
            (self.state.topics_by_id[ref[0]].name, *ref[1:])
            for ref, row in self.rows().items()
            if failed_rows.letter_state(row) == LetterState.OPEN
        ]
        return tuple(self.random.sample(places, min(len(places), self.random.randint(0, 3))))

    def rows(self) -> dict[MessageRef, FailedMessage]:
        return moved_rows(self.state, self.group())

    def selection(self) -> LetterSelection:
        """Return a random selection."""
        random = self.random
        states = random.choice([(LetterState.OPEN,), tuple(random.sample([*LetterState], 3))])
        times = sorted(self.now - random.randrange(400 * MINUTE) for _ in range(2))
        wanted: dict[str, Any] = {
            "topic": random.choice(TOPICS),
            "key_hash": random.choice(KEYS[:-1]),
            "died_from": times[0],
            "died_before": times[1],
            "error_type": random.choice(TYPES),
            "fingerprint": random.choice(PRINTS),
            "min_attempts": random.randint(0, 2),
            "max_attempts": random.randint(0, 2),
            "text": random.choice(("such", "NO ", "value", "x", "i")),
        }
        chosen = random.sample([*wanted], random.choice((0, 1, 1, 2, 2, 3)))
        return LetterSelection(states, **{name: wanted[name] for name in chosen})

    def naive(self, selection: LetterSelection) -> list[Found]:
        """Return the letters of a selection, in order, without any index."""
        found = []
        for ref, row in self.rows().items():
            at = row.died_at
            text = f"{row.error_type}\n{row.error_text}".lower()
            wanted = (
                failed_rows.letter_state(row) in selection.states,
                selection.topic in (None, self.state.topics_by_id[ref[0]].name),
                selection.key_hash is None or row.key_hash == selection.key_hash,
                at >= selection.died_from,
                selection.died_before is None or at < selection.died_before,
                selection.error_type is None or row.error_type == selection.error_type,
                selection.fingerprint is None or row.fingerprint == selection.fingerprint,
                row.attempt >= selection.min_attempts,
                selection.max_attempts is None or row.attempt <= selection.max_attempts,
                selection.text is None or selection.text.lower() in text,
            )
            if all(wanted):
                found.append((at, row.number, ref))
        return [(ref, number) for _at, number, ref in sorted(found)]

    def past(self, selection: LetterSelection) -> set[Found]:
        """Return the letters of a selection, but for what failed at a time to come, by
        a clock that was set back since: a scan takes it for a later failure.
        """
        rows = self.rows()
        return {
            (ref, number)
            for ref, number in self.naive(selection)
            if number or rows[ref].died_at <= self.now
        }

    def page(
        self, selection: LetterSelection, start: ScanPosition | None, size: int
    ) -> tuple[list[Found], ScanPosition | None]:
        """Return a page of a selection, and where the next one begins."""
        scan = LetterScan(self.state, self.group(), selection, start, self.now)
        found: list[Found] = []
        while not scan.ended and len(found) < size:
            for letter in scan.step():
                found.append((letter.ref, letter.row.number))
                if len(found) == size:
                    break
        return found, None if scan.ended else scan.position
