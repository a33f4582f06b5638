"""Does `cotune blame` find a fault that is planted in one role of an application?

    python -m benchmarks.blame_applications                                  # all of them
    python -m benchmarks.blame_applications --rates 0.3,0.6,1.0 --repetitions 3 --tasks 20
    python -m benchmarks.blame_applications --applications crewai_flow --rates 0.6
    python -m benchmarks.blame_applications --rates 0.6 --guesses            # only the two guesses, without a reference

The applications are four of `examples.gallery` and nine of `benchmarks.blame_structures`: LangGraph, AutoGen, the
OpenAI Agents SDK, CrewAI and the plain SDK, with two to six roles, loops, parallel branches, hand-offs and tools. An
expert answers for each of their roles, and errs in 5% of the calls. One role errs more often: drawn in each call, or
(`fixed`) always on this share of the tasks. The reference is the expert without an error, behind an address of its own.
Every analysis is the command's own. It is compared to two guesses by the failed runs alone: the last role that spoke,
and a scripted judge that reads the trace. Repetitions have other tasks and other errors. At the end come a summary by
error rate, of all faults and of the faults that cost something, and a line of JSON.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import cotune
from benchmarks.blame_structures import ROLES, STRUCTURES
from benchmarks.blame_summary import summarize
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Episode, Usage
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.tables import answer_line
from cotune.trainer.blame.arms import OWN
from cotune.trainer.blame.runs import recorded_outcome
from examples.tool_agent.provider import serving

APPLICATIONS: Mapping[str, Sequence[str]] = {
    "langgraph_supervisor": ("supervisor", "prices", "maths"),
    "autogen_team": ("prices", "maths"),
    "agents_handoffs": ("triage", "billing", "shipping", "returns"),
    "crewai_flow": ("triage", "writer"),
    **ROLES,
}
NATURAL = 0.05
console = Console(stderr=True)


@dataclass
class Expert:
    """Answers the roles of an application of the gallery; `guilty` errs at a rate of its own."""

    example: Any
    guilty: str
    rate: float
    fixed: bool
    chance: random.Random

    async def respond(self, call: LiveCall) -> Answer:
        """The expert's answer, or one that is usually wrong."""
        message = self.example.wrong(self.chance, call.messages) if self._errs(call) else None
        message = message or self.example.expert(call.messages)
        candidate = Candidate(index=0, text=str(message.get("content") or ""), message=dict(message))
        return Answer(candidates=(candidate,), usage=Usage(prompt_tokens=20, completion_tokens=5))

    def _errs(self, call: LiveCall) -> bool:
        if call.role != self.guilty:
            return self.chance.random() < NATURAL
        if self.fixed:
            return random.Random(f"{call.task.id} {self.guilty}").random() < self.rate
        return self.chance.random() < self.rate


def analyse(
    name: str,
    guilty: str,
    rate: float,
    fixed: bool,
    tasks: int,
    runs: int,
    repetition: int,
    *,
    guesses: bool = False,
    out: str = "",
) -> dict[str, Any]:
    """Plant a fault, run the analysis, and compare its verdict with the fault. With `guesses` nothing is swapped. The
    analysis stays in a folder below `out`, if that is named."""
    example = STRUCTURES.get(name) or importlib.import_module(f"examples.gallery.{name}")
    seed, of_repetition = f"{name} {guilty} {rate} {fixed}", ""
    if repetition:
        # The first repetition repeats measurements from before there were several.
        seed, of_repetition = f"{seed} {repetition}", f"r{repetition}"
    expert = Expert(example, guilty, rate, fixed, random.Random(seed))
    # Their ids say on which of them a fixed fault errs.
    ids = [f"{of_repetition}t{place}" for place in range(tasks)]
    questions = [{**task, "id": id} for id, task in zip(ids, example.tasks(tasks, 7 + repetition), strict=True)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, serving(answers=example.expert) as url:
        kind = "fixed" if fixed else "drawn"
        folder = f"{out}/{name}-{guilty}-{rate}-{kind}-{repetition}" if out else temporary
        os.environ["OPENAI_BASE_URL"] = url
        references = () if guesses else ("openai:expert",)
        report = cotune.blame(example.solve, questions, references=references, out=folder, responder=expert, runs=runs)
        spoke, judged = last_that_spoke(Path(folder)), judge_that_reads(Path(folder))
    line = {
        "application": name, "guilty": guilty, "rate": rate, "fixed": fixed, "verdict": report.verdict,
        "named": list(report.at_fault), "first": report.roles[0].role if report.roles else "",
        "cost": next((round(part.score.mean, 3) for part in report.roles if part.role == guilty), None),
        "others": max((round(part.score.mean, 3) for part in report.roles if part.role != guilty), default=None),
        "last_that_spoke": spoke, "judge": judged, "runs": report.runs, "calls": report.calls,
        "left_out": dict(report.left_out), "repetition": repetition, "tasks": report.tasks,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    console.print(line)
    return line


def last_that_spoke(folder: Path) -> str:
    """The role that most often made the last call of a failed run of the unchanged application."""
    last: Counter[str] = Counter()
    with open_store(folder, read_only=True) as store:
        for episode in failed_runs(store):
            calls = store.calls(episode.id, lean=True)
            last.update([call.role for call in calls[-1:]])
    return next((role for role, _ in last.most_common(1)), "")


def judge_that_reads(folder: Path) -> str:
    """The role that a judge of traces suspects most often: in each failed run, the one whose call has the largest share
    of words and numbers that stand nowhere in its prompt."""
    suspects: Counter[str] = Counter()
    with open_store(folder, read_only=True) as store:
        for episode in failed_runs(store):
            shares: dict[str, float] = {}
            for call in store.calls(episode.id):
                if call.chosen is None:
                    continue
                prompt = set(re.findall(r"\w+", json.dumps([store.message(id) for id in call.messages])))
                said = re.findall(r"\w+", answer_line(call.candidates[call.chosen]))
                unsupported = sum(word not in prompt for word in said) / max(len(said), 1)
                shares[call.role] = max(shares.get(call.role, 0.0), unsupported)
            if shares:
                suspects[max(shares, key=lambda role: shares[role])] += 1
    return next((role for role, _ in suspects.most_common(1)), "")


def failed_runs(store: Store) -> list[Episode]:
    """The runs of the unchanged application whose outcome is 0."""
    own = [one for one in store.episodes() if one.phase == OWN.phase]
    return [one for one in own if not recorded_outcome(store, one)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--applications", default=",".join(APPLICATIONS), help="some of them (default: %(default)s)")
    parser.add_argument("--rates", default="0.6,1.0", help="error rates of the faulty role (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--repetitions", type=int, default=1, help="analyses of each fault (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no analysis after this time")
    parser.add_argument("--first", action="store_true", help="only the first role of each, drawn per call")
    parser.add_argument(
        "--guesses", action="store_true", help="run the application as it is, for the two guesses alone"
    )
    parser.add_argument("--out", default="", help="folder that keeps the analyses (default: none)")
    a = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "none")
    rates = [float(rate) for rate in a.rates.split(",")]
    faults = []
    for name, repetition in itertools.product(a.applications.split(","), range(a.repetitions)):
        for guilty, rate, fixed in itertools.product(APPLICATIONS[name], rates, (False, True)):
            if a.first and (guilty != APPLICATIONS[name][0] or fixed):
                continue
            if rate < 1 or not fixed:  # An error rate of 1 is the same for every task.
                faults.append((name, guilty, rate, fixed, repetition))
    if a.minutes < math.inf:
        # So that those that fit into the time are drawn from all of them.
        random.Random(0).shuffle(faults)
    lines, began = [], time.monotonic()
    for name, guilty, rate, fixed, repetition in faults:
        if time.monotonic() - began < 60 * a.minutes:
            lines.append(analyse(name, guilty, rate, fixed, a.tasks, a.runs, repetition, guesses=a.guesses, out=a.out))
    for summary in summarize(lines):
        console.print(summary)
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
