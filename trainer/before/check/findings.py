"""What a dry run says against training: what blocks it, what will not be trained and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from cotune.algorithms.learning_signal import learns_from, outcome_unused, scorers_unused, unknown_names
from cotune.algorithms.recipes import Recipe
from cotune.errors import CotuneError
from cotune.recording.app_parts import Part
from cotune.records.plans import Plan
from cotune.records.structs import CallRecord
from cotune.sampling.protocol import UNSHAPED
from cotune.tables import plural
from cotune.trainer.before.check.report import Finding, RoleCheck
from cotune.trainer.config.train import TrainConfig

_NAME_THEM = (
    "Name them: --roles-by caller (the function that calls), --roles-by model or a function of yours leave the "
    'application as it is; with cotune.role("name"): ... stands in it. See docs/how-to/roles.md.'
)
_ELSEWHERE = "An answer or a task that leads there shows more (--answer, --limit)."
_RARE = "What calls on some tasks only can be listed under `roles`."


def blocking(error: CotuneError, about: str = "") -> Finding:
    """A finding of an error that training would raise."""
    return Finding("blocks", about, error.cause, error.remedy)


def role_findings(roles: Sequence[RoleCheck], calls: Sequence[CallRecord], plan: Plan) -> Iterator[Finding]:
    """Roles that are not trained, and calls that belong to none."""
    for role in roles:
        if not role.trained:
            text, remedy = f"not trained: {role.reason}", ""
            if role.reason == "no scorer":
                remedy = f'Add @workflow.scorer("{role.role}"), or use --plan independent.'
            yield Finding("warns" if remedy else "note", role.role, text, remedy)
    outside = [call for call in calls if call.role == "app"]
    if outside:
        text = f"Calls made outside any agent or node share the role `app`: {len(outside)}."
        yield Finding("warns", "app", text, _NAME_THEM)


def learning_findings(
    roles: Sequence[RoleCheck],
    local: Mapping[str, Collection[str]],
    outcome: Collection[str],
    recipe: Recipe,
    listed: Collection[str] = (),
) -> Iterator[Finding]:
    """What each trained role learns from, what of it is misspelt, and a reward of the workflow's that trains nobody.
    `listed` roles need not have called."""
    own = {role.role: local.get(role.role, ()) for role in roles if role.trained}
    for role, text in learns_from(own, outcome, recipe).items():
        yield Finding("note", "rewards", f"{role} {text}.")
    errors, notes = unknown_names(recipe, local, outcome, [*listed, *(role.role for role in roles)])
    yield from (blocking(error, "rewards") for error in errors)
    yield from (Finding("warns", "rewards", note) for note in notes)
    for text, remedy in (outcome_unused(own, outcome, recipe), scorers_unused(own, recipe)):
        if text:
            yield Finding("warns", "rewards", text, remedy)


def idle_findings(
    idle: Sequence[tuple[Part, bool]], calls: Sequence[CallRecord], known: Sequence[Part]
) -> Iterator[Finding]:
    """Parts of the application that never called: those that never ran, and those that work without a model. And
    whether there may be agents that no framework lists."""
    if not calls:
        return
    missed: dict[tuple[str, str, bool], list[str]] = {}
    for part, ran in idle:
        if not ran or part.kind in ("member", "agent"):
            missed.setdefault((part.kind, part.of, part.kind in ("member", "agent")), []).append(part.role)
    for (kind, of, calls_model), roles in missed.items():
        how = "never called" if calls_model else "never ran"
        text = f"{how} with these made-up answers ({plural(len(roles), kind)} of {of})."
        if not calls_model:
            text += " Whether a model is called there was not seen."
        yield Finding("warns", ", ".join(roles), text, f"{_ELSEWHERE} {_RARE}")
    quiet = [part.role for part, ran in idle if ran and part.kind not in ("member", "agent")]
    if quiet:
        yield Finding("note", ", ".join(quiet), "ran without a call of its own.")
    listed = {part.role for part in known}
    teams = tuple(f"{part.of}/" for part in known if part.kind == "member")
    unlisted = dict.fromkeys(call.role for call in calls if call.role not in listed and not call.role.startswith(teams))
    if unlisted:
        names = ", ".join(unlisted)
        text = f"roles are those that called: cotune knows {names} only by a call, so another may be missing."
        yield Finding("note", "", text, _RARE)


def call_findings(
    calls: Sequence[CallRecord], roles: Sequence[RoleCheck], plan: Plan, config: TrainConfig
) -> Iterator[Finding]:
    """What calls ask for that training does otherwise, and calls that failed."""
    for checked in roles:
        role = checked.role
        own = [call for call in calls if call.role == role]
        yield from _failures(role, own)
        if checked.kind == "provider":
            continue
        n = max(asked if isinstance(asked := call.params.get("n"), int) else 1 for call in own)
        if n > 1 and checked.trained:
            kept = f"{max(n, plan.k)} are drawn and compared" if plan.kind == "tree" else "only the first is trained"
            yield Finding("warns", role, f"asks for n = {n} choices; {kept}.")
        asked = sorted({float(t) for call in own if (t := call.params.get("temperature")) is not None})
        if asked and asked != [config.sampling.temperature]:
            said = ", ".join(f"{t:g}" for t in asked)
            text = f"asks for temperature {said}; training samples at {config.sampling.temperature:g}."
            yield Finding("note", role, text)
        for name, plain in UNSHAPED.items():
            values = sorted({str(value) for call in own if (value := call.params.get(name)) not in (None, plain)})
            if values:
                text = f"asks for {name} {', '.join(values)}; training samples without it."
                yield Finding("warns", role, text)
        seeds = sorted({str(s) for call in own if (s := call.params.get("seed")) is not None})
        if seeds:
            text = f"asks for seed {', '.join(seeds)}; training and evaluation mix it into a seed of each call's own."
            yield Finding("note", role, text)
        if plan.kind == "tree" and any(call.streamed and len(call.candidates) > 1 for call in own):
            text = f"streams; with {plan.k} candidates per call the answer comes at once, when one is chosen."
            yield Finding("note", role, text)


def _failures(role: str, calls: Sequence[CallRecord]) -> Iterator[Finding]:
    failed = [call for call in calls if call.status != "ok"]
    reasons = Counter(f"{call.status}: {call.error}" for call in failed)
    for reason, count in reasons.items():
        yield Finding("warns", role, f"{count} of {len(calls)} calls are not trained on ({reason}).")
    errors = Counter(call.error for call in calls if call.status == "ok" and call.error)
    for error, count in errors.items():
        yield Finding("warns", role, f"its scorer failed on {count} of {len(calls)} calls: {error}")
