"""What can happen in a trace, in order: values without behaviour. Sizes are tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvledger.faults import FaultKind
from kvledger.request import USUAL_OUTPUT, Output, Prompt

Tier = Literal["host", "device"]
Ranks = tuple[int, ...] | None
"""The pipeline ranks that an event reaches now, in order; None: all of them."""


@dataclass(frozen=True, slots=True)
class Cached:
    """The full pages of `prompt` are cached in `tier`; `locked`: by someone outside the trace, so never evicted."""

    tier: Tier
    prompt: Prompt
    locked: bool = False
    ranks: Ranks = None


@dataclass(frozen=True, slots=True)
class Submit:
    """A request with a name of its own joins the end of the waiting queue."""

    request: str
    prompt: Prompt
    output: Output = USUAL_OUTPUT


@dataclass(frozen=True, slots=True)
class Round:
    """One round is run."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Each running request takes a token; nobody is admitted. Only where decode is modelled."""


@dataclass(frozen=True, slots=True)
class Finish:
    """A request ends its output now, before `max_new_tokens`. Valid for every submitted request that decodes."""

    request: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Rounds are run until nothing waits or is half done; transfers complete as late as is fair."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """A request's KV has reached the decode node. Valid for every submitted request, in whatever state."""

    request: str
    ranks: Ranks = None


@dataclass(frozen=True, slots=True)
class Abort:
    """A request ends, wherever it is."""

    request: str
    ranks: Ranks = None


@dataclass(frozen=True, slots=True)
class Hold:
    """`name` takes `tokens` plain slots out of the pool; holds of one name add up."""

    name: str
    tokens: int
    ranks: Ranks = None


@dataclass(frozen=True, slots=True)
class Release:
    """`name` gives `tokens` of its slots back; None: all that it still holds."""

    name: str
    tokens: int | None = None
    ranks: Ranks = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault is armed: it strikes `request` the next time there is an occasion, once (see faults for the kinds)."""

    kind: FaultKind
    request: str
    amount: int | None = None


@dataclass(frozen=True, slots=True)
class Pin:
    """`name` locks what is cached of `prompt` on the device, as a write-back does; pins of one name add up."""

    name: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Unpin:
    """`name` lets go of all that it has pinned."""

    name: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Rounds do nothing from now on; time passes all the same."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Rounds are rounds again."""


Faulty = Fault | Pin | Unpin | Pause | Resume
"""What only a target that models faults can be told."""

Event = Cached | Submit | Round | Decode | Drain | Transferred | Finish | Abort | Hold | Release | Faulty
