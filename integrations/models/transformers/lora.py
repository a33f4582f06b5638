"""LoRA adapters of many policies in one forward pass: each row of a batch has its adapter.

Rows are sorted by adapter, so a target module adds (x A^T) B^T * scale to one contiguous slice per adapter. Modules
with the same input share the first product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from cotune.integrations.models.folder.adapter import Adapter, Factors
from cotune.integrations.models.siblings import Joint, group_siblings


class LoraRows:
    """Adds adapters to the layers of one model. `route` sets the adapters of the rows for the next passes."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._siblings = {name: names for names in group_siblings(self._modules) for name in names}
        self._projections: dict[str, Projection] = {}
        self._adapters: dict[int, Adapter] = {}

    def projection(self, name: str) -> Projection:
        """The module of this name and its siblings, to which adapters can be added from now on."""
        if name not in self._projections:
            names = self._siblings[name]
            self._projections |= dict.fromkeys(names, Projection({name: self._modules[name] for name in names}))
        return self._projections[name]

    def add(self, key: int, adapter: Adapter) -> None:
        """Make an adapter available to `route` under `key`."""
        self._adapters[key] = adapter
        for factors in adapter:
            self.projection(next(iter(factors.ups)))

    def remove(self, key: int) -> None:
        self._adapters.pop(key, None)

    def route(self, segments: Sequence[tuple[int, int, int]]) -> None:
        """Use adapter `key` in rows [low, high) for each (key, low, high), and only the base in all other rows."""
        for projection in self._projections.values():
            projection.additions = []
        for key, low, high in segments:
            for factors in self._adapters.get(key, ()):
                self._projections[next(iter(factors.ups))].add(low, high, factors)

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Restore the original methods of the model's layers while the model is copied."""
        for projection in set(self._projections.values()):
            projection.detach()
        try:
            yield
        finally:
            for projection in set(self._projections.values()):
                projection.attach()


class _Addition(NamedTuple):
    """The addition of an adapter to rows [low, high).

    `downs` are the first products x A^T of the modules that it changes. `ups` has, by the number of the module in the
    projection, its position among these products and its second factor B^T.
    """

    low: int
    high: int
    downs: Joint
    ups: dict[int, tuple[int, Tensor]]


class Projection:
    """Modules with the same input, in the order in which the model calls them, and the additions of adapters."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.additions: list[_Addition] = []
        self._modules = modules
        self._base_forwards: list[Callable[[Tensor], Tensor]] = [module.forward for module in modules.values()]
        self.attach()

    def attach(self) -> None:
        """Make each module add the adapters to its output."""
        for number, module in enumerate(self._modules.values()):
            module.forward = partial(self._forward, number)

    def detach(self) -> None:
        for module in self._modules.values():
            del module.forward

    def add(self, low: int, high: int, factors: Factors) -> None:
        """Use these factors in rows [low, high)."""
        downs = Joint(partial(_project_down, low, high, factors.down), [len(up) for up in factors.ups.values()])
        numbers = list(self._modules)
        ups = {numbers.index(name): (place, up) for place, (name, up) in enumerate(factors.ups.items())}
        self.additions.append(_Addition(low, high, downs, ups))

    def __call__(self, x: Tensor) -> list[Tensor]:
        """The outputs of all modules for x [rows, in], adapters included: [rows, out] each. An addition is an adapter
        and the range of rows that use it.
        """
        outputs = [forward(x) for forward in self._base_forwards]
        for addition in self.additions:
            first_products = addition.downs.parts(x)
            for number, (position, up) in addition.ups.items():
                rows = _in_rows(outputs[number], addition.low, addition.high)
                _add_product(rows, first_products[position], up)
        return outputs

    def _forward(self, number: int, x: Tensor) -> Tensor:
        """The output [..., out] of the module with this number for x [..., in], adapters included.

        Each adapter that changes the module is an addition for a range of rows: (x A^T) B^T, with the factors `down`
        (A^T) and `up` (B^T).
        """
        output = self._base_forwards[number](x)
        for addition in self.additions:
            if number in addition.ups:
                position, up = addition.ups[number]
                # Computed together with the first products of the module's siblings, which have the same input.
                first_product = addition.downs.part(position, x)
                rows = _in_rows(output, addition.low, addition.high)
                _add_product(rows.view(-1, output.shape[-1]), first_product, up)  # unlike reshape, view never copies
        return output


def _add_product(y: Tensor, down: Tensor, up: Tensor) -> None:
    if y.dtype == down.dtype:
        y.addmm_(down, up)
    else:  # y are logits, which are float32 in every model
        y.add_(down @ up)


def _in_rows(x: Tensor, low: int, high: int) -> Tensor:
    return x if high - low == len(x) else x[low:high]


def _project_down(low: int, high: int, down: Tensor, x: Tensor) -> Tensor:
    return _in_rows(x, low, high).reshape(-1, x.shape[-1]) @ down
