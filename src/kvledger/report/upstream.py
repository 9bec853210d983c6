"""A failing trace as a report for another project, in Markdown: facts, figures, and how to repeat them.

Its reader knows that project and not kvledger, so whatever is kvledger's own word is avoided or explained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvledger import __version__
from kvledger.invariants import INVARIANTS
from kvledger.report.markdown import code, escaped, table
from kvledger.report.recording import Recording
from kvledger.report.upstream_rounds import event_rows, round_lines, terms
from kvledger.report.upstream_story import Story, story_of
from kvledger.targets.about import About
from kvledger.targets.standalone import looked_for

FLAGS_COLUMNS = 1000
NOTE_COLUMNS = 2000


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a report comes from. `script` and `trace` are names of the files beside it; no script: None."""

    target: str
    versions: Mapping[str, str]
    trace: str
    script: str | None = None
    about: About | None = field(default=None)


def upstream_lines(recording: Recording, sources: Sources) -> list[str]:
    """The report's lines."""
    about = sources.about
    story = story_of(recording)
    expected = about.expected if about is not None and about.expected is not None else story.expected
    return [
        f"# {story.title}",
        "",
        " ".join(story.sentences),
        "",
        *_short(recording.trace.title),
        *_notes(about),
        f"- Expected: {escaped(expected)}.",
        f"- Actual: {story.actual}.",
        "",
        "## Version, code and settings",
        "",
        *_versions(sources),
        "",
        *_settings(recording, about),
        "",
        "## The trace",
        "",
        *table(("", "event", "what", "tokens"), event_rows(recording.trace)),
        "",
        "## Round by round",
        "",
        *terms(recording),
        "",
        *round_lines(recording, story),
        "## How to run it",
        "",
        *_how_to_run(recording, sources, story),
    ]


def _short(title: str) -> Iterator[str]:
    """A title that the search gave says, in kvledger's words, what the report says already."""
    if title and title.partition(":")[0] not in {invariant.name for invariant in INVARIANTS}:
        yield f"In short: {escaped(title.rstrip('.'))}."
        yield ""


def _notes(about: About | None) -> Iterator[str]:
    for note in about.notes if about is not None else ():
        yield escaped(note, NOTE_COLUMNS)
        yield ""


# --- where it was seen


def _versions(sources: Sources) -> Iterator[str]:
    seen = ", ".join(f"{name} {version}" for name, version in sources.versions.items())
    yield f"Seen with {escaped(seen)}." if seen else "Seen with the scheduler as it is."
    yield ""
    yield (
        f"Found by kvledger {__version__}, which drives a scheduler on a CPU, without a model (target "
        f"{code(sources.target)})."
    )
    if sources.about is not None:
        yield ""
        yield f"Whose code ran: {escaped(sources.about.whose_code, NOTE_COLUMNS)}"


def _settings(recording: Recording, about: About | None) -> Iterator[str]:
    node = recording.trace.node
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
    shorter = {
        "truncation alignment": rules.truncation_align,
        "continuation limit": rules.continuation_limit,
        "chunk grid": rules.chunk_grid,
    }
    sizes += [(name, size) for name, size in shorter.items() if size is not None]
    words = [f"{name} {size}" for name, size in sizes]
    words += [f"schedule policy {node.schedule_policy}"] * (node.schedule_policy != "fcfs")
    words += ["mixed chunks"] * node.mixed_chunk
    mode = "One prefill node" if node.mode == "prefill" else "One node that prefills and decodes"
    yield f"{mode}; sizes in tokens: {', '.join(words)}."
    if about is not None and about.flags:
        yield ""
        yield "On a server these are:"
        yield ""
        yield f"    {about.flags[:FLAGS_COLUMNS]}"
    if about is not None and about.beside_flags:
        yield ""
        yield escaped(about.beside_flags, NOTE_COLUMNS)


# --- how to repeat it


def _how_to_run(recording: Recording, sources: Sources, story: Story) -> Iterator[str]:
    if sources.script is None:
        yield f"With kvledger: `kvledger replay {sources.trace}`, with the scheduler as its `--target`."
        return
    needs = " and ".join(f"{name} {version}" for name, version in sources.versions.items())
    yield (
        f"`python {sources.script}` needs {escaped(needs or 'the scheduler itself')}, and nothing of kvledger. A CPU "
        "is enough. It plays the trace and prints each round. Its exit status:"
    )
    yield ""
    if looked_for(recording.outcome):
        yield f"- 1: it fails as reported ({story.short});"
        yield "- 0: it was looked for and is not there, as after a fix;"
        yield "- 2: it could not run (a missing module, another exception), so nothing is shown."
    else:
        yield (
            f"- 2, always: it repeats the rounds, but cannot see what is reported ({story.short}), so it shows "
            f"neither that it is there nor that it is mended. `kvledger replay {sources.trace}` can."
        )
    yield ""
    yield f"`{sources.trace}` is the same trace for `kvledger replay`."
