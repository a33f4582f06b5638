"""AutoGen teams of every kind: who makes a call, in what turn, and which calls it reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent, MessageFilterAgent, SocietyOfMindAgent
from autogen_agentchat.agents._message_filter_agent import MessageFilterConfig
from autogen_agentchat.base import Handoff, Response
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.messages import StructuredMessage, TextMessage
from autogen_agentchat.teams import (
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core.tools import FunctionTool
from openai import AsyncOpenAI
from pydantic import BaseModel

from cotune.integrations.apps.activation import activate
from tests.integrations.autogen_models import autogen_client
from tests.integrations.provider import Provider
from tests.integrations.recorded import Recorded, asks, tool_call

activate()


def agent(name: str, model: Any = None, **options: Any) -> AssistantAgent:
    return AssistantAgent(name, model_client=model or autogen_client(), system_message=f"I am {name}.", **options)


def through(runnable: Any, task: Any = "hi") -> Any:
    async def solve(_: Any) -> float:
        return float(len((await runnable.run(task=task)).messages))

    return solve


def parents(record: Recorded) -> list[list[int]]:
    """By call: the steps of the calls that it read."""
    steps = {call.id: call.step for call in record.calls}
    return [sorted(steps[parent] for parent in call.parents) for call in record.calls]


def bodies(record: Recorded) -> list[list[dict[str, Any]]]:
    stored = {r.id: r.body for r in record.sink if type(r).__name__ == "Message"}
    return [[stored[name] for name in call.messages] for call in record.calls]


def look(q: str) -> str:
    """Look something up."""
    return "42"


def test_a_single_agent_is_its_name(provider: Provider, record: Recorded):
    record(through(agent("writer")))
    assert (record.roles, record.statuses, record.calls[0].integration) == (["writer"], ["ok"], "autogen")
    assert bodies(record) == [[*provider.requests[0]["messages"]]]


def test_round_robin_with_one_client_for_all(provider: Provider, record: Recorded):
    shared = autogen_client()
    members = [agent("a", shared), agent("b", shared, model_client_stream=True), agent("c", shared)]
    record(through(RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(6))))
    assert record.roles == ["a", "b", "c", "a", "b"]
    assert [call.turn for call in record.calls] == [0, 0, 0, 1, 1]
    assert [call.streamed for call in record.calls] == [False, True, False, False, True]
    assert parents(record) == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert bodies(record) == [request["messages"] for request in provider.requests]


def test_tool_calls_and_reflection(nowhere: None, record: Recorded):
    def reply(call):
        return asks(tool_call("look", {"q": "x"})) if call.turn == 0 else "done"

    record(through(agent("writer", tools=[look], reflect_on_tool_use=True)), reply)
    assert record.roles == ["writer", "writer"]
    assert parents(record) == [[], [0]]
    assert bodies(record)[1][-1]["content"] == "42"


def test_max_tool_iterations_count_as_turns(nowhere: None, record: Recorded):
    def reply(call):
        return asks(tool_call("look", {"q": "x"}, f"c{call.turn}")) if call.turn < 3 else "done"

    record(through(agent("writer", tools=[look], max_tool_iterations=5)), reply)
    assert [call.turn for call in record.calls] == [0, 1, 2, 3]
    assert parents(record) == [[], [0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output(nowhere: None, record: Recorded, stream: bool):
    class Reply(BaseModel):
        value: int

    seen = []

    async def solve(task):
        writer = agent("writer", output_content_type=Reply, model_client_stream=stream)
        critic = agent("critic")
        kinds = [StructuredMessage[Reply]]
        team = RoundRobinGroupChat([writer, critic], max_turns=2, custom_message_types=kinds)
        seen.extend((await team.run(task="hi")).messages)
        return 1.0

    record(solve, lambda call: '{"value": 3}' if call.role == "writer" else "fine")
    assert seen[1].content == Reply(value=3)
    assert parents(record) == [[], [0]]
    assert record.calls[0].params["response_format"]["type"] == "json_schema"


def test_the_selector_has_a_role_of_its_own(nowhere: None, record: Recorded):
    team = SelectorGroupChat(
        [agent("a"), agent("b"), agent("c")],
        autogen_client(),
        termination_condition=MaxMessageTermination(4),
        name="crew",
    )
    record(through(team), lambda call: "cba"[call.turn] if call.role == "crew/selector" else f"{call.role}{call.turn}")
    assert record.roles == ["crew/selector", "c", "crew/selector", "b", "crew/selector", "a"]
    assert parents(record) == [[], [], [1], [1], [1, 3], [1, 3]]


def test_a_selectors_retries_are_its_own_turns(nowhere: None, record: Recorded):
    team = SelectorGroupChat(
        [agent("a"), agent("b"), agent("c")],
        autogen_client(),
        termination_condition=MaxMessageTermination(2),
        model_client_streaming=True,
    )
    said = {0: "nobody", 1: "b"}
    record(through(team), lambda call: said[call.turn] if call.role.endswith("selector") else "x")
    assert record.roles == ["SelectorGroupChat/selector", "SelectorGroupChat/selector", "b"]
    assert parents(record) == [[], [0], []]


def test_swarm_handoffs(nowhere: None, record: Recorded):
    def reply(call):
        to = {"front": "back", "back": "front"}[call.role]
        return asks(tool_call(f"transfer_to_{to}", {}, f"c{call.step}")) if call.step < 2 else "TERMINATE"

    team = Swarm(
        [agent("front", handoffs=["back"]), agent("back", handoffs=[Handoff(target="front")])],
        termination_condition=TextMentionTermination("TERMINATE") | MaxMessageTermination(20),
    )
    record(through(team), reply)
    assert record.roles == ["front", "back", "front"]


def test_graph_flow_with_branches_at_once(nowhere: None, record: Recorded):
    members = [agent(name) for name in ("start", "left", "right", "end")]
    start, left, right, end = members
    builder = DiGraphBuilder()
    for member in members:
        builder.add_node(member)
    builder.add_edge(start, left).add_edge(start, right).add_edge(left, end).add_edge(right, end)
    team = GraphFlow(members, builder.build())

    async def reply(call):
        await asyncio.sleep(0.005 if call.role == "left" else 0)
        return f"said {call.role}"

    record(through(team), reply)
    roles = {call.step: call.role for call in record.calls}
    assert sorted(roles.values()) == ["end", "left", "right", "start"]
    assert [sorted(roles[p] for p in read) for read in parents(record)][3] == ["left", "right", "start"]


LEDGER = {
    "is_request_satisfied": {"reason": "", "answer": False},
    "is_in_loop": {"reason": "", "answer": False},
    "is_progress_being_made": {"reason": "", "answer": True},
    "next_speaker": {"reason": "", "answer": "coder"},
    "instruction_or_question": {"reason": "", "answer": "go on"},
}


def test_magentic_one(nowhere: None, record: Recorded):
    def reply(call):
        if call.role == "coder":
            return "code"
        if "JSON" not in call.messages[-1]["content"]:
            return f"plan {call.turn}"
        done = {"is_request_satisfied": {"reason": "", "answer": call.step > 3}}
        return json.dumps({**LEDGER, **done})

    team = MagenticOneGroupChat([agent("coder")], autogen_client(), name="one")
    record(through(team), reply)
    orchestrator = "one/orchestrator"
    assert record.roles == [orchestrator, orchestrator, orchestrator, "coder", orchestrator, orchestrator]
    assert 3 in parents(record)[4]


def test_society_of_mind_speaks_for_itself(nowhere: None, record: Recorded):
    inner = RoundRobinGroupChat([agent("a"), agent("b")], termination_condition=MaxMessageTermination(3))
    society = SocietyOfMindAgent("society", team=inner, model_client=autogen_client())
    team = RoundRobinGroupChat([society, agent("last")], termination_condition=MaxMessageTermination(3))
    record(through(team), lambda call: f"said {call.role}")
    assert record.roles == ["a", "b", "society", "last"]
    assert parents(record)[2:] == [[0, 1], [2]]


@pytest.mark.parametrize("stream", [False, True])
def test_roles_are_a_stack_through_agent_tools(nowhere: None, record: Recorded, stream: bool):
    def reply(call):
        if call.role == "boss" and call.turn == 0:
            return asks(tool_call("writer", {"task": "write"}))
        return f"said {call.role}"

    boss = agent("boss", tools=[AgentTool(agent("writer"))], reflect_on_tool_use=True, model_client_stream=stream)
    record(through(boss), reply)
    assert record.roles == ["boss", "writer", "boss"]
    assert parents(record) == [[], [], [0, 1]]


def test_a_team_as_a_tool(nowhere: None, record: Recorded):
    def reply(call):
        if call.role == "boss" and call.turn == 0:
            return asks(tool_call("crew", {"task": "write"}))
        return f"said {call.role}"

    team = RoundRobinGroupChat([agent("a"), agent("b")], termination_condition=MaxMessageTermination(3))
    boss = agent("boss", tools=[TeamTool(team, "crew", "A crew.")], reflect_on_tool_use=True)
    record(through(boss), reply)
    assert record.roles == ["boss", "a", "b", "boss"]
    assert parents(record)[3] == [0, 2]


def test_nested_teams_of_the_same_names_are_told_apart(nowhere: None, record: Recorded):
    def nested(name):
        return RoundRobinGroupChat([agent("writer"), agent("critic")], max_turns=2, name=name)

    outer = RoundRobinGroupChat([nested("one"), nested("two"), agent("judge")], max_turns=3)
    record(through(outer), lambda call: f"said {call.role}")
    assert record.roles == ["one/writer", "one/critic", "two/writer", "two/critic", "judge"]
    assert parents(record)[4] == [0, 1, 2, 3]


def test_nested_teams_with_names_of_their_own_keep_them(nowhere: None, record: Recorded):
    inner = RoundRobinGroupChat([agent("writer")], max_turns=1, name="inner")
    record(through(RoundRobinGroupChat([inner, agent("judge")], max_turns=2)), lambda call: f"said {call.role}")
    assert record.roles == ["writer", "judge"]


def test_teams_at_once_with_the_same_names(nowhere: None, record: Recorded):
    async def solve(task):
        def team():
            ends = MaxMessageTermination(4)
            return RoundRobinGroupChat([agent("a"), agent("b")], termination_condition=ends)

        await asyncio.gather(*(team().run(task=f"task {i}") for i in range(3)))
        return 1.0

    async def reply(call):
        await asyncio.sleep(0.001 * (call.step % 3))
        return f"{call.messages[1]['content']} {call.role} {call.state.prompt[0].content}"

    record(solve, reply)
    assert {role: record.roles.count(role) for role in record.roles} == {"a": 6, "b": 3}
    for call, messages in zip(record.calls, bodies(record), strict=True):
        assert messages[0]["content"] == f"I am {call.role}."
    assert sorted(len(read) for read in parents(record)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_wrapped_agents_keep_their_name(nowhere: None, record: Recorded):
    wrapper = MessageFilterAgent("writer", agent("writer"), MessageFilterConfig(per_source=[]))
    record(through(RoundRobinGroupChat([wrapper, agent("critic")], max_turns=2)), lambda call: "x")
    assert record.roles == ["writer", "critic"]


class Own(BaseChatAgent):
    """An agent that speaks through the plain SDK, first of all, and then through another agent."""

    def __init__(self, name: str, other: AssistantAgent | None = None) -> None:
        super().__init__(name, "own")
        self.other = other

    @property
    def produced_message_types(self):
        return (TextMessage,)

    async def on_messages(self, messages, cancellation_token):
        said = "nothing"
        if self.other is not None:
            said = (await self.other.on_messages(messages, cancellation_token)).chat_message.content
        async with AsyncOpenAI() as plain:
            body = [{"role": "user", "content": said}]
            answer = await plain.chat.completions.create(model="p", messages=body)
        return Response(chat_message=TextMessage(content=answer.choices[0].message.content, source=self.name))

    async def on_reset(self, cancellation_token):
        pass


def test_calls_around_the_model_client_belong_to_their_agent(nowhere: None, record: Recorded):
    team = RoundRobinGroupChat([Own("own", agent("other")), agent("last")], max_turns=2)
    record(through(team), lambda call: f"said {call.role}")
    assert record.roles == ["other", "own", "last"]


def test_calls_in_tools_belong_to_the_tool(nowhere: None, record: Recorded):
    async def judge(q: str) -> str:
        async with AsyncOpenAI() as plain:
            await plain.chat.completions.create(model="p", messages=[{"role": "user", "content": q}])
        return "good"

    def reply(call):
        return asks(tool_call("judge", {"q": "x"})) if call.step == 0 else "done"

    tools = [FunctionTool(judge, "Judge.")]
    record(through(agent("boss", tools=tools, reflect_on_tool_use=True)), reply)
    assert record.roles == ["boss", "boss/judge", "boss"]


def test_calls_of_no_agent_are_the_apps(nowhere: None, record: Recorded):
    async def solve(task):
        team = RoundRobinGroupChat([agent("a")], max_turns=1)
        async with AsyncOpenAI() as plain:
            for _ in range(2):
                await plain.chat.completions.create(model="p", messages=[{"role": "user", "content": "x"}])
                await team.run(task="hi")
        return 1.0

    record(solve, lambda call: "x")
    assert record.roles == ["app", "a", "app", "a"]


def test_a_run_left_half_read_leaves_no_role_behind(nowhere: None, record: Recorded):
    async def solve(task):
        stream = agent("a", model_client_stream=True).run_stream(task="hi")
        async for _ in stream:
            async with AsyncOpenAI() as plain:
                await plain.chat.completions.create(model="p", messages=[{"role": "user", "content": "x"}])
        return 1.0

    record(solve, lambda call: "x")
    assert set(record.roles) == {"app", "a"}
    assert record.roles.count("a") == 1
