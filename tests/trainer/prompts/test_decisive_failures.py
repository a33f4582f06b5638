"""The failed runs that a search for prompts shows because calls of a role decided them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import cotune
from cotune.prompts.edits import PromptPart
from cotune.prompts.templates import Template
from cotune.prompts.wording import Wording
from cotune.recording.recorder import LiveCall
from cotune.storage.open_store import open_store
from cotune.trainer.prompts.showing import Fence, decisive_failures, examples
from tests.integrations.recorded import Responder
from tests.trainer.prompts import travel

SYSTEMS = {"planner": travel.PLANNER, "writer": travel.WRITER}


@cotune.workflow
async def side_by_side(task: Any) -> float:
    """Both roles answer at the same time, and one wrong answer loses the run."""
    said = await asyncio.gather(
        *(travel.ask(role, system, f"{role} {task['city']}") for role, system in SYSTEMS.items())
    )
    return float("wrong" not in " ".join(said))


async def errs_at_first(call: LiveCall) -> str:
    """The writer is wrong in the runs as it is, and right in forks."""
    await asyncio.sleep(0.05)  # so that the calls overlap
    if call.role == "writer" and call.episode.phase == "blame own":
        return "a wrong reply"
    return f"the right words of the {call.role}"


def part_of(role: str) -> PromptPart:
    return PromptPart(name=f"{role}.system", roles=(role,), kind="system", old=Template((SYSTEMS[role],)))


def test_a_block_of_calls_is_shown_to_each_of_its_roles(tmp_path: Path) -> None:
    out = str(tmp_path / "blame")
    found = cotune.blame(
        side_by_side, travel.tasks(1), episodes="failed", out=out, responder=Responder(errs_at_first), runs=20
    )
    (lost,) = found.episodes
    assert lost.call == 0 and lost.role == "planner, writer"
    with open_store(out, read_only=True) as store:
        for role, answer in (("planner", "the right words of the planner"), ("writer", "a wrong reply")):
            part = part_of(role)
            (failure,) = decisive_failures(store, found.episodes, part)
            assert failure.roles == ["planner", "writer"] and failure.redraw == f"the right words of the {role}"
            (text,) = examples(store, part, [], Wording([part]), Fence("mark"), shown=0, decisive=[failure])
            assert f"The role answered:\n<<<data mark\n{answer}\n" in text
            assert "2 calls at the same time decided it together (of planner, writer), and this answer is one" in text
            assert "This answer decided it" not in text
        other = PromptPart(name="other", roles=("checker",), kind="system", old=Template((travel.WRITER,)))
        assert decisive_failures(store, found.episodes, other) == []
