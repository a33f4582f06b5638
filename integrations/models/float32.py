"""Matrix products with float32 results: of float32 by oneDNN on the CPU, and of bfloat16 without rounding the result.

For float32, torch uses MKL, which does not use AVX-512 on AMD's processors: oneDNN is 2.3 times as fast there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from cotune.integrations.models import bfloat16

WORTH = 2**19
"""Multiplications of a product above which oneDNN is faster: each call of it takes 10 microseconds more."""

WIDENED_ROWS = 2**14
"""Rows of a weight that are converted to float32 at once: 256 MiB for states of 4,096 numbers."""


@cache
def prefers_onednn() -> bool:
    """Whether the processor is one of AMD's with AVX-512."""
    cpuinfo = Path("/proc/cpuinfo")
    vendor = cpuinfo.read_text() if cpuinfo.exists() else ""
    is_amd_avx512 = "AuthenticAMD" in vendor and torch.cpu._is_avx512_supported()
    return bool(is_amd_avx512) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times weight [out, in], which may be a transposed view: [..., out]. It has no gradient."""
    fast = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() * weight.shape[0] >= WORTH
    if not (fast and prefers_onednn()):
        return linear(x, weight)
    return bfloat16.product(x, weight)


def widened_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in] times weight [out, in], both of one dtype: [N, out] in float32. It has no gradient.

    For logits: bfloat16 has 8 significant bits, so a logit of 20 would be rounded by up to 0.06 nats.
    """
    if weight.dtype == torch.float32:
        return product(x, weight)
    if x.is_cuda and torch.version.hip is None:
        widened: Tensor = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return widened
    # Other devices cannot multiply to another precision. Convert the weight part by part: all of it takes gigabytes.
    result = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    wide_x = x.float()
    for columns, part in zip(result.split(WIDENED_ROWS, dim=1), weight.split(WIDENED_ROWS), strict=True):
        columns.copy_(product(wide_x, part.float()))
    return result


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = product(x, self.weight)
        return y if self.bias is None else y.add_(self.bias)


def speed_linear_layers(model: nn.Module) -> None:
    """Make the linear layers of a model that is not trained use `product`. Nothing else about them changes."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = _Linear


class _WideLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = widened_product(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y.add_(self.bias)


def widen_logits(model: nn.Module) -> None:
    """Make a model of lower precision that is not trained compute its logits in float32."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.dtype != torch.float32:
        head.__class__ = _WideLinear
