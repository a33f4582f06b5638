"""Matrix products in bfloat16 between tensors of float32, on processors that have instructions for them.

Only the factors are rounded. Sums, states between layers and logits stay in float32.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor, nn

from cotune.integrations.models.siblings import Joint, group_siblings

LARGE = 16_000_000
"""Number of parameters above which products take long enough to divide among threads, and to convert their factors."""
PACKED_FOR = 8
"""Number of rows that the layout of packed weights is chosen for. It works for any number."""


@cache
def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself (AVX512-BF16, AMX): elsewhere it is slower than float32."""
    is_supported = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(is_supported) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def gpu_has_bfloat16() -> bool:
    """Whether the GPU multiplies bfloat16 itself, as NVIDIA's do from Ampere on: a T4 or V100 only emulates it."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def rounds_products(dtype: str | None, device: str) -> bool:
    """Whether bfloat16 is the precision of products with frozen weights alone: the rest of the model is float32."""
    return dtype == "bfloat16" and device == "cpu" and has_bfloat16()


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in bfloat16 in the processor's layout, for `product`. Its values do not change."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
    return packed


def product(half: Tensor, packed: Tensor) -> Tensor:
    """half [..., in] times a weight, packed or plain, by oneDNN in their precision: [..., out]."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(half, packed, None, "none", [], "")
    return result


def exact_product(half: Tensor, packed: Tensor) -> Tensor:
    """Like `product`, but with a result in float32. The rounding of a logit of 20 would be up to 0.06 nats."""
    rounded = product(half, packed)
    # The second product computes the rounding error, which is added.
    return rounded.float().add_(torch.ops.mkldnn._linear_pointwise.binary(half, rounded, packed, None, "sub"))


class PackedLinear(nn.Module):
    """A frozen linear layer of float32 whose products are in bfloat16, part `number` of a joint one."""

    def __init__(self, layer: nn.Linear, joint: Joint, number: int) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self._bias = layer.bias
        self._joint = joint
        self._number = number

    def forward(self, x: Tensor) -> Tensor:
        y = self._joint.part(self._number, x)
        return y if self._bias is None else y.add_(self._bias)


def pack_linear_layers(model: nn.Module) -> None:
    """Replace the linear layers of a model that is not trained by packed ones in bfloat16. The head's products are
    not rounded, so that its logits stay exact. Layers with the same input are computed as one.
    """
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        layers = {name: layer for name, layer in parent.named_children() if type(layer) is nn.Linear}
        for names in group_siblings(layers):
            # Siblings have the same input, so their weights are stacked, and one product computes the outputs of all.
            packed_weights = pack(torch.cat([layers[name].weight.detach().bfloat16() for name in names]))
            compute = _exact if layers[names[0]] is head else _rounded_product
            joint = Joint(partial(compute, packed_weights), [layers[name].out_features for name in names])
            for number, name in enumerate(names):
                setattr(parent, name, PackedLinear(layers[name], joint, number))


def _rounded_product(packed: Tensor, x: Tensor) -> Tensor:
    return product(x.bfloat16(), packed).float()


def _exact(packed: Tensor, x: Tensor) -> Tensor:
    return exact_product(x.bfloat16(), packed)
