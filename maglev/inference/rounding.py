"""A decoder whose matrices hold what 8 bits hold, so that every way to compute it is the same function."""

import copy

import torch

from maglev.errors import RequestError
from maglev.model.decoder import Decoder
from maglev.model.layers import Linear, Readout
from maglev.ops.matrix import WeightFormat, check_format, matrix

# where the kernels' type for fp8 begins
FP8_CAPABILITY = (8, 9)


def check_weights(weights: str, device: torch.device) -> None:
    """A format that exists and that kernels on this device can read."""
    check_format(weights)
    if weights == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise RequestError(f"weights are 'fp8' and {name} cannot read them; use int8 or plain")


@torch.no_grad()
def rounded(decoder: Decoder, weights: WeightFormat) -> Decoder:
    """A copy with every matrix that a step multiplies by rounded row by row; "plain" is the decoder itself.

    Embedding and scales stay as they are. Rounding what is rounded gives the same 8 bits again, so `FastDecoder` may
    be made from the copy as well as from the original.
    """
    check_format(weights)
    if weights == "plain":
        return decoder
    dtype, decoder = decoder.compute_dtype, copy.deepcopy(decoder)
    for module in decoder.modules():
        if isinstance(module, Linear | Readout):
            module.weight.copy_(matrix(module.weight.to(dtype), weights).dense(dtype))
    return decoder
