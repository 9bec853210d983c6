"""The naive model against the numbers of section 3, worked out by hand, and against its own bookkeeping."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.naive_node import OUTSIDE, PRESETS, ROOT, NaiveNode, prompt_up_to, replay
from tests.oracle.random_traces import random_trace


def trace(node: dict[str, Any], events: list[dict[str, Any]], rules: str | dict[str, Any]) -> dict[str, Any]:
    """A document; `node` names only what differs from page 64, align 256, chunk 4096 and no host."""
    full = {
        "page_size": 64,
        "checkpoint_align": 256,
        "chunked_prefill_size": 4096,
        "max_prefill_tokens": 16384,
        "pool_tokens": 12032,
        "host_tokens": 0,
    }
    return {"format": "kvledger-trace/1", "title": "t", "node": full | node, "rules": rules, "events": events}


def cached(tier: str, *prompt: list[Any], locked: bool = False) -> dict[str, Any]:
    return {"event": "cached", "tier": tier, "prompt": list(prompt)} | ({"locked": True} if locked else {})


def submit(name: str, *prompt: list[Any]) -> dict[str, Any]:
    return {"event": "submit", "request": name, "prompt": list(prompt)}


ROUND = {"event": "round"}
DRAIN = {"event": "drain"}

# The three cases, written out so that these tests need no file; the shared ones are checked to agree.
CASES: dict[str, dict[str, Any]] = {
    "incident-2026-11-02": trace(
        {"chunked_prefill_size": 16384, "pool_tokens": 121408, "host_tokens": None},
        [
            cached("device", ["keim", 86784], locked=True),
            cached("host", ["xpkq", 15360]),
            submit("v9uj", ["v9uj", 13888]),
            submit("1keim", ["keim", 94024]),
            submit("xpkq", ["xpkq", 15545]),
            DRAIN,
        ],
        "aligned",
    ),
    "worked-example": trace(
        {"host_tokens": None},
        [
            cached("host", ["doc", 6144]),
            submit("A", ["a", 1088]),
            submit("B", ["b", 8000]),
            submit("C", ["doc", 6144], ["c", 128]),
            DRAIN,
        ],
        "aligned",
    ),
    "device-hit-lock": trace(
        {},
        [
            cached("device", ["doc", 6144]),
            submit("A", ["a", 1088]),
            submit("B", ["b", 8000]),
            submit("C", ["doc", 6144], ["c", 128]),
            DRAIN,
        ],
        "aligned",
    ),
}


def chunks(outcome: dict[str, Any], name: str) -> list[int]:
    return [
        entry["end"] - entry["start"]
        for record in outcome["rounds"]
        for entry in record["admitted"]
        if entry["request"] == name
    ]


@pytest.mark.parametrize("case", sorted(CASES))
def test_cases_written_out_here_are_the_shared_ones(case: str) -> None:
    for folder in Path(__file__).resolve().parents:
        path = folder / "shared" / "cases" / f"{case}.json"
        if path.exists():
            shared = json.loads(path.read_text())
            for key in ("node", "rules", "events"):
                assert CASES[case][key] == shared[key]
            assert shared["expect"] == {"upstream": "ok", "aligned": "oom", "tail-reserved": "ok"}
            return
    pytest.skip("no shared/cases here")


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize(("preset", "verdict"), [("upstream", "ok"), ("aligned", "oom"), ("tail-reserved", "ok")])
def test_verdicts_of_the_cases(case: str, preset: str, verdict: str) -> None:
    outcome = replay(CASES[case], preset)
    assert outcome["verdict"] == verdict
    assert (outcome["violation"] is None) == (verdict == "ok")
    if verdict == "ok":
        requests = {e["request"] for e in CASES[case]["events"] if e["event"] == "submit"}
        assert all(chunks(outcome, name) for name in requests)


def test_incident_under_aligned() -> None:
    outcome = replay(CASES["incident-2026-11-02"], "aligned")
    first, second, third, fourth = outcome["rounds"]
    assert first["admitted"] == [
        {"request": "v9uj", "kind": "whole", "start": 0, "end": 13888, "load_back": 0},
        {"request": "1keim", "kind": "truncated", "start": 86784, "end": 89088, "load_back": 0},
        {"request": "xpkq", "kind": "whole", "start": 15360, "end": 15545, "load_back": 15360},
    ]
    # After 1keim 18304 and 18303; xpkq loads back 15360 at once and is charged 192 + 64 and a token.
    assert first["baseline"] == 34624 - 15360
    assert first["cur_rem_tokens"] == 18304 - 15360 - 192 - 64
    assert first["rem_total_tokens"] == 18303 - 15360 - 192 - 64 - 1
    assert first["rem_chunk_tokens"] == 0
    assert chunks(outcome, "1keim") == [2304, 2816, 64, 2056]
    assert [record["forced"] for record in outcome["rounds"]] == [False, False, False, True]
    assert (first["free"], second["free"], third["free"], fourth["free"]) == (2880, 64, 0, 0)
    assert outcome["violation"] == {
        "kind": "oom",
        "round": 4,
        "request": "1keim",
        "wanted": 2056,
        "free": 0,
        "evictable": 0,
    }


def test_incident_before_xpkq() -> None:
    document = copy.deepcopy(CASES["incident-2026-11-02"])
    del document["events"][4]
    first = replay(document, "aligned")["rounds"][0]
    assert first["baseline"] == 34624
    assert first["cur_rem_tokens"] == 18304
    assert first["rem_total_tokens"] == 18303
    assert first["rem_chunk_tokens"] == 192


def test_incident_under_the_fix() -> None:
    outcome = replay(CASES["incident-2026-11-02"], "tail-reserved")
    first = outcome["rounds"][0]
    assert first["baseline"] == 34624
    assert first["cur_rem_tokens"] == 18304
    assert first["rem_total_tokens"] == 13310
    assert first["refused"] == [{"request": "xpkq", "reason": "NO_TOKEN"}]
    assert (first["batch_is_full"], first["budget_state"]) == (True, "CONTINUE")
    assert chunks(outcome, "1keim") == [2304, 4936]
    assert chunks(outcome, "xpkq") == [185]
    assert not any(record["forced"] for record in outcome["rounds"])


def test_incident_under_upstream_uses_the_chunk_up() -> None:
    first = replay(CASES["incident-2026-11-02"], "upstream")["rounds"][0]
    assert [entry["request"] for entry in first["admitted"]] == ["v9uj", "1keim"]
    assert (first["rem_chunk_tokens"], first["budget_state"]) == (0, "OTHER")
    assert (first["refused"], first["batch_is_full"]) == ([], False)


def test_spending_the_gap_also_saves_the_incident() -> None:
    outcome = replay(CASES["incident-2026-11-02"], {"spend_gap": True})
    assert outcome["verdict"] == "ok"
    assert outcome["rounds"][0]["rem_chunk_tokens"] == 0


def test_deferring_the_shortage_waits_for_the_transfers() -> None:
    outcome = replay(CASES["incident-2026-11-02"], {"on_shortage": "defer"})
    assert outcome["verdict"] == "ok"
    fourth = outcome["rounds"][3]
    # Baseline 0, and the remainder of 2056 reserved: 33 pages and the first token.
    assert (fourth["baseline"], fourth["rem_total_tokens"], fourth["cur_rem_tokens"]) == (0, -2113, 0)
    assert (fourth["admitted"], fourth["forced"]) == ([], False)


@pytest.mark.parametrize("case", ["worked-example", "device-hit-lock"])
def test_worked_example(case: str) -> None:
    before = replay(CASES[case], "aligned")["rounds"][0]
    assert [entry["request"] for entry in before["admitted"]] == ["A", "B", "C"]
    assert before["admitted"][1]["end"] == 2816
    after = replay(CASES[case], "tail-reserved")["rounds"][0]
    assert after["refused"] == [{"request": "C", "reason": "NO_TOKEN"}]
    # 12032 - (1088 + 64 + 1) - (2816 + 64) - (5184 + 1), the text's 2912 with its pages and tokens.
    assert after["rem_total_tokens"] == 2814
    assert after["cur_rem_tokens"] == 12032 - 1152 - 2880


def test_unit_case_of_a_cut_request() -> None:
    # Page 64, chunk 704: 2000 is cut at 512, 192 of budget are left, a newcomer of 1024 + 100 would fit.
    events = [
        cached("host", ["hit", 1024]),
        submit("long", ["long", 2000]),
        submit("new", ["hit", 1024], ["new", 100]),
        ROUND,
    ]
    document = trace({"chunked_prefill_size": 704, "pool_tokens": 2624, "host_tokens": None}, events, "aligned")
    assert [e["request"] for e in replay(document)["rounds"][0]["admitted"]] == ["long", "new"]
    fixed = replay(document, "tail-reserved")["rounds"][0]
    assert fixed["refused"] == [{"request": "new", "reason": "NO_TOKEN"}]
    assert fixed["baseline"] == 2624, "nothing was loaded back"
    assert fixed["rem_total_tokens"] == 2624 - (512 + 64) - (1536 + 1)


def test_unit_case_of_a_resumed_request() -> None:
    events = [
        submit("long", ["long", 2000]),
        ROUND,
        cached("host", ["hit", 1024]),
        submit("new", ["hit", 1024], ["new", 100]),
        ROUND,
    ]
    document = trace({"chunked_prefill_size": 704, "pool_tokens": 2624, "host_tokens": None}, events, "aligned")
    assert [e["request"] for e in replay(document)["rounds"][1]["admitted"]] == ["long", "new"]
    fixed = replay(document, "tail-reserved")["rounds"][1]
    assert fixed["refused"] == [{"request": "new", "reason": "NO_TOKEN"}]
    # [512, 1024) now, 976 left: 1024 and the first token.
    assert fixed["baseline"] == 2624 - 512
    assert fixed["rem_total_tokens"] == 2624 - 512 - (512 + 64) - (1024 + 1)


def test_the_last_token_is_never_a_hit() -> None:
    # 512 cached and a prompt of exactly 512: seven pages are found, the grid leaves 256.
    events = [cached("device", ["doc", 512]), submit("r", ["doc", 512]), ROUND]
    entry = replay(trace({}, events, "aligned"))["rounds"][0]["admitted"][0]
    assert (entry["start"], entry["end"]) == (256, 512)
    entry = replay(trace({}, events, "upstream"))["rounds"][0]["admitted"][0]
    assert (entry["start"], entry["end"]) == (448, 512)


def test_a_hit_across_both_tiers() -> None:
    # Three pages on the device and two on the host: the grid takes four, one of them loaded back.
    events = [
        cached("device", ["doc", 192]),
        cached("host", ["doc", 320]),
        submit("r", ["doc", 400]),
        ROUND,
    ]
    record = replay(trace({"host_tokens": None}, events, "aligned"))["rounds"][0]
    assert record["admitted"] == [{"request": "r", "kind": "whole", "start": 256, "end": 400, "load_back": 64}]
    # Six full pages, the fifth of which was on the host, and a private one for the last 16 tokens.
    assert record["protected"] == 384
    assert record["free"] == 12032 - 384 - 64


def test_positions_restart_in_every_entry() -> None:
    assert prompt_up_to([["d", 6000], ["none", 0], ["d", 144]], 6144) == (("d", 6000), ("d", 144))
    assert prompt_up_to([["d", 6144]], 6000) == prompt_up_to([["d", 6000], ["d", 144]], 6000)


def test_entry_check() -> None:
    events = [submit("fits", ["a", 12032 - 66]), submit("not", ["b", 12032 - 65])]
    assert replay(trace({}, events, "aligned"))["rejected_at_submit"] == ["not"]


def test_input_budget_without_chunking() -> None:
    node: dict[str, Any] = {"chunked_prefill_size": None, "max_prefill_tokens": 512}
    events = [submit("big", ["a", 600]), submit("b", ["b", 64]), ROUND]
    # 640 >= 512, but the batch is empty; then the input budget is below zero.
    record = replay(trace(node, events, "aligned"))["rounds"][0]
    assert [entry["request"] for entry in record["admitted"]] == ["big"]
    assert (record["rem_chunk_tokens"], record["budget_state"]) == (None, "OTHER")
    events = [submit("a", ["a", 64]), submit("b", ["b", 448]), ROUND]
    assert replay(trace(node, events, "aligned"))["rounds"][0]["refused"] == [{"request": "b", "reason": "OTHER"}]


def test_truncation_align() -> None:
    node = {"chunked_prefill_size": 704}
    events = [submit("a", ["a", 300]), submit("b", ["b", 2000]), ROUND]
    # 704 - 320 = 384; to a multiple of 128 it stays 384, on the grid 256.
    rules: dict[str, Any] = {"truncation_align": 128}
    assert replay(trace(node, events, rules))["rounds"][0]["admitted"][1]["end"] == 256
    rules = {"truncation_align": 128, "checkpoint_align": "page_size"}
    assert replay(trace(node, events, rules))["rounds"][0]["admitted"][1]["end"] == 384
    rules = {"truncation_align": 448}
    assert replay(trace(node, events, rules))["rounds"][0]["refused"] == [{"request": "b", "reason": "OTHER"}]


def test_stuck_and_what_follows() -> None:
    events: list[dict[str, Any]] = [
        {"event": "hold", "name": "h", "tokens": 6000},
        submit("r", ["r", 8000]),
        DRAIN,
        {"event": "release", "name": "h", "tokens": 6000},
        DRAIN,
    ]
    outcome = replay(trace({}, events, "aligned"))
    assert outcome["verdict"] == "stuck"
    assert (outcome["violation"]["round"], outcome["violation"]["free"]) == (1, 12032 - 6016)
    assert chunks(outcome, "r") == [4096, 3904]


def test_least_recently_used_leaf_goes_first_and_stays_on_the_host() -> None:
    node = NaiveNode(trace({"pool_tokens": 640, "host_tokens": 128}, [], "aligned")["node"], "aligned")
    node.play(
        [
            cached("device", ["x", 192]),
            cached("device", ["y", 256]),
            cached("device", ["x", 128]),  # recent again, but for its third page
            {"event": "hold", "name": "h", "tokens": 320},
        ]
    )
    # Two pages short.  The last of x is the oldest leaf; the second is recent now, so the last of y is next.
    assert sorted(node.device) == [(("x", 64),), (("x", 128),), (("y", 64),), (("y", 128),), (("y", 192),)]
    assert list(node.host) == [(("x", 192),), (("y", 256),)]
    node.play([{"event": "hold", "name": "h2", "tokens": 1}])
    # The host is full: its oldest childless page, the last of x, makes room for the third page of y.
    assert list(node.host) == [(("y", 256),), (("y", 192),)]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_bookkeeping_over_random_traces(preset: str) -> None:
    """Conservation, one tier per page, closed prefixes, nothing held at rest."""
    for seed in range(150):
        document = random_trace(random.Random(seed))
        node = NaiveNode(document["node"], preset)
        for event in document["events"]:
            node.play([event])
            assert node.free() >= 0
            assert not set(node.device) & set(node.host)
            assert all(page["parent"] in node.device or page["parent"] == ROOT for page in node.device.values())
            assert all(
                page["parent"] in node.device or page["parent"] in node.host or page["parent"] == ROOT
                for page in node.host.values()
            )
            assert node.host_pages is None or len(node.host) <= node.host_pages
            # A lock covers everything above it, so whatever is unlocked can be evicted leaf by leaf.
            for page in node.device.values():
                if page["parent"] != ROOT:
                    assert page["locks"] <= node.device[page["parent"]]["locks"]
            for name, request in node.requests.items():
                alive = name == node.half_done or name in node.in_flight
                assert request["private"] in ((0, 1) if alive else (0,)) or node.oom is not None
            if node.oom is not None:
                break
        if document["events"][-1]["event"] == "drain" and node.oom is None and node.half_done is None:
            assert node.in_flight == []
            assert all(page["locks"] <= {OUTSIDE} for page in node.device.values())


def test_replay_changes_nothing_and_repeats() -> None:
    for seed in range(50):
        document = random_trace(random.Random(seed))
        before = copy.deepcopy(document)
        assert document == random_trace(random.Random(seed))
        assert replay(document) == replay(document)
        assert document == before
        assert 4 <= len(document["events"]) <= 25
