"""Groups layers that get the same input one after the other, so that one matrix product serves all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers with the same input, in the order in which a model calls them."""
_GROUP_OF_NAME: dict[str, tuple[str, ...]] = {}
_PLACE_IN_GROUP: dict[str, int] = {}
for _group in SIBLINGS:
    for _place, _name in enumerate(_group):
        _GROUP_OF_NAME[_name] = _group
        _PLACE_IN_GROUP[_name] = _place


def group_siblings(names: Iterable[str]) -> list[list[str]]:
    """Names of modules, grouped by their input, in the order of calls. Most modules are alone in their group."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in sorted(names, key=lambda name: _PLACE_IN_GROUP.get(name.rpartition(".")[2], 0)):
        parent, _, layer = name.rpartition(".")
        groups.setdefault((parent, _GROUP_OF_NAME.get(layer, (layer,))), []).append(name)
    return list(groups.values())


class Joint:
    """The outputs of siblings. They are computed for the first sibling that needs its part, and freed with the last."""

    def __init__(self, compute: Callable[[Tensor], Tensor], sizes: Sequence[int]) -> None:
        """`compute` [..., in] -> [..., sum of sizes]."""
        self._compute = compute
        self._sizes = list(sizes)
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of all siblings for x, in order: [..., size] each."""
        joint = self._compute(x)
        return (joint,) if len(self._sizes) == 1 else joint.split_with_sizes(self._sizes, -1)

    def part(self, number: int, x: Tensor) -> Tensor:
        """The output of sibling `number` for x: a view [..., size], which may be written to once.

        A model calls the siblings one after the other with the same tensor. The first call computes all outputs, and
        the last one frees them.
        """
        last_number = len(self._sizes) - 1
        if last_number == 0:
            return self._compute(x)
        if x is not self._input:
            self._input = x
            self._parts = self.parts(x)
        part = self._parts[number]
        if number == last_number:
            self._input = None
            self._parts = ()
        return part
