"""`cotune doctor`: whether this machine or a Ray cluster can run a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from cotune.config.cluster import CPUS, NO_RAY, ClusterConfig, Demand
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError, CotuneError, error_line, install_extra
from cotune.integrations import versions
from cotune.integrations.models.devices import untried_gpu, unused_gpu
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.vllm.installed import build_of
from cotune.tables import cells, grid, plural
from cotune.trainer.before.doctor.machine import Machine, Node, examine_machine, gpu_of, nodes_of
from cotune.trainer.before.doctor.memory import (
    ProcessMemory,
    forecast_processes,
    learns_on_gpu,
    measure_bases,
    remedies,
    render_memory,
    shortages,
    trained_policies,
)
from cotune.trainer.before.doctor.step_time import (
    NoEstimateError,
    StepTime,
    duration_text,
    estimate_step,
    render_step,
)
from cotune.trainer.before.findings import STYLES, Finding, blocking_finding
from cotune.trainer.config.engine import engine_kind
from cotune.trainer.run.division import Resources, describe_division, divide, resources_of, resources_of_cluster
from cotune.trainer.run.engines import first_sets

PROMPT = 512
"""Default tokens of the longest prompt."""
_LEAST_SHARED_GB = 2.0
_LEAST_DISK_GB = 1.0
_LEAST_OPEN_FILES = 4096


class Forecast(msgspec.Struct, frozen=True):
    """The estimated demands of a run: memory by process, and seconds by part of a step."""

    memory: tuple[ProcessMemory, ...] = ()
    step: StepTime | None = None


class Report(msgspec.Struct, frozen=True):
    """The findings of the doctor, the memory of each process of the run, and the seconds of a step."""

    machine: Machine
    nodes: tuple[Node, ...]
    findings: tuple[Finding, ...]
    memory: tuple[ProcessMemory, ...] = ()
    step: StepTime | None = None

    @property
    def fits(self) -> bool:
        """Whether no finding blocks a run."""
        return not _has_blocking(self.findings)

    def to_json(self) -> str:
        """The report as JSON."""
        return msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(self), "fits": self.fits})).decode()


def examine(
    config: TrainConfig | None = None,
    *,
    prompt: int = PROMPT,
    calls: int = 0,
    gpu: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Examine this machine, and the Ray cluster if `config` names one, without starting anything.

    The forecasts are for prompts of `prompt` tokens and episodes of `calls` calls (0: one for each role that `config`
    names), on a GPU of `gpu` GB if that is not None. `say` is called with a line before each slow part.
    """
    machine = examine_machine(Path("runs"))
    if gpu is not None:
        machine = msgspec.structs.replace(machine, gpus=(gpu_of(gpu),))
    if config is None:
        return Report(machine, (), tuple(judge_machine(machine, ClusterConfig())))

    # 1. The models, and the division of the machine between learner and engines.
    findings = list(_judge_models(config))
    nodes: list[Node] = []
    if not _has_blocking(findings):
        try:
            nodes = _nodes(config.cluster.address, machine)
            config, notes = divide(config, _usable_resources(config, machine, nodes))
            findings.append(Finding("ok", "division", describe_division(config)))
            findings += [Finding("warns", "division", note) for note in notes]
        except CotuneError as error:
            findings.append(blocking_finding(error, "division"))

    # 2. The machine, whose findings are shown first. The division above decides what it needs.
    findings = [*judge_machine(machine, config.cluster, engine_kind(config).extra), *findings]

    # 3. Memory and time, and the placement of processes.
    forecast = Forecast()
    if not _has_blocking(findings):
        say("doctor: measuring the model, which takes longer the first time")
        forecast, forecast_findings = judge_forecast(config, machine, prompt, calls)
        findings += [*forecast_findings, *judge_precision(config, machine)]
    if not config.cluster.on_ray:
        nodes = []
    if nodes:
        try:
            findings += judge_placement(nodes, config.cluster, samplers=_sampler_sets(config))
        except ConfigError as error:
            findings.append(blocking_finding(error, "engines"))
    return Report(machine, tuple(nodes), tuple(findings), forecast.memory, forecast.step)


def _has_blocking(findings: Sequence[Finding]) -> bool:
    return any(finding.level == "blocks" for finding in findings)


def _judge_models(config: TrainConfig) -> Iterator[Finding]:
    """Yield a finding for each base model: its folder and size, or why it cannot be read."""
    for model, names in config.bases.items():
        about = "model" if model == config.model else f"model of {', '.join(names)}"
        try:
            folder = locate_model(model)
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            yield Finding("ok", about, f"{folder}, {size / 1e9:.2f} GB on disk")
        except CotuneError as error:
            yield blocking_finding(error, about)


def _nodes(address: str, machine: Machine) -> list[Node]:
    """The machines that Ray would use: this machine, or the machines of the cluster at `address`. Empty if Ray is
    needed and not installed. Raises ConfigError."""
    if address in ("", NO_RAY, "local"):
        cores = float(machine.cores)
        gpus = float(len(machine.gpus))
        return [Node(address="local", cpus=cores, gpus=gpus, free_cpus=cores, free_gpus=gpus)]
    return nodes_of(address) if "ray" in machine.versions else []


def _usable_resources(config: TrainConfig, machine: Machine, nodes: Sequence[Node]) -> Resources:
    """The GPUs and memory that a run can use on this machine, or in the cluster that it names."""
    if config.cluster.address not in ("", NO_RAY, "local"):
        return resources_of_cluster(int(sum(node.gpus for node in nodes)))
    smallest = min((gpu.memory_gb for gpu in machine.gpus), default=0.0)
    build = build_of(machine.versions.get("vllm", ""))
    return resources_of(config, gpus=len(machine.gpus), gpu_bytes=smallest * 2**30, vllm=build)


def judge_machine(machine: Machine, cluster: ClusterConfig, extra: str = "") -> Iterator[Finding]:
    """Yield findings on the machine, compared with the needs of any run. `extra` is the extra of cotune that installs
    the engine of the run; empty if there is none."""
    yield Finding("ok", "python", f"{machine.python} on {machine.system}")
    memory = f"{machine.free_memory_gb:.1f} of {machine.memory_gb:.1f} GB memory free"
    yield Finding("ok", "processor", f"{machine.cores} cores, {memory}")
    yield from _package_findings(machine, cluster, extra)
    if machine.gpus:
        for index, gpu in enumerate(machine.gpus):
            yield Finding("ok", f"GPU {index}", f"{gpu.name}, {gpu.free_gb:.1f} of {gpu.memory_gb:.1f} GB free")
        untried = untried_gpu() if "torch" in machine.versions else ""
        if untried:
            yield Finding("warns", "ROCm", untried, "Compare sampler_gap_mean with that of a run on a CPU.")
    else:
        # A GPU may be there that torch cannot use, for example because a driver is missing.
        unused = unused_gpu() if "torch" in machine.versions else ""
        text = "none that torch can use: everything runs on the CPU"
        yield Finding("warns" if unused else "ok", "GPU", text, unused)
    yield _resource_finding(
        "shared memory",
        f"{machine.shared_gb:.1f} GB free",
        is_enough=not cluster.on_ray or machine.shared_gb >= _LEAST_SHARED_GB,
        remedy="Ray keeps its objects there: docker run --shm-size=8g, or mount /dev/shm larger.",
    )
    yield _resource_finding(
        "disk for runs",
        f"{machine.disk_gb:.1f} GB free",
        is_enough=machine.disk_gb >= _LEAST_DISK_GB,
        remedy="Free some, or write runs elsewhere with --out.",
    )
    yield _resource_finding(
        "temporary files",
        f"{machine.temporary_gb:.1f} GB free",
        is_enough=machine.temporary_gb >= _LEAST_DISK_GB,
        remedy="Free some, or set TMPDIR.",
    )
    yield _resource_finding(
        "open files",
        f"limit {machine.open_files}",
        is_enough=machine.open_files >= _LEAST_OPEN_FILES,
        remedy=f"Many episodes at once need more: ulimit -n {_LEAST_OPEN_FILES}.",
    )
    if machine.loopback:
        yield Finding("blocks", "ports", f"none can be opened on 127.0.0.1: {machine.loopback}", "Allow loopback.")
    else:
        yield Finding("ok", "ports", "can be opened on 127.0.0.1")


def _resource_finding(about: str, text: str, *, is_enough: bool, remedy: str) -> Finding:
    if is_enough:
        return Finding("ok", about, text)
    return Finding("warns", about, text, remedy)


def judge_forecast(
    config: TrainConfig, machine: Machine, prompt: int, calls: int = 0
) -> tuple[Forecast, list[Finding]]:
    """Forecast memory and seconds of a run, with findings on whether there is enough memory.

    The forecast is empty if no policy is trained or the model cannot be measured. It has no seconds if there is not
    enough memory, or if the seconds cannot be estimated.
    """
    policies = trained_policies(config, config.specs)
    if not policies:
        kinds = ", ".join(f"{policy.name} is {policy.kind}" for policy in config.policy)
        remedy = 'Set kind = "lora" or "full" for one.'
        return Forecast(), [Finding("blocks", "policies", f"none is trained: {kinds}", remedy)]
    try:
        folders = {model: locate_model(model) for model in config.bases}
        config, bases = measure_bases(config, machine, folders, prompt=prompt)
        plan = forecast_processes(bases, config, machine)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, CotuneError) as error:
        # A model's own code may need values, which the tensors without storage of a measurement do not have.
        text = f"no forecast can be made ({error_line(error)})"
        return Forecast(), [Finding("warns", "memory", text, "Set learner.memory, which bounds the learner.")]

    sees_images = any(size.sees_images for size, _load in bases.values())
    counts_images = any("images" in name for process in plan for name in process.parts)
    workload = f"{plural(policies, 'policy', 'policies')}, prompts of up to {prompt} tokens"
    if sees_images and not counts_images:
        workload += ", without passes over images"
    missing = list(shortages(plan))
    if missing:
        text = f"{'; '.join(missing)} ({workload})"
        return Forecast(plan), [Finding("blocks", "memory", text, remedies(plan, config))]
    parts = ", ".join(f"{process.process} {process.bytes / 1e9:.1f} GB" for process in plan)
    memory = Finding("ok", "memory", f"{parts} ({workload})")
    try:
        step = estimate_step(config, machine, bases, plan, calls=calls)
    except NoEstimateError as reason:
        return Forecast(plan), [memory, Finding("ok", "time", f"no seconds can be estimated: {reason}")]
    text = (
        f"estimated: {duration_text(step.seconds)} for a step, {duration_text(step.steps * step.seconds)} for the "
        f"{plural(step.steps, 'step')} of the run ({step.basis})"
    )
    return Forecast(plan, step), [memory, Finding("ok", "time", text)]


def judge_precision(config: TrainConfig, machine: Machine) -> Iterator[Finding]:
    """Yield a finding if the learner computes in float32 and would be faster in bfloat16."""
    # With "auto", a learner on this CPU tries bfloat16 and returns to float32 if the sampler's probabilities differ.
    learns_in_process = not learns_on_gpu(config, machine) and not config.cluster.on_ray
    if config.learner.dtype == "float32" and machine.bfloat16 and learns_in_process:
        text = (
            'the learner computes in float32: learner.dtype = "auto" multiplies in bfloat16 on this processor while '
            "the log-probabilities of sampler and learner agree"
        )
        yield Finding("ok", "precision", text)
    if config.learner.dtype == "float32" and learns_on_gpu(config, machine):
        text = (
            'the learner computes in float32: learner.dtype = "auto" is bfloat16 on a GPU, which is faster and halves '
            "frozen weights; samplers there compute in bfloat16 (sampler_gap_mean is the difference)"
        )
        yield Finding("ok", "precision", text)


def judge_placement(nodes: Sequence[Node], cluster: ClusterConfig, *, samplers: int = 1) -> Iterator[Finding]:
    """Yield findings on whether each process of a run finds a machine with enough free cores and GPUs.

    A demand is a number of processes of one kind. The demands with the most GPUs are placed first, as they fit into the
    fewest machines.
    """
    demands = cluster.demands(samplers)
    local = cluster.address == "local"
    cores_needed = sum(demand.count * CPUS for demand in demands)
    cores_free = sum(node.free_cpus for node in nodes)
    if local and cores_needed > cores_free:
        text = f"{sum(d.count for d in demands)} processes ask for {cores_needed:g} cores and share {cores_free:g}"
        yield Finding("warns", "placement", text, "Slower, not wrong: ask for fewer processes where speed matters.")
    # Local processes share cores, so their cores never run out.
    free_machines = [FreeMachine(float("inf") if local else node.free_cpus, node.free_gpus) for node in nodes]
    for demand in sorted(demands, key=lambda demand: -demand.gpus):
        placed_processes = 0
        for _ in range(demand.count):
            placed_processes += _place_process(demand, free_machines)
        text = f"{demand.count} x {demand.part} with {CPUS:g} core"
        if demand.gpus:
            text += f" and {demand.gpus:g} GPU{'s' if demand.gpus > 1 else ''}"
        if placed_processes == demand.count:
            yield Finding("ok", f"{demand.part}s", text)
        else:
            free = ", ".join(f"{node.address}: {node.free_cpus:g} cores, {node.free_gpus:g} GPUs" for node in nodes)
            text += f": {placed_processes} fit. Free: {free}"
            remedy = "Ask for fewer or smaller ones under [cluster], or add machines."
            yield Finding("blocks", f"{demand.part}s", text, remedy)


def render(report: Report) -> Group:
    """The report for a terminal: the findings as a table, then memory and seconds of a run."""
    table = grid("", "", "")
    for finding in report.findings:
        text = finding.text + (f"\n{finding.remedy}" if finding.remedy else "")
        table.add_row(Text(finding.level, style=STYLES[finding.level]), *cells((finding.about, text)))
    parts: list[RenderableType] = [table]
    if report.memory:
        parts.append(render_memory(report.memory))
    if report.step is not None:
        parts.append(render_step(report.step))
    return Group(*parts)


def _sampler_sets(config: TrainConfig) -> int:
    """The number of sets of engines: one for each base model, or in vLLM one for each policy with full weights."""
    sets = first_sets(config)
    if sets[0].weights == "full" and not config.policy:
        return trained_policies(config, config.specs)
    return len(sets)


def _package_findings(machine: Machine, cluster: ClusterConfig, extra: str) -> Iterator[Finding]:
    """Yield a finding for each installed package whose version matters, and for each missing package that the run
    needs. `extra` is the extra of cotune that installs the engine; empty if there is none."""
    for name, installed_version in machine.versions.items():
        refusal = versions.version_refusal(name, installed_version)
        if refusal:
            yield blocking_finding(refusal, name)
        elif name in versions.SUPPORTED and versions.is_untested(name, installed_version):
            tested = versions.SUPPORTED[name]
            yield Finding(
                "warns", name, f"{installed_version}, tested is {tested}", "If it fails, install a tested version."
            )
        else:
            yield Finding("ok", name, installed_version)
    extra_of_package = {"torch": "train"}
    if cluster.on_ray:
        extra_of_package["ray"] = "ray"
    if extra:
        extra_of_package[extra] = extra  # An engine's extra has the name of its package.
    for package, extra_of_it in extra_of_package.items():
        if package not in machine.versions:
            yield Finding("blocks", package, "not installed", install_extra(extra_of_it))


@dataclass
class FreeMachine:
    """The cores and GPUs of a machine that no process has been placed on yet."""

    cpus: float
    gpus: float


def _place_process(demand: Demand, machines: Sequence[FreeMachine]) -> bool:
    """Place one process of a demand on the first machine with enough free cores and GPUs, which become fewer. Returns
    whether there was one."""
    for machine in machines:
        if machine.cpus >= CPUS and machine.gpus >= demand.gpus:
            machine.cpus -= CPUS
            machine.gpus -= demand.gpus
            return True
    return False
