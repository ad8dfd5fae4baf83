"""A run's configuration as transformers takes it: the run itself, and what stock code looks for, derived from it."""

from typing import Any

from transformers import PreTrainedConfig

from maglev.config import RunConfig
from maglev.errors import RequestError
from maglev.model_config import SLIDING
from maglev.recipes import run_config
from maglev.runs import MODEL_TYPE

MODEL_FILE = "modeling_maglev.py"
AUTO_MAP = {"AutoConfig": "modeling_maglev.MaglevConfig", "AutoModelForCausalLM": "modeling_maglev.MaglevForCausalLM"}
DEFAULT_RECIPE = "maglev-shared-0.1"


class MaglevConfig(PreTrainedConfig):
    """`run` is the whole configuration of the run (`RunConfig.to_dict`). `prefiller` says whether the weights hold Q
    too, where the objective has one: without it the model can be used, and trained no further. `progress` is what the
    run's checkpoint stores beside tensors, `tokenizer_post_processor` what its tokenizer had in place of BOS."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    run: dict[str, Any] | None = None
    prefiller: bool = True
    progress: dict[str, Any] | None = None
    tokenizer_post_processor: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        run = run_config(DEFAULT_RECIPE) if self.run is None else RunConfig.from_dict(self.run)
        self.run = run.to_dict()
        for name, value in stock_attributes(run).items():
            given = kwargs.pop(name, value)
            if given != value:
                raise RequestError(f"{name} is {given} and the run says {value}; set it in the run's configuration")
            setattr(self, name, value)
        # wherever it was loaded from, the code lies beside the weights
        kwargs["auto_map"] = dict(AUTO_MAP)
        super().__post_init__(**kwargs)

    @classmethod
    def from_recipe(cls, recipe: str, depth: int, **settings: Any) -> "MaglevConfig":
        """A recipe with model keys: `MaglevConfig.from_recipe("maglev-shared-0.1", depth=4, vocab_size=512)`."""
        return cls(run=run_config(recipe, depth, {f"model.{key}": value for key, value in settings.items()}).to_dict())

    @property
    def run_config(self) -> RunConfig:
        return RunConfig.from_dict(self.run or {})


def stock_attributes(run: RunConfig) -> dict[str, Any]:
    """The names that caches, pipelines and other people's tools ask for.

    "hybrid_sliding" layers of a stock cache hold a window of keys and values and a recurrent state, "hybrid" ones all
    keys and values: that is a layer which sees the whole context.
    """
    model = run.model
    letters = (model.window_pattern[layer % len(model.window_pattern)] for layer in range(model.depth))
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": 4 * model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context,
        "sliding_window": model.window,
        "layer_types": ["hybrid_sliding" if letter == SLIDING else "hybrid" for letter in letters],
    }
