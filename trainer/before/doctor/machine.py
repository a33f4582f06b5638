"""This machine: cores, memory, GPUs, shared memory, open files, versions, and a Ray cluster that is up."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import ConfigError
from cotune.integrations.cluster.runtime import open_ray
from cotune.integrations.models.memory import machine_memory
from cotune.integrations.versions import versions_of_installed

PACKAGES = ("torch", "transformers", "peft", "ray", "vllm", "openai", "langgraph", "autogen-agentchat", "crewai")


LEAST_GB = 1.0
MOST_GB = 1024.0
"""Bounds of --gpu, the size of a GPU that the user plans with."""
FREE_SHARE = 0.97
"""Share of a GPU's nominal memory that is free if nothing runs on it."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU that torch can use, or one that the user plans with."""

    name: str
    memory_gb: float
    free_gb: float
    is_assumed: bool = False
    """Whether it is not in this machine, but known only by the size that the user named."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of a Ray cluster, and its free cores and GPUs."""

    address: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """This machine. Sizes are in GB (2**30 bytes); `shared_gb` is free space of /dev/shm, 0 where there is none."""

    python: str
    system: str
    cores: int
    memory_gb: float
    free_memory_gb: float
    shared_gb: float
    disk_gb: float
    """Free, where a run would be written."""
    temporary_gb: float
    open_files: int
    gpus: tuple[Gpu, ...]
    versions: Mapping[str, str]
    bfloat16: bool = False
    """Whether the processor multiplies bfloat16 itself."""
    loopback: str = ""
    """The error of opening a port on 127.0.0.1; empty if one can be opened."""


def examine_machine(runs: Path) -> Machine:
    """Examine this machine. `runs` is the folder that runs would be written to."""
    free, total = (size / 2**30 for size in machine_memory())
    return Machine(
        python=platform.python_version(),
        system=platform.platform(terse=True),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gb=total,
        free_memory_gb=free,
        shared_gb=_free_disk_gb(Path("/dev/shm")),
        disk_gb=_free_disk_gb(runs),
        temporary_gb=_free_disk_gb(Path(tempfile.gettempdir())),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=_gpus(),
        versions=versions_of_installed(("cotune", *PACKAGES)),
        bfloat16=_multiplies_bfloat16(),
        loopback=_loopback_error(),
    )


def gpu_of(size: float) -> Gpu:
    """An assumed GPU of this size in GB. Raises ConfigError for a size that no GPU has."""
    if not LEAST_GB <= size <= MOST_GB:
        raise ConfigError("--gpu", size, f"must be from {LEAST_GB:g} to {MOST_GB:g} GB", "Pass its size: --gpu 24.")
    return Gpu(name=f"a GPU of {size:g} GB", memory_gb=size, free_gb=FREE_SHARE * size, is_assumed=True)


def nodes_of(address: str) -> list[Node]:
    """The machines of the Ray cluster at `address`. Raises ConfigError when it cannot be joined."""
    with open_ray(address):
        ray: Any = importlib.import_module("ray")
        free = ray._private.state.available_resources_per_node()
        return [
            Node(
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
                free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
                free_gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]


def _free_disk_gb(path: Path) -> float:
    """Free space in GB of the file system that `path` is on, or will be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free / 2**30 if path.exists() else 0.0


def _multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself. False without torch, which is needed to tell."""
    try:
        from cotune.integrations.models.bfloat16 import has_bfloat16
    except ImportError:
        return False
    return has_bfloat16()


def _gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch can use, with their total and free memory."""
    try:
        import torch
    except ImportError:
        return ()
    if not torch.cuda.is_available():
        return ()
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(name=torch.cuda.get_device_name(index), memory_gb=total / 2**30, free_gb=free / 2**30))
    return tuple(gpus)


def _loopback_error() -> str:
    """The error of opening a port on 127.0.0.1; empty if one can be opened."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return ""
    except OSError as error:
        return str(error)
