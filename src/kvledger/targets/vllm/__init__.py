"""vLLM's released scheduler under test: attention alone, and hybrid models in align mode."""

from importlib import metadata

try:
    # what can be imported says little: sglang puts a module of that name there for itself
    metadata.version("vllm")
except metadata.PackageNotFoundError:
    raise ImportError(
        "the package vllm is not installed: pip install --no-deps -r requirements/vllm-0.33.0.txt"
    ) from None

from kvledger.targets.vllm.target import VllmAlignServedTarget, VllmAlignTarget, VllmStrictTarget, VllmTarget

__all__ = ["VllmAlignServedTarget", "VllmAlignTarget", "VllmStrictTarget", "VllmTarget"]
