"""Other recurrent models beside ours: Gated DeltaNet and Mamba-2, on the same trunk, by the same loop and optimizer.

Embedding, residual and input scales, MLP, readout and soft cap are ours; the layer that mixes positions is theirs, on
its published kernels (flash-linear-attention, mamba_ssm), which are no dependency: a folder that holds them goes on
PYTHONPATH. A block has as many matrix weights as ours, 12 x width^2: Gated DeltaNet's layer takes half of them and a
narrower MLP the rest; Mamba-2 has no MLP and about twice as many layers. Their parallel form is their recurrence, so
their numbers are recurrent ones. `small_table.py` trains them; by itself this checks the kernels on a GPU:

    PYTHONPATH=PEERS python benchmarks/peers.py gated-deltanet mamba-2
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev.errors import RequestError, WorkError
from maglev.model.decoder import Scales
from maglev.model.init import draw
from maglev.model.layers import MLP, Embedding, Linear, Readout
from maglev.model_config import ModelConfig
from maglev.objectives.next_token import NextTokenObjective
from maglev.ops.inject import rms_norm
from maglev.train.loop import Trainer
from maglev.train.param_groups import ParamGroup, role_of
from maglev.train.setup import compute_dtype

# in units of which an MLP is made wider
STEP = 64
# a matrix with fewer rows is a gate of a few heads, which goes to AdamW as ours do
LEAST_ROWS = 16
# by so much kernels may differ from steps in float32: bfloat16 costs a few hundredths, a wrong kernel is off by half
TOLERANCE = 0.1


class Mamba2(nn.Module):
    """Mamba-2's layer around its scan: one product in, a short convolution, the scan, a gated norm, one product out."""

    def __init__(self, width: int, head_dim: int = 64, state: int = 128, taps: int = 4, chunk: int = 256) -> None:
        super().__init__()
        self.inner, self.heads, self.state, self.chunk = 2 * width, 2 * width // head_dim, state, chunk
        mixed = self.inner + 2 * state
        self.in_proj = Linear(width, self.inner + mixed + self.heads)
        self.conv_weight = nn.Parameter(torch.empty(mixed, taps).uniform_(-(taps**-0.5), taps**-0.5))
        self.conv_bias = nn.Parameter(torch.empty(mixed).uniform_(-(taps**-0.5), taps**-0.5))
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        step = torch.exp(torch.empty(self.heads).uniform_(math.log(1e-3), math.log(1e-1)))
        # softplus of it is the step
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm_weight = nn.Parameter(torch.ones(self.inner))
        self.out_proj = Linear(self.inner, width)
        self.scan: Callable[..., Tensor] = scan_by_steps
        self.convolve = short_convolution

    def forward(self, x: Tensor) -> Tensor:
        gate, mixed, step = self.in_proj(x).split([self.inner, self.inner + 2 * self.state, self.heads], dim=-1)
        mixed = self.convolve(mixed, self.conv_weight, self.conv_bias)
        values, writes, reads = mixed.split([self.inner, self.state, self.state], dim=-1)
        out = self.scan(
            values.unflatten(-1, (self.heads, -1)),
            step,
            -self.A_log.float().exp(),
            writes[:, :, None],
            reads[:, :, None],
            chunk_size=self.chunk,
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
        )
        normed = rms_norm(out.flatten(2).to(x.dtype) * F.silu(gate)) * self.norm_weight.to(x.dtype)
        return self.out_proj(normed)


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each channel with its last taps, then silu. x (B, T, C), weight (C, K)"""
    taps, length = weight.shape[1], x.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    terms = [padded[:, tap : tap + length] * weight[:, tap].to(x.dtype) for tap in range(taps)]
    return F.silu(sum(terms, bias.to(x.dtype)))


def scan_by_steps(
    x: Tensor, step: Tensor, decay: Tensor, writes: Tensor, reads: Tensor, *, D: Tensor, dt_bias: Tensor, **_: Any
) -> Tensor:
    """What the kernel computes, as it is defined. x (B, T, H, P), step (B, T, H), writes and reads (B, T, 1, N)"""
    step = F.softplus(step.float() + dt_bias)
    state = x.new_zeros(*x[:, 0].shape, writes.shape[-1], dtype=torch.float32)  # (B, H, P, N)
    outs = []
    for slot in range(x.shape[1]):
        own = step[:, slot, :, None]
        state = state * torch.exp(own * decay[:, None])[..., None]
        state = state + (own * x[:, slot])[..., None] * writes[:, slot, :, None].float()
        outs.append((state * reads[:, slot, :, None].float()).sum(-1) + D[:, None] * x[:, slot])
    return torch.stack(outs, dim=1).to(x.dtype)


class DeltaNet(nn.Module):
    """fla's own layer as it is; heads of 128, which its backward kernel needs on Hopper GPUs (see `gated_deltanet`)."""

    def __init__(self, width: int, head_dim: int = 128) -> None:
        super().__init__()
        layer = imported("fla.layers.gated_deltanet", "flash-linear-attention").GatedDeltaNet
        # its paper's share of the width
        self.layer = layer(hidden_size=width, head_dim=head_dim, num_heads=max(1, 3 * width // (4 * head_dim)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, x.dtype) if x.dtype == torch.bfloat16 else nullcontext():
            return self.layer(x)[0].to(x.dtype)


def imported(module: str, package: str) -> Any:
    try:
        return __import__(module, fromlist=["_"])
    except ImportError as error:
        raise RequestError(
            f"{package} is missing ({error}); put a folder that holds it on PYTHONPATH, or leave this peer out"
        ) from None


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise RequestError("the kernels of a peer need a CUDA GPU, and PyTorch sees none; leave peers out")


def mamba2(width: int) -> nn.Module:
    kernels = imported("mamba_ssm.ops.triton.ssd_combined", "mamba_ssm")
    need_gpu()
    mixer = Mamba2(width)
    mixer.scan = kernels.mamba_chunk_scan_combined
    mixer.convolve = torch.compile(short_convolution)
    return mixer


def gated_deltanet(width: int) -> nn.Module:
    kernels = imported("fla.ops.common.chunk_o", "flash-linear-attention")
    # On Hopper with Triton 3.4 to 3.7 fla refuses its backward kernel, which is compiled wrongly for blocks of 64
    # (its issue 640). Heads of 128 make blocks of 128; `check` holds the gradients against steps all the same.
    kernels.TRITON_ABOVE_3_7_1 = True
    need_gpu()
    return DeltaNet(width)


@contextmanager
def by_steps(mixer: nn.Module) -> Iterator[None]:
    """The same layer with its scan as it is defined, a step at a time."""
    if isinstance(mixer, Mamba2):
        kept, mixer.scan = mixer.scan, scan_by_steps
        yield
        mixer.scan = kept
        return
    module = imported("fla.layers.gated_deltanet", "flash-linear-attention")
    rule = imported("fla.ops.gated_delta_rule.naive", "flash-linear-attention").naive_recurrent_gated_delta_rule
    decay = imported("fla.ops.gated_delta_rule.gate", "flash-linear-attention").naive_gdn_gate

    def stepped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **more: Any) -> tuple[Tensor, None]:
        q, k = (F.normalize(each.float(), dim=-1) for each in (q, k))
        out, _ = rule(q, k, v, beta.sigmoid(), decay(g, more["A_log"], more["dt_bias"]))
        return out.to(v.dtype), None

    kept, module.chunk_gated_delta_rule = module.chunk_gated_delta_rule, stepped
    yield
    module.chunk_gated_delta_rule = kept


@dataclass(frozen=True)
class Peer:
    # of a width
    mixer: Callable[[int], nn.Module]
    has_mlp: bool
    # numbers of a layer's state, and FLOPs per token that it takes beside the matrices, as a recurrence
    state: Callable[[nn.Module], int]
    state_flops: Callable[[nn.Module], int]


def delta_state(mixer: nn.Module) -> int:
    layer = mixer.layer
    return layer.num_heads * layer.head_k_dim * layer.head_v_dim + 3 * (2 * layer.key_dim + layer.value_dim)


def mamba_state(mixer: nn.Module) -> int:
    return mixer.inner * mixer.state + 3 * (mixer.inner + 2 * mixer.state)


PEERS = {
    # the state is read with k, written, and read with q
    "gated-deltanet": Peer(gated_deltanet, True, delta_state, lambda m: 6 * m.layer.value_dim * m.layer.head_k_dim),
    "mamba-2": Peer(mamba2, False, mamba_state, lambda m: 4 * m.inner * m.state),
}


class NarrowMLP(MLP):
    def __init__(self, width: int, hidden: int) -> None:
        nn.Module.__init__(self)
        self.up_proj, self.down_proj = Linear(width, hidden), Linear(hidden, width)


class PeerBlock(nn.Module):
    def __init__(self, mixer: nn.Module, mlp: MLP | None) -> None:
        super().__init__()
        self.mixer, self.mlp = mixer, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(rms_norm(x))
        return x if self.mlp is None else x + self.mlp(x)


class PeerDecoder(nn.Module):
    """In the place of `Decoder` in what a network without memory is asked for: all positions at once."""

    injection = None

    def __init__(self, config: ModelConfig, peer: Peer) -> None:
        super().__init__()
        self.config = config
        width, wanted = config.width, 12 * config.width**2
        first = peer.mixer(width)
        own = matrix_weights(first)
        depth = config.depth if peer.has_mlp else max(1, round(config.depth * wanted / own))
        hidden = max(1, round((wanted - own) / (2 * width) / STEP)) * STEP
        mixers = [first, *(peer.mixer(width) for _ in range(depth - 1))]
        self.blocks = nn.ModuleList(
            PeerBlock(mixer, NarrowMLP(width, hidden) if peer.has_mlp else None) for mixer in mixers
        )
        self.embedding, self.scales = Embedding(config.vocab_size, width), Scales(depth)
        self.readout = Readout(width, config.vocab_size, config.logit_softcap)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.embedding.compute_dtype or self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def forward(self, tokens: Tensor, previous_memory: None = None, *, starts: Tensor | None = None) -> Tensor:
        assert starts is None, "a peer carries its state over all documents of a row"
        start = x = self.embedding(tokens)
        scales = zip(self.scales.residual_scale.unbind(), self.scales.input_scale.unbind(), strict=True)
        for block, (residual, entry) in zip(self.blocks, scales, strict=True):
            x = block(residual * x + entry * start)
        return rms_norm(x)


def matrix_weights(module: nn.Module) -> int:
    return sum(
        parameter.numel() for name, parameter in module.named_parameters() if peer_role(name, parameter) == "matrix"
    )


def peer_role(name: str, parameter: nn.Parameter) -> str:
    """Matrices to Muon; convolutions, norms, decays and the gates of a few heads to AdamW, as our gates."""
    is_gate = parameter.ndim != 2 or min(parameter.shape) < LEAST_ROWS
    return (
        "gate"
        if is_gate and not name.endswith(("_scale", "embedding.weight", "readout.weight"))
        else role_of(name, parameter)
    )


@torch.no_grad()
def draw_matrices(module: nn.Module, seed: int) -> None:
    """As ours are drawn; what else a layer has is as its authors begin."""
    for name, parameter in module.named_parameters():
        if peer_role(name, parameter) != "gate":
            parameter.copy_(draw(name, parameter, seed))


@torch.no_grad()
def initialise(decoder: nn.Module, seed: int) -> None:
    """What writes to the stream begins at zero, as ours does."""
    draw_matrices(decoder, seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight")):
            parameter.zero_()


class PeerTrainer(Trainer):
    """Our loop around another network."""

    def build(self, mesh: DeviceMesh | None) -> NextTokenObjective:
        # a layer draws its decays and convolutions when it is made
        torch.manual_seed(self.config.train.seed)
        decoder = PeerDecoder(self.config.model, PEERS[self.config.recipe])
        initialise(decoder, self.config.train.seed)
        decoder.embedding.compute_dtype = compute_dtype(self.config, self.device)
        if self.device.type == "cuda":
            decoder.readout.fused = True
            for block in decoder.blocks:
                if block.mlp is not None:
                    block.mlp.compile(dynamic=False)
        return NextTokenObjective(decoder).to(self.device)

    def param_groups(self) -> list[ParamGroup]:
        return super().param_groups(peer_role)


def costs(decoder: PeerDecoder, peer: Peer) -> dict[str, Any]:
    """As `accounting` counts: 2 per matrix weight and the recurrence itself, whatever a kernel takes for it."""
    mixers = [block.mixer for block in decoder.blocks]
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    matrices = sum(map(matrix_weights, decoder.blocks)) + decoder.readout.weight.numel()
    forward = 2 * matrices + sum(map(peer.state_flops, mixers))
    return {
        "parameters": parameters,
        "training_flops_per_token": 3 * forward,
        "state_bytes": 2 * sum(map(peer.state, mixers)),
        "layers": len(mixers),
    }


def check(name: str, device: torch.device, width: int = 512, length: int = 200) -> float:
    """The largest relative error of a layer's output and gradients on its kernels, in bfloat16 beside steps."""
    torch.manual_seed(0)
    mixer = PEERS[name].mixer(width).to(device)
    draw_matrices(mixer, 0)
    given = torch.randn(2, length, width, device=device)
    upstream = torch.randn_like(given)

    def results(dtype: torch.dtype) -> list[Tensor]:
        x = given.to(dtype).requires_grad_()
        out = mixer(x)
        wanted = [x, *mixer.parameters()]
        return [each.detach().float() for each in (out, *torch.autograd.grad(out, wanted, upstream.to(dtype)))]

    ours = results(torch.bfloat16)
    with by_steps(mixer):
        theirs = results(torch.float32)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def check_or_fail(name: str, device: torch.device) -> None:
    worst = check(name, device)
    if not worst < TOLERANCE:
        raise WorkError(
            f"the kernels of {name} are off by {worst:.3f}, more than {TOLERANCE}; use another version of them"
        )


def main() -> None:
    device = torch.device("cuda")
    print(json.dumps({name: check(name, device) for name in sys.argv[1:] or PEERS}))


if __name__ == "__main__":
    main()
