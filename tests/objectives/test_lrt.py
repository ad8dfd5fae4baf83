"""LRT's two schedules against a loop over passes with explicit K/V buffers.

Interleaved: one full pass with zero memory keeps every layer's K/V; then S passes each recompute the positions p with
p mod S = i, with the freshest memory, and write K/V back; gradients flow through that buffer; the loss is the mean
over all passes, where each stands for all positions: its nats by its share of the positions and by all targets. With a
target at every position that is the mean of its positions. K-full: K passes over all positions, the first on zero
memory.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from maglev.objectives import Objective
from maglev.objectives import lrt as lrt_module
from maglev.objectives.losses import next_token_loss
from maglev.ops.loss import UNSCORED
from tests.helpers import batch_of, gradients, random_tokens, small
from tests.objectives.equations import Cache, Network, Weights, cross_entropy, embed, run_stack

WIDTH, HEADS, KV_HEADS = 16, 2, 1
WINDOW, CONTEXT = 3, 20


def lrt(recipe: str, schedule: str, passes: int) -> tuple[Objective, Network]:
    objective = small(
        recipe, depth=2, width=WIDTH, heads=HEADS, kv_heads=KV_HEADS, window=WINDOW, context=CONTEXT,
        objective_schedule=schedule, objective_passes=passes,
    )  # fmt: skip
    windows = objective.decoder.config.windows
    return objective, Network(windows, HEADS, KV_HEADS, WIDTH // HEADS, "decoder.blocks", "decoder.scales")


def zero() -> Tensor:
    return torch.zeros(WIDTH, dtype=torch.float64)


def naive_passes(
    weights: Weights, network: Network, tokens: list[int], schedule: str, passes: int
) -> list[dict[int, Tensor]]:
    """The memories that each pass produces, by position."""
    x = embed(weights, tokens)
    everywhere = list(x)
    results = []
    memory = {t: zero() for t in everywhere}
    caches = [Cache() for _ in network.windows]
    subsets = [everywhere] + [[p for p in everywhere if p % passes == i] for i in range(passes)]
    if schedule == "full":
        subsets = [everywhere] * passes
    for subset in subsets:
        if schedule == "full":
            caches = [Cache() for _ in network.windows]
        freshest = {t: memory[t - 1] if t > 0 else zero() for t in subset}
        fresh = run_stack(weights, network, {t: x[t] for t in subset}, freshest, caches)
        memory = memory | fresh
        results.append(fresh)
    return results


def naive_loss(
    weights: Weights, network: Network, tokens: Tensor, targets: Tensor, schedule: str, passes: int
) -> Tensor:
    rows = [naive_passes(weights, network, row, schedule, passes) for row in tokens.tolist()]
    losses = []
    for number in range(len(rows[0])):
        nats = [
            cross_entropy(weights, memory, int(targets[row, t]))
            for row, results in enumerate(rows)
            for t, memory in results[number].items()
            if targets[row, t] >= 0
        ]
        share = len(rows[0][number]) / tokens.shape[1]
        losses.append(torch.stack(nats).sum() / (share * int((targets >= 0).sum())))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("recipe", ["lrt-ssss", "lrt-slsl"])
@pytest.mark.parametrize(
    ("schedule", "passes", "length"),
    [
        ("interleaved", 1, 7),
        ("interleaved", 2, 8),
        ("interleaved", 2, 9),
        ("interleaved", 3, 8),
        ("interleaved", 3, 10),
        ("full", 1, 7),
        ("full", 2, 8),
        ("full", 3, 7),
    ],
)
def test_losses_and_gradients_equal_the_naive_schedule(recipe: str, schedule: str, passes: int, length: int) -> None:
    objective, network = lrt(recipe, schedule, passes)
    tokens, targets = batch_of(2, length)
    targets[0, 4] = -1
    weights = dict(objective.named_parameters())
    losses = objective(tokens, targets)
    expected = naive_loss(weights, network, tokens, targets, schedule, passes)
    torch.testing.assert_close(losses.total, expected, rtol=0, atol=1e-11)
    assert torch.equal(losses.next_token, losses.total) and losses.consistency == 0
    mine, theirs = gradients(losses.total, objective), gradients(expected, objective)
    for name in mine:
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(("passes", "length"), [(2, 8), (2, 9), (3, 10)])
def test_with_a_target_everywhere_each_pass_is_the_mean_of_its_positions(
    passes: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition for text, and to the bit: weights are 1."""
    objective, _ = lrt("lrt-ssss", "interleaved", passes)
    tokens, targets = batch_of(2, length)
    means: list[Tensor] = []

    def noted(*inputs: Any) -> Tensor:
        means.append(next_token_loss(*inputs))
        return means[-1]

    monkeypatch.setattr(lrt_module, "next_token_loss", noted)
    total = objective(tokens, targets).total
    assert len(means) == passes + 1 and torch.equal(total, torch.stack(means).mean())


@pytest.mark.parametrize("schedule", ["interleaved", "full"])
def test_sparse_targets_weigh_the_same_in_any_micro_batch(schedule: str) -> None:
    """As in recall: few targets, another number in every row, in one row at even positions alone, in one none."""
    objective, _ = lrt("lrt-ssss", schedule, 2)
    tokens, targets = batch_of(6, 12)
    targets[torch.rand(6, 12, generator=torch.Generator().manual_seed(0)) < 0.6] = UNSCORED
    targets[1, 1::2] = targets[4] = UNSCORED
    counts = (targets >= 0).sum(1)
    assert counts[4] == 0 and counts.unique().numel() > 2

    def step(rows: int) -> dict[str, Tensor]:
        """As a step adds its micro-batches up: by their targets."""
        total = torch.zeros((), dtype=torch.float64)
        for first in range(0, 6, rows):
            part = slice(first, first + rows)
            total = total + objective(tokens[part], targets[part]).total * counts[part].sum() / counts.sum()
        return {"loss": total.detach(), **gradients(total, objective)}

    whole = step(6)
    for rows in (3, 2, 1):
        for name, value in step(rows).items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_long_rows_use_blocks_and_still_equal_the_naive_schedule() -> None:
    """Beyond one block of queries the strided passes take the blockwise path."""
    objective, network = lrt("lrt-ssss", "interleaved", 2)
    tokens, targets = batch_of(1, 75)
    with torch.no_grad():
        weights = dict(objective.named_parameters())
        expected = naive_loss(weights, network, tokens, targets, "interleaved", 2)
        torch.testing.assert_close(objective(tokens, targets).total, expected, rtol=0, atol=1e-11)


def test_more_subsets_than_positions_is_one_pass_per_position() -> None:
    few, network = lrt("lrt-ssss", "interleaved", 7)
    tokens, targets = batch_of(1, 3)
    expected = naive_loss(dict(few.named_parameters()), network, tokens, targets, "interleaved", 3)
    torch.testing.assert_close(few(tokens, targets).total, expected, rtol=0, atol=1e-11)


def test_the_first_pass_has_zero_memory_with_the_gates_on() -> None:
    objective, _ = lrt("lrt-ssss", "full", 1)
    tokens, targets = batch_of(1, 9)
    decoder = objective.decoder
    zeros = torch.zeros(1, 9, WIDTH, dtype=torch.float64)

    def nats(memory: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(decoder.readout(memory)[0], targets[0])

    loss = objective(tokens, targets).total
    torch.testing.assert_close(loss, nats(decoder(tokens, zeros)), rtol=0, atol=1e-12)
    assert (loss - nats(decoder(tokens, None))).abs() > 1e-4


@pytest.mark.parametrize("schedule", ["interleaved", "full"])
def test_the_loss_reaches_the_memory_projections(schedule: str) -> None:
    """They act on zeros in the first pass, so all of it comes through later passes."""
    objective, _ = lrt("lrt-ssss", schedule, 2)
    tokens, targets = batch_of(2, 12)
    found = gradients(objective(tokens, targets).total, objective)
    assert found["decoder.injection.memory_key_proj.weight"].abs().max() > 0
    assert found["decoder.injection.memory_value_proj.weight"].abs().max() > 0


def test_as_many_full_passes_as_positions_are_the_stepped_memories() -> None:
    objective, _ = lrt("lrt-ssss", "full", 9)
    tokens, targets = batch_of(1, 9)
    decoder = objective.decoder
    seen: list[Tensor] = []
    handle = decoder.register_forward_hook(lambda module, inputs, output: seen.append(output))
    objective(tokens, targets)
    handle.remove()
    state, stepped = decoder.initial_state(1), []
    for slot in range(9):
        memory, state = decoder.step(random_tokens(1, 10)[:, slot], state)
        stepped.append(memory)
    assert len(seen) == 9
    torch.testing.assert_close(seen[-1], torch.stack(stepped, 1), rtol=0, atol=1e-10)
