"""A GPU that a machine without one only pretends to have: tensors that say they are on `cuda:0` and compute on the CPU.

What a GPU refuses is refused: operators over tensors of both devices, `numpy()` without `cpu()`, pointers. Its kernels,
its memory and its speed are not there. `pretend` changes the process that calls it for good: only for one of its own.
Models are loaded before, as transformers loads them by way of "meta", whose guard stands in for that of a GPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
MOVES = {aten._to_copy.default, aten.copy_.default}
"""Operators that take tensors of both devices."""
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operators whose indices may be on the CPU."""
STANDS_IN = "pretended"
"""What these tensors are on for torch's own code, which knows no GPU."""
GPU = (STANDS_IN, "cuda")


torch.inference_mode = torch.no_grad
"""A wrapped tensor has no views in inference mode; for modules that are imported after this one."""


class OnGpu(Tensor):  # type: ignore[misc]
    """A tensor of the CPU that says it is on a GPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(STANDS_IN, 0),
        )
        return made

    def __init__(self, held: Tensor) -> None:
        assert type(held) is Tensor, type(held)
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:
        return True

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _computed(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy: use Tensor.cpu() first")

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(torch.tensor(at) if isinstance(at, list) else at)

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(torch.tensor(at) if isinstance(at, list) else at, value)

    def new_tensor(self, data: Any, **more: Any) -> Tensor:
        return OnGpu(self.held.new_tensor(data, **more))

    def tolist(self) -> Any:
        waits.append("tolist")
        return self.held.tolist()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a tensor of a GPU is not pickled here")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = OnGpu(self.held.detach().clone())
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives, on the device that a GPU would have it on."""
    device = kwargs.get("device")
    tensors = _tensors((*args, *kwargs.values()))
    on_gpu = any(isinstance(tensor, OnGpu) for tensor in tensors)
    if func is aten._pin_memory.default:
        pinned = args[0].clone()
        pinned.is_pinned_memory = True
        return pinned
    if device is None and not on_gpu:
        return func(*args, **kwargs)
    if func is aten._fused_sdp_choice.default and on_gpu:
        return 0  # the formula: the kernels of a GPU are not there
    if on_gpu:
        _check_devices(func, args, tensors)
    _note_wait(func, args, kwargs, on_gpu)
    asked = None if device is None else torch.device(device).type
    if asked == "meta" and func is aten._to_copy.default:
        asked = "cuda"  # to("cuda"), with the guard of "meta" in the place of a GPU's
    if asked == "meta":
        return func(*args, **kwargs)
    there = asked in GPU if asked else on_gpu
    if func is aten.mm.dtype:  # the CPU has no product of bfloat16 with a float32 result
        return OnGpu(_held(args[0]).to(args[2]) @ _held(args[1]).to(args[2]))
    plain_args, plain = tuple(map(_held, args)), {name: _held(value) for name, value in kwargs.items()}
    if device is not None:
        plain["device"] = torch.device("cpu")
        plain.pop("pin_memory", None)
    same = func is aten._to_copy.default and device is not None
    found = func(*plain_args, **plain)
    if same and found is plain_args[0]:
        found = found.clone()
    if not there:
        return found
    wrapped = OnGpu(found) if type(found) is Tensor else tree_map_only(Tensor, _wrapped, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if device is None and _aliases(func) else wrapped


waits: list[str] = []
"""The operators so far in which the host would wait for the GPU."""
COUNTS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
"""Operators whose value, or the size of it, the host has to know."""


def _note_wait(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_gpu: bool) -> None:
    """Keep the name of an operator in which the host waits for the GPU."""
    counts = on_gpu and func in COUNTS
    if func is aten.index.Tensor:
        counts = on_gpu and any(index is not None and index.dtype == torch.bool for index in args[1])
    elif func is aten.repeat_interleave.Tensor:
        counts = on_gpu and kwargs.get("output_size") is None
    elif func is aten._to_copy.default:
        target = kwargs.get("device")
        down = on_gpu and target is not None and torch.device(target).type == "cpu"
        up = not on_gpu and target is not None and torch.device(target).type in (*GPU, "meta")
        from_pinned_memory = down or hasattr(args[0], "is_pinned_memory")
        counts = (down or up) and not (kwargs.get("non_blocking") and from_pinned_memory)
    elif func is aten.copy_.default:
        crosses = isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu)
        counts = crosses and not (kwargs.get("non_blocking") or args[2:3] == (True,))
    if counts:
        waits.append(str(func))


def _wrapped(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, OnGpu) else OnGpu(tensor)


@functools.cache
def _aliases(func: Any) -> bool:
    """Whether an operator changes an argument or returns a view of one."""
    return any(value.alias_info for value in (*func._schema.arguments, *func._schema.returns))


def _tensors(values: Any) -> list[Tensor]:
    """Those among an operator's arguments, which are alone or in lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _held(value: Any) -> Any:
    """An argument of an operator with the tensors of the CPU that stand for those of a GPU."""
    if isinstance(value, OnGpu):
        return value.held
    return type(value)(map(_held, value)) if type(value) in (list, tuple) else value


def _check_devices(func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Raises RuntimeError, as torch does, for tensors of both devices; one number on the CPU goes with any."""
    if func in MOVES:
        return
    if func in INDEXED:
        tensors = _tensors((args[0], *args[2:]))
    if any(isinstance(t, OnGpu) for t in tensors):
        if any(not isinstance(t, OnGpu) and t.dim() > 0 for t in tensors):
            raise RuntimeError(f"Expected all tensors to be on the same device, cuda:0 and cpu were given to {func}")
        changed = args[0] if func._schema.is_mutable and args else None
        if isinstance(changed, Tensor) and not isinstance(changed, OnGpu):
            raise RuntimeError(f"{func} would change a tensor of the CPU by one of cuda:0")


class _Making(TorchDispatchMode):  # type: ignore[misc]
    """Makes the tensors that are asked for on a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


def _moved_after(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What makes a tensor of plain values, by operators that no mode sees: there it is moved when it is made."""

    def made(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        found = data if isinstance(data, OnGpu) else make(data, **more)
        return found if device is None else found.to(device)

    return made


def pretend(free: int = 64 << 30, total: int = 80 << 30) -> None:
    """Let this process believe that it has a GPU, with so much memory, until it ends."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # of c10::DeviceType; the guard of "meta" does nothing
    guards[cuda] = guards[meta]
    _setup_privateuseone_for_python_backend(STANDS_IN)
    getattr(torch, STANDS_IN).get_amp_supported_dtype = lambda: [torch.bfloat16]
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
        "mem_get_info": lambda *_: (free, total),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: waits.append("synchronize"),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _moved_after(getattr(torch, name)))
    torch.__future__.set_swap_module_params_on_conversion(True)
    _Making().__enter__()
