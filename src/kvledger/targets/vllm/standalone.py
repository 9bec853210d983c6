"""vLLM's part of a stand-alone script: its import, the outside, and a world."""

from __future__ import annotations

from kvledger.targets.standalone import body_of, packaged

PACKAGES = ("vllm", "torch")
_MODULES = ("package", "connector")


def world_text(*, align: bool) -> str:
    """The text of `World`; `align`: of a hybrid model in align mode."""
    provided = [f"kvledger.targets.vllm.{name}" for name in _MODULES]
    parts = [
        body_of(heading, packaged("vllm", f"{name}.py"), provided)
        for name, heading in (
            ("package", "vLLM, quiet and without a GPU."),
            ("connector", "A host tier, and transfers to a decode node."),
            ("script_world", "vLLM's scheduler."),
        )
    ]
    return "\n\n".join([*parts, "World.align = True"] if align else parts)
