"""What a run's layers ask of attention, and which kernel they then train with."""

from typing import Any

import pytest
import torch

from maglev.errors import RequestError
from maglev.objectives import Objective
from maglev.ops import attention
from maglev.ops.kernels import BLOCKWISE, FLEX
from maglev.recipes import run_config
from maglev.train.setup import attention_cases, build_for_training

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def built(recipe: str, **settings: Any) -> tuple[Any, Objective]:
    shape = {"model.context": 256, "model.window": 64, "model.vocab_size": 64, "model.width": 64, "model.heads": 2}
    config = run_config(recipe, 2, shape | {name.replace("__", "."): value for name, value in settings.items()})
    return config, build_for_training(config, CPU)


@pytest.mark.parametrize(
    ("recipe", "settings", "expected"),
    [
        ("swa-ssss", {}, {"window 64": "whole"}),
        ("transformer-slsl", {}, {"window 64": "whole", "whole context": "whole"}),
        ("transformer-slsl", {"data__document_mask": True}, {"window 64": "parts", "whole context": "parts"}),
        ("maglev-shared-0.1", {}, {"window 64": "whole", "prefiller, whole context": "whole"}),
        ("maglev-separate-1", {}, {"window 64": "whole", "prefiller, whole context": "whole"}),
        ("lrt-ssss", {}, {"window 64": "whole", "128 positions of a row, window 64": "parts"}),
        (
            "maglev-shared-0.1",
            {"model__injection": "tokens", "objective__prefiller_pattern": "S"},
            {"window 64": "parts", "prefiller, window 64": "whole"},
        ),
        (
            "maglev-closed",
            {"model__injection": "shared_kv", "model__delay": 32},
            {
                "window 64": "whole",
                "prefiller, whole context": "whole",
                "32 positions in a row, window 64": "parts",
            },
        ),
    ],
)
def test_what_layers_ask_for(recipe: str, settings: dict[str, Any], expected: dict[str, str]) -> None:
    config, objective = built(recipe, **settings)
    cases = attention_cases(config, objective, CUDA)
    assert {name: "whole" if case.is_whole else "parts" for name, case in cases.items()} == expected
    for name, case in cases.items():
        assert case.is_full == ("whole context" in name) and case.head_dim == 32 and case.device_type == "cuda"
        assert case.queries == (32 if "in a row" in name else 128 if "of a row" in name else 256)
        assert case.documents == config.data.document_mask


def test_the_line_of_a_run_names_every_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "error_of", lambda *case: 0.001)
    monkeypatch.setitem(attention.ORDER, "windowed", (FLEX, BLOCKWISE))
    monkeypatch.setitem(attention.ORDER, "full", (FLEX, BLOCKWISE))
    attention.check.cache_clear()
    try:
        config, objective = built("lrt-slsl", train__precision="bfloat16")
        line = attention.describe("cuda", attention_cases(config, objective, CUDA), "sdpa")
    finally:
        attention.check.cache_clear()
    told = "(within 0.0010 of the definition)"
    assert line == (
        f"attention on cuda: window 64: flex {told}; whole context: sdpa {told}; "
        f"128 positions of a row, window 64: flex {told}; 128 positions of a row, whole context: flex {told}"
    )


def test_a_kernel_that_takes_nothing_of_a_run_is_refused() -> None:
    with pytest.raises(RequestError, match=r"train.attention is sdpa, .* set it to auto or to blockwise$"):
        built("transformer-slsl", train__attention="sdpa")


def test_training_takes_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all of its passes, Q's and the later ones of LRT too."""
    asked: list[str] = []

    def choose(case: Any, wanted: str | None) -> tuple[str, str]:
        asked.append(str(wanted))
        return "blockwise", ""

    monkeypatch.setattr(attention, "choose", choose)
    tokens = torch.zeros(1, 256, dtype=torch.int64)
    for recipe, plans in (("swa-ssss", 1), ("maglev-shared-0.1", 3), ("maglev-separate-1", 3), ("lrt-ssss", 3)):
        for setting, wanted in (("blockwise", "blockwise"), ("auto", "None")):
            _, objective = built(recipe, train__attention=setting)
            asked.clear()
            objective(tokens, tokens)
            assert asked == [wanted] * plans
