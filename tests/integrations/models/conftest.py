"""What tests of several rooms ask for."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.nn.functional import linear

from cotune.integrations.models import bfloat16


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bfloat16: those of the processor, or torch's own of the same roundings where it has none."""
    if bfloat16.has_bfloat16():
        return

    def exact(half: Tensor, weight: Tensor) -> Tensor:
        return linear(half.float(), weight.float())

    monkeypatch.setattr(bfloat16, "pack", lambda weight: weight)
    monkeypatch.setattr(bfloat16, "product", lambda half, weight: exact(half, weight).bfloat16())
    monkeypatch.setattr(bfloat16, "exact_product", exact)
