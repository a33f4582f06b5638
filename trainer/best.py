"""The best checkpoint by held-out evaluation, for each policy, and when no better one is to be expected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cotune.storage.run_layout import Best, checkpoint_name, read_best, read_metrics, steps_of
from cotune.trainer.checkpoint import write_best
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.run import Run


def judged_figures(held_out: Mapping[str, float], policies: Mapping[str, list[str]], by: str) -> dict[str, float]:
    """What an evaluation says of each policy (by name; `policies` has their roles), as far as it says anything.

    `by` is a figure of the evaluation, the same for all policies; empty for `success`, or else `reward`; `roles` for
    the mean of the rewards that scorers give the policy's own roles.
    """
    if by != "roles":
        figure = held_out.get(by or ("success" if "success" in held_out else "reward"))
        return {} if figure is None else dict.fromkeys(policies, figure)
    found = {}
    for policy, roles in policies.items():
        own = [value for name, value in held_out.items() if "/" in name and name.rpartition("/")[0] in roles]
        if own:
            found[policy] = sum(own) / len(own)
    return found


def note_best(run: Run, held_out: Mapping[str, float], progress: Progress) -> bool:
    """After a step with an evaluation: whether some policy is better than at any earlier one, so that the checkpoint of
    this step is to be kept. Ends the run where none has been for `evaluation.patience` evaluations."""
    config = run.config.evaluation
    if not held_out or not (config.keep_best or config.patience):
        return False
    figures = _figures(run, held_out, run.state.steps)
    if not figures:
        known = ", ".join(name for name in held_out if name not in ("episodes", "failed")) or "none"
        progress.say_once(
            f"evaluation.best_by = {config.best_by!r} is no held-out figure, so no checkpoint is best; known: {known}"
        )
        return False
    here = checkpoint_name(run.state.steps)
    better = {name: Best(here, x) for name, x in figures.items() if name not in run.best or x > run.best[name].figure}
    run.best = {**run.best, **better}
    if config.patience is None or better:
        return bool(better)
    last = max(steps_of(Path(best.checkpoint)) for best in run.best.values())
    since = sum(bool(line["held_out"]) for line in read_metrics(run.folder.path) if line["step"] + 1 > last)
    if since >= config.patience:
        run.ended = f"{since} evaluations in a row were no better than that after step {last}"
    return False


def find_best(run: Run) -> list[str]:
    """Find the best checkpoints of a run that goes on, by metrics.jsonl and the checkpoints that are there.

    Writes `best.json` anew where it names others, and returns what the user should know of those.
    """
    config, folder = run.config.evaluation, run.folder.checkpoints
    if not (config.keep_best or config.patience):
        return []
    found: dict[str, Best] = {}
    for line in read_metrics(run.folder.path):
        here = checkpoint_name(line["step"] + 1)
        if not config.keep_best or (folder / here).is_dir():
            for name, figure in _figures(run, line.get("held_out") or {}, line["step"] + 1).items():
                if name not in found or figure > found[name].figure:
                    found[name] = Best(here, figure)
    run.best = found
    if not config.keep_best:
        return []
    notes, named = [], read_best(folder)
    for name, best in named.items():
        if (folder / best.checkpoint).is_dir() and steps_of(Path(best.checkpoint)) <= run.state.steps:
            found.setdefault(name, best)
            continue
        left = f"the best that is left is {found[name].checkpoint} ({found[name].figure:.3f})" if name in found else ""
        said = f"the best checkpoint of {name} was {best.checkpoint} ({best.figure:.3f}), which is gone"
        notes.append(f"{said}; {left or 'no other was kept'}")
    if found != named:
        write_best(folder, found)
    return notes


def _figures(run: Run, held_out: Mapping[str, float], steps: int) -> dict[str, float]:
    """What the evaluation after so many steps says of each policy that is trained then."""
    roles: dict[str, list[str]] = {}
    for role, policy in run.trained_roles(steps).items():
        roles.setdefault(policy, []).append(role)
    return judged_figures(held_out, roles, run.config.evaluation.best_by)
