"""Second pools: who takes what of them and when, what a gate counts on, and what a refusal leaves behind."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvledger.cli import main
from kvledger.events import Abort, Cached, Drain, Event, Round, Submit, Transferred
from kvledger.monitor import InvariantMonitor, checked_replay
from kvledger.node import PrefillNode, Watcher
from kvledger.record import PoolView
from kvledger.replay import Replay
from kvledger.rules import PRESETS, AccountingRules
from kvledger.settings import NodeSettings
from kvledger.testing.driver import example
from kvledger.testing.pools_moves import POOLS_SPACE
from kvledger.trace import Trace, TraceError, dumps, load, parse
from tests.unit.builders import node_settings, prompt

ROOT = Path(__file__).resolve().parents[2]
FAULTY = AccountingRules(reserve_tail=True, promise_pools=False)
SMALLEST = sorted((ROOT / "tests" / "regressions").glob("second-pool-*.json"))


def small(**changes: Any) -> NodeSettings:
    sizes = {"page_size": 16, "checkpoint_align": 32, "chunked_prefill_size": 96, "pool_tokens": 1024}
    return node_settings(**(sizes | changes))


def ran(settings: NodeSettings, *events: Event, rules: AccountingRules = PRESETS["tail-reserved"]) -> Replay:
    run = Replay(settings, rules, monitor=InvariantMonitor())
    for event in events:
        run.apply(event)
    return run


def view(run: Replay, name: str) -> PoolView:
    return next(view for view in run.target.snapshot().pools if view.name == name)


def refusals(run: Replay) -> list[tuple[str, str | None]]:
    return [(d.request, d.short_of) for record in run.outcome.rounds for d in record.refused]


# --- state slots


def test_tracking_slots_are_taken_with_the_first_chunk_and_kept_to_the_end() -> None:
    run = ran(small(state_slots=8, tracking_slots=2), Submit("a", prompt(("a", 120))), Round())
    assert [len(units) for _, units in view(run, "state_slots").owned] == [3]
    run.apply(Round())
    assert [len(units) for _, units in view(run, "state_slots").owned] == [3]
    run.apply(Transferred("a"))
    assert view(run, "state_slots").owned == ()
    assert run.outcome.verdict == "ok"


def test_a_gate_counts_the_slots_that_others_were_promised() -> None:
    events = (Submit("a", prompt(("a", 20))), Submit("b", prompt(("b", 20))), Round())
    run = ran(small(state_slots=3, tracking_slots=1), *events)
    assert refusals(run) == [("b", "state_slots")]
    broken = ran(small(state_slots=3, tracking_slots=1), *events, rules=FAULTY)
    assert broken.outcome.failure is not None
    assert (broken.outcome.failure.request, broken.outcome.failure.pool) == ("b", "state_slots")
    assert broken.outcome.document()["violation"]["pool"] == "state_slots"


@pytest.mark.parametrize(("copying", "refused"), [(False, []), (True, [("b", "state_slots")])])
def test_a_checkpoint_that_is_copied_stays(copying: bool, refused: list[tuple[str, str]]) -> None:
    first, other = Submit("a", prompt(("a", 64))), Submit("c", prompt(("c", 9)))
    again = Submit("b", prompt(("a", 64), ("b", 9)))
    events = (first, Round(), Transferred("a"), other, Round(), again, Round())
    run = ran(small(state_slots=2, copy_on_write=copying), *events)
    assert refusals(run) == refused
    assert run.outcome.verdict == "ok"


# --- the window


def test_a_window_is_kept_and_what_leaves_it_is_free() -> None:
    run = ran(small(window_tokens=32, window_pool_tokens=160), Submit("a", prompt(("a", 96))), Round())
    pool = view(run, "window_pool")
    assert [len(units) for _, units in pool.used] == [2]
    assert pool.free_units == 8
    run.apply(Transferred("a"))
    assert view(run, "window_pool").evictable_units == 2, "they stay with the cached pages, and can be given up"


def test_a_chunk_is_cut_to_what_the_window_pool_holds_and_never_to_nothing() -> None:
    settings = small(window_tokens=16, window_pool_tokens=48, chunked_prefill_size=512)
    run = ran(settings, Submit("a", prompt(("a", 200))), Drain())
    chunks = [d.end - d.start for record in run.outcome.rounds for d in record.joined]
    assert sum(chunks) == 200
    assert max(chunks) <= 48
    assert run.outcome.verdict == "ok"


def test_a_hit_needs_its_window() -> None:
    """A prefix whose window pages were given up is computed again."""
    settings = small(window_tokens=32, window_pool_tokens=80, chunked_prefill_size=64)
    again = Submit("b", prompt(("a", 64), ("b", 9)))
    kept = ran(settings, Submit("a", prompt(("a", 64))), Drain(), again, Round())
    assert kept.outcome.rounds[-1].joined[0].start == 64
    other = Submit("o", prompt(("o", 64)))
    lost = ran(settings, Submit("a", prompt(("a", 64))), Drain(), other, Drain(), again, Round())
    assert lost.outcome.rounds[-1].joined[0].start == 0
    assert lost.outcome.verdict == kept.outcome.verdict == "ok"


def test_a_load_back_takes_the_last_pages_of_the_window() -> None:
    settings = small(window_tokens=32, window_pool_tokens=160)
    run = ran(settings, Cached("host", prompt(("doc", 128))), Submit("a", prompt(("doc", 128), ("a", 9))), Round())
    assert run.outcome.rounds[0].joined[0].load_back == 128
    assert len(view(run, "window_pool").attached) == 2, "not eight: the rest is out of reach"


def test_what_a_newcomer_shares_no_longer_comes_back_to_its_owner() -> None:
    """The tail of a half-done request is counted afresh when another one uses its window too."""
    settings = small(window_tokens=64, window_pool_tokens=176, chunked_prefill_size=96, checkpoint_align=16)
    document = prompt(("doc", 64))
    events: tuple[Event, ...] = (
        Submit("s", document),
        Round(),
        Submit("a", prompt(("doc", 64), ("a", 300))),
        Submit("b", prompt(("doc", 64), ("b", 3))),
        Drain(),
    )
    run = ran(settings, *events)
    assert run.outcome.verdict == "ok"
    assert not run.outcome.broken


# --- shared bytes


def test_shared_bytes_count_both_parts() -> None:
    settings = small(state_slots=9, shared_bytes=80, page_bytes=10, state_slot_bytes=10, host_tokens=0)
    events = (Submit("a", prompt(("a", 40))), Submit("b", prompt(("b", 40))), Round())
    run = ran(settings, *events)
    assert refusals(run) == []
    assert run.outcome.verdict == "ok"
    tighter = ran(small(state_slots=9, shared_bytes=70, page_bytes=10, state_slot_bytes=10, host_tokens=0), *events)
    assert refusals(tighter) == [("b", "shared_bytes")]


def test_idle_pages_make_room_for_slots() -> None:
    settings = small(state_slots=9, shared_bytes=90, page_bytes=10, state_slot_bytes=10, host_tokens=0)
    run = ran(settings, Cached("device", prompt(("d", 128))), Submit("a", prompt(("a", 20))), Round())
    assert [d.request for d in run.outcome.rounds[0].joined] == ["a"]
    assert run.outcome.rounds[0].evicted_pages


def test_a_prompt_that_could_never_fit_the_bytes_is_refused_at_submit() -> None:
    settings = small(state_slots=9, shared_bytes=60, page_bytes=10, state_slot_bytes=11)
    run = ran(settings, Submit("a", prompt(("a", 80))))
    assert run.outcome.rejected_at_submit == [("a", "prompt 80 takes 61 bytes, more than the 60 of shared_bytes")]


STATES = {"state_slots": 12, "state_slot_bytes": 7}
WINDOW = {"window_tokens": 40, "window_pool_tokens": 160, "window_page_bytes": 3}


@pytest.mark.parametrize("chunk", [None, 16, 48])
@pytest.mark.parametrize("host_tokens", [0, None, 48])
@pytest.mark.parametrize(
    "parts",
    [
        STATES,
        STATES | {"tracking_slots": 2},
        STATES | {"copy_on_write": True},
        STATES | {"tracking_slots": 1, "copy_on_write": True} | WINDOW,
        WINDOW,
        STATES | WINDOW,
    ],
)
def test_whoever_fits_the_bytes_exactly_comes_to_an_end(
    parts: dict[str, Any], host_tokens: int | None, chunk: int | None
) -> None:
    """Alone, and then on what its like has left: pages, and a checkpoint at each of them."""
    plain = small(
        chunked_prefill_size=chunk, checkpoint_align=16, host_tokens=host_tokens, shared_bytes=10**6, page_bytes=5
    )
    roomy = replace(plain, **parts)
    for tokens in (5, 16, 17, 33, 100, 140):
        exact = replace(roomy, shared_bytes=max(roomy.bytes_of_one(tokens), roomy.bytes_of_one(1)))
        first = prompt(("p", tokens - 1), ("a", 1))
        likes = (Submit("a", first), Drain(), Submit("b", prompt(("p", tokens))), Drain(), Submit("c", first), Drain())
        for before in ((), (Cached("device", first),), (Cached("host", first),) if host_tokens is None else ()):
            run = ran(exact, *before, *likes)
            assert (run.outcome.verdict, run.outcome.broken, run.outcome.rejected_at_submit) == ("ok", [], [])
        if tokens > 17:
            tighter = replace(exact, shared_bytes=roomy.bytes_of_one(tokens) - 1)
            assert [rid for rid, _ in ran(tighter, *likes).outcome.rejected_at_submit] == ["a", "b", "c"]


def test_shared_bytes_and_a_prompt_far_below_them_as_a_serving_node_has_them() -> None:
    """A checkpoint for each of its 157 pages would not fit: it makes 39 of them, as far as there is room."""
    settings = replace(
        small(state_slots=64, shared_bytes=8 * 10**9, page_bytes=2_359_296, state_slot_bytes=60_000_000),
        page_size=64,
        checkpoint_align=256,
        chunked_prefill_size=2048,
        pool_tokens=131_072,
        host_tokens=0,
    )
    run = ran(settings, Submit("a", prompt(("a", 10_000))), Drain())
    assert (run.outcome.verdict, run.outcome.rejected_at_submit) == ("ok", [])


# --- a refusal, an end


def test_a_pool_that_refuses_leaves_the_others_as_they_were() -> None:
    settings = small(state_slots=1, window_tokens=32, window_pool_tokens=160)
    run = ran(settings, Submit("a", prompt(("a", 20))), Round())
    before = run.target.snapshot().pools
    run.apply(Submit("b", prompt(("b", 20))))
    run.apply(Round())
    assert refusals(run) == [("b", "state_slots")]
    assert run.target.snapshot().pools == before
    assert run.outcome.rounds[-1].batch_is_full
    assert run.outcome.document()  # the verdict is in it


def test_an_abort_gives_everything_back() -> None:
    settings = small(state_slots=6, tracking_slots=1, window_tokens=32, window_pool_tokens=160)
    run = ran(settings, Submit("a", prompt(("a", 200))), Round(), Abort("a"))
    for pool in run.target.snapshot().pools:
        assert pool.owned == ()
        assert not any(uses for _, _, uses in pool.attached)
    assert run.outcome.verdict == "ok"


def test_a_plain_node_has_none() -> None:
    assert ran(small()).target.snapshot().pools == ()


# --- in a trace


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"tracking_slots": 1}, "tracking_slots"),
        ({"copy_on_write": True}, "copy_on_write"),
        ({"state_slots": 1, "tracking_slots": 1}, "state_slots"),
        ({"window_tokens": 32}, "window_pool_tokens"),
        ({"window_pool_tokens": 32}, "window_pool_tokens"),
        ({"window_tokens": 32, "window_pool_tokens": 48}, "window_pool_tokens"),
        ({"window_tokens": 16, "window_pool_tokens": 160, "mode": "unified"}, "window_tokens"),
        ({"page_bytes": 1}, "page_bytes"),
        ({"shared_bytes": 10}, "page_bytes"),
        ({"shared_bytes": 10, "page_bytes": 1}, "shared_bytes"),
        ({"shared_bytes": 10, "page_bytes": 1, "state_slot_bytes": 1}, "state_slot_bytes"),
        ({"shared_bytes": 10, "page_bytes": 1, "window_page_bytes": 1}, "window_page_bytes"),
        ({"shared_bytes": 5, "page_bytes": 3, "state_slot_bytes": 3, "state_slots": 2}, "shared_bytes"),
        (
            {"shared_bytes": 4, "page_bytes": 3, "window_page_bytes": 2, "window_tokens": 1, "window_pool_tokens": 99},
            "shared_bytes",
        ),
    ],
)
def test_keys_that_do_not_fit_each_other_are_bad_input(keys: dict[str, object], key: str) -> None:
    sizes = json.loads(dumps(Trace(small(), "tail-reserved", ())))["node"]
    document = {"format": "kvledger-trace/1", "node": sizes | keys, "rules": "tail-reserved", "events": []}
    with pytest.raises(TraceError, match=rf"node\.{key}: "):
        parse(document, "t")


def test_a_target_without_pools_refuses_them_by_name() -> None:
    class Plain(PrefillNode):
        features = PrefillNode.features - {"pools"}

        def __init__(self, settings: NodeSettings, rules: AccountingRules, watcher: Watcher) -> None:
            super().__init__(settings, rules, watcher)

    trace = Trace(small(window_tokens=16, window_pool_tokens=160), "tail-reserved", ())
    with pytest.raises(TraceError, match=r"node\.window_tokens: 16 is not modelled by this target"):
        checked_replay(trace, target=Plain)


@pytest.mark.parametrize("path", SMALLEST, ids=lambda path: path.stem)
def test_the_smallest_traces_break_a_promise_that_the_explanation_names(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = load(path)
    assert len(trace.events) <= 6
    outcome = checked_replay(trace)
    assert outcome.broken[0].invariant == "promises-covered"
    assert outcome.failure is not None
    assert outcome.failure.pool is not None
    assert outcome.failure.pool in outcome.broken[0].message
    main(["explain", str(path)])
    words = capsys.readouterr().out
    assert f"of {outcome.failure.pool}, made in round 1" in " ".join(words.split())
    assert "avoided by  promise_pools true" in words
    pool = outcome.rounds[-1].pools[0 if len(outcome.rounds[-1].pools) == 1 else -1]
    assert pool.name == outcome.failure.pool
    figures = f"{pool.name} in round {len(outcome.rounds)}: free {pool.free} + evictable {pool.evictable}"
    assert f"ran out {figures}" in " ".join(words.split())
    assert "share" not in words.split("verdict")[-1].replace(pool.name, "")
    main(["report", str(path), "-o", str(tmp_path / "page.html")])
    assert f"Ran out: {figures}" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SMALLEST, ids=lambda path: path.stem)
def test_a_replay_shows_each_pools_figures_and_what_a_refusal_lacked(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = load(path)
    for rules in ("tail-reserved", None):
        chosen = ["--rules", rules] if rules else []
        main(["replay", str(path), "--json", *chosen])
        rounds = json.loads(capsys.readouterr().out)["rounds"]
        main(["replay", str(path), *chosen])
        words = capsys.readouterr().out
        main(["explain", str(path), *chosen])
        explained = capsys.readouterr().out
        page = tmp_path / "page.html"
        main(["report", str(path), *chosen, "-o", str(page)])
        capsys.readouterr()
        for document in rounds:
            assert document["pools"], "there is a pool, and every round tells of it"
            for pool in document["pools"]:
                assert list(pool) == ["name", "unit", "free", "evictable", "promised"]
                figures = "free {free}, evictable {evictable}, promised {promised} ({unit}s)".format(**pool)
                assert f"  pool      {pool['name']}: {figures}" in words
                assert f"  {pool['name']}: {figures}" in explained
                assert f"{pool['name']}: {figures}." in page.read_text(encoding="utf-8")
            for refused in document["refused"]:
                assert refused["wanted"] > refused["left"]
                lacks = f"short of {refused['pool']}: needs {refused['wanted']}, {refused['left']} left"
                assert lacks in words
        if rules:
            assert any(pool["promised"] for pool in rounds[0]["pools"])
            assert any(document["refused"] for document in rounds)
    run = ran(trace.node, *trace.events)
    told = {pool.name: pool for pool in run.outcome.rounds[-1].pools}
    for each in run.target.snapshot().pools:
        if not each.weights:
            assert told[each.name].free + told[each.name].evictable <= each.baseline_units, "a drain only gives back"


def test_what_a_refusal_wanted_is_more_than_was_left_wherever_a_search_meets_one() -> None:
    met: Counter[str] = Counter()
    for seed in range(150):
        world, _ = example(random.Random(seed), PRESETS["tail-reserved"], space=POOLS_SPACE)
        for record in world.replay.outcome.rounds:
            for refused in record.refused:
                assert (refused.short_units is None) == (refused.short_of is None)
                if refused.short_units is not None:
                    wanted, left = refused.short_units
                    assert wanted > left
                    met[str(refused.short_of)] += 1
    assert len(met) == 3, met


def test_text_and_page_name_the_pool_that_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = ROOT / "tests/regressions/second-pool-tracking-slots.json"
    assert main(["replay", str(trace), "--rules", "tail-reserved"]) == 0
    assert "short of state_slots" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["report", str(trace), "--rules", "tail-reserved", "-o", str(page)]) == 0
    assert "short of state_slots" in page.read_text(encoding="utf-8")
    main(["report", str(trace), "-o", str(page)])
    assert "1 slot of state_slots" in page.read_text(encoding="utf-8")


def test_the_document_shows_what_explain_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "pools.md").read_text(encoding="utf-8")
    replayed, shown = (block.split("```")[0] for block in text.split("```text\n")[1:])
    assert (
        main(["replay", str(ROOT / "tests/regressions/second-pool-tracking-slots.json"), "--rules", "tail-reserved"])
        == 0
    )
    assert replayed in capsys.readouterr().out
    main(["explain", str(ROOT / "tests/regressions/second-pool-tracking-slots.json")])
    assert shown in capsys.readouterr().out
