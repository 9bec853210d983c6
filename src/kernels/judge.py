"""Is the data right? Every output against the float64 truth, every free unit against its poison; two invariants more.

They are asked of a target that has the capability `data`, whose snapshot carries its `Judge`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvledger.evidence import Evidence, Finding
from kvledger.invariants import Invariant
from kvledger.kernels.model import ModelSpec
from kvledger.kernels.truth import Truth
from kvledger.record import RoundRecord, Snapshot
from kvledger.request import Prompt

FP32_RATIO: Final = 3e-5
FP32_TOKEN_RATIO: Final = 3e-4
"""Of one token's output, against the mean of all outputs; a whole chunk keeps to `FP32_RATIO`."""

KEPT_WHOLE_TOKENS: Final = 4096
"""Of a longer prompt only the tokens that were computed get their reference: attention is quadratic."""


@dataclass(slots=True)
class Output:
    """What a chunk [start, end) of a request came to, [tokens, hidden]; `whole` the same of the one-piece run.

    `stored` [end, MLA layers, latent] is what its pages hold, in the order of its table, the past's too.
    """

    rid: str
    prompt: Prompt
    start: int
    values: torch.Tensor
    stored: torch.Tensor
    whole: torch.Tensor | None = None


@dataclass(slots=True)
class Judge:
    """Compares outputs as they come; keeps the first thing that is wrong of each kind."""

    truth: Truth
    wrong_data: Finding | None = None
    wrong_poison: Finding | None = None
    compared: int = 0
    bitwise: int = 0
    worst: float = 0.0
    worst_token: float = 0.0

    def refuse(self, rid: str | None, reason: str) -> None:
        """A launch was refused: its tables do not hold."""
        self.wrong_data = self.wrong_data or Finding(rid, f"no launch: {reason}")

    def look(self, output: Output) -> None:
        """Compare a chunk's outputs, token by token, and what its pages hold, position by position.

        The outputs alone would not do: attention is a sum over a set, and whole pages of the past in another order
        leave it as it is, until somebody shares some of them.
        """
        exact = self._exact(output)
        self.compared += len(exact)
        errors = _errors(output.values, exact)
        self.worst = max(self.worst, float(np.sqrt((errors**2).mean())))
        self.worst_token = max(self.worst_token, float(errors.max()))
        self._look_at(output, "", output.start, errors)
        latents = self.truth.latents(output.prompt)[: len(output.stored)]
        self._look_at(output, "the latent of ", 0, _errors(output.stored.flatten(1), latents.reshape(len(latents), -1)))
        if output.whole is not None:
            self._look_bitwise(output, output.whole)

    def _look_at(self, output: Output, what: str, start: int, errors: npt.NDArray[np.float64]) -> None:
        whole, worst = float(np.sqrt((errors**2).mean())), float(errors.max())
        if whole <= FP32_RATIO and worst <= FP32_TOKEN_RATIO:  # NaN is no number below
            return
        wrong = ~(errors <= FP32_TOKEN_RATIO) if not worst <= FP32_TOKEN_RATIO else errors > FP32_RATIO
        first = int(np.argmax(wrong))
        message = (
            f"{output.rid}: {what}token {start + first} is off by {errors[first]:.2g} of its size, "
            f"{what and 'those of '}{'tokens' if what else 'chunk'} {start}..{start + len(errors)} by {whole:.2g}"
        )
        self.wrong_data = self.wrong_data or Finding(output.rid, message)

    def _look_bitwise(self, output: Output, whole: torch.Tensor) -> None:
        self.bitwise += len(output.values)
        same = (output.values == whole).all(1)
        if not bool(same.all()):
            position = output.start + int(torch.argmin(same.to(torch.uint8)))
            message = f"{output.rid}: token {position} differs in bits from the prompt run in one piece"
            self.wrong_data = self.wrong_data or Finding(output.rid, message)

    def _exact(self, output: Output) -> npt.NDArray[np.float64]:
        start, end = output.start, output.start + len(output.values)
        if output.prompt.tokens <= KEPT_WHOLE_TOKENS:
            return self.truth.outputs(output.prompt)[start:end]
        return self.truth.at(output.prompt, range(start, end))

    def note(self) -> str:
        """What was compared, in one line."""
        return (
            f"{self.compared:,} tokens computed, every one compared with float64, {self.bitwise:,} of them bit by bit "
            f"with the prompt in one piece: worst chunk {self.worst:.1e}, worst token {self.worst_token:.1e}"
        )


def _errors(found: torch.Tensor, exact: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each row, its RMS error over the RMS of all."""
    scale = np.sqrt((exact * exact).mean())
    return np.asarray(np.sqrt(((found.double().numpy() - exact) ** 2).mean(1)) / scale)


@dataclass(frozen=True, slots=True)
class DeviceSnapshot(Snapshot):
    """A snapshot of a node that keeps data, who judges them, and how to have him look at what is free."""

    judge: Judge | None = None
    look_at_poison: Callable[[], None] | None = None


def _judge(e: Evidence) -> Judge | None:
    return e.after.judge if isinstance(e.after, DeviceSnapshot) else None


def data_is_right(e: Evidence, _record: RoundRecord) -> Finding | None:
    """Every output so far is the truth's, and every launch had tables that hold."""
    judge = _judge(e)
    return None if judge is None else judge.wrong_data


def poison_holds(e: Evidence) -> Finding | None:
    """Free pages and slots are poison to the last bit, and nothing else has a NaN."""
    judge = _judge(e)
    if judge is None or not isinstance(e.after, DeviceSnapshot):
        return None
    if e.after.look_at_poison is not None:
        e.after.look_at_poison()
    return judge.wrong_poison


_DATA = frozenset({"data"})

DATA_INVARIANTS: tuple[Invariant, ...] = (
    Invariant("data-is-right", "a wrong page or a stale state is a wrong answer", "round", data_is_right, _DATA),
    Invariant("poison-holds", "nobody writes what is free, nobody reads what was never written", "event", poison_holds,
              _DATA),
)  # fmt: skip


def truth_of(spec: ModelSpec) -> Truth:
    """One truth a model in a process: examples of a search ask for the same prompts again and again."""
    return _TRUTHS.setdefault(spec, Truth(spec))


_TRUTHS: dict[ModelSpec, Truth] = {}
