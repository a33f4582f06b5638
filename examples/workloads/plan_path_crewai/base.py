"""Builds a base model for the CrewAI application: that of `examples/plan_path`, warmed up on the prompts CrewAI makes.

python -m examples.workloads.plan_path_crewai.base --out runs/crewai/base
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from crewai import Agent, BaseLLM

from examples.plan_path import base
from examples.tiny_model import build_by_command
from examples.workloads.plan_path_crewai.app import driver, navigator

PLACE = "<what is asked>"


class _Listener(BaseLLM):
    """A model that keeps what it is asked."""

    def call(self, messages: Any, *args: Any, **options: Any) -> str:
        self.additional_params["heard"] = list(messages)
        return "up"


def prompt_of(agent: Agent) -> list[dict[str, str]]:
    """The messages that CrewAI sends for an agent, with `PLACE` where the question goes."""
    listener = _Listener(model="listener")
    Agent(role=agent.role, goal=agent.goal, backstory=agent.backstory, llm=listener).kickoff(PLACE)
    return [{"role": m["role"], "content": m["content"]} for m in listener.additional_params["heard"]]


PROMPTS = {"navigator": prompt_of(navigator), "driver": prompt_of(driver)}
WORDS = [word for prompt in PROMPTS.values() for m in prompt for word in m["content"].replace(PLACE, " ").split()]


def _said_in(role: str, demonstration: base.Demonstration) -> base.Demonstration:
    """A demonstration with the prompt that CrewAI would make of it."""
    messages, answer = demonstration
    asked = messages[-1]["content"]
    return [{**m, "content": m["content"].replace(PLACE, asked)} for m in PROMPTS[role]], answer


def navigator_demonstration(rng: random.Random) -> base.Demonstration:
    """Shortest paths, with random moves in between."""
    return _said_in("navigator", base.navigator_demonstration(rng))


def driver_demonstration(rng: random.Random) -> base.Demonstration:
    """Controls by the table, or by the table that the demonstrator is used to."""
    return _said_in("driver", base.driver_demonstration(rng))


TEAM = (navigator_demonstration, driver_demonstration, driver_demonstration)


def build(folder: Path, **options: Any) -> None:
    """Build, warm up and save a base model; options are those of `examples/plan_path/base.py`."""
    base.build(folder, demonstrators=TEAM, words=WORDS, **options)


if __name__ == "__main__":
    build_by_command(build, base.STEPS)
