"""vLLM's released scheduler under test: attention alone, and hybrid models in align mode."""

from kvledger.targets.vllm.target import VllmAlignServedTarget, VllmAlignTarget, VllmStrictTarget, VllmTarget

__all__ = ["VllmAlignServedTarget", "VllmAlignTarget", "VllmStrictTarget", "VllmTarget"]
