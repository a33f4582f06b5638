"""What a reader of an evaluation must know beside its figures."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from cotune.recording.records import PolicyRef
from cotune.trainer.evaluation.run import Evaluation


def remarks(
    evaluations: Mapping[str, Evaluation],
    roles: Mapping[str, PolicyRef],
    provider_roles: Collection[str],
    others: PolicyRef | None,
) -> Iterator[str]:
    """Modes in which all failed, what is not reported, and the roles that no policy of `roles` played."""
    for label, found in evaluations.items():
        if cause := found.all_failed:
            yield f"All {found.episodes} episodes of {label} failed, most often of: {cause}"
    sound = [found for found in evaluations.values() if found.all_failed is None]
    if sound and all(found.success is None for found in sound):
        yield "No success rate: the workflow returns no `success`, so only its reward is reported."
    played = [found for label, found in evaluations.items() if label != "today"]
    yield from _roles(played, roles, provider_roles, others)
    for label, found in evaluations.items():
        if found.use.uncounted:
            yield f"{label}: {found.use.uncounted} of {found.use.calls} calls report no tokens, and count as none."


def _roles(
    played: Collection[Evaluation],
    roles: Mapping[str, PolicyRef],
    provider_roles: Collection[str],
    others: PolicyRef | None,
) -> Iterator[str]:
    seen = {role for found in played for role in found.roles}
    if any(found.all_failed is None for found in played):
        for role in sorted(set(roles) - seen):
            yield f"Role {role!r} made no call."
    for role in sorted(seen & set(provider_roles)):
        yield f"Role {role!r} was left to the application's own provider."
    who = "the application's own provider" if others is None else "the untrained model"
    for role in sorted({role for found in played for role in found.unlisted}):
        calls = sum(found.unlisted.get(role, 0) for found in played)
        yield f"Role {role!r} has no policy: {who} answered its {calls} calls (other_roles)."
