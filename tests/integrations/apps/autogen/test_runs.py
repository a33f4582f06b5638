"""Running AutoGen teams: workflows of a team, runtimes, state, memory, failures, and when things are imported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core import SingleThreadedAgentRuntime
from autogen_core.memory import ListMemory, MemoryContent, MemoryMimeType
from autogen_core.model_context import BufferedChatCompletionContext

import cotune
from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.errors import WorkflowError
from cotune.integrations.apps.activation import activate
from cotune.integrations.apps.autogen.copies import copy_application
from cotune.recording.recorder import LiveCall
from cotune.records.plans import Plan
from cotune.records.structs import Message, RewardRecord, Task
from cotune.sampling.responder import PolicyResponder
from tests.integrations.autogen_models import autogen_client
from tests.integrations.provider import Provider, json_reply
from tests.integrations.recorded import POLICY, Recorded, Responder, Sink, answer, episode

BEFORE = AssistantAgent(
    "before",
    autogen_client(api_key="none", base_url="http://127.0.0.1:9/v1"),
    system_message="I am before.",
)
"""Made before the integration is installed, where this file is the first to ask for it."""
activate()


def agent(name: str, **options: Any) -> AssistantAgent:
    return AssistantAgent(name, autogen_client(), system_message=f"I am {name}.", **options)


def test_agents_made_before_are_known(record: Recorded):
    async def solve(task):
        return float(len((await BEFORE.run(task="hi")).messages))

    record(solve, lambda call: "x")
    assert record.roles == ["before"]


ACTIVATE = "from cotune.integrations.apps.activation import activate\nactivate()\n"
ORDERS = {
    "application first": f"import app, cotune\n{ACTIVATE}",
    "cotune first": f"import cotune\n{ACTIVATE}import app",
    "no activation": "import cotune, app",
    "teams before agents": f"{ACTIVATE}import autogen_agentchat.teams, app",
}
APP = """
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.replay import ReplayChatCompletionClient
model = ReplayChatCompletionClient(["one", "two"])
team = RoundRobinGroupChat([AssistantAgent("a", model), AssistantAgent("b", model)], max_turns=2)
async def solve(task):
    return float(len((await team.run(task="hi")).messages))
"""


@pytest.mark.parametrize("order", ORDERS)
def test_imports_in_any_order(order: str, tmp_path: Path):
    (tmp_path / "app.py").write_text(APP)
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[4])!r})
{ORDERS[order]}
from tests.integrations.recorded import Recorded
record = Recorded()
record(app.solve)
print(record.roles, len(record.calls[1].parents), "crewai" in sys.modules, "langgraph" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "['a', 'b'] 1 False False\n", done.stderr


def test_a_team_is_a_workflow(nowhere: None, record: Recorded):
    team = RoundRobinGroupChat([agent("a"), agent("b")], termination_condition=MaxMessageTermination(3), name="pair")
    solve = cotune.workflow(
        team, inputs=lambda task: f"q {task['q']}", reward=lambda result, task: len(result.messages)
    )
    assert (record(solve, lambda call: call.role).rewards, solve.cotune.name) == ({"team": 3.0}, "pair")
    assert record.roles == ["a", "b"]
    record(solve, lambda call: call.role)
    assert [len(call.messages) for call in record.calls] == [2, 2, 3, 3]


def test_an_agent_is_a_workflow(nowhere: None, record: Recorded):
    solve = cotune.workflow(agent("a"), inputs=str, reward=lambda result, task: len(result.messages))
    assert record(solve, lambda call: "x").rewards == {"team": 2.0}
    assert record.roles == ["a"]


def test_episodes_of_one_team_run_at_once_and_apart(nowhere: None):
    inner = agent("inner")
    team = SelectorGroupChat(
        [agent("a", tools=[AgentTool(inner)]), agent("b", memory=[ListMemory()]), agent("c")],
        autogen_client(),
        termination_condition=TextMentionTermination("stop") | MaxMessageTermination(5),
    )
    solve = cotune.workflow(team, inputs=lambda task: "go", reward=lambda result, task: len(result.messages))
    sinks = [Sink() for _ in range(6)]

    async def reply(call: LiveCall) -> str:
        await asyncio.sleep(0.001 * (call.step % 3))
        return "abc"[call.turn % 3] if call.role.endswith("selector") else f"{call.role}{call.turn}"

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(episode(solve, reply, sink) for sink in sinks))

    outcomes = asyncio.run(all_of_them())
    assert [outcome.rewards for outcome in outcomes] == [{"team": 5.0}] * 6
    roles = [[call.role for call in sink.calls()] for sink in sinks]
    assert roles == [roles[0]] * 6
    assert [role for role in roles[0] if "/" not in role] == ["a", "b", "c", "a"]


def test_episodes_of_a_run_that_share_an_agent_are_told(nowhere: None):
    one = agent("one")
    team = RoundRobinGroupChat([one], termination_condition=MaxMessageTermination(2))

    async def alone(task):
        return float(len((await one.run(task="hi")).messages))

    async def new_team(task):
        made = RoundRobinGroupChat([one], termination_condition=MaxMessageTermination(2))
        return float(len((await made.run(task="hi")).messages))

    def warned(app: Any, phase: str = "train") -> bool:
        flow = app if hasattr(app, "cotune") else cotune.workflow(app)
        running = run_episode(
            flow.cotune, Task(id="t", input={}), sink=Sink(), responder=Responder(lambda call: "hi"),
            options=EpisodeOptions(phase=phase),
        )  # fmt: skip
        return "shared_agent" in asyncio.run(running).live.warnings

    copied = cotune.workflow(team, inputs=lambda task: "hi", reward=lambda result, task: 1.0)
    given = (alone, "trace"), (alone,), (alone,), (new_team,), (copied,), (copied,)
    assert [warned(*app) for app in given] == [False, False, True, True, False, False]


def test_a_team_that_cannot_be_copied_says_so(nowhere: None):
    keeps = agent("a")
    with Path(__file__).open() as keeps.opened, pytest.raises(WorkflowError, match="TextIOWrapper cannot be copied"):
        copy_application(keeps)


def test_a_copy_shares_clients_and_nothing_else():
    model = autogen_client(api_key="k")
    first = AssistantAgent("a", model, tools=[print_it], memory=[ListMemory()])
    team = RoundRobinGroupChat([first, AssistantAgent("b", model)], max_turns=2)
    again = copy_application(team)
    mine = again._participants[0]
    assert mine._model_client is model
    assert mine is not first and mine._memory[0] is not first._memory[0]
    assert mine.model_context is not first.model_context
    assert again._team_id != team._team_id
    assert again._group_topic_type == f"group_topic_{again._team_id}"
    assert again._runtime is not team._runtime


def print_it(text: str) -> str:
    """Print it."""
    return text


def test_a_runtime_that_runs_already(nowhere: None, record: Recorded):
    async def run() -> list[list[str]]:
        runtime = SingleThreadedAgentRuntime()
        runtime.start()
        seen = []
        teams = [
            RoundRobinGroupChat([agent("a"), agent("b")], runtime=runtime, max_turns=3, name=f"t{i}") for i in range(3)
        ]

        async def one(i: int) -> list[str]:
            sink = Sink()

            async def solve(task: Any) -> float:
                return float(len((await teams[i].run(task=f"task {i}")).messages))

            async def reply(call: LiveCall) -> str:
                await asyncio.sleep(0.001 * (i + call.step))
                return f"{call.role} {i}"

            outcome = await episode(solve, reply, sink)
            assert outcome.error is None
            seen.append([text for text in texts(sink) if text.startswith("task")])
            return [call.role for call in sink.calls()]

        roles = await asyncio.gather(*(one(i) for i in range(3)))
        assert sorted(seen) == [["task 0"], ["task 1"], ["task 2"]]
        roles.append(await one(0))
        await runtime.stop_when_idle()
        return roles

    assert asyncio.run(run()) == [["a", "b", "a"]] * 3 + [["b", "a", "b"]]


def test_outside_an_episode_nothing_changes(provider: Provider, record: Recorded):
    async def run() -> None:
        runtime = SingleThreadedAgentRuntime()
        runtime.start()
        team = RoundRobinGroupChat([agent("a"), agent("b")], runtime=runtime, max_turns=2)

        async def solve(task: Any) -> float:
            return float(len((await team.run(task="hi")).messages))

        await episode(solve, None, record.sink)
        assert len(record.calls) == 2
        await solve(None)
        await runtime.stop_when_idle()

    asyncio.run(run())
    assert (len(record.calls), len(provider.requests)) == (2, 4)


def test_state_saved_and_loaded_within_an_episode(nowhere: None, record: Recorded):
    def made() -> RoundRobinGroupChat:
        return RoundRobinGroupChat([agent("a"), agent("b")], max_turns=1)

    async def solve(task: Any) -> float:
        first, second = made(), made()
        await first.run(task="hi")
        await second.load_state(await first.save_state())
        await second.run(task="more")
        await second.reset()
        await second.run(task="again")
        return 1.0

    record(solve, lambda call: f"{call.role}{call.step}")
    assert record.roles == ["a", "b", "a"]
    assert [len(call.parents) for call in record.calls] == [0, 1, 0]


def test_memory_and_short_contexts(nowhere: None, record: Recorded):
    async def solve(task: Any) -> float:
        memory = ListMemory()
        await memory.add(MemoryContent(content="likes tea", mime_type=MemoryMimeType.TEXT))
        members = [agent("a", memory=[memory]), agent("b", model_context=BufferedChatCompletionContext(buffer_size=1))]
        await RoundRobinGroupChat(members, max_turns=4).run(task="hi")
        return 1.0

    record(solve, lambda call: f"{call.role}{call.turn}")
    steps = {call.id: call.step for call in record.calls}
    assert [sorted(steps[p] for p in call.parents) for call in record.calls] == [[], [0], [0, 1], [2]]


def test_scorers_see_the_agent_the_team_and_what_it_was_given(nowhere: None, record: Recorded):
    states = []

    def reply(call: LiveCall) -> str:
        states.append(call.state)
        return f"said {call.role}"

    record(
        cotune.workflow(RoundRobinGroupChat([agent("a"), agent("b")], max_turns=2), inputs=str, reward=len_of), reply
    )
    assert [state.agent.name for state in states] == ["a", "b"]
    assert states[0].team is states[1].team
    assert [m.content for m in states[1].received] == ["{'q': 1}", "said a"]
    assert [m.content for m in states[1].prompt] == ["I am b.", "{'q': 1}", "said a"]


def texts(sink: Sink) -> list[str]:
    return [r.body["content"] for r in sink if isinstance(r, Message)]


def len_of(result: Any, task: Any) -> float:
    return float(len(result.messages))


class Letters:
    """A sampler and chat format in which each candidate is the next letter."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []

    def images(self, messages: Any) -> tuple[bytes, ...]:
        return ()

    def render(self, messages: Any, tools: Any, **earlier: Any) -> list[int]:
        self.prompts.append([m["content"] for m in messages])
        return [len(self.prompts)]

    async def sample(self, prompt: Any, n: int, params: Any, policy: Any) -> list[Any]:
        from cotune.sampling.protocol import Completion

        return [Completion((i,), (-0.1,), "stop") for i in range(n)]

    def parse(self, token_ids: Any, stop: Any = (), **_: Any) -> tuple[str, dict[str, Any], str]:
        text = "xyz"[token_ids[0]]
        return text, {"role": "assistant", "content": text}, "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tree_goes_on_with_the_chosen_candidate(nowhere: None, record: Recorded, stream: bool):
    team = RoundRobinGroupChat([agent("a", model_client_stream=stream), agent("b")], max_turns=2)
    solve = cotune.workflow(team, inputs=lambda task: "go", reward=len_of)

    @solve.scorer("a")
    def last_letter(candidate, call, task):
        return float(candidate.text == "z" and call.state.agent.name == "a")

    letters = Letters()
    responder = PolicyResponder(
        letters, letters, {"a": POLICY, "b": POLICY}, plan=Plan(kind="tree", k=3), scorers=solve.cotune.scorers
    )
    record(solve, responder.respond)
    first, second = record.calls
    assert ([c.text for c in first.candidates], first.chosen, len(second.candidates)) == (["x", "y", "z"], 2, 1)
    assert letters.prompts == [["I am a.", "go"], ["I am b.", "go", "z"]]
    assert [r.value for r in record.sink if isinstance(r, RewardRecord) and r.target.startswith(first.id)] == [
        0.0,
        0.0,
        1.0,
    ]
    assert second.parents == (first.id,)


def test_a_failing_provider_fails_the_run_as_it_would(provider: Provider, record: Recorded):
    provider.reply = lambda body, number: json_reply({"error": {"message": "no", "code": 400}}, 400)
    said = []

    async def solve(task: Any) -> float:
        team = RoundRobinGroupChat([agent("a")], max_turns=1)
        with pytest.raises(RuntimeError, match="BadRequestError") as error:
            await team.run(task="hi")
        said.append(str(error.value))
        return 0.0

    record(solve)
    asyncio.run(solve(None))
    assert said[0].split("Traceback")[0] == said[1].split("Traceback")[0]
    assert record.statuses == ["error"]


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
def test_an_episode_that_is_stopped_stops_its_team(nowhere: None, record: Recorded, how: str):
    async def run() -> Any:
        begun = asyncio.Event()

        async def hang(call: LiveCall) -> str:
            begun.set()
            await asyncio.Event().wait()
            return ""

        solve = cotune.workflow(RoundRobinGroupChat([agent("a")], max_turns=1), inputs=str, reward=len_of)
        task, responder = Task(id="t", input=1), Responder(hang)
        limit = 0.05 if how == "out of time" else None
        made = run_episode(
            solve.cotune, task, sink=record.sink, responder=responder, options=EpisodeOptions(timeout=limit)
        )
        running = asyncio.ensure_future(made)
        if limit is None:
            await begun.wait()
            running.cancel()
        return (await asyncio.gather(running, return_exceptions=True))[0]

    ended = asyncio.run(run())
    assert isinstance(ended, asyncio.CancelledError) if how == "cancelled" else "did not finish" in str(ended.error)
    assert set(record.statuses) <= {"cancelled"}


def test_several_answers_to_one_request_stay_one_message(nowhere: None, record: Recorded):
    record(
        cotune.workflow(agent("a"), inputs=str, reward=lambda result, task: result.messages[-1].content == "no"),
        lambda call: answer("yes", "no", chosen=1),
    )
    assert (len(record.calls), record.calls[0].chosen) == (1, 1)
