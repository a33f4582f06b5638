"""Which role's prompts a search changes next, and the failed runs that show why.

With a reference, the search analyses which role is at fault, as `cotune blame --reference` does, and changes only the
prompts of the roles at fault. Without a reference, it cannot know which role that is. It looks for the calls that lost
failed runs, as `cotune blame --episodes failed` does. It shows these calls to the reflection model, and changes the
roles in turn.
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

ANALYSIS_SHARE = 0.25
"""Share of max_calls, and of max_cost, that the analysis may spend. With the default of 2,000 calls, that is a round of
20 tasks for an application of three roles with a call each."""
SPENT_AS = "blame"
"""The name of the analysis among the roles in the table of calls and costs."""


@dataclass(frozen=True)
class RoleChoice:
    """The parts of prompts that a search changes, and why: `note` is a sentence for people."""

    note: str
    parts: Sequence[PromptPart]
    lost: Sequence[LostEpisode] = ()
    """Failed runs that a single call decided."""


def blame_options(options: ImproveOptions, *, max_calls: int = 1, max_cost: float | None = None) -> BlameOptions:
    """The options of the blame analysis that a search makes, with its limits."""
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
    """Choose which of the `parts` to change, by a blame analysis of the application with the prompts `base`, on the
    tasks to reflect on.

    A search that is continued reads the result of the first analysis, so that it makes the same choice. Raises
    CotuneError subclasses if no model can be reached.
    """
    roles: set[str] = set()
    for part in parts:
        roles.update(part.roles)
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
            reason = "the limits leave no run of the analysis with an outcome"
            return RoleChoice(f"not known, as {reason}; roles are changed in turn", parts)
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
    """Run the blame analysis, which finds the role that loses outcomes, within `ANALYSIS_SHARE` of the limits.

    Returns None if the limits allow no call, or if no run has an outcome.
    """
    # 1. The limits. The runs for the held-out tasks stay reserved, at the mean size of the runs so far.
    options = evaluations.options
    spending = evaluations.spending
    remaining_calls = options.max_calls - spending.calls - spending.reserve * spending.calls_per_episode
    max_calls = int(min(ANALYSIS_SHARE * options.max_calls, remaining_calls))
    max_cost = None
    if options.max_cost is not None:
        remaining_cost = options.max_cost - spending.cost - spending.reserve * spending.cost_per_episode
        max_cost = min(ANALYSIS_SHARE * options.max_cost, remaining_cost)
    if max_calls < 1 or (max_cost is not None and max_cost <= 0):
        return None

    # 2. The analysis. Prompts without an id are the unedited ones of the application.
    app = replace(evaluations.workflow, prompts=base if base.id else None)
    limited_options = blame_options(options, max_calls=max_calls, max_cost=max_cost)
    analysis = await analyse(
        app,
        TasksToAnalyse(draw_tasks(tasks.train, limited_options)),
        limited_options,
        evaluations.store,
        own=evaluations.responder,
        for_search=True,  # calls without a price count as no money, as the report of the search says
        say=say,
    )
    try:
        return analysis.result()
    except (RunError, WorkflowError):
        return None  # These errors are raised here only if no outcome is known.


def _count_spending(result: Blame, store: Store, spending: Spending) -> None:
    """Count the calls, tokens and cost of the analysis, as if it were a role."""
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
    """Choose the parts to change from the result of an analysis: the parts of the roles at fault. All parts are changed
    if the analysis names no role, or if its roles have no part."""
    # Without a reference, an analysis names no role, but it may know the calls that decided failures.
    if not result.references:
        lost = [episode for episode in result.episodes if episode.call is not None]
        return RoleChoice(_note_without_reference(result), parts, lost)
    if not result.at_fault:
        return RoleChoice(f"{result.sentence} Roles are changed in turn.", parts)
    parts_at_fault = [part for part in parts if set(part.roles) & set(result.at_fault)]
    if not parts_at_fault:
        roles = " and ".join(result.at_fault)
        return RoleChoice(f"{result.sentence} No prompt of {roles} can be changed: the others are, in turn.", parts)
    part_names = ", ".join(part.name for part in parts_at_fault)
    return RoleChoice(f"{result.sentence} Changed: only {part_names}.", parts_at_fault)


def _note_without_reference(result: Blame) -> str:
    """The result of an analysis without a reference, in sentences: how much is luck, and which calls decided."""
    sentences = ["not known without a reference (--set blame=openai:NAME); roles are changed in turn."]
    if result.luck is not None:
        sentences.append(f"{result.luck.mean:.0%} of the failures succeed at another try.")
    calls_by_role = Counter(episode.role for episode in result.episodes if episode.call is not None)
    if calls_by_role:
        counts = ", ".join(f"{role} {count}" for role, count in calls_by_role.most_common())
        episodes = plural(len(result.episodes), "failed run")
        sentences.append(f"One call decided {calls_by_role.total()} of {episodes}: {counts}.")
    return " ".join(sentences)


class Turns:
    """Chooses the parts to change next, each as often as any other.

    Without scorers of roles, every second turn changes all parts at once. If only one role changed, its better answers
    would not change the outcome as long as the next role does not use them, and the new text would always be refused.
    """

    def __init__(self, parts: Sequence[PromptPart], *, scored: bool) -> None:
        self._names = [part.name for part in parts]
        self._together = not scored and len(parts) > 1
        self._turn = 0
        self.taken: Counter[str] = Counter()
        """How often each part was changed alone."""

    def next(self) -> list[str]:
        """Return the names of the parts to change next: one part, or in every second turn all of them."""
        self._turn += 1
        is_turn_of_all = self._together and self._turn % 2 == 1
        if is_turn_of_all:
            return list(self._names)
        least_changed = min(self._names, key=lambda name: self.taken[name])
        self.taken[least_changed] += 1
        return [least_changed]
