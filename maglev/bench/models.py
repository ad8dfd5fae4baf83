"""Decoders with random weights: what a step or a pass costs does not depend on what the weights are."""

from dataclasses import replace
from typing import Any

import torch

from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState
from maglev.model_config import ModelConfig

RECIPES = {"swa": "swa-ssss", "maglev": "maglev-shared-0.1"}
# of --quick: for a look and for the tests
QUICK_DEPTH = 2
QUICK: dict[str, Any] = {"model.context": 64, "model.vocab_size": 256}


def random_decoder(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    decoder = Decoder(config).to(device, dtype).eval().requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        if name.endswith("scale"):
            parameter.fill_(1.0 if name.endswith("residual_scale") else 0.1)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return decoder


def swa_twin(config: ModelConfig) -> ModelConfig:
    """The same shape with sliding windows alone and no memory."""
    return replace(config, window_pattern="S", memory="none", injection="shared_kv", delay=1)


def full_state(decoder: Decoder, batch: int) -> DecoderState:
    """Rings without an empty slot, as they are anywhere beyond the window."""
    state = decoder.initial_state(batch)
    for ring in state.caches:
        ring.key.normal_()
        ring.value.normal_()
    state.memory.normal_()
    state.position.fill_(max(decoder.config.windows))
    return state
