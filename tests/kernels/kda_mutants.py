"""Mutants of KDA and its convolution: one small change of the source each, and who must see it.

``python -m tests.kernels.kda_mutants`` prints the table of the checks (``kda_checks``) that each one fails. One check,
"FlashKDA's", is there to be blind: the random inputs and the tolerance of FlashKDA's own tests, on what lies behind the
first sub-chunk. No mutant may read or write out of bounds: nothing here would notice.
"""

from __future__ import annotations

import sys

from kvledger.kernels.launch import Backend
from kvledger.kernels.state_plan import plan_chunks
from tests.kernels.kda_checks import CHECKS, CONV, KDA
from tests.kernels.mla_mutants import Mutant, swapped


def _mutant(name: str, module: str, old: str, new: str, *killers: str) -> Mutant:
    backend: Backend = "interpret" if module.endswith("_triton") else "torch"
    return Mutant(f"{module}: {name}", module, old, new, frozenset(killers), backend)


EXACT = ("slow", "swept")

MUTANTS = (
    # states of a request
    _mutant(
        "lost initial state",
        "kda_torch",
        "if call.source is not None and span.source != NO_SLOT:",
        "if False:",
        *EXACT,
        "splits",
        "restored",
    ),
    _mutant("wrong source slot", "kda_torch", "call.source[span.source]", "call.source[span.source - 1]", *EXACT),
    _mutant(
        "wrong destination slot",
        "kda_torch",
        "call.destination[span.destination] = state",
        "call.destination[span.destination - 1] = state",
        *EXACT,
        "slots",
    ),
    _mutant("no slot is the last slot", "kda_torch", " and span.source != NO_SLOT:", ":", "fresh"),
    _mutant("dropped state is written", "kda_torch", " and span.destination != NO_SLOT:", ":", "fresh"),
    _mutant("source changed in passing", "kda_torch", "copy=True", "copy=False", "checkpoints"),
    _mutant(
        "state of the wrong head",
        "kda_torch",
        "call.source[span.source].to(torch.float32, copy=True)",
        "call.source[span.source].to(torch.float32).roll(1, 0)",
        *EXACT,
    ),
    _mutant(
        "state of the wrong block of V",
        "kda_torch",
        "call.source[span.source].to(torch.float32, copy=True)",
        "call.source[span.source].to(torch.float32).roll(16, 1)",
        *EXACT,
    ),
    _mutant(
        "transposed state",
        "kda_torch",
        "call.source[span.source].to(torch.float32, copy=True)",
        "call.source[span.source].reshape(heads, k_size, v_size).mT.contiguous()",
        *EXACT,
    ),
    _mutant(
        "destination transposed",
        "kda_torch",
        "call.destination[span.destination] = state",
        "call.destination[span.destination] = state.mT.reshape(state.shape)",
        *EXACT,
        "splits",
    ),
    # checkpoints
    _mutant(
        "checkpoint a token late",
        "state_plan",
        "range(start // CHUNK * CHUNK, start + tokens, CHUNK) if tokens else ():\n"
        "        low, high = max(start - position, 0), min(start + tokens - position, CHUNK)\n"
        "        save = after.get(position + CHUNK - start, NO_SLOT)",
        "range((start - 1) // CHUNK * CHUNK + 1, start + tokens, CHUNK) if tokens else ():\n"
        "        low, high = max(start - position, 0), min(start + tokens - position, CHUNK)\n"
        "        save = after.get(min(position + CHUNK - start, tokens + 1) - 1, NO_SLOT)",
        "checkpoints",
        "restored",
    ),
    _mutant(
        "checkpoint a sub-chunk late",
        "state_plan",
        "after.get(position + CHUNK - start, NO_SLOT)",
        "after.get(position - start, NO_SLOT)",
        "checkpoints",
        "restored",
    ),
    _mutant(
        "sub-chunks aligned to the call",
        "state_plan",
        "range(start // CHUNK * CHUNK, start + tokens, CHUNK)",
        "range(start, start + tokens, CHUNK)",
        "checkpoints",
    ),
    _mutant(
        "checkpoint before its last sub-chunk",
        "kda_torch",
        "        state.mul_(decay).baddbmm_(update.mT, writers)\n",
        "        if chunk[3] != NO_SLOT:\n            call.pool[chunk[3]] = state\n"
        "            chunk = (*chunk[:3], NO_SLOT)\n        state.mul_(decay).baddbmm_(update.mT, writers)\n",
        "checkpoints",
        "restored",
    ),
    _mutant("checkpoint never written", "kda_torch", "if save != NO_SLOT", "if False", "checkpoints", "restored"),
    _mutant(
        "checkpoint at the chunk's end lost",
        "kda_torch",
        "if save != NO_SLOT and call.pool is not None:",
        "if save != NO_SLOT and call.pool is not None and chunk is not call.plan.chunks[chunks.stop - 1]:",
        "checkpoints",
    ),
    _mutant(
        "checkpoint at the chunk's end lost",
        "kda_triton",
        "        if save >= 0:\n",
        "        if (save >= 0) & (step + 1 < count):\n",
        "checkpoints",
    ),
    _mutant(
        "checkpoint at the chunk's end a token early",
        "conv_triton",
        "        tokens, slot = tl.load(save), tl.load(save + 1)\n",
        "        tokens, slot = tl.load(save), tl.load(save + 1)\n"
        "        if (index + 1 < count) & (tokens == tl.load(sequence + 5)) & (tokens > 0):\n"
        "            tokens = tokens - 1\n",
        "conv checkpoints",
    ),
    _mutant("every sub-chunk saved", "kda_torch", "if save != NO_SLOT and call", "if call", "slots", "checkpoints"),
    _mutant(
        "checkpoint in its neighbour's slot", "kda_torch", "call.pool[save] = ", "call.pool[save + 1] = ", "checkpoints"
    ),
    # the recurrence
    _mutant("Neumann series a term short", "kda_torch", " + inverse @ (diagonal @ diagonal)", "", "slow", "unbounded"),
    _mutant("blocks of 8 not merged", "kda_torch", "(4, 8)", "(4,)", *EXACT),
    _mutant(
        "decay after the update",
        "kda_torch",
        "state.mul_(decay).baddbmm_(update.mT, writers)",
        "state.baddbmm_(update.mT, writers).mul_(decay)",
        *EXACT,
    ),
    _mutant("state does not decay", "kda_torch", "state.mul_(decay)", "state", *EXACT, "FlashKDA's"),
    _mutant("beta forgotten in the update", "kda_torch", " * beta.mT", "", *EXACT),
    _mutant("beta forgotten in L", "kda_torch", "invert(beta * key", "invert(key", *EXACT),
    _mutant("L keeps its diagonal", "kda_torch", "key_pairs.tril(-1)", "key_pairs.tril()", *EXACT),
    _mutant("a token does not see itself", "kda_torch", "query_pairs.tril()", "query_pairs.tril(-1)", *EXACT),
    _mutant("scale twice", "kda_torch", "* call.scale,", "* call.scale * call.scale,", *EXACT),
    _mutant("scale forgotten", "kda_torch", " * call.scale,", ",", *EXACT),
    _mutant("q not normalised", "kda_torch", "normalise(q) *", "q *", *EXACT),
    _mutant("k not normalised", "kda_torch", "normalise(k)", "k", *EXACT),
    _mutant("one decay for all channels", "kda_torch", "decay=last.exp()", "decay=last[..., :1].exp()", *EXACT),
    # the gate
    _mutant("dt_bias forgotten", "kda_torch", "g + call.dt_bias[:, None, :]", "g", *EXACT),
    _mutant("exp of A_log forgotten", "kda_torch", "call.a_log.exp()", "call.a_log", *EXACT, "default"),
    _mutant("unbounded gate by quotients", "kda_torch", "if call.lower_bound is None:", "if False:", "unbounded swept"),
    _mutant(
        "decay as a difference of sums",
        "kda_torch",
        "log_decay.masked_fill(row <= j, 0).cumsum(2).exp()",
        "(log_decay.cumsum(2) - log_decay.cumsum(2)[:, :, j : j + 1]).clamp(max=0).exp()",
        "resets",
    ),
    _mutant(
        "a token decays what it writes", "kda_torch", "masked_fill(row <= j, 0)", "masked_fill(row < j, 0)", "resets"
    ),
    _mutant("dead lanes decay", "kda_torch", "log_decay.masked_fill_(~live[:, None, :, None], 0)", "pass", *EXACT),
    _mutant(
        "dead lanes read memory",
        "kda_torch",
        "taken.masked_fill_(~live[:, :, None, None], 0)",
        "taken",
        "company",
    ),
    # the convolution
    _mutant(
        "window not restored",
        "conv",
        "if call.windows is None or span.source == NO_SLOT:",
        "if True:",
        "conv exact",
        "conv splits",
    ),
    _mutant(
        "wrong window slot",
        "conv",
        "call.windows[span.source]",
        "call.windows[span.source - 1]",
        "conv exact",
        "conv company",
    ),
    _mutant("fresh request has a window", "conv", " or span.source == NO_SLOT:", ":", "conv fresh"),
    _mutant(
        "window never saved", "conv", "    if call.windows is None:\n        return\n", "    return\n", "conv splits"
    ),
    _mutant(
        "window a token early",
        "conv",
        "history[tokens : tokens + WINDOW]",
        "history[max(tokens - 1, 0) : max(tokens - 1, 0) + WINDOW]",
        "conv splits",
        "conv checkpoints",
    ),
    _mutant(
        "checkpoint a token late",
        "conv",
        "history[tokens : tokens + WINDOW]",
        "history[min(tokens + 1, span.tokens) :][:WINDOW]",
        "conv checkpoints",
    ),
    _mutant(
        "window newest first",
        "conv",
        "history[tokens : tokens + WINDOW]",
        "history[tokens : tokens + WINDOW].flip(0)",
        "conv splits",
        "conv checkpoints",
    ),
    _mutant(
        "short step forgets its window",
        "conv",
        "save_windows(call, span, history)\n\n",
        "save_windows(call, span, torch.cat((torch.zeros_like(history[:WINDOW]), history[WINDOW:])))\n\n",
        "conv splits",
        "conv checkpoints",
    ),
    _mutant(
        "checkpoint without its window",
        "conv",
        "(*span.saves, (span.tokens, span.destination))",
        "((span.tokens, span.destination),)",
        "conv checkpoints",
    ),
    _mutant("taps reversed", "conv", ".unbind(1)", ".flip(1).unbind(1)", "conv exact"),
    _mutant("bias forgotten", "conv", "total += call.bias", "pass", "conv exact"),
    _mutant("SiLU forgotten", "conv", "if call.silu else total", "if False else total", "conv exact"),
    # the same in Triton's source, where it costs little to see it
    _mutant(
        "lost initial state", "kda_triton", "    if source_slot >= 0:", "    if source_slot >= 99:", "slow", "restored"
    ),
    _mutant(
        "Neumann series a term short",
        "kda_triton",
        "inverse + tl.dot(inverse, square, input_precision=PRECISION)",
        "inverse",
        "slow",
    ),
    _mutant("blocks of 8 not merged", "kda_triton", "static_range(2, 4)", "static_range(2, 3)", "slow"),
    _mutant(
        "state of the wrong block of V",
        "kda_triton",
        "offset = (head * V + channels)[:, None] * K",
        "offset = (head * V + (channels + 16) % V)[:, None] * K",
        "slow",
    ),
    _mutant(
        "transposed state",
        "kda_triton",
        "tl.load(source + source_slot * source_stride + offset,",
        "tl.load(source + source_slot * source_stride + head * V * K + cols[None, :] * V + channels[:, None],",
        "slow",
    ),
    _mutant(
        "wrong destination slot",
        "kda_triton",
        "destination_slot * destination_stride",
        "destination_slot // 2 * destination_stride",
        "slow",
    ),
    _mutant(
        "checkpoint in its neighbour's slot",
        "kda_triton",
        "pool + save * pool_stride",
        "pool + (save + 1) * pool_stride",
        "checkpoints",
    ),
    _mutant(
        "checkpoint before its last update",
        "kda_triton",
        "            tl.store(pool + save * pool_stride + offset, state.to(pool",
        "            tl.store(pool + save * pool_stride + offset, (state - tl.dot(update, kr)).to(pool",
        "checkpoints",
    ),
    _mutant("state does not decay", "kda_triton", "state = state * decay[None, :]", "state = state * 1.0", "slow"),
    _mutant("beta forgotten in the update", "kda_triton", "inverse * strength[None, :]", "inverse", "slow"),
    _mutant(
        "beta forgotten in L",
        "kda_triton",
        "tl.where(below, kk * strength[:, None], 0.0)",
        "tl.where(below, kk, 0.0)",
        "slow",
    ),
    _mutant("scale twice", "kda_triton", "+ 1e-6) * scale", "+ 1e-6) * scale * scale", "slow"),
    _mutant(
        "dt_bias forgotten",
        "kda_triton",
        "    drive = raw + bias\n    if BOUNDED",
        "    drive = raw\n    if BOUNDED",
        "slow",
    ),
    _mutant(
        "unbounded gate by quotients",
        "kda_triton",
        "    if BOUNDED:\n        ki =",
        "    if K > 0:\n        ki =",
        "unbounded swept",
    ),
    _mutant(
        "decay as a difference of sums",
        "kda_triton",
        "between = tl.cumsum(tl.where(later, log_decay[:, None, :], 0.0), 0)",
        "total = tl.cumsum(log_decay, 0)\n        between = tl.minimum(total[:, None, :] - total[None, :, :], 0.0)",
        "resets",
    ),
    _mutant(
        "what is written decays by a difference of sums",
        "kda_triton",
        "kr = key * tl.exp(tl.cumsum(tl.where(after, log_decay, 0.0), 0, reverse=True))",
        "kr = key * tl.exp(last[None, :] - total)",
        "resets",
    ),
    _mutant(
        "what is written decays by its own token",
        "kda_triton",
        "tl.load(g + corner + H * K + offset, mask=after",
        "tl.load(g + corner + offset, mask=after",
        "resets",
    ),
    _mutant(
        "first block of V only",
        "kda_triton",
        "channels = program % blocks * BV + tl.arange(0, BV)",
        "channels = tl.arange(0, BV)",
        "blocks",
    ),
    _mutant(
        "first block of keys only",
        "kda_triton",
        "cols = j + tl.arange(0, BJ)",
        "cols = tl.arange(0, BJ)",
        "unbounded blocks",
    ),
    _mutant(
        "first block of outputs only",
        "conv_triton",
        "    cols = tl.program_id(1) * BC + tl.arange(0, BC)\n    live =",
        "    cols = tl.arange(0, BC)\n    live =",
        "conv blocks",
    ),
    _mutant(
        "first block of windows only",
        "conv_triton",
        "    cols = tl.program_id(1) * BC + tl.arange(0, BC)\n    for index",
        "    cols = tl.arange(0, BC)\n    for index",
        "conv blocks of windows",
    ),
    _mutant(
        "dead lanes decay",
        "kda_triton",
        "    total = tl.cumsum(tl.where(mask, log_decay, 0.0), 0)\n    last",
        "    total = tl.cumsum(log_decay, 0)\n    last",
        "slow",
    ),
    _mutant("window not restored", "conv_triton", "(source >= 0) & (before", "(source >= 99) & (before", "conv exact"),
    _mutant("short step forgets its window", "conv_triton", "elif source >= 0:", "elif source >= 99:", "conv splits"),
    _mutant(
        "window newest first",
        "conv_triton",
        "tl.store(row, oldest, mask=cols < C)",
        "tl.store(row, newest, mask=cols < C)",
        "conv splits",
    ),
    _mutant(
        "tokens of a neighbour for a window",
        "conv_triton",
        "new = live & (rows >= (WIDTH - 1 - tap) - before)[:, None]",
        "new = live & (base + rows >= WIDTH - 1 - tap)[:, None]",
        "conv exact",
        "conv company",
    ),
    _mutant("taps reversed", "conv_triton", "cols * WIDTH + tap", "cols * WIDTH + (WIDTH - 1 - tap)", "conv exact"),
)


def watchers(mutant: Mutant) -> tuple[str, ...]:
    """The checks that the table shows of a mutant: those of its half of the layer."""
    return tuple(CONV if mutant.module.startswith("conv") else KDA)


def killed_by(mutant: Mutant, names: tuple[str, ...]) -> dict[str, str]:
    """The checks that fail on the mutant, with what they say; an exception of another kind is no kill."""
    failed = {}
    plan_chunks.cache_clear()
    try:
        with swapped(mutant):
            for name in names:
                try:
                    CHECKS[name](mutant.backend)
                except AssertionError as error:
                    failed[name] = str(error).splitlines()[0] if str(error) else "assertion"
                except Exception as crash:
                    print(f"{mutant.name}: {name} ended in {crash!r}", file=sys.stderr)
    finally:
        plan_chunks.cache_clear()
    return failed


def main() -> int:
    survivors = 0
    for mutant in MUTANTS:
        failed = killed_by(mutant, watchers(mutant))
        missing = mutant.killers - failed.keys()
        survivors += not failed
        print(f"{mutant.name:<48} {', '.join(failed) or 'SURVIVES'}{f'  MISSING {sorted(missing)}' if missing else ''}")
    print(f"{len(MUTANTS)} mutants, {survivors} survive")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
