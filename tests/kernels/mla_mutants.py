"""Mutants of the attention, store, copy and poison code: one small change of the source each, and who must see it.

``python -m tests.kernels.mla_mutants`` prints the table. A mutant is compiled from the changed source and swapped into
the living functions, so that whoever imported them runs it; the original is put back afterwards. No mutant may write
out of bounds: nothing here would notice, and the process would die of it later.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

from kvledger.kernels.launch import Backend, triton_module
from tests.kernels.mla_checks import ATTENTION, CHECKS, MEMORY, NotRefusedError


@dataclass(frozen=True)
class Mutant:
    """``old`` occurs once in ``kvledger.kernels.<module>`` and becomes ``new``; each of ``killers`` must fail."""

    name: str
    module: str
    old: str
    new: str
    killers: frozenset[str]
    backend: Backend = "torch"

    @property
    def watchers(self) -> frozenset[str]:
        """The checks that the table shows: of attention alone, unless the change is elsewhere."""
        return frozenset(CHECKS if self.killers & MEMORY.keys() else ATTENTION)


def _mutant(name: str, module: str, old: str, new: str, *killers: str) -> Mutant:
    backend: Backend = "interpret" if module.endswith("_triton") else "torch"
    return Mutant(f"{module}: {name}", module, old, new, frozenset(killers), backend)


EXACT = "agrees_with_float64"
UNUSED = "unused_rows_do_not_matter"
NUMBERS = "page_numbers_do_not_matter"
COMPANY = "company_does_not_matter"
SPLITS = "splits_do_not_matter"
LAYERS = "layers_between_pages_do_not_matter"
STORED = "stores_each_latent_once"
POISON = "poison_stays_and_never_shows"
CANARY = "canary_sees_each_fault"
COPIED = "copies_words"
RUNS = "copies_runs"
REFUSED = "bad_tables_are_refused"

MUTANTS = (
    # attention in torch
    _mutant(
        "unmasked last page",
        "mla_torch",
        "keys[: chunk.end] = pages[chunk.pages.to(pages.device)].reshape(-1, width)[: chunk.end].float()",
        "rows = pages[chunk.pages.to(pages.device)].reshape(-1, width)[:padded].float(); keys[: len(rows)] = rows",
        EXACT,
        UNUSED,
    ),
    _mutant(
        "table row of another request",
        "mla_torch",
        "pages[chunk.pages.to(pages.device)]",
        "pages[plan.sequences[0].pages[torch.arange(len(chunk.pages)) % len(plan.sequences[0].pages)]]",
        EXACT,
        COMPANY,
    ),
    _mutant(
        "pages in the order of their numbers",
        "mla_torch",
        "pages[chunk.pages.to(pages.device)]",
        "pages[chunk.pages.sort().values]",
        EXACT,
        NUMBERS,
    ),
    _mutant(
        "wrong page",
        "mla_torch",
        "pages[chunk.pages.to(pages.device)]",
        "pages[chunk.pages.roll(1).to(pages.device)]",
        EXACT,
    ),
    _mutant("causal sees one later", "mla_torch", "> positions", "> positions + 1", EXACT, SPLITS),
    _mutant("causal misses itself", "mla_torch", "> positions", ">= positions", EXACT),
    _mutant(
        "start ignored in the mask",
        "mla_torch",
        "torch.arange(first, first + plan.block_m, device=q.device)",
        "torch.arange(first - chunk.start, first - chunk.start + plan.block_m, device=q.device)",
        EXACT,
        SPLITS,
    ),
    _mutant(
        "rope part dropped",
        "mla_torch",
        "scores = query @ block.T",
        "scores = query[:, :rank] @ block[:, :rank].T",
        EXACT,
    ),
    _mutant("rope part as values", "mla_torch", "block[:, :rank]", "block[:, -rank:]", EXACT),
    _mutant("scale forgotten", "mla_torch", "(scale * math.log2(math.e))", "math.log2(math.e)", EXACT),
    _mutant("base of the exponential", "mla_torch", "(scale * math.log2(math.e))", "scale", EXACT),
    _mutant("sum not faded", "mla_torch", "total * fade + weights", "total + weights", EXACT),
    _mutant("values not faded", "mla_torch", "values * fade + weights", "values + weights", EXACT),
    _mutant("mask starts a block late", "mla_torch", "> first + 1:", "> first + plan.block_n:", EXACT),
    _mutant(
        "tile not padded",
        "mla_torch",
        "scores = query @ block.T",
        "some = slice((low - first) * heads, (high - first) * heads); scores = torch.zeros(len(query), len(block)); "
        "scores[some] = query[some] @ block.T",
        SPLITS,
    ),
    _mutant(
        "keys not padded",
        "mla_torch",
        "scores = query @ block.T",
        "scores = torch.zeros(len(query), len(block)); scores[:, : high - begin] = query @ block[: high - begin].T",
        SPLITS,
    ),
    _mutant(
        "rows of the first request",
        "mla_torch",
        "slice(chunk.row + low - chunk.start, chunk.row + high - chunk.start)",
        "slice(low - chunk.start, high - chunk.start)",
        EXACT,
        COMPANY,
    ),
    # attention in Triton
    _mutant(
        "masked scores, unmasked loads",
        "mla_triton",
        "exists = key_position < stop\n",
        "exists = key_position < (stop + PAGE_SIZE - 1) // PAGE_SIZE * PAGE_SIZE\n",
        EXACT,
        UNUSED,
        POISON,
    ),
    _mutant(
        "unmasked last page",
        "mla_triton",
        "key_position[None, :] <= position[:, None]",
        "key_position[None, :] < (position[:, None] // PAGE_SIZE + 1) * PAGE_SIZE",
        EXACT,
        SPLITS,
    ),
    _mutant(
        "wrong page",
        "mla_triton",
        "page = tl.load(table_row + begin // PAGE_SIZE)",
        "page = tl.load(table_row + tl.maximum(begin // PAGE_SIZE - 1, 0))",
        EXACT,
    ),
    _mutant(
        "table row of another request",
        "mla_triton",
        "table + tl.load(tile) * table_stride",
        "table + tl.load(tile) * 0",
        EXACT,
        COMPANY,
    ),
    _mutant("causal sees one later", "mla_triton", "<= position[:, None]", "<= position[:, None] + 1", EXACT, SPLITS),
    _mutant("causal misses itself", "mla_triton", "<= position[:, None]", "< position[:, None]", EXACT),
    _mutant("start ignored in the mask", "mla_triton", "<= position[:, None]", "<= position[:, None] - start", EXACT),
    _mutant(
        "rope part dropped",
        "mla_triton",
        "scores = tl.dot(query_rope, tl.trans(key_rope), scores, input_precision=PRECISION)",
        "pass",
        EXACT,
    ),
    _mutant("rope part read at the rank's place", "mla_triton", "key + RANK + rope", "key + rope", EXACT),
    _mutant("scale forgotten", "mla_triton", "scores * scale_log2", "scores * 1.4426950408889634", EXACT),
    _mutant("sum not faded", "mla_triton", "total = total * fade", "total = total", EXACT),
    _mutant("values not faded", "mla_triton", "values * fade[:, None],", "values,", EXACT),
    _mutant("last key block forgotten", "mla_triton", "tl.range(0, stop, BLOCK_N", "tl.range(0, first, BLOCK_N", EXACT),
    _mutant(
        "layers between pages forgotten",
        "mla_triton",
        "return pages.stride(0) // pages.shape[2]",
        "return pages.shape[1]",
        LAYERS,
    ),
    # the plan
    _mutant("start dropped", "tables", "end = start + high - low", "start, end = 0, high - low", EXACT, SPLITS),
    _mutant("range of pages unchecked", "tables", "(numbers < 0) | (numbers >= count)", "numbers < 0", REFUSED),
    _mutant("negative page unchecked", "tables", "(numbers < 0) | (numbers >= count)", "numbers >= count", REFUSED),
    _mutant("page twice unchecked", "tables", "if distinct and", "if not distinct and", REFUSED),
    _mutant("short table unchecked", "tables", "if count > len(row):", "if count > len(row) + 1:", REFUSED),
    # latents
    _mutant(
        "slot off by one",
        "mla_torch",
        "slot_map.slots % slot_map.page_size",
        "(slot_map.slots + 1) % slot_map.page_size",
        STORED,
        POISON,
    ),
    _mutant("slot off by one", "mla_triton", "+ slot % PAGE_SIZE", "+ (slot + 1) % PAGE_SIZE", STORED, POISON),
    _mutant("last row forgotten", "mla_triton", "there = token < tokens\n", "there = token < tokens - 1\n", STORED),
    _mutant(
        "stored through float16",
        "mla_torch",
        "element_words(latents)",
        "element_words(latents.half().to(latents.dtype))",
        STORED,
    ),
    # copies
    _mutant(
        "copy of the wrong page", "pages", "dst[targets.to(dst.device)]", "dst[targets.roll(1).to(dst.device)]", COPIED
    ),
    _mutant(
        "copy of the wrong page", "pages_triton", "src_units + pair)", "src_units + tl.maximum(pair - 1, 0))", COPIED
    ),
    _mutant(
        "copy of the next page",
        "pages_triton",
        "tl.load(src_units + pair)",
        "(tl.load(src_units + pair) + 1) % 5",
        COPIED,
    ),
    _mutant(
        "runs where only the source is a run",
        "pages",
        " and targets[at] == targets[at - 1] + 1:",
        ":",
        RUNS,
    ),
    _mutant(
        "copy through float",
        "pages",
        "src, dst = as_words(src_pool), as_words(dst_pool)",
        "return (src_pool.float().to(src_pool.dtype), dst_pool) if src_pool.is_floating_point() else "
        "(as_words(src_pool, widest=1), as_words(dst_pool, widest=1))",
        COPIED,
    ),
    _mutant("pitch of a unit forgotten", "pages_triton", "src.stride(0) // quantum,", "words // quantum,", COPIED),
    _mutant("page copied onto itself unchecked", "pages", "if both:", "if not both:", REFUSED),
    _mutant("overlap unchecked", "pages", "if share_memory(src, dst):", "if False:", REFUSED),
    # poison
    _mutant(
        "canary forgotten",
        "canary",
        "distinct=False).to(pool.device)] = poison",
        "distinct=False).to(pool.device)][:] = 0",
        POISON,
        CANARY,
    ),
    _mutant(
        "canary forgotten in rows",
        "canary",
        "    if len(rows):\n        page, offset",
        "    if not len(rows):\n        page, offset",
        POISON,
        CANARY,
    ),
    _mutant("any NaN passes for poison", "canary", "words != poison, words", "~values.isnan(), words", CANARY),
    _mutant(
        "first element stands for all", "canary", "values.isnan(), element", "values[:, :1].isnan(), element", CANARY
    ),
    _mutant(
        "row off by one",
        "canary",
        "numbers // page_size, numbers % page_size",
        "numbers // page_size, (numbers + 1) % page_size",
        POISON,
        CANARY,
    ),
)


@contextmanager
def swapped(mutant: Mutant) -> Iterator[None]:
    """Run the mutant's functions in place of the originals."""
    triton_module("mla_triton", "interpret")  # whoever imports Triton first says how it runs
    module = import_module(f"kvledger.kernels.{mutant.module}")
    source = Path(str(module.__file__)).read_text()
    assert source.count(mutant.old) == 1, f"{mutant.name}: {source.count(mutant.old)} places say {mutant.old!r}"
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{mutant.module}.py"
        path.write_text(source.replace(mutant.old, mutant.new))
        changed: dict[str, Any] = {"__name__": module.__name__, "__file__": str(path)}
        exec(compile(path.read_text(), str(path), "exec"), changed)
        saved = {name: _body(value) for name, value in vars(module).items() if _body(value)}
        try:
            for name in saved:
                _set_body(vars(module)[name], _body(changed[name]))
            yield
        finally:
            for name, body in saved.items():
                _set_body(vars(module)[name], body)
            linecache.checkcache(str(path))


def _body(value: Any) -> dict[str, Any]:
    """What makes a function of this module run as it does: its code, or what Triton's interpreter rewrites."""
    if isinstance(value, FunctionType):
        return {"__code__": value.__code__} if value.__module__.startswith("kvledger.kernels.") else {}
    if type(value).__name__ == "InterpretedFunction":
        return {"fn": value.fn, "rewriter": value.rewriter}
    return {}


def _set_body(value: Any, body: dict[str, Any]) -> None:
    for name, part in body.items():
        setattr(value, name, part)


def killed_by(mutant: Mutant, watchers: frozenset[str]) -> dict[str, str]:
    """Return the checks that fail on the mutant, with what they say; an exception of another kind is no kill."""
    failed = {}
    with swapped(mutant):
        for name in (name for name in CHECKS if name in watchers):
            try:
                CHECKS[name](mutant.backend)
            except (AssertionError, NotRefusedError) as error:
                failed[name] = str(error)
            except Exception as crash:
                print(f"{mutant.name}: {name} ended in {crash!r}", file=sys.stderr)
    return failed


def main() -> int:
    survivors = 0
    for mutant in MUTANTS:
        failed = killed_by(mutant, mutant.watchers)
        missing = mutant.killers - failed.keys()
        survivors += bool(missing)
        print(f"{mutant.name:<52} {', '.join(failed) or 'SURVIVES'}{f'  MISSING {sorted(missing)}' if missing else ''}")
    print(f"{len(MUTANTS)} mutants, {survivors} not killed by those who must")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
