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
from cotune.tables import BAD, GOOD, QUIET, Grid, cells, grid, plural, scores
from cotune.trainer.before.findings import STYLES, Finding, RoleCheck

Verdict = Literal["trainable", "undecided", "not trainable"]
VERDICT_STYLES: Mapping[Verdict, str] = {"trainable": GOOD, "undecided": STYLES["undecided"], "not trainable": BAD}


class IdleCheck(Part, frozen=True, kw_only=True):
    """A part of the application that made no call."""

    ran: bool
    """Whether it ran and did other work."""


class GroupCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A group that the plan would form: its task and roles, and how many candidates are compared in it."""

    task: str
    roles: tuple[str, ...]
    size: int


class CheckLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a dry run. Raises ConfigError unless each limit is above 0."""

    limit: int = 1
    """Number of tasks: the first ones."""
    calls: int = 64
    """Most calls of a run."""
    timeout: float = 60.0
    """Most seconds of a run."""

    def __post_init__(self) -> None:
        check_bounds(self, "limit", "calls", "timeout")


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a dry run."""

    workflow: str
    tasks: tuple[str, ...]
    """Ids of the tasks that ran."""
    answers: str = "drawn"
    """Who answered: "drawn", a model, "provider" or "records:ADDRESS"."""
    plan: str
    """The plan in a sentence, with the reason for it."""
    runs: int = 1
    """Runs of all tasks."""
    roles: tuple[RoleCheck, ...]
    idle: tuple[IdleCheck, ...] = ()
    """Parts of the application that made no call."""
    unlisted: tuple[str, ...] = ()
    """Roles that no framework lists among the agents of the application. If there are any, there may be other agents,
    which made no call."""
    calls: tuple[CallRecord, ...]
    """The calls without their answers."""
    tokens: Mapping[str, int] = {}
    """Tokens of each call's prompt, by the call's id; empty without a model to be trained."""
    groups: tuple[GroupCheck, ...]
    team: Mapping[str, float]
    """The outcome by component."""
    local: Mapping[str, Mapping[str, tuple[float, float]]]
    """By role, the components of its scorer with their lowest and highest value."""
    left_out: Mapping[str, int]
    """Candidates in no group, by reason."""
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """Not trainable if a finding blocks, undecided if other answers may decide, else trainable."""
        levels = {finding.level for finding in self.findings}
        if "blocks" in levels:
            return "not trainable"
        return "undecided" if "undecided" in levels else "trainable"

    @property
    def trainable(self) -> bool:
        return self.verdict == "trainable"

    def to_json(self) -> str:
        """The report as one JSON object, verdict included."""
        fields = {"verdict": self.verdict, "trainable": self.trainable, **msgspec.to_builtins(self)}
        return msgspec.json.encode(fields).decode()


def render(report: CheckReport) -> Group:
    """The report of `cotune check` for a terminal. It has tables of the roles, of the calls of one run, and of the
    groups that a step would have. Rewards, findings (the worst first) and the verdict follow.
    """
    # 1. What was run, and the tables.
    integrations = ", ".join(dict.fromkeys(call.integration for call in report.calls)) or "nothing"
    head = (
        f"of {report.workflow} on {plural(len(report.tasks), 'task')} ({', '.join(report.tasks)}), "
        f"{plural(report.runs, 'run')}, answers: {report.answers}\n"
        f"{report.plan}\n"
        f"recorded through {integrations}\n"
    )
    lines: list[RenderableType] = [Text.assemble(("dry run ", "bold"), head)]
    lines += [_role_table(report), "", _call_table(report), "", _group_table(report), ""]

    # 2. The rewards, the findings and the verdict.
    lines.append(Text.assemble(("outcome of the runs: ", QUIET), scores(report.team)))
    for role, components in report.local.items():
        ranges = [f"{component} {low:.3g} to {high:.3g}" for component, (low, high) in components.items()]
        lines.append(Text.assemble((f"rewards of {role}: ", QUIET), ", ".join(ranges)))
    if report.left_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items())
        lines.append(Text(f"candidates left out: {reasons}", style=QUIET))
    for finding in sorted(report.findings, key=lambda finding: list(STYLES).index(finding.level)):
        about = f"{finding.about}: " if finding.about else ""
        lines.append(Text.assemble((f"{finding.level} ", STYLES[finding.level]), (about, "bold"), finding.text))
        if finding.remedy:
            lines.append(Text(f"  {finding.remedy}", style=QUIET))
    other_agents = ""
    if len(report.unlisted) == len(report.roles) > 0:
        other_agents = " (other agents may exist: no framework lists them)"
    elif report.unlisted:
        other_agents = f" (other agents may exist: no framework lists {', '.join(report.unlisted)})"
    lines.append(Text.assemble("\n", (report.verdict, VERDICT_STYLES[report.verdict]), (other_agents, QUIET)))
    return Group(*lines)


def _role_table(report: CheckReport) -> Grid:
    """A row per role: its calls, the policy that plays it, and whether it is trained."""
    table = grid("role", "calls>", "policy", "scorer", "trained")
    for role in report.roles:
        policy = f"{role.policy} ({role.kind})"
        if role.policy in (role.role, role.kind):
            policy = role.kind  # Such a name of the policy says nothing new.
        trained = Text("yes", style=GOOD) if role.trained else Text(f"no: {role.reason}", style="yellow")
        table.add_row(*cells((role.role, role.calls, policy, "yes" if role.scorer else "", trained)))
    return table


def _call_table(report: CheckReport) -> Grid:
    """A row per call of a run: the steps whose answers it reads, the tokens of its prompt, and its request."""
    table = grid("step>", "role", "turn>", "reads", "tokens>", "asks for", "status")
    steps = {call.id: call.step for call in report.calls}
    for call in report.calls:
        steps_read = sorted(steps[parent] for parent in call.parents if parent in steps)
        asks = [f"{name} {call.params[name]:g}" for name in ("temperature", "n") if call.params.get(name) is not None]
        if call.streamed:
            asks.append("stream")
        if isinstance(call.params.get("response_format"), Mapping):
            asks.append("JSON")
        if call.tools:
            asks.append("tools")
        reads = ", ".join(str(step) for step in steps_read)
        tokens = report.tokens.get(call.id, "")
        table.add_row(*cells((call.step, call.role, call.turn, reads, tokens, " · ".join(asks), call.status)))
    return table


def _group_table(report: CheckReport) -> Grid:
    """The groups that a training step would have if all episodes were like the runs; equal groups share a row."""
    table = grid("groups>", "of task", "role", "candidates in each>")
    counts = Counter((group.task, ", ".join(group.roles), group.size) for group in report.groups)
    for (task, roles, size), count in counts.items():
        table.add_row(*cells((count, task, roles, size)))
    return table
