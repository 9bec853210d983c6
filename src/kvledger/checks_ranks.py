"""Checks of a pipeline: that all ranks do the same, and every check of pages and requests on each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvledger.evidence import Evidence, Finding
from kvledger.record import RoundRecord
from kvledger.settings import of_rank

Check = Callable[..., Finding | None]


def on_every_rank(check: Check) -> Check:
    """A check of the deciding rank, and of each that replays; the finding names the rank."""

    def asked(e: Evidence, *facts: object) -> Finding | None:
        finding = check(e, *facts)
        if finding is not None or not e.after.ranks:
            return finding
        for rank, view in _views(e):
            finding = check(view, *facts)
            if finding is not None:
                return Finding(finding.request, f"rank {rank}: {finding.message}")
        return None

    return asked


def _views(e: Evidence) -> Iterator[tuple[int, Evidence]]:
    """The evidence as if each replaying rank were the node."""
    befores = e.before.ranks or e.after.ranks
    alive = e.ranks_alive or [frozenset()] * len(e.after.ranks)
    each_rank = zip(befores, e.after.ranks, e.ranks_ended, alive, strict=True)
    for rank, (before, after, ended, held) in enumerate(each_rank, 1):
        settings = of_rank(e.settings, rank)
        yield rank, replace(e, settings=settings, before=before, after=after, ended=ended, alive=held)


def same_batches(_: Evidence, record: RoundRecord) -> Finding | None:
    """Every rank was to run the chunks that were decided, in their order, and put off the same request."""
    if record.failure is not None:
        return None
    chunks = [(d.request, d.start, d.end) for d in record.joined]
    deferred = [d.request for d in record.decisions if d.kind == "deferred"]
    for rank in record.ranks:
        if list(rank.ran) != chunks:
            place = next(
                (at for at, pair in enumerate(zip(chunks, rank.ran, strict=False)) if len(set(pair)) > 1), None
            )
            at = min(len(chunks), len(rank.ran)) if place is None else place
            rid = (chunks[at:] or rank.ran[at:])[0][0]
            return Finding(rid, f"rank {rank.rank} ran {_words(rank.ran)}, and rank 0 decided {_words(chunks)}")
        if list(rank.deferred) != deferred:
            rid = (deferred or list(rank.deferred))[0]
            return Finding(rid, f"rank {rank.rank} and rank 0 disagree about putting {rid} off")
    return None


def _words(chunks: Sequence[tuple[str, int, int]]) -> str:
    return ", ".join(f"{request} {start}..{end}" for request, start, end in chunks) or "nothing"
