"""`benchmarks/levers.py`: as it stands it is `maglev-closed`, and every lever does what it says."""

import json
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maglev import config, objectives, recipes
from maglev.__main__ import main
from maglev.errors import RequestError
from maglev.model.accounting import objective_flops
from maglev.model.memory import shift_right
from maglev.objectives import build
from maglev.objectives.losses import Documents, next_token_loss, token_mean
from maglev.objectives.sweeps import Sweeps
from maglev.ops.inject import rms_norm
from tests.helpers import assert_parallel_is_stepped, batch_of, changed_positions, gradients, random_weights, small
from tests.scripts import load_script

SHAPE = {"depth": 2, "width": 16, "heads": 2, "context": 24, "window": 4, "vocab_size": 61}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_script("benchmarks/levers.py")
    # gone after the test
    for registry in (config.OBJECTIVE_KINDS, recipes.RECIPES):
        monkeypatch.setitem(registry, "levers", None)
    monkeypatch.setattr(objectives, "OTHERS", {})
    module.register()
    return module


def levers(delay: int = 1, **settings: Any) -> Any:
    own = {f"objective_{key}": value for key, value in settings.items()}
    objective = build("levers", **SHAPE, delay=delay, **own).double()
    random_weights(objective)
    return objective


def settled(objective: Any, memory: Tensor, tokens: Tensor) -> Tensor:
    return objective.decoder(tokens, shift_right(memory))


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(("rollout", "delay"), [(1, 1), (3, 1), (3, 2), (2, 4)])
def test_as_it_stands_it_is_maglev_closed(rollout: int, delay: int) -> None:
    batch = batch_of(3, 14)
    closed = small("maglev-closed", **SHAPE, objective_rollout=rollout, delay=delay)
    mine, theirs = levers(delay, rollout=rollout), closed(*batch)
    found = mine(*batch)
    torch.testing.assert_close((found.total, found.next_token), (theirs.total, theirs.next_token), rtol=0, atol=1e-12)
    expected = gradients(theirs.total, closed)
    for name, gradient in gradients(found.total, mine).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("script")
def test_late_in_training_the_loop_alone_may_count() -> None:
    batch = batch_of(3, 14)
    late = {"late_lifted": 0.0, "late_prefiller": 0.25, "rollout_start": 0.5, "rollout": 2}
    objective = levers(**late)
    plain = levers(rollout=2, rollout_start=0.5, prefiller_weight=0.0)
    for progress, lifted_share, prefiller_weight in ((0.4, 1.0, 0.5), (0.5, 0.0, 0.25)):
        objective.progress = plain.progress = progress
        both = plain(*batch)
        lifted = both.next_token + plain.consistency_weight * both.consistency
        memory = objective.prefiller(batch[0], objective.decoder)
        expected = both.total - (1 - lifted_share) * lifted
        expected = expected + prefiller_weight * next_token_loss(objective.decoder, memory, batch[1])
        torch.testing.assert_close(objective(*batch).total, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("script")
def test_what_holds_the_memories_of_the_loop_is_weighed_by_itself() -> None:
    tokens, targets = batch_of(3, 14)
    weights = {"own_consistency": 0.7, "late_consistency": 0.4, "steady": 0.9}
    objective, plain = (levers(rollout=14, prefiller_weight=0, **own) for own in (weights, {}))
    lifted, target_memory = plain.lifted(tokens)
    # a rollout over the whole row: stepping, from a first step that reads nothing
    state, steps = plain.decoder.initial_state(3), []
    for token in tokens.T:
        memory, state = plain.decoder.step(token, state)
        steps.append(memory)
    own = torch.stack(steps, dim=1)

    def apart(memory: Tensor, target: Tensor) -> Tensor:
        return token_mean(plain.consistency(memory, target), targets)

    expected = next_token_loss(plain.decoder, lifted, targets) + 0.4 * apart(lifted, target_memory)
    expected = expected + next_token_loss(plain.decoder, own, targets) + 0.7 * apart(own, target_memory)
    expected = expected + 0.9 * token_mean(plain.consistency(own, lifted)[:, 1:], targets[:, 1:])
    torch.testing.assert_close(objective(tokens, targets).total, expected, rtol=0, atol=1e-10)
    # before rollouts begin there is the lifted pass alone, as it was
    objective.progress, objective.rollout_start = 0.3, 0.5
    before = objective.compare(lifted, target_memory, targets).total
    torch.testing.assert_close(objective(tokens, targets).total, before, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("script")
def test_rollouts_may_grow_and_are_then_those_of_their_length() -> None:
    batch = batch_of(3, 14)
    growing = levers(rollout=12, rollout_from=2, rollout_start=0.5)
    lengths = []
    for growing.progress in (0.5, 0.6, 0.65, 0.7, 0.75, 1.0):
        lengths.append(growing.length)
        of_that_length = levers(rollout=growing.length, rollout_start=0.5)
        torch.testing.assert_close(growing(*batch).total, of_that_length(*batch).total, rtol=0, atol=1e-12)
        assert growing.stage == growing.length
    assert lengths == [2, 4, 8, 12, 12, 12]
    growing.progress = 0.4
    assert growing.stage == 0
    assert levers(rollout=12).length == levers(rollout=12, rollout_from=12).length == 12


@pytest.mark.usefixtures("script")
def test_blank_rows_read_zeros_in_the_lifted_pass() -> None:
    tokens, targets = batch_of(3, 14)
    objective = levers(blank=1.0, rollout_start=0.9, prefiller_weight=0)
    objective.progress = 0.0
    target_memory = objective.prefiller(tokens, objective.decoder)
    memory = objective.decoder(tokens, torch.zeros_like(target_memory))
    expected = objective.compare(memory, target_memory, targets).total
    torch.testing.assert_close(objective(tokens, targets).total, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("script")
def test_passes_are_counted_weighed_and_begin_where_they_are_told() -> None:
    """On two of four rows: a free pass from zeros, then two that count 1/4 and 1."""
    tokens, targets = batch_of(4, 12)
    objective = levers(rollout=1, passes=2, free=1, start="zeros", own_share=0.5, rise=2, prefiller_weight=0)
    lifted, target_memory = objective.lifted(tokens)
    expected = objective.compare(lifted, target_memory, targets).total
    some, memory = tokens[:2], torch.zeros_like(lifted[:2])
    for number in range(3):
        memory = settled(objective, memory.detach() if number < 2 else memory, some)
        if number:
            expected = (
                expected + 0.5 * (number / 2) ** 2 * objective.compare(memory, target_memory[:2], targets[:2]).total
            )
    found = objective(tokens, targets).total
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    theirs = gradients(expected, objective)
    for name, gradient in gradients(found, objective).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("script")
def test_shares_and_weights_move_with_training() -> None:
    moving = {"own_share": 0.0, "own_share_end": 1.0, "consistency_weight": 0.0, "consistency_end": 1.0}
    objective = levers(**moving, rollout_start=0.0)
    rows = []
    for objective.progress in (0.0, 0.5, 1.0):
        rows.append(objective.own_rows(8))
        assert objective.between(0.0, 1.0) == objective.progress
    assert rows == [0, 4, 8]
    tokens, targets = batch_of(2, 12)
    objective.progress = 0.0
    found = objective(tokens, targets)
    # neither own passes nor consistency yet, Q's own loss alone beside the lifted one
    own = next_token_loss(objective.decoder, objective.lifted(tokens)[1], targets)
    torch.testing.assert_close(found.total, found.next_token + 0.5 * own, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("script")
def test_gradients_stop_where_they_are_told() -> None:
    tokens, targets = batch_of(2, 12)

    def reached(which: int, **settings: Any) -> bool:
        """Whether Q's (1) or P's lifted memories (0) get any gradient of what comes after them."""
        objective = levers(prefiller_weight=0, consistency_weight=0.3, own_next_token=0, **settings)
        memories: list[Tensor] = []
        run, weighed = objective.decoder.run, objective.weighed

        def noting(*given: Any) -> Tensor:
            memory = run(*given)
            memories.append(memory)
            return memory

        objective.decoder.run = noting
        losses = []
        objective.weighed = lambda *given: losses.append((given, weighed(*given))) or losses[-1][1]
        objective(tokens, targets)
        (_, target_memory, *_), _ = losses[0]
        apart = losses[-1][1].total
        of = memories[0] if which == 0 else target_memory
        (gradient,) = torch.autograd.grad(apart, of, allow_unused=True)
        return gradient is not None and bool(gradient.abs().max() > 0)

    assert reached(0, rollout=3) and not reached(0, rollout=3, stop="carried") and not reached(0, rollout=1, free=1)
    free = {"rollout": 1, "free": 1}
    assert reached(1, **free)
    assert not reached(1, **free, stop="target") and not reached(1, **free, stop="own_target")
    # what is left is Q's side alone
    objective = levers(prefiller_weight=0, own_next_token=0, stop="memory", **free)
    found = objective.weighed(
        torch.randn(2, 12, 16).double().requires_grad_(), torch.randn(2, 12, 16), targets, 0, "", -1.0
    )
    assert found.consistency.requires_grad is False


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("passes", [1, 2])
def test_noise_is_that_of_the_recipe_in_every_pass(passes: int) -> None:
    batch = batch_of(2, 12)
    closed = small("maglev-closed", **SHAPE, objective_rollout=3, objective_noise=0.5)
    noisy, plain = levers(rollout=3, noise=0.5, passes=passes), levers(rollout=3, passes=passes)
    found = noisy(*batch).total
    assert found != plain(*batch).total
    if passes == 1:
        torch.testing.assert_close(found, closed(*batch).total, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        ({"rollout_start": 0.0}, 1),
        ({}, 2),
        ({"noise": 0.1}, 2),
        ({"consistency_end": 0.0}, 4),
        ({"own_share_end": 0.5}, 4),
    ],
)
def test_passes_are_replayed_only_while_they_are_the_same(settings: dict[str, float], stages: int) -> None:
    objective, found = levers(**settings), set()
    for objective.progress in (0.0, 0.25, 0.5, 0.75):
        found.add(objective.stage)
    assert len(found) == stages


@pytest.mark.usefixtures("script")
def test_a_write_gate_steps_as_it_passes_and_keeps_what_it_is_told() -> None:
    objective = levers(write_gate=3.0)
    assert_parallel_is_stepped(objective.decoder, (1, 5, 24, 40))
    for name, gradient in gradients(objective(*batch_of(2, 20)).total, objective).items():
        assert gradient.abs().max() > 0, name
    # as built, a gate depends on its channel alone
    decoder = build("levers", **SHAPE, objective_write_gate=3.0).decoder
    tokens, previous = batch_of(1, 4)[0], torch.randn(1, 4, 16)
    moved = decoder(tokens, previous + torch.eye(16)[-1]) - decoder(tokens, previous)
    assert abs(moved[0, 0, -1] - torch.sigmoid(torch.tensor(3.0))) < 1e-5


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("kind", ["write_gate", "carry"])
def test_memories_of_both_may_be_kept_alike(kind: str) -> None:
    plain, both = levers(**{kind: 3.0}), levers(**{kind: 3.0}, write_both=True)
    tokens, targets = batch_of(2, 20)
    fresh = plain.prefiller(tokens, plain.decoder)
    memory = torch.zeros_like(fresh[:, 0])
    found = both.prefiller(tokens, both.decoder)
    for position in range(20):
        memory = plain.decoder.carried(memory, fresh[:, position])
        torch.testing.assert_close(found[:, position], memory, rtol=0, atol=1e-12)
    for objective in (plain, both):
        assert_parallel_is_stepped(objective.decoder, (1, 5, 24))
        for name, gradient in gradients(objective(tokens, targets).total, objective).items():
            assert gradient.abs().max() > 0, name
    with pytest.raises(RequestError, match=r"leave data\.document_mask at false"):
        both(tokens, targets, Documents(torch.zeros_like(tokens)))


@pytest.mark.usefixtures("script")
def test_what_is_carried_is_normalised_with_what_is_new() -> None:
    decoder = levers(carry=3.0).decoder
    with torch.no_grad():
        decoder.carry.residual_scale.fill_(0.5)
    previous, fresh = torch.randn(2, 2, 5, 16).double()
    torch.testing.assert_close(decoder.carried(previous, fresh), rms_norm(fresh + 1.5 * previous))


@pytest.mark.usefixtures("script")
def test_a_tap_carries_what_stands_before_the_last_blocks() -> None:
    objective, plain = levers(tap=1), levers()
    tokens, targets = batch_of(2, 20)
    decoder = objective.decoder
    previous = torch.randn(2, 20, 32).double()
    memory = decoder(tokens, previous)
    # the same network but for what is carried: the last state is that of the whole stack on the memories given
    torch.testing.assert_close(memory[..., 16:], plain.decoder(tokens, previous[..., :16]), rtol=0, atol=1e-12)
    assert (memory[..., :16] - memory[..., 16:]).abs().max() > 1e-2
    # what was predicted from is not read
    changed = torch.cat((previous[..., :16], torch.zeros(2, 20, 16).double()), dim=-1)
    assert torch.equal(decoder(tokens, changed), memory)
    with torch.no_grad():
        own = decoder.blocks[-1].mlp.down_proj.weight
        own.add_(torch.randn_like(own))
    assert torch.equal(decoder(tokens, previous)[:, 0, :16], memory[:, 0, :16])
    assert_parallel_is_stepped(decoder, (1, 5, 24))
    logits = decoder.readout(objective.lifted(tokens)[0])
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert abs(objective(tokens, targets).next_token - nats) < 1e-9
    for name, gradient in gradients(objective(tokens, targets).total, objective).items():
        assert gradient.abs().max() > 0, name


@pytest.mark.usefixtures("script")
def test_what_is_read_snaps_to_its_steps_and_forgets_small_errors() -> None:
    decoder, plain = levers(snap=0.5).decoder, levers().decoder
    tokens, _ = batch_of(3, 14)
    near = (0.5 * torch.randint(-4, 5, (*tokens.shape, 16))).double().requires_grad_()
    off = near + 0.4 * (torch.rand(near.shape, dtype=torch.float64) - 0.5)
    memory = decoder(tokens, shift_right(near))
    torch.testing.assert_close(decoder(tokens, shift_right(off)), memory, rtol=0, atol=1e-12)
    torch.testing.assert_close(plain(tokens, shift_right(near)), memory, rtol=0, atol=1e-12)
    assert (plain(tokens, shift_right(off)) - memory).abs().max() > 1e-3
    # as if nothing had been rounded
    (own,) = torch.autograd.grad(memory.sum(), near)
    (theirs,) = torch.autograd.grad(plain(tokens, shift_right(near)).sum(), near)
    torch.testing.assert_close(own, theirs, rtol=0, atol=1e-12)
    assert own.abs().max() > 0
    assert_parallel_is_stepped(decoder, (5, 14))


@pytest.mark.usefixtures("script")
def test_memories_of_both_are_normalised_group_by_group() -> None:
    objective, plain = levers(groups=4), levers()
    tokens, _ = batch_of(3, 14)
    for found, whole in zip(objective.lifted(tokens), plain.lifted(tokens), strict=True):
        sizes = found.unflatten(-1, (4, -1)).square().mean(-1)
        torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=0, atol=1e-3)
        assert whole.unflatten(-1, (4, -1)).square().mean(-1).std() > 0.01
    target, own = objective.lifted(tokens)[1], plain.lifted(tokens)[1]
    torch.testing.assert_close(target, rms_norm(own.unflatten(-1, (4, -1))).flatten(-2), rtol=0, atol=1e-12)
    assert_parallel_is_stepped(objective.decoder, (5, 14))


@pytest.mark.usefixtures("script")
def test_cuts_leave_memory_alone_to_tell_what_came_before() -> None:
    shape = {"rollout": 3, "rollout_start": 0.0, "cut_share": 0.5}
    tokens, targets = batch_of(4, 14)
    objective = levers(cut=6, **shape)
    target_memory = objective.prefiller(tokens, objective.decoder)
    starts = torch.tensor([0] * 6 + [6] * 6 + [12] * 2).expand(4, -1).clone()
    starts[2:] = 0
    expected = objective.decoder(tokens, shift_right(target_memory), starts=starts)
    found = objective(tokens, targets)
    torch.testing.assert_close(
        found.next_token, next_token_loss(objective.decoder, expected, targets), rtol=0, atol=1e-12
    )
    # in rollouts, too, what stood before a cut reaches what comes after through the memory at 5 alone, here the same
    other = tokens.clone()
    other[:2, :6] = (other[:2, :6] + 1) % 61
    for cut, changed in ((6, 6), (0, 12)):
        rollouts = []
        for given in (tokens[:2], other[:2]):
            sweeps = Sweeps(
                objective.decoder, given, levers(cut=cut, **shape | {"cut_share": 1.0}).cut(given, Documents())
            )
            embedded = objective.decoder.embedding(given)
            sweeps.run(target_memory[:2], range(14), embedded)
            rollouts.append(sweeps.rollout(target_memory[:2], 6, embedded))
        assert changed_positions(*rollouts) == [*range(changed)]
    whole = levers(cut=14, **shape)(tokens, targets)
    assert (found.next_token - whole.next_token).abs() > 1e-6
    torch.testing.assert_close(whole.total, levers(**shape)(tokens, targets).total, rtol=0, atol=1e-12)
    # documents go on being apart
    apart = torch.tensor([0] * 8 + [8] * 6).expand(4, -1)
    both = objective.cut(tokens, Documents(apart)).attention_starts
    assert both.tolist() == torch.maximum(starts, apart).tolist()


@pytest.mark.usefixtures("script")
def test_a_head_predicts_what_is_not_carried() -> None:
    plain, headed = (build("levers", **SHAPE, objective_head=own) for own in (False, True))
    tokens, targets = batch_of(2, 20)
    # an MLP that writes nothing yet changes nothing
    torch.testing.assert_close(headed(tokens, targets).total, plain(tokens, targets).total)
    objective = levers(head=True)
    memory = objective.lifted(tokens)[0]
    assert torch.equal(memory, levers().lifted(tokens)[0])
    logits = objective.decoder.readout(memory)
    assert (logits - levers().decoder.readout(memory)).abs().max() > 1e-3
    # what is trained is what is read out
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert abs(objective(tokens, targets).next_token - nats) < 1e-9
    for name, gradient in gradients(objective(tokens, targets).total, objective).items():
        assert gradient.abs().max() > 0, name


@pytest.mark.usefixtures("script")
def test_a_separate_prefiller_starts_as_the_shared_one_and_learns_by_itself() -> None:
    shared, separate = (
        build("levers", **SHAPE, objective_sharing=words) for words in ("embedding,attention,mlp", "embedding")
    )
    tokens, targets = batch_of(2, 20)
    for own, other in zip(separate.decoder.parameters(), shared.decoder.parameters(), strict=True):
        assert torch.equal(own, other)
    # blocks that write nothing yet give the same memories, whosever they are
    assert torch.equal(separate(tokens, targets).total, shared(tokens, targets).total)
    objective = levers(sharing="embedding")
    for name, gradient in gradients(objective(tokens, targets).total, objective).items():
        assert gradient.abs().max() > 0, name
    assert any(name.startswith("prefiller.blocks.") for name, _ in objective.named_parameters())


@pytest.mark.usefixtures("script")
def test_costs_follow_the_passes() -> None:
    def cost(recipe: str = "levers", **settings: Any) -> float:
        keys = {f"objective.{key}": value for key, value in settings.items()}
        return objective_flops(recipes.run_config(recipe, 4, keys | {"model.context": 64}))

    assert cost() == cost("maglev-closed")
    one = cost() - cost(passes=0)
    assert cost(passes=2) - cost() == pytest.approx(one)
    assert cost(free=3) - cost() == pytest.approx(one)
    assert cost(rollout_start=0.0) - cost(passes=0) == pytest.approx(one / 0.4)
    moving = cost(own_share=0.0, own_share_end=1.0, rollout_start=0.0)
    assert moving - cost(passes=0) == pytest.approx(one / 0.4 / 2)


@pytest.mark.usefixtures("script", "without_speed")
def test_every_verb_knows_it(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--depth", "1", "--window", "4", "--context", "32", "--steps", "2", "--rows", "4", "--pairs", "2"]
    words += ["--device", "cpu", "--json"]
    own = ["noise=0.1", "free=1", "stop=carried", "write_gate=2", "own_share=0.5"]
    settings = [word for each in own for word in ("--set", f"objective.{each}")]
    out = ["--set", "train.tokens_per_step=128", "--out", str(tmp_path / "run")]
    assert main(["eval", "recall", "levers", *words, *settings, *out]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["recipe"] == "levers" and row["settings"]["objective.stop"] == "carried"
    # and what it stored is measured again
    assert main(["eval", "recall", str(tmp_path / "run"), "--rows", "4", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0] == row
    with pytest.raises(RequestError, match="it may list carried, target"):
        levers(stop="elsewhere")
    for settings, line in (
        ({"write_gate": 3.0, "carry": 1.0}, "objective.write_gate and objective.carry exclude each other"),
        ({"snap": 0.5, "groups": 2}, "objective.snap and objective.groups exclude each other"),
        ({"snap": -0.5}, "objective.snap is -0.5"),
        ({"cut": -1}, "objective.cut is -1"),
        ({"cut_share": 1.5}, "objective.cut_share is 1.5"),
        ({"groups": 0}, "objective.groups is 0"),
        ({"groups": 3}, "objective.groups is 3; it must divide the width of 16"),
        ({"tap": 1, "head": True}, "objective.tap goes without head"),
        ({"tap": 2}, "it must be below the depth of 2"),
        ({"carry": 1.0, "delay": 2}, "objective.carry goes with the last memory alone; leave model.delay at 1"),
    ):
        with pytest.raises(RequestError, match=line):
            levers(**settings)
