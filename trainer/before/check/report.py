"""The report of `cotune check`, as data and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from cotune.errors import check_bounds
from cotune.recording.app_parts import Part
from cotune.records.structs import CallRecord
from cotune.tables import BAD, GOOD, QUIET, cells, grid, plural, scores
from cotune.trainer.before.findings import STYLES, Finding, RoleCheck

Verdict = Literal["trainable", "undecided", "not trainable"]
VERDICT_STYLES: Mapping[Verdict, str] = {"trainable": GOOD, "undecided": STYLES["undecided"], "not trainable": BAD}


class IdleCheck(Part, frozen=True, kw_only=True):
    """A part of the application that never called. `ran`: it did other work."""

    ran: bool


class GroupCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A group that the plan would form: its task and roles, and how many candidates are compared in it."""

    task: str
    roles: tuple[str, ...]
    size: int


class CheckLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a dry run runs. Raises ConfigError unless each is above 0."""

    limit: int = 1
    """Number of tasks: the first ones."""
    calls: int = 64
    """Most calls of a run."""
    timeout: float = 60.0
    """Most seconds of a run."""

    def __post_init__(self) -> None:
        check_bounds(self, "limit", "calls", "timeout")


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a dry run. `answers` is who answered: "drawn", a model, "provider" or "records:ADDRESS".

    `runs` counts the runs of all tasks. `calls` come without their answers, `tokens` counts their prompts by the call's
    id, if there is a model to be trained. `local` holds the lowest and the highest value of each component by role.
    With `agents_known` frameworks list all roles; otherwise other agents may exist.
    """

    workflow: str
    tasks: tuple[str, ...]
    answers: str = "drawn"
    plan: str
    runs: int = 1
    roles: tuple[RoleCheck, ...]
    idle: tuple[IdleCheck, ...] = ()
    agents_known: bool = True
    calls: tuple[CallRecord, ...]
    tokens: Mapping[str, int] = {}
    groups: tuple[GroupCheck, ...]
    team: Mapping[str, float]
    local: Mapping[str, Mapping[str, tuple[float, float]]]
    left_out: Mapping[str, int]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether something blocks; `undecided` where other answers may decide."""
        levels = {finding.level for finding in self.findings}
        return "not trainable" if "blocks" in levels else "undecided" if "undecided" in levels else "trainable"

    @property
    def trainable(self) -> bool:
        return self.verdict == "trainable"

    def to_json(self) -> str:
        """The report as one JSON object, verdict included."""
        fields = {"verdict": self.verdict, "trainable": self.trainable, **msgspec.to_builtins(self)}
        return msgspec.json.encode(fields).decode()


def render(report: CheckReport) -> Group:
    """The report of `cotune check` for a terminal: a table of roles, of the calls of one run, and of the groups that a
    step would have; then rewards, findings (the worst first) and the verdict.
    """
    integrations = ", ".join(dict.fromkeys(call.integration for call in report.calls)) or "nothing"
    head = f"of {report.workflow} on {plural(len(report.tasks), 'task')} ({', '.join(report.tasks)}), "
    head += f"{plural(report.runs, 'run')}, answers: {report.answers}\n{report.plan}\n"
    lines: list[RenderableType] = [Text.assemble(("dry run ", "bold"), head, f"recorded through {integrations}\n")]

    # 1. The roles, and who plays them in training.
    roles = grid("role", "calls>", "policy", "scorer", "trained")
    for role in report.roles:
        trained = Text("yes", style=GOOD) if role.trained else Text(f"no: {role.reason}", style="yellow")
        policy = role.kind if role.policy in (role.role, role.kind) else f"{role.policy} ({role.kind})"
        roles.add_row(*cells((role.role, role.calls, policy, "yes" if role.scorer else "", trained)))

    # 2. The calls of a run, with the calls whose answers they read.
    calls = grid("step>", "role", "turn>", "reads", "tokens>", "asks for", "status")
    steps = {call.id: call.step for call in report.calls}
    for call in report.calls:
        steps_read = sorted(steps[parent] for parent in call.parents if parent in steps)
        reads = ", ".join(map(str, steps_read))
        asks = [f"{name} {call.params[name]:g}" for name in ("temperature", "n") if call.params.get(name) is not None]
        if call.streamed:
            asks.append("stream")
        if isinstance(call.params.get("response_format"), Mapping):
            asks.append("JSON")
        if call.tools:
            asks.append("tools")
        tokens = report.tokens.get(call.id, "")
        calls.add_row(*cells((call.step, call.role, call.turn, reads, tokens, " · ".join(asks), call.status)))

    # 3. The groups that a training step would have if all episodes ran like this one.
    groups = grid("groups>", "of task", "role", "candidates in each>")
    counts = Counter((group.task, ", ".join(group.roles), group.size) for group in report.groups)
    for (task, names, size), count in counts.items():
        groups.add_row(*cells((count, task, names, size)))

    lines += [roles, "", calls, "", groups, ""]
    lines.append(Text.assemble(("outcome of the runs: ", QUIET), scores(report.team)))
    for name, components in report.local.items():
        ranges = [f"{component} {low:.3g} to {high:.3g}" for component, (low, high) in components.items()]
        lines.append(Text.assemble((f"rewards of {name}: ", QUIET), ", ".join(ranges)))
    if report.left_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items())
        lines.append(Text(f"candidates left out: {reasons}", style=QUIET))
    for finding in sorted(report.findings, key=lambda finding: list(STYLES).index(finding.level)):
        about = f"{finding.about}: " if finding.about else ""
        lines.append(Text.assemble((f"{finding.level} ", STYLES[finding.level]), (about, "bold"), finding.text))
        lines += [Text(f"  {finding.remedy}", style=QUIET)] if finding.remedy else []
    others = "" if report.agents_known else " (other agents may exist: no framework lists them)"
    lines.append(Text.assemble("\n", (report.verdict, VERDICT_STYLES[report.verdict]), (others, QUIET)))
    return Group(*lines)
