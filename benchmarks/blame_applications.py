"""Does `cotune blame` find a fault that is planted in one role of an application?

    python -m benchmarks.blame_applications --plain --rounds 8                # without the frameworks, 15 minutes
    python -m benchmarks.blame_applications --rounds 1 --minutes 60           # with them
    python -m benchmarks.blame_applications --applications crewai_flow,vote --parts planted --rates 0.6
    python -m benchmarks.blame_applications --minutes 0                       # the tables of the results so far

The applications are four of `examples.gallery` and nine of `benchmarks.blame_structures`: LangGraph, AutoGen, the
OpenAI Agents SDK, CrewAI and the plain SDK, with two to six roles, loops, parallel branches, hand-offs and tools. A
scripted expert answers for their roles, which err in 2 to 15% of the calls. The reference is the expert with errors in
2% of the calls. The parts:

- `planted`: one role errs more often, with a wrong fact, a dropped constraint, a bad format or an arithmetic slip
  (`benchmarks.blame_faults`): at a rate of 0.3 (on 20 tasks), 0.6 or 1.0 (on 10), drawn in each call or fixed per task.
- `healthy`: no role costs 10 points.
- `two`: two roles err, and each costs 10 points once the other one is mended. 20 tasks.
- `obeys`: one role errs at 0.6, and the reference makes the same errors. 20 tasks.

A fault is analysed if it costs at least 10 points, and at least twice as much as any other role. The costs come from
`benchmarks.blame_costs`, so that the analysis does not decide which faults count. The first kind of error that costs
enough is planted; if none does, the fault is hidden. The rounds, the arms and the verdict are the command's own. Two
guesses are made from the failed runs alone: the last role that spoke, and a scripted judge that reads the trace.

With `--plain` the applications run without their frameworks, with the same answers. That takes milliseconds in place of
seconds. The runs with frameworks are compared with it, run by run, and those that end in another way are counted.

Each round takes another role of every application, and other error rates and tasks. All results are kept in
OUT/results.jsonl, and the same command continues. At the end come tables, and a line of JSON.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# No request may leave this machine: nobody listens at this address.
os.environ.update(OPENAI_BASE_URL="http://127.0.0.1:9/v1", OPENAI_API_KEY="none")

from rich.console import Console

from benchmarks.blame_costs import APPLICATIONS, Answered, Costs, draw
from benchmarks.blame_faults import KINDS, Errors, Example, functions_called
from benchmarks.blame_structures import STRUCTURES
from benchmarks.blame_summary import summarize, tables
from benchmarks.blame_workflows import run_rounds
from benchmarks.kept_results import KeptResults
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import workflow_of
from cotune.reading.blame import LEAST_EFFECT, REPORT
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Episode
from cotune.records.tasks import as_tasks
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.trainer.blame.analysis import Analysis
from cotune.trainer.blame.arms import OWN, Arm, arm_of
from cotune.trainer.blame.estimates import role_effects
from cotune.trainer.blame.options import BlameOptions
from cotune.trainer.blame.references import Answering, OpenReferences, Reference
from cotune.trainer.blame.runs import Runs, recorded_outcome
from cotune.trainer.blame.tasks import TasksToAnalyse, draw_tasks

NATURAL = (0.02, 0.15)
"""Least and greatest error rate of a role without a fault."""
REFERENCE_RATE = 0.02
MOST_DRAWS = 100
"""Draws of natural error rates until a healthy application has no role that costs 10 points."""
PARTS = ("planted", "healthy", "two", "obeys")
console = Console(stderr=True, width=120)


@dataclass(frozen=True)
class Case:
    """An application to analyse. Its faults are drawn by `draw_errors`."""

    part: str
    application: str
    round: int
    rate: float = 0.0
    fixed: bool = False

    @property
    def key(self) -> str:
        """Names the case. Its tasks, and all that is drawn for it, go by this name."""
        return "-".join(map(str, (self.part, self.application, self.round, self.rate, self.fixed)))

    @property
    def folder(self) -> str:
        """The name of the folder of its records."""
        kind = "fixed" if self.fixed else "drawn"
        return f"{self.application}-{self.part}-{self.rate}-{kind}-{self.round}"

    @property
    def example(self) -> Example:
        """The application with its tasks and answers."""
        return STRUCTURES.get(self.application) or importlib.import_module(f"examples.gallery.{self.application}")

    @property
    def tasks(self) -> int:
        return 10 if self.part == "planted" and self.rate >= 0.6 else 20


def cases(names: Sequence[str], parts: Sequence[str], rates: Sequence[float], rounds: int) -> Iterator[Case]:
    """The cases, round by round, so that a measurement that is stopped has each application about equally often."""
    for number in range(rounds):
        of_round = []
        for part, name in itertools.product(parts, names):
            if part == "planted":
                for rate, fixed in itertools.product(rates, (False, True)):
                    if rate < 1 or not fixed:  # An error rate of 1 is the same for every task.
                        of_round.append(Case(part, name, number, rate, fixed))
            elif part == "two":
                of_round.append(Case(part, name, number, (0.6, 1.0)[(number + list(APPLICATIONS).index(name)) % 2]))
            else:
                of_round.append(Case(part, name, number, 0.6 if part == "obeys" else 0.0))
        random.Random(number).shuffle(of_round)
        yield from of_round


@dataclass(frozen=True)
class Drawn:
    """The errors of a case: its faulty roles, who errs how often, and the costs."""

    faulty: tuple[str, ...]
    own: Errors
    reference: Errors
    costs: Costs


def draw_errors(case: Case) -> Drawn | None:
    """Draw the faulty roles of a case and the kind of their errors; None if no kind of error makes the case count."""
    roles = APPLICATIONS[case.application].roles
    faulty_roles = {"planted": 1, "healthy": 0, "two": 2, "obeys": 1}[case.part]
    choices = list(itertools.combinations(roles, faulty_roles))
    chance = random.Random(case.key)
    # Each round takes another role, and so does each error rate. Of two faulty roles, any pair may be one that counts.
    offset = list(APPLICATIONS).index(case.application) + round(10 * case.rate) + case.fixed
    first = (case.round + offset) % len(choices)
    choices = choices[first:] + choices[:first] if case.part == "two" else [choices[first]]
    kinds = chance.sample(KINDS, len(KINDS)) if faulty_roles else [""] * MOST_DRAWS
    for faulty, kind in itertools.product(choices, kinds):
        natural = {role: chance.uniform(*NATURAL) for role in roles}
        own = Errors(natural, dict.fromkeys(faulty, case.rate), kind, case.fixed)
        reference = own if case.part == "obeys" else Errors(dict.fromkeys(roles, REFERENCE_RATE))
        costs = Costs(case.application, case.example, own, reference)
        if counts(case.part, faulty, costs):
            return Drawn(faulty, own, reference, costs)
    return None


def counts(part: str, faulty: Sequence[str], costs: Costs) -> bool:
    """Whether the errors of a case are what its part is about."""
    if part == "planted":
        return costs.is_visible(faulty[0])
    if part == "healthy":
        return all(costs.of(role) < LEAST_EFFECT for role in costs.roles)
    if part == "two":
        one, other = faulty
        return min(costs.of_second(one, mended=other), costs.of_second(other, mended=one)) >= LEAST_EFFECT
    return costs.swapped < 0.7


def run_id(episode: Episode | LiveEpisode) -> str:
    """The run of a task, by which the answers of its calls are drawn."""
    return f"{episode.phase} {episode.rollout}"


@dataclass(frozen=True)
class Expert:
    """Answers the calls of an application with these errors. The same call of the same run gets the same answer."""

    example: Example
    errors: Errors

    async def respond(self, call: LiveCall) -> Answer:
        """The expert's answer, or a wrong one."""
        chance = draw(call.task.id, run_id(call.episode), call.role, call.turn)
        message = self.errors.answer(self.example, call.role, call.messages, call.task.id, chance)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        candidate = Candidate(index=0, text=str(message.get("content") or ""), message=message, finish_reason=finish)
        return Answer(candidates=(candidate,))


def analyse(case: Case, runs: int, frameworks: bool, keep: str) -> dict[str, Any]:
    """Plant the faults of a case and analyse it, with its framework or without. The result has the verdict, and the
    costs as they are and as measured. With `keep` the records of the framework's runs stay in a folder below it."""
    began = time.monotonic()
    drawn = draw_errors(case)
    if drawn is None:
        return {"hidden": True, "seconds": round(time.monotonic() - began, 1)}
    costs = drawn.costs
    measured = analyse_application(case, drawn, runs, keep) if frameworks else analyse_plainly(case, drawn, runs)
    return {
        "hidden": False,
        "guilty": drawn.faulty,
        "kind": drawn.own.kind,
        "costs": {role: round(costs.of(role), 3) for role in costs.roles},
        "outcome": round(costs.outcome, 3),
        "swapped": round(costs.swapped, 3),
        **measured,
        "seconds": round(time.monotonic() - began, 1),
    }


def tasks_of(case: Case) -> list[Mapping[str, Any]]:
    """The tasks of a case, with ids of their own, by which answers are drawn."""
    tasks = case.example.tasks(case.tasks, 7 + case.round)
    return [{**task, "id": f"{case.key}-{number}"} for number, task in enumerate(tasks)]


def analyse_plainly(case: Case, drawn: Drawn, runs: int) -> dict[str, Any]:
    """The analysis on the application without its framework. Its runs draw the answers of the framework's runs."""
    tasks, costs = tasks_of(case), drawn.costs

    def outcome(arm: Arm, task_number: int, number: int) -> float:
        task = tasks[task_number]
        swapped = [role for role in costs.roles if arm.swaps(role)]
        return float(costs.run(task, task["id"], swapped, f"{arm.phase} {number}"))

    analysed = run_rounds(costs.roles, range(len(tasks)), runs, outcome)
    effects = role_effects(analysed.outcomes, costs.roles, 1.0)
    rounds = max(map(len, analysed.outcomes.runs(OWN).values()))
    return {
        "verdict": analysed.verdict.kind,
        "named": analysed.verdict.roles,
        "first": effects[0].role,
        "live": analysed.live,
        "measured": {effect.role: round(effect.score.mean, 3) for effect in effects},
        **guesses(failed_plain_traces(costs, tasks, rounds)),
    }


def analyse_application(case: Case, drawn: Drawn, runs: int, keep: str) -> dict[str, Any]:
    """The analysis of `cotune blame` on the application, the two guesses, and the runs that ended unexpectedly."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(keep, case.folder) if keep else Path(temporary)
        with open_store(folder / "records.db") as store:
            analysis = run_sync(analyse_runs(case, drawn, store, runs))
            report = analysis.result()
            guessed = guesses(failed_traces(store))
            differing = differing_outcomes(store, drawn.costs)
        (folder / REPORT).write_text(json.dumps(report.to_json()))
    return {
        "verdict": report.verdict,
        "named": report.at_fault,
        "first": report.roles[0].role,
        "live": analysis.live,
        "measured": {effect.role: round(effect.score.mean, 3) for effect in report.roles},
        "runs": report.runs,
        "left_out": report.left_out,
        "differing": differing,
        **guessed,
    }


async def analyse_runs(case: Case, drawn: Drawn, store: Store, runs: int) -> Analysis:
    """The analysis of `cotune blame --reference`. The expert answers in the process: a server would take most of the
    time. No run is scored a second time, as in a search for prompts."""
    tasks = tasks_of(case)
    options = BlameOptions(references=("openai:expert",), runs=runs, limit=len(tasks))
    references = {"": Reference("provider", "expert")}
    answering = OpenReferences(
        Answering(Expert(case.example, drawn.own)), {"": Answering(Expert(case.example, drawn.reference))}
    )
    workflow = workflow_of(case.example.solve)
    application_runs = Runs(workflow, store, answering, references, options, for_search=True)
    analysis = Analysis(application_runs, TasksToAnalyse(draw_tasks(as_tasks(tasks), options)), references, options)
    await analysis.run()
    return analysis


def differing_outcomes(store: Store, costs: Costs) -> int:
    """The number of runs that end in another way than `benchmarks.blame_costs` expects of the same answers."""
    differing = 0
    for episode in store.episodes():
        arm = arm_of(episode.phase)
        swapped = [role for role in costs.roles if arm is not None and arm.swaps(role)]
        expected = costs.run(episode.task.input, episode.task.id, swapped, run_id(episode))
        differing += expected != bool(recorded_outcome(store, episode))
    return differing


Trace = Sequence[Answered]
"""The calls of one run."""


def guesses(failed: Sequence[Trace]) -> dict[str, str]:
    """The faulty role by two guesses from failed runs alone.

    `last` is the role that most often spoke last. `judge` is the role that a judge of traces suspects most often: in
    each run, the one with the largest share of words and numbers in an answer that stand nowhere in its prompt.
    """
    last: Counter[str] = Counter()
    suspects: Counter[str] = Counter()
    for trace in failed:
        shares: dict[str, float] = {}
        for call in trace:
            answer = [call.answer.get("content") or "", *functions_called(call.answer)]
            said = re.findall(r"\w+", json.dumps(answer))
            prompt = set(re.findall(r"\w+", json.dumps(call.messages)))
            unsupported = sum(word not in prompt for word in said) / max(len(said), 1)
            shares[call.role] = max(shares.get(call.role, 0.0), unsupported)
        last.update(call.role for call in trace[-1:])
        suspects.update(sorted(shares, key=lambda role: -shares[role])[:1])
    return {"last": _most_common(last), "judge": _most_common(suspects)}


def _most_common(count: Counter[str]) -> str:
    return next((role for role, _ in count.most_common(1)), "")


def failed_traces(store: Store) -> list[Trace]:
    """The runs of the unchanged application whose outcome is 0, and those in which it raised."""
    traces = []
    for episode in store.episodes():
        if episode.phase == OWN.phase and not recorded_outcome(store, episode):
            trace = []
            for call in store.calls(episode.id):
                if call.chosen is not None:
                    messages = [store.message(id) for id in call.messages]
                    trace.append(Answered(call.role, messages, call.candidates[call.chosen].message))
            traces.append(trace)
    return traces


def failed_plain_traces(costs: Costs, tasks: Sequence[Mapping[str, Any]], rounds: int) -> list[Trace]:
    """The same runs without the framework."""
    traces = []
    for task, number in itertools.product(tasks, range(rounds)):
        trace: list[Answered] = []
        if not costs.run(task, task["id"], (), f"{OWN.phase} {number}", trace):
            traces.append(trace)
    return traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--applications", default=",".join(APPLICATIONS), help="some of them (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them (default: %(default)s)")
    parser.add_argument("--rates", default="0.3,0.6,1.0", help="error rates of planted faults (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=30, help="runs of each task (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds over the applications (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no analysis after this time")
    parser.add_argument("--plain", action="store_true", help="run the applications without their frameworks")
    parser.add_argument("--out", type=Path, default=Path("runs/planted"), help="folder of the results")
    parser.add_argument("--keep", default="", help="folder that keeps the records of the analyses (default: none)")
    options = parser.parse_args()
    results = KeptResults(options, "runs")
    names, parts = options.applications.split(","), options.parts.split(",")
    rates = [float(rate) for rate in options.rates.split(",")]
    began = time.monotonic()
    for case in cases(names, parts, rates, options.rounds):
        if time.monotonic() - began >= 60 * options.minutes:
            break
        which = {name: getattr(case, name) for name in ("part", "application", "round", "rate", "fixed")}
        which["frameworks"] = not options.plain
        line = results.once(lambda case=case: analyse(case, options.runs, not options.plain, options.keep), **which)
        if line is not None:
            console.print({name: value for name, value in line.items() if name != "settings"})
    lines = results.lines(frameworks=not options.plain)
    lines = [line for line in lines if line["part"] in parts and line["application"] in names]
    for table in tables(lines):
        console.print(table)
    print(json.dumps(summarize(lines, "part", "rate", "fixed")))


if __name__ == "__main__":
    main()
