"""Rates of GPUs as their makers publish them, by the name that torch gives."""

from __future__ import annotations

from typing import NamedTuple


class GpuRates(NamedTuple):
    """Published peaks of a GPU."""

    bfloat16: float
    """Dense operations in bfloat16 per second."""
    bandwidth: float
    """Bytes read from its memory per second."""


_A100 = 312e12
RATES = {
    "B200": GpuRates(2250e12, 8000e9),
    "H100 PCIe": GpuRates(756e12, 2000e9),
    "H100 NVL": GpuRates(835e12, 3900e9),
    "GH200": GpuRates(989e12, 4000e9),
    "H200": GpuRates(989e12, 4800e9),
    "H100": GpuRates(989e12, 3350e9),
    "A100 SXM4 80GB": GpuRates(_A100, 2039e9),
    "A100 80GB PCIe": GpuRates(_A100, 1935e9),
    "A100": GpuRates(_A100, 1555e9),
    "L40S": GpuRates(362e12, 864e9),
    "L40": GpuRates(181e12, 864e9),
    "L4": GpuRates(121e12, 300e9),
    "A10": GpuRates(125e12, 600e9),
    "4090": GpuRates(165e12, 1008e9),
}
"""By words of the GPU's name. `rates_of` takes the first match, so longer names come before the names they contain."""


def rates_of(name: str) -> GpuRates | None:
    """Return the rates of the GPU with this name. None for an unknown GPU, and for a part of a GPU (MIG)."""
    words = f" {name.replace('-', ' ')} "
    if " MIG " in words:
        return None
    for part, rates in RATES.items():
        if f" {part} " in words:
            return rates
    return None
