"""kvledger: can a scheduler promise KV memory that it cannot deliver?

The pure ledger library: page arithmetic, itemised promises, PrefillAdder, and a whole prefill node to run them on.
Importing it loads the standard library alone; the search lives in ``kvledger.testing`` (extra ``verify``).
"""

from kvledger.adder import AddReqResult, Chunk, PrefillAdder, PrefillRequest
from kvledger.ledger import ComputeLedger, Due, MemoryLedger, Promise
from kvledger.rules import PRESETS, AccountingRules

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AccountingRules",
    "AddReqResult",
    "Chunk",
    "ComputeLedger",
    "Due",
    "MemoryLedger",
    "PrefillAdder",
    "PrefillRequest",
    "Promise",
    "__version__",
]
