"""The report of `cotune check`, as data and as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from cotune.recording.app_parts import Part
from cotune.tables import BAD, GOOD, QUIET, cells, grid, plural, scores
from cotune.trainer.before.findings import STYLES, Finding, RoleCheck

Verdict = Literal["trainable", "undecided", "not trainable"]


_SPENT = {
    "loading": "loading the application",
    "reading": "reading the tokenizers",
    "running": "running the application",
}


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """A framework that the application has loaded. `supported` is the range of versions that can be recorded."""

    name: str
    version: str
    supported: str
    ok: bool


class IdleCheck(Part, frozen=True, kw_only=True):
    """A part of the application that never called. `ran`: it did other work."""

    ran: bool


class CallCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the dry run. `parents` are steps; `tokens` needs a model; temperature and n are the request's."""

    task: str
    step: int
    role: str
    turn: int
    parents: tuple[int, ...]
    characters: int
    tokens: int | None
    model: str
    temperature: float | None
    n: int
    stream: bool
    tools: tuple[str, ...]
    structured: bool
    status: str
    error: str | None
    integration: str


class GroupCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A group that the plan would form: its task, roles and turns, and how many candidates are compared in it."""

    task: str
    roles: tuple[str, ...]
    turns: tuple[int, ...]
    size: int


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a dry run. `local` holds the lowest and the highest value of each component by role."""

    workflow: str
    tasks: tuple[str, ...]
    answers: str = "drawn"
    """Who answered: "drawn", a model, "provider" or "records:ADDRESS"."""
    seconds: float
    spent: Mapping[str, float] = {}
    """Seconds of loading the application, reading the models' tokenizers, and running the application."""
    plan: str
    frameworks: tuple[Framework, ...]
    runs: int = 1
    """Runs of the tasks, all together."""
    roles: tuple[RoleCheck, ...]
    idle: tuple[IdleCheck, ...] = ()
    agents_known: bool = True
    """Whether frameworks list all roles: otherwise other agents may exist."""
    calls: tuple[CallCheck, ...]
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
        head = {"verdict": self.verdict, "trainable": self.trainable}
        return msgspec.json.encode({**head, **msgspec.to_builtins(self)}).decode()


def render(report: CheckReport) -> Group:
    """The report for a terminal."""
    return Group(*_parts(report))


def _parts(report: CheckReport) -> Iterable[RenderableType]:
    yield Text.assemble(
        ("dry run ", "bold"),
        f"of {report.workflow} on {plural(len(report.tasks), 'task')} ({', '.join(report.tasks)}), ",
        f"{plural(report.runs, 'run')}, answers: {report.answers}\n{report.seconds:.1f} s: ",
        ", ".join(f"{_SPENT[what]} {seconds:.1f} s" for what, seconds in report.spent.items() if seconds >= 0.05),
        f"\n{report.plan}\n",
    )
    yield _frameworks(report)
    yield ""
    yield from _roles(report.roles)
    yield from _calls(report.calls)
    yield from _groups(report.groups)
    yield from _rewards(report)
    yield from _findings(report.findings)
    style = {"trainable": GOOD, "undecided": STYLES["undecided"]}.get(report.verdict, BAD)
    others = "" if report.agents_known else " (other agents may exist: no framework lists them)"
    yield Text.assemble(("\n", ""), (report.verdict, style), (others, QUIET))


def _frameworks(report: CheckReport) -> Text:
    line = Text("recorded through ", style=QUIET)
    if not report.frameworks and report.calls:
        return line.append("cotune's gateway", style=GOOD)
    if not report.frameworks:
        return Text("no framework that cotune records is loaded", style=BAD)
    for i, one in enumerate(report.frameworks):
        line.append(", " if i else "").append(f"{one.name} {one.version}", style=GOOD if one.ok else BAD)
        line.append("" if one.ok else f" (supported: {one.supported})", style=BAD)
    return line


def _roles(roles: Sequence[RoleCheck]) -> Iterable[RenderableType]:
    table = grid("role", "calls>", "policy", "scorer", "trained")
    for one in roles:
        trained = Text("yes", style=GOOD) if one.trained else Text(f"no: {one.reason}", style="yellow")
        policy = one.kind if one.policy in (one.role, one.kind) else f"{one.policy} ({one.kind})"
        table.add_row(*cells((one.role, one.calls, policy, "yes" if one.scorer else "", trained)))
    yield table
    yield ""


def _calls(calls: Sequence[CallCheck]) -> Iterable[RenderableType]:
    table = grid("step>", "role", "turn>", "reads", "characters>", "tokens>", "asks for")
    for call in calls:
        reads = _spans(call.parents)
        tokens = "" if call.tokens is None else f"{call.tokens:,}"
        table.add_row(*cells((call.step, call.role, call.turn, reads, f"{call.characters:,}", tokens, _asks(call))))
    yield table
    yield ""


def _spans(steps: Sequence[int]) -> str:
    """Steps in order, neighbours joined: 0-3, 5."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def _asks(call: CallCheck) -> Text:
    parts = [] if call.temperature is None else [f"temperature {call.temperature:g}"]
    parts += [f"n {call.n}"] if call.n > 1 else []
    parts += ["stream"] if call.stream else []
    parts += ["JSON"] if call.structured else []
    parts += [f"tools {', '.join(call.tools)}"] if call.tools else []
    line = Text(" · ".join(parts))
    if call.status != "ok":
        line.append(" · " if parts else "").append(call.status, style=BAD)
    return line


def _groups(groups: Sequence[GroupCheck]) -> Iterable[RenderableType]:
    """Groups of the same roles and size on one line."""
    alike: dict[tuple[str, tuple[str, ...], int], list[GroupCheck]] = {}
    for one in groups:
        alike.setdefault((one.task, one.roles, one.size), []).append(one)
    if not alike:
        return
    table = grid("groups>", "of task", "role", "turns", "candidates in each>")
    for (task, roles, size), found in alike.items():
        turns = sorted({turn for one in found for turn in one.turns})
        span = f"{turns[0]} to {turns[-1]}" if len(turns) > 1 else turns[0]
        table.add_row(*cells((len(found), task, ", ".join(roles), span, size)))
    yield table
    yield ""


def _rewards(report: CheckReport) -> Iterable[RenderableType]:
    yield Text.assemble(("outcome of the runs: ", QUIET), scores(report.team) if report.team else "none")
    for role, named in report.local.items():
        line = Text(f"rewards of {role}: ", style=QUIET)
        shown = (
            f"{name} {low:.3g}" + (f" to {high:.3g}" if high != low else "") for name, (low, high) in named.items()
        )
        yield line.append(", ".join(shown), style="default")
    if report.left_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items())
        yield Text(f"candidates left out: {reasons}", style=QUIET)


def _findings(findings: Sequence[Finding]) -> Iterable[RenderableType]:
    for level in STYLES:
        for one in findings:
            if one.level == level:
                head = (f"\n{level} ", STYLES[level])
                yield Text.assemble(head, (f"{one.about}: " if one.about else "", "bold"), one.text, end="")
                yield Text(f"\n  {one.remedy}" if one.remedy else "", style=QUIET, end="")
    yield ""
