from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace as changed
from typing import Any

import pytest

from kvledger.adder import AddReqResult
from kvledger.events import (
    Abort,
    Cached,
    Decode,
    Drain,
    Event,
    Fault,
    Finish,
    Hold,
    Release,
    Round,
    Submit,
    Transferred,
)
from kvledger.monitor import InvariantMonitor
from kvledger.node import PrefillNode, Watcher
from kvledger.record import AllocationFailure, Decision, RoundRecord, Snapshot
from kvledger.replay import Broken, EventError, Monitor, Outcome, Replay, Stuck, Target, replay, round_document
from kvledger.request import USUAL_OUTPUT, Output, Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.trace import Trace, TraceError
from tests.unit.builders import INCIDENT, INCIDENT_ARRIVALS, INCIDENT_NODE, node_settings, prompt

OUTCOME_KEYS = ["verdict", "violation", "broken", "rounds", "rejected_at_submit"]
VIOLATION_KEYS = ["kind", "round", "request", "wanted", "free", "evictable", "message"]
BROKEN_KEYS = ["invariant", "round", "request", "message"]
ROUND_KEYS = [
    "round",
    "baseline",
    "rem_total_tokens",
    "cur_rem_tokens",
    "rem_chunk_tokens",
    "budget_state",
    "batch_is_full",
    "forced",
    "admitted",
    "refused",
    "promises",
    "free",
    "evictable",
    "protected",
]


def play(
    events: Sequence[Event],
    rules: str | AccountingRules = "tail-reserved",
    settings: NodeSettings | None = None,
    **options: Any,
) -> Outcome:
    chosen = PRESETS[rules] if isinstance(rules, str) else rules
    run = Replay(settings or node_settings(), chosen, **options)
    for event in events:
        run.apply(event)
    return run.outcome


def submit(rid: str, tokens: int) -> Submit:
    return Submit(rid, prompt((rid, tokens)))


# --- a target that does what it is told


def a_round(number: int, *, admits: bool, failure: AllocationFailure | None = None) -> RoundRecord:
    decision = Decision(
        request="A",
        kind="whole",
        prompt_tokens=64,
        prefix_tokens=0,
        start=0,
        end=64,
        baseline=640,
        rem_total_tokens=511,
        cur_rem_tokens=512,
        rem_chunk_tokens=4032,
        rem_input_tokens=None,
    )
    return RoundRecord(
        round=number,
        baseline=640,
        rem_total_tokens=511,
        cur_rem_tokens=512,
        rem_chunk_tokens=4032,
        budget_state=AddReqResult.CONTINUE,
        batch_is_full=False,
        decisions=(decision,) if admits else (),
        promises=(),
        free=576,
        evictable=0,
        protected=64,
        failure=failure,
    )


class ScriptedTarget:
    """Its rounds admit (+, which puts one more request in flight) or do not (-); it logs what it is asked."""

    capabilities: frozenset[str] = frozenset()

    def __init__(self, script: str, *, flying: Sequence[str] = ()) -> None:
        self.script = script
        self.flying = list(flying)
        self.log: list[str] = []
        self.rounds = 0

    @property
    def has_work(self) -> bool:
        return self.rounds < len(self.script)

    def submit(self, rid: str, prompt: Prompt) -> str | None:
        self.log.append(f"submit {rid}")
        return None

    def run_round(self) -> RoundRecord:
        admits = self.script[self.rounds] == "+"
        self.rounds += 1
        self.log.append(f"round {self.rounds}")
        if admits:
            self.flying.append(f"r{self.rounds}")
        return a_round(self.rounds, admits=admits)

    def transferred(self, rid: str) -> None:
        self.log.append(f"transferred {rid}")
        self.flying.remove(rid)

    def abort(self, rid: str) -> None:
        self.log.append(f"abort {rid}")

    def cache_on_device(self, prompt: Prompt, *, locked: bool) -> None:
        self.log.append(f"cache on device {prompt.tokens} locked={locked}")

    def cache_on_host(self, prompt: Prompt) -> None:
        self.log.append(f"cache on host {prompt.tokens}")

    def hold(self, name: str, tokens: int) -> None:
        self.log.append(f"hold {name} {tokens}")

    def release(self, name: str, tokens: int | None = None) -> None:
        self.log.append(f"release {name} {tokens}")

    def in_flight(self) -> tuple[str, ...]:
        return tuple(self.flying)

    def snapshot(self) -> Snapshot:
        return Snapshot(64, 10, (), range(10), (), (), ("A",))


def scripted(script: str, *events: Event, flying: Sequence[str] = ()) -> tuple[ScriptedTarget, Outcome]:
    target = ScriptedTarget(script, flying=flying)
    outcome = play([submit("A", 640), *events], target=lambda *_: target)
    target.log.remove("submit A")
    return target, outcome


class Recorder(Monitor):
    """Keeps the order of what a monitor is told."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def attach(self, target: Target, settings: NodeSettings, rules: AccountingRules) -> None:
        self.log.append("attach")

    def before_decision(self) -> None:
        self.log.append("before decision")

    def after_decision(self, decision: Decision) -> None:
        self.log.append(f"{decision.kind} {decision.request}")

    def after_round(self, record: RoundRecord) -> None:
        self.log.append(f"round {record.round}")

    def after_event(self, event: Event) -> None:
        self.log.append(type(event).__name__)

    def at_rest(self) -> None:
        self.log.append("at rest")

    def stuck(self, stuck: Stuck) -> None:
        self.log.append(f"stuck {stuck.request}")


# --- the cases of the design


WORKED_NODE = node_settings(chunked_prefill_size=4096, max_prefill_tokens=16384, pool_tokens=12032)
WORKED_QUEUE: tuple[Event, ...] = (
    Submit("A", prompt(("a", 1088))),
    Submit("B", prompt(("b", 8000))),
    Submit("C", prompt(("doc", 6144), ("c", 128))),
    Drain(),
)
WORKED_EXAMPLE = (Cached("host", prompt(("doc", 6144))), *WORKED_QUEUE)
DEVICE_HIT_LOCK = (Cached("device", prompt(("doc", 6144))), *WORKED_QUEUE)


@pytest.mark.parametrize(
    ("settings", "events"),
    [
        pytest.param(INCIDENT_NODE, INCIDENT, id="incident"),
        pytest.param(WORKED_NODE, WORKED_EXAMPLE, id="worked example"),
        pytest.param(changed(WORKED_NODE, host_tokens=0), DEVICE_HIT_LOCK, id="device hit lock"),
    ],
)
@pytest.mark.parametrize(
    ("rules", "verdict"),
    [
        ("upstream", "ok"),
        ("aligned", "oom"),
        ("tail-reserved", "ok"),
        (AccountingRules(spend_gap=True), "ok"),
        (AccountingRules(on_shortage="defer"), "ok"),
        (AccountingRules(checkpoint_align="page_size", truncation_align=256), "oom"),
        (AccountingRules(checkpoint_align="page_size", truncation_align=256, reserve_tail=True), "ok"),
    ],
)
def test_verdicts(settings: NodeSettings, events: Sequence[Event], rules: str | AccountingRules, verdict: str) -> None:
    outcome = play(events, rules, settings)
    assert outcome.verdict == verdict
    if verdict == "ok":
        finished = {d.request for record in outcome.rounds for d in record.joined if not d.tail_tokens}
        assert finished == {event.request for event in events if isinstance(event, Submit)}


# --- the outcome document


def test_the_document_has_the_contracts_keys_and_nothing_else() -> None:
    document = play(INCIDENT, "aligned", INCIDENT_NODE).document()
    assert list(document) == OUTCOME_KEYS
    assert list(document["violation"]) == VIOLATION_KEYS
    for record in document["rounds"]:
        assert list(record) == ROUND_KEYS
        for entry in record["admitted"]:
            assert list(entry) == ["request", "kind", "start", "end", "load_back"]
        for entry in record["promises"]:
            assert list(entry) == ["request", "kind", "tokens", "due"]
    fixed = play(INCIDENT, "tail-reserved", INCIDENT_NODE).document()
    assert fixed["rounds"][0]["refused"] == [{"request": "xpkq", "reason": "NO_TOKEN"}]
    assert fixed["violation"] is None
    for both in (document, fixed):
        assert json.loads(json.dumps(both)) == both, "plain JSON values only"


def test_the_incidents_document() -> None:
    document = play(INCIDENT, "aligned", INCIDENT_NODE).document()
    assert document["verdict"] == "oom"
    assert document["violation"] == {
        "kind": "oom",
        "round": 4,
        "request": "1keim",
        "wanted": 2056,
        "free": 0,
        "evictable": 0,
        "message": "Prefill out of memory: 1keim tries to allocate 2056 tokens, available 0 (free 0 + evictable 0)",
    }
    assert [record["round"] for record in document["rounds"]] == [1, 2, 3, 4], "the failed round is in the list"
    assert document["rejected_at_submit"] == document["broken"] == []
    first = document["rounds"][0]
    assert first["admitted"] == [
        {"request": "v9uj", "kind": "whole", "start": 0, "end": 13888, "load_back": 0},
        {"request": "1keim", "kind": "truncated", "start": 86784, "end": 89088, "load_back": 0},
        {"request": "xpkq", "kind": "whole", "start": 15360, "end": 15545, "load_back": 15360},
    ]
    assert first["promises"][0] == {"request": "v9uj", "kind": "chunk", "tokens": 13888, "due": "now"}
    assert first["promises"][2] == {"request": "v9uj", "kind": "first_token", "tokens": 1, "due": "later"}
    due_now = sum(promise["tokens"] for promise in first["promises"] if promise["due"] == "now")
    promised = sum(promise["tokens"] for promise in first["promises"])
    assert (first["cur_rem_tokens"], first["rem_total_tokens"]) == (19264 - due_now, 19264 - promised)
    assert (first["free"], first["evictable"], first["protected"]) == (2880, 0, 121408 - 2880 - 64)


def test_a_rounds_figures_stand_as_the_decision_ended_and_its_pool_as_the_round_ended() -> None:
    (record,) = play([submit("A", 100), Round()]).document()["rounds"]
    assert (record["baseline"], record["cur_rem_tokens"], record["rem_total_tokens"]) == (640, 448, 447)
    assert (record["free"], record["evictable"], record["protected"]) == (512, 0, 64)
    assert (record["budget_state"], record["batch_is_full"], record["forced"]) == ("CONTINUE", False, False)


def test_a_deferred_request_is_neither_admitted_nor_refused() -> None:
    events: list[Event] = [submit("A", 500), Round(), Hold("x", 384), Round()]
    settings = node_settings(chunked_prefill_size=256)
    record = play(events, AccountingRules(on_shortage="defer"), settings).document()["rounds"][1]
    assert (record["admitted"], record["refused"], record["forced"]) == ([], [], False)
    assert record["promises"][0] == {"request": "A", "kind": "tail", "tokens": 256, "due": "later"}


def test_chunking_off_is_null_in_the_document() -> None:
    (record,) = play([submit("A", 100), Round()], settings=node_settings(chunked_prefill_size=None)).document()[
        "rounds"
    ]
    assert record["rem_chunk_tokens"] is None


def test_what_is_rejected_at_submit_is_recorded_and_never_runs() -> None:
    events: list[Event] = [
        submit("too long", 575),
        submit("A", 574),
        Abort("too long"),
        Transferred("too long"),
        Drain(),
    ]
    document = play(events).document()
    assert [entry["request"] for entry in document["rejected_at_submit"]] == ["too long"]
    assert list(document["rejected_at_submit"][0]) == ["request", "reason"]
    assert "575" in document["rejected_at_submit"][0]["reason"]
    assert document["verdict"] == "ok"
    assert [entry["request"] for record in document["rounds"] for entry in record["admitted"]] == ["A"]


def test_a_broken_invariant_is_a_verdict_only_if_nothing_worse_came() -> None:
    failure = AllocationFailure("A", 64, 0, 0, "no room")
    stuck = Stuck(2, "B", 10, 64, 128, "nothing moves")
    broken = [Broken("order", 1, "A", "first"), Broken("on-grid", 2, None, "second")]
    failed_round = a_round(3, admits=True, failure=failure)
    assert Outcome().verdict == "ok"
    assert Outcome(broken=broken).verdict == "order"
    assert Outcome(broken=broken, stuck=stuck).verdict == "stuck"
    assert Outcome(broken=broken, stuck=stuck, failure=failure).verdict == "oom"

    document = Outcome(broken=broken).document()
    assert [list(entry) for entry in document["broken"]] == [BROKEN_KEYS, BROKEN_KEYS]
    assert [entry["invariant"] for entry in document["broken"]] == ["order", "on-grid"]
    assert list(document["violation"]) == VIOLATION_KEYS
    assert document["violation"]["kind"] == "order"
    assert (document["violation"]["round"], document["violation"]["request"]) == (1, "A")
    assert document["violation"]["message"] == "first"
    both = Outcome(broken=broken, stuck=stuck).document()["violation"]
    assert list(both.values()) == ["stuck", 2, "B", 10, 64, 128, "nothing moves"]
    worst = Outcome(rounds=[failed_round], stuck=stuck, failure=failure).document()["violation"]
    assert list(worst.values()) == ["oom", 3, "A", 64, 0, 0, "no room"]


def test_a_replay_goes_on_after_a_broken_invariant() -> None:
    class Judge(Monitor):
        def after_round(self, record: RoundRecord) -> None:
            self.broken.append(Broken("order", record.round, None, "always"))

    outcome = play(INCIDENT, "aligned", INCIDENT_NODE, monitor=Judge())
    assert [broken.round for broken in outcome.broken] == [1, 2, 3, 4]
    assert outcome.verdict == "oom"


def test_round_document_spells_the_enumerations_out() -> None:
    document = round_document(play(INCIDENT, "tail-reserved", INCIDENT_NODE).rounds[0])
    assert type(document["budget_state"]) is str
    assert document["budget_state"] == "CONTINUE"
    assert all(type(promise["due"]) is str for promise in document["promises"])
    assert type(document["refused"][0]["reason"]) is str


# --- drain


def test_a_drain_completes_transfers_only_when_a_round_admits_nothing_and_at_the_end() -> None:
    target, outcome = scripted("++-+", Drain())
    assert target.log == [
        "round 1",
        "round 2",
        "round 3",
        "transferred r1",
        "transferred r2",
        "round 4",
        "transferred r4",
    ]
    assert outcome.verdict == "ok"
    assert [record.round for record in outcome.rounds] == [1, 2, 3, 4]


def test_a_drain_with_no_work_runs_no_round_and_completes_the_transfers() -> None:
    target, outcome = scripted("", Drain(), flying=["x", "y"])
    assert target.log == ["transferred x", "transferred y"]
    assert outcome.rounds == []


def test_a_round_that_admits_nothing_with_nothing_in_flight_is_stuck() -> None:
    target, outcome = scripted("+--+", Drain())
    assert target.log == ["round 1", "round 2", "transferred r1", "round 3"]
    assert outcome.verdict == "stuck"
    assert outcome.stuck == Stuck(3, "A", 640, 576, 0, "a round admitted nothing and nothing is in flight")


def test_a_drain_ends_even_if_every_round_admits_and_nothing_finishes() -> None:
    target, outcome = scripted("+" * 1000, Drain())
    assert outcome.verdict == "stuck"
    assert outcome.stuck is not None
    assert outcome.stuck.message == "work is left after 24 rounds, more than any prefill needs"
    assert target.rounds == 24, "twice its ten pages, three for the request, and one"
    assert scripted("+" * 1000, submit("B", 650), Drain())[0].rounds == 2 * (10 + 11) + 3 * 2 + 1


def test_the_bound_is_above_what_the_slowest_real_prefill_takes() -> None:
    """Chunks of a page and one token on a grid of four pages: the grid cuts every few chunks short."""
    settings = node_settings(page_size=16, checkpoint_align=64, chunked_prefill_size=17, pool_tokens=16_000)
    outcome = play([submit("A", 4000), submit("B", 4001), Drain()], settings=settings)
    assert outcome.verdict == "ok"


def test_events_after_stuck_still_happen_and_the_first_stuck_is_kept() -> None:
    events: list[Event] = [
        Hold("x", 320),
        submit("A", 500),
        Drain(),
        submit("B", 500),
        Drain(),
        Release("x"),
        Drain(),
    ]
    outcome = play(events)
    assert outcome.verdict == "stuck"
    assert outcome.stuck is not None
    assert (outcome.stuck.round, outcome.stuck.request, outcome.stuck.wanted) == (1, "A", 500)
    assert (outcome.stuck.free, outcome.stuck.evictable) == (320, 0)
    admitted = [(record.round, d.request) for record in outcome.rounds for d in record.joined]
    # round 1 and 2 were stuck; 4 admitted nothing, so A's transfer completed and 5 admits B
    assert admitted == [(3, "A"), (5, "B")]


def test_a_stuck_half_done_request_is_named_with_what_is_left_of_it() -> None:
    events: list[Event] = [submit("A", 500), Round(), submit("B", 10), Hold("x", 384), Drain()]
    outcome = play(events, AccountingRules(on_shortage="defer"), node_settings(chunked_prefill_size=256))
    assert outcome.stuck is not None
    assert (outcome.stuck.request, outcome.stuck.wanted, outcome.stuck.free) == ("A", 244, 0)


def test_the_monitor_is_told_in_order() -> None:
    recorder = Recorder()
    events: list[Event] = [
        Hold("x", 64),
        submit("A", 300),
        submit("B", 300),
        Round(),
        Drain(),
        submit("C", 511),
        Drain(),
    ]
    play(events, monitor=recorder)
    assert recorder.log == [
        *["attach", "Hold", "Submit", "Submit"],
        *["before decision", "whole A", "before decision", "refused B", "round 1"],
        *["before decision", "refused B", "round 2", "Transferred"],
        *["before decision", "whole B", "round 3", "Transferred", "at rest"],
        "Submit",
        *["before decision", "refused C", "round 4", "stuck C"],
    ]


# --- events


def test_each_event_reaches_the_target_once() -> None:
    target, outcome = scripted(
        "+",
        Cached("host", prompt(("h", 64))),
        Cached("device", prompt(("d", 128))),
        Cached("device", prompt(("d", 192)), locked=True),
        Hold("x", 10),
        Release("x", 4),
        Release("x"),
        Round(),
        Transferred("r1"),
        Abort("A"),
    )
    assert target.log == [
        "cache on host 64",
        "cache on device 128 locked=False",
        "cache on device 192 locked=True",
        "hold x 10",
        "release x 4",
        "release x None",
        "round 1",
        "transferred r1",
        "abort A",
    ]
    assert len(outcome.rounds) == 1


def test_after_a_failed_allocation_the_process_is_dead() -> None:
    recorder = Recorder()
    run = Replay(INCIDENT_NODE, PRESETS["aligned"], monitor=recorder)
    for event in INCIDENT:
        run.apply(event)
    assert run.dead
    document, told, snapshot = run.outcome.document(), list(recorder.log), run.target.snapshot()
    for event in (
        submit("late", 10),
        Round(),
        Drain(),
        Transferred("v9uj"),
        Abort("xpkq"),
        Hold("x", 10**9),
        Release("x"),
        Cached("device", prompt(("d", 10**6))),
    ):
        run.apply(event)
    assert run.outcome.document() == document
    assert (recorder.log, run.target.snapshot()) == (told, snapshot)


def test_a_drain_that_fails_is_not_at_rest() -> None:
    recorder = Recorder()
    play(INCIDENT, "aligned", INCIDENT_NODE, monitor=recorder)
    assert "at rest" not in recorder.log
    assert recorder.log[-1] == "round 4"


def test_a_trace_without_a_drain_may_end_with_work_open() -> None:
    outcome = play([*INCIDENT_ARRIVALS, Round()], "tail-reserved", INCIDENT_NODE)
    assert (outcome.verdict, len(outcome.rounds)) == ("ok", 1)


@pytest.mark.parametrize(
    ("event", "field", "wanted"),
    [
        pytest.param(Hold("x", 513), "tokens", 576, id="a hold"),
        pytest.param(Cached("device", prompt(("d", 576))), "prompt", 576, id="a prompt on the device"),
    ],
)
def test_an_event_that_cannot_happen_names_its_place_and_changes_nothing(event: Event, field: str, wanted: int) -> None:
    before = (Hold("base", 128),)
    run = Replay(node_settings(), PRESETS["aligned"])
    for earlier in before:
        run.apply(earlier)
    snapshot = run.target.snapshot()
    with pytest.raises(EventError) as error:
        run.apply(event)
    assert error.value.field == field
    assert run.target.snapshot() == snapshot

    trace = Trace(node_settings(), "aligned", (*before, event))
    message = f"events[1].{field}: out of KV slots: {wanted} tokens wanted, 512 free + 0 evictable"
    with pytest.raises(TraceError) as default:
        replay(trace)
    assert str(default.value) == f"trace: {message}"
    with pytest.raises(TraceError) as named:
        replay(trace, source="cases/x.json")
    assert str(named.value) == f"cases/x.json: {message}"


# --- whole traces


def test_a_trace_is_replayed_under_its_own_rules_or_others() -> None:
    trace = Trace(INCIDENT_NODE, "aligned", INCIDENT)
    assert replay(trace).verdict == "oom"
    assert replay(trace, PRESETS["tail-reserved"]).verdict == "ok"
    assert replay(trace.with_rules(AccountingRules(reserve_tail=True))).verdict == "ok"


def test_a_replay_is_the_same_every_time() -> None:
    trace = Trace(INCIDENT_NODE, "tail-reserved", INCIDENT)
    assert replay(trace).document() == replay(trace).document()


def test_a_trace_is_replayed_on_the_target_it_is_given() -> None:
    built: list[tuple[NodeSettings, AccountingRules]] = []

    def build(settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> PrefillNode:
        built.append((settings, rules))
        return PrefillNode(settings, rules, watcher)

    trace = Trace(INCIDENT_NODE, "aligned", INCIDENT)
    assert replay(trace, target=build).verdict == "oom"
    assert built == [(INCIDENT_NODE, PRESETS["aligned"])]


def test_our_node_is_a_target() -> None:
    assert isinstance(PrefillNode(node_settings(), PRESETS["aligned"]), Target)
    assert isinstance(ScriptedTarget(""), Target)


# --- targets that decode


class DecodingNode(PrefillNode):
    """The node, and tokens for whoever is in flight, out of nowhere: what replay asks of a target that decodes."""

    capabilities = PrefillNode.capabilities - {"decode"}
    features = frozenset({"unified"})

    def __init__(self, *built: Any) -> None:
        super().__init__(*built)
        self.left: dict[str, int] = {}

    def submit(self, rid: str, prompt: Prompt, output: Output = USUAL_OUTPUT) -> str | None:
        self.left[rid] = output.max_new_tokens
        return super().submit(rid, prompt)

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self.in_flight())

    def run_round(self) -> RoundRecord:
        record = super().run_round()
        return record if record.joined else self.run_decode()

    def run_decode(self) -> RoundRecord:
        decoded = self.in_flight()
        for rid in decoded:
            self.left[rid] -= 1
        finished = tuple(rid for rid in decoded if not self.left[rid])
        for rid in finished:
            self.transferred(rid)
        return changed(super().run_round(), decoded=decoded, finished=finished)

    def finish(self, rid: str) -> None:
        self.transferred(rid)


UNIFIED = node_settings(mode="unified")


def test_drain_goes_on_until_every_output_is_done():
    submits: list[Event] = [Submit("A", prompt(("a", 100)), Output(max_new_tokens=3)), Submit("B", prompt(("b", 100)))]
    outcome = play([*submits, Drain()], settings=UNIFIED, target=DecodingNode)
    assert outcome.verdict == "ok"
    assert [record.decoded for record in outcome.rounds] == [(), ("A", "B"), ("A",), ("A",)]
    told = [round_document(record) for record in outcome.rounds]
    assert list(told[0]) == ROUND_KEYS
    assert (told[1]["decoded"], told[1]["finished"]) == (["A", "B"], ["B"])


def test_decode_and_finish_are_events():
    submit = Submit("A", prompt(("a", 100)), Output(max_new_tokens=30))
    events: list[Event] = [submit, Round(), Decode(), Finish("A"), Drain()]
    outcome = play(events, settings=UNIFIED, target=DecodingNode)
    assert [record.decoded for record in outcome.rounds] == [(), ("A",)]
    assert [happening.what for happening in outcome.happenings] == ["submitted", "finished"]
    assert [happening.output for happening in outcome.happenings] == [Output(max_new_tokens=30), USUAL_OUTPUT]


RUNS = (Submit("A", prompt(("a", 100)), Output(max_new_tokens=30)), Round())
MOOT = {
    "not running": " (not running: nothing happens)",
    "ended": " (it has ended: nothing happens)",
    "rejected": " (rejected at submit: nothing happens)",
}


@pytest.mark.parametrize(
    ("events", "happened"),
    [
        ((*RUNS, Finish("A")), ["finished"]),
        ((*RUNS, Abort("A")), ["aborted"]),
        ((RUNS[0], Abort("A")), ["aborted"]),
        ((*RUNS, Finish("A"), Finish("A"), Abort("A")), [
            "finished", f"finished{MOOT['not running']}", f"aborted{MOOT['ended']}"]),
        ((RUNS[0], Finish("A")), [f"finished{MOOT['not running']}"]),
        ((*RUNS, Transferred("A")), ["transferred (not in flight: nothing happens)"]),
        ((Submit("A", prompt(("a", 9999))), Abort("A"), Finish("A")), [
            f"aborted{MOOT['rejected']}", f"finished{MOOT['not running']}"]),
        ((*RUNS, Abort("A"), Abort("A")), ["aborted", f"aborted{MOOT['ended']}"]),
    ],
)  # fmt: skip
def test_what_ends_nothing_does_not_pass_for_an_end(events: Sequence[Event], happened: list[str]) -> None:
    outcome = play(events, settings=UNIFIED)
    assert [each.what for each in outcome.happenings if each.what != "submitted"] == happened


def test_a_monitor_is_told_all_that_a_target_tells() -> None:
    told: list[str] = []

    class Listening(Monitor):
        def before_decision(self) -> None:
            told.append("before_decision")

        def after_decision(self, decision: Decision) -> None:
            told.append("after_decision")

        def preempted(self) -> None:
            told.append("preempted")

        def before_decode(self) -> None:
            told.append("before_decode")

        def withdrew(self) -> None:
            told.append("withdrew")

    settings = changed(UNIFIED, schedule_policy="priority", preemption_threshold=0, max_running_requests=1)
    important = Submit("B", prompt(("b", 100)), Output(max_new_tokens=9, ignore_eos=True, priority=1))
    first = Submit("A", prompt(("a", 100)), Output(max_new_tokens=300, ignore_eos=True))
    withdrawn = (Abort("A"), Abort("B"), Submit("C", prompt(("c", 100))), Fault("abort-decided", "C"), Round())
    play((first, Round(), important, Round(), *withdrawn), settings=settings, monitor=Listening())
    assert set(told) == {name for name in vars(Watcher) if not name.startswith("_")}


def test_a_target_that_does_not_show_who_runs_is_believed_until_the_request_has_ended() -> None:
    outcome = play([*RUNS, Finish("A"), Finish("A")], settings=UNIFIED, target=DecodingNode)
    assert [each.what for each in outcome.happenings[1:]] == ["finished", f"finished{MOOT['ended']}"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"mode": "unified"}, "mode"),
        ({"schedule_policy": "lpm"}, "schedule_policy"),
        ({"mode": "unified", "mixed_chunk": True}, "mode"),
    ],
)
def test_what_a_target_does_not_model_is_bad_input(settings: dict[str, Any], field: str):
    trace = Trace(node_settings(**settings), "tail-reserved", (Drain(),))
    with pytest.raises(TraceError, match=rf"^t\.json: node\.{field}: .* is not modelled by this target$"):
        replay(trace, target=CountlessNode, source="t.json")


class CountlessNode(PrefillNode):
    features: frozenset[str] = frozenset()


def test_a_rolled_back_prefill_breaks_the_promise():
    class Forgetful(PrefillNode):
        def run_round(self) -> RoundRecord:
            return changed(super().run_round(), rolled_back=("A",))

    events: list[Event] = [Submit("A", prompt(("a", 100))), Drain()]
    outcome = play(events, target=Forgetful, monitor=InvariantMonitor())
    assert outcome.broken[0].invariant == "admitted-finishes"
    assert "thrown away" in outcome.broken[0].message


class SendingBack(PrefillNode):
    """Throws a prefill away in the first rounds, instead of running them."""

    times = 1

    def run_round(self) -> RoundRecord:
        if self.rounds >= self.times:
            return super().run_round()
        waiting, self.waiting = self.waiting, type(self.waiting)()
        record = changed(super().run_round(), rolled_back=tuple(waiting))
        self.waiting = waiting
        return record


def test_a_round_that_only_sends_back_is_no_standstill():
    outcome = play([Submit("A", prompt(("a", 100))), Drain()], target=SendingBack)
    assert [bool(record.joined) for record in outcome.rounds] == [False, True]
    assert outcome.verdict == "ok"


def test_sending_back_for_ever_is_one():
    class Stubborn(SendingBack):
        times = 1000
        capabilities = SendingBack.capabilities | {"optimistic"}

    outcome = play([Submit("A", prompt(("a", 100))), Drain()], target=Stubborn)
    assert outcome.verdict == "stuck"
    assert "rounds, more than any prefill needs" in outcome.document()["violation"]["message"]
