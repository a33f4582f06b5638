"""Tensors of a GPU that is not there, which have shapes but no numbers: torch's FakeTensorMode with `cuda`.

An operator over tensors of two devices raises, as do `item()`, `nonzero()` and whatever else needs a number. Copies to
the CPU give zeros, and are counted. It runs the code paths of a GPU by torch's own rules, autocast included; only the
forward pass, as autograd asks for a real GPU. `tests/pretend_gpu.py` has the numbers, but stands in for these rules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
CUDA, META = 1, 14
"""Of c10::DeviceType."""


class CopiesToHost(TorchDispatchMode):  # type: ignore[misc]
    """Counts copies from the GPU to the CPU: the host waits for the GPU in each. They give zeros.

    Tensors of the CPU stay real, so the host can compute with their numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        leaves = tree_leaves((args, kwargs))
        on_gpu = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if func is aten._to_copy.default and on_gpu and device == torch.device("cpu"):
            self.count += 1
            with no_dispatch():
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and on_gpu and not isinstance(args[0], FakeTensor):
            self.count += 1
            return args[0]
        if on_gpu or (device is not None and torch.device(device).type == "cuda"):
            return func(*args, **kwargs)
        with no_dispatch():
            return func(*args, **kwargs)


@contextmanager
def fake_gpu(free: int = 64 << 30, total: int = 80 << 30) -> Iterator[CopiesToHost]:
    """A GPU with so much memory, for tensors that are made inside."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda_guard = guards[CUDA]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    answers = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
        "mem_get_info": lambda *_: (free, total),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "empty_cache": lambda: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(FakeTensorMode, "avoid_device_init", True)  # it would move constants to the real GPU
        patch.setattr(torch.nn.Module, "to", with_new_parameters)
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, moved_after(getattr(torch, name)))
        guards[CUDA] = guards[META]  # the guard of "meta" does nothing
        try:
            copies = CopiesToHost()
            with fake, copies:
                yield copies
        finally:
            guards[CUDA] = cuda_guard


def with_new_parameters(module: torch.nn.Module, *args: Any, **more: Any) -> torch.nn.Module:
    """`Module.to`, by new parameters: torch would swap storages, which fake tensors do not have."""
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False):
            setattr(part, name, torch.nn.Parameter(old.detach().to(*args, **more), old.requires_grad))
    return module


def moved_after(make: Any) -> Any:
    """Tensors of plain values are made by operators that no mode sees: on the CPU, and moved then."""

    def moved(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        made: Tensor = make(data, **more)
        return made if device is None else made.to(device)

    return moved
