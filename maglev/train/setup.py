"""From a configuration to the parts of a run: modules on their device, rows per pass, weights to start from."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from maglev.checkpoint import Checkpoint
from maglev.config import ClosedMaglevConfig, LRTConfig, ObjectiveConfig, RunConfig
from maglev.errors import RequestError
from maglev.model.accounting import decoder_flops, objective_flops
from maglev.model.attention import Block
from maglev.model.init import draw, initialise
from maglev.model.layers import Linear
from maglev.model_config import ModelConfig
from maglev.objectives import Objective, build_objective
from maglev.objectives.maglev import MaglevObjective
from maglev.objectives.pretrained import PretrainedPrefiller
from maglev.ops import fp8
from maglev.ops.kernels import KERNELS, Case
from maglev.ops.recompute import LEAN, LEAN_COMPILED, again
from maglev.runs import read_config
from maglev.train.fitting import USABLE, largest_divisor
from maglev.train.saving import fill
from maglev.train.sharding import shard
from maglev.train.task import Task

CPU_TOKENS_PER_PASS = 16_384
# kept activations per token and layer, in widths: q, k, v, attention, two norms, MLP in and out
KEPT_WIDTHS = {"none": 26, "selective": 16, "full": 4}
# where the search ends
ENOUGH_TOKENS_PER_PASS = 65_536


def build_for_training(config: RunConfig, device: torch.device, mesh: DeviceMesh | None = None) -> Objective:
    """With initial weights, divided over the ranks of `mesh` where there is one."""
    objective = build_objective(config)
    compute = compute_dtype(config, device)
    objective.decoder.embedding.compute_dtype = compute
    compiled = config.train.compile == "on" or (config.train.compile == "auto" and device.type == "cuda")
    if config.train.products == "fp8":
        take_fp8(objective, device)
    prepare_blocks(objective, compiled, config.train.recompute)
    if config.train.attention != "auto":
        take_attention(objective, config, device)
    if mesh is None:
        initialise(objective, config.train.seed)
        return objective.to(device)
    # divided before they are filled: what was never written takes no memory, and a rank keeps no other's rows
    shard(objective, mesh, compute)
    for name, parameter in objective.named_parameters():
        fill(parameter, draw(name, parameter, config.train.seed))
    return objective


def compute_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    precision = config.train.precision
    # emulated it would be slower than float32, and kernels refuse it
    if device.type == "cuda" and precision != "float32" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise RequestError(f"{torch.cuda.get_device_name(device)} has no bfloat16; set train.precision to float32")
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def attention_cases(config: RunConfig, objective: Objective, device: torch.device) -> dict[str, Case]:
    """What the layers of a training pass ask of attention, by name."""
    model, dtype = config.model, objective.decoder.compute_dtype
    found: dict[str, Case] = {}

    def add(
        stack: str, own: ModelConfig, windows: Sequence[int], step: int = 1, whole: bool = True, queries: int = 0
    ) -> None:
        heads = own.heads, own.kv_heads
        queries = queries or -(-model.context // step)
        for window in sorted(set(windows)):
            is_full = window >= model.context
            documents = config.data.document_mask
            one = whole and not documents
            case = Case(device.type, dtype, own.head_dim, queries, is_full, one, documents, step, heads)
            if case not in found.values():
                found[stack + ("whole context" if is_full else f"window {window}")] = case

    add("", model, model.windows, whole=model.entries == 1)
    if isinstance(objective, MaglevObjective) and not isinstance(objective.prefiller, PretrainedPrefiller):
        prefiller = objective.prefiller
        add("prefiller, ", prefiller.config, prefiller.windows)
    every = stride_of(config.objective)
    # what is tried outside of the package makes rollouts of its own
    if every and model.goes_at_once and type(config.objective) is ClosedMaglevConfig:
        own = min(model.delay, model.context)
        add(f"{own} positions in a row, ", model, model.windows, whole=False, queries=own)
    elif every:
        add(f"{-(-model.context // every)} positions of a row, ", model, model.windows, every, whole=every == 1)
    return found


def stride_of(objective: ObjectiveConfig) -> int:
    """Positions between those that are computed at a time; 0 where there are only whole passes."""
    if isinstance(objective, ClosedMaglevConfig):
        return objective.rollout
    return objective.passes if isinstance(objective, LRTConfig) and objective.schedule == "interleaved" else 0


def take_attention(objective: Objective, config: RunConfig, device: torch.device) -> None:
    """Where the kernel that is asked for serves, it is taken; where it serves nowhere, it was asked for in error."""
    wanted = config.train.attention
    cases = attention_cases(config, objective, device)
    if not any(KERNELS[wanted].serves(case) for case in cases.values()):
        able = [name for name, each in KERNELS.items() if any(each.serves(case) for case in cases.values())]
        raise RequestError(
            f"train.attention is {wanted}, which takes none of this run's layers on {device.type}; set it to auto"
            f" or to {', '.join(able)}"
        )
    objective.decoder.attention_kernel = wanted


def take_fp8(objective: Objective, device: torch.device) -> None:
    """In the blocks alone: embedding, memory projections and readout stay as they are."""
    if not fp8.serves(device):
        raise RequestError(f"{torch.cuda.get_device_name(device)} has no fp8; set train.products to plain")
    for block in (module for module in objective.modules() if isinstance(module, Block)):
        for linear in (module for module in block.modules() if isinstance(module, Linear)):
            linear.product = fp8.linear


def prepare_blocks(objective: Objective, compiled: bool, recompute: str) -> None:
    """Compile per block: seconds instead of minutes, and one graph serves all layers. Recompute as asked for.

    What is not compiled takes no kernel of ours for loss and injection: should one fail, training goes on without.
    """
    if compiled:
        # one graph per window, memory or none, and position subset; past the limit dynamo silently runs eagerly
        torch._dynamo.config.recompile_limit = 64
        # it would cut every block where DDP's buckets end, which is for models that are one graph
        torch._dynamo.config.optimize_ddp = False
        objective.decoder.readout.fused = objective.decoder.compiled = True
        if objective.decoder.injection is not None:
            objective.decoder.injection.compile(dynamic=False)
        if isinstance(objective, MaglevObjective):
            # plainly it would write the difference of two memories four times
            objective.consistency = torch.compile(objective.consistency, dynamic=False)
    for block in (module for module in objective.modules() if isinstance(module, Block)):
        if recompute == "selective":
            # it warns of in-place operations in what is run again; there are none
            logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
            block.keeping = LEAN_COMPILED if compiled else LEAN
        if recompute == "full":
            # around the compiled block: what is run again is one call, whatever it writes down for others
            inner = torch.compile(block.forward, dynamic=False) if compiled else block.forward
            block.forward = partial(again, inner)  # type: ignore[method-assign]
        elif compiled:
            block.compile(dynamic=False)


def rows_of_step(config: RunConfig, world: int) -> int:
    """Rows per rank and step."""
    tokens, context = config.train.tokens_per_step, config.model.context
    if tokens % (context * world):
        ranks = f" x {world} ranks" if world > 1 else ""
        near = max(1, round(tokens / (context * world))) * context * world
        raise RequestError(
            f"train.tokens_per_step is {tokens}, not a multiple of the context {context}{ranks}; set it to {near}"
        )
    return tokens // (context * world)


def rows_per_pass(config: RunConfig, rows: int, device: torch.device) -> int:
    """The largest divisor of the rank's rows that is not above what fits; `fitting.find_rows` begins there."""
    return largest_divisor(rows, rows_that_fit(config, device))


def rows_that_fit(config: RunConfig, device: torch.device) -> int:
    """In a pass: what was asked for, or on a GPU a guess."""
    if config.train.rows_per_pass:
        return config.train.rows_per_pass
    if device.type == "cuda":
        passes = objective_flops(config) / decoder_flops(config.model)
        token = KEPT_WIDTHS[config.train.recompute] * config.model.width * config.model.depth * 2 * passes
        free = USABLE * torch.cuda.mem_get_info(device)[0]
        return min(int(free / (token * config.model.context)), most_rows(config))
    return CPU_TOKENS_PER_PASS // config.model.context


def remarks(config: RunConfig, rows: int, size: int, device: torch.device) -> list[str]:
    """What makes a run slower than it need be, a line each. `size` are the rows of a pass, `rows` those of the rank."""
    lines = []
    if config.train.products == "fp8" and device.type != "cuda":
        capability = ".".join(map(str, fp8.SMALLEST_CAPABILITY))
        lines.append(f"train.products is fp8, emulated on {device.type}; GPUs have it from capability {capability} on")
    fits = min(rows, rows_that_fit(config, device))
    # where a larger number would divide the rows, it is memory that lacks
    if 2 * size < fits and size >= largest_divisor(rows, fits):
        half = -(-fits // 2)
        tokens = config.train.tokens_per_step // rows * half * round(rows / half)
        lines.append(
            f"a pass has {size} of the rank's {rows} rows, which divide into no larger ones where {fits} should fit; "
            f"set train.tokens_per_step to {tokens} for larger passes"
        )
    return lines


def most_rows(config: RunConfig) -> int:
    return max(1, ENOUGH_TOKENS_PER_PASS // config.model.context)


def meet_teacher(objective: Objective, task: Task) -> str:
    """Where Q is a pretrained model: see that it reads the task's tokens, and load it before any work is done. A digest
    of its weights then: a run that is resumed goes on with the same."""
    if not isinstance(objective, MaglevObjective) or not isinstance(objective.prefiller, PretrainedPrefiller):
        return ""
    try:
        task.check_tokens(objective.prefiller.folder)
    except RequestError as error:
        raise RequestError(f"objective.prefiller_from: {error}") from None
    return digest_of(objective.prefiller.load())


def digest_of(model: nn.Module) -> str:
    """Of what its tensors hold, whatever files they came from."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def start_from(
    objective: Objective, run: Path, found: Checkpoint | None, task: Task, report: Callable[[str], None]
) -> list[str]:
    """Copy another run's decoder into this one, and its prefiller into ours where names and shapes agree; what of ours
    that run's prefiller does not have is taken from the decoder's stack, if it fits there.

    `found` is the newest checkpoint of that run. Returns the names that it does not have: they keep their first values.
    """
    source = read_config(run).model
    mine = objective.decoder.config
    for name in ("depth", "width", "heads", "kv_heads", "vocab_size", "rope_base", "logit_softcap"):
        ours, theirs = getattr(mine, name), getattr(source, name)
        if ours != theirs:
            raise RequestError(
                f"--init-from {run}: its model.{name} is {theirs}, this run's is {ours}; make them equal"
            )
    if source.windows != mine.windows:
        report(f"--init-from {run}: its windows are {set(source.windows)}, this run's are {set(mine.windows)}")
    task.check_tokens(run)
    if found is None:
        raise RequestError(f"--init-from {run}: it has no checkpoint yet; let that run reach one first")
    stems = {"decoder": [found.stored("decoder")]}
    stems["prefiller"] = [found.stored("prefiller"), *stems["decoder"]]
    missing = []
    for name, parameter in objective.named_parameters():
        stem, _, own_name = name.partition(".")
        given = (tensors[own_name] for tensors in stems[stem] if own_name in tensors)
        fitting = next((each for each in given if each.shape == parameter.shape), None)
        if fitting is not None:
            fill(parameter, fitting)
        else:
            missing.append(name)
    return missing
