"""A replay in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

Rounds have no duration of their own, so every round gets the same: PERIOD_US of trace time, of which the first part
shows what happened before it (submissions, transfers, aborts, in their order) and the rest the round itself. Figures of
the ledger are counted when a round starts, those of the pool when it ends and after every event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from kvledger import __version__
from kvledger.events import Round
from kvledger.ledger import Due
from kvledger.replay import round_document
from kvledger.report.lanes import Answer, Lane, lanes_of
from kvledger.report.markup import Name
from kvledger.report.plain import plain
from kvledger.report.recording import Pool, Recording
from kvledger.report.waterfall import due_tokens

PERIOD_US = 1000
BETWEEN_US = 100
LOAD_BACK_US = 200
PROCESS_ID = 1
ROUNDS_THREAD = 0
SOURCE_COLUMNS = 120
REASON_COLUMNS = 400

Event = dict[str, Any]


def trace_events(recording: Recording) -> Iterator[str]:
    """The document, in pieces to write one after the other."""
    clock = _Clock(recording)
    lanes = lanes_of(recording)
    events = [*_round_events(recording, clock), *_counters(recording, clock), *_broken(recording, clock)]
    for thread, lane in enumerate(lanes, 1):
        events += _lane_events(lane, thread, recording, clock)
    # a longer slice first, where two begin together: that is how viewers nest them
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    head = {
        "displayTimeUnit": "ms",
        "otherData": _about(recording),
        "traceEvents": [],
    }
    opening, closing = json.dumps(head, indent=1).rsplit("]", 1)
    yield opening
    separator = "\n"
    for event in [*_names(recording, lanes), *events]:
        yield separator + json.dumps(event)
        separator = ",\n"
    yield f"\n]{closing}\n"


def _about(recording: Recording) -> dict[str, Any]:
    replayed = recording.replayed
    return {
        "producer": f"kvledger {__version__}",
        "source": plain(replayed.source, SOURCE_COLUMNS),
        "title": recording.trace.title,
        "rules": replayed.preset or "own switches",
        "verdict": recording.outcome.verdict,
        "round_us": PERIOD_US,
        "time": f"a round is {PERIOD_US} us: {BETWEEN_US} us of events, then the round; no real time is meant",
        "counters": (
            "tokens. free and evictable: after a round or an event. promised now and later: when a round's decisions "
            "ended. slack: free + evictable minus what admitted prompts still need, at all these moments"
        ),
    }


# --- time


class _Clock:
    """Trace time, in microseconds, of a recording's steps."""

    def __init__(self, recording: Recording) -> None:
        self._steps = recording.steps
        self.end = PERIOD_US * len(recording.rounds) + BETWEEN_US
        between: dict[int, int] = {}
        self._places = []
        for step in recording.steps:
            self._places.append(between.get(step.rounds_before, 0))
            if not isinstance(step.event, Round):
                between[step.rounds_before] = between.get(step.rounds_before, 0) + 1
        self._between = between

    def round_start(self, round_index: int) -> int:
        return PERIOD_US * round_index + BETWEEN_US

    def round_end(self, round_index: int) -> int:
        return PERIOD_US * (round_index + 1)

    def event(self, step: int) -> int:
        """Events between two rounds stand evenly apart, rounded down: very many of them share a microsecond."""
        before = self._steps[step].rounds_before
        return PERIOD_US * before + BETWEEN_US * (self._places[step] + 1) // (self._between[before] + 1)

    def begins(self, step: int) -> int:
        """When something begins that this step began: a round does so at its end."""
        return self.round_end(self._steps[step].rounds_before) if self._is_round(step) else self.event(step)

    def ends(self, step: int | None) -> int:
        """When something ends that this step ended: a round does so at its start. None: not before the end."""
        if step is None:
            return self.end
        return self.round_start(self._steps[step].rounds_before) if self._is_round(step) else self.event(step)

    def _is_round(self, step: int) -> bool:
        return isinstance(self._steps[step].event, Round)


# --- names and kinds of events


def _names(recording: Recording, lanes: Iterable[Lane]) -> Iterator[Event]:
    yield _metadata("process_name", ROUNDS_THREAD, name=f"kvledger {plain(recording.replayed.source, SOURCE_COLUMNS)}")
    for thread, name in [
        (ROUNDS_THREAD, "rounds"),
        *((i, Name(lane.request).short) for i, lane in enumerate(lanes, 1)),
    ]:
        yield _metadata("thread_name", thread, name=name)
        yield _metadata("thread_sort_index", thread, sort_index=thread)


def _metadata(event_name: str, thread: int, **args: object) -> Event:
    return {"ph": "M", "pid": PROCESS_ID, "tid": thread, "ts": 0, "name": event_name, "args": args}


@dataclass(frozen=True, slots=True)
class _Thread:
    """Makes the events of one lane."""

    number: int
    category: str
    args: dict[str, object] = field(default_factory=dict)

    def slice(self, name: str, begins: int, ends: int, **args: object) -> Event:
        return {**self._event("X", name, begins, args), "dur": ends - begins}

    def instant(self, name: str, at: int, **args: object) -> Event:
        return {**self._event("i", name, at, args), "s": "t"}

    def _event(self, phase: str, name: str, at: int, args: dict[str, object]) -> Event:
        event = {"ph": phase, "pid": PROCESS_ID, "tid": self.number, "ts": at, "name": name, "cat": self.category}
        return {**event, "args": {**self.args, **args}}


# --- rounds and counters


def _round_events(recording: Recording, clock: _Clock) -> Iterator[Event]:
    thread = _Thread(ROUNDS_THREAD, "round")
    for index, view in enumerate(recording.rounds):
        document = round_document(view.record)
        figures = {key: value for key, value in document.items() if not isinstance(value, list)}
        name = f"round {view.record.round}"
        yield thread.slice(name, clock.round_start(index), clock.round_end(index), **figures, needed=view.needed)


def _broken(recording: Recording, clock: _Clock) -> Iterator[Event]:
    """Broken invariants and a drain that is stuck, at the start of their rounds."""
    thread = _Thread(ROUNDS_THREAD, "broken")
    starts = {view.record.round: clock.round_start(index) for index, view in enumerate(recording.rounds)}
    for each in recording.outcome.broken:
        facts = {"request": each.request, "message": each.message, "round": each.round}
        yield thread.instant(f"{each.invariant} broken", starts.get(each.round, 0), **facts) | {"s": "p"}
    stuck = recording.outcome.stuck
    if stuck is not None:
        facts = {"request": stuck.request, "message": stuck.message, "round": stuck.round}
        yield thread.instant("stuck", starts.get(stuck.round, 0), **facts) | {"s": "p"}


def _counters(recording: Recording, clock: _Clock) -> Iterator[Event]:
    knows_needs = "promises-covered" not in recording.replayed.skipped
    yield from _pool_counters(recording.start, recording.start.baseline if knows_needs else None, 0)
    for index, step in enumerate(recording.steps):
        if not isinstance(step.event, Round):
            yield from _pool_counters(step.pool, step.slack, clock.event(index))
            continue
        view, start = recording.rounds[step.rounds_before], clock.round_start(step.rounds_before)
        if recording.shows_ledger:
            yield _counter("promised now", due_tokens(view.record, Due.NOW), start)
            yield _counter("promised later", due_tokens(view.record, Due.LATER), start)
        if view.slack is not None:
            yield _counter("slack", view.slack, start)
        yield from _pool_counters(step.pool, step.slack, clock.round_end(step.rounds_before))


def _pool_counters(pool: Pool, slack: int | None, at: int) -> Iterator[Event]:
    yield _counter("free", pool.free, at)
    yield _counter("evictable", pool.evictable, at)
    if slack is not None:
        yield _counter("slack", slack, at)


def _counter(name: str, tokens: int, at: int) -> Event:
    return {"ph": "C", "pid": PROCESS_ID, "tid": ROUNDS_THREAD, "ts": at, "name": name, "args": {"tokens": tokens}}


# --- requests


def _lane_events(lane: Lane, number: int, recording: Recording, clock: _Clock) -> Iterator[Event]:
    thread = _Thread(number, "request", {"request": Name(lane.request).short})
    asked = {"prompt_tokens": lane.prompt_tokens, **asdict(lane.output)}
    yield thread.instant("submitted", clock.event(lane.submitted), request=lane.request, **asked)
    for stretch in lane.stretches:
        begins, ends = clock.begins(stretch.begins), clock.ends(stretch.ends)
        if ends > begins:
            yield thread.slice(stretch.kind, begins, ends)
    for answer in lane.answers:
        if answer.decision.joined:
            yield from _chunk_events(answer, lane, thread, clock)
        else:
            reason = str(answer.decision.reason or answer.decision.kind)
            yield thread.instant(
                f"refused {reason}" if answer.decision.reason else reason,
                clock.round_start(answer.round_index),
                rem_total_tokens=answer.decision.rem_total_tokens,
                cur_rem_tokens=answer.decision.cur_rem_tokens,
            )
    if lane.failed_step is not None:
        failure, at = recording.outcome.failure, clock.round_end(recording.steps[lane.failed_step].rounds_before)
        assert failure is not None, "a lane fails in a round that failed"
        facts = {"wanted": failure.wanted, "free": failure.free, "evictable": failure.evictable}
        yield thread.instant("out of memory", at, **facts, message=failure.message) | {"s": "p"}
    for mark in lane.marks:
        round_index = recording.steps[mark.step].rounds_before
        # who makes way does so for a decision, and who is sent back or given up goes when the batch has run
        early = mark.what == "preempted"
        at = clock.round_start(round_index) if early else clock.round_end(round_index)
        told = {} if mark.reason is None else {"reason": plain(mark.reason, REASON_COLUMNS)}
        yield thread.instant(mark.what, at, round=recording.rounds[round_index].record.round, **told)
    if lane.ended is not None and lane.ended[1] != "given up":
        step, how = lane.ended
        yield thread.instant(f"{how} at submit" if how == "rejected" else how, clock.begins(step))


def _chunk_events(answer: Answer, lane: Lane, thread: _Thread, clock: _Clock) -> Iterator[Event]:
    """A load-back, if there is one, and then the chunk."""
    decision = answer.decision
    start, end = clock.round_start(answer.round_index), clock.round_end(answer.round_index)
    if decision.forced:
        yield thread.instant("forced", start, tokens=decision.tokens)
    if decision.load_back:
        yield thread.slice("load-back", start, start + LOAD_BACK_US, tokens=decision.load_back)
        start += LOAD_BACK_US
    name = "chunk" if answer.ran else "chunk (failed)" if answer.step == lane.failed_step else "chunk (not run)"
    facts = {"kind": decision.kind, "start": decision.start, "end": decision.end, "tokens": decision.tokens}
    ledger = {"rem_total_tokens": decision.rem_total_tokens, "cur_rem_tokens": decision.cur_rem_tokens}
    yield thread.slice(name, start, end, **facts, tail=decision.tail_tokens, **ledger)
