"""What a reader of an evaluation must know beside its figures."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from cotune.trainer.evaluation.run import Evaluation, Players


def remarks(evaluations: Mapping[str, Evaluation], players: Players) -> Iterator[str]:
    """Modes in which all failed, what is not reported, and the roles that no policy of the players played."""
    for label, found in evaluations.items():
        if cause := found.all_failed:
            yield f"All {found.episodes} episodes of {label} failed, most often of: {cause}"
    sound = [found for found in evaluations.values() if found.all_failed is None]
    if sound and all(found.success is None for found in sound):
        yield "No success rate: the workflow returns no `success`, so only its reward is reported."
    played = [found for label, found in evaluations.items() if label != "today"]
    yield from _roles(played, players)
    for label, found in evaluations.items():
        if found.use.uncounted:
            yield f"{label}: {found.use.uncounted} of {found.use.calls} calls report no tokens, and count as none."


def _roles(played: Collection[Evaluation], players: Players) -> Iterator[str]:
    seen = {role for found in played for role in found.roles}
    if any(found.all_failed is None for found in played):
        for role in sorted(set(players.roles) - seen):
            yield f"Role {role!r} made no call."
    for role in sorted(seen & set(players.provider_roles)):
        yield f"Role {role!r} was left to the application's own provider."
    who = "the application's own provider" if players.others is None else "the untrained model"
    for role in sorted({role for found in played for role in found.unlisted}):
        calls = sum(found.unlisted.get(role, 0) for found in played)
        yield f"Role {role!r} has no policy: {who} answered its {calls} calls (other_roles)."
