"""The experiment in words that text and page share: a node's sizes, the rules' switches, what is there at the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain, repeat
from typing import NamedTuple

from kvledger.events import Cached, Event, Fault, Hold, Pause, Pin, Resume, Submit, Unpin
from kvledger.replay import STEPS, Happening, faulty_words
from kvledger.report.ranks import on_ranks, ranks_words
from kvledger.request import USUAL_OUTPUT, Output
from kvledger.rules import AccountingRules
from kvledger.settings import NodeSettings

SHARES = (
    "What running requests may still grow is promised in exact fractions of tokens; shown are whole ones, which add up "
    "to the same sum, rounded up."
)


class Sized(NamedTuple):
    """Something with a name and a size in tokens (None: it has none to tell), and what is asked of its output."""

    name: str
    tokens: int | None
    output: Output = USUAL_OUTPUT
    note: str = ""

    @property
    def words(self) -> str:
        """All but the name: empty, or with a space before it."""
        size = "" if self.tokens is None else f" {self.tokens}"
        asked = "; ".join(filter(None, (output_words(self.output), self.note)))
        return f"{size} ({asked})" if asked else size


def output_words(output: Output) -> str:
    """What is not as usual in what a request asks for, in a trace's own words; empty if nothing is."""
    words = []
    if output.max_new_tokens != USUAL_OUTPUT.max_new_tokens:
        words.append(f"max_new_tokens {output.max_new_tokens}")
    if output.ignore_eos:
        words.append("ignore_eos")
    if output.priority:
        words.append(f"priority {output.priority}")
    return ", ".join(words)


def sum_words(several: Iterable[Sized]) -> str:
    """What is said of many at once."""
    listed = list(several)
    known = [each.tokens for each in listed if each.tokens is not None]
    words = [f"{len(listed)} of them", *([f"{sum(known)} tokens in all"] if known else [])]
    if any(each.output.max_new_tokens != USUAL_OUTPUT.max_new_tokens for each in listed):
        words.append(f"max_new_tokens {sum(each.output.max_new_tokens for each in listed)} in all")
    told = (
        (sum(each.output.ignore_eos for each in listed), "with ignore_eos"),
        (sum(each.output.priority != 0 for each in listed), "with a priority"),
    )
    return ", ".join([*words, *(f"{count} {what}" for count, what in told if count)])


def node_words(node: NodeSettings) -> str:
    """The sizes that every node has, and whatever else is not as usual."""
    return (
        f"page {node.page_size}, grid {node.checkpoint_align}, chunk {size_word(node.chunked_prefill_size, 'off')}, "
        f"max prefill {size_word(node.max_prefill_tokens, 'unlimited')}, pool {node.pool_tokens}, "
        f"host {size_word(node.host_tokens, 'unlimited')}{_beyond_prefill(node)}"
    )


def size_word(size: int | None, word: str) -> str:
    """A size, or `word` where there is none."""
    return word if size is None else str(size)


def _beyond_prefill(node: NodeSettings) -> str:
    """What a node has that a plain prefill node has not."""
    usual = {field.name: field.default for field in fields(node)}
    names = list(usual)[list(usual).index("host_tokens") + 1 :]  # state slots, and all that decode brings
    names.remove("ranks")
    told = ((name.replace("_", " "), getattr(node, name)) for name in names if getattr(node, name) != usual[name])
    return "".join(f", {words} {str(value).lower()}" for words, value in told) + ranks_words(node)


def switches(rules: AccountingRules) -> str:
    """The two switches that presets differ in, and whatever else is not as usual."""
    usual = AccountingRules()
    values = {field.name: getattr(rules, field.name) for field in fields(rules)}
    return ", ".join(
        f"{name} {str(value).lower()}"
        for name, value in values.items()
        if name in ("checkpoint_align", "reserve_tail") or value != getattr(usual, name)
    )


def submitted_later(events: Iterable[Event]) -> list[Sized]:
    """The submissions after the first round."""
    listed = list(events)
    ran = next((at for at, event in enumerate(listed) if isinstance(event, STEPS)), len(listed))
    return [Sized(each.request, each.prompt.tokens, each.output) for each in listed[ran:] if isinstance(each, Submit)]


def found_at_start(events: Iterable[Event], happenings: Sequence[Happening]) -> Mapping[str, list[Sized]]:
    """What is there before the first round, by the name of its prompt's last segment, its holder or its request.

    `happenings` are the outcome's: one for each event up to there, unless the target raised.
    """
    found: dict[str, list[Sized]] = {}
    notes = chain((each.note for each in happenings), repeat(""))
    for event, note in zip(events, notes, strict=False):
        match event:
            case _ if isinstance(event, STEPS):
                break
            case Cached(tier, prompt, locked, ranks):
                what = f"cached on the {tier}{', locked' if locked else ''}{on_ranks(ranks)}"
                found.setdefault(what, []).append(Sized(prompt.segments[-1][0], prompt.tokens, note=note))
            case Hold(name, tokens, ranks):
                found.setdefault(f"held{on_ranks(ranks)}", []).append(Sized(name, tokens))
            case Fault() | Pin() | Unpin() | Pause() | Resume():
                what, name, size = faulty_words(event)
                found.setdefault(what.rstrip(":"), []).append(Sized(name, size, note=note))
            case Submit(request, prompt, output):
                found.setdefault("submitted", []).append(Sized(request, prompt.tokens, output))
    return found
