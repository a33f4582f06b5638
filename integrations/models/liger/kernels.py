"""The kernels, as functions with gradients."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Norm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., width] divided by its root mean square, times weight [width], as Llama's RMSNorm rounds it."""


class Rotate(Protocol):
    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embeddings of query and key [rows, heads, tokens, width]; both may be changed in place.

        cos and sin are [rows, tokens, rotary width].
        """


class SiluProduct(Protocol):
    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, both [..., width]. The backward pass writes gradients over gate and up."""


class Kernels(NamedTuple):
    norm: Norm
    rotate: Rotate
    silu_product: SiluProduct


def load_kernels() -> Kernels:
    """Raises ImportError without Liger-Kernel or Triton."""
    from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Gradients are not written in place: others may refer to them.
        output: Tensor = LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False, None)
        return output

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = LigerRopeFunction.apply(query, key, cos, sin)
        return rotated

    def silu_product(gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = LigerSiLUMulFunction.apply(gate, up)
        return output

    return Kernels(norm, rotate, silu_product)
