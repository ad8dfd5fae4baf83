"""The one loop on the recall task: every recipe, exact resumption, validation by memory source."""

import shutil
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maglev.checkpoint import checkpoint_folder
from maglev.data.recall import RecallConfig
from maglev.data.shards import open_data
from maglev.errors import RequestError
from maglev.runs import RECALL, TOKENIZER, read_metrics
from maglev.train import launch
from maglev.train.task import Recall
from tests.helpers import ALL_RECIPES, batch_of, small
from tests.small_runs import FAST, FROZEN, SMALL, Train, Unwatched, assert_same_tensors, losses_of, tensors_of

pytestmark = pytest.mark.usefixtures("without_speed")
TASK = RecallConfig(pairs=2, keys=8, values=8)


def train(recipe: str, run: Path, task: RecallConfig | Recall = TASK, **settings: Any) -> list[str]:
    watch = Unwatched()
    task = task if isinstance(task, Recall) else Recall(task)
    chosen = SMALL | FAST | {f"train.{name}": value for name, value in settings.items()}
    # the sentences of needles need some room
    chosen |= {} if task.data is None else {"model.context": 128, "train.tokens_per_step": 256}
    launch.train(recipe, task, run, watch, depth=1, settings=chosen, resume=True)
    return watch.lines


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_every_recipe_trains_on_it_in_passes_of_any_size(recipe: str, tmp_path: Path) -> None:
    losses = []
    for rows in (4, 2):
        said = train(recipe, tmp_path / str(rows), steps=2, checkpoint_every=2, rows_per_pass=rows)
        losses.append(losses_of(tmp_path / str(rows)))
    assert "2 steps of 128 tokens (no row twice, of the recall task)" in said[0]
    # every row has as many questions as another, so parts of a batch weigh the same; LRT's subsets have not
    if not recipe.startswith("lrt"):
        np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-5)
    assert (tmp_path / "4" / RECALL).is_file() and not (tmp_path / "4" / TOKENIZER).exists()


def test_a_resumed_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train("maglev-shared-0.1", whole, keep_checkpoints=9)
    shutil.copytree(whole, cut)
    for step in (4, 6):
        shutil.rmtree(checkpoint_folder(cut, step))
    assert any("resumed at step 2 of 6" in line for line in train("maglev-shared-0.1", cut, keep_checkpoints=9))
    assert_same_tensors(whole, cut)
    assert losses_of(whole) == losses_of(cut)


def test_validation_is_recall_by_memory_source(tmp_path: Path) -> None:
    said = train("maglev-shared-0.1", tmp_path / "run", validate_every=3, steps=3, checkpoint_every=3)
    assert said[-1].startswith("step 3: recall beyond the plain reach recurrent 0.")
    (row,) = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "validation"]
    sources = {"recall_recurrent", "recall_lifted"}
    assert {key for key in row if "recall" in key} == sources | {"recall_recurrent_minus_lifted"}


def test_another_task_does_not_go_on_in_the_run(tmp_path: Path, data: Path) -> None:
    train("swa-ssss", tmp_path / "run", steps=2, checkpoint_every=2)
    with pytest.raises(RequestError, match="was trained on another recall task"):
        train("swa-ssss", tmp_path / "run", RecallConfig(pairs=3, keys=8, values=8), steps=2)
    settings = SMALL | FAST | {"train.steps": 2, "model.vocab_size": 300}
    with pytest.raises(RequestError, match=r"model\.vocab_size"):
        launch.train("swa-ssss", Recall(TASK), tmp_path / "run", Unwatched(), depth=1, settings=settings, resume=True)
    with pytest.raises(RequestError, match=r"model\.vocab_size|tokenizer"):
        launch.train("swa-ssss", data, tmp_path / "run", Unwatched(), depth=1, settings=SMALL | FAST, resume=True)


def weights_of(run: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors_of(run).items() if name.startswith(("decoder/", "prefiller/"))}


def test_few_pairs_are_a_start_for_many_and_text_for_needles_in_it(
    tmp_path: Path, data: Path, other_data: Path, trained: Train
) -> None:
    few, text, numbers = tmp_path / "few", trained("maglev-closed"), count()
    train("maglev-closed", few, steps=2, checkpoint_every=2)

    def begin(task: Recall, start: Path) -> Path:
        run = tmp_path / f"{next(numbers)}"
        settings = SMALL | FROZEN | {"train.init_from": str(start)}
        settings |= {} if task.data is None else {"model.context": 128, "train.tokens_per_step": 256}
        launch.train("maglev-closed", task, run, Unwatched(), depth=1, settings=settings)
        return run

    needles = RecallConfig(variant="needles", pairs=1, keys=4, values=4)
    for task, start in (
        (Recall(RecallConfig(pairs=4, keys=8, values=8, query_share=0.5)), few),
        (Recall(RecallConfig(variant="overwrite", pairs=2, keys=8, values=8)), few),
        (Recall(needles, open_data(data)), text),
    ):
        ours, theirs = weights_of(begin(task, start)), weights_of(start)
        assert theirs and set(ours) == set(theirs)
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    for task, start, says in (
        # as many tokens, of which some mean something else
        (Recall(RecallConfig(pairs=2, keys=9, values=7)), few, "with 8 keys, 8 values and 7 fillers, which are other"),
        (Recall(RecallConfig(pairs=2, keys=200, values=92)), text, "was not trained on the recall task"),
    ):
        with pytest.raises(RequestError, match=says):
            begin(task, start)
    with pytest.raises(RequestError, match=r"the tokenizer of .* does not match the data"):
        Recall(needles, open_data(other_data)).check_tokens(text)
    settings = SMALL | {"train.init_from": str(few), "model.vocab_size": 300}
    with pytest.raises(RequestError, match=r"its model\.vocab_size is 24, this run's is 300"):
        launch.train("maglev-closed", data, tmp_path / "text", Unwatched(), depth=1, settings=settings)


def test_needles_in_text_go_on_as_if_nothing_had_happened_in_the_same_text_alone(
    tmp_path: Path, data: Path, other_data: Path
) -> None:
    config = RecallConfig(variant="needles", pairs=1, keys=4, values=4)
    needles, elsewhere = (Recall(config, open_data(folder)) for folder in (data, other_data))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    said = train("maglev-shared-0.1", whole, needles, keep_checkpoints=9, validate_every=6)
    assert "passes over the data" in said[0] and said[-1].startswith("step 6: recall beyond the plain reach")
    shutil.copytree(whole, cut)
    for step in (4, 6):
        shutil.rmtree(checkpoint_folder(cut, step))
    train("maglev-shared-0.1", cut, needles, keep_checkpoints=9, validate_every=6)
    assert_same_tensors(whole, cut)
    assert (whole / RECALL).is_file() and (whole / TOKENIZER).is_file()
    with pytest.raises(RequestError, match="tokenizer"):
        train("maglev-shared-0.1", cut, elsewhere)
    settings = SMALL | FAST | {"model.context": 128, "train.tokens_per_step": 256}
    with pytest.raises(RequestError, match="was trained on the recall task, not on text"):
        launch.train("maglev-shared-0.1", data, cut, Unwatched(), depth=1, settings=settings, resume=True)


def test_tokens_without_a_target_count_for_the_consistency_and_padding_does_not() -> None:
    objective = small("maglev-shared-0.1")
    tokens, targets = batch_of(2, 20)
    whole = objective(tokens, targets)
    some = {ignored: targets.clone() for ignored in (-1, -2)}
    for ignored, own in some.items():
        own[:, :15] = ignored
    unscored, padded = objective(tokens, some[-2]), objective(tokens, some[-1])
    assert unscored.next_token == padded.next_token != whole.next_token
    assert unscored.consistency == whole.consistency != padded.consistency
