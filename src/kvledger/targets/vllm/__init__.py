"""vLLM's released scheduler under test: attention alone, and hybrid models in align mode."""

from importlib.util import find_spec

if find_spec("vllm") is None:
    raise ImportError("the package vllm is not installed: see requirements/vllm-0.33.0.txt")

from kvledger.targets.vllm.target import VllmAlignServedTarget, VllmAlignTarget, VllmStrictTarget, VllmTarget

__all__ = ["VllmAlignServedTarget", "VllmAlignTarget", "VllmStrictTarget", "VllmTarget"]
