"""Random traces whose sizes lie around the pool, the chunk and the grid, where the holes are.

`python tests/oracle/random_traces.py N SEED` prints how often each branch of section 3 was reached, as the
naive model sees it: a run that never met a load-back proves nothing.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.oracle.naive_node import PRESETS, DoesNotFit, play

Prompt = list[list[Any]]


class _Sizes:
    """The node's sizes, and token counts that sit on, just under and just over them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.page = rng.choice([1, 4, 16, 64])
        self.grid = self.page * rng.choice([1, 2, 4, 4, 8, 8])
        chunk = self.grid * rng.randint(1, 5)
        if rng.random() < 0.6:
            # A residue in pages is what an alignment leaves over.
            chunk += self.page * rng.randint(0, 7)
        odd = 0.2
        if self.grid > 2 * self.page and rng.random() < 0.12:
            # Less than a grid step: most cuts would return to their start, and where the chunk is not a
            # whole number of pages they stay inside a page.
            chunk = self.page * rng.randint(1, self.grid // self.page - 1)
            odd = 0.8
        if self.page > 1 and rng.random() < odd:
            # Not a whole number of pages: cuts inside a page, and charges that go below zero.
            chunk += rng.randint(1, self.page - 1)
        self.chunk = chunk
        self.chunking = rng.random() < 0.92
        self.pool = max(int(chunk * rng.uniform(1.2, 6)), 6 * self.page)
        if rng.random() < 0.75:
            self.pool = -(-self.pool // self.page) * self.page
        self.host: int | None = rng.choice(
            [0, 0, rng.randint(1, 12) * self.page, rng.randint(1, 2 * self.pool), self.pool // 3, None, None]
        )
        if rng.random() < 0.4:
            self.max_prefill: int | None = None
        elif rng.random() < 0.5:
            self.max_prefill = 4 * chunk
        else:
            # Tight: it runs out before the chunk does, or together with it.
            self.max_prefill = max(1, int(chunk * rng.uniform(0.3, 1.4)))

    def node(self) -> dict[str, Any]:
        return {
            "page_size": self.page,
            "checkpoint_align": self.grid,
            "chunked_prefill_size": self.chunk if self.chunking else None,
            "max_prefill_tokens": self.max_prefill,
            "pool_tokens": self.pool,
            "host_tokens": self.host,
        }

    def around(self, size: int) -> int:
        """A count near `size`: rounded to the grid or to a page, one token more or less, or inside a page."""
        rng = self.rng
        shape = rng.random()
        if shape < 0.3:
            size = size // self.grid * self.grid
        elif shape < 0.55:
            size = size // self.page * self.page
        elif shape < 0.65:
            size = size // self.page * self.page + 1
        elif shape < 0.75:
            size = size // self.page * self.page - 1
        elif shape < 0.85:
            size = size // self.grid * self.grid + self.page * rng.randint(0, 3)
        return max(1, size)

    def tiny(self) -> int:
        return self.around(self.rng.randint(1, 3 * self.page))

    def small(self) -> int:
        return self.around(self.rng.randint(1, max(1, self.chunk)))

    def long(self) -> int:
        """More than one chunk, at most what an empty pool takes (seldom: a little more)."""
        top = self.pool - 2 * self.page if self.rng.random() < 0.9 else self.pool + self.page
        if self.chunk % self.page and self.rng.random() < 0.3:
            # Full chunks, and then a last one that fits the chunk in tokens, but not in pages.
            full = max(self.chunk // self.grid * self.grid, self.chunk // self.page * self.page % self.grid)
            last = self.rng.randint(self.chunk // self.page * self.page + 1, self.chunk)
            return full * self.rng.randint(1, 2) + last
        return self.around(self.rng.randint(min(self.chunk, top), max(self.chunk, top)))

    def prefix(self) -> int:
        """How much of a shared segment."""
        rng = self.rng
        top = rng.choice([self.grid, self.chunk, self.pool // 2, self.pool])
        return self.around(rng.randint(1, max(1, top)))


def _random_rules(rng: random.Random, sizes: _Sizes) -> str | dict[str, Any]:
    if rng.random() < 0.55:
        return rng.choice(["upstream", "aligned", "aligned", "tail-reserved"])
    if rng.random() < 0.4:
        # The hole is open, and the shortage waits.
        return {"checkpoint_align": "node", "on_shortage": "defer"}
    rules: dict[str, Any] = {}
    if rng.random() < 0.6:
        rules["checkpoint_align"] = rng.choice(["node", "node", "page_size", sizes.page * rng.choice([1, 2, 3, 4, 8])])
    if rng.random() < 0.5:
        rules["reserve_tail"] = rng.random() < 0.5
    if rng.random() < 0.5:
        rules["spend_gap"] = rng.random() < 0.5
    if rng.random() < 0.5:
        rules["truncation_align"] = rng.choice([None, sizes.page * rng.randint(1, 8), sizes.grid])
    if rng.random() < 0.8:
        rules["on_shortage"] = rng.choice(["force", "defer", "defer"])
    return rules


class _Writer:
    """Writes the events of one trace and keeps what a prompt may share."""

    def __init__(self, rng: random.Random, sizes: _Sizes) -> None:
        self.rng = rng
        self.sizes = sizes
        self.events: list[dict[str, Any]] = []
        self.known: list[Prompt] = []
        self.names: list[str] = []
        self.held: list[tuple[str, int]] = []
        self.shared = [f"doc{i}" for i in range(rng.randint(1, 3))]

    def prompt_of(self, tokens: int, prompt: Prompt) -> Prompt:
        """The first `tokens` tokens of a prompt."""
        taken: Prompt = []
        for segment, length in prompt:
            take = min(length, tokens - sum(n for _, n in taken))
            if take > 0:
                taken.append([segment, take])
        return taken

    def new_prompt(self) -> Prompt:
        rng, sizes = self.rng, self.sizes
        own = f"own{len(self.names)}"
        shape = rng.random()
        if shape < 0.2:
            prompt = [[own, sizes.long()]]
        elif shape < 0.3:
            prompt = [[own, sizes.small()]]
        elif shape < 0.45:
            prompt = [[rng.choice(self.shared), sizes.prefix()]]
        elif shape < 0.6:
            prompt = [[rng.choice(self.shared), sizes.prefix()], [own, sizes.tiny()]]
        elif shape < 0.7 or not self.known:
            prompt = [[rng.choice(self.shared), sizes.prefix()], [own, sizes.long()]]
        else:
            # Another's prompt, or a part of it, perhaps continued.
            other = rng.choice(self.known)
            tokens = sum(n for _, n in other)
            keep = rng.choice([tokens, tokens, sizes.around(rng.randint(1, tokens))])
            prompt = self.prompt_of(keep, other)
            tail = rng.random()
            if tail < 0.5:
                prompt = [*prompt, [own, sizes.tiny()]]
            elif tail < 0.65:
                prompt = [*prompt, [own, sizes.small()]]
            elif tail < 0.75:
                prompt = [*prompt, [prompt[-1][0], sizes.small()]]
        if rng.random() < 0.03:
            prompt = [*prompt[:1], ["nothing", 0], *prompt[1:]]
        return prompt

    def submit(self, prompt: Prompt) -> None:
        name = f"r{len(self.names)}"
        self.names.append(name)
        self.known.append(prompt)
        self.events.append({"event": "submit", "request": name, "prompt": prompt})

    def cached(self, tier: str, prompt: Prompt, locked: bool = False) -> None:
        event: dict[str, Any] = {"event": "cached", "tier": tier, "prompt": prompt}
        if locked:
            event["locked"] = True
        self.known.append(prompt)
        self.events.append(event)

    def cached_prompt(self) -> Prompt:
        rng = self.rng
        if self.known and rng.random() < 0.5:
            other = rng.choice(self.known)
            tokens = sum(n for _, n in other)
            return self.prompt_of(self.sizes.around(rng.randint(1, tokens)), other)
        prompt = [[rng.choice(self.shared), self.sizes.prefix()]]
        if rng.random() < 0.3:
            prompt.append([rng.choice(self.shared), self.sizes.small()])
        return prompt

    def before_the_first_round(self) -> None:
        """What takes room away for good comes first: later it would break promises that were right."""
        rng, sizes = self.rng, self.sizes
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            tier = rng.choice(["host", "host", "device"]) if sizes.host != 0 else "device"
            locked = tier == "device" and rng.random() < 0.25
            self.cached(tier, self.cached_prompt(), locked)
        while rng.random() < 0.15:
            tokens = sizes.around(rng.randint(1, max(1, sizes.pool // 2)))
            name = f"hold{len(self.events)}"
            self.held.append((name, tokens))
            self.events.append({"event": "hold", "name": name, "tokens": tokens})

    def release(self) -> None:
        name, tokens = self.held.pop(self.rng.randrange(len(self.held)))
        self.events.append({"event": "release", "name": name, "tokens": tokens})

    def anything(self) -> None:
        """One event of a trace that is under way."""
        rng, sizes = self.rng, self.sizes
        draw = rng.random()
        if draw < 0.42 or not self.names:
            self.submit(self.new_prompt())
        elif draw < 0.72:
            self.events.append({"event": "round"})
        elif draw < 0.82:
            self.events.append({"event": "transferred", "request": rng.choice(self.names)})
        elif draw < 0.88:
            self.events.append({"event": "abort", "request": rng.choice(self.names)})
        elif draw < 0.93:
            tier = "device" if sizes.host == 0 else rng.choice(["host", "host", "device"])
            self.cached(tier, self.cached_prompt())
        elif draw < 0.97 and self.held:
            self.release()
        else:
            self.events.append({"event": "drain"})

    def crash_recipe(self) -> None:
        """The post-mortem's three: a whole one, a long one that is cut, and one that computes little and
        takes much, by a load-back or by a lock.  Loosely, so that it fails in many ways."""
        rng, sizes = self.rng, self.sizes
        tier = "device" if sizes.host == 0 else rng.choice(["host", "host", "device"])
        room = sizes.pool
        if rng.random() < 0.3:
            taken = sizes.around(rng.randint(1, max(1, sizes.pool // 2)))
            room -= taken
            if rng.random() < 0.5:
                self.held.append(("first", taken))
                self.events.append({"event": "hold", "name": "first", "tokens": taken})
            else:
                self.cached("device", [["kept", taken]], True)
        hit = sizes.around(rng.randint(max(1, room // 8), max(2, room * 2 // 3)))
        self.cached(tier, [["hit", hit]])
        if rng.random() < 0.8:
            self.submit([["first", sizes.small()]])
        self.submit([["long", sizes.around(rng.randint(max(1, room // 3), max(2, room - sizes.page)))]])
        for i in range(rng.choice([1, 1, 1, 2])):
            self.submit([["hit", hit], [f"little{i}", sizes.tiny()]])

    def aimed_recipe(self) -> None:
        """The same three, with sizes that work out: the cut leaves a gap, the long one's tail and the
        newcomer each fit, both do not.  Still only aimed: `around` and the events after it may miss."""
        rng, sizes = self.rng, self.sizes
        page, grid = sizes.page, sizes.grid
        budget = sizes.chunk // page * page
        gap = page * rng.randint(1, max(1, grid // page - 1))
        cut = grid * rng.randint(1, max(1, (budget - gap) // grid))
        first = max(1, budget - cut - gap)
        room = sizes.pool // page * page - -(-first // page) * page - 3 * page
        tier = "device" if sizes.host == 0 else "host"
        long = max(1, room - rng.randint(0, max(0, room - cut) // 2))
        most = max(grid, room - cut - 2 * page)
        hit = max(grid, rng.randint(min(room - long, most), most) // grid * grid)
        self.cached(tier, [["hit", hit]])
        if first > 1:
            self.submit([["first", first]])
        self.submit([["long", long]])
        self.submit([["hit", hit], ["little", rng.randint(1, gap)]])


def _drop_what_does_not_fit(document: dict[str, Any]) -> None:
    """Remove each `hold` and device-side `cached` that the pool could not take, under any rules.

    The comparison replays a trace under all presets, and where things stand when the event comes differs
    from one to the next.
    """
    for rules in [document["rules"], *PRESETS]:
        while True:
            try:
                play(document, rules)
            except DoesNotFit as misfit:
                gone = document["events"].pop(misfit.event_index)
                if gone["event"] == "hold":
                    document["events"] = [
                        event
                        for event in document["events"]
                        if event["event"] != "release" or event["name"] != gone["name"]
                    ]
            else:
                break


def random_trace(rng: random.Random) -> dict[str, Any]:
    """One valid trace document."""
    while True:
        sizes = _Sizes(rng)
        writer = _Writer(rng, sizes)
        wanted = rng.randint(4, 25)
        drain = rng.random() < 0.85
        opening = rng.random()
        if opening < 0.2:
            writer.crash_recipe()
        elif opening < 0.45:
            writer.aimed_recipe()
        else:
            writer.before_the_first_round()
            # Some requests wait together: a batch of one meets nobody.
            for _ in range(rng.randint(0, 4)):
                writer.submit(writer.new_prompt())
        while len(writer.events) < wanted - drain:
            writer.anything()
        if drain:
            writer.events.append({"event": "drain"})
        document = {
            "format": "kvledger-trace/1",
            "title": "A random trace",
            "node": sizes.node(),
            "rules": _random_rules(rng, sizes),
            "events": writer.events[:25],
        }
        _drop_what_does_not_fit(document)
        if len(document["events"]) >= 4:
            return document


def _main(count: int, seed: int) -> None:
    """Print in how many of `count` traces each thing was seen at least once."""
    seen: Counter[str] = Counter()
    worst: tuple[float, int] = (0.0, 0)
    rounds = 0
    events = 0
    for index in range(count):
        document = random_trace(random.Random(f"{seed}:{index}"))
        events += len(document["events"])
        started = time.perf_counter()
        node = play(document)
        worst = max(worst, (time.perf_counter() - started, index))
        outcome = node.outcome()
        rounds += len(outcome["rounds"])
        here = {f"reached: {branch}" for branch in node.reached}
        rules = document["rules"]
        label = rules if isinstance(rules, str) else "a rules object"
        here.add(f"rules: {label}")
        here.add(f"verdict: {outcome['verdict']}")
        here.add(f"verdict under {label}: {outcome['verdict']}")
        for name in PRESETS:
            here.add(f"verdict when replayed under {name}: {play(document, name).outcome()['verdict']}")
        if outcome["rejected_at_submit"]:
            here.add("rejected at submit")
        for event in document["events"]:
            tier = f", {event['tier']}" if "tier" in event else ""
            here.add(f"event: {event['event']}{tier}{', locked' if event.get('locked') else ''}")
        if node.reached["step 2: deferred"]:
            here.add(f"deferred, verdict {outcome['verdict']}")
        for record in outcome["rounds"]:
            here.add(f"budget_state: {record['budget_state']}")
            if record["batch_is_full"]:
                here.add("batch_is_full")
            if record["forced"]:
                here.add(f"forced, verdict {outcome['verdict']}")
            for entry in record["admitted"]:
                here.add(f"admitted: {entry['kind']}{', load-back' if entry['load_back'] else ''}")
                if entry["end"] % document["node"]["page_size"]:
                    here.add(f"admitted: {entry['kind']}, ends inside a page")
            for entry in record["refused"]:
                here.add(f"refused: {entry['reason']}")
        seen.update(here)
    print(f"{count} traces, seed {seed}: {events} events, {rounds} rounds; slowest replay {worst[0]:.2f} s")
    for what in sorted(seen):
        print(f"{seen[what]:7d} {100 * seen[what] / count:6.1f} %  {what}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python tests/oracle/random_traces.py N SEED")
    _main(int(sys.argv[1]), int(sys.argv[2]))
