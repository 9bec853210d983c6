"""Pipeline ranks: what is agreed, what is sent, what each rank does with it, and what breaks under the faulty rules."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvledger.cli import main
from kvledger.diagnose import diagnose
from kvledger.events import Abort, Cached, Drain, Event, Hold, Release, Round, Submit, Transferred
from kvledger.monitor import InvariantMonitor, checked_replay
from kvledger.node import PrefillNode
from kvledger.pipeline import PipelineNode
from kvledger.replay import EventError, Outcome, Replay
from kvledger.request import Prompt
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings, RankSettings, of_rank
from kvledger.shrink import shrink
from kvledger.shrink_passes import measure, simpler_ranks, sizes_of, with_sizes
from kvledger.trace import Trace, TraceError, dumps, load, loads, parse, to_document
from tests.mutants.mutant import MUTANTS
from tests.mutants.ranks import AbortActedOnAtOnce
from tests.unit.builders import node_settings, prompt

CASES = Path(__file__).parents[1] / "regressions"
OWN = AccountingRules(reserve_tail=True, rank_view="own")
SOUND = PRESETS["tail-reserved"]


def pipeline(*ranks: RankSettings, **changes: Any) -> NodeSettings:
    """Pages of one token, 32 of them, chunks of 12 on a grid of 8."""
    sizes: dict[str, Any] = {"page_size": 1, "checkpoint_align": 8, "chunked_prefill_size": 12, "pool_tokens": 32}
    return node_settings(**sizes | {"host_tokens": 0, "ranks": ranks or (RankSettings(),)} | changes)


def played(settings: NodeSettings, *events: Event, rules: AccountingRules = SOUND) -> Replay:
    run = Replay(settings, rules, monitor=InvariantMonitor())
    for event in events:
        run.apply(event)
    return run


def ask(name: str, tokens: int) -> Submit:
    return Submit(name, prompt((name.lower(), tokens)))


def broken(outcome: Outcome) -> list[str]:
    return [each.invariant for each in outcome.broken]


# --- settings and the trace


def test_a_rank_is_like_rank_0_but_for_what_it_says() -> None:
    node = pipeline(RankSettings(), RankSettings(pool_tokens=20, host_tokens=None))
    assert of_rank(node, 1) == of_rank(node, 0) == pipeline(ranks=())
    assert (of_rank(node, 2).pool_tokens, of_rank(node, 2).host_tokens) == (20, None)
    assert node.least_pool_pages == 20


def test_ranks_build_a_pipeline_and_nothing_else_does() -> None:
    assert type(PrefillNode(pipeline(), SOUND)) is PipelineNode
    assert type(PrefillNode(pipeline(ranks=()), SOUND)) is PrefillNode


def document(**node: Any) -> dict[str, Any]:
    sizes = {"page_size": 1, "checkpoint_align": 1, "chunked_prefill_size": 4, "max_prefill_tokens": None}
    events: list[dict[str, Any]] = [
        {"event": "submit", "request": "A", "prompt": [["a", 2]]},
        {"event": "cached", "tier": "host", "prompt": [["b", 2]], "ranks": [1]},
        {"event": "hold", "name": "h", "tokens": 2, "ranks": [0, 1]},
        {"event": "release", "name": "h", "tokens": 1, "ranks": [1]},
        {"event": "transferred", "request": "A", "ranks": [1]},
        {"event": "abort", "request": "A", "ranks": [0]},
    ]
    whole = {
        **sizes,
        "pool_tokens": 9,
        "host_tokens": 0,
        "ranks": [{}, {"pool_tokens": 8, "host_tokens": None}],
        **node,
    }
    return {"format": "kvledger-trace/1", "node": whole, "rules": "tail-reserved", "events": events}


def test_a_pipelines_trace_is_read_and_written_as_it_was() -> None:
    trace = parse(document(), "t")
    assert trace.node.ranks == (RankSettings(), RankSettings(pool_tokens=8, host_tokens=None))
    assert [getattr(event, "ranks", None) for event in trace.events] == [None, (1,), (0, 1), (1,), (1,), (0,)]
    assert to_document(trace) == document()
    assert loads(dumps(trace).encode(), "t") == trace


def test_each_stage_has_a_slot_however_few_there_are() -> None:
    assert parse(document(pp_size=3, max_running_requests=1), "t").node.request_slots == 1


def inserted(event: dict[str, Any]) -> dict[str, Any]:
    whole = document()
    whole["events"].insert(1, event)
    return whole


def changed(index: int, **keys: Any) -> dict[str, Any]:
    whole = document()
    whole["events"][index].update(keys)
    return whole


@pytest.mark.parametrize(
    ("whole", "says"),
    [
        (
            document(mode="unified"),
            'node.ranks: pipeline ranks are modelled on a prefill node only, not with "mode": "un',
        ),
        *(
            (document(**keys), f"node.ranks: pipeline ranks are not modelled beside {next(iter(keys))}")
            for keys in (
                {"state_slots": 3},
                {"window_tokens": 4, "window_pool_tokens": 16},
                {"shared_bytes": 99, "page_bytes": 1, "window_page_bytes": 1},
                {"state_slots": 3, "tracking_slots": 1, "copy_on_write": True},
            )
        ),
        *(
            (
                inserted(event),
                f'node.ranks: pipeline ranks are not modelled beside "{event["event"]}", as in events[1]',
            )
            for event in (
                {"event": "fault", "kind": "load-late", "request": "A", "rounds": 1},
                {"event": "pin", "name": "p", "prompt": [["a", 4]]},
                {"event": "unpin", "name": "p"},
                {"event": "pause"},
                {"event": "resume"},
            )
        ),
        (document(pp_size=2, max_running_requests=4), "node.pp_size: 2 stages are not the 3 ranks that the node has"),
        (
            document(page_size=8, checkpoint_align=8, chunked_prefill_size=8, ranks=[{"pool_tokens": 7}]),
            "node.ranks[0].p",
        ),
        (document(ranks=[{"pool_tokens": 0}]), "node.ranks[0].pool_tokens: 0 is below the minimum 1"),
        (document(ranks=[{"pools": 1}]), "node.ranks[0]"),
        (changed(4, ranks=[3]), "events[4].ranks: 3 is no rank of a node that has 0 to 2"),
        (changed(4, ranks=[]), "events[4].ranks"),
        (changed(4, ranks=[1, 1]), "events[4].ranks: [1, 1] names a rank twice"),
        (changed(3, ranks=[2]), 'events[3].name: "h" holds nothing here on rank 2'),
        (changed(3, tokens=3), 'events[3].tokens: 3 is more than the 2 that "h" still holds on rank 1'),
        (document(ranks=[]), "events[1].ranks: [1] needs ranks on the node, and this one has none"),
    ],
)
def test_what_no_pipeline_can_do_is_bad_input(whole: dict[str, Any], says: str) -> None:
    with pytest.raises(TraceError) as error:
        parse(whole, "t")
    assert f"t: {says}" in str(error.value)


def test_a_target_that_knows_no_ranks_refuses_them_by_name() -> None:
    class Alone(PrefillNode):
        pass

    with pytest.raises(EventError) as error:
        Replay(pipeline(), SOUND, target=Alone)
    assert error.value.field == "node.ranks"
    assert str(error.value) == "a pipeline of 2 is not modelled by this target"


# --- what rank 0 counts with


def test_the_books_count_with_the_least_of_all_ranks() -> None:
    settings = pipeline(RankSettings(pool_tokens=20))
    least, own = (played(settings, ask("A", 3), Round(), rules=rules).outcome for rules in (SOUND, OWN))
    assert (least.rounds[0].baseline, own.rounds[0].baseline) == (20, 32)


def test_the_entry_asks_the_smallest_pool() -> None:
    run = played(pipeline(RankSettings(pool_tokens=20)), ask("A", 18), ask("B", 17), Drain())
    assert run.outcome.rejected_at_submit == [
        ("A", "prompt 18 + first token 1 + page 1 = 20 tokens is not below the empty pool's 20")
    ]
    assert run.outcome.verdict == "ok"


def test_the_hit_is_what_all_ranks_have_and_each_keeps_it_where_it_is() -> None:
    settings = pipeline(RankSettings(host_tokens=None), checkpoint_align=2)
    run = played(
        settings,
        Cached("device", prompt(("a", 6)), ranks=(0,)),
        Cached("host", prompt(("a", 4)), ranks=(1,)),
        Submit("A", prompt(("a", 8))),
        Round(),
    )
    (decision,) = run.outcome.rounds[0].decisions
    assert (decision.start, decision.end, decision.load_back) == (4, 8, 0)
    assert decision.rank_hits == ((0, 0),)
    assert run.outcome.rounds[0].ranks[0].ran == (("A", 4, 8),)
    snapshot = run.target.snapshot()
    assert [len(rank.live[0].pages) for rank in (snapshot, *snapshot.ranks)] == [8, 8]


@pytest.mark.parametrize(("tokens", "admitted"), [(10, True), (11, False)])
def test_the_gate_asks_each_rank_for_what_that_rank_lacks(tokens: int, admitted: bool) -> None:
    """Rank 1 has nothing of the prefix on its device: 8 tokens are to be loaded back there, 0 on rank 0."""
    settings = pipeline(RankSettings(pool_tokens=14, host_tokens=None), chunked_prefill_size=None)
    run = played(
        settings,
        Cached("device", prompt(("a", 8)), ranks=(0,)),
        Cached("host", prompt(("a", 8)), ranks=(1,)),
        Hold("h", 1, (1,)),
        Submit("A", prompt(("a", 8), ("b", tokens - 8))),
        Round(),
    )
    assert bool(run.outcome.rounds[0].joined) is admitted  # tokens + 1 + 1 < 13
    assert not run.outcome.broken


def test_a_stage_on_which_a_transfer_is_late_has_its_slot_taken_still() -> None:
    settings = pipeline(max_running_requests=2, pp_size=2)
    early = (ask("A", 3), Round(), Transferred("A", (0,)), ask("B", 3), Round())
    assert not played(settings, *early).outcome.rounds[1].joined
    assert broken(played(settings, *early, rules=OWN).outcome) == ["slots-kept"]
    assert played(settings, *early, Transferred("A", (1,)), Round()).outcome.rounds[2].joined


# --- what reaches ranks apart


def live(run: Replay) -> list[list[str]]:
    snapshot = run.target.snapshot()
    return [[request.rid for request in rank.live] for rank in (snapshot, *snapshot.ranks)]


def test_a_transfer_ends_a_request_where_it_is_heard_of() -> None:
    run = played(pipeline(), ask("A", 3), ask("B", 3), Round(), Transferred("B", (1,)))
    assert live(run) == [["A", "B"], ["A"]]
    assert run.target.in_flight() == ("A", "B")
    run.apply(Transferred("B", (0,)))
    run.apply(Transferred("A", (0,)))
    assert live(run) == [[], ["A"]]
    assert run.target.in_flight() == ("A",)
    run.apply(Drain())
    assert live(run) == [[], []]
    assert run.outcome.verdict == "ok"


def test_an_abort_that_reaches_a_rank_first_waits_for_the_plan() -> None:
    run = played(pipeline(), ask("A", 20), Round(), Abort("A", (1,)))
    assert live(run) == [["A"], ["A"]]
    run.apply(Abort("A", (0,)))
    assert live(run) == [[], ["A"]]
    run.apply(ask("B", 3))
    run.apply(Round())
    assert live(run) == [["B"], ["B"]]
    assert not run.outcome.broken


def test_an_abort_on_rank_0_after_its_transfer_is_no_news_for_the_others() -> None:
    run = played(pipeline(), ask("A", 3), Round(), Transferred("A", (0,)), Abort("A", (0,)), ask("B", 3), Round())
    assert live(run) == [["B"], ["A", "B"]]
    assert not run.outcome.broken
    run.apply(Drain())
    assert live(run) == [[], []]
    assert run.outcome.verdict == "ok"


def test_an_abort_reaches_at_once_a_rank_that_rank_0_has_gone_before() -> None:
    run = played(pipeline(), ask("A", 20), Round(), Abort("A", (0,)), Abort("A", (1,)))
    assert live(run) == [[], []]


@pytest.mark.parametrize("ranks", [((0,),), ((1,),), (None,), ((1,), (0,)), ((0,), (1,))])
def test_a_drain_brings_every_abort_to_all(ranks: tuple[tuple[int, ...] | None, ...]) -> None:
    run = played(pipeline(), ask("A", 20), Round(), *(Abort("A", each) for each in ranks), Drain())
    assert live(run) == [[], []]
    assert run.outcome.verdict == "ok"
    assert len(run.outcome.rounds) == 1


def test_slots_are_held_and_given_back_on_the_ranks_that_are_named() -> None:
    run = played(pipeline(), Hold("h", 5, (1,)), Hold("h", 2))
    free = [rank.free_pages for rank in (run.target.snapshot(), *run.target.snapshot().ranks)]
    assert free == [30, 25]
    run.apply(Release("h", 4, (1,)))
    run.apply(Release("h"))
    assert [rank.free_pages for rank in (run.target.snapshot(), *run.target.snapshot().ranks)] == [32, 32]


def test_what_one_rank_has_not_is_said_of_that_rank() -> None:
    with pytest.raises(EventError, match="rank 1: out of KV slots: 21 tokens wanted, 20 free"):
        played(pipeline(RankSettings(pool_tokens=20)), Hold("h", 21))


# --- the plan


def test_a_deferral_is_in_the_plan() -> None:
    """Nothing is left for B's tail on rank 1: B is put off on every rank, and goes on when there is."""
    settings = pipeline(pool_tokens=26)
    rules = AccountingRules(on_shortage="defer")
    run = played(settings, ask("B", 20), ask("C", 4), Round(), Hold("h", 14, (1,)), Round(), rules=rules)
    record = run.outcome.rounds[1]
    assert [decision.kind for decision in record.decisions] == ["deferred"]
    assert record.ranks[0].deferred == ("B",)
    assert "same-batches" not in broken(run.outcome)
    run.apply(Release("h"))
    run.apply(Drain())
    assert run.outcome.failure is None and run.outcome.stuck is None


def test_the_outcome_tells_what_each_rank_ran_and_has_left() -> None:
    run = played(pipeline(RankSettings(pool_tokens=20)), ask("A", 3), Round())
    assert run.outcome.document()["rounds"][0]["ranks"] == [
        {
            "rank": 1,
            "ran": [{"request": "A", "start": 0, "end": 3}],
            "free": 17,
            "evictable": 0,
            "protected": 3,
        }
    ]
    assert "ranks" not in played(pipeline(ranks=()), ask("A", 3), Round()).outcome.document()["rounds"][0]


@pytest.mark.parametrize("gate", ["check", "reserve"])
def test_a_rank_that_checks_the_plan_does_not_object_to_one_that_asked_it(gate: Any) -> None:
    rules = AccountingRules(reserve_tail=True, replay_gate=gate)
    settings = pipeline(RankSettings(pool_tokens=25), RankSettings(host_tokens=None))
    shared = Submit("C", Prompt((("b", 16), ("c", 3))))
    run = played(settings, ask("B", 20), ask("A", 3), Round(), shared, Drain(), rules=rules)
    assert run.outcome.verdict == "ok"
    assert len(run.outcome.rounds) >= 3


# --- the cases in tests/regressions


def case(name: str) -> Trace:
    return load(CASES / f"{name}.json")


@pytest.mark.parametrize(
    ("name", "verdict", "first", "says"),
    [
        ("ranks-smaller-rank-not-asked", "oom", "promises-covered", "rank 1: after B was whole"),
        ("ranks-hit-of-rank-0-alone", "same-batches", "same-batches", "rank 1 ran A 0..3, and rank 0 decided A 2..3"),
        ("ranks-replaying-rank-reserves-the-tail", "same-batches", "same-batches", "rank 1 ran B 0..8, and rank 0"),
        ("ranks-checking-rank-knows-no-policy", "same-batches", "same-batches", "rank 1 ran A 2..4, and rank 0"),
    ],
)
def test_a_faulty_rule_fails_on_its_smallest_trace(name: str, verdict: str, first: str, says: str) -> None:
    trace = case(name)
    assert len(trace.events) <= 6
    outcome = checked_replay(trace)
    assert outcome.verdict == verdict
    assert outcome.broken[0].invariant == first
    assert outcome.broken[0].message.startswith(says)
    assert checked_replay(trace, SOUND).verdict == "ok"


@pytest.mark.parametrize("gate", ["follow", "check"])
def test_only_reserving_the_tail_on_the_replaying_rank_is_what_breaks_there(gate: Any) -> None:
    """The memory comes back in time: a rank that follows, or checks this batch alone, does what was decided."""
    trace = case("ranks-replaying-rank-reserves-the-tail")
    outcome = checked_replay(trace, AccountingRules(reserve_tail=True, rank_view="own", replay_gate=gate))
    assert broken(outcome) == ["promises-covered"]
    assert outcome.failure is None and outcome.stuck is None


def test_a_failure_on_another_rank_names_it_wherever_it_is_told() -> None:
    trace = case("ranks-smaller-rank-not-asked")
    outcome = checked_replay(trace)
    violation = outcome.document()["violation"]
    assert (violation["rank"], violation["request"], violation["free"]) == (1, "B", 3)
    diagnosis = diagnose(trace)
    promise = diagnosis.broken_promise
    assert promise is not None
    assert (promise.request, promise.kind, promise.rank) == ("B", "chunk", 1)
    assert json.loads(json.dumps(diagnosis.document()))["broken_promise"]["rank"] == 1
    assert diagnosis.avoided_by == (("rank_view", "least"),)


def test_the_public_reports_break_with_their_mutants_alone() -> None:
    share, storm = case("ranks-23006-one-slot-for-two-stages"), case("ranks-34572-abort-storm")
    assert checked_replay(share, SOUND).verdict == checked_replay(storm, SOUND).verdict == "ok"
    assert broken(checked_replay(share, SOUND, target=MUTANTS["stage-share-of-nothing"].build))[-1] == "progress"
    outcome = checked_replay(storm, SOUND, target=AbortActedOnAtOnce)
    assert broken(outcome)[0] == "same-batches"
    assert outcome.broken[0].message == "rank 1 ran B 0..4, and rank 0 decided A 0..4, B 0..4"


def test_the_least_of_two_ranks_at_once_would_starve() -> None:
    trace = case("ranks-tightest-rank-is-one-rank")
    outcome = checked_replay(trace, SOUND, target=MUTANTS["least-of-two-ranks-at-once"].build)
    assert outcome.verdict == "stuck"
    assert broken(outcome) == ["fix-is-minimal", "progress"]


# --- docs/ranks.md

GUIDE = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text("utf-8")


def test_the_documents_example_ends_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"^```json\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    (tmp_path / "apart.json").write_text(example)
    commands = re.findall(r"^kvledger (.*?) +# (\d)", GUIDE, re.MULTILINE)
    said = []
    for command, status in commands:
        assert main(command.split()) == int(status), command
        said.append(capsys.readouterr().out)
    assert len(said) == 3
    assert "rank 1: pool 24, host 0" in said[0]
    assert "verdict  oom in round 3: B wanted" in said[0] and "on rank 1; free" in said[0]
    assert "promise     B's tail of 14 tokens on rank 1" in said[1]
    assert "avoided by  rank_view least" in said[1]


def test_every_trace_of_the_documents_table_is_there() -> None:
    named = set(re.findall(r"`(ranks-[\w-]+?)(?:\.json)?`", GUIDE))
    assert named == {path.stem for path in CASES.glob("ranks-*.json")}


# --- shrinking


def test_ranks_that_do_not_matter_go_with_what_reached_them_alone() -> None:
    """The post-mortem's hole on a pipeline is the hole on a node."""
    events = (
        Hold("h", 2, (1,)),
        Submit("A", prompt(("a", 10))),
        Submit("B", prompt(("b", 4))),
        Release("h", 1, (1,)),
        Transferred("A", (1,)),
        Drain(),
    )
    node = pipeline(RankSettings(pool_tokens=20), RankSettings(), checkpoint_align=5, pool_tokens=13)
    small = shrink(Trace(replace(node, chunked_prefill_size=9), "aligned", events), budget_seconds=600).trace
    assert small.node.ranks == ()
    assert [getattr(event, "ranks", None) for event in small.events] == [None] * 3
    assert (small.node.pool_tokens, small.node.chunked_prefill_size) == (13, 9)


def test_of_several_ranks_the_one_that_fails_is_left() -> None:
    node = pipeline(RankSettings(), RankSettings(pool_tokens=20, host_tokens=None), max_running_requests=6, pp_size=3)
    events = (ask("A", 16), Hold("h", 1, (0, 2)), ask("B", 9), Transferred("A", (0, 1)), Round(), Drain())
    small = shrink(Trace(node, OWN, events), rules=OWN, budget_seconds=600)
    assert small.invariant == "promises-covered"
    (rank,) = small.trace.node.ranks
    assert isinstance(rank.pool_tokens, int) and rank.pool_tokens < small.trace.node.pool_tokens
    assert rank.host_tokens == "same"
    assert [type(event) for event in small.trace.events] == [Submit, Submit, Drain]


def test_sizes_of_ranks_are_taken_out_and_put_back() -> None:
    node = pipeline(RankSettings(pool_tokens=20, host_tokens=None), RankSettings(host_tokens=7))
    trace = Trace(node, OWN, (Hold("h", 3, (1,)), Release("h", 2, (1,))))
    sizes = sizes_of(trace)
    assert sizes == (1, 8, 12, 32, 20, 7, 3, 2)
    assert with_sizes(trace, sizes) == trace
    larger = with_sizes(trace, (1, 8, 12, 32, 21, 8, 4, 2))
    assert larger is not None and larger.node.ranks[0].pool_tokens == 21
    assert larger.events[0] == Hold("h", 4, (1,))


def test_a_rank_that_goes_takes_the_events_that_it_alone_saw() -> None:
    node = pipeline(RankSettings(), RankSettings(pool_tokens=20))
    events = (ask("A", 3), Hold("h", 1, (1,)), Hold("g", 1, (1, 2)), Abort("A", (2,)), Release("h", None, (1,)))
    less = next(simpler_ranks(Trace(node, OWN, events)))
    assert less.node.ranks == (RankSettings(pool_tokens=20),)
    assert less.events == (ask("A", 3), Hold("g", 1, (1,)), Abort("A", (1,)))


def test_a_trace_with_fewer_ranks_and_plainer_events_is_the_smaller_one() -> None:
    def size(*ranks: RankSettings, reached: tuple[int, ...] | None = None) -> Any:
        return measure(Trace(pipeline(ranks=ranks), OWN, (ask("A", 3), Abort("A", reached), Drain())), 1)

    like, own = RankSettings(), RankSettings(pool_tokens=20)
    assert size() < size(like) < size(own) < size(like, like)
    assert size(like) < size(like, reached=(0,)) < size(like, reached=(0, 1))
