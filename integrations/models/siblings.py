"""Layers to which a model gives the same input, one after the other: one product serves them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def siblings(names: Iterable[str]) -> list[list[str]]:
    """These children of one module in groups that share an input, in the order in which they are asked."""
    left = set(names)
    joined = [[name for name in group if name in left] for group in SIBLINGS]
    return [*filter(None, joined), *([name] for name in sorted(left.difference(*joined)))]


class Joint:
    """What siblings make of their input, computed when the first asks for its part and dropped with the last."""

    def __init__(self, compute: Callable[[Tensor], Tensor], sizes: Sequence[int]) -> None:
        """`compute` [..., in] -> [..., sum of sizes]."""
        self._compute, self._sizes = compute, list(sizes)
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def part(self, number: int, x: Tensor) -> Tensor:
        """What sibling `number` makes of x: a view of its own [..., size]. It may be written to once."""
        if len(self._sizes) == 1:
            return self._compute(x)
        if x is not self._input:
            self._input, self._parts = x, self._compute(x).split(self._sizes, -1)
        part = self._parts[number]
        if number == len(self._sizes) - 1:
            self._input, self._parts = None, ()
        return part
