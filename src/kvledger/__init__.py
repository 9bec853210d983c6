"""kvledger: can a scheduler promise KV memory that it cannot deliver?

The pure ledger library: page arithmetic, itemised promises, PrefillAdder (UnifiedAdder beside decode), and whole nodes
to run them on.
Importing it loads the standard library alone; the search lives in ``kvledger.testing`` (extra ``verify``).
"""

from kvledger.adder import AddReqResult, Chunk, PrefillAdder, PrefillRequest
from kvledger.ledger import ComputeLedger, Due, MemoryLedger, Promise
from kvledger.rules import PRESETS, AccountingRules
from kvledger.unified_adder import UnifiedAdder

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
    "UnifiedAdder",
    "__version__",
]
