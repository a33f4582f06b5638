"""A forecast of the memory that each process of a run will take, from the sizes of its model; and whether it fits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from rich.text import Text

from cotune.config.sizes import parse_size
from cotune.config.train import TrainConfig
from cotune.integrations.models.folder.vision import KEPT_BYTES, PASS_BYTES
from cotune.integrations.models.transformers.wire import DRAW_ELEMENTS, GPU_PART, PREFIX_PART
from cotune.records.policies import LoraSpec
from cotune.tables import BAD, grid
from cotune.trainer.before.doctor.machine import Machine
from cotune.trainer.before.doctor.model_size import ModelSize
from cotune.trainer.before.doctor.size_cache import known_size
from cotune.trainer.config.engine import AUTO
from cotune.trainer.run.engines import candidates_of_call
from cotune.trainer.run.precision import auto_dtype, with_dtype

if TYPE_CHECKING:
    from cotune.trainer.learner.memory.pass_size import PassMemory

GB = 1e9
LIBRARIES = {"learner": 0.60e9, "sampler": 0.50e9}
"""Bytes of Python, torch and transformers in a process on the CPU. A process on a GPU has them in the machine's memory,
which is not forecast."""
CONTEXT = 0.5e9
"""Bytes of a GPU that the context of a process takes."""
ALLOCATOR = 1.05
"""Memory that a pass takes from a device, as a multiple of its tensors. The learner chooses passes with a larger
reserve."""
ROLLOUTS, UPDATE = "rollouts", "update"
"""Phases of a step. In mode sync one ends before the other begins."""

PAGES = "pages kept during an update"
WEIGHTS = "weights"
STATE = "gradients and optimizer"
PARTS_OF_EACH_BASE = (WEIGHTS, STATE)
"""Parts of a learner's memory that grow with each base model. All others are shared by its bases."""


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one process, on `device`: the machine's, or that of a GPU."""

    process: str
    count: int
    device: str
    parts: Mapping[str, float]
    """Bytes by use."""
    free: float
    """Bytes of the device that are free for this process and all others on the device together."""
    pass_tokens: int = 0
    checkpointed: bool = False
    """Whether the layers are computed again in the backward pass."""
    at_once: int = 0
    """Sequences that a sampler decodes at once."""
    phase: str = ""
    """The phase of a step after which the process gives `temporary` bytes back; empty where it keeps all."""
    temporary: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes of one process."""
        return sum(self.parts.values())

    @property
    def lasting(self) -> float:
        """Bytes that it keeps after its phase."""
        return self.bytes - self.temporary if self.phase else self.bytes


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Demands of a run on one base model."""

    row: int
    """Tokens of the longest prompt with its answer."""
    sequences: int
    """Answers that the application asks for at the same time."""
    policies: int
    """Number of trained policies."""
    candidates: int = 1
    """Candidates of one call."""
    shared: float = 0.0
    """Mean number of tokens that a row has in common with another row of its step."""


def plan_memory(
    config: TrainConfig, machine: Machine, folders: Mapping[str, Path], *, prompt: int
) -> tuple[ProcessMemory, ...]:
    """Forecast the memory of each process of a run whose longest prompt has `prompt` tokens.

    `folders` are the folders of its base models. vLLM plans its own memory and is not in the forecast.
    """
    config, bases = measure_bases(config, machine, folders, prompt=prompt)
    return forecast_processes(bases, config, machine)


def measure_bases(
    config: TrainConfig, machine: Machine, folders: Mapping[str, Path], *, prompt: int
) -> tuple[TrainConfig, dict[str, tuple[ModelSize, Workload]]]:
    """Measure each base model of a run for forecasts of memory and time: the size of the model, and its workload in a
    step.

    Also returns the configuration with the learner's precision, if it was left to "auto".
    """
    candidates = candidates_of_call(config)
    sequences = min(1024, _episodes_at_once(config) * candidates)
    row = prompt + config.sampling.max_tokens
    on_gpu = learns_on_gpu(config, machine)
    device = "cuda" if on_gpu else "cpu"
    if config.learner.dtype == "auto":
        config = with_dtype(config, auto_dtype(config, device, multiplies_bfloat16=on_gpu or machine.bfloat16))
    # As `products.open_joined` does: learners on Ray, processors that only emulate bfloat16 and bases in four bits
    # compute adapters in PEFT's own layers, all others in one step with the frozen layer (joined).
    has_fast_products = on_gpu or config.learner.dtype == "float32" or machine.bfloat16
    joined = has_fast_products and not config.cluster.on_ray and config.learner.quantize == "none"
    bases: dict[str, tuple[ModelSize, Workload]] = {}
    for model, names in config.bases.items():
        adapter = _adapter(config, names)
        size = known_size(folders[model], adapter, config.learner.dtype, joined=joined, device=device)
        policies = trained_policies(config, names)
        bases[model] = size, Workload(row=row, sequences=sequences, candidates=candidates, policies=policies)
    return config, bases


def _episodes_at_once(config: TrainConfig) -> int:
    """The most episodes that run at the same time: no more than a step has, and in mode async than the step and the
    steps ahead of it have."""
    episodes_of_step = config.tasks_per_step * (config.plan.k if config.plan.kind == "independent" else 1)
    return min(config.episodes_at_once, episodes_of_step * (1 + config.ahead))


def trained_policies(config: TrainConfig, names: Collection[str]) -> int:
    """How many of the policies of a base (`names`) are trained, as far as the configuration tells."""
    if config.policy:
        return sum(policy.trained for policy in config.policy if policy.name in names)
    return 1 if config.policies == "shared" else max(1, len(config.roles))


def forecast_processes(
    bases: Mapping[str, tuple[ModelSize, Workload]], config: TrainConfig, machine: Machine
) -> tuple[ProcessMemory, ...]:
    """Forecast the memory of the learner and of the in-process samplers of a run on this machine.

    The learner holds the weights and optimizer states of all trained bases, and updates one base after the other. Each
    sampler holds one base. On a GPU that both use, the learner's pass gets the memory that the samplers leave.
    """
    on_gpu = learns_on_gpu(config, machine)
    shares_gpu = on_gpu and not config.cluster.on_ray
    device, free, total = _device(machine, on_gpu, " of a learner" if config.cluster.on_ray else "")
    forecast_learner = partial(learner_memory, config=config, device=device, free=free, total=total)
    trained_bases = [(size, load) for size, load in bases.values() if load.policies]

    # 1. A learner of each base alone. Its weights and optimizer states stay in memory while other bases are updated.
    learners_of_one_base = [forecast_learner(size=size, load=load) for size, load in trained_bases]
    weights_and_states: dict[str, float] = {}
    for part in PARTS_OF_EACH_BASE:
        weights_and_states[part] = sum(learner.parts[part] for learner in learners_of_one_base)
    bytes_of_all_bases = sum(weights_and_states.values())

    # 2. The samplers. In mode sync they have given their caches back when an update begins.
    samplers = _samplers(bases, config, machine, learner_bytes=bytes_of_all_bases + CONTEXT if on_gpu else 0.0)
    sampler_bytes = sum(sampler.lasting for sampler in samplers) if shares_gpu else 0.0

    # 3. The update of each base, in the memory that the other bases and the samplers leave. Updates do not overlap, so
    # the learner takes as much as the largest one.
    updates: list[ProcessMemory] = []
    for learner, (size, load) in zip(learners_of_one_base, trained_bases, strict=True):
        bytes_of_other_bases = bytes_of_all_bases - _base_bytes(learner)
        updates.append(forecast_learner(size=size, load=load, taken=bytes_of_other_bases + sampler_bytes))
    largest = max(updates, key=lambda update: update.bytes - _base_bytes(update))
    learner = msgspec.structs.replace(largest, parts={**largest.parts, **weights_and_states})
    return (learner, *samplers)


def _base_bytes(learner: ProcessMemory) -> float:
    """Bytes of the weights and optimizer states of the base that a learner updates."""
    return sum(learner.parts[part] for part in PARTS_OF_EACH_BASE)


def _samplers(
    bases: Mapping[str, tuple[ModelSize, Workload]], config: TrainConfig, machine: Machine, *, learner_bytes: float
) -> list[ProcessMemory]:
    """Forecast the in-process samplers, one for each base. `learner_bytes` are taken by a learner on the same GPU."""
    cluster = config.cluster
    # An engine that is not decided yet is counted as the one in process.
    if config.engine not in (AUTO, "transformers"):
        return []
    on_gpu = samples_on_gpu(config, machine)
    device, free, total = _device(machine, on_gpu, " of an engine" if cluster.on_ray else "")
    samplers: list[ProcessMemory] = []
    for model, (size, load) in bases.items():
        taken = 0.0
        if on_gpu and not cluster.on_ray:
            taken = learner_bytes + sum(sampler.bytes for sampler in samplers)
        sampler = sampler_memory(size, config, load, device=device, free=free, total=total, taken=taken)
        name = f"sampler of {Path(model).name}" if len(bases) > 1 else "sampler"
        samplers.append(msgspec.structs.replace(sampler, process=name))
    return samplers


def _device(machine: Machine, on_gpu: bool, owner: str) -> tuple[str, float, float]:
    """Name, free bytes and total bytes of the device of a process. `owner` is added to the name of a GPU, to tell
    apart the GPUs of a run in which each process has its own."""
    if not on_gpu:
        return "cpu", machine.free_memory_gb * 2**30, machine.memory_gb * 2**30
    gpu = machine.gpus[0]
    return gpu.name + owner, gpu.free_gb * 2**30, gpu.memory_gb * 2**30


def learns_on_gpu(config: TrainConfig, machine: Machine) -> bool:
    """Whether the learner of a run on this machine has a GPU."""
    return bool(machine.gpus) and (not config.cluster.on_ray or config.cluster.gpus_per_learner > 0)


def samples_on_gpu(config: TrainConfig, machine: Machine) -> bool:
    """Whether the engine of a run on this machine has a GPU."""
    return bool(machine.gpus) and (not config.cluster.on_ray or config.cluster.gpus_per_engine > 0)


def _adapter(config: TrainConfig, names: Collection[str]) -> LoraSpec | None:
    """The shape of the adapters on a base model whose policies have these `names`; None if a policy trains all weights.
    The last policy with an adapter decides the shape."""
    if not config.policy and config.policies == "full":
        return None
    adapter = config.lora.spec
    for policy in config.policy:
        if policy.name in names and policy.kind == "full":
            return None
        if policy.name in names and policy.kind == "lora":
            adapter = policy.lora.spec
    return adapter


def learner_memory(
    size: ModelSize, config: TrainConfig, load: Workload, *, device: str, free: float, total: float, taken: float = 0.0
) -> ProcessMemory:
    """Forecast the learner of one base: weights, gradients, moments, and the pass that it chooses in the memory left.

    `free` and `total` are bytes of the device; `taken` are bytes that other bases and samplers take there. Publishing
    needs no memory of its own: its copy takes the place of the gradients, which are freed by then.
    """
    from cotune.trainer.learner.memory.pass_size import (
        LARGE,
        may_keep_freed_pages,
        usual_share,
    )

    # 1. The parts that the learner needs whatever pass it chooses, in each of its processes.
    settings = config.learner
    processes = config.cluster.learners if config.cluster.on_ray else 1
    parts = {**_libraries("learner", device), **_weights_and_state(size, config, load, processes)}

    # 2. The pass that the learner will choose in the memory that is left. A pass may fill all of `learner.memory`, but
    # only the usual share of the memory of the device.
    memory = size.pass_memory("cpu" if device == "cpu" else "cuda")
    needed_without_pass = taken + sum(parts.values()) + memory.fixed + memory.logits
    if settings.memory:
        limit = min(parse_size(settings.memory), free)
        room_for_pass = limit - needed_without_pass
    else:
        limit = free
        room_for_pass = usual_share(limit - needed_without_pass, total, device)
    tokens, checkpointed = pass_tokens(memory, config, load, room_for_pass, device)
    pass_bytes = ALLOCATOR * memory.peak(tokens, checkpointed=checkpointed)
    parts[f"a pass of {tokens} tokens" + (", checkpointed" if checkpointed else "")] = pass_bytes

    # 3. On a CPU, the allocator keeps freed memory for a large model if there is enough, as `PassSizes` decides.
    if device == "cpu" and size.parameters > LARGE and not settings.memory:
        sizes = pass_sizes(memory, config, room_for_pass, device)
        if may_keep_freed_pages(memory, sizes, limit - needed_without_pass):
            parts[PAGES] = memory.gaps(tokens, checkpointed=checkpointed)
    # FSDP gathers the weights of a model that sees images all at once, and of other models layer by layer.
    if size.sees_images and processes > 1:
        parts["all weights, for a pass"] = size.parameters * (2.0 if settings.dtype == "bfloat16" else 4.0)
    return ProcessMemory(
        process="learner",
        count=processes,
        device=device,
        free=limit,
        pass_tokens=tokens,
        checkpointed=checkpointed,
        phase=_phase(UPDATE, config, device),
        temporary=pass_bytes,
        parts={**parts, **_image_parts(size, device)},
    )


def _weights_and_state(size: ModelSize, config: TrainConfig, load: Workload, processes: int) -> dict[str, float]:
    """Return the bytes of weights, and of moments and gradients, in each of the learner's processes, by part."""
    from cotune.trainer.learner.memory.pass_size import GRADIENT_BYTES, MOMENT_BYTES

    copies_of_base = 1 if size.adapter else load.policies  # all adapters share one base
    weights = copies_of_base * _weight_bytes(config, size)
    trained_of_policy = size.adapter or size.parameters
    trained_of_all = load.policies * trained_of_policy
    if size.adapter:
        weights += 4.0 * trained_of_all
    moments = trained_of_all * MOMENT_BYTES[config.learner.optimizer]
    # Policies are updated one after the other, so only one has gradients.
    gradients = trained_of_policy * GRADIENT_BYTES
    return {WEIGHTS: weights / processes, STATE: (moments + gradients) / processes}


def sampler_memory(
    size: ModelSize, config: TrainConfig, load: Workload, *, device: str, free: float, total: float, taken: float = 0.0
) -> ProcessMemory:
    """Forecast the in-process sampler of one base: the base, published versions of its policies, and the cache.

    `free` and `total` are bytes of the device; `taken` are bytes that other processes take there. On a GPU the sampler
    decodes as many sequences at once as fit into a part (`GPU_PART`) of the memory that is left.
    """
    from cotune.trainer.learner.memory.pass_size import LOGIT_BYTES

    number_bytes = 4 if device == "cpu" else 2
    weights = float(size.parameters * number_bytes)
    if size.rounded:
        weights = size.rounded_bytes(heads=1)
        if not size.tied:
            weights -= 4.0 * size.head  # the sampler has the output embedding in bfloat16 only, not also in float32
    trained = size.adapter or size.parameters
    published = load.policies * (1 + config.ahead) * trained * number_bytes
    if load.policies:
        # While the next version arrives: its bytes and the tensors read from them, both in float32, and their copy.
        published += trained * (4 + 4 + number_bytes)
    prefix_bytes = config.sampling.prefix_bytes
    parts = {
        **_libraries("sampler", device),
        "weights": weights,
        "published versions": float(published),
        "earlier prompts, at most": float(total / PREFIX_PART if prefix_bytes is None else prefix_bytes),
        **_image_parts(size, device),
    }
    # The cache grows in steps, so it has room for up to 64 tokens more than a sequence has.
    sequence_bytes = (load.row + 64) * size.cache_values * number_bytes
    at_once = load.sequences
    name = f"cache of {load.sequences} sequences"
    if device != "cpu":
        cache_limit = GPU_PART * (free - taken - sum(parts.values()))
        fitting = max(load.candidates, int(cache_limit / sequence_bytes))  # candidates of a call are decoded together
        if fitting < load.sequences:
            at_once = fitting
            name = f"cache of {fitting} sequences at once, of {load.sequences}"
    cache = at_once * sequence_bytes + LOGIT_BYTES * min(at_once * size.vocabulary, DRAW_ELEMENTS)
    return ProcessMemory(
        process="sampler",
        count=1,
        device=device,
        free=free,
        at_once=at_once,
        phase=_phase(ROLLOUTS, config, device),
        temporary=float(cache),
        parts={**parts, name: float(cache)},
    )


def _phase(phase: str, config: TrainConfig, device: str) -> str:
    """The `phase` after which a process gives memory back; "" if it keeps all memory: on a CPU, and in mode async,
    where rollouts and updates overlap."""
    return phase if device != "cpu" and config.mode == "sync" else ""


def _libraries(process: str, device: str) -> dict[str, float]:
    return {"python and libraries": LIBRARIES[process]} if device == "cpu" else {"context of the GPU": CONTEXT}


def _image_parts(size: ModelSize, device: str) -> dict[str, float]:
    """The most memory that a model takes for images, by part: the pass over the images of a batch, and on the CPU also
    the processed images, which are kept. Empty for a model that sees no images."""
    if not size.image_factor:
        return {}
    parts = {"passes over images, at most": PASS_BYTES * size.image_factor}
    if device == "cpu":
        parts["images as they were processed, at most"] = float(KEPT_BYTES)
    return parts


def pass_sizes(memory: PassMemory, config: TrainConfig, available: float, device: str) -> dict[bool, int]:
    """Forecast the tokens of the passes that the learner chooses in `available` bytes, as `PassSizes` does.

    The keys say whether the layers are computed again in the backward pass (activation checkpointing).
    """
    from cotune.trainer.learner.memory.pass_size import auto_tokens

    settings = config.learner
    sizes: dict[bool, int] = {}
    for checkpointed in (False, True):
        if checkpointed and not settings.activation_checkpointing:
            continue
        if settings.micro_batch_tokens == "auto":
            fitting_tokens = available / memory.planned(checkpointed=checkpointed)
            sizes[checkpointed] = auto_tokens(fitting_tokens, "cpu" if device == "cpu" else "cuda")
        else:
            sizes[checkpointed] = settings.micro_batch_tokens
    return sizes


def pass_tokens(
    memory: PassMemory, config: TrainConfig, load: Workload, available: float, device: str
) -> tuple[int, bool]:
    """Forecast the tokens of the largest pass that the learner will make in `available` bytes, and whether it is
    checkpointed."""
    settings = config.learner
    sizes = pass_sizes(memory, config, available, device)

    if isinstance(settings.activation_checkpointing, bool):
        checkpointed = settings.activation_checkpointing
    else:
        # "auto" checkpoints if the longest row fits into no plain pass.
        most_plain_tokens = available / memory.planned(checkpointed=False)
        checkpointed = load.row > max(sizes[False], most_plain_tokens)

    # A step is cut into as few passes as possible, of about the same size. Tokens that rows share are computed once. A
    # row is not cut, so the longest row may make a pass longer.
    step_tokens = math.ceil(settings.mini_batch * (load.row - load.shared))
    most_tokens = max(sizes[checkpointed], load.row)
    passes = math.ceil(step_tokens / most_tokens)
    return math.ceil(step_tokens / passes), checkpointed


def _weight_bytes(config: TrainConfig, size: ModelSize) -> float:
    """Bytes of the weights that the learner holds. Trained weights are in float32; frozen ones have the precision they
    are computed in.
    """
    settings = config.learner
    if size.adapter and settings.quantize == "4bit":
        return 0.57 * size.parameters  # 4 bits, a scale for each 64 weights, and embeddings and norms as they are
    if size.rounded:
        return size.rounded_bytes(heads=2)  # `logprobs.Head` has the output embedding twice: as it is, and packed
    if size.adapter and settings.dtype == "bfloat16":
        return 2.0 * size.parameters
    return 4.0 * size.parameters


def shortages(plan: Sequence[ProcessMemory]) -> Iterator[str]:
    """A sentence for each process that lacks memory, and for each device whose processes together lack it: the demand,
    and how much is missing.
    """
    processes_of_device: dict[str, list[ProcessMemory]] = defaultdict(list)
    for process in plan:
        processes_of_device[process.device].append(process)
        missing = process.bytes - process.free
        if missing > 0:
            yield f"{process.process} takes {process.bytes / GB:.1f} GB, {missing / GB:.1f} GB too much"
    for device, processes in processes_of_device.items():
        name = "this machine" if device == "cpu" else device
        total = peak_of_device(processes)
        missing = total - max(process.free for process in processes)
        if len(processes) > 1 and missing > 0:
            yield f"{name} takes {total / GB:.1f} GB for all processes, {missing / GB:.1f} GB too much"


def peak_of_device(processes: Sequence[ProcessMemory]) -> float:
    """The most bytes that the processes of one device take at the same time. This is all lasting memory, and the
    temporary memory of the phase that needs most."""
    lasting = 0.0
    temporary_by_phase: dict[str, float] = defaultdict(float)
    for process in processes:
        lasting += process.count * process.lasting
        temporary_by_phase[process.phase] += process.count * (process.bytes - process.lasting)
    return lasting + max(temporary_by_phase.values(), default=0.0)


def remedies(plan: Sequence[ProcessMemory], config: TrainConfig) -> str:
    """Advice for a run that needs too much memory: the settings that make its parts smaller, the largest part first."""
    settings = config.learner
    only_adapters = all(_adapter(config, names) is not None for names in config.bases.values())
    on_gpu = any(process.device != "cpu" for process in plan)
    parts: list[tuple[float, str, str]] = []
    for planned in plan:
        parts += [(size, name, planned.process) for name, size in planned.parts.items()]
    changes: list[str] = []
    # `learner_memory` and `sampler_memory` name the parts. A part without advice here cannot be made smaller.
    for _bytes, name, process in sorted(parts, reverse=True):
        if name.startswith("cache"):
            changes.append("lower concurrency, plan.k or sampling.max_tokens")
        elif name.startswith("a pass") and "checkpointed" not in name:
            changes.append("shorten prompts or lower sampling.max_tokens")
        elif name == PAGES:
            changes.append("set learner.memory, under which no pages are kept")
        elif name.startswith(("gradients", "published")) and not only_adapters:
            changes.append('policies = "lora"')
            if on_gpu and settings.optimizer == "adamw":
                changes.append('learner.optimizer = "adamw8bit"')
        elif name == "weights" and process == "learner" and on_gpu and only_adapters:
            if settings.dtype != "bfloat16":
                changes.append('learner.dtype = "bfloat16"')
            if settings.quantize == "none":
                changes.append('learner.quantize = "4bit"')
    changes.append("take a smaller model" + ("" if config.cluster.on_ray else ", or more learners on a cluster"))
    text = "; ".join(dict.fromkeys(changes))
    return f"{text[:1].upper()}{text[1:]}."


def render_memory(plan: Sequence[ProcessMemory]) -> Table:
    """A table with the parts of each process, and their sum."""
    table = grid("process", "part", "GB>", title="memory, estimated")
    for process in plan:
        for name, size in process.parts.items():
            table.add_row(process.process, name, f"{size / GB:.2f}")
        each = f", each of {process.count}" if process.count > 1 else ""
        where = "this machine" if process.device == "cpu" else process.device
        style = BAD if process.bytes > process.free else "bold"
        text = f"all, of {process.free / GB:.1f} free on {where}{each}"
        table.add_row(Text(process.process, style=style), text, Text(f"{process.bytes / GB:.2f}", style=style))
    return table
