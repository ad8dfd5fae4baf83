"""Products in 8 bits: how far they are from plain ones, and what stays plain."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maglev.errors import RequestError
from maglev.model.layers import Linear
from maglev.ops import fp8
from maglev.ops.inject import rms_norm
from maglev.recipes import run_config
from maglev.train import setup
from tests.helpers import batch_of, gradients, random_weights

SHAPE = {"model.context": 64, "model.window": 16, "model.vocab_size": 64, "model.width": 64, "model.heads": 2}
CPU = torch.device("cpu")
PRODUCTS = ("plain", "fp8")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# heads as large as in training
WIDER = {"model.context": 256, "model.window": 64, "model.width": 256}


def device_of(name: str) -> torch.device:
    if not fp8.serves(torch.device(name)):
        pytest.skip("this GPU has no fp8")
    return torch.device(name)


def draw(
    rows: int, inputs: int, outputs: int, scale: float = 1.0, device: torch.device = CPU
) -> tuple[Tensor, Tensor, Tensor]:
    """In the precision that training has there."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, pull = (
        torch.randn(*shape, generator=generator).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        for shape in ((2, rows, inputs), (outputs, inputs), (2, rows, outputs))
    )
    return (scale * x).requires_grad_(), weight.requires_grad_(), pull


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_products_and_gradients_within_the_rounding_of_eight_bits(scale: float, device: str) -> None:
    """e4m3 has 3 bits of mantissa, e5m2 has 2: relative errors of 2^-4 and 2^-3 at most in a number, less in a sum."""
    x, weight, pull = draw(24, 32, 48, scale, device_of(device))
    got, wanted = fp8.linear(x, weight), F.linear(x, weight)
    assert 1e-3 < (got - wanted).norm() / wanted.norm() < 0.05
    mine, theirs = (torch.autograd.grad(out, (x, weight), pull) for out in (got, wanted))
    assert 1e-3 < (mine[0] - theirs[0]).norm() / theirs[0].norm() < 0.1
    torch.testing.assert_close(mine[1], theirs[1])


def test_the_largest_numbers_neither_overflow_nor_vanish() -> None:
    x, weight, _ = draw(16, 16, 16)
    x = x.detach()
    x[0, 0, 0] = 448.0 * 3
    assert fp8.linear(x, weight).isfinite().all()
    narrow, scale = fp8.quantized(x, fp8.FORWARD)
    assert narrow.float().abs().max() == torch.finfo(fp8.FORWARD).max
    assert scale * narrow[0, 0, 0].float() == pytest.approx(448.0 * 3)
    assert (fp8.linear(torch.zeros_like(x), weight) == 0).all()


def test_what_is_not_a_number_shows() -> None:
    x, weight, _ = draw(16, 16, 16)
    x = x.detach()
    x[0, 0, 0] = float("nan")
    assert fp8.linear(x, weight).isnan().any()


def test_odd_matrices_are_multiplied_plainly() -> None:
    x, weight, _ = draw(5, 32, 6)
    assert torch.equal(fp8.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize(
    ("recipe", "compile"),
    [
        *((recipe, "off") for recipe in ("swa-ssss", "lrt-ssss", "maglev-shared-0.1", "maglev-separate-1")),
        *((recipe, "on") for recipe in ("swa-ssss", "maglev-shared-0.1")),
        *(pytest.param(recipe, "on", marks=pytest.mark.soak) for recipe in ("lrt-ssss", "maglev-separate-1")),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_take_it_and_follow_plain_ones(
    device: str, recipe: str, compile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product's errors are 4 and 6% of its norm, forward and backward, and add up like noise: some 25% of a gradient
    that comes through a dozen of them, a cosine of .97. Scales have sums of large terms that cancel: more is left."""
    place, shape = device_of(device), SHAPE | (WIDER if device == "cuda" else {})
    if compile == "on":
        torch._dynamo.reset()
        if device == "cpu":
            monkeypatch.setattr(torch, "compile", lambda f, **named: _compile(f, backend="aot_eager", **named))
    tokens, targets = (each.to(place) for each in batch_of(2, shape["model.context"], vocab=64))
    found = {}
    for products in PRODUCTS:
        settings = shape | {"train.products": products, "train.compile": compile if products == "fp8" else "off"}
        objective = setup.build_for_training(run_config(recipe, 2, settings), place)
        with torch.no_grad():
            for name, parameter in objective.named_parameters():
                if name.endswith(("output_proj.weight", "down_proj.weight")):
                    drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                    parameter.copy_(0.1 * drawn)
        narrow = [name for name, part in objective.named_modules() if getattr(part, "product", None) is fp8.linear]
        assert bool(narrow) == (products == "fp8") and all("blocks" in name for name in narrow)
        loss = objective(tokens, targets).total
        with torch._functorch.config.patch(donated_buffer=False):
            found[products] = loss.item(), gradients(loss, objective)
    plain, narrowed = found["plain"], found["fp8"]
    assert plain[0] != narrowed[0] and narrowed[0] == pytest.approx(plain[0], rel=0.02)
    for name, wanted in plain[1].items():
        if wanted.norm() > 1e-4:
            near = torch.cosine_similarity(narrowed[1][name].flatten(), wanted.flatten(), dim=0)
            assert near > (0.9 if wanted.ndim == 2 else 0.8), name


_compile = torch.compile


def test_gates_are_in_8_bits_where_they_are_one_product_with_q_k_and_v() -> None:
    """Compiled blocks on a GPU pack them so. By themselves they have too few rows, and stay plain."""
    config = run_config("maglev-shared-0.1", 1, SHAPE | {"train.products": "fp8"})
    attention = setup.build_for_training(config, CPU).decoder.blocks[0].attention
    random_weights(attention)
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0))
    plain = [F.linear(rms_norm(x), linear.weight) for linear in attention.linears(gated=True)]
    packed, alone = attention.pack(x, gated=True), attention.project(x, gated=True)
    assert torch.equal(alone[3], plain[3]) and torch.equal(alone[4], plain[4])
    *parts, filler = packed.split([*(part.shape[-1] for part in plain), 60], dim=-1)
    assert (filler == 0).all()
    for part, wanted in zip(parts, plain, strict=True):
        assert 1e-3 < (part - wanted).norm() / wanted.norm() < 0.05


def test_a_gpu_without_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "serves", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "An Old GPU")
    config = run_config("swa-ssss", 2, SHAPE | {"train.products": "fp8"})
    with pytest.raises(RequestError, match="An Old GPU has no fp8; set train\\.products to plain"):
        setup.build_for_training(config, CPU)


def test_a_run_on_a_cpu_tells_that_it_is_emulated() -> None:
    told = {each: setup.remarks(run_config("swa-ssss", 2, {"train.products": each}), 1, 1, CPU) for each in PRODUCTS}
    assert told["plain"] == []
    assert told["fp8"] == ["train.products is fp8, emulated on cpu; GPUs have it from capability 8.9 on"]
    config = run_config("swa-ssss", 2, {"train.products": "fp8", "train.rows_per_pass": 1})
    assert setup.remarks(config, 1, 1, torch.device("cuda")) == []


def test_every_matrix_of_a_block_is_one_that_can() -> None:
    config = run_config("maglev-shared-0.1", 4).model
    assert config.width % fp8.ALIGNED == 0 and Linear(16, 16).product is F.linear
