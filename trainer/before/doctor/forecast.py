"""The memory that a run will take, process by process, reckoned from the sizes of its model."""

from __future__ import annotations

import math

import msgspec

from cotune.integrations.models.folder.vision import KEPT_BYTES, PASS_BYTES
from cotune.integrations.models.transformers.wire import PREFIX_PART
from cotune.runtime.memory import parse_size
from cotune.trainer.before.doctor.model_size import ModelSize
from cotune.trainer.config.train import TrainConfig

LIBRARIES = {"learner": 0.60e9, "sampler": 0.50e9}
"""Python, torch and transformers in a process on the CPU; on a GPU they lie in the machine's memory, and its context
takes `CONTEXT` of the device."""
CONTEXT = 0.5e9
PEAK = 1.05
"""What a pass takes at its peak, as a multiple of what it keeps for its backward pass; passes are chosen with more."""
LAYER = 2.0
"""A layer that is computed again, with its gradients, as a multiple of what it keeps."""
OPTIMIZERS = {"adamw": 8, "adamw8bit": 2}
"""Bytes of both moments of a trained parameter."""
GRADIENT = 4
LOGITS = 12
"""Bytes of a logit: three buffers in fp32."""


class Part(msgspec.Struct, frozen=True):
    """What one thing takes, in bytes."""

    name: str
    bytes: float


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one process takes, in the memory of `device`: the machine's, or that of a GPU."""

    process: str
    count: int
    device: str
    parts: tuple[Part, ...]
    free: float
    """Bytes that there are for it, shared with the others on the device."""
    pass_tokens: int = 0

    @property
    def bytes(self) -> float:
        """Of one such process."""
        return sum(part.bytes for part in self.parts)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the processes: `row` tokens of the longest prompt with its answer, of which others have `shared`
    in common with it, `sequences` decoded at once, and `policies` that are trained."""

    row: int
    sequences: int
    policies: int
    shared: float = 0.0


def workload(config: TrainConfig, prompt: int, policies: int) -> Workload:
    """The workload of a run whose longest prompt has so many tokens."""
    candidates = 1 if config.plan.kind == "independent" else config.plan.k
    sequences = min(1024, config.concurrency * candidates)
    return Workload(row=prompt + config.sampling.max_tokens, sequences=sequences, policies=policies)


def learner_memory(
    size: ModelSize, config: TrainConfig, load: Workload, *, device: str, free: float, total: float
) -> ProcessMemory:
    """The learner: weights, gradients and moments, and a pass. The copy that a publication makes is of the size of the
    gradients, which are gone by then."""
    settings, cluster = config.learner, config.cluster
    parts = cluster.learners if cluster.address else 1
    policies = load.policies if size.adapter == 0 else 1  # adapters share one base
    weights = policies * size.parameters * weight_bytes(config, size) / parts
    trained = load.policies * (size.adapter or size.parameters)
    moments = trained * OPTIMIZERS[settings.optimizer] / parts
    state = moments + trained / load.policies * GRADIENT / parts  # one policy is updated after the other
    libraries = LIBRARIES["learner"] if device == "cpu" else CONTEXT
    adapters = 4.0 * trained / parts if size.adapter else 0.0
    logits = float(LOGITS * size.vocabulary * (64 if device == "cpu" else 256))
    whole = size.parameters * (4.0 if settings.dtype == "float32" else 2.0)
    gathered = (Part("all weights, for a pass", whole),) if size.sees and parts > 1 else ()
    fixed = libraries + weights + adapters + state + logits + size.pass_bytes
    bound = min(parse_size(settings.memory), free) if settings.memory else free
    share = bound - fixed if settings.memory else (total / 16 if device == "cpu" else 0.8 * (free - fixed))
    tokens, checkpointed = pass_tokens(size, config, load, share)
    activations = tokens * (checkpointed_peak(size) if checkpointed else PEAK * size.token_bytes) + size.pass_bytes
    return ProcessMemory(
        process="learner",
        count=parts,
        device=device,
        free=bound,
        pass_tokens=tokens,
        parts=(
            Part("python and libraries" if device == "cpu" else "context of the GPU", libraries),
            Part("weights", weights + adapters),
            Part("gradients and optimizer", state),
            Part(f"a pass of {tokens} tokens" + (", checkpointed" if checkpointed else ""), activations + logits),
            Part("publishing, in the place of gradients", 0.0),
            *gathered,
            *_image_parts(size, device),
        ),
    )


def sampler_memory(
    size: ModelSize, config: TrainConfig, load: Workload, *, device: str, free: float, total: float
) -> ProcessMemory:
    """The in-process sampler: the base, what is published (for all weights a model each), and the cache."""
    each = 4 if device == "cpu" else 2
    versions = 1 + config.ahead
    trained = size.adapter or size.parameters
    published = load.policies * versions * trained * each + trained * (8 + each)  # one arrives, is read and copied
    cache = load.sequences * (load.row + 64) * size.cache_values * each
    logits = load.sequences * size.vocabulary * LOGITS
    kept = config.sampling.prefix_bytes()
    libraries = LIBRARIES["sampler"] if device == "cpu" else CONTEXT
    return ProcessMemory(
        process="sampler",
        count=1,
        device=device,
        free=free,
        parts=(
            Part("python and libraries" if device == "cpu" else "context of the GPU", libraries),
            Part("weights", float(size.parameters * each)),
            Part("published versions", float(published)),
            Part(f"cache of {load.sequences} sequences", float(cache + logits)),
            Part("earlier prompts, at most", float(total / PREFIX_PART if kept is None else kept)),
            *_image_parts(size, device),
        ),
    )


def _image_parts(size: ModelSize, device: str) -> tuple[Part, ...]:
    """Passes over images, of as many as go together; and on the CPU, where they are, those that are kept."""
    if not size.image_factor:
        return ()
    seen = Part("passes over images, at most", PASS_BYTES * size.image_factor)
    return (seen, Part("images as they were processed, at most", float(KEPT_BYTES))) if device == "cpu" else (seen,)


def pass_tokens(size: ModelSize, config: TrainConfig, load: Workload, room: float) -> tuple[int, bool]:
    """Tokens of the largest pass that the learner will make, and whether with activation checkpointing."""
    from cotune.trainer.learner.memory.pass_size import LAYER_MARGIN, LEAST, MARGIN, MOST

    settings = config.learner
    per_token = {
        False: MARGIN * size.token_bytes,
        True: MARGIN * size.checkpointed_bytes + LAYER_MARGIN * size.token_bytes / size.layers,
    }
    fits = {kind: room / each for kind, each in per_token.items()}
    asked = settings.micro_batch_tokens
    sizes = {
        kind: 2 ** int(math.log2(max(LEAST, min(MOST, fit)))) if asked == "auto" else asked
        for kind, fit in fits.items()
    }
    if asked != "auto" and settings.memory:
        sizes = {kind: max(LEAST, min(asked, int(fits[kind]))) for kind in fits}
    wanted = settings.activation_checkpointing
    kind = wanted if isinstance(wanted, bool) else load.row > max(sizes[False], fits[False])
    step = math.ceil(settings.mini_batch * (load.row - load.shared))
    passes = math.ceil(step / max(sizes[kind], load.row))
    return math.ceil(step / passes), kind  # a step is cut evenly


def checkpointed_peak(size: ModelSize) -> float:
    """What a token of a pass takes at its peak where layers are computed again."""
    return PEAK * size.checkpointed_bytes + LAYER * size.token_bytes / size.layers


def weight_bytes(config: TrainConfig, size: ModelSize) -> float:
    """Bytes of a weight that the learner holds: trained ones are fp32, frozen ones as they are computed with."""
    settings = config.learner
    if size.adapter == 0:
        return 4.0
    if settings.quantize == "4bit":
        return 0.57  # 4 bits, a scale for each 64 weights, and embeddings and norms as they are
    return 4.0 if settings.dtype == "float32" else 2.0
