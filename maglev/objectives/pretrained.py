"""A pretrained language model as the prefiller Q: it is frozen, and a learned projection makes memory targets of it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maglev.config import SeparateMaglevConfig
from maglev.errors import RequestError
from maglev.model.decoder import Decoder
from maglev.model.layers import Linear
from maglev.model_config import ModelConfig
from maglev.ops.inject import rms_norm


class PretrainedPrefiller(nn.Module):
    """A Hugging Face causal language model of any width. Its folder is read when it is first needed: what is deployed
    never needs it, and a checkpoint holds the projection alone."""

    def __init__(self, config: ModelConfig, objective: SeparateMaglevConfig) -> None:
        super().__init__()
        self.config, self.folder = config, Path(objective.prefiller_from)
        self.exit_proj = Linear(objective.prefiller_width, config.width)
        # in a list, so that its weights are no parameters of ours
        self.loaded: list[nn.Module] = []

    def load(self) -> nn.Module:
        if not self.loaded:
            self.loaded.append(load_frozen(self.folder, self.config, self.exit_proj.weight.shape[1]))
        return self.loaded[0]

    def forward(
        self, tokens: Tensor, decoder: Decoder, starts: Tensor | None = None, embedded: Tensor | None = None
    ) -> Tensor:
        """m'_{1:T}: (B, T) -> (B, T, D)."""
        if starts is not None:
            raise RequestError("a pretrained prefiller sees whole rows; leave data.document_mask away")
        frozen = self.load().to(tokens.device, decoder.compute_dtype)
        with torch.no_grad():
            hidden = frozen(input_ids=tokens, use_cache=False).last_hidden_state  # (B, T, its own width)
        return rms_norm(self.exit_proj(rms_norm(hidden)))


def load_frozen(folder: Path, config: ModelConfig, width: int) -> nn.Module:
    """The stack below the model's head, if it takes our tokens and rows."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise RequestError(f"a pretrained prefiller needs transformers ({error}); pip install 'maglev[hf]'") from None
    if not folder.is_dir():
        raise RequestError(
            f"objective.prefiller_from is {str(folder)!r}, which cannot be loaded: there is no such folder; put it "
            f"back, or ask for recurrent memories, which need no prefiller"
        )
    try:
        # not from elsewhere, and no pickle
        whole = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError) as error:
        line = str(error).splitlines()[0]
        raise RequestError(f"objective.prefiller_from is {str(folder)!r}, which cannot be loaded: {line}") from None
    model: Any = whole.base_model
    told = model.config.to_dict()
    longest = told.get("max_position_embeddings", told.get("n_positions"))
    rows, hidden = model.get_input_embeddings().weight.shape
    for name, own, needed, fits in (
        ("vocabulary", rows, config.vocab_size, rows >= config.vocab_size),
        ("context", longest, config.context, longest is None or longest >= config.context),
        ("width", hidden, width, hidden == width),
    ):
        if not fits:
            raise RequestError(
                f"objective.prefiller_from is {str(folder)!r}, whose {name} is {own}, and this run's is {needed}; "
                f"take another model, or change this run"
            )
    frozen: nn.Module = model.eval().requires_grad_(False)
    if sees_ahead(frozen):
        raise RequestError(
            f"objective.prefiller_from is {str(folder)!r}, whose states depend on later tokens; take a causal model"
        )
    return frozen


@torch.no_grad()
def sees_ahead(model: nn.Module) -> bool:
    tokens = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])
    first, second = model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    return not torch.allclose(first, second, rtol=1e-4, atol=1e-4)
