"""Layers to which a model gives the same input, one after the other: one product serves them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_TOGETHER = {name: group for group in SIBLINGS for name in group}
_PLACE = {name: place for group in SIBLINGS for place, name in enumerate(group)}


def siblings(names: Iterable[str]) -> list[list[str]]:
    """Modules by their names in groups that share an input, each in the order in which a model asks; most are alone."""
    parts = [(name, *name.rpartition(".")[::2]) for name in names]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, parent, own in sorted(parts, key=lambda part: _PLACE.get(part[2], 0)):
        groups.setdefault((parent, _TOGETHER.get(own, (own,))), []).append(name)
    return list(groups.values())


class Joint:
    """What siblings make of their input, computed when the first asks for its part and dropped with the last."""

    def __init__(self, compute: Callable[[Tensor], Tensor], sizes: Sequence[int]) -> None:
        """`compute` [..., in] -> [..., sum of sizes]."""
        self._compute, self._sizes = compute, list(sizes)
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """What all siblings make of x, in order: [..., size] each."""
        found = self._compute(x)
        return (found,) if len(self._sizes) == 1 else found.split_with_sizes(self._sizes, -1)

    def part(self, number: int, x: Tensor) -> Tensor:
        """What sibling `number` makes of x: a view of its own [..., size]. It may be written to once."""
        last = len(self._sizes) - 1
        if last == 0:
            return self._compute(x)
        if x is not self._input:
            self._input, self._parts = x, self.parts(x)
        part = self._parts[number]
        if number == last:
            self._input, self._parts = None, ()
        return part
