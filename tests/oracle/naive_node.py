"""A second, deliberately naive model of section 3, to compare an implementation with.

Everything is a plain dict or list and every sum is taken afresh.  A cached page is identified by the
whole prompt up to its end, so no tree is needed to know what is a prefix of what.  The order of the code
is the order of the words of section 3; nothing here is meant to be fast.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

# A prompt up to some token: ((segment, tokens), ...).  Positions restart at 0 in every entry, so two
# token sequences are equal exactly when these are.
Key = tuple[tuple[str, int], ...]

PRESETS: dict[str, dict[str, Any]] = {
    "upstream": {"checkpoint_align": "page_size", "reserve_tail": False},
    "aligned": {"checkpoint_align": "node", "reserve_tail": False},
    "tail-reserved": {"checkpoint_align": "node", "reserve_tail": True},
}

# On a prefill node a request yields one token after its prompt (step 3).
FIRST_TOKEN = 1

# The holder of pages that were `cached` with `locked`: nobody inside the trace ever lets them go.
OUTSIDE = ("outside the trace",)

# The parent of a prompt's first page.
ROOT: Key = ()


class DoesNotFit(ValueError):
    """A `hold` or a device-side `cached` that the pool cannot take: such a trace means nothing."""

    def __init__(self, event_index: int) -> None:
        super().__init__(f"events[{event_index}]: does not fit the pool")
        self.event_index = event_index


class OutOfMemory(Exception):
    """Step 8 found too few pages; the replay ends here."""

    def __init__(self, request: str, wanted: int) -> None:
        super().__init__(f"{request}: {wanted}")
        self.request = request
        self.wanted = wanted


def prompt_up_to(prompt: list[list[Any]], tokens: int) -> Key:
    """The identity of the first `tokens` tokens of a prompt."""
    runs: list[tuple[str, int]] = []
    for segment, length in prompt:
        take = min(length, tokens - sum(n for _, n in runs))
        if take > 0:
            runs.append((segment, take))
    return tuple(runs)


class NaiveNode:
    """One prefill node.  All figures of `record`s are in tokens, all counts in here in pages."""

    def __init__(self, node: dict[str, Any], rules: str | dict[str, Any]) -> None:
        self.page_size: int = node["page_size"]
        self.chunked_prefill_size: int | None = node["chunked_prefill_size"]
        self.max_prefill_tokens: int | None = node["max_prefill_tokens"]
        self.pool_pages: int = node["pool_tokens"] // self.page_size
        host_tokens: int | None = node["host_tokens"]
        self.host_pages: int | None = None if host_tokens is None else host_tokens // self.page_size

        chosen = PRESETS[rules] if isinstance(rules, str) else rules
        align = chosen.get("checkpoint_align", "node")
        if align == "node":
            align = node["checkpoint_align"]
        elif align == "page_size":
            align = self.page_size
        self.checkpoint_align: int = align
        self.reserve_tail: bool = chosen.get("reserve_tail", False)
        self.spend_gap: bool = chosen.get("spend_gap", False)
        self.truncation_align: int | None = chosen.get("truncation_align", None)
        self.on_shortage: str = chosen.get("on_shortage", "force")

        # page identity -> {"parent", "used", "locks"}; a page is in one tier at a time.
        self.device: dict[Key, dict[str, Any]] = {}
        self.host: dict[Key, dict[str, Any]] = {}
        self.holds: dict[str, int] = {}
        self.clock = 0

        self.requests: dict[str, dict[str, Any]] = {}
        self.waiting: list[str] = []
        self.half_done: str | None = None
        self.in_flight: list[str] = []

        self.rounds: list[dict[str, Any]] = []
        self.rejected_at_submit: list[str] = []
        self.oom: dict[str, Any] | None = None
        self.stuck: dict[str, Any] | None = None
        # Which branches of section 3 were taken, for the statistics of the trace generator only.
        self.reached: Counter[str] = Counter()

    # ---------------------------------------------------------------- arithmetic

    def ceil(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    def floor_page(self, tokens: int) -> int:
        return tokens // self.page_size * self.page_size

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    # ---------------------------------------------------------------- pages

    def free(self) -> int:
        private: int = sum(request["private"] for request in self.requests.values())
        return self.pool_pages - len(self.device) - private - sum(self.holds.values())

    def evictable(self) -> int:
        return len([page for page in self.device.values() if not page["locks"]])

    def protected(self) -> int:
        return len([page for page in self.device.values() if page["locks"]])

    def full_pages(self, prompt: list[list[Any]]) -> list[Key]:
        """The identities of a prompt's full pages, first to last."""
        tokens = sum(n for _, n in prompt)
        ends = range(self.page_size, tokens + 1, self.page_size)
        return [prompt_up_to(prompt, end) for end in ends]

    def trim_host(self, pinned: set[Key]) -> bool:
        """Drop least-recently-used childless host pages until one more fits; False: it never will."""
        if self.host_pages is None:
            return True
        while len(self.host) >= self.host_pages:
            parents = {page["parent"] for page in [*self.device.values(), *self.host.values()]}
            childless = [key for key in self.host if key not in parents and key not in pinned]
            if not childless:
                if self.host:
                    self.reached["host: full and nothing droppable"] += 1
                return False
            self.reached["host: trimmed"] += 1
            del self.host[min(childless, key=lambda key: self.host[key]["used"])]
        return True

    def evict_one(self, pinned: set[Key]) -> None:
        """Step 8: the least-recently-used unlocked leaf goes; step 9: to the host, if there is room.

        A leaf has no child on the device; children on the host do not keep it there.  Eviction does not
        touch recency.  Pages in `pinned` are being loaded back and cannot be dropped from the host.
        """
        parents = {page["parent"] for page in self.device.values()}
        leaves = [key for key, page in self.device.items() if key not in parents and not page["locks"]]
        victim = min(leaves, key=lambda key: self.device[key]["used"])
        page = self.device.pop(victim)
        if self.trim_host(pinned):
            self.reached["evicted: to the host"] += 1
            self.host[victim] = {"parent": page["parent"], "used": page["used"]}
        else:
            self.reached["evicted: gone"] += 1
            gone = {victim}
            while True:
                below = [key for key, other in self.host.items() if other["parent"] in gone]
                if not below:
                    break
                for key in below:
                    gone.add(key)
                    del self.host[key]

    def make_free(self, pages: int, pinned: set[Key]) -> bool:
        """Evict until `pages` pages are free; if that cannot be, evict nothing and say False."""
        if pages > self.free() + self.evictable():
            return False
        while self.free() < pages:
            self.evict_one(pinned)
        return True

    def insert_on_device(self, key: Key, parent: Key, used: int) -> dict[str, Any]:
        """Put a page that somebody has just allocated or computed into the prefix tree.

        A page already there is shared, which counts as inserting it; a copy on the host becomes the
        device page.
        """
        if key in self.host:
            self.reached["insert: host copy became the device page"] += 1
            del self.host[key]
        if key not in self.device:
            self.device[key] = {"parent": parent, "used": used, "locks": set()}
        self.device[key]["used"] = used
        return self.device[key]

    # ---------------------------------------------------------------- events

    def cached(self, event_index: int, event: dict[str, Any]) -> None:  # noqa: PLR0912
        keys = self.full_pages(event["prompt"])
        parents = [ROOT, *keys][: len(keys)]
        if event["tier"] == "device":
            # Allocated like any others.  What is on the device already must not be evicted for its own
            # continuation, so it is locked for as long as this takes.
            present = [key for key in keys if key in self.device]
            for key in present:
                self.device[key]["locks"].add(event_index)
            if self.free() < len(keys) - len(present):
                self.reached["cached: evicted"] += 1
            fits = self.make_free(len(keys) - len(present), set())
            for key in present:
                self.device[key]["locks"].discard(event_index)
            if not fits:
                raise DoesNotFit(event_index)
            used = self.tick()
            for key, parent in zip(keys, parents, strict=True):
                page = self.insert_on_device(key, parent, used)
                if event.get("locked", False):
                    page["locks"].add(OUTSIDE)
        else:
            used = self.tick()
            for key, parent in zip(keys, parents, strict=True):
                if key in self.device:
                    self.device[key]["used"] = used
                elif key in self.host:
                    self.host[key]["used"] = used
                elif self.trim_host(set(keys)):
                    self.host[key] = {"parent": parent, "used": used}
                else:
                    self.reached["cached: host full"] += 1
                    break

    def hold(self, event_index: int, event: dict[str, Any]) -> None:
        pages = self.ceil(event["tokens"]) // self.page_size
        if not self.make_free(pages, set()):
            raise DoesNotFit(event_index)
        self.holds[event["name"]] = self.holds.get(event["name"], 0) + pages

    def release(self, event: dict[str, Any]) -> None:
        held = self.holds.pop(event["name"])
        pages = held if "tokens" not in event else self.ceil(event["tokens"]) // self.page_size
        if held > pages:
            self.holds[event["name"]] = held - pages

    def submit(self, event: dict[str, Any]) -> None:
        name = event["request"]
        tokens: int = sum(n for _, n in event["prompt"])
        if tokens + FIRST_TOKEN + self.page_size >= self.pool_pages * self.page_size:
            self.rejected_at_submit.append(name)
            return
        self.requests[name] = {
            "tokens": tokens,
            "keys": self.full_pages(event["prompt"]),
            "done": 0,
            "private": 0,
        }
        self.waiting.append(name)

    def end_request(self, name: str) -> None:
        """Step 9: its locks go, its cached pages become evictable, its partly filled page is freed."""
        for page in self.device.values():
            page["locks"].discard(name)
        self.requests[name]["private"] = 0

    def transferred(self, name: str) -> None:
        if name not in self.in_flight:
            self.reached["transferred: not in flight"] += 1
            return
        self.reached["transferred"] += 1
        self.in_flight.remove(name)
        self.end_request(name)

    def abort(self, name: str) -> None:
        if name in self.waiting:
            self.reached["abort: waiting"] += 1
            self.waiting.remove(name)
        elif name == self.half_done:
            self.reached["abort: half done"] += 1
            self.half_done = None
        elif name in self.in_flight:
            self.reached["abort: in flight"] += 1
            self.in_flight.remove(name)
        else:
            self.reached["abort: ended"] += 1
            return
        self.end_request(name)

    def drain(self) -> None:
        while self.waiting or self.half_done is not None:
            self.round()
            if self.rounds[-1]["admitted"]:
                continue
            if not self.in_flight:
                self.reached["drain: stuck"] += 1
                if self.stuck is None:
                    # Whoever should have gone first is the one that is stuck.
                    self.stuck = {
                        "kind": "stuck",
                        "round": len(self.rounds),
                        "request": self.half_done if self.half_done is not None else self.waiting[0],
                        "wanted": None,
                        "free": self.free() * self.page_size,
                        "evictable": self.evictable() * self.page_size,
                    }
                break
            self.reached["drain: waited for transfers"] += 1
            for name in list(self.in_flight):
                self.transferred(name)
        for name in list(self.in_flight):
            self.transferred(name)

    # ---------------------------------------------------------------- one round

    def round(self) -> None:  # noqa: PLR0912, PLR0915 - section 3, top to bottom, in one place
        page_size = self.page_size

        # Step 1: a fresh adder.
        cur_rem_token_offset = 0
        rem_total_token_offset = 0
        rem_chunk_tokens = self.chunked_prefill_size
        rem_input_tokens = self.max_prefill_tokens
        batch: list[dict[str, Any]] = []
        refused: list[dict[str, Any]] = []
        batch_is_full = False
        forced = False

        def baseline() -> int:
            return (self.free() + self.evictable()) * page_size

        def cur_rem_tokens() -> int:
            return baseline() - cur_rem_token_offset

        def rem_total_tokens() -> int:
            return baseline() - rem_total_token_offset

        def align(start: int, n: int) -> int:
            # Step 4.
            end = (start + n) // self.checkpoint_align * self.checkpoint_align
            if end > start:
                if end < start + n:
                    self.reached["step 4: cut back to the grid"] += 1
                return end - start
            self.reached["step 4: would return to its start"] += 1
            return n

        def charge(n: int, first_token: int) -> None:
            # Step 5.
            nonlocal cur_rem_token_offset, rem_total_token_offset, rem_chunk_tokens, rem_input_tokens
            cur_rem_token_offset += self.ceil(n) + page_size
            rem_total_token_offset += self.ceil(n) + page_size
            rem_total_token_offset += first_token
            if rem_chunk_tokens is not None:
                rem_chunk_tokens -= self.ceil(n)
                if rem_chunk_tokens < 0:
                    self.reached["step 5: chunk budget below zero"] += 1
            if rem_input_tokens is not None:
                rem_input_tokens -= self.ceil(n)

        def reserve(tail: int) -> None:
            # Step 6.
            nonlocal rem_total_token_offset
            if tail > 0:
                rem_total_token_offset += self.ceil(tail) + FIRST_TOKEN

        def budget_state() -> str:
            # Step 7.
            if rem_total_tokens() <= 0 or cur_rem_tokens() <= 0:
                return "NO_TOKEN"
            if rem_chunk_tokens is not None and rem_chunk_tokens <= 0:
                return "OTHER"
            if rem_input_tokens is not None and rem_input_tokens <= 0:
                return "OTHER"
            return "CONTINUE"

        # Step 2: the half-done request goes first.
        if self.half_done is not None:
            name = self.half_done
            request = self.requests[name]
            left = request["tokens"] - request["done"]
            assert rem_chunk_tokens is not None, "without chunking nothing is ever half done"
            n = min(rem_chunk_tokens, rem_total_tokens())
            if n < min(rem_chunk_tokens, left):
                self.reached["step 2: chunk limited by memory"] += 1
            if n <= 0 and self.on_shortage == "defer":
                # A promise for later, whatever reserve_tail says; nothing is added to the batch.
                self.reached["step 2: deferred"] += 1
                reserve(left)
            else:
                if n <= 0:
                    self.reached["step 2: forced"] += 1
                    forced = True
                    n = rem_chunk_tokens
                n = min(n, left)
                if n < left:
                    n = align(request["done"], n)
                    self.reached["step 2: resumed, still cut"] += 1
                    charge(n, 0)
                    if self.spend_gap:
                        self.reached["spend_gap: resumed"] += 1
                        rem_chunk_tokens = 0
                    if self.reserve_tail:
                        self.reached["step 6: resumed tail"] += 1
                        reserve(left - n)
                else:
                    # The last chunk: like a whole request it is charged its first token, and no request
                    # is half done any more (step 3).
                    self.reached["step 2: resumed, last"] += 1
                    charge(n, FIRST_TOKEN)
                    self.half_done = None
                batch.append(
                    {
                        "request": name,
                        "kind": "resumed",
                        "start": request["done"],
                        "end": request["done"] + n,
                        "load_back": 0,
                    }
                )

        # Step 3: the waiting queue, in the order of submission.
        for name in list(self.waiting):
            if batch:
                state = budget_state()
                if state != "CONTINUE":
                    self.reached[f"step 3: before a candidate {state}"] += 1
                    batch_is_full = batch_is_full or state == "NO_TOKEN"
                    break
            request = self.requests[name]
            prompt: int = request["tokens"]

            # Decided on paper: the run of full pages on the device, then on the host, without the
            # prompt's last token.
            keys = request["keys"][: (prompt - 1) // page_size]
            on_device = 0
            while on_device < len(keys) and keys[on_device] in self.device:
                on_device += 1
            found = on_device
            while found < len(keys) and keys[found] in self.host:
                found += 1
            if found == len(keys) and any(
                key in self.device or key in self.host for key in request["keys"][len(keys) :]
            ):
                self.reached["step 3: the last token's page is cached, but no hit"] += 1
            usable = found * page_size // self.checkpoint_align * self.checkpoint_align
            if usable < found * page_size:
                self.reached["step 3: hit floored to the grid"] += 1
            d = min(on_device * page_size, usable)
            h = usable - d

            # The lock on the device part, on paper: those pages no longer count as evictable.
            to_lock = keys[: d // page_size]
            takes = len([key for key in to_lock if not self.device[key]["locks"]]) * page_size
            need = (prompt - d) + FIRST_TOKEN + page_size
            if not need < rem_total_tokens() - takes:
                if need < rem_total_tokens():
                    self.reached["step 3: NO_TOKEN only because of the lock"] += 1
                self.reached["step 3: NO_TOKEN"] += 1
                refused.append({"request": name, "reason": "NO_TOKEN"})
                batch_is_full = True
                break

            left = prompt - d - h
            kind = "whole"
            n = left
            if rem_chunk_tokens is None:
                # Chunking off: never truncated.
                if rem_input_tokens is not None and self.ceil(left) >= rem_input_tokens:
                    if batch:
                        self.reached["step 3: OTHER, input budget without chunking"] += 1
                        refused.append({"request": name, "reason": "OTHER"})
                        break
                    self.reached["step 3: over the input budget, but the batch is empty"] += 1
            elif self.ceil(left) > rem_chunk_tokens:
                kind = "truncated"
                n = self.floor_page(rem_chunk_tokens)
                if self.truncation_align is not None:
                    if n < self.truncation_align:
                        self.reached["step 3: OTHER, truncation_align"] += 1
                        refused.append({"request": name, "reason": "OTHER"})
                        break
                    if n % self.truncation_align:
                        self.reached["truncation_align: floored"] += 1
                    n = n // self.truncation_align * self.truncation_align
                if n > 0:
                    n = align(d + h, n)
                if n <= 0 or self.half_done is not None:
                    why = "no page of budget" if n <= 0 else "one is half done"
                    self.reached[f"step 3: OTHER, {why}"] += 1
                    refused.append({"request": name, "reason": "OTHER"})
                    break

            # Admitted: only from here on anything changes.  The lock, then the load-back, at once.
            self.waiting.remove(name)
            used = self.tick()
            for key in to_lock:
                self.device[key]["locks"].add(name)
                self.device[key]["used"] = used
            if h > 0:
                self.reached["step 3: load-back"] += 1
                coming = keys[d // page_size : (d + h) // page_size]
                if self.free() < len(coming):
                    self.reached["step 3: load-back evicts"] += 1
                # The room is made first, while all of `coming` still stands on the host.
                fits = self.make_free(len(coming), set(coming))
                assert fits, "need < rem_total_tokens covers the load-back"
                used = self.tick()
                for key in coming:
                    page = self.host.pop(key)
                    self.device[key] = {"parent": page["parent"], "used": used, "locks": {name}}

            request["done"] = d + h
            if d > 0:
                self.reached["step 3: device hit"] += 1
            if kind == "whole":
                self.reached["step 3: whole"] += 1
                charge(n, FIRST_TOKEN)
            else:
                self.reached["step 3: truncated"] += 1
                charge(n, 0)
                if self.spend_gap:
                    self.reached["spend_gap: fresh"] += 1
                    rem_chunk_tokens = 0
                if self.reserve_tail:
                    self.reached["step 6: fresh tail"] += 1
                    reserve(left - n)
                self.half_done = name
            batch.append({"request": name, "kind": kind, "start": d + h, "end": d + h + n, "load_back": h})

            state = budget_state()
            if state != "CONTINUE":
                self.reached[f"step 7: after a candidate {state}"] += 1
                batch_is_full = batch_is_full or state == "NO_TOKEN"
                break

        record = {
            "round": len(self.rounds) + 1,
            "baseline": baseline(),
            "rem_total_tokens": rem_total_tokens(),
            "cur_rem_tokens": cur_rem_tokens(),
            "rem_chunk_tokens": rem_chunk_tokens,
            "budget_state": budget_state(),
            "batch_is_full": batch_is_full,
            "forced": forced,
            "admitted": batch,
            "refused": refused,
        }
        self.rounds.append(record)
        if not batch:
            self.reached["round: empty batch"] += 1
        try:
            # Steps 8 and 9: the whole batch is allocated before any of it runs.
            for chunk in batch:
                self.allocate(chunk)
            for chunk in batch:
                self.run_chunk(chunk)
        finally:
            record["free"] = self.free() * page_size
            record["evictable"] = self.evictable() * page_size
            record["protected"] = self.protected() * page_size

    def allocate(self, chunk: dict[str, Any]) -> None:
        """Step 8 for one chunk."""
        start, end = chunk["start"], chunk["end"]
        if start % self.page_size:
            self.reached["step 8: chunk starts inside a page"] += 1
        pages = (self.ceil(end) - self.ceil(start)) // self.page_size
        if pages > self.free():
            self.reached["step 8: must evict or fail"] += 1
        if not self.make_free(pages, set()):
            raise OutOfMemory(chunk["request"], end - start)
        self.requests[chunk["request"]]["private"] += pages

    def run_chunk(self, chunk: dict[str, Any]) -> None:
        """Step 9 for one chunk: the pages that it has filled go into the prefix tree."""
        name = chunk["request"]
        request = self.requests[name]
        keys = request["keys"]
        used = self.tick()
        for index in range(chunk["start"] // self.page_size, chunk["end"] // self.page_size):
            key = keys[index]
            if key in self.device:
                self.reached["step 9: page shared, copy freed"] += 1
            page = self.insert_on_device(key, keys[index - 1] if index else ROOT, used)
            page["locks"].add(name)
            # Either the private page became the tree's, or it was a copy and is free again.
            request["private"] -= 1
        request["done"] = chunk["end"]
        if chunk["end"] == request["tokens"]:
            self.in_flight.append(name)

    # ---------------------------------------------------------------- a whole trace

    def play(self, events: list[dict[str, Any]]) -> None:
        for index, event in enumerate(events):
            kind = event["event"]
            try:
                if kind == "cached":
                    self.cached(index, event)
                elif kind == "hold":
                    self.hold(index, event)
                elif kind == "release":
                    self.release(event)
                elif kind == "submit":
                    self.submit(event)
                elif kind == "transferred":
                    self.transferred(event["request"])
                elif kind == "abort":
                    self.abort(event["request"])
                elif kind == "round":
                    self.round()
                elif kind == "drain":
                    self.drain()
                else:
                    raise ValueError(f"events[{index}].event: unknown {kind!r}")
            except OutOfMemory as failure:
                self.oom = {
                    "kind": "oom",
                    "round": len(self.rounds),
                    "request": failure.request,
                    "wanted": failure.wanted,
                    "free": self.free() * self.page_size,
                    "evictable": self.evictable() * self.page_size,
                }
                return

    def outcome(self) -> dict[str, Any]:
        violation = self.oom if self.oom is not None else self.stuck
        return {
            "verdict": "ok" if violation is None else violation["kind"],
            "rounds": self.rounds,
            "rejected_at_submit": self.rejected_at_submit,
            "violation": violation,
        }


def play(document: dict[str, Any], rules: str | dict[str, Any] | None = None) -> NaiveNode:
    """Replay a trace and return the node as it stands at the end."""
    node = NaiveNode(document["node"], document["rules"] if rules is None else rules)
    node.play(document["events"])
    return node


def replay(document: dict[str, Any], rules: str | dict[str, Any] | None = None) -> dict[str, Any]:
    """The comparable part of a trace's outcome; `rules` replaces the document's own."""
    return play(document, rules).outcome()
