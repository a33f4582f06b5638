"""Which role's prompts a search changes next, and the failed runs that show why.

With a reference the search asks which role is at fault, as `cotune blame --reference` does, and changes only the
prompts of the roles that it names. Without one nobody can say who is at fault: it looks for the calls that lost failed
runs, as `cotune blame --episodes failed` does, shows them to the reflection model, and changes the roles in turn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cotune.config.prompts import FORKS, OFF
from cotune.errors import RunError, WorkflowError
from cotune.prompts.edits import PromptPart, Prompts
from cotune.reading.blame import FORK, FRESH_FORK, Blame, LostEpisode, shown_money
from cotune.records.structs import JUDGING
from cotune.storage.protocol import Store
from cotune.storage.typed_json import read_typed
from cotune.tables import plural
from cotune.trainer.blame.analysis import analyse
from cotune.trainer.blame.arms import arm_of
from cotune.trainer.blame.options import BlameOptions
from cotune.trainer.blame.references import read_references
from cotune.trainer.blame.tasks import TasksToAnalyse, draw_tasks
from cotune.trainer.prompts.evaluations import Evaluations
from cotune.trainer.prompts.options import ImproveOptions, PromptRun
from cotune.trainer.prompts.spending import Spending, Spent
from cotune.trainer.prompts.tasks import SearchTasks
from cotune.trainer.run.run_folder import write_atomically

SHARE = 0.25
"""Share of max_calls, and of max_cost, that the analysis may spend. With the default of 2,000 calls, that is a round of
20 tasks for an application of three roles with a call each."""
SPENT_AS = "blame"
"""The row of the analysis in the table of what a search has spent."""


@dataclass(frozen=True)
class RoleChoice:
    """The parts of prompts that a search changes, and why: `note` is a sentence for people."""

    note: str
    parts: Sequence[PromptPart]
    lost: Sequence[LostEpisode] = ()
    """Failed runs that a single call decided."""


def blame_options(options: ImproveOptions, *, max_calls: int = 1, max_cost: float | None = None) -> BlameOptions:
    """The options of the analysis of a search."""
    by_forks = options.blame == FORKS
    return BlameOptions(
        references=() if by_forks else (options.blame,),
        episodes="failed" if by_forks else None,
        max_calls=max_calls,
        max_cost=max_cost,
        prices=options.prices,
        max_tokens=options.sampling.max_tokens,
        concurrency=options.concurrency,
        timeout=options.episode_timeout,
        seed=options.seed,
    )


def check_reference(options: ImproveOptions) -> None:
    """Raise ConfigError for a reference that cannot be used, before anything is spent."""
    if options.blame not in (FORKS, OFF):
        read_references(blame_options(options))


async def choose_role(
    evaluations: Evaluations,
    base: Prompts,
    parts: Sequence[PromptPart],
    tasks: SearchTasks,
    folder: PromptRun,
    say: Callable[[str], None],
) -> RoleChoice:
    """Find the `parts` to change, by an analysis of the tasks to reflect on with the prompts `base`.

    A search that continues reads the result of the first analysis, so that it takes the same way again. Raises
    CotuneError subclasses if no model can be reached.
    """
    roles = list(dict.fromkeys(role for part in parts for role in part.roles))
    options = evaluations.options
    if len(roles) < 2:
        return RoleChoice("one role has prompts", parts)
    if options.blame == OFF:
        return RoleChoice("not asked (blame = off); roles are changed in turn", parts)

    if folder.blame.exists():
        result = read_typed(folder.blame, Blame, "Begin a new search, with another --out.")
    else:
        say("running alternatives, to find the role to change ...")
        new_result = await _run_analysis(evaluations, base, tasks, say)
        if new_result is None:
            why = "the limits leave no run of the analysis with an outcome"
            return RoleChoice(f"not known, as {why}; roles are changed in turn", parts)
        result = new_result
        write_atomically(folder.blame, json.dumps(result.to_json(), indent=2, ensure_ascii=False).encode())
    _count_spending(result, evaluations.store, evaluations.spending)
    for note in result.notes:
        say(note)
    choice = _choose_parts(result, parts)
    if result.ended:
        spent = plural(result.calls, "call")
        if options.max_cost is not None and result.cost is not None:
            spent += f" and {shown_money(result.cost)} of money"
        choice = replace(choice, note=f"{choice.note} The analysis stopped at its share of the limits, after {spent}.")
    return choice


async def _run_analysis(
    evaluations: Evaluations, base: Prompts, tasks: SearchTasks, say: Callable[[str], None]
) -> Blame | None:
    """Run the analysis within its share of the limits; None if these allow no call, or no run has an outcome."""
    options = evaluations.options
    spending = evaluations.spending
    # The runs for the held-out tasks stay reserved, at the mean size of the runs so far.
    max_calls = min(
        SHARE * options.max_calls, options.max_calls - spending.calls - spending.reserve * spending.calls_per_episode
    )
    max_cost = None
    if options.max_cost is not None:
        left = options.max_cost - spending.cost - spending.reserve * spending.cost_per_episode
        max_cost = min(SHARE * options.max_cost, left)
    if max_calls < 1 or (max_cost is not None and max_cost <= 0):
        return None

    limited = blame_options(options, max_calls=int(max_calls), max_cost=max_cost)
    app = replace(evaluations.workflow, prompts=base if base.id else None)
    drawn = TasksToAnalyse(draw_tasks(tasks.train, limited))
    # A search counts calls without a price as no money, and says so in its report.
    analysis = await analyse(
        app, drawn, limited, evaluations.store, own=evaluations.responder, for_search=True, say=say
    )
    try:
        return analysis.result()
    except (RunError, WorkflowError):  # raised here only if no outcome is known
        return None


def _count_spending(result: Blame, store: Store, spending: Spending) -> None:
    """Add what the analysis has spent."""
    spent = Spent(calls=result.calls, cost=result.cost or 0.0)
    for episode in store.episodes():
        # Only an analysis has episodes of judging: the search itself records no calls of judges.
        if arm_of(episode.phase) is None and episode.phase not in (FORK, FRESH_FORK, JUDGING):
            continue
        for call in store.calls(episode.id, lean=True):
            if call.replayed is None:
                spent.prompt_tokens += call.prompt_length
                spent.completion_tokens += call.answer_length
    spending.by_role[SPENT_AS] = spent


def _choose_parts(result: Blame, parts: Sequence[PromptPart]) -> RoleChoice:
    """Choose the parts to change from an analysis: the parts of the roles at fault, or all if it names none or they
    have none."""
    if not result.references:
        return RoleChoice(_without_reference(result), parts, [one for one in result.episodes if one.call is not None])
    if not result.at_fault:
        return RoleChoice(f"{result.sentence} Roles are changed in turn.", parts)
    at_fault = [part for part in parts if set(part.roles) & set(result.at_fault)]
    if not at_fault:
        names = " and ".join(result.at_fault)
        return RoleChoice(f"{result.sentence} No prompt of {names} can be changed: the others are, in turn.", parts)
    names = ", ".join(part.name for part in at_fault)
    return RoleChoice(f"{result.sentence} Changed: only {names}.", at_fault)


def _without_reference(result: Blame) -> str:
    """What is known without a reference: how much is luck, and which calls decided."""
    sentences = ["not known without a reference (--set blame=openai:NAME); roles are changed in turn."]
    if result.luck is not None:
        sentences.append(f"{result.luck.mean:.0%} of the failures succeed at another try.")
    decisive = Counter(one.role for one in result.episodes if one.call is not None)
    if decisive:
        by_role = ", ".join(f"{role} {count}" for role, count in decisive.most_common())
        episodes = plural(len(result.episodes), "failed run")
        sentences.append(f"One call decided {decisive.total()} of {episodes}: {by_role}.")
    return " ".join(sentences)


class Turns:
    """Chooses the parts to change next, each as often as any other.

    Without scorers of roles, every second turn changes all parts. A better answer of one role changes no outcome as
    long as the next role does not use it, and would always be refused.
    """

    def __init__(self, parts: Sequence[PromptPart], *, scored: bool) -> None:
        self._names = [part.name for part in parts]
        self._together = not scored and len(parts) > 1
        self._turn = 0
        self.taken: Counter[str] = Counter()

    def next(self) -> list[str]:
        """Return the names of the parts to change next."""
        self._turn += 1
        if self._together and self._turn % 2:
            return list(self._names)
        chosen = min(self._names, key=lambda name: self.taken[name])
        self.taken[chosen] += 1
        return [chosen]
