"""An estimate of the seconds of a step: operations and bytes of a run, divided by the rates of its devices.

The rates of a CPU are measured, for a fraction of a second. For a GPU, a run is assumed to reach a share of the
published peaks. Nothing here has been measured on a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import median
from typing import NamedTuple

import msgspec
from rich.table import Table
from rich.text import Text

from cotune.algorithms.catalogue import RECIPES
from cotune.config.train import TrainConfig
from cotune.tables import grid, plural
from cotune.trainer.before.doctor.machine import Gpu, Machine
from cotune.trainer.before.doctor.memory import ProcessMemory, Workload, learns_on_gpu, samples_on_gpu
from cotune.trainer.before.doctor.model_size import ModelSize
from cotune.trainer.learner.gpu_rates import rates_of

GPU_OPERATIONS_SHARE, GPU_BANDWIDTH_SHARE = 0.4, 0.7
"""Shares of a GPU's published operations and bandwidth that a run is assumed to reach. Not measured."""
CPU_OPERATIONS_SHARE, CPU_BANDWIDTH_SHARE = 0.75, 0.75
"""Shares of the measured rates of one product on the CPU that an update and a decode step reach."""
LAYER_SECONDS = {"transformers": 0.9e-3, "vllm": 0.15e-3}
"""Least seconds of a layer in a decode step on a GPU, to launch its kernels. Counted for the engine in the process (59
operators a layer) and estimated for vLLM's graphs; not measured."""
CPU_LAYER_SECONDS = 0.1e-3
"""The same on a CPU, where operators of small models take longer than their products."""
LEFT_OUT = "without the application's own time, judges, publications and evaluations"


class Rates(NamedTuple):
    """How fast a process computes and reads memory."""

    operations: float
    """Operations in a second."""
    bandwidth: float
    """Bytes of memory read in a second."""
    source: str
    """Where the figures come from, for the report."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step by part, estimated."""

    parts: Mapping[str, float]
    seconds: float
    """Seconds of the step: the sum of its parts, or the longest part if rollouts and updates overlap."""
    steps: int
    """Steps of the run."""
    basis: str
    """The assumptions of the estimate, for the report."""


class NoEstimateError(Exception):
    """No seconds can be estimated; the message says why."""


def estimate_step(
    config: TrainConfig,
    machine: Machine,
    bases: Mapping[str, tuple[ModelSize, Workload]],
    plan: Sequence[ProcessMemory],
    *,
    calls: int = 0,
) -> StepTime:
    """Estimate the seconds of a step of a run whose episodes make `calls` calls (0: one for each role that it names).

    `bases` and `plan` come from the forecast of memory. All answers are assumed to have the most tokens that they may
    have. Raises NoEstimateError.
    """
    obstacle = _estimate_obstacle(config)
    if obstacle:
        raise NoEstimateError(obstacle)
    sampling_rates, learning_rates = _find_rates(config, machine, max(size.parameters for size, _ in bases.values()))
    calls = calls or count_calls(config)
    answer = config.sampling.max_tokens
    learner = next((process for process in plan if process.process == "learner"), None)
    samplers = [process for process in plan if process.process.startswith("sampler")]

    sampling = 0.0
    updating = 0.0
    for index, (size, load) in enumerate(bases.values()):
        # Each base answers its roles' part of the calls.
        calls_of_base = calls * _share_of_calls(config, index)
        at_once = load.sequences  # vLLM, which is not in the plan, is assumed to decode all sequences at once
        if index < len(samplers):
            at_once = samplers[index].at_once
        sampling += calls_of_base * _rollout_seconds(config, machine, size, load, at_once, sampling_rates)
        if load.policies:
            checkpointed = learner is not None and learner.checkpointed
            updating += calls_of_base * _update_seconds(config, size, load, checkpointed, learning_rates)
    if config.cluster.on_ray and learns_on_gpu(config, machine):
        updating /= max(1, config.cluster.learners)
    if config.cluster.on_ray and samples_on_gpu(config, machine):
        sampling /= max(1, config.cluster.engines)

    overlaps = config.mode == "async" and config.cluster.on_ray and bool(machine.gpus)
    _size, first_load = next(iter(bases.values()))  # the longest prompt is the same for all bases
    prompt = first_load.row - answer
    answers = f"{plural(config.largest_k, 'answer')} of {answer} tokens"
    work = (
        f"{plural(config.tasks_per_step, 'task')} a step, {plural(calls, 'call')} a task, prompts of {prompt} tokens, "
    )
    sources = dict.fromkeys((sampling_rates.source, learning_rates.source))
    return StepTime(
        parts={"rollouts": sampling, "updates": updating},
        seconds=max(sampling, updating) if overlaps else sampling + updating,
        steps=config.steps,
        basis=f"{work}{answers}; {'; '.join(sources)}; {LEFT_OUT}",
    )


def count_calls(config: TrainConfig) -> int:
    """Calls of an episode that makes one for each role that the configuration names."""
    roles = {*config.roles, *(role for policy in config.policy for role in policy.roles)}
    return max(1, len(roles))


def _estimate_obstacle(config: TrainConfig) -> str:
    """The reason why the seconds of this configuration cannot be estimated on any machine; empty if they can."""
    if config.from_records:
        return f"recipe {config.recipe} trains on records, whose lengths are not known here"
    # A class of the user's own is not loaded: the configuration may come from a run folder of somebody else.
    method = RECIPES.get(config.recipe or "")
    if config.plan.kind == "replay" or (method is not None and method.plan == "replay"):
        return "it is not known beforehand how many calls plan replay forks"
    if config.engine not in ("auto", "transformers", "vllm"):
        return f"the speed of engine {config.engine!r} is not known"
    if config.cluster.on_ray and config.cluster.address != "local":
        return "the GPUs of a cluster are not known by their names"
    return ""


def _share_of_calls(config: TrainConfig, base: int) -> float:
    """The share of all calls that a base model, given by its index, answers. It is assumed to be the share of its roles
    among the roles of all [[policy]] tables. If no table has roles, the first base answers all calls."""
    role_count = sum(len(policy.roles) for policy in config.policy)
    if not role_count:
        return 1.0 if base == 0 else 0.0
    names_by_base = list(config.bases.values())  # the names of the policies of each base model
    policies_of_base = [policy for policy in config.policy if policy.name in names_by_base[base]]
    return sum(len(policy.roles) for policy in policies_of_base) / role_count


def _find_rates(config: TrainConfig, machine: Machine, parameters: int) -> tuple[Rates, Rates]:
    """The rates of sampler and learner for a model of so many parameters. Raises NoEstimateError for a GPU that is not
    known by its name."""
    from cotune.integrations.models.devices import usual_threads

    precision = config.learner.precision
    threads = usual_threads(parameters)
    if samples_on_gpu(config, machine):
        sampling = _gpu_rates(machine.gpus[0], "bfloat16")
    else:
        sampling = measure_cpu("float32", threads)
    if learns_on_gpu(config, machine):
        learning = _gpu_rates(machine.gpus[0], precision)
    else:
        learning = measure_cpu(precision, threads)
    return sampling, learning


def _gpu_rates(gpu: Gpu, dtype: str) -> Rates:
    """The rates that a run is assumed to reach on a GPU: shares of its published peaks. Raises NoEstimateError for a
    GPU that is not known by its name."""
    published = rates_of(gpu.name)
    if published is None:
        remedy = ". Run cotune doctor on the machine with the GPU" if gpu.is_assumed else ""
        raise NoEstimateError(f"the rates of {gpu.name} are not known{remedy}")
    # Products of float32 are computed in TF32, at half of the rate of bfloat16.
    peak = published.bfloat16 if dtype == "bfloat16" else published.bfloat16 / 2
    source = (
        f"{GPU_OPERATIONS_SHARE:.0%} of the {peak / 1e12:,.0f} TFLOP/s in {dtype} and {GPU_BANDWIDTH_SHARE:.0%} of "
        f"the {published.bandwidth / 1e9:,.0f} GB/s that are published for {gpu.name}, not measured"
    )
    return Rates(
        operations=GPU_OPERATIONS_SHARE * peak, bandwidth=GPU_BANDWIDTH_SHARE * published.bandwidth, source=source
    )


@cache
def measure_cpu(dtype: str, threads: int) -> Rates:
    """Measure how fast this machine's CPU computes and reads memory at its present load, with two products.

    Each takes about 0.2 s. The first is limited by computing, as passes of the learner are; the second by memory, as
    sampling is.
    """
    import torch

    from cotune.integrations.models.float32 import product

    precision = getattr(torch, dtype)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # As many rows as a pass has tokens, in a layer of usual width.
        rows = 1024
        width = 1024
        states = torch.ones(rows, width, dtype=precision)
        square = torch.ones(width, width, dtype=precision)
        operations = 2 * rows * width * width / _median_seconds(lambda: product(states, square))
        # One row, and a weight of 128 MB, which no cache holds: a decode step reads all weights once.
        state = torch.ones(1, 4096)
        weight = torch.ones(8192, 4096)
        bandwidth = weight.nbytes / _median_seconds(lambda: product(state, weight))
    finally:
        torch.set_num_threads(threads_before)
    source = (
        f"{operations / 1e9:,.0f} GFLOP/s in {dtype} and {bandwidth / 1e9:,.0f} GB/s measured on this CPU just now"
        f" with {plural(threads, 'thread')}"
    )
    return Rates(operations=CPU_OPERATIONS_SHARE * operations, bandwidth=CPU_BANDWIDTH_SHARE * bandwidth, source=source)


def _median_seconds(compute: Callable[[], object]) -> float:
    """Run `compute` for 0.2 seconds, at most 50 times, and return the median of its seconds. The first run only warms
    up."""
    compute()
    seconds: list[float] = []
    while sum(seconds) < 0.2 and len(seconds) < 50:
        began = time.perf_counter()
        compute()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _rollout_seconds(
    config: TrainConfig, machine: Machine, size: ModelSize, load: Workload, at_once: int, rates: Rates
) -> float:
    """Seconds to sample one call of each episode of a step, `at_once` answers at a time."""
    answers = config.tasks_per_step * config.largest_k
    prompts = _prompts(config)
    answer = config.sampling.max_tokens
    prompt = load.row - answer
    on_gpu = samples_on_gpu(config, machine)

    # 1. A decode step adds a token to each sequence. It takes as long as the slowest of three: starting the layers'
    # kernels, reading all weights and the cached keys and values of all sequences, and multiplying. On average half of
    # an answer is cached.
    sequences = max(1, min(answers, at_once, load.sequences))
    number_bytes = 2 if on_gpu else 4
    weights = size.rounded_bytes(heads=1) if size.rounded else float(number_bytes * size.parameters)
    cached = sequences * (prompt + answer / 2) * size.cache_values * number_bytes
    reading = (weights + cached) / rates.bandwidth
    multiplying = 2.0 * size.parameters * sequences / rates.operations
    if on_gpu:
        launching = LAYER_SECONDS["vllm" if config.engine == "vllm" else "transformers"] * size.layers
    else:
        launching = CPU_LAYER_SECONDS * size.layers
    step_seconds = max(launching, reading, multiplying)

    # 2. The answers that do not fit next to each other wait for another round. Each prompt is computed once (prefill).
    rounds = math.ceil(answers / sequences)
    prefill = prompts * prompt * (2.0 * _layer_parameters(size) + 2.0 * size.attention_width * prompt)
    return rounds * answer * step_seconds + prefill / rates.operations


def _update_seconds(config: TrainConfig, size: ModelSize, load: Workload, checkpointed: bool, rates: Rates) -> float:
    """Seconds to train on one call of each episode of a step: the operations of forward and backward passes."""
    answers = config.tasks_per_step * config.largest_k
    answer_tokens = answers * config.sampling.max_tokens
    prompts = _prompts(config) if size.shares_prompts else answers
    tokens = answer_tokens + prompts * (load.row - config.sampling.max_tokens)

    # Operations of a token for each parameter of a layer: 2 in the forward pass, 2 for the gradient of the layer's
    # input, and 2 for the gradient of the parameter if it is trained (arXiv 2001.08361, 2.1). Attention multiplies
    # queries with keys, and weights with values; its backward pass takes twice as much.
    layers = 2.0 * _layer_parameters(size)
    attention = 4.0 * size.attention_width * load.row
    forward = layers + attention
    if checkpointed:
        forward *= 2  # layers are computed again in the backward pass
    input_gradients = layers + 2 * attention
    trained_weights = layers
    if size.adapter:
        # The adapter is added to frozen layers: its forward pass, and both of its gradients.
        trained_weights = 6.0 * size.adapter
    per_token = forward + input_gradients + trained_weights

    # Logits are computed for answers only, and again for the gradient of the output embedding.
    per_answer_token = (4.0 if size.adapter else 8.0) * size.head
    return (tokens * per_token + answer_tokens * per_answer_token) / rates.operations


def _prompts(config: TrainConfig) -> int:
    """How many different prompts one call of each episode of a step has."""
    return config.tasks_per_step * (config.plan.k if config.plan.kind == "independent" else 1)


def _layer_parameters(size: ModelSize) -> int:
    """Parameters without both embeddings."""
    return size.parameters - (size.head if size.tied else 2 * size.head)


def duration_text(seconds: float) -> str:
    """Seconds as a reader says them, with two digits."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.2g} {unit}" if seconds < 100 * length else f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def render_step(step: StepTime) -> Table:
    """The parts of a step, and the run."""
    table = grid("part", "seconds>", title="seconds of a step, estimated")
    for name, seconds in step.parts.items():
        table.add_row(name, f"{seconds:,.1f}")
    table.add_row(Text("a step", style="bold"), Text(f"{step.seconds:,.1f}", style="bold"))
    return table
