"""Runs a trace's events on a `World` and says whether it fails as reported. Part of every stand-alone script.

Nothing of kvledger is imported here: the text of this file goes into the script. A `World(node, rules)` is a scheduler
of its own, with sizes in tokens: `submit(name, prompt, output)` (why not, or None), `round()` (its chunks as (name,
start, end); MemoryError where an admitted request finds no slots), `decode()`, `transferred(name)`, `finish(name)`,
`abort(name)`, `cached(tier, prompt, locked)`, `hold(name, tokens)`, `release(name, tokens)`, `in_flight()` (names),
`has_work()`, `moves()` (something goes on by itself), `pool()` (free, evictable), `needs()` (what each admitted prompt
has yet to allocate) and `thrown_away()` (names whose admitted prefill the last round threw away).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Any

LOOKED_FOR = {
    "oom": {"oom"},
    "admitted-finishes": {"oom", "thrown away"},
    "never-forced": {"oom", "short"},
    "promises-covered": {"oom", "short"},
    "stuck": {"stuck"},
    "progress": {"stuck"},
    "never-raises": {"raised"},
}
"""What a run of this script must show for a report of that verdict. Any other verdict: the rounds as recorded."""


def shown(value: Any) -> str:
    """A value from a trace in one line that steers no terminal."""
    text = str(value)
    return text if text.isascii() and text.isprintable() else ascii(text)


class Runner:
    """Plays events, prints each round, and notes what went wrong and where rounds are not the recorded ones."""

    def __init__(self, world: Any, page_size: int, recorded: Sequence[Sequence[Any]]) -> None:
        self.world = world
        self.page_size = page_size
        self.recorded = recorded
        self.rounds = 0
        self.pages = self.output_tokens = self.requests = 0
        self.found: dict[str, int] = {}
        self.changed: int | None = None

    @property
    def dead(self) -> bool:
        return "oom" in self.found or "raised" in self.found

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
        except Exception:
            self._note("raised")
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
            return
        if kind == "cached":
            world.cached(event["tier"], event["prompt"], event.get("locked", False))
        elif kind in ("hold", "release"):
            getattr(world, kind)(event["name"], event.get("tokens"))
        else:
            getattr(world, kind)(event["request"])
        print(
            " ".join(
                str(event[key]) for key in ("event", "tier", "request", "name", "prompt", "tokens") if key in event
            )
        )

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
        thrown_away = self.world.thrown_away()
        if thrown_away:
            self._note("thrown away")
            print(f"  THROWN AWAY: the admitted prefill of {', '.join(map(shown, thrown_away))}")
        known = self.recorded[self.rounds - 1] if self.rounds <= len(self.recorded) else None
        if self.changed is None and chunks != known:
            self.changed = self.rounds
        return bool(chunks) or bool(self.world.moves())

    def _left(self) -> str:
        free, evictable = self.world.pool()
        needed = sum(self.world.needs().values())
        words = f"free {free}, evictable {evictable}, admitted prompts still need {needed}"
        if needed > free + evictable:
            self._note("short")
            words += f": SHORT BY {needed - free - evictable}"
        return words

    def _note(self, what: str) -> None:
        self.found.setdefault(what, self.rounds)

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

    def _transfer_all(self) -> bool:
        names = list(self.world.in_flight())
        for name in names:
            self.world.transferred(name)
        return bool(names)


def main(world: Any, page_size: int, events: Sequence[dict[str, Any]], recorded: Any, verdict: str) -> int:
    """Play all events and say how it ended. 1: it fails as reported; 0: it does not."""
    runner = Runner(world, page_size, recorded)
    for event in events:
        runner.play(event)
    if runner.changed is None:
        print("every chunk is the recorded one")
    else:
        print(f"round {runner.changed} ran other chunks than recorded: {recorded[runner.changed - 1 : runner.changed]}")
    wanted = LOOKED_FOR.get(verdict, set())
    shown = [f"{what} in round {number}" for what, number in runner.found.items() if what in wanted]
    as_reported = bool(shown) or (not wanted and runner.changed is None)
    print(f"{'AS REPORTED' if as_reported else 'NOT AS REPORTED'} ({verdict}): {', '.join(shown) or 'see the rounds'}")
    sys.stdout.flush()
    return int(as_reported)
