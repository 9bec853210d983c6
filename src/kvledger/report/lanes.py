"""What became of each request, as stretches and marks on the time line of a recording's steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvledger.events import Abort, Finish, Round, Submit, Transferred
from kvledger.record import Decision, RoundRecord
from kvledger.report.recording import Recording
from kvledger.report.waterfall import missing_tails
from kvledger.request import USUAL_OUTPUT, Output

StretchKind = Literal["waiting", "loading", "half done", "in flight", "decoding"]
Ending = Literal["transferred", "finished", "aborted", "given up", "rejected"]
Setback = Literal["preempted", "sent back", "given up"]


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
    """A decision about the request, in the step that is a round. Not `ran`: the round's allocation failed.

    `missing_tokens` of the tail that it left are in no entry of the ledger.
    """

    step: int
    round_index: int
    decision: Decision
    ran: bool
    missing_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A running request lost its slots in the step that is a round; the reason is known of those that were given up."""

    step: int
    what: Setback
    reason: str | None = None


@dataclass(slots=True)
class Lane:
    """One request. `submitted` is a step, `ended` the step that ended it and how; `failed_step` the round that found no
    slots for it.
    """

    request: str
    prompt_tokens: int
    submitted: int
    output: Output = USUAL_OUTPUT
    stretches: list[Stretch] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
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
            case Submit(request, prompt, output):
                lane = lanes[request] = Lane(request, prompt.tokens, index, output)
                if request in rejected:
                    lane.end(index, "rejected")
                else:
                    lane.begin("waiting", index)
            case Round():
                _answer(lanes, index, step.rounds_before, recording)
            case Transferred(request) if lanes[request].state == "in flight":
                lanes[request].end(index, "transferred")
            case Finish(request) if lanes[request].state == "decoding":
                lanes[request].end(index, "finished")
            case Abort(request) if lanes[request].ended is None:
                lanes[request].end(index, "aborted")
    return list(lanes.values())


def _answer(lanes: dict[str, Lane], step: int, round_index: int, recording: Recording) -> None:
    record = recording.rounds[round_index].record
    ran = record.failure is None
    missing = {}
    if recording.shows_ledger:
        missing = {each.request: each.tokens for each in missing_tails(record, recording.page_size)}
    for decision in record.decisions:
        lane = lanes[decision.request]
        lane.answers.append(Answer(step, round_index, decision, ran, missing.get(decision.request, 0)))
        if decision.kind == "loading" and decision.load_back:
            lane.begin("loading", step)
        if not decision.joined:
            continue
        if decision.request in record.withdrawn:
            lane.end(step, "aborted")
        elif ran and not decision.tail_tokens:
            lane.begin("decoding" if recording.trace.node.mode == "unified" else "in flight", step)
        elif ran:
            lane.begin("half done", step)
        else:
            lane.close(step)
    _decoded(lanes, step, record)
    if record.failure is not None and record.failure.request in lanes:
        lanes[record.failure.request].failed_step = step


def _decoded(lanes: dict[str, Lane], step: int, record: RoundRecord) -> None:
    """Who went back to the queue, was given up, or has its output."""
    went: tuple[tuple[Setback, tuple[str, ...]], ...] = (
        ("preempted", record.preempted),
        ("sent back", record.retracted),
    )
    for what, requests in went:
        for request in requests:
            lanes[request].marks.append(Mark(step, what))
            lanes[request].begin("waiting", step)
    for request, reason in record.aborted:
        lanes[request].marks.append(Mark(step, "given up", reason))
        lanes[request].end(step, "given up")
    for request in record.finished:
        lanes[request].end(step, "finished")


def with_news(lanes: Iterable[Lane], named: Iterable[str | None]) -> tuple[list[Lane], list[Lane]]:
    """The lanes that a reader wants first (`named` ones, and those that failed), and the others, both in order."""
    wanted = set(named)
    first: list[Lane] = []
    others: list[Lane] = []
    for lane in lanes:
        (first if lane.request in wanted or lane.failed_step is not None else others).append(lane)
    return first, others
