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
"""Python, torch and transformers in a process on the CPU; on a GPU they lie in the machine's memory, and its context
takes `CONTEXT` of the device."""
CONTEXT = 0.5e9
ALLOCATOR = 1.05
"""What a pass takes of a device, as a multiple of its tensors; passes are chosen with more."""
ROLLOUTS, UPDATE = "rollouts", "update"
"""Phases of a step. In mode sync one ends before the other begins."""

PAGES = "pages kept during an update"
WEIGHTS, STATE = HELD = ("weights", "gradients and optimizer")
"""Parts of a learner that each of its bases adds to."""


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one process, on `device`: the machine's, or that of a GPU."""

    process: str
    count: int
    device: str
    parts: Mapping[str, float]
    """Bytes by use."""
    free: float
    """Bytes that there are for it, shared with the others on the device."""
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
        """Of one such process."""
        return sum(self.parts.values())

    @property
    def lasting(self) -> float:
        """Bytes that it keeps after its phase."""
        return self.bytes - self.temporary if self.phase else self.bytes


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Demands of a run: `row` tokens of the longest prompt with its answer, of which others have `shared` in common
    with it, `sequences` asked for at once, `candidates` of one call, and `policies` that are trained."""

    row: int
    sequences: int
    policies: int
    candidates: int = 1
    shared: float = 0.0


def plan_memory(
    config: TrainConfig, machine: Machine, folders: Mapping[str, Path], *, prompt: int
) -> tuple[ProcessMemory, ...]:
    """The processes of a run whose longest prompt has `prompt` tokens; `folders` are those of its base models. vLLM
    plans its own memory and has no line."""
    config, bases = measure_bases(config, machine, folders, prompt=prompt)
    return processes(bases, config, machine)


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
    # As `products.open_joined`: learners on Ray, processors that emulate bfloat16 and bases in four bits compute PEFT's
    # own layers.
    multiplies = on_gpu or config.learner.dtype == "float32" or machine.bfloat16
    joined = multiplies and not config.cluster.on_ray and config.learner.quantize == "none"
    bases = {
        model: (
            known_size(folders[model], _adapter(config, names), config.learner.dtype, joined=joined, device=device),
            Workload(row=row, sequences=sequences, candidates=candidates, policies=trained_policies(config, names)),
        )
        for model, names in config.bases.items()
    }
    return config, bases


def _episodes_at_once(config: TrainConfig) -> int:
    """Episodes that run at a time: no more than those of a step, and in mode async of the steps ahead too."""
    of_step = config.tasks_per_step * (config.plan.k if config.plan.kind == "independent" else 1)
    return min(config.episodes_at_once, of_step * (1 + config.ahead))


def trained_policies(config: TrainConfig, names: Collection[str]) -> int:
    """How many of the policies of a base are trained, as far as the configuration tells."""
    if config.policy:
        return sum(policy.trained for policy in config.policy if policy.name in names)
    return 1 if config.policies == "shared" else max(1, len(config.roles))


def processes(
    bases: Mapping[str, tuple[ModelSize, Workload]], config: TrainConfig, machine: Machine
) -> tuple[ProcessMemory, ...]:
    """Forecast the memory of the learner and of the in-process samplers of a run on this machine.

    The learner holds all bases that policies are trained on; each sampler holds one base. On a GPU that both use, the
    learner's pass gets what the samplers leave.
    """
    cluster = config.cluster
    on_gpu = learns_on_gpu(config, machine)
    device, free, total = _device(machine, on_gpu, " of a learner" if cluster.on_ray else "")
    trained = [(size, load) for size, load in bases.values() if load.policies]
    place = partial(learner_memory, config=config, device=device, free=free, total=total)
    alone = [place(size=size, load=load) for size, load in trained]
    # Each base is measured alone first: what its learner holds all the time, whichever policy is updated.
    held = {part: sum(process.parts[part] for process in alone) for part in HELD}
    samplers = _samplers(bases, config, machine, beside=sum(held.values()) + CONTEXT if on_gpu else 0.0)

    # On a GPU the pass has what the samplers leave: in mode sync they have given their caches back by then.
    others = 0.0
    if on_gpu and not cluster.on_ray:
        others = sum(sampler.lasting for sampler in samplers)
    plans = []
    for process, (size, load) in zip(alone, trained, strict=True):
        of_other_bases = sum(held.values()) - sum(process.parts[part] for part in HELD)
        plans.append(place(size=size, load=load, taken=of_other_bases + others))
    # one policy is updated after the other, so only the largest pass counts
    largest = max(plans, key=_beside_held)
    return (msgspec.structs.replace(largest, parts={**largest.parts, **held}), *samplers)


def _beside_held(process: ProcessMemory) -> float:
    """Bytes of a learner without those that all bases take together."""
    return process.bytes - sum(process.parts[part] for part in HELD)


def _samplers(
    bases: Mapping[str, tuple[ModelSize, Workload]], config: TrainConfig, machine: Machine, *, beside: float
) -> list[ProcessMemory]:
    """The in-process samplers, one for each base; `beside` are bytes of a learner on the same GPU."""
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
            taken = beside + sum(sampler.bytes for sampler in samplers)
        sampler = sampler_memory(size, config, load, device=device, free=free, total=total, taken=taken)
        name = f"sampler of {Path(model).name}" if len(bases) > 1 else "sampler"
        samplers.append(msgspec.structs.replace(sampler, process=name))
    return samplers


def _device(machine: Machine, on_gpu: bool, whose: str) -> tuple[str, float, float]:
    """Name, free and total bytes of the device of a process; `whose` a GPU is, where each has its own."""
    if on_gpu:
        return machine.gpus[0].name + whose, machine.gpus[0].free_gb * 2**30, machine.gpus[0].memory_gb * 2**30
    return "cpu", machine.free_memory_gb * 2**30, machine.memory_gb * 2**30


def learns_on_gpu(config: TrainConfig, machine: Machine) -> bool:
    """Whether the learner of a run on this machine has a GPU."""
    return bool(machine.gpus) and (not config.cluster.on_ray or config.cluster.gpus_per_learner > 0)


def samples_on_gpu(config: TrainConfig, machine: Machine) -> bool:
    """Whether the engine of a run on this machine has a GPU."""
    return bool(machine.gpus) and (not config.cluster.on_ray or config.cluster.gpus_per_engine > 0)


def _adapter(config: TrainConfig, names: Collection[str]) -> LoraSpec | None:
    """The shape of the adapters on a base model that these policies share; None if its policies train all weights."""
    if not config.policy:
        return None if config.policies == "full" else config.lora.spec
    kinds = {policy.kind: policy for policy in config.policy if policy.name in names}
    if "full" in kinds:
        return None
    return kinds["lora"].lora.spec if "lora" in kinds else config.lora.spec


def learner_memory(
    size: ModelSize, config: TrainConfig, load: Workload, *, device: str, free: float, total: float, taken: float = 0.0
) -> ProcessMemory:
    """The learner of one base: weights, gradients and moments, and a pass; `taken` are bytes of other bases beside it.
    A publication's copy takes the place of the gradients, which are gone by then."""
    from cotune.trainer.learner.memory.pass_size import (
        GRADIENT_BYTES,
        LARGE,
        MOMENT_BYTES,
        keeps_pages,
        usual_share,
    )

    settings = config.learner
    cluster = config.cluster
    parts = cluster.learners if cluster.on_ray else 1
    policies = load.policies if size.adapter == 0 else 1  # adapters share one base
    weights = policies * _weight_bytes(config, size) / parts
    trained = load.policies * (size.adapter or size.parameters)
    moments = trained * MOMENT_BYTES[settings.optimizer] / parts
    state = moments + trained / load.policies * GRADIENT_BYTES / parts  # one policy is updated after the other
    adapters = 4.0 * trained / parts if size.adapter else 0.0
    memory = size.pass_memory("cpu" if device == "cpu" else "cuda")
    libraries = _libraries("learner", device)

    # the pass that the learner will choose in the memory that is left
    fixed = taken + sum(libraries.values()) + weights + adapters + state + memory.fixed + memory.logits
    bound = min(parse_size(settings.memory), free) if settings.memory else free
    share = bound - fixed if settings.memory else usual_share(bound - fixed, total, device)
    sizes = pass_sizes(memory, config, share, device)
    tokens, checkpointed = pass_tokens(memory, config, load, share, device)
    passes = ALLOCATOR * memory.peak(tokens, checkpointed=checkpointed)
    large = device == "cpu" and size.parameters > LARGE
    keeps = large and not settings.memory and keeps_pages(memory, sizes, bound - fixed)
    name = f"a pass of {tokens} tokens" + (", checkpointed" if checkpointed else "")
    whole = size.parameters * (2.0 if settings.dtype == "bfloat16" else 4.0)
    return ProcessMemory(
        process="learner",
        count=parts,
        device=device,
        free=bound,
        pass_tokens=tokens,
        checkpointed=checkpointed,
        phase=_phase(UPDATE, config, device),
        temporary=passes,
        parts={
            **libraries,
            WEIGHTS: weights + adapters,
            STATE: state,
            name: passes,
            **({PAGES: memory.gaps(tokens, checkpointed=checkpointed)} if keeps else {}),
            **({"all weights, for a pass": whole} if size.sees and parts > 1 else {}),
            **_image_parts(size, device),
        },
    )


def sampler_memory(
    size: ModelSize, config: TrainConfig, load: Workload, *, device: str, free: float, total: float, taken: float = 0.0
) -> ProcessMemory:
    """The in-process sampler: the base, published versions (for all weights a model each), and the cache. On a GPU it
    lets as many sequences in as fit into a part of what is free, and `taken` bytes are of processes beside it."""
    from cotune.trainer.learner.memory.pass_size import LOGIT_BYTES

    each = 4 if device == "cpu" else 2
    trained = size.adapter or size.parameters
    published = load.policies * (1 + config.ahead) * trained * each
    published += trained * (8 + each) if load.policies else 0  # one arrives, is read and copied
    kept = config.sampling.prefix_bytes
    parts = {
        **_libraries("sampler", device),
        "weights": size.rounded_bytes(1) - 4.0 * _untied(size) if size.rounded else float(size.parameters * each),
        "published versions": float(published),
        "earlier prompts, at most": float(total / PREFIX_PART if kept is None else kept),
        **_image_parts(size, device),
    }
    sequence = (load.row + 64) * size.cache_values * each
    at_once = load.sequences
    name = f"cache of {load.sequences} sequences"
    if device != "cpu":
        room = GPU_PART * (free - taken - sum(parts.values()))
        fitting = max(load.candidates, int(room / sequence))  # the candidates of a call are decoded together
        if fitting < load.sequences:
            at_once = fitting
            name = f"cache of {fitting} sequences at once, of {load.sequences}"
    cache = at_once * sequence + LOGIT_BYTES * min(at_once * size.vocabulary, DRAW_ELEMENTS)
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
    """The phase after which a process gives memory back: on a GPU, where rollouts and updates do not overlap."""
    return phase if device != "cpu" and config.mode == "sync" else ""


def _libraries(process: str, device: str) -> dict[str, float]:
    return {"python and libraries": LIBRARIES[process]} if device == "cpu" else {"context of the GPU": CONTEXT}


def _image_parts(size: ModelSize, device: str) -> dict[str, float]:
    """Passes over images, of as many as go together; and processed images, which are kept on the CPU."""
    if not size.image_factor:
        return {}
    kept = {"images as they were processed, at most": float(KEPT_BYTES)} if device == "cpu" else {}
    return {"passes over images, at most": PASS_BYTES * size.image_factor, **kept}


def pass_sizes(memory: PassMemory, config: TrainConfig, room: float, device: str) -> dict[bool, int]:
    """Forecast the tokens of the passes that the learner allows itself in `room` bytes, by whether their layers are
    computed again in the backward pass (activation checkpointing), as `PassSizes` chooses them."""
    from cotune.trainer.learner.memory.pass_size import auto_tokens

    settings = config.learner
    sizes: dict[bool, int] = {}
    for checkpointed in (False, True):
        if not checkpointed or settings.activation_checkpointing:
            fit = room / memory.planned(checkpointed=checkpointed)
            asked = settings.micro_batch_tokens
            kind = "cpu" if device == "cpu" else "cuda"
            sizes[checkpointed] = auto_tokens(fit, kind) if asked == "auto" else asked
    return sizes


def pass_tokens(memory: PassMemory, config: TrainConfig, load: Workload, room: float, device: str) -> tuple[int, bool]:
    """Forecast the tokens of the largest pass that the learner will make in `room` bytes, and whether it is
    checkpointed."""
    settings = config.learner
    sizes = pass_sizes(memory, config, room, device)
    plain_fit = room / memory.planned(checkpointed=False)

    # "auto" checkpoints if the longest row fits into no plain pass.
    wanted = settings.activation_checkpointing
    recomputes = wanted if isinstance(wanted, bool) else load.row > max(sizes[False], plain_fit)

    # Tokens that rows share are computed once. A row longer than a pass goes through alone; else a step is cut evenly.
    step_tokens = math.ceil(settings.mini_batch * (load.row - load.shared))
    passes = math.ceil(step_tokens / max(sizes[recomputes], load.row))
    return math.ceil(step_tokens / passes), recomputes


def _weight_bytes(config: TrainConfig, size: ModelSize) -> float:
    """Bytes of the weights that the learner holds. Trained weights are in float32; frozen ones have the precision they
    are computed in.
    """
    settings = config.learner
    if size.adapter and settings.quantize == "4bit":
        return 0.57 * size.parameters  # 4 bits, a scale for each 64 weights, and embeddings and norms as they are
    if size.rounded:
        return size.rounded_bytes(2)
    return size.parameters * (2.0 if size.adapter and settings.dtype == "bfloat16" else 4.0)


def _untied(size: ModelSize) -> int:
    """Parameters of an output embedding of its own, which a sampler has in bfloat16 alone."""
    return 0 if size.tied else size.head


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
    """The most bytes that the processes of one device take at a time."""
    lasting = 0.0
    phases: dict[str, float] = defaultdict(float)
    for process in processes:
        lasting += process.count * process.lasting
        phases[process.phase] += process.count * (process.bytes - process.lasting)
    return lasting + max(phases.values(), default=0.0)


def remedies(plan: Sequence[ProcessMemory], config: TrainConfig) -> str:
    """Advice for a run that needs too much memory: the settings that make its parts smaller, the largest part first."""
    settings = config.learner
    lora = all(_adapter(config, names) is not None for names in config.bases.values())
    gpu = any(process.device != "cpu" for process in plan)
    settings_to_change = []
    parts: list[tuple[float, str, str]] = []
    for planned in plan:
        parts += [(size, name, planned.process) for name, size in planned.parts.items()]
    for _, name, process in sorted(parts, reverse=True):
        if name.startswith("cache"):
            settings_to_change.append("lower concurrency, plan.k or sampling.max_tokens")
        elif name.startswith("a pass") and "checkpointed" not in name:
            settings_to_change.append("shorten prompts or lower sampling.max_tokens")
        elif name == PAGES:
            settings_to_change.append("set learner.memory, under which no pages are kept")
        elif name.startswith(("gradients", "published")) and not lora:
            settings_to_change.append('policies = "lora"')
            settings_to_change += ['learner.optimizer = "adamw8bit"'] if gpu and settings.optimizer == "adamw" else []
        elif name == "weights" and process == "learner" and gpu and lora:
            settings_to_change += ['learner.dtype = "bfloat16"'] if settings.dtype != "bfloat16" else []
            settings_to_change += ['learner.quantize = "4bit"'] if settings.quantize == "none" else []
    settings_to_change.append(
        "take a smaller model" + ("" if config.cluster.on_ray else ", or more learners on a cluster")
    )
    text = "; ".join(dict.fromkeys(settings_to_change))
    return f"{text[:1].upper()}{text[1:]}."


def render_memory(plan: Sequence[ProcessMemory]) -> Table:
    """The parts of each process."""
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
