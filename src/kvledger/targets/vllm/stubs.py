"""What stands in for a part of vLLM that a machine without a model and a GPU cannot build. Nothing here schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from kvledger.targets.vllm.package import VERSION, VllmConfig


@dataclass(frozen=True, slots=True)
class Stub:
    """`install` puts it into a configuration whose context has so many tokens; it stands in for `replaces`."""

    name: str
    reason: str
    replaces: str
    install: Callable[[VllmConfig, int], None]


OLD_FACTS: Mapping[str, object] = {"is_multimodal_model": False, "enable_return_routed_experts": False}
NEW_FACTS: Mapping[str, object] = {
    "uses_mrope": False,
    "supports_multimodal_inputs": False,
    "multimodal_config": None,
    "return_sampling_mask": False,
}
"""What only some versions of the scheduler ask of a model: 0.24, and those from 0.32 on."""


def _install_model(config: VllmConfig, max_model_len: int) -> None:
    config.model_config = SimpleNamespace(
        max_model_len=max_model_len,
        runner_type="generate",
        is_diffusion=False,
        is_encoder_decoder=False,
        skip_tokenizer_init=True,
        **(OLD_FACTS if VERSION.startswith("0.24.") else NEW_FACTS),
    )


MODEL = Stub(
    "model",
    "a real one is read from a model's files and imports its kernels; the scheduler asks for its context, and what it "
    "is not",
    "model_config",
    _install_model,
)
STUBS: tuple[Stub, ...] = (MODEL,)
