"""Drives a target through a trace's events and keeps the outcome. Knows only the target protocol."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from kvledger.arithmetic import ceil_pages
from kvledger.events import (
    Abort,
    Cached,
    Decode,
    Drain,
    Event,
    Fault,
    Faulty,
    Finish,
    Hold,
    Pause,
    Pin,
    Release,
    Resume,
    Round,
    Submit,
    Transferred,
    Unpin,
)
from kvledger.faults import FAULT_AMOUNTS, FaultKind
from kvledger.node import PrefillNode, Watcher
from kvledger.pipeline import PipelineNode  # noqa: F401 - registers itself for pipeline ranks
from kvledger.pool import OutOfPages
from kvledger.record import AllocationFailure, Decision, RankRound, RoundRecord, Snapshot
from kvledger.request import USUAL_OUTPUT, Output, Prompt
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings, of_rank
from kvledger.trace import Trace, TraceError
from kvledger.unified import UnifiedNode  # noqa: F401 - registers itself for unified mode


@runtime_checkable
class Target(Protocol):
    """A scheduler under test, built from a node's settings; sizes in tokens.

    `capabilities` says what it can show; an invariant that needs more is skipped by name: `batches` (which chunks
    ran), `one-cut` (it never has two half-done prompts), `grid` (it ends chunks on the checkpoint grid), `decisions`
    (each is told to the watcher as it is taken, refusals too), `offsets` (what it has promised), `counts` (pages free,
    cached and of each request: they add up), `pages` (by identity), `decode` (who decodes is in the snapshot, and the
    queue in its order). `submit` returns why a request can never be admitted, or None. `run_round` never raises for
    lack of memory: the record carries it.
    Others say what it does not promise: `optimistic` (an admission reserves nothing for later chunks), `may-preempt`
    (an admitted prefill may be rolled back and begin again), `hybrid` (layers with page tables of their own).

    An attribute `features`, where there is one, names what it models beyond plain prefill: `unified` (decode beside
    prefill: `submit` takes an Output as well, and there are `run_decode` and `finish`), `mixed_chunk`, schedule
    policies, `pools` (second pools other than plain state slots), `faults` (see FaultyTarget), and `ranks` (a pipeline:
    `transferred`, `abort`, `cache_on_...`, `hold` and `release` take the keyword `ranks`, numbers in order, where they
    do not reach all of them). A trace that asks for more is bad input. `foreign`, if true, says that the code behind it
    is somebody else's: what it raises is a finding (`never-raises`), not a fault of ours.

    `ignores`, where there is one, names what it does nothing with, which is then neither drawn nor blamed: `rules` (no
    switch of them reaches it), `cached` (prefixes of others), `held` (slots of outsiders).

    An attribute `standalone`, where there is one, makes a report to upstream repeatable without kvledger:
    `standalone(trace)` is the text of a module that needs the scheduler's own package alone and defines
    `World(node, rules)`, as kvledger.targets.script_runner says; ValueError, one line, if this trace cannot be played
    so. `packages`, beside it, names the distributions whose versions belong into a report.
    """

    @property
    def capabilities(self) -> frozenset[str]: ...
    @property
    def has_work(self) -> bool:
        """Something is waiting or half done."""
        ...

    def submit(self, rid: str, prompt: Prompt) -> str | None: ...
    def run_round(self) -> RoundRecord: ...
    def transferred(self, rid: str) -> None: ...
    def abort(self, rid: str) -> None: ...
    def cache_on_device(self, prompt: Prompt, *, locked: bool) -> None: ...
    def cache_on_host(self, prompt: Prompt) -> None: ...
    def hold(self, name: str, tokens: int) -> None: ...
    def release(self, name: str, tokens: int | None = None) -> None: ...
    def in_flight(self) -> tuple[str, ...]: ...
    def snapshot(self) -> Snapshot: ...


class UnifiedTarget(Target, Protocol):
    """A target that decodes too; `has_work` counts the running requests in. Names of requests stay unique."""

    def submit(self, rid: str, prompt: Prompt, output: Output = ...) -> str | None: ...
    def run_decode(self) -> RoundRecord:
        """Each running request takes a token, nobody is admitted."""
        ...

    def finish(self, rid: str) -> None:
        """A running request's output ends now; nothing happens to any other."""
        ...


class FaultyTarget(Target, Protocol):
    """A target that models faults. A round that is paused is in its records all the same."""

    def fault(self, kind: FaultKind, rid: str, amount: int | None = None) -> None:
        """Arm a fault for a request; it strikes at the next occasion, once."""
        ...

    def pin(self, name: str, prompt: Prompt) -> None: ...
    def unpin(self, name: str) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


TargetFactory = Callable[[NodeSettings, AccountingRules, Watcher], Target]


STEPS = (Round, Decode, Drain)
"""Events in which the scheduler runs; all others happen between its rounds."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The first time an invariant did not hold."""

    invariant: str
    round: int
    request: str | None
    message: str


class Monitor(Watcher):
    """Sees what a replay does; the default judges nothing. `broken` grows in time order."""

    def __init__(self) -> None:
        self.broken: list[Broken] = []

    def attach(self, target: Target, settings: NodeSettings, rules: AccountingRules) -> None: ...
    def before_round(self) -> None: ...
    def after_round(self, record: RoundRecord) -> None: ...
    def after_event(self, event: Event) -> None:
        """Something other than a round happened."""

    def at_rest(self) -> None: ...
    def stuck(self, stuck: Stuck) -> None: ...
    def crashed(self, error: Exception) -> bool:  # noqa: ARG002 - for those who can
        """The target raised. True if that is now a finding; else it is raised on."""
        return False


@dataclass(frozen=True, slots=True)
class Stuck:
    """Work is left, nothing moves, and nothing in flight could free memory. `wanted` tokens are still to compute."""

    round: int
    request: str
    wanted: int
    free: int
    evictable: int
    message: str


@dataclass(frozen=True, slots=True)
class Happening:
    """Something between rounds: after how many of them, what, to whom, and of how many tokens where that matters.

    `output` is what a submission asks for; `note` says where less came of it than was asked.
    """

    rounds: int
    what: str
    name: str
    tokens: int | None = None
    output: Output = USUAL_OUTPUT
    note: str = ""


@dataclass(slots=True)
class Outcome:
    """What a replay ended in; `document` is the JSON contract. `unstruck`: faults that are armed and have met no
    occasion, each with its request."""

    rounds: list[RoundRecord] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    rejected_at_submit: list[tuple[str, str]] = field(default_factory=list)
    failure: AllocationFailure | None = None
    stuck: Stuck | None = None
    happenings: list[Happening] = field(default_factory=list)
    unstruck: list[tuple[str, str]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.failure is not None:
            return "oom"
        if self.stuck is not None:
            return "stuck"
        return self.broken[0].invariant if self.broken else "ok"

    def document(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "violation": self._violation(),
            "broken": [
                {"invariant": b.invariant, "round": b.round, "request": b.request, "message": b.message}
                for b in self.broken
            ],
            "rounds": [round_document(record) for record in self.rounds],
            "rejected_at_submit": [
                {"request": request, "reason": reason} for request, reason in self.rejected_at_submit
            ],
            **({"unstruck": [{"fault": kind, "request": rid} for kind, rid in self.unstruck]} if self.unstruck else {}),
        }

    def _violation(self) -> dict[str, Any] | None:
        if self.failure is not None:
            return _violation("oom", self.rounds[-1].round, self.failure)
        if self.stuck is not None:
            return _violation("stuck", self.stuck.round, self.stuck)
        if not self.broken:
            return None
        first = self.broken[0]
        return {
            "kind": first.invariant,
            "round": first.round,
            "request": first.request,
            "wanted": None,
            "free": None,
            "evictable": None,
            "message": first.message,
        }


def _violation(kind: str, round_number: int, facts: AllocationFailure | Stuck) -> dict[str, Any]:
    rank = facts.rank if isinstance(facts, AllocationFailure) else 0
    return ({"rank": rank} if rank else {}) | {
        "kind": kind,
        "round": round_number,
        "request": facts.named if isinstance(facts, AllocationFailure) else facts.request,
        "wanted": facts.wanted,
        "free": facts.free,
        "evictable": facts.evictable,
        "message": facts.message,
        **({"pool": facts.pool} if isinstance(facts, AllocationFailure) and facts.pool else {}),
    }


ROUND_FACTS = ("decoded", "finished", "retracted", "preempted", "rolled_back", "loading")


def round_document(record: RoundRecord) -> dict[str, Any]:
    """A round in the outcome's JSON form; what only decode, faults or ranks bring is there if it happened."""
    told: dict[str, Any] = {name: list(requests) for name in ROUND_FACTS if (requests := getattr(record, name))}
    if record.ranks:
        told["ranks"] = [_rank_document(rank) for rank in record.ranks]
    if record.paused:
        told["paused"] = True
    if record.withdrawn:
        told["withdrawn"] = [
            _admitted(decision) for decision in record.decisions if decision.joined and decision not in record.joined
        ]
    if record.pools:
        told["pools"] = [asdict(pool) for pool in record.pools]
    if record.struck:
        told["struck"] = [{"fault": kind, "request": request} for kind, request in record.struck]
    if record.aborted:
        told["aborted"] = [{"request": request, "reason": reason} for request, reason in record.aborted]
    return told | {
        "round": record.round,
        "baseline": record.baseline,
        "rem_total_tokens": record.rem_total_tokens,
        "cur_rem_tokens": record.cur_rem_tokens,
        "rem_chunk_tokens": record.rem_chunk_tokens,
        "budget_state": str(record.budget_state),
        "batch_is_full": record.batch_is_full,
        "forced": record.forced,
        "admitted": [_admitted(decision) for decision in record.joined],
        "refused": [{"request": d.request, "reason": str(d.reason), **_shortage(d)} for d in record.refused],
        "promises": [
            {"request": p.request, "kind": p.kind, "tokens": p.tokens, "due": str(p.due)} for p in record.open_promises
        ],
        "free": record.free,
        "evictable": record.evictable,
        "protected": record.protected,
    }


def _admitted(d: Decision) -> dict[str, Any]:
    return {"request": d.request, "kind": d.kind, "start": d.start, "end": d.end, "load_back": d.load_back}


def _shortage(refused: Decision) -> dict[str, Any]:
    """The second pool that refused it, with what was wanted and left in its units where the target tells."""
    told: dict[str, Any] = {"pool": refused.short_of} if refused.short_of else {}
    if refused.short_units is not None:
        told["wanted"], told["left"] = refused.short_units
    return told


def _rank_document(rank: RankRound) -> dict[str, Any]:
    told = {"deferred": list(rank.deferred)} if rank.deferred else {}
    return {
        "rank": rank.rank,
        "ran": [{"request": request, "start": start, "end": end} for request, start, end in rank.ran],
        **told,
        "free": rank.free,
        "evictable": rank.evictable,
        "protected": rank.protected,
    }


class TargetError(Exception):
    """A target that cannot be asked: it is not built, or its answer is none. One line that names it and says why."""


class TargetRaised(Exception):
    """What a target raised, on its way to the replay; `error` is it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _MonitorRaised(Exception):
    """What a monitor raised, on its way through the target that told it of a decision: nobody's finding."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class EventError(ValueError):
    """An event that cannot happen in the state it meets, such as a hold of more slots than there are."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(message)
        self.field = field_name


class UnmodelledError(EventError):
    """The trace asks for something that this target does not model."""


def _check_modelled(settings: NodeSettings, target: Target) -> None:
    features: frozenset[str] = getattr(target, "features", frozenset())
    asked: dict[str, str | None] = {
        "mode": settings.mode if settings.mode != "prefill" else None,
        "schedule_policy": settings.schedule_policy if settings.schedule_policy != "fcfs" else None,
        "mixed_chunk": "mixed_chunk" if settings.mixed_chunk else None,
        "ranks": "ranks" if settings.ranks else None,
        "tracking_slots": "pools" if settings.tracking_slots else None,
        "copy_on_write": "pools" if settings.copy_on_write else None,
        "window_tokens": "pools" if settings.window_tokens is not None else None,
        "shared_bytes": "pools" if settings.shared_bytes is not None else None,
    }
    values = {"ranks": f"a pipeline of {len(settings.ranks) + 1}"}
    for key, feature in asked.items():
        if feature is not None and feature not in features:
            value = values.get(key, json.dumps(getattr(settings, key), default=str))
            raise UnmodelledError(f"node.{key}", f"{value} is not modelled by this target")


def _room_on_host(settings: NodeSettings, event: Cached) -> str:
    """Where a host has room for less than is cached on it; pages on the device stay there whatever it holds."""
    pages = event.prompt.tokens // settings.page_size
    ranks = range(len(settings.ranks) + 1) if event.ranks is None else event.ranks
    words = []
    for rank in ranks:
        room = (of_rank(settings, rank) if settings.ranks else settings).host_pages
        if room is not None and room < pages:
            kept = f"no more than {room * settings.page_size} kept" if room else "no host: nothing kept"
            words.append(f"rank {rank}: {kept}" if settings.ranks else kept)
    return "; ".join(words)


def _event_word(event: Faulty) -> str:
    return type(event).__name__.lower()


def faulty_words(event: Faulty) -> tuple[str, str, int | None]:
    """What happened, to whom, and of how many tokens where that matters."""
    match event:
        case Fault(kind, rid, amount):
            unit = FAULT_AMOUNTS.get(kind)
            if unit and amount == 1:
                unit = unit.removesuffix("s")
            return f"armed {kind}{f' ({amount} {unit})' if unit else ''}:", rid, None
        case Pin(name, prompt):
            return "pinned", f"{prompt.segments[-1][0]} by {name}", prompt.tokens
        case Unpin(name):
            return "unpinned", name, None
        case Pause():
            return "paused", "node", None
        case Resume():
            return "resumed", "node", None


@contextmanager
def _named_if_it_fails(factory: TargetFactory) -> Iterator[None]:
    """TargetError for what somebody else's target raises before the first event; a fault of ours stays one."""
    try:
        yield
    except (EventError, TargetError):
        raise
    except Exception as error:
        module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "target")
        if module.partition(".")[0] == "kvledger" and not getattr(factory, "foreign", False):
            raise
        words = str(error).strip().partition("\n")[0]
        raise TargetError(
            f"target {module}:{name} cannot be built and looked at: {type(error).__name__}: {words}"
        ) from error


_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")


def ask(call: Callable[_Asked, _Answer], *args: _Asked.args, **named: _Asked.kwargs) -> _Answer:
    """Call a target. TargetRaised for whatever it raises, but for what names a bad event or a bad target."""
    try:
        return call(*args, **named)
    except (EventError, TargetError, TargetRaised, _MonitorRaised):
        raise
    except Exception as error:
        raise TargetRaised(error) from error


def _judge(call: Callable[_Asked, None], *args: _Asked.args, **named: _Asked.kwargs) -> None:
    try:
        call(*args, **named)
    except (EventError, TargetError, TargetRaised):
        raise
    except Exception as error:
        raise _MonitorRaised(error) from error


def _on(event: Event) -> dict[str, Any]:
    """Whom of a pipeline an event reaches, for a target; nothing where it is everybody, as it always is elsewhere."""
    ranks = getattr(event, "ranks", None)
    return {} if ranks is None else {"ranks": ranks}


class _Overhearing(Watcher):
    """The monitor as a target sees it: its own faults must not pass for the target's."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def before_decision(self) -> None:
        _judge(self._monitor.before_decision)

    def after_decision(self, decision: Decision) -> None:
        _judge(self._monitor.after_decision, decision)

    def preempted(self) -> None:
        _judge(self._monitor.preempted)

    def before_decode(self) -> None:
        _judge(self._monitor.before_decode)

    def withdrew(self) -> None:
        _judge(self._monitor.withdrew)


class Replay:
    """A trace in the making: `apply` events one by one, read `outcome` at any time.

    After a failed allocation or an exception the process is dead and further events do nothing; a broken invariant or
    a stuck drain does not stop it. TargetError: the target cannot be built, or gives an answer that is none.
    """

    def __init__(
        self,
        settings: NodeSettings,
        rules: AccountingRules,
        *,
        target: TargetFactory = PrefillNode,
        monitor: Monitor | None = None,
    ) -> None:
        self.settings = settings
        self.rules = rules
        self.monitor = monitor or Monitor()
        with _named_if_it_fails(target):
            self.target = target(settings, rules, _Overhearing(self.monitor))
            _check_modelled(settings, self.target)
            self.monitor.attach(self.target, settings, rules)
        self.outcome = Outcome(broken=self.monitor.broken)
        self.crashed = False
        self.prompts: dict[str, Prompt] = {}
        self.outputs: dict[str, Output] = {}
        self._half_told: dict[str, set[int]] = {}
        self.pins: list[str] = []
        self.paused = False
        self._late_rounds = 0

    @property
    def dead(self) -> bool:
        return self.crashed or self.outcome.failure is not None

    def apply(self, event: Event) -> None:
        """Let one event happen. EventError if it cannot."""
        if self.dead:
            return
        try:
            self._let_happen(event)
            return
        except TargetRaised as raised:
            error, theirs = raised.error, True
        except _MonitorRaised as raised:
            error, theirs = raised.error, False
        if not (theirs and self.monitor.crashed(error)):
            raise error
        self.crashed = True

    def _let_happen(self, event: Event) -> None:
        if isinstance(event, Faulty) and "faults" not in getattr(self.target, "features", ()):
            word = _event_word(event)
            raise UnmodelledError("event", f'"{word}" is not modelled by this target')
        if not isinstance(event, STEPS):
            self.outcome.happenings.append(self._happening(event))
        match event:
            case Round():
                self._round()
            case Drain():
                self._drain()
            case Decode():
                self.monitor.before_round()
                self._ran(ask(self._decoding.run_decode))
            case Submit():
                self._submit(event)
            case Finish(request=rid):
                ask(self._decoding.finish, rid)
            case Transferred(request=rid):
                ask(self.target.transferred, rid, **_on(event))
            case Abort(request=rid):
                self._abort(event)
            case Cached() | Hold() | Release():
                self._environment(event)
            case Fault() | Pin() | Unpin() | Pause() | Resume():
                self._go_wrong(event)
        if not isinstance(event, STEPS):
            self.monitor.after_event(event)

    def _happening(self, event: Event) -> Happening:
        happening = self._happened(event)
        ranks = getattr(event, "ranks", None)
        if ranks is None:
            return happening
        return replace(happening, what=f"{happening.what} on rank {', '.join(map(str, ranks))}")

    def _happened(self, event: Event) -> Happening:
        rounds = len(self.outcome.rounds)
        match event:
            case Submit(request=rid, prompt=prompt, output=output):
                return Happening(rounds, "submitted", rid, prompt.tokens, output)
            case Transferred(request=rid):
                moot = "" if rid in ask(self.target.in_flight) else " (not in flight: nothing happens)"
                return Happening(rounds, f"transferred{moot}", rid)
            case Finish(request=rid):
                return Happening(rounds, f"finished{self._why_not_finished(rid)}", rid)
            case Abort(request=rid):
                return Happening(rounds, f"aborted{self._why_not_aborted(rid)}", rid)
            case Cached(tier=tier, prompt=prompt, locked=locked):
                where = f"cached on the {tier}{', locked' if locked else ''}"
                note = _room_on_host(self.settings, event) if tier == "host" else ""
                return Happening(rounds, where, prompt.segments[-1][0], prompt.tokens, note=note)
            case Hold(name=name, tokens=tokens):
                return Happening(rounds, "held", name, tokens)
            case Release(name=name, tokens=released):
                return Happening(rounds, "released", name, released)
            case Fault() | Pin() | Unpin() | Pause() | Resume():
                return Happening(rounds, *faulty_words(event))
        raise AssertionError(f"{event} is a round, not something between rounds")

    def _why_not_finished(self, rid: str) -> str:
        """Only a running request's output can end; a target that does not show who runs is taken at its word."""
        if "decode" not in self.target.capabilities:
            return self._why_not_aborted(rid)
        runs = any(each.rid == rid and each.decoding for each in ask(self.target.snapshot).live)
        return "" if runs else " (not running: nothing happens)"

    def _why_not_aborted(self, rid: str) -> str:
        if rid not in self.prompts:
            return " (rejected at submit: nothing happens)"
        snapshot = ask(self.target.snapshot)
        here = rid in snapshot.waiting or any(each.rid == rid for each in snapshot.live)
        return "" if here else " (it has ended: nothing happens)"

    def _abort(self, event: Abort) -> None:
        """Where some ranks have not acted on it, they will: a drain sees to that. One told before rank 0 has not."""
        if event.ranks is None:
            self._half_told.pop(event.request, None)
        else:
            told = self._half_told.setdefault(event.request, set())
            if 0 in told or 0 in event.ranks:
                told.update(event.ranks)
            if len(told) > len(self.settings.ranks):
                del self._half_told[event.request]
        ask(self.target.abort, event.request, **_on(event))

    @property
    def _decoding(self) -> UnifiedTarget:
        """The target as one that decodes: the trace says so, and the target said that it can."""
        return cast(UnifiedTarget, self.target)

    def _submit(self, event: Submit) -> None:
        """A target that knows prompts only is not bothered with an output that is the usual one."""
        rid, prompt, output = event.request, event.prompt, event.output
        usual = output == USUAL_OUTPUT
        reason = ask(self.target.submit, rid, prompt) if usual else ask(self._decoding.submit, rid, prompt, output)
        if reason is None:
            self.prompts[rid] = prompt
            self.outputs[rid] = output
        else:
            self.outcome.rejected_at_submit.append((rid, reason))

    def _environment(self, event: Cached | Hold | Release) -> None:
        try:
            match event:
                case Cached(tier="host", prompt=prompt):
                    ask(self.target.cache_on_host, prompt, **_on(event))
                case Cached(prompt=prompt, locked=locked):
                    ask(self.target.cache_on_device, prompt, locked=locked, **_on(event))
                case Hold(name=name, tokens=tokens):
                    ask(self.target.hold, name, tokens, **_on(event))
                case Release(name=name, tokens=tokens):
                    ask(self.target.release, name, tokens, **_on(event))
        except TargetRaised as raised:
            if not isinstance(raised.error, OutOfPages):
                raise
            field_name = "prompt" if isinstance(event, Cached) else "tokens"
            raise EventError(field_name, str(raised.error)) from raised.error

    def _go_wrong(self, event: Faulty) -> None:
        target = cast(FaultyTarget, self.target)
        match event:
            case Fault(kind, rid, amount):
                ask(target.fault, kind, rid, amount)
                self.outcome.unstruck.append((kind, rid))
                if kind == "load-late":
                    self._late_rounds += amount or 0
            case Pin(name, prompt):
                before_pages = self._pinned_pages()
                ask(target.pin, name, prompt)
                self._note_pinned(prompt, self._pinned_pages() - before_pages)
                self.pins += [name] if name not in self.pins else []
            case Unpin(name):
                ask(target.unpin, name)
                self.pins = [each for each in self.pins if each != name]
            case Pause() | Resume():
                ask(target.pause if isinstance(event, Pause) else target.resume)
                self.paused = isinstance(event, Pause)

    def _pinned_pages(self) -> int:
        return sum(page.pinned_refs for page in ask(self.target.snapshot).pages())

    def _note_pinned(self, prompt: Prompt, pages: int) -> None:
        """Only what is cached on the device can be pinned, and that may be less than the prompt, or nothing."""
        page_size = self.settings.page_size
        if pages < prompt.tokens // page_size or not pages:
            note = f"{pages * page_size} of it on the device" if pages else "nothing of it is on the device"
            self.outcome.happenings[-1] = replace(self.outcome.happenings[-1], note=note)

    def _round(self) -> RoundRecord:
        self.monitor.before_round()
        return self._ran(ask(self.target.run_round))

    def _ran(self, record: RoundRecord) -> RoundRecord:
        self.outcome.rounds.append(record)
        for fault in record.struck:
            if fault in self.outcome.unstruck:
                self.outcome.unstruck.remove(fault)
        self.outcome.failure = record.failure
        self.monitor.after_round(record)
        return record

    def _drain(self) -> None:
        """The worst environment that is still fair: transfers complete only when a round admitted nothing, nothing is
        pinned for ever, and nobody stands still."""
        for rid in tuple(self._half_told):
            self._let_happen(Abort(rid))
        for name in list(self.pins):
            self._let_happen(Unpin(name))
        if self.paused:
            self._let_happen(Resume())
        bound = self._drain_bound_rounds()
        for _ in range(bound):
            if not self._has_work:
                break
            record = self._round()
            if self.dead:
                return
            told = (record.joined, record.decoded, record.finished, record.aborted, record.loading, record.withdrawn)
            sent_back = record.went_back or record.rolled_back
            if not any(told) and not self._transfer_all() and not sent_back and self._has_work:
                self._stick(record, "a round admitted nothing and nothing is in flight")
                return
        else:
            if self._has_work:
                self._stick(self.outcome.rounds[-1], f"work is left after {bound} rounds, more than any prefill needs")
                return
        self._transfer_all()
        self.monitor.at_rest()

    @property
    def _has_work(self) -> bool:
        return ask(lambda: self.target.has_work)

    @property
    def most_prefill_rounds(self) -> int:
        """More than the prefills of all that was submitted need, if nobody begins again."""
        pages = sum(ceil_pages(prompt.tokens, self.settings.page_size) for prompt in self.prompts.values())
        return 2 * pages + 3 * len(self.prompts) + self._late_rounds + 1

    def _drain_bound_rounds(self) -> int:
        """Each round runs a chunk, completes a transfer or decodes, and two chunks cover at least a page.

        Where requests are sent back to the queue each may have to begin again behind every other one.
        """
        bound = self.most_prefill_rounds
        if self.settings.mode == "prefill" and "optimistic" not in self.target.capabilities:
            return bound
        return (bound + sum(output.max_new_tokens for output in self.outputs.values())) * (len(self.prompts) + 1)

    def _transfer_all(self) -> bool:
        """Complete every transfer, in admission order; False if none was under way."""
        in_flight = ask(self.target.in_flight)
        for rid in in_flight:
            self.outcome.happenings.append(self._happening(Transferred(rid)))
            ask(self.target.transferred, rid)
            self.monitor.after_event(Transferred(rid))
        return bool(in_flight)

    def _stick(self, record: RoundRecord, message: str) -> None:
        snapshot = ask(self.target.snapshot)
        unfinished = [request for request in snapshot.live if not request.in_flight]
        rid = unfinished[0].rid if unfinished else snapshot.waiting[0]
        computed_pages = len(unfinished[0].pages) if unfinished else 0
        stuck = Stuck(
            round=record.round,
            request=rid,
            wanted=max(0, self.prompts[rid].tokens - computed_pages * snapshot.page_size),
            free=record.free,
            evictable=record.evictable,
            message=message,
        )
        self.outcome.stuck = self.outcome.stuck or stuck
        self.monitor.stuck(stuck)


def replay(
    trace: Trace,
    rules: AccountingRules | None = None,
    *,
    target: TargetFactory = PrefillNode,
    monitor: Monitor | None = None,
    source: str = "trace",
) -> Outcome:
    """Run a whole trace under its own rules or others. TraceError names an event that cannot happen."""
    try:
        run = Replay(trace.node, rules or trace.accounting_rules, target=target, monitor=monitor)
    except EventError as error:
        raise TraceError(f"{source}: {error.field}: {error}") from error
    for index, event in enumerate(trace.events):
        try:
            run.apply(event)
        except EventError as error:
            raise TraceError(f"{source}: events[{index}].{error.field}: {error}") from error
    return run.outcome
