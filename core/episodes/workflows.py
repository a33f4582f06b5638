"""Workflows: the user's application as one callable, with scorers for its roles."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from cotune.errors import WorkflowError
from cotune.judging.episodes import EpisodeJudge
from cotune.prompts.edits import Prompts
from cotune.prompts.file import read_prompts
from cotune.recording.context import current_episode
from cotune.recording.hooks import GraphRunner, hooks
from cotune.recording.redaction import Redaction, Redactor, check_redactor, load_redactor
from cotune.recording.roles import CALLER, MODEL, RolesFunction, roles_function
from cotune.runtime.user_code import context_value
from cotune.sampling.scoring import LONGEST, AnyScorer, Bounds, Feedback, GroupScorer, OfGroup, OfOne, Reward, Scorer
from cotune.user_objects import load_object, takes

Outcome = Reward | Feedback | Mapping[str, float | None] | Awaitable[Reward | Feedback | Mapping[str, float | None]]
P = ParamSpec("P")
R = TypeVar("R", bound=Outcome)
R_co = TypeVar("R_co", bound=Outcome, covariant=True)
ScorerT = TypeVar("ScorerT", bound=Scorer)
GroupScorerT = TypeVar("GroupScorerT", bound=GroupScorer)
JudgeT = TypeVar("JudgeT", bound=EpisodeJudge)
RedactorT = TypeVar("RedactorT", bound=Redactor)

_ACCEPTED = "a function of a task, or a compiled LangGraph graph, AutoGen team or Crew with inputs= and reward="
_ABSENT: Any = object()
_EXAMPLE = "@cotune.workflow\nasync def solve(task): return float(...)"


@dataclass(eq=False)
class Workflow:
    """A callable of a task's input that returns its reward, and the scorers of its roles."""

    name: str
    fn: Callable[[Any], Any]
    scorers: dict[str, AnyScorer] = field(default_factory=dict)
    redactors: list[Redactor] = field(default_factory=list)
    keep_token_ids: bool = False
    """Whether token ids of redacted messages are stored."""
    roles: RolesFunction | None = None
    """Names the roles of calls that `cotune.role` does not name."""
    prompts: Prompts | None = None
    """Edits the prompts of its calls."""
    episode_judge: EpisodeJudge | None = None
    """Compares the finished episodes of a task and gives each its outcome."""
    variable: str = "solve"
    """The variable of the application that holds the workflow, for remedies such as `@solve.scorer(role)`. It differs
    from `name` if the workflow is a graph, team, crew or flow."""

    @property
    def compares(self) -> bool:
        """Whether rewards come from comparisons, so that the workflow may return None."""
        return self.episode_judge is not None or any(isinstance(scorer, OfGroup) for scorer in self.scorers.values())

    @property
    def bounds(self) -> dict[str, Bounds]:
        """The bounds that scorers declare, by role. Roles without declared bounds are left out."""
        declared = {}
        for role, scorer in self.scorers.items():
            if isinstance(scorer, OfOne | OfGroup) and scorer.bounds is not None:
                declared[role] = scorer.bounds
        return declared

    @property
    def redaction(self) -> Redaction | None:
        """Changes values that are recorded outside of an episode; None without redactors."""
        return Redaction(self.redactors, self.keep_token_ids) if self.redactors else None

    def judge(self, fn: JudgeT) -> JudgeT:
        """Decorate a function that compares the finished episodes of one task, `(episodes, task)`, and returns the
        outcome of each: a number (the reward `team`), a dict of named numbers, or None; sync or async.

        With a judge, the workflow may return None. Raises WorkflowError for a second judge or another signature.
        """
        if self.episode_judge is not None:
            raise WorkflowError(f"The workflow {self.name!r} has two judges.", "Remove one of them.")
        if not takes(fn, 2):
            remedy = f"Define it as: def {_name(fn)}(episodes, task) -> list[float]."
            raise WorkflowError(f"The judge {_name(fn)} does not take two arguments.", remedy)
        self.episode_judge = fn
        return fn

    def redactor(self, fn: RedactorT) -> RedactorT:
        """Decorate a function that gets each message before it is stored and returns the message to store.

        Several redactors apply in order. Raises WorkflowError unless it is a plain function of one argument.
        """
        check_redactor(fn)
        self.redactors.append(fn)
        return fn

    def redacted(self, redact: str | None, *, keep_token_ids: bool = False) -> Workflow:
        """This workflow with an additional redactor, `module:function` (if any). Raises ConfigError if it does not
        exist."""
        redactors = [*self.redactors]
        if redact:
            redactors.append(load_redactor(redact))
        return replace(self, redactors=redactors, keep_token_ids=keep_token_ids or self.keep_token_ids)

    def named_by(self, roles: str | None) -> Workflow:
        """This workflow with roles from `module:function`, `file.py:function` or `caller` (if any) instead of its own.

        Raises ConfigError if it does not exist, WorkflowError if it is not a roles function.
        """
        return replace(self, roles=load_roles(roles)) if roles else self

    def prompted(self, prompts: Prompts | str | Path | None) -> Workflow:
        """This workflow with edited prompts (if any): the prompts themselves, their file, or a folder with the file.

        Raises ConfigError for a file that cannot be used.
        """
        if prompts is None or prompts == "":
            return self
        if not isinstance(prompts, Prompts):
            prompts = read_prompts(prompts)
        return replace(self, prompts=prompts)

    @overload
    def scorer(
        self, role: str, *, timeout: float = ..., bounds: Bounds | None = ...
    ) -> Callable[[ScorerT], ScorerT]: ...
    @overload
    def scorer(
        self, role: str, *, group: Literal[True], timeout: float = ..., bounds: Bounds | None = ...
    ) -> Callable[[GroupScorerT], GroupScorerT]: ...
    def scorer(
        self, role: str, *, group: bool = False, timeout: float = LONGEST, bounds: Bounds | None = None
    ) -> Callable[[Any], Any]:
        """Decorate the scorer of `role`, a function that rewards the candidates of its calls; sync or async.

        It is called with `(candidate, call, task)`, and returns a number (the component `local`) or a dict of named
        numbers. With `group`, it is called once for all candidates of a call with `(candidates, call, task)`, and
        returns a list with a reward for each candidate, or None for a candidate without one.

        A candidate that is not rewarded within `timeout` seconds is left out; with `group`, this is the time for each
        candidate. `bounds` are the lowest and the highest number that it may return: intervals stay inside them, and a
        number outside is an error of the scorer.

        Raises WorkflowError for a second scorer of a role, another signature, a time-out that is not positive, or
        bounds that are not two numbers in order.
        """
        if not timeout > 0:
            cause = f"The scorer of role {role!r} has timeout = {timeout!r}, which is not a positive number."
            raise WorkflowError(cause, "Pass the maximum seconds for a candidate, for example 120.")
        if bounds is not None:
            bounds = _checked_bounds(role, bounds)
        signature = "(candidate, call, task) -> float"
        if group:
            signature = "(candidates, call, task) -> list[float]"

        def add(fn: Any) -> Any:
            """Register `fn` as the scorer of the role, and return it unchanged."""
            if role in self.scorers:
                raise WorkflowError(f"Role {role!r} of workflow {self.name!r} has two scorers.", "Remove one of them.")
            if not takes(fn, 3):
                name = getattr(fn, "__name__", repr(fn))
                cause = f"The scorer {name} of role {role!r} does not take three arguments."
                raise WorkflowError(cause, f"Define it as: def {name}{signature}.")
            self.scorers[role] = OfGroup(fn, timeout, bounds) if group else OfOne(fn, timeout, bounds)
            return fn

        return add


class WorkflowFunction(Protocol[P, R_co]):
    """The result of `cotune.workflow`: the function itself, with four additional attributes."""

    cotune: Workflow

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def scorer(
        self, role: str, *, timeout: float = ..., bounds: Bounds | None = ...
    ) -> Callable[[ScorerT], ScorerT]: ...
    @overload
    def scorer(
        self, role: str, *, group: Literal[True], timeout: float = ..., bounds: Bounds | None = ...
    ) -> Callable[[GroupScorerT], GroupScorerT]: ...

    def judge(self, fn: JudgeT) -> JudgeT: ...

    def redactor(self, fn: RedactorT) -> RedactorT: ...


WorkflowSource = WorkflowFunction[..., Outcome] | Workflow | str
"""A workflow as an argument: the workflow itself, or its name, `module:name` or `file.py:name`."""


@overload
def workflow(*, roles: RolesFunction | str | None = ...) -> Callable[[Callable[P, R]], WorkflowFunction[P, R]]: ...
@overload
def workflow(app: Callable[P, R], *, roles: RolesFunction | str | None = ...) -> WorkflowFunction[P, R]: ...
@overload
def workflow(
    app: object,
    *,
    inputs: Callable[[Any], Any] | None = ...,
    reward: Callable[[Any, Any], Outcome],
    roles: RolesFunction | str | None = ...,
) -> WorkflowFunction[[Any], Awaitable[Reward]]: ...
def workflow(
    app: Any = _ABSENT,
    *,
    inputs: Callable[[Any], Any] | None = None,
    reward: Callable[[Any, Any], Any] | None = None,
    roles: RolesFunction | str | None = None,
) -> Any:
    """Turn a function of a task, or a compiled LangGraph graph, into a workflow. Also a decorator.

    A function (sync or async) is returned unchanged, with `.scorer`, `.judge`, `.redactor` and `.cotune` attached: it
    behaves as before. For a graph, `inputs(task)` returns the graph's input (by default the task itself) and
    `reward(state, task)` the outcome from its final state. An outcome is a number (the reward `team`), a bool (the
    reward `team` and the metric `success`), or a dict of named numbers. `roles` names the role of each call: a function
    of a CallRequest, or `"caller"` for the name of the application's function that makes the call. Raises WorkflowError
    for anything else.

    ```python
    @cotune.workflow
    async def solve(task):
        state = await graph.ainvoke({"question": task["question"]})
        return state["answer"] == task["answer"]


    @solve.scorer("tester")
    def runs(candidate, call, task):
        return float("assert" in candidate.text)
    ```
    """
    names_role = roles_function(roles)
    if app is _ABSENT:
        return partial(workflow, inputs=inputs, reward=reward, roles=roles)
    for make_runner in hooks.runners:
        runner = make_runner(app)
        if runner is not None:
            return _attach(_of_graph(runner, inputs, reward), _name_of_graph(app), names_role)
    if not callable(app) or isinstance(app, type):
        raise WorkflowError(f"{app!r} is not a workflow.", f"Give {_ACCEPTED}. For example: {_EXAMPLE}")
    if inputs is not None or reward is not None:
        raise WorkflowError("A function takes no inputs= or reward=.", "Return the reward from the function.")
    if not takes(app, 1):
        remedy = "Take the task's input as the only required argument."
        raise WorkflowError(f"The workflow {_name(app)} cannot be called with one argument.", remedy)
    return _attach(app, _name(app), names_role, variable=_name(app))


def workflow_of(obj: object) -> Workflow:
    """The Workflow of `obj`: a function that `cotune.workflow` has decorated, the name of one (`module:name`), or a
    Workflow itself. Raises WorkflowError for anything else, and the errors of `load_workflow`."""
    if isinstance(obj, str):
        return load_workflow(obj)
    if isinstance(obj, Workflow):
        return obj
    attached = getattr(obj, "cotune", None)
    if isinstance(attached, Workflow):
        return attached
    raise WorkflowError(f"{obj!r} is not a workflow.", "Decorate the function with @cotune.workflow.")


def load_workflow(spec: str) -> Workflow:
    """Import `package.module:name` or `path/to/file.py:name`, from sys.path or the current folder.

    Raises ConfigError for a module, file or name that does not exist or fails to import, WorkflowError for one that is
    not a workflow.
    """
    remedy = "Decorate a function in {source} with @cotune.workflow."

    def is_workflow(value: Any) -> bool:
        return isinstance(getattr(value, "cotune", None), Workflow)

    flow = workflow_of(
        load_object("app", spec, "cotune train app:solve", kind="workflows", is_wanted=is_workflow, remedy=remedy)
    )
    flow.variable = spec.rpartition(":")[2]
    return flow


def load_roles(spec: str) -> RolesFunction:
    """Import a roles function: `package.module:name`, `path/to/file.py:name`, `caller` or `model`.

    Raises ConfigError if it does not exist, WorkflowError if it is not a roles function.
    """
    if spec in (CALLER, MODEL):
        return cast(RolesFunction, roles_function(spec))
    function = load_object("roles_by", spec, "app:who, caller or model")
    return cast(RolesFunction, roles_function(function))


def _name_of_graph(app: object) -> str:
    """The name of a graph, team, crew or flow. A flow is a class, which has a name; without one it is `graph`."""
    name = getattr(app, "name", None)
    if isinstance(name, str) and name:
        return name
    return app.__name__ if isinstance(app, type) else "graph"


def _attach(fn: Any, name: str, roles: RolesFunction | None, variable: str = "solve") -> Any:
    """Attach a new workflow to the function that runs it."""
    flow = Workflow(name, fn, roles=roles, variable=variable)
    try:
        fn.cotune = flow
        fn.scorer = flow.scorer
        fn.judge = flow.judge
        fn.redactor = flow.redactor
    except AttributeError:
        raise WorkflowError(
            f"{fn!r} cannot have attributes, which a workflow needs.", f"Wrap it in a function. For example: {_EXAMPLE}"
        ) from None
    return fn


def _of_graph(
    runner: GraphRunner, inputs: Callable[[Any], Any] | None, reward: Callable[[Any, Any], Any] | None
) -> Callable[[Any], Awaitable[Any]]:
    """The function of a workflow that runs a graph, team or crew and rewards its final state."""
    if reward is None:
        raise WorkflowError(
            "A graph needs reward=, and so does a team or crew.",
            "Pass reward=fn(state, task), which returns a number or a dict of named numbers.",
        )

    async def run(task: Any) -> Any:
        graph_input = inputs(task) if inputs else task
        state = await runner(graph_input)
        # Calls of the reward function, for example of a judge, are not part of the episode.
        with context_value(current_episode, None):
            outcome = reward(state, task)
            return await outcome if inspect.isawaitable(outcome) else outcome

    return run


def _checked_bounds(role: str, bounds: Any) -> Bounds:
    """The declared bounds of a scorer as floats. Raises WorkflowError unless they are two finite numbers, the lower one
    first."""
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        cause = f"The scorer of role {role!r} has bounds = {bounds!r}, which are not two finite numbers in order."
        raise WorkflowError(cause, "Pass the lowest and the highest number that it returns, for example (0, 1).")
    return low, high


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", None) or type(fn).__name__)
