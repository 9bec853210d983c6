"""A failing trace as a report for another project, in Markdown: facts, figures, and how to repeat them.

Names, titles and messages come from traces: names stand in code spans, and everything else is escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvledger import __version__
from kvledger.events import Cached, Decode, Drain, Event, Hold, Release, Round, Submit
from kvledger.invariants import INVARIANTS
from kvledger.node import NodeSettings
from kvledger.record import Decision, RoundRecord
from kvledger.replay import Outcome
from kvledger.report.explanation import explain
from kvledger.report.markup import Name, Words
from kvledger.report.plain import named, plain
from kvledger.report.recording import Pool, Recording, Step
from kvledger.report.rounds import Gap, rounds_to_show

MESSAGE_COLUMNS = 400
TITLE_COLUMNS = 120
_EXPECTED = {
    "oom": "an admitted prompt can always finish its prefill",
    "stuck": "with nothing in flight and nothing arriving, whatever fits an empty pool is served",
    "admitted-finishes": "an admitted prompt finishes its prefill, and does not begin it again",
    "promises-covered": "what is free or evictable is enough for the rest of every admitted prompt",
    "never-forced": "no chunk runs although nothing remains for it",
    "never-raises": "a scheduler answers, whatever happens",
}
_REASONS = {invariant.name: invariant.reason for invariant in INVARIANTS}


def upstream_lines(
    recording: Recording, target: str, versions: Mapping[str, str], script: str | None, trace: str
) -> list[str]:
    """The report's lines. `script` and `trace` are the names of the files beside it; None: there is no script."""
    outcome = recording.outcome
    died = outcome.failure is not None or outcome.stuck is not None
    explanation = explain(recording, ours=False)
    sentences = [explanation.headline] if died or explanation.lead is None else []
    sentences += [explanation.lead] if explanation.lead is not None else []
    sentences += explanation.details
    return [
        f"# {_title(outcome)}",
        "",
        *_versions(target, versions),
        "",
        " ".join(_sentence(words) for words in sentences),
        "",
        "## The trace",
        "",
        *([f"{escaped(recording.trace.title.rstrip('.'))}.", ""] if recording.trace.title else []),
        *_node_lines(recording),
        "",
        *_table(("", "event", "what", "tokens"), _event_rows(recording.trace.events)),
        "",
        "## Round by round",
        "",
        *_round_lines(recording),
        "## Expected and actual",
        "",
        f"- Expected: {_expected(outcome)}.",
        f"- Actual: {_actual(outcome)}.",
        "",
        "## How to run it",
        "",
        *_how_to_run(versions, script, trace),
    ]


def _title(outcome: Outcome) -> str:
    if outcome.failure is not None:
        return f"Out of memory: {code(outcome.failure.request)} was admitted, and its prefill finds no slots"
    if outcome.stuck is not None:
        return f"Stuck: {code(outcome.stuck.request)} waits for ever"
    first = outcome.broken[0]
    if first.invariant == "admitted-finishes":
        return f"Thrown away: {code(first.request or '?')} was admitted, and begins its prefill again"
    return f"{first.invariant}: {escaped(first.message[:TITLE_COLUMNS])}"


def _versions(target: str, versions: Mapping[str, str]) -> Iterator[str]:
    seen = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"Seen with {escaped(seen)}." if seen else "Seen with the scheduler as it is."
    yield f"Found by kvledger {__version__}, which drives its code on a CPU, without a model (target {code(target)})."


def _sentence(words: Words) -> str:
    return "".join(code(word) if isinstance(word, Name) else escaped(word) for word in words)


# --- the trace


def _node_lines(recording: Recording) -> Iterator[str]:
    node: NodeSettings = recording.trace.node
    sizes: list[tuple[str, object]] = [
        ("page", node.page_size),
        ("chunk", node.chunked_prefill_size or "off"),
        ("max prefill", node.max_prefill_tokens or "no limit"),
        ("pool", recording.pool_tokens),
        ("host tier", {None: "no limit", 0: "none"}.get(node.host_tokens, node.host_tokens)),
    ]
    rules = recording.replayed.rules
    grid_tokens = rules.grid_tokens(page_size=node.page_size, node_align=node.checkpoint_align)
    if grid_tokens != node.page_size:
        sizes.append(("grid for the ends of chunks", grid_tokens))
    if rules.truncation_align is not None:
        sizes.append(("truncation alignment", rules.truncation_align))
    words = [f"{name} {size}" for name, size in sizes]
    words += [f"schedule policy {node.schedule_policy}"] * (node.schedule_policy != "fcfs")
    words += ["mixed chunks"] * node.mixed_chunk
    mode = "One prefill node" if node.mode == "prefill" else "One node that prefills and decodes"
    yield f"{mode}; sizes in tokens: {', '.join(words)}."


def _event_rows(events: Sequence[Event]) -> Iterator[tuple[str, ...]]:
    for number, event in enumerate(events, start=1):
        yield (str(number), *_event_cells(event))


def _event_cells(event: Event) -> tuple[str, str, str]:
    match event:
        case Submit(request, prompt, output):
            more = f", up to {output.max_new_tokens} new tokens" if output.max_new_tokens > 1 else ""
            return "submit", f"{code(request)}: {_runs(prompt.segments)}{more}", str(prompt.tokens)
        case Cached(tier, prompt, locked):
            where = f"cached on the {tier}{', locked' if locked else ''}"
            return where, _runs(prompt.segments), str(prompt.tokens)
        case Hold(name, tokens):
            return "hold", code(name), str(tokens)
        case Release(name, released):
            return "release", code(name), "all" if released is None else str(released)
        case Round():
            return "round", "one round of the scheduler", ""
        case Decode():
            return "decode", "one decode round", ""
        case Drain():
            return "drain", "rounds until nothing is left to prefill; transfers end as late as they can", ""
    return type(event).__name__.lower(), code(event.request), ""


def _runs(segments: Iterable[tuple[str, int]]) -> str:
    """Two prompts share a prefix as far as these runs agree."""
    return " + ".join(f"{tokens} of {code(segment)}" for segment, tokens in segments)


# --- the rounds


def _round_lines(recording: Recording) -> Iterator[str]:
    steps = [step for step in recording.steps if isinstance(step.event, Round)]
    by_round = {view.record.round: (step, view.pool) for view, step in zip(recording.rounds, steps, strict=True)}
    for shown in rounds_to_show(recording.outcome):
        if isinstance(shown, Gap):
            yield f"Rounds {shown.records[0].round} to {shown.records[-1].round} show nothing new."
        else:
            yield f"Round {shown.round}:"
            yield ""
            yield from _decision_table(shown, figures=recording.shows_ledger)
            yield ""
            yield " ".join(_after(shown, *by_round[shown.round]))
        yield ""


def _decision_table(record: RoundRecord, *, figures: bool) -> list[str]:
    if not record.decisions:
        return ["No chunk, and no refusal."]
    columns = ("request", "decision", "chunk", "left after it", "loaded back")
    more = ("promised", "baseline", "cur_rem_tokens", "rem_total_tokens", "rem_chunk_tokens") if figures else ()
    return _table((*columns, *more), (_decision_cells(each, record, figures) for each in record.decisions))


def _decision_cells(decision: Decision, record: RoundRecord, figures: bool) -> tuple[str, ...]:
    chunk = f"{decision.start}..{decision.end} of {decision.prompt_tokens}" if decision.joined else ""
    kind = f"refused, {decision.reason}" if decision.kind == "refused" else decision.kind
    cells = (
        code(decision.request),
        kind + (", forced" if decision.forced else ""),
        chunk,
        str(decision.tail_tokens) if decision.joined else "",
        str(decision.load_back or ""),
    )
    if not figures:
        return cells
    values = (decision.baseline, decision.cur_rem_tokens, decision.rem_total_tokens, decision.rem_chunk_tokens)
    return (*cells, _promised(decision, record), *("" if value is None else str(value) for value in values))


def _promised(decision: Decision, record: RoundRecord) -> str:
    tokens: dict[str, int] = {}
    for promise in record.promises if decision.joined or decision.kind == "deferred" else ():
        if promise.request == decision.request:
            tokens[str(promise.due)] = tokens.get(str(promise.due), 0) + promise.tokens
    return " + ".join(f"{count} {due}" for due, count in tokens.items())


def _after(record: RoundRecord, step: Step, pool: Pool) -> Iterator[str]:
    """What the round left, and whether that is enough for what it has admitted."""
    for names, what in (
        (record.decoded, "Decoded: {}."),
        (record.finished, "Finished: {}."),
        (record.retracted, "Sent back while decoding: {}."),
        (record.rolled_back, "**Thrown away: the admitted prefill of {}.**"),
        (record.loading, "Still being loaded: {}."),
    ):
        if names:
            yield what.format(", ".join(map(code, names)))
    if record.failure is not None:
        failure = record.failure
        yield (
            f"**Out of memory**: {code(failure.request)} wanted {failure.wanted} tokens, with {failure.free} free "
            f"and {failure.evictable} evictable."
        )
        return
    yield f"After it {pool.free} tokens are free and {pool.evictable} evictable."
    if step.slack is not None:
        yield f"What was admitted still needs {pool.baseline - step.slack}."
    if step.slack is not None and step.slack < 0:
        yield f"**{-step.slack} too few.**"


# --- the end


def _expected(outcome: Outcome) -> str:
    known = _EXPECTED.get(outcome.verdict)
    return known or f"{outcome.verdict} holds ({escaped(_REASONS.get(outcome.verdict, 'the target asks for it'))})"


def _actual(outcome: Outcome) -> str:
    if outcome.failure is not None:
        return f"round {outcome.rounds[-1].round}: {escaped(outcome.failure.message)}"
    if outcome.stuck is not None:
        return f"round {outcome.stuck.round}: {escaped(outcome.stuck.message)}"
    return f"round {outcome.broken[0].round}: {escaped(outcome.broken[0].message)}"


def _how_to_run(versions: Mapping[str, str], script: str | None, trace: str) -> Iterator[str]:
    if script is None:
        yield f"With kvledger: `kvledger replay {trace}`, with the scheduler as its `--target`."
        return
    needs = " and ".join(f"{name} {version}" for name, version in versions.items())
    yield f"`python {script}` needs {escaped(needs or 'the scheduler itself')}, and nothing of kvledger. It plays the"
    yield "trace, prints each round, and ends with status 1 if it fails as reported, 0 if it does not. A CPU is enough."
    yield f"`{trace}` is the same trace for `kvledger replay`."


# --- Markdown


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def code(name: str) -> str:
    """A name as a code span that neither ends early nor starts a table cell."""
    return f"`{named(name).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def escaped(text: str) -> str:
    """Text in which nothing is markup, a mention or a link."""
    safe = html.escape(plain(text, MESSAGE_COLUMNS), quote=False)
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", safe).replace("@", "&#64;")
