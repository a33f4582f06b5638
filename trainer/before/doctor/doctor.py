"""`cotune doctor`: whether this machine, or a Ray cluster, can run what a configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.table import Table
from rich.text import Text

from cotune.errors import CotuneError
from cotune.integrations import versions
from cotune.integrations.models.folder.folder import folder_sees_images, locate_model
from cotune.tables import BAD, GOOD, grid, plural
from cotune.trainer.before.doctor.forecast import ProcessMemory
from cotune.trainer.before.doctor.machine import Machine, Node, look, nodes_of
from cotune.trainer.before.doctor.memory import learns_on_gpu, plan_memory, remedies, shortages
from cotune.trainer.config.cluster import CPUS, ClusterConfig, Demand
from cotune.trainer.config.train import TrainConfig

Level = Literal["ok", "warns", "blocks"]
_STYLES = {"ok": GOOD, "warns": "yellow", "blocks": BAD}
PROMPT = 512
"""Tokens of the longest prompt, where nothing is said of it."""
_SHARED_GB = 2.0
_DISK_GB = 1.0
_FILES = 4096


class Diagnosis(msgspec.Struct, frozen=True):
    """What was found of one thing; `remedy` says what to do where it is not ok."""

    subject: str
    level: Level
    text: str
    remedy: str = ""


class Report(msgspec.Struct, frozen=True):
    """What the doctor found."""

    machine: Machine
    nodes: tuple[Node, ...]
    findings: tuple[Diagnosis, ...]
    memory: tuple[ProcessMemory, ...] = ()
    """What each process of the run will take."""

    @property
    def fits(self) -> bool:
        """Whether nothing stands in the way of a run."""
        return all(finding.level != "blocks" for finding in self.findings)

    def to_json(self) -> str:
        """The report as JSON."""
        return msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(self), "fits": self.fits})).decode()


def examine(config: TrainConfig | None = None, *, prompt: int = PROMPT) -> Report:
    """Look at this machine and, where `config` names one, at its Ray cluster; start nothing. `prompt` is the length of
    the longest prompt that memory is reckoned for, in tokens."""
    machine = look(Path("runs"))
    cluster = config.cluster if config else ClusterConfig()
    nodes: list[Node] = []
    findings = list(judge_machine(machine, cluster))
    memory: tuple[ProcessMemory, ...] = ()
    if config is not None:
        findings += judge_model(config)
        if all(finding.level != "blocks" for finding in findings):
            memory, judged = judge_memory(config, machine, prompt)
            findings.append(judged)
            findings += judge_precision(config, machine)
    if cluster.address not in ("", "local") and "ray" in machine.versions:
        try:
            nodes = nodes_of(cluster.address)
        except CotuneError as error:
            findings.append(Diagnosis("cluster", "blocks", error.cause, error.remedy))
    elif cluster.address == "local":
        here = float(machine.cores)
        gpus = float(len(machine.gpus))
        nodes = [Node(address="local", cpus=here, gpus=gpus, free_cpus=here, free_gpus=gpus)]
    if nodes and config is not None:
        findings += judge_placement(nodes, cluster, policies=_policies(config), samplers=_samplers(config))
    return Report(machine, tuple(nodes), tuple(findings), memory)


def judge_machine(machine: Machine, cluster: ClusterConfig) -> Iterator[Diagnosis]:
    """What the machine has, against what such a run needs of any machine."""
    yield Diagnosis("python", "ok", f"{machine.python} on {machine.system}")
    yield Diagnosis("processor", "ok", f"{machine.cores} cores, {machine.free_memory_gb:.1f} of "
                  f"{machine.memory_gb:.1f} GB memory free")  # fmt: skip
    yield from _packages(machine, cluster)
    if machine.gpus:
        for index, gpu in enumerate(machine.gpus):
            yield Diagnosis(f"GPU {index}", "ok", f"{gpu.name}, {gpu.free_gb:.1f} of {gpu.memory_gb:.1f} GB free")
        if cluster.address and not any(cluster.gpu_shares):
            remedy = "Set cluster.gpus_per_engine and cluster.gpus_per_learner, which are 0."
            yield Diagnosis("GPUs of the run", "warns", "none: everything runs on the CPU", remedy)
    else:
        yield Diagnosis("GPU", "ok", "none that torch can use: everything runs on the CPU")
    yield _room("shared memory", machine.shared_gb, _SHARED_GB if cluster.address else 0.0,
                "Ray keeps its objects there: docker run --shm-size=8g, or mount /dev/shm larger.")  # fmt: skip
    yield _room("disk for runs", machine.disk_gb, _DISK_GB, "Free some, or write runs elsewhere with --out.")
    yield _room("temporary files", machine.temporary_gb, _DISK_GB, "Free some, or set TMPDIR.")
    few = machine.open_files < _FILES
    yield Diagnosis("open files", "warns" if few else "ok", f"limit {machine.open_files}",
                  f"Many episodes at once need more: ulimit -n {_FILES}." if few else "")  # fmt: skip
    if machine.loopback:
        yield Diagnosis("ports", "blocks", f"none can be opened on 127.0.0.1: {machine.loopback}", "Allow loopback.")
    else:
        yield Diagnosis("ports", "ok", "can be opened on 127.0.0.1")


def judge_model(config: TrainConfig) -> Iterator[Diagnosis]:
    """Whether the model is there, or can be fetched."""
    try:
        yield Diagnosis("model", "ok", str(locate_model(config.model)))
    except CotuneError as error:
        yield Diagnosis("model", "blocks", error.cause, error.remedy)


def judge_memory(config: TrainConfig, machine: Machine, prompt: int) -> tuple[tuple[ProcessMemory, ...], Diagnosis]:
    """What the processes of a run will take, and whether it is there."""
    policies = _policies(config)
    try:
        folder = locate_model(config.model)
        plan = plan_memory(config, machine, folder, prompt=prompt, policies=policies)
        counted = any("images" in part.name for process in plan for part in process.parts)
        images = ", without what passes over images take" if folder_sees_images(folder) and not counted else ""
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, CotuneError) as error:
        # a model's own code may want values, which tensors without storage do not have
        text = f"what it takes cannot be reckoned beforehand ({type(error).__name__}: {error})"
        return (), Diagnosis("memory", "warns", text, "Set learner.memory, which bounds the learner.")
    asked = f"{plural(policies, 'policy', 'policies')}, prompts of up to {prompt} tokens{images}"
    missing = [f"{name} takes {what}, {short / 1e9:.1f} GB too much" for name, what, short in shortages(plan)]
    if missing:
        return plan, Diagnosis("memory", "blocks", f"{'; '.join(missing)} ({asked})", remedies(plan, config))
    parts = ", ".join(f"{process.process} {process.bytes / 1e9:.1f} GB" for process in plan)
    return plan, Diagnosis("memory", "ok", f"{parts} ({asked})")


def judge_precision(config: TrainConfig, machine: Machine) -> Iterator[Diagnosis]:
    """What to know of a learner that computes in float32 on a GPU."""
    if config.learner.dtype == "float32" and learns_on_gpu(config, machine):
        text = (
            'the learner computes in float32: learner.dtype = "bfloat16" is faster on a GPU and halves frozen weights; '
            "samplers there compute in bfloat16, and sampler_gap_mean says how far both are apart"
        )
        yield Diagnosis("precision", "ok", text)


def judge_placement(
    nodes: Sequence[Node], cluster: ClusterConfig, *, policies: int = 1, samplers: int = 1
) -> Iterator[Diagnosis]:
    """Whether each process that the run starts finds a machine with what it takes; the largest are placed first."""
    demands = cluster.demands(policies, samplers)
    local = cluster.address == "local"
    wanted = sum(demand.count * CPUS for demand in demands)
    have = sum(node.free_cpus for node in nodes)
    if local and wanted > have:
        text = f"{sum(d.count for d in demands)} processes ask for {wanted:g} cores and share {have:g}"
        yield Diagnosis("placement", "warns", text, "Slower, not wrong: ask for fewer processes where speed matters.")
    rooms = [[float("inf") if local else node.free_cpus, node.free_gpus] for node in nodes]
    for demand in sorted(demands, key=lambda d: -d.gpus):
        placed = sum(_place(demand, rooms) for _ in range(demand.count))
        text = f"{demand.count} x {_each(demand)}"
        if placed == demand.count:
            yield Diagnosis(f"{demand.part}s", "ok", text)
        else:
            free = ", ".join(f"{n.address}: {n.free_cpus:g} cores, {n.free_gpus:g} GPUs" for n in nodes)
            yield Diagnosis(
                f"{demand.part}s", "blocks", f"{text}: {placed} fit. Free: {free}",
                "Ask for fewer or smaller ones under [cluster], or add machines.",
            )  # fmt: skip


def render(report: Report) -> Table:
    """The findings as a table."""
    table = grid("", "", "")
    for finding in report.findings:
        style = _STYLES[finding.level]
        said = finding.text + (f"\n{finding.remedy}" if finding.remedy else "")
        table.add_row(Text(finding.level, style=style), Text(finding.subject), Text(said))
    return table


def _policies(config: TrainConfig) -> int:
    """How many policies are trained, as far as the configuration tells."""
    if config.policy:
        return sum(policy.kind in ("lora", "full") for policy in config.policy)
    return 1 if config.policies == "shared" else max(1, len(config.roles))


def _samplers(config: TrainConfig) -> int:
    """Sets of engines: vLLM needs one for each policy of full weights."""
    if not config.cluster.kind.fixed:
        return 1
    if not config.policy:
        return _policies(config) if config.policies == "full" else 1
    kinds = [policy.kind for policy in config.policy]
    return kinds.count("full") + any(kind in ("lora", "frozen") for kind in kinds)


def _packages(machine: Machine, cluster: ClusterConfig) -> Iterator[Diagnosis]:
    for name, found in machine.versions.items():
        try:
            if name in versions.SUPPORTED:
                versions.require(name)
            yield Diagnosis(name, "ok", found)
        except CotuneError as error:
            yield Diagnosis(name, "blocks", f"{found}: {error.cause}", error.remedy)
    needed = {"torch": "train", **({"ray": "ray"} if cluster.address else {})}
    if extra := cluster.kind.extra:
        needed[extra] = extra
    for name, extra in needed.items():
        if name not in machine.versions:
            yield Diagnosis(name, "blocks", "not installed", f"pip install 'cotune[{extra}]'.")


def _room(subject: str, free: float, least: float, remedy: str) -> Diagnosis:
    short = free < least
    return Diagnosis(subject, "warns" if short else "ok", f"{free:.1f} GB free", remedy if short else "")


def _place(demand: Demand, rooms: list[list[float]]) -> bool:
    for room in rooms:
        if room[0] >= CPUS and room[1] >= demand.gpus:
            room[0] -= CPUS
            room[1] -= demand.gpus
            return True
    return False


def _each(demand: Demand) -> str:
    gpus = f" and {demand.gpus:g} GPU{'s' if demand.gpus > 1 else ''}" if demand.gpus else ""
    return f"{demand.part} with {CPUS:g} core{gpus}"
