"""One trace on several targets: what counts as the same, the first difference, and the command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from kvledger.adder import AddReqResult
from kvledger.cli import main
from kvledger.compare import Comparison, compare, compare_runs
from kvledger.differences import KINDS, Difference, DifferenceKind, round_difference
from kvledger.events import Drain, Event, Round, Submit
from kvledger.monitor import checked_replay
from kvledger.node import PrefillNode, Watcher
from kvledger.record import AllocationFailure, RoundRecord, Snapshot
from kvledger.replay import Outcome, Stuck, TargetFactory
from kvledger.report.compared import comparison_lines
from kvledger.report.painted import ASCII, plain_text
from kvledger.report.plain import COLUMNS, width
from kvledger.rules import PRESETS, AccountingRules
from kvledger.runs import LEDGER_FIGURES, Run
from kvledger.settings import NodeSettings
from kvledger.targets import TARGETS
from kvledger.trace import Trace, TraceError, write
from tests.unit.builders import INCIDENT, INCIDENT_NODE, node_settings, prompt

ROOT = Path(__file__).parents[2]
TRACE = Trace(INCIDENT_NODE, "aligned", INCIDENT, "Post-mortem")
HERE = "tests.unit.test_compare"


def fixed(settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> PrefillNode:
    """The node with the fix, whatever rules it is asked for."""
    return PrefillNode(settings, PRESETS["tail-reserved"], watcher)


class Mute(PrefillNode):
    """Shows its batches and counts alone."""

    capabilities = frozenset({"batches", "counts"})


class Blind(PrefillNode):
    """Shows nothing at all, so that nothing can be asked of it."""

    capabilities = frozenset()


class Secretive(PrefillNode):
    """Tells its decisions, but not what it has promised."""

    capabilities = PrefillNode.capabilities - {"offsets"}


class Strict(PrefillNode):
    """Refuses at the entry whatever is called xpkq."""

    def submit(self, rid: str, prompt: Any, output: Any = None) -> str | None:
        return "nobody of that name" if rid == "xpkq" else super().submit(rid, prompt)


class Biased(PrefillNode):
    """Decides as the node does, and shows a page more than there is."""

    def run_round(self) -> RoundRecord:
        record = super().run_round()
        return replace(record, decisions=tuple(replace(d, baseline=d.baseline + 64) for d in record.decisions))


class Leaky(PrefillNode):
    """Decides as the node does, and leaves a page less."""

    def run_round(self) -> RoundRecord:
        record = super().run_round()
        return replace(record, free=record.free - 64)


def of(one: TargetFactory, other: TargetFactory, rules: str = "aligned", trace: Trace = TRACE) -> Comparison:
    return compare(trace, {"one": one, "other": other}, PRESETS[rules])


def text_of(comparison: Comparison, **options: Any) -> str:
    text = plain_text(comparison_lines(comparison, "incident.json", ASCII, **options))
    assert [line for line in text.splitlines() if width(line) > COLUMNS] == []
    return text


# --- what is the same


def test_a_target_agrees_with_itself_and_says_how_much_it_was_asked() -> None:
    comparison = of(PrefillNode, PrefillNode)
    (pair,) = comparison.pairs
    assert comparison.same and comparison.kind == "same" and pair.same_decisions
    assert (pair.rounds_alike, pair.decisions_alike) == (4, 6)
    assert "one and other agree: 4 rounds and 6 decisions" in text_of(comparison)


def test_without_decisions_batches_are_compared() -> None:
    comparison = of(PrefillNode, Mute, "tail-reserved")
    (pair,) = comparison.pairs
    assert comparison.same and not pair.by_decisions
    # the refusals are none of a batch's chunks
    chunks = [d for record in pair.one.outcome.rounds for d in record.joined]
    assert pair.decisions_alike == len(chunks) < sum(len(record.decisions) for record in pair.one.outcome.rounds)
    text = text_of(comparison)
    assert "the chunks of every batch, in order, because other tells no decisions" in text
    assert f"agree: {pair.rounds_alike} rounds and {len(chunks)} chunks" in text


def test_what_is_not_shown_is_never_equal() -> None:
    for target in (Mute, Secretive):
        comparison = of(fixed, target)
        (pair,) = comparison.pairs
        assert not comparison.same
        sides = comparison.document()["pairs"][0]["difference"]["sides"]
        assert sides[0]["figures"].keys() == set(LEDGER_FIGURES)
        assert sides[1]["figures"] is None and sides[1]["promised"] is None
        assert text_of(comparison).count("not shown") == 4 + len(sides[0]["promised"])
        assert pair.figures is None


def test_a_verdict_is_held_against_another_only_as_far_as_both_were_asked() -> None:
    trace = Trace(INCIDENT_NODE, "aligned", (*INCIDENT[:-1], Round()))
    comparison = of(PrefillNode, Mute, trace=trace)
    assert [run.outcome.verdict for run in comparison.runs] == ["promises-covered", "promises-covered"]
    blind = of(PrefillNode, Blind, trace=trace)
    assert [run.outcome.verdict for run in blind.runs] == ["promises-covered", "ok"]
    assert blind.same
    assert "their verdicts differ because one was asked what the other was not" in text_of(blind)
    assert "their verdicts differ" not in text_of(comparison)
    assert "promises-covered" in blind.document()["runs"][1]["not_asked"]


# --- the first difference


class FailsAnother(PrefillNode):
    """The same round dies of somebody else's chunk."""

    def run_round(self) -> RoundRecord:
        record = super().run_round()
        failure = record.failure
        return record if failure is None else replace(record, failure=replace(failure, request="v9uj"))


class FailsUntold(PrefillNode):
    def run_round(self) -> RoundRecord:
        record = super().run_round()
        failure = record.failure and replace(record.failure, request="one of two", known=False)
        return replace(record, failure=failure)


def test_who_fails_is_compared_as_far_as_both_can_tell() -> None:
    difference = of(PrefillNode, FailsAnother).pairs[0].difference
    assert difference is not None
    assert (difference.kind, difference.round) == ("verdict", 4)
    assert difference.detail == "the chunk of 1keim finds no slots, against that of v9uj"
    assert of(PrefillNode, FailsUntold).same


class LosesAPage(PrefillNode):
    """Once a round has run a page is nobody's; nothing that is decided shows it."""

    def snapshot(self) -> Snapshot:
        found = super().snapshot()
        return replace(found, pool_pages=found.pool_pages + 1) if self.rounds else found


@pytest.mark.parametrize("rules", ["aligned", "tail-reserved"])
def test_what_breaks_on_one_alone_is_a_difference_whatever_the_verdict(rules: str) -> None:
    for one, other in ((PrefillNode, LosesAPage), (LosesAPage, PrefillNode)):
        comparison = of(one, other, rules)
        difference = comparison.pairs[0].difference
        assert difference is not None and difference.kind == "verdict"
    assert of(LosesAPage, LosesAPage, rules).same


def test_who_is_stuck_is_compared() -> None:
    stuck = Stuck(3, "A", 64, 0, 0, "nothing moves")
    outcomes = [Outcome(stuck=stuck), Outcome(stuck=replace(stuck, request="B"))]
    pair = compare_runs(run_of("a", outcomes[0]), run_of("b", outcomes[1]))
    assert pair.difference == Difference("verdict", 3, "A", detail="A is stuck against B")
    assert compare_runs(run_of("a", outcomes[0]), run_of("b", outcomes[0])).same


def test_one_tells_nothing_and_two_tell_nothing() -> None:
    assert "because one tells no decisions" in text_of(of(Mute, PrefillNode))
    words = " ".join(text_of(of(Mute, Mute)).split())
    assert "one and other tell no decisions; no figures of the ledger, because one and other show none" in words


def test_the_incident_and_its_fix_part_at_the_newcomer() -> None:
    (pair,) = of(PrefillNode, fixed).pairs
    difference = pair.difference
    assert difference is not None
    assert (difference.kind, difference.round, difference.request, difference.place) == ("kind", 1, "xpkq", 2)
    assert [decision and decision.kind for decision in difference.decisions] == ["whole", "refused"]
    assert (pair.rounds_alike, pair.decisions_alike) == (0, 2)
    assert pair.figures is not None
    assert (pair.figures.request, pair.figures.detail) == ("1keim", "rem_total_tokens 18303 and 13310")


def test_its_text_shows_figures_promises_verdicts_and_rounds() -> None:
    text = " ".join(text_of(of(PrefillNode, fixed)).split())
    for words in (
        "differ in round 1, after 0 rounds and 2 decisions alike: kind (another kind of decision",
        "round 1 xpkq whole 15360..15545 +15360 xpkq refused NO_TOKEN",
        "baseline 19264 34624",
        "rem_total_tokens 2686 13310",
        "promised 1keim 2368 now 2368 now + 4993 later",
        "promised xpkq 256 now + 1 later nothing",
        "verdict oom in round 4 ledger-exact in round 1",
        "the figures part earlier: round 1, after 1keim: rem_total_tokens 18303 and 13310",
        ">>xpkq whole 15360..15545 +15360 2686 | >>xpkq refused NO_TOKEN 13310",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("target", "kind", "request_name"),
    [(Strict, "submit", "xpkq"), (Biased, "figures", "v9uj"), (Leaky, "pool", None), (fixed, "kind", "xpkq")],
)
def test_each_class_by_a_target_that_shows_it(target: TargetFactory, kind: str, request_name: str | None) -> None:
    comparison = of(PrefillNode, target)
    difference = comparison.pairs[0].difference
    assert comparison.kind == kind
    assert difference is not None and difference.request == request_name and difference.round == 1
    assert comparison.pairs[0].same_decisions == (kind in ("figures", "pool"))
    assert not comparison.same
    text_of(comparison)


def a_round(trace: Trace = TRACE, number: int = 1) -> RoundRecord:
    return checked_replay(trace).rounds[number - 1]


FIRST = a_round()
FAILURE = AllocationFailure("v9uj", 1, 0, 0, "out of memory")


def changed(place: int, **fields: Any) -> RoundRecord:
    decisions = list(FIRST.decisions)
    decisions[place] = replace(decisions[place], **fields)
    return replace(FIRST, decisions=tuple(decisions))


@pytest.mark.parametrize(
    ("other", "kind", "place", "request_name"),
    [
        (None, "rounds", 0, "v9uj"),
        (replace(FIRST, decisions=FIRST.decisions[::-1]), "order", 0, "v9uj"),
        (replace(FIRST, decisions=FIRST.decisions[:2]), "request", 2, "xpkq"),
        (replace(FIRST, decisions=(*FIRST.decisions, FIRST.decisions[0])), "request", 3, "v9uj"),
        (changed(1, request="other"), "request", 1, "1keim"),
        (changed(1, kind="resumed"), "kind", 1, "1keim"),
        (changed(2, prefix_tokens=64, load_back=15296), "hit", 2, "xpkq"),
        (changed(1, end=89024), "bounds", 1, "1keim"),
        (changed(2, load_back=0), "load_back", 2, "xpkq"),
        (changed(2, load_back=0, kind="truncated", start=0, end=128), "load_back", 2, "xpkq"),
        (changed(2, load_back=0, kind="refused", start=0, end=0), "kind", 2, "xpkq"),
        (changed(2, reason=AddReqResult.OTHER), "reason", 2, "xpkq"),
        (replace(FIRST, rolled_back=("v9uj",)), "running", None, "v9uj"),
        (replace(FIRST, decoded=("b", "a")), "running", None, "a"),
        (replace(FIRST, failure=FAILURE), "verdict", None, "v9uj"),
    ],
)
def test_each_class_of_a_round(
    other: RoundRecord | None, kind: str, place: int | None, request_name: str | None
) -> None:
    for left, right in ((FIRST, other), (other, FIRST)):
        found = round_difference(left, right, 1)
        assert found is not None and found.kind in KINDS
        assert (found.kind, found.place, found.round) == (kind, place, 1)
        assert found.request in (request_name, "other", "xpkq")


@pytest.mark.parametrize(
    "other",
    [
        FIRST,
        changed(1, baseline=0, rem_total_tokens=0),
        replace(FIRST, free=0, promises=()),
    ],
)
def test_figures_are_no_decisions(other: RoundRecord) -> None:
    assert round_difference(FIRST, other, 1) is None


def test_batches_know_neither_kinds_nor_load_backs_nor_refusals() -> None:
    refusing = a_round(TRACE.with_rules("tail-reserved"))
    assert refusing.refused
    for other in (changed(2, load_back=0), changed(1, kind="resumed")):
        assert round_difference(FIRST, other, 1, by_decisions=False) is None
    without = replace(refusing, decisions=refusing.joined)
    assert round_difference(refusing, without, 1, by_decisions=False) is None
    assert round_difference(refusing, without, 1) is not None


def test_a_last_refusal_with_nothing_left_is_the_same_answer() -> None:
    refusing = a_round(TRACE.with_rules("tail-reserved"))
    refusal = refusing.refused[-1]
    assert refusing.decisions[-1] == refusal
    exhausted = replace(refusing, decisions=refusing.joined, budget_state=AddReqResult.NO_TOKEN)
    for left, right in ((refusing, exhausted), (exhausted, refusing)):
        assert round_difference(left, right, 1) is None
    still_asking = replace(exhausted, budget_state=AddReqResult.CONTINUE)
    for other in (still_asking, replace(exhausted, decisions=refusing.joined[:-1])):
        assert round_difference(refusing, other, 1) is not None


def test_where_a_refused_one_would_have_begun_is_no_decision() -> None:
    refusing = a_round(TRACE.with_rules("tail-reserved"))
    hit = replace(refusing.refused[-1], start=64, end=64)
    assert round_difference(refusing, replace(refusing, decisions=(*refusing.joined, hit)), 1) is None


def test_order_within_a_batch_counts() -> None:
    swapped = replace(FIRST, decisions=FIRST.decisions[::-1])
    found = round_difference(FIRST, swapped, 1, by_decisions=False)
    assert found is not None and found.kind == "order"


def test_one_that_dies_parts_in_the_round_it_dies_in() -> None:
    alive = checked_replay(TRACE)
    dead = checked_replay(TRACE)
    dead.rounds = [*dead.rounds[:1], replace(dead.rounds[1], failure=FAILURE)]
    dead.failure = FAILURE
    pair = compare_runs(run_of("alive", alive), run_of("dead", dead))
    assert pair.difference == Difference("verdict", 2, "v9uj", detail="out of memory")
    assert (pair.rounds_alike, pair.decisions_alike) == (1, 4)


class Faulty(PrefillNode):
    """Somebody else's, and raises in its second round."""

    foreign = True

    def run_round(self) -> RoundRecord:
        if self.rounds:
            raise KeyError("row 7")
        return super().run_round()


def test_one_that_raises_parts_in_the_round_it_raises_in() -> None:
    (pair,) = of(PrefillNode, Faulty).pairs
    assert pair.difference is not None
    assert (pair.difference.kind, pair.difference.round, pair.rounds_alike) == ("verdict", 2, 1)
    assert "row 7" in pair.difference.detail


def run_of(name: str, outcome: Outcome) -> Run:
    return Run(name, PrefillNode.capabilities, outcome, frozenset(), ())


def test_every_class_has_words() -> None:
    assert tuple(KINDS) == get_args(DifferenceKind)


# --- several targets, and what cannot be compared


def test_the_first_is_held_against_each_other_one() -> None:
    comparison = compare(TRACE, {"a": PrefillNode, "b": PrefillNode, "c": fixed})
    assert [(pair.one.target, pair.other.target, pair.same) for pair in comparison.pairs] == [
        ("a", "b", True),
        ("a", "c", False),
    ]
    assert (comparison.same, comparison.kind) == (False, "kind")
    assert "2 targets held against a: 1 differ" in text_of(comparison)


def test_one_target_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="1 target to compare"):
        compare(TRACE, {"a": PrefillNode})


def test_what_a_target_does_not_model_is_named_with_the_target() -> None:
    trace = Trace(replace(node_settings(), mode="unified"), "upstream", ())
    with pytest.raises(TraceError, match=r'^t\.json: on b: node\.mode: "unified" is not modelled'):
        compare(trace, {"a": PrefillNode, "b": Mute}, source="t.json")


def test_hostile_names_stay_in_their_columns() -> None:
    name = "two\nlines\x1b[31m" + "z" * 200
    events: tuple[Event, ...] = (Submit(name, prompt(("x", 200))), Submit("b", prompt(("y", 100))), Drain())
    trace = Trace(node_settings(chunked_prefill_size=64), "aligned", events)
    targets: Mapping[str, TargetFactory] = {name: PrefillNode, f"{name}2": Mute}
    text = text_of(compare(trace, targets), all_rounds=True)
    assert "\x1b" not in text and "two\nlines" not in text


# --- the command


@pytest.fixture
def incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "incident.json"
    write(TRACE, path)
    return str(path)


def test_targets_that_agree_exit_with_0(incident: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", incident, "--targets", f"node,{HERE}:Mute"]) == 0
    assert "agree: 4 rounds and 6 chunks" in capsys.readouterr().out


def test_targets_that_differ_exit_with_1(incident: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", incident, "--targets", f"node,{HERE}:fixed"]) == 1
    assert ">>xpkq" in capsys.readouterr().out
    assert main(["compare", incident, "--targets", f"node,{HERE}:fixed", "--rules", "tail-reserved"]) == 0


def test_json_has_exactly_the_contracts_keys(incident: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", incident, "--targets", f"node,{HERE}:fixed", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["format", "same", "runs", "pairs"]
    assert (document["format"], document["same"]) == ("kvledger-comparison/1", False)
    assert list(document["runs"][0]) == [
        *("target", "capabilities", "not_asked", "rounds", "decisions", "verdict", "violation")
    ]
    (pair,) = document["pairs"]
    assert list(pair) == [
        *("targets", "compared", "same", "same_decisions", "rounds_alike", "decisions_alike"),
        *("difference", "first_figure"),
    ]
    assert list(pair["difference"]) == ["kind", "round", "request", "detail", "sides"]
    assert pair["difference"]["sides"][1] == {
        "decision": {
            "request": "xpkq",
            "start": 0,
            "end": 0,
            "kind": "refused",
            "prefix_tokens": 0,
            "load_back": 0,
            "reason": "NO_TOKEN",
        },
        "figures": {"baseline": 34624, "cur_rem_tokens": 18304, "rem_total_tokens": 13310, "rem_chunk_tokens": 192},
        "promised": {"v9uj": {"now": 13952, "later": 1}, "1keim": {"now": 2368, "later": 4993}},
    }
    assert pair["first_figure"]["detail"] == "rem_total_tokens 18303 and 13310"


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("node", "is one target; name two or more"),
        ("", "is one target; name two or more"),
        ("node,node", '"node" is there twice'),
        ("node,nobody", f"'nobody' is neither one of {', '.join(TARGETS)} nor package.module:attribute"),
        ("node,", "names no target beside a comma"),
        ("node,decimal:Decimal", "does not make a kvledger target"),
    ],
)
def test_targets_that_cannot_be_compared_are_one_line(
    targets: str, said: str, incident: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", incident, "--targets", targets]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("kvledger: compare: argument --targets: ") and said in printed.err


def test_bad_traces_are_one_line(tmp_path: Path, incident: str, capsys: pytest.CaptureFixture[str]) -> None:
    unified = tmp_path / "unified.json"
    write(Trace(replace(node_settings(), mode="unified"), "upstream", ()), unified)
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    targets = ["--targets", f"node,{HERE}:Mute"]
    for path, said in (
        (tmp_path / "none.json", "none.json: No such file"),
        (broken, "broken.json: "),
        (unified, f'unified.json: on {HERE}:Mute: node.mode: "unified" is not modelled by this target'),
    ):
        assert main(["compare", str(path), *targets]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and said in printed.err


def test_targets_are_required(incident: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", incident]) == 2
    assert "--targets" in capsys.readouterr().err
