"""Runs a trace's events on a `World` and says whether it fails as reported. Part of every stand-alone script.

Nothing of kvledger is imported here: the text of this file goes into the script. A `World(node, rules)` is a
scheduler of its own, with sizes in tokens: `submit(name, prompt, output)` (why not, or None), `round()` (its chunks
as (name, start, end); MemoryError where an admitted request finds no slots), `decode()`, `transferred(name)`,
`finish(name)`, `abort(name)`, `cached(tier, prompt, locked)`, `hold(name, tokens)`, `release(name, tokens)`,
`in_flight()` (names), `has_work()`, `moves()` (something goes on by itself), `pool()` (free, evictable), `needs()`
(what each admitted prompt has yet to allocate), `thrown_away()` (names that lost their slots in the last round, in
the middle of their prefill), `lost()` (slots that are neither free nor cached nor anybody's; below zero: counted
twice; None: it cannot be told).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Any

AS_REPORTED, MENDED, NOT_SHOWN = 1, 0, 2


def shown(value: Any) -> str:
    """A value from a trace in one line that steers no terminal."""
    text = str(value)
    return text if text.isascii() and text.isprintable() else ascii(text)


class Runner:
    """Plays events, prints each round, and notes what went wrong and where rounds are not the recorded ones."""

    def __init__(
        self, world: Any, page_size: int, recorded: Sequence[Sequence[Any]], raises: str | None = None
    ) -> None:
        self.world = world
        self.page_size = page_size
        self.recorded = recorded
        self.raises = raises
        self.rounds = 0
        self.pages = self.output_tokens = self.requests = 0
        self.found: dict[str, str] = {}
        self.blind: set[str] = set()
        self.changed: int | None = None
        self.prompts: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self.at_rest_tokens = sum(world.pool())

    @property
    def dead(self) -> bool:
        return not self.found.keys().isdisjoint(("oom", "raised", "raised something else"))

    def play(self, event: dict[str, Any]) -> None:
        """One event of the trace; after a failed allocation or an exception nothing happens any more."""
        kind = event["event"]
        if self.dead:
            return
        try:
            if kind == "round":
                self._ran(self.world.round)
            elif kind == "decode":
                self._ran(self.world.decode)
            elif kind == "drain":
                self._drain()
            else:
                self._outside(kind, event)
        except Exception as error:
            self._note("raised" if type(error).__name__ == self.raises else "raised something else")
            traceback.print_exc(file=sys.stdout)

    def _outside(self, kind: str, event: dict[str, Any]) -> None:
        world = self.world
        if kind == "submit":
            output = {key: event[key] for key in ("max_new_tokens", "ignore_eos", "priority") if key in event}
            tokens = sum(length for _, length in event["prompt"])
            reason = world.submit(event["request"], event["prompt"], output)
            refused = "" if reason is None else f", refused: {shown(reason)}"
            print(f"submit {shown(event['request'])}: {tokens} tokens{refused}")
            if reason is None:
                self.requests += 1
                self.pages += -(-tokens // self.page_size)
                self.output_tokens += output.get("max_new_tokens", 1)
                self.prompts[event["request"]] = tokens
            return
        before = sum(world.pool())
        if kind == "cached":
            world.cached(event["tier"], event["prompt"], event.get("locked", False))
        elif kind in ("hold", "release"):
            getattr(world, kind)(event["name"], event.get("tokens"))
        else:
            getattr(world, kind)(event["request"])
        keys = ("event", "tier", "request", "name", "prompt", "tokens")
        words = " ".join(shown(event[key]) for key in keys if key in event)
        print(words)
        if kind in ("cached", "hold", "release"):
            self.at_rest_tokens += sum(world.pool()) - before
        if event.get("locked"):
            self.blind.add("not given back")
        if kind == "abort":
            self.prompts.pop(event["request"], None)
            self.ends.pop(event["request"], None)
        self._count(f"after {words}")

    def _ran(self, step: Any) -> bool:
        """One round; whether anything moved in it."""
        self.rounds += 1
        try:
            chunks = [list(chunk) for chunk in step()]
        except MemoryError as error:
            self._note("oom")
            print(f"round {self.rounds}: OUT OF MEMORY: {shown(error)}")
            return False
        words = ", ".join(f"{shown(name)} {start}..{end}" for name, start, end in chunks) or "no chunk"
        print(f"round {self.rounds}: {words}; {self._left()}")
        self._follow(chunks)
        self._count(f"in round {self.rounds}")
        known = self.recorded[self.rounds - 1] if self.rounds <= len(self.recorded) else None
        if self.changed is None and chunks != known:
            self.changed = self.rounds
        return bool(chunks) or bool(self.world.moves())

    def _follow(self, chunks: Sequence[Any]) -> None:
        """How far each prompt has come, and whether that was ever taken back."""
        for name, start, end in chunks:
            before = self.ends.get(name, start)
            if start != before < self.prompts.get(name, 0):
                self._note("begun again")
                print(f"  BEGUN AGAIN: {shown(name)} had computed {before} tokens and goes on from {start}")
            self.ends[name] = end
        for name in self.world.thrown_away():
            self._note("preempted")
            had = self.ends.pop(name, 0)
            print(f"  PREEMPTED: {shown(name)} was admitted, and loses its slots with {had} tokens computed")
        half_done = [name for name, end in self.ends.items() if end < self.prompts.get(name, 0)]
        if len(half_done) > 1:
            self._note("two half done")
            print(f"  HALF DONE: {', '.join(map(shown, half_done))}")

    def _count(self, where: str) -> None:
        """Whether each slot has one owner."""
        lost = self.world.lost()
        if lost is None:
            self.blind.add("lost")
        elif lost and "lost" not in self.found:
            self._note("lost", where)
            print(f"  LOST: {lost} tokens belong to nobody" if lost > 0 else f"  COUNTED TWICE: {-lost} tokens")

    def _left(self) -> str:
        free, evictable = self.world.pool()
        needed = sum(self.world.needs().values())
        words = f"free {free}, evictable {evictable}, admitted prompts still need {needed}"
        if needed > free + evictable:
            self._note("short")
            words += f": SHORT BY {needed - free - evictable}"
        return words

    def _note(self, what: str, where: str | None = None) -> None:
        self.found.setdefault(what, where or f"in round {self.rounds}")

    def _drain(self) -> None:
        """Rounds until nothing waits or is half done; what is in flight is transferred only when nothing else moves."""
        most = (2 * self.pages + 3 * self.requests + 1 + self.output_tokens) * (self.requests + 1)
        for _ in range(most):
            if not self.world.has_work():
                break
            moved = self._ran(self.world.round)
            if self.dead:
                return
            stands_still = not moved and not self._transfer_all() and not self.world.thrown_away()
            if stands_still and self.world.has_work():
                self._note("stuck")
                print("  STUCK: nothing runs, and nothing is in flight")
                return
        else:
            if self.world.has_work():
                self._note("stuck")
                print(f"  STUCK: work is left after {most} rounds")
        self._transfer_all()
        self._at_rest()

    def _at_rest(self) -> None:
        """Nothing is left to do: who was never served, and what was not given back."""
        missing = self.at_rest_tokens - sum(self.world.pool())
        if missing:
            self._note("not given back", "at rest")
            print(f"  NOT GIVEN BACK: at rest {missing} tokens are neither free nor evictable")
        unserved = [name for name, tokens in self.prompts.items() if self.ends.get(name, 0) < tokens]
        if unserved:
            self._note("never served", "at rest")
            print(f"  NEVER SERVED: {', '.join(map(shown, unserved))}")

    def _transfer_all(self) -> bool:
        names = list(self.world.in_flight())
        for name in names:
            self.world.transferred(name)
            self._count(f"after {shown(name)} was transferred")
        return bool(names)


def main(
    world: Any,
    page_size: int,
    events: Sequence[dict[str, Any]],
    recorded: Any,
    verdict: str,
    looked_for: Sequence[str],
    raises: str | None = None,
) -> int:
    """Play all events and say how it ended: 1, it fails as reported; 0, it does not; 2, this run shows neither."""
    runner = Runner(world, page_size, recorded, raises)
    for event in events:
        runner.play(event)
    if runner.changed is None:
        print("every chunk is the recorded one")
    else:
        print(f"round {runner.changed} ran other chunks than recorded: {recorded[runner.changed - 1 : runner.changed]}")
    status, words = ending(runner, set(looked_for))
    print(f"{words[0]} ({verdict}): {words[1]}")
    sys.stdout.flush()
    return status


def ending(runner: Runner, looked_for: set[str]) -> tuple[int, tuple[str, str]]:
    """The exit status and its words. What cannot be seen, or was not reached, is neither as reported nor mended."""
    shown_words = [f"{what} {where}" for what, where in runner.found.items() if what in looked_for]
    if shown_words:
        return AS_REPORTED, ("AS REPORTED", ", ".join(shown_words))
    if looked_for <= runner.blind:
        return NOT_SHOWN, ("NOT SHOWN", "this script cannot see that, whether it is there or not")
    if runner.dead and "oom" not in runner.found:
        return NOT_SHOWN, ("COULD NOT RUN", "an exception that was not recorded, above, ended it")
    return MENDED, ("NOT AS REPORTED", "it was looked for and not found")
