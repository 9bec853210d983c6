"""sglang's part of a stand-alone script: the stubs that a CPU needs, and a world of its own objects."""

from __future__ import annotations

from kvledger.targets.standalone import NoScriptError, body_of, packaged
from kvledger.trace import Trace

PACKAGES = ("sglang", "torch")


def standalone(trace: Trace) -> str:
    """The text of `World`. NoScriptError: the trace asks for what the script does not play."""
    if trace.accounting_rules.reserve_tail:
        raise NoScriptError("rules.reserve_tail is a variant of kvledger's, not sglang's own code")
    if trace.node.schedule_policy == "priority":
        raise NoScriptError('node.schedule_policy "priority" is not played by the script')
    stubs = body_of("What sglang asks of a machine without a GPU.", packaged("sglang", "stubs.py"))
    world = body_of(
        "sglang's scheduler, pool and prefix cache.",
        packaged("sglang", "script_world.py"),
        provided=("kvledger.targets.sglang.stubs",),
    )
    return f"{stubs}\n\n{world}"
