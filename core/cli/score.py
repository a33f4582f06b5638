"""`cotune score`: rewards of what was recorded, by the scorers of today, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cotune.episodes.rescore import Rescoring, rescore
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import load_workflow
from cotune.errors import ConfigError
from cotune.judging.ledger import run_folder
from cotune.storage.open_store import open_store
from cotune.tables import grid, plural
from cotune.terminal import tell, terminal

if TYPE_CHECKING:
    from rich.console import Group


def score_run(
    run: str, workflow: str, *, role: str | None = None, phase: str | None = None, write: bool = False
) -> int:
    """Score a run or records file, and show the rewards before and now; return 1 where there is nothing to score, or
    where records were lost. Raises ConfigError, RunError."""
    flow = load_workflow(workflow)
    if not flow.scorers and flow.episode_judge is None:
        remedy = "Add @solve.scorer(role) or @solve.judge."
        raise ConfigError("workflow", workflow, "must be one with a scorer or a judge", remedy)
    if role is not None and role not in flow.scorers:
        raise ConfigError("role", role, f"must be a role with a scorer: {', '.join(sorted(flow.scorers)) or 'none'}")
    path = Path(run).absolute()
    if write and not path.exists():
        raise ConfigError("run", run, "must be a run folder or records file that exists")
    run_folder.set(path if path.is_dir() else path.parent)
    with open_store(path, read_only=not write) as store:
        found = run_sync(rescore(flow, store, phase=phase, role=role, write=write))
        store.flush()
        refused, lost = store.refused, store.lost
    terminal().print(_table(found))
    if refused:
        tell(f"{plural(refused, 'reward')} of groups that were trained on stay as they were")
    if lost:
        tell(f"{lost} records could not be stored")
    if not write:
        tell("nothing was stored: --write does")
    scored = sum(of.candidates for of in found.roles.values())
    return 0 if scored and not lost else 1


def _table(found: Rescoring) -> Group:
    from rich.console import Group
    from rich.text import Text

    table = grid("role", "groups>", "scored>", "failed>", "another is best>", "before", "now")
    for role, of in sorted(found.roles.items()):
        counts = map(str, (of.groups, of.candidates, of.failed, of.others_best))
        table.add_row(role, *counts, _means(of.before, of.had), _means(of.after, of.have))
    said = [f"{count} x {text}" for text, count in found.errors.most_common(5)]
    if found.without_scorer:
        roles = ", ".join(f"{role} ({plural(count, 'call')})" for role, count in sorted(found.without_scorer.items()))
        said.append(f"no scorer: {roles}")
    return Group(table, *map(Text, said))


def _means(sums: Mapping[str, float], counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {sums[name] / counts[name]:.3f}" for name in sorted(counts)) or "-"
