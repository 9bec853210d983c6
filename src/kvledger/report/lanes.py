"""What became of each request, as stretches and marks on the time line of a recording's steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvledger.record import Decision, RoundRecord
from kvledger.report.recording import Recording
from kvledger.trace import Abort, Round, Submit, Transferred

StretchKind = Literal["waiting", "half done", "in flight"]
Ending = Literal["transferred", "aborted", "rejected"]


@dataclass(slots=True)
class Stretch:
    """A state between two steps (indices into the recording's steps); `ends` None: it was still so at the end.

    A round that begins a stretch does so at its end, a round that ends one does so at its start.
    """

    kind: StretchKind
    begins: int
    ends: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A decision about the request, in the step that is a round. Not `ran`: the round's allocation failed."""

    step: int
    round_index: int
    decision: Decision
    ran: bool


@dataclass(slots=True)
class Lane:
    """One request. `ended`: the step that ended it, and how. `failed_step`: the round that found no slots for it."""

    request: str
    prompt_tokens: int
    stretches: list[Stretch] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    ended: tuple[int, Ending] | None = None
    failed_step: int | None = None

    @property
    def state(self) -> StretchKind | None:
        """What it is doing now."""
        last = self.stretches[-1] if self.stretches else None
        return last.kind if last is not None and last.ends is None else None

    def begin(self, kind: StretchKind, step: int) -> None:
        self.close(step)
        self.stretches.append(Stretch(kind, step))

    def close(self, step: int) -> None:
        if self.state is not None:
            self.stretches[-1].ends = step

    def end(self, step: int, how: Ending) -> None:
        self.close(step)
        self.ended = (step, how)


def lanes_of(recording: Recording) -> list[Lane]:
    """A lane for each submitted request, in the order of their submission."""
    rejected = {request for request, _ in recording.outcome.rejected_at_submit}
    lanes: dict[str, Lane] = {}
    for index, step in enumerate(recording.steps):
        match step.event:
            case Submit(request, prompt):
                lane = lanes[request] = Lane(request, prompt.tokens)
                if request in rejected:
                    lane.end(index, "rejected")
                else:
                    lane.begin("waiting", index)
            case Round():
                _answer(lanes, index, step.rounds_before, recording.rounds[step.rounds_before].record)
            case Transferred(request) if lanes[request].state == "in flight":
                lanes[request].end(index, "transferred")
            case Abort(request) if lanes[request].ended is None:
                lanes[request].end(index, "aborted")
    return list(lanes.values())


def _answer(lanes: dict[str, Lane], step: int, round_index: int, record: RoundRecord) -> None:
    ran = record.failure is None
    for decision in record.decisions:
        lane = lanes[decision.request]
        lane.answers.append(Answer(step, round_index, decision, ran))
        if not decision.joined:
            continue
        if ran and not decision.tail_tokens:
            lane.begin("in flight", step)
        elif ran:
            lane.begin("half done", step)
        else:
            lane.close(step)
    if record.failure is not None and record.failure.request in lanes:
        lanes[record.failure.request].failed_step = step


def with_news(lanes: Iterable[Lane], named: Iterable[str | None]) -> tuple[list[Lane], list[Lane]]:
    """The lanes that a reader wants first (`named` ones, and those that failed), and the others, both in order."""
    wanted = set(named)
    first: list[Lane] = []
    others: list[Lane] = []
    for lane in lanes:
        (first if lane.request in wanted or lane.failed_step is not None else others).append(lane)
    return first, others
