"""Small transformers models whose weights are not those of the start."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers import VOCAB, random_weights, step_through

# one of each kind of objective and of each kind of layer
KINDS = ["maglev-shared-0.1", "maglev-separate-1", "lrt-slsl", "swa-ssss"]
CONTEXT = 24


def small_model(recipe: str = "maglev-shared-0.1", *, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """In evaluation mode; its loop contracts, so that passes and steps meet."""
    from maglev.hf import MaglevConfig, MaglevForCausalLM

    shape = {"width": 32, "heads": 4, "kv_heads": 2, "context": CONTEXT, "window": 8, "vocab_size": VOCAB} | settings
    model = MaglevForCausalLM(MaglevConfig.from_recipe(recipe, depth=3, **shape)).to(dtype)
    random_weights(model.objective, scale=0.5)
    return model.eval()


def stepped_logits(model: Any, tokens: Tensor) -> Tensor:
    """(B, T, V), the decoder on its own memories, one token at a time"""
    with torch.no_grad():
        return model.decoder.readout(step_through(model.decoder, tokens))
