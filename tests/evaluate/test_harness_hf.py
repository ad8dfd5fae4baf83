"""The harness's own evaluation of an export gives what ours gives of the run, item by item."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from maglev.evaluate.memories import Source
from maglev.evaluate.paper_tasks import TASKS
from maglev.evaluate.scoring import READINGS, Reading, open_scorer
from tests.evaluate.task_files import ITEMS
from tests.small_runs import SMALL, Train

pytest.importorskip("lm_eval", reason="needs lm_eval, the extra 'tasks' of maglev")
pytest.importorskip("transformers", reason="needs transformers, the extra 'hf' of maglev")

from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM

from maglev.evaluate.harness import HarnessLM, TaskSetting, load_tasks, task_names

RECIPES = ("maglev-shared-0.1", "swa-ssss")
CONTEXT = SMALL["model.context"]
LONG = 4096
TOLERANCE = 1e-4


def evaluated(model: TemplateLM, folder: Path, items: int, work: Path) -> dict[str, Any]:
    """Results and samples of all eight tasks, from the harness."""
    setting = TaskSetting(task_names("paper"), str(folder), limit=items)
    manager, tasks = load_tasks(setting, work)
    found = simple_evaluate(
        model=model, tasks=tasks, task_manager=manager, limit=items, bootstrap_iters=0, log_samples=True
    )
    assert found is not None
    return dict(found)


def theirs(folder: Path, **settings: Any) -> HFLM:
    """The harness's model `hf`, as `lm_eval --model hf --model_args pretrained=FOLDER` makes it."""
    return HFLM(pretrained=str(folder), device="cpu", **settings)


def ours(run: Path, max_length: int, reading: Reading = "parallel", source: Source = "recurrent") -> HarnessLM:
    opened = open_scorer(run, torch.device("cpu"), pytest.fail, reading=reading, source=source)
    return HarnessLM(opened.tokenizer, opened.scorer.score, max_length)


def log_likelihoods(found: dict[str, Any]) -> list[float]:
    return [value for task in TASKS for sample in found["samples"][task.name] for value, _ in sample["filtered_resps"]]


def assert_same_items(found: dict[str, Any], expected: dict[str, Any], items: int) -> None:
    assert set(found["samples"]) == set(expected["samples"]) == {task.name for task in TASKS}
    for task in TASKS:
        pairs = list(zip(found["samples"][task.name], expected["samples"][task.name], strict=True))
        assert len(pairs) == items
        for own, other in pairs:
            place = f"{task.name}, item {own['doc_id']}"
            assert own["arguments"] == other["arguments"], place
            # (log-likelihood, whether greedy) of every choice
            for (value, greedy), (wanted, wanted_greedy) in zip(
                own["filtered_resps"], other["filtered_resps"], strict=True
            ):
                assert abs(value - wanted) <= TOLERANCE and greedy == wanted_greedy, place
            for metric in own["metrics"]:
                assert own[metric] == pytest.approx(other[metric], rel=0, abs=TOLERANCE), place
        for metric, score in expected["results"][task.name].items():
            if isinstance(score, float) and math.isfinite(score):
                assert found["results"][task.name][metric] == pytest.approx(score, rel=TOLERANCE), (task.name, metric)


@pytest.mark.parametrize(
    ("recipe", "reading"),
    [*itertools.product(RECIPES, READINGS), ("lrt-slsl", "parallel"), ("maglev-closed", "parallel")],
)
def test_a_handful_of_every_task(
    recipe: str, reading: Reading, lively: Train, exported: Train, tasks_folder: Path, tmp_path: Path
) -> None:
    """Both cut at the context of the run, without being told."""
    wanted = evaluated(theirs(exported(recipe), batch_size=4), tasks_folder, ITEMS, tmp_path / "theirs")
    model = ours(lively(recipe), CONTEXT, reading)
    assert_same_items(evaluated(model, tasks_folder, ITEMS, tmp_path / "ours"), wanted, ITEMS)
    assert model.cut > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_items_of_the_official_splits(
    recipe: str, lively: Train, exported: Train, eval_folder: Path, tmp_path: Path
) -> None:
    """Of a thousand nats, which long answers have in a small vocabulary, the harness's float32 sums lose more than the
    tolerance. It adds up in the precision of its softmax."""
    items = 5
    model = theirs(exported(recipe), batch_size=8, max_length=LONG, softmax_dtype="float64")
    wanted = evaluated(model, eval_folder, items, tmp_path / "theirs")
    own = ours(lively(recipe), LONG)
    assert_same_items(evaluated(own, eval_folder, items, tmp_path / "ours"), wanted, items)
    assert own.cut == 0


def test_what_the_harness_evaluates_is_the_closed_loop(
    lively: Train, exported: Train, tasks_folder: Path, tmp_path: Path
) -> None:
    """Memories of the prefiller would give other numbers."""
    recipe = "maglev-shared-0.1"
    recurrent = evaluated(theirs(exported(recipe)), tasks_folder, ITEMS, tmp_path / "theirs")
    lifted = evaluated(ours(lively(recipe), CONTEXT, source="lifted"), tasks_folder, ITEMS, tmp_path / "lifted")
    apart = [abs(a - b) for a, b in zip(log_likelihoods(recurrent), log_likelihoods(lifted), strict=True)]
    assert max(apart) > 100 * TOLERANCE
