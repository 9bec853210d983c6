"""Traces for the tests of reports: the incident, one with hostile names, and a long one."""

from __future__ import annotations

import random

from kvledger.events import (
    Abort,
    Cached,
    Drain,
    Event,
    Hold,
    Round,
    Submit,
    Transferred,
)
from kvledger.rules import AccountingRules
from kvledger.trace import Trace
from tests.unit.builders import INCIDENT, INCIDENT_NODE, node_settings, prompt

INCIDENT_TRACE = Trace(INCIDENT_NODE, "aligned", INCIDENT, "1keim's tail is spent", {"aligned": "oom"})

HOSTILE_NAMES = (
    "<script>window.pwned = 1</script>",
    "</script><img src=x onerror=window.pwned=2>",
    "' onmouseover='window.pwned=3' \" & &lt; &amp;",
    "]]><!-- ${window.pwned=4} `javascript:`",
    "two\nlines\r\n\tand\ttabs\x00\x1b[31m\x7f",
    "\u202eright-to-left\u202c \u2066isolate\u2069 \u200f\u200b\ufeff",
    "שלום עולם",
    "مرحبا 123",
    "\u2028\u2029 separators",
    "Z\u0334\u0335\u0336\u0337a\u0338l\u0339g\u033ao",
    "名前 🦀",
    " ",
    "x" * 10_000,
    "<b>" * 3_334,
    "a\\u003cb",
)


def hostile_trace(rules: str = "aligned") -> Trace:
    """The worked example's failure with every name a hostile one; more hostile names are admitted, held and refused."""
    names = iter(HOSTILE_NAMES)
    spender, victim, first = next(names), next(names), next(names)
    node = node_settings(max_prefill_tokens=16384, pool_tokens=12032, host_tokens=1048576)
    events: list[Event] = [
        Cached("host", prompt((spender, 6144))),
        Submit(first, prompt((first, 1088))),
        Submit(victim, prompt((victim, 8000))),
        Submit(spender, prompt((spender, 6144), ("c", 128))),
        Round(),
        Transferred(first),
        *(Submit(name, prompt((name, 300))) for name in names),
        Submit("<i>too long</i>\u202e", prompt(("<i>", 99999))),
        Hold("<u>\u202e", 64),
        Drain(),
    ]
    return Trace(node, rules, tuple(events), "<h1>\u202e</title></script>\u2028", {"upstream": "oom"})


LONG_POOL_TOKENS = 65536
CRASH: tuple[Event, ...] = (
    Drain(),
    Hold("all but the worked example's pool", LONG_POOL_TOKENS - 12032),
    Cached("host", prompt(("doc", 6144))),
    Submit("A", prompt(("a", 1088))),
    Submit("B", prompt(("b", 8000))),
    Submit("C", prompt(("doc", 6144), ("c", 128))),
    Round(),
    Transferred("A"),
    Drain(),
)
"""The worked example at the end of a long trace."""


def long_trace(
    rules: str = "tail-reserved", *, rounds: int = 2000, requests: int = 500, last: tuple[Event, ...] = (Drain(),)
) -> Trace:
    """So many requests that arrive, wait and leave over so many rounds, on a pool that is often full."""
    chance = random.Random(7)
    events: list[Event] = [Cached("host", prompt((f"doc {number}", 8192))) for number in range(20)]
    waiting_for: list[str] = []
    for number in range(requests):
        name = f"request-{number:03}"
        shared = [(f"doc {chance.randrange(20)}", 8192)] if chance.random() < 0.3 else []
        events.append(Submit(name, prompt(*shared, (name, chance.choice([400, 3000, 9000, 14000])))))
        waiting_for.append(name)
        for _ in range(rounds * (number + 1) // requests - rounds * number // requests):
            events.append(Round())
        if len(waiting_for) > 4:
            events.append(Transferred(waiting_for.pop(0)))
        if number % 50 == 49:
            events.append(Abort(waiting_for.pop()))
    node = node_settings(max_prefill_tokens=16384, pool_tokens=LONG_POOL_TOKENS, host_tokens=262144)
    return Trace(node, rules, (*events, *last), f"{requests} requests over {rounds} rounds")


SMALL = Trace(
    node_settings(pool_tokens=4096),
    "upstream",
    (
        Submit("a", prompt(("a", 1000))),
        Submit("b", prompt(("b", 2000))),
        Submit("big", prompt(("big", 4096))),
        Submit("late", prompt(("late", 3000))),
        Hold("h", 100),
        Round(),
        Transferred("a"),
        Transferred("late"),
        Abort("b"),
        Abort("b"),
        Drain(),
    ),
)
CASES = {
    "incident": INCIDENT_TRACE,
    "incident upstream": INCIDENT_TRACE.with_rules("upstream"),
    "incident fixed": INCIDENT_TRACE.with_rules("tail-reserved"),
    "hostile": hostile_trace(),
    "small": SMALL,
    "deferring": INCIDENT_TRACE.with_rules(AccountingRules(on_shortage="defer")),
}
