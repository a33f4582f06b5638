"""Tensors of a GPU that is not there, which have shapes but no numbers: torch's FakeTensorMode with `cuda`.

An operator over tensors of two devices raises, as does `nonzero()` and whatever else needs numbers for a shape. Copies
to the CPU give zeros, `item()` gives 1, and both are noted. It runs the code paths of a GPU by torch's own rules,
autocast included. Autograd needs a library for that (`allow_backward`). `tests/pretend_gpu.py` has the numbers, but
stands in for these rules.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cotune

aten = torch.ops.aten
CUDA, META = 1, 14
"""Of c10::DeviceType."""


class Stream(torch.cpu.Stream):  # type: ignore[misc]
    """A queue of work that is always empty."""

    def synchronize(self) -> None:
        pass


PACKAGE = f"{Path(cotune.__file__).parent}/"


class HostWaits(TorchDispatchMode):  # type: ignore[misc]
    """Keeps the names of operators in which the host waits for the GPU. Copies to the host give zeros, `item` gives 1.

    Copies to the GPU are kept too, unless they are `non_blocking` and from pinned memory. Tensors of the CPU stay real,
    so the host can compute with their numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def for_numbers(self) -> list[str]:
        """Those in which the host needs numbers of the GPU: all but the copies to it."""
        return [name for name in self.names if " to the GPU" not in name]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            return NotImplemented  # its parts, which are plain tensors, come here next
        on_gpu = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        to_gpu = device is not None and torch.device(device).type == "cuda"

        if func is aten._local_scalar_dense.default and on_gpu:
            self._note(func, "reads a number")
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is aten._pin_memory.default:
            with no_dispatch():
                pinned = args[0].clone()
            pinned.is_pinned_memory = True
            return pinned
        if func is aten._to_copy.default and on_gpu and device == torch.device("cpu"):
            if not kwargs.get("non_blocking"):
                self._note(func, "to the CPU")
            with no_dispatch():
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten._to_copy.default and to_gpu and args[0].is_cpu:
            if not kwargs.get("non_blocking"):
                self._note(func, "to the GPU")
            elif not hasattr(args[0], "is_pinned_memory"):
                self._note(func, "to the GPU from memory that is not pinned")
        if func is aten.copy_.default and on_gpu and not isinstance(args[0], FakeTensor):
            self._note(func, "to the CPU")
            return args[0]
        if func is aten.copy_.default and on_gpu and args[1].is_cpu and args[2:3] != (True,):
            self._note(func, "to the GPU")

        if on_gpu or to_gpu:
            return func(*args, **kwargs)
        with no_dispatch():
            return func(*args, **kwargs)

    def _note(self, func: Any, kind: str) -> None:
        """Keep the name of an operator with the line of cotune that has called it."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        line = "" if frame is None else f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
        self.names.append(f"{func} {kind} {line}")


@contextmanager
def fake_gpu(free: int = 64 << 30, total: int = 80 << 30) -> Iterator[HostWaits]:
    """A GPU with so much memory, for tensors that are made inside."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda_guard = guards[CUDA]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    waits = HostWaits()
    answers = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
        "get_device_capability": lambda *_: (9, 0),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: waits.names.append("synchronize"),
        "Stream": Stream,
        "Event": torch.cpu.Event,
        "stream": torch.cpu.stream,
        "current_stream": lambda *_: Stream(),
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
        if not guards[CUDA]:
            guards[CUDA] = guards[META]  # the guard of "meta" does nothing
        try:
            with fake, waits:
                yield waits
        finally:
            guards[CUDA] = cuda_guard


def allow_backward(folder: Path) -> None:
    """Let autograd compute on the fake GPU, for good: only for a process of its own. Compiles a library in `folder`."""
    torch_folder = Path(torch.__file__).parent
    library = folder / "fake_gpu.so"
    source = Path(__file__).with_suffix(".cpp")
    flags = ["-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library), "-lc10", "-ltorch_cpu"], check=True)
    ctypes.CDLL(str(library)).use_fake_hooks()


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
