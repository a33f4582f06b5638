"""What a fault costs in an application of `benchmarks.blame_applications`, from many runs without its framework.

Each function of `APPLICATIONS` repeats the control flow of the application of its name in plain Python: who is asked,
and what it reads. That takes microseconds in place of milliseconds, so the costs of all roles are known to about a
point before `cotune blame` measures them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.blame_faults import Errors, Example
from benchmarks.blame_structures import ROLES, SIX
from cotune.reading.blame import LEAST_EFFECT
from examples.gallery.warm import Message
from examples.support_desk.base import GREETINGS, TOPICS
from examples.tool_agent.shop import calculate, find

RUNS = 600
Messages = list[Mapping[str, Any]]
Ask = Callable[[str, Messages], Message]
"""Returns the answer of a role to messages."""


# Who is asked, and with which messages


def _say(ask: Ask, role: str, *texts: str) -> str:
    """The answer in words of a role of `benchmarks.blame_structures`."""
    return _text(ask(role, [_system(f"You are {role}."), *map(_user, texts)]))


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _text(answer: Message) -> str:
    return str(answer.get("content") or "")


def _tool_call(answer: Message) -> tuple[str, dict[str, str]] | None:
    """The name and the arguments of the tool that an answer calls."""
    for call in answer.get("tool_calls") or ():
        return call["function"]["name"], json.loads(call["function"]["arguments"])
    return None


def chain_of_six(task: Any, ask: Ask) -> bool:
    text = f"code:{task['code']}"
    for role in SIX:
        text = _say(ask, role, text)
    return text == f"code:{task['code']}"


def fan_out(task: Any, ask: Ask) -> bool:
    code = task["code"]
    parts = [_say(ask, "worker", f"code:{part}") for part in (code[:2], code[2:4], code[4:])]
    return _say(ask, "join", " ".join(parts)) == f"code:{code}"


def loop(task: Any, ask: Ask) -> bool:
    draft, right = "", f"code:{task['code']}"
    for number in range(3):
        draft = _say(ask, "writer", f"round {number} {right}")
        if _say(ask, "reviewer", f"asked {right}, draft {draft}") == "accept":
            break
    return draft == right


def clerk_with_tool(task: Any, ask: Ask) -> bool:
    key = f"k{task['code'][1:]}"
    messages: Messages = [_system("You are clerk."), _user(f"key:{key}")]
    answer = ask("clerk", messages)
    called = _tool_call(answer)
    if called is not None:
        looked_up = f"code:{task['code'] if called[1]['key'] == key else 'missing'}"
        answer = ask("clerk", [*messages, answer, {"role": "tool", "content": looked_up}])
    return _say(ask, "writer", _text(answer)) == f"code:{task['code']}"


def flow_side_by_side(task: Any, ask: Ask) -> bool:
    right = f"code:{task['code']}"
    said = [right, _say(ask, "start", right)]
    said += [_say(ask, role, *said) for role in ("left", "right")]
    return _say(ask, "agree", *said) == right


def flow_of_three(task: Any, ask: Ask) -> bool:
    said = [f"code:{task['code']}"]
    for role in ("reader", "writer", "sender"):
        said.append(_say(ask, role, *said))
    return said[-1] == said[0]


def crew_of_three(task: Any, ask: Ask) -> bool:
    text = f"code:{task['code']}"
    for role in ("reader", "writer", "sender"):
        text = _say(ask, role, text)
    return text == f"code:{task['code']}"


def crew_side_by_side(task: Any, ask: Ask) -> bool:
    code = task["code"]
    parts = [_say(ask, "left", f"code:{code[:2]}"), _say(ask, "right", f"code:{code[2:]}")]
    return _say(ask, "join", " ".join(parts)) == f"code:{code}"


def vote(task: Any, ask: Ask) -> bool:
    right = f"code:{task['code']}"
    said = [_say(ask, role, right) for role in ("first", "second", "third")]
    return _say(ask, "judge", " ".join(said)) == right


def langgraph_supervisor(task: Any, ask: Ask) -> bool:
    messages: Messages = [_user(task["question"])]
    for _ in range(5):  # a recursion limit of 10 steps, two for each worker
        route = json.loads(_text(ask("supervisor", [_system("Who is next?"), *messages])))["next"]
        if route == "FINISH":
            return _text(messages[-1]).strip() == task["answer"]
        messages.append(_user(_report(route, messages, ask)))
    return False


def _report(worker: str, messages: Messages, ask: Ask) -> str:
    """The last words of a worker of the supervisor. Raises RuntimeError if it calls its tool again and again."""
    instructions = {"prices": "Search the price.", "maths": "Calculate the sum."}[worker]
    conversation: Messages = [_system(instructions), *messages]
    for _ in range(4):  # a recursion limit of 8 steps, two for each call of the tool
        answer = ask(worker, conversation)
        called = _tool_call(answer)
        if called is None:
            return _text(answer)
        conversation += [answer, {"role": "tool", "content": _result(worker, *called)}]
    raise RuntimeError("the worker reached its recursion limit")


def _result(worker: str, name: str, arguments: Mapping[str, str]) -> str:
    """The result of a tool of the shop. Each worker has one of them."""
    if (worker, name) == ("prices", "search"):
        return find(arguments["query"])
    if (worker, name) == ("maths", "calculator"):
        return calculate(arguments["expression"])
    return "no such tool"


def autogen_team(task: Any, ask: Ask) -> bool:
    said: Messages = [_user(task["question"])]
    for role, instructions in (("prices", "Search the price."), ("maths", "Calculate the sum.")):
        answer = ask(role, [_system(instructions), *said])
        called = _tool_call(answer)
        said.append(_user(_text(answer) if called is None else _result(role, *called)))
    return _text(said[-1]).strip() == task["answer"]


def agents_handoffs(task: Any, ask: Ask) -> bool:
    asked = _user(f"{task['language']} {task['ticket']}")
    answer = ask("triage", [_system("Hand the ticket to its team."), asked])
    called = _tool_call(answer)
    if called is not None:
        team = called[0].removeprefix("transfer_to_")
        answer = ask(team, [_system(f"Greet the customer and say {team}."), asked])
    # A team that hands the ticket on has no such tool, and its answer no text.
    return _text(answer).strip() == f"{GREETINGS[task['language']]} {task['team']}"


def crewai_flow(task: Any, ask: Ask) -> bool:
    team = _text(ask("triage", [_user(task["ticket"])])).strip()
    reply = _text(ask("writer", [_user(f"{task['language']} {team}")])).strip()
    return reply == f"{GREETINGS[task['language']]} {task['team']}"


# The costs


@dataclass(frozen=True)
class Application:
    """An application without its framework, and its roles."""

    run: Callable[[Any, Ask], bool]
    roles: Sequence[str]


APPLICATIONS: Mapping[str, Application] = {
    "langgraph_supervisor": Application(langgraph_supervisor, ("supervisor", "prices", "maths")),
    "autogen_team": Application(autogen_team, ("prices", "maths")),
    "agents_handoffs": Application(agents_handoffs, ("triage", *TOPICS)),
    "crewai_flow": Application(crewai_flow, ("triage", "writer")),
    "chain_of_six": Application(chain_of_six, ROLES["chain_of_six"]),
    "fan_out": Application(fan_out, ROLES["fan_out"]),
    "loop": Application(loop, ROLES["loop"]),
    "clerk_with_tool": Application(clerk_with_tool, ROLES["clerk_with_tool"]),
    "flow_side_by_side": Application(flow_side_by_side, ROLES["flow_side_by_side"]),
    "flow_of_three": Application(flow_of_three, ROLES["flow_of_three"]),
    "crew_of_three": Application(crew_of_three, ROLES["crew_of_three"]),
    "crew_side_by_side": Application(crew_side_by_side, ROLES["crew_side_by_side"]),
    "vote": Application(vote, ROLES["vote"]),
}


class Answered(NamedTuple):
    """A call of a run."""

    role: str
    messages: Sequence[Mapping[str, Any]]
    answer: Message


def draw(task_id: str, run_id: str, role: str, turn: int) -> random.Random:
    """The numbers that one call draws for its answer."""
    return random.Random(f"{task_id} {run_id} {role} {turn}")


class Costs:
    """The costs of the roles of an application whose roles err with `own`, and whose reference errs with `reference`.

    They are means over `RUNS` tasks. A call of a run draws the same numbers whoever answers it, so differences between
    two sets of swapped roles are less noisy than outcomes.
    """

    def __init__(self, name: str, example: Example, own: Errors, reference: Errors) -> None:
        self.application = APPLICATIONS[name]
        self.roles = self.application.roles
        self.example = example
        self.own, self.reference = own, reference
        self._tasks = list(example.tasks(RUNS, 1000))
        self._success: dict[frozenset[str], float] = {}

    def success(self, *swapped: str) -> float:
        """The share of runs that succeed with these roles answered by the reference."""
        roles = frozenset(swapped)
        if roles not in self._success:
            succeeded = [self.run(task, f"true{number}", roles) for number, task in enumerate(self._tasks)]
            self._success[roles] = fmean(succeeded)
        return self._success[roles]

    def run(
        self, task: Any, id: str, swapped: Container[str], run_id: str = "", trace: list[Answered] | None = None
    ) -> bool:
        """Whether one run succeeds, on a task with this id. The answers are drawn by `run_id`, and added to `trace`."""
        turns: Counter[str] = Counter()

        def ask(role: str, messages: Messages) -> Message:
            errors = self.reference if role in swapped else self.own
            chance = draw(id, run_id, role, turns[role])
            turns[role] += 1
            answer = errors.answer(self.example, role, messages, id, chance)
            if trace is not None:
                trace.append(Answered(role, messages, answer))
            return answer

        try:
            return self.application.run(task, ask)
        except (ValueError, KeyError, RuntimeError):
            return False  # The application raises too, which counts as a failure.

    @property
    def outcome(self) -> float:
        """The mean outcome of the application as it is."""
        return self.success()

    @property
    def swapped(self) -> float:
        """The mean outcome with all roles swapped."""
        return self.success(*self.roles)

    def of(self, role: str) -> float:
        """The cost of a role, as `cotune blame` defines it."""
        others = [other for other in self.roles if other != role]
        return (self.success(role) - self.outcome + self.swapped - self.success(*others)) / 2

    def of_second(self, role: str, mended: str) -> float:
        """The cost of a role once the role `mended` is swapped."""
        return self.success(role, mended) - self.success(mended)

    def is_visible(self, role: str) -> bool:
        """Whether a role costs at least 10 points, and at least twice as much as any other one."""
        others = max(self.of(other) for other in self.roles if other != role)
        return self.of(role) >= max(LEAST_EFFECT, 2 * others)
