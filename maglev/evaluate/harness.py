"""Our models in lm-evaluation-harness, so that any of its tasks runs: it makes the prompts and the metrics, we answer.

Who answers is a function from requests to scores: a model, a pen that writes requests down, or a file of scores.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import lm_eval.tasks
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError, WorkError
from maglev.evaluate.paper_tasks import BY_NAME, TASKS, find_definition, write_definition
from maglev.evaluate.requests import Request, RequestFile, Score, ScoreFile
from maglev.inference.batch import generate_batch
from maglev.inference.engine import LanguageModel
from maglev.inference.sampling import Sampling

Answer = Callable[[Sequence[Request]], list[Score]]
PAPER = "paper"
# of the standard errors that have no formula, such as that of perplexity
BOOTSTRAPS = 1000

if not hasattr(TaskManager, "load"):
    raise ImportError("its TaskManager has no load")


class HarnessLM(TemplateLM):
    """Text begins with BOS, once. More than `max_length` tokens lose their beginning, as in the harness's own models;
    None leaves them whole, which a bounded state can read."""

    def __init__(
        self, tokenizer: Tokenizer, answer: Answer, max_length: int | None, lm: LanguageModel | None = None
    ) -> None:
        super().__init__()
        self.texts, self.answer, self.max_length, self.lm = tokenizer, answer, max_length, lm
        self.cut = 0

    @property
    def eot_token_id(self) -> int:
        """A document ends where the next one begins."""
        return self.texts.bos_id

    @property
    def prefix_token_id(self) -> int:
        return self.texts.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        tokens = self.texts.encode(string)
        return tokens if add_special_tokens is False else [self.texts.bos_id, *tokens]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        asked = [self.shortened(context, continuation) for _, context, continuation in requests]
        return [(score.logprob, score.greedy) for score in self.answer(asked)]

    def shortened(self, context: list[int], continuation: list[int]) -> Request:
        # the last token is asked for and not read
        beyond = 0 if self.max_length is None else len(context) + len(continuation) - 1 - self.max_length
        if beyond >= len(context):
            raise RequestError(
                f"a continuation has {len(continuation):,} tokens, which leave no context within {self.max_length:,}; "
                f"give a larger --max-length, or 0 for none"
            )
        self.cut += beyond > 0
        return Request(tuple(context[max(0, beyond) :]), tuple(continuation))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            tokens = self.tok_encode(text, add_special_tokens=False)
            size = self.max_length or max(1, len(tokens))
            found = map(make_disjoint_window, get_rolling_token_windows(tokens, self.prefix_token_id, size, 1))
            own = [(None, context, continuation) for context, continuation in found]
            windows += own
            counts.append(len(own))
        values = iter(self._loglikelihood_tokens(windows))
        return [sum(next(values)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        if self.lm is None:
            raise RequestError(
                "this task writes text, which needs the decoder with recurrent memories in one step; "
                "leave --requests, --scores and --memory away"
            )
        texts = []
        shown = tqdm(requests, desc="texts written", file=sys.stderr, disable=None)
        for prompt, options in (request.args for request in shown):
            chosen = normalize_gen_kwargs(options)
            sampling = Sampling(chosen["temperature"], chosen.get("top_k", 0), chosen.get("top_p", 1.0))
            stop = [text for text in chosen["until"] if text]
            limit = chosen["max_gen_toks"]
            texts.append(generate_batch(self.lm, [prompt], max_tokens=limit, sampling=sampling, stop=stop)[0].text)
        return texts


@dataclass(frozen=True)
class TaskSetting:
    """What is asked of a model: the same setting and data make the same requests."""

    tasks: tuple[str, ...]
    # a folder of local files; None is the Hub
    data: str | None
    limit: int | None = None
    fewshot: int | None = None
    max_length: int | None = None


def task_names(words: str) -> tuple[str, ...]:
    """`paper` or names of the harness, with commas between them."""
    names = [word.strip() for word in words.split(",") if word.strip()]
    if not names:
        raise RequestError(f"--tasks is {words!r}; give 'paper' or names of lm_eval's tasks, with commas between them")
    found = [name for word in names for name in ([task.name for task in TASKS] if word == PAPER else [word])]
    return tuple(dict.fromkeys(found))


def load_tasks(setting: TaskSetting, work: Path) -> tuple[TaskManager, list[Any]]:
    """Those of local files from definitions written to `work`, those of the Hub by name."""
    manager = manager_for(setting, work)
    found: list[Any] = []
    for name in setting.tasks:
        if name not in manager.task_index:
            raise RequestError(
                f"lm_eval {lm_eval.__version__} has no task {name!r}; 'lm-eval ls tasks' lists what it has"
            )
        try:
            loaded = manager.load(name)
        except OSError as error:
            raise WorkError(
                f"the data of task {name!r} did not come from the Hub ({error}); try again, or give files with --data"
            ) from error
        found += [loaded["groups"][name]] if name in loaded["groups"] else loaded["tasks"].values()
    return manager, found


def manager_for(setting: TaskSetting, work: Path) -> TaskManager:
    """One that knows the paper's tasks alone where there are no others: the harness has thousands of files."""
    others = [name for name in setting.tasks if name not in BY_NAME]
    if others and setting.data is not None:
        raise RequestError(
            f"there is no local file for task {others[0]!r}, only for {', '.join(BY_NAME)}; "
            f"leave --data away to take it from the Hub"
        )
    if others:
        return TaskManager()
    folder = Path(lm_eval.tasks.__file__).parent
    definitions = {name: find_definition(BY_NAME[name], folder) for name in setting.tasks}
    if setting.data is None:
        return TaskManager(include_defaults=False, include_path=sorted({str(d.parent) for d in definitions.values()}))
    for name, definition in definitions.items():
        write_definition(BY_NAME[name], definition, Path(setting.data), work, setting.limit)
    return TaskManager(include_defaults=False, include_path=str(work))


def evaluate(model: HarnessLM, setting: TaskSetting, work: Path, bootstraps: int = BOOTSTRAPS) -> dict[str, Any]:
    """The harness's own results. `work` is an empty folder for its files."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    manager, tasks = load_tasks(setting, work)
    # what the harness prints is no result of ours
    with contextlib.redirect_stdout(sys.stderr):
        found = simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=manager,
            limit=setting.limit,
            num_fewshot=setting.fewshot,
            bootstrap_iters=bootstraps,
            log_samples=False,
        )
    assert found is not None
    return dict(found)


class Recorder:
    """Writes requests down and answers nothing of worth."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, requests: Sequence[Request]) -> list[Score]:
        self.requests += requests
        return [Score(0.0, False)] * len(requests)


class Replay:
    """Answers from a file, in the order in which the requests were written down."""

    def __init__(self, found: ScoreFile) -> None:
        self.found = found
        self.requests: list[Request] = []

    def __call__(self, requests: Sequence[Request]) -> list[Score]:
        first = len(self.requests)
        self.requests += requests
        scores = self.found.scores[first : first + len(requests)]
        return scores + [Score(0.0, False)] * (len(requests) - len(scores))

    def check(self, tokenizer: str) -> None:
        """Whatever differs, be it data, tokenizer or harness, shows here."""
        asked = RequestFile(self.requests, tokenizer, {})
        if len(self.requests) != len(self.found.scores) or asked.digest() != self.found.requests:
            raise RequestError(
                f"the scores answer {len(self.found.scores):,} requests, and these tasks and data make other ones "
                f"({len(self.requests):,}); use the data, tokenizer and lm_eval that the requests were built with"
            )


def build_requests(tokenizer: Tokenizer, setting: TaskSetting, work: Path) -> tuple[list[Request], int]:
    """-> all that the tasks ask, in order, and how many of them lost their beginning"""
    recorder = Recorder()
    model = HarnessLM(tokenizer, recorder, setting.max_length)
    evaluate(model, setting, work, bootstraps=0)
    return recorder.requests, model.cut
