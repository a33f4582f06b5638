"""Whether the memory of a run is there, and what to change where it is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from cotune.records.policies import LoraSpec
from cotune.tables import BAD, grid
from cotune.trainer.before.doctor.forecast import (
    ProcessMemory,
    Workload,
    learner_memory,
    sampler_memory,
    workload,
)
from cotune.trainer.before.doctor.machine import Machine
from cotune.trainer.before.doctor.model_size import ModelSize, measure_folder
from cotune.trainer.config.train import TrainConfig

GB = 1e9


def plan_memory(
    config: TrainConfig, machine: Machine, folder: Path, *, prompt: int, policies: int
) -> tuple[ProcessMemory, ...]:
    """What each process of a run will take. vLLM plans its own memory and has no line."""
    lora = _adapter(config)
    size = measure_folder(folder, lora, config.learner.dtype)
    load = workload(config, prompt, policies)
    return processes(size, config, machine, load)


def processes(size: ModelSize, config: TrainConfig, machine: Machine, load: Workload) -> tuple[ProcessMemory, ...]:
    """Learner and in-process sampler of a run on such a machine."""
    cluster = config.cluster
    on_gpu = learns_on_gpu(config, machine)
    device, free, total = _device(machine, on_gpu=on_gpu, whose=" of a learner" if cluster.address else "")
    found = [learner_memory(size, config, load, device=device, free=free, total=total)]
    if cluster.sampled_by == "transformers":
        on_gpu = bool(machine.gpus) and (not cluster.address or cluster.gpus_per_engine > 0)
        device, free, total = _device(machine, on_gpu=on_gpu, whose=" of an engine" if cluster.address else "")
        found.append(sampler_memory(size, config, load, device=device, free=free, total=total))
    return tuple(found)


def learns_on_gpu(config: TrainConfig, machine: Machine) -> bool:
    """Whether the learner of a run on such a machine has a GPU."""
    cluster = config.cluster
    there = bool(machine.gpus) and config.learner.device != "cpu"
    return there and (not cluster.address or cluster.gpus_per_learner > 0)


def shortages(plan: Sequence[ProcessMemory]) -> Iterator[tuple[str, str, float]]:
    """Of each device that is too small: its name, what is asked of it, and how many bytes are missing."""
    asked: dict[str, float] = defaultdict(float)
    for process in plan:
        asked[process.device] += process.count * process.bytes
        if process.bytes > process.free:
            yield process.process, _gb(process.bytes), process.bytes - process.free
    for device, total in asked.items():
        free = max(process.free for process in plan if process.device == device)
        if total > free and len([p for p in plan if p.device == device]) > 1:
            name = "this machine" if device == "cpu" else device
            yield name, f"{_gb(total)} for all processes", total - free


def remedies(plan: Sequence[ProcessMemory], config: TrainConfig) -> str:
    """What to change, where it does not fit: what takes most, first."""
    parts = sorted(((part.bytes, part.name, p.process) for p in plan for part in p.parts), reverse=True)
    settings, found = config.learner, []
    gpu = any(process.device != "cpu" for process in plan)
    for _, name, process in parts:
        kind = name.split(" ")[0]
        if kind == "cache":
            found.append("lower concurrency, plan.k or sampling.max_tokens")
        elif kind == "a" and "checkpointed" not in name:
            found.append("set learner.activation_checkpointing = true")
        elif kind == "earlier":
            found.append("lower sampling.prefix_cache")
        elif kind in ("gradients", "published", "publishing") and _adapter(config) is None:
            found.append('policies = "lora"')
            if gpu and settings.optimizer == "adamw":
                found.append('learner.optimizer = "adamw8bit"')
        elif kind == "weights" and process == "learner" and gpu and _adapter(config) is not None:
            if settings.dtype == "float32":
                found.append('learner.dtype = "bfloat16"')
            if settings.quantize == "none":
                found.append('learner.quantize = "4bit"')
    found.append("take a smaller model" + ("" if config.cluster.address else ", or more learners on a cluster"))
    text = "; ".join(dict.fromkeys(found))
    return f"{text[:1].upper()}{text[1:]}."


def render_memory(plan: Sequence[ProcessMemory]) -> Table:
    """The parts of each process."""
    table = grid("process", "what", "GB>", title="memory, beforehand")
    for process in plan:
        for part in process.parts:
            table.add_row(process.process, part.name, f"{part.bytes / GB:.2f}")
        each = f", each of {process.count}" if process.count > 1 else ""
        where = "this machine" if process.device == "cpu" else process.device
        style = BAD if process.bytes > process.free else "bold"
        said = f"all, of {process.free / GB:.1f} free on {where}{each}"
        table.add_row(Text(process.process, style=style), said, Text(f"{process.bytes / GB:.2f}", style=style))
    return table


def _adapter(config: TrainConfig) -> LoraSpec | None:
    """The shape of the run's adapters; None where all weights are trained."""
    if not config.policy:
        return None if config.policies == "full" else config.lora
    kinds = {policy.kind: policy for policy in config.policy}
    return None if "full" in kinds else kinds["lora"].lora if "lora" in kinds else config.lora


def _device(machine: Machine, *, on_gpu: bool, whose: str) -> tuple[str, float, float]:
    """Name, free and total bytes of what a process has its tensors in; `whose` a GPU is, where each has its own."""
    if on_gpu:
        return machine.gpus[0].name + whose, machine.gpus[0].free_gb * 2**30, machine.gpus[0].memory_gb * 2**30
    return "cpu", machine.free_memory_gb * 2**30, machine.memory_gb * 2**30


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB"
