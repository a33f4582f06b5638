"""AutoGen's agentchat and core: hand-offs, conditions, a shared team, a person, handlers that raise."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from autogen_agentchat.agents import AssistantAgent, UserProxyAgent
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat, Swarm
from autogen_core import (
    DefaultTopicId,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    TypeSubscription,
    message_handler,
)
from autogen_core.models import UserMessage

import cotune
from tests.integrations.autogen_models import autogen_client
from tests.trainer.before.check.apps.table import NOT, Row


def agent(name: str, **options: Any) -> AssistantAgent:
    return AssistantAgent(name, model_client=autogen_client(api_key="none"), **options)


def team_of(make: Any) -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        return float(len((await make().run(task=one["question"])).messages))

    return solve


def swarm() -> Any:
    def make() -> Swarm:
        members = [
            agent("planner", handoffs=["analyst", "lawyer", "writer"]),
            agent("analyst", handoffs=["planner"]),
            agent("lawyer", handoffs=["planner"]),
            agent("writer", handoffs=["planner"]),
        ]
        return Swarm(members, termination_condition=MaxMessageTermination(8))

    return team_of(make)


def flow_with_a_condition() -> Any:
    def make() -> GraphFlow:
        writer, critic, editor = (agent(name) for name in ("writer", "critic", "editor"))
        builder = DiGraphBuilder()
        builder.add_node(writer).add_node(critic).add_node(editor)
        builder.add_edge(writer, critic)
        builder.add_edge(critic, writer, condition=lambda message: "ship it" not in message.to_model_text().lower())
        builder.add_edge(critic, editor, condition=lambda message: "ship it" in message.to_model_text().lower())
        builder.set_entry_point(writer)
        critic._system_messages[0].content = "Criticise. Answer 'ship it' where it is good."
        return GraphFlow(builder.get_participants(), builder.build(), termination_condition=MaxMessageTermination(12))

    return team_of(make)


def shared_team() -> Any:
    team = RoundRobinGroupChat([agent("one"), agent("two")], termination_condition=MaxMessageTermination(3))
    return team_of(lambda: team)


def with_a_person() -> Any:
    def make() -> RoundRobinGroupChat:
        members = [agent("assistant"), UserProxyAgent("person")]
        return RoundRobinGroupChat(members, termination_condition=TextMentionTermination("APPROVE"))

    return team_of(make)


@dataclass
class Ask:
    text: str


@dataclass
class Job:
    text: str


class Router(RoutedAgent):
    """Reads JSON in a handler; the runtime logs what it raises and goes on."""

    def __init__(self) -> None:
        super().__init__("routes")
        self._client = autogen_client(api_key="none")

    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> None:
        found = await self._client.create([UserMessage(content=f"{message.text} Answer in JSON.", source="user")])
        for job in json.loads(str(found.content))["jobs"]:
            await self.publish_message(Job(str(job)), DefaultTopicId())


class Worker(RoutedAgent):
    def __init__(self, broken: bool = False) -> None:
        super().__init__("works")
        self._client, self._broken = autogen_client(api_key="none"), broken

    @message_handler
    async def on_job(self, message: Job, ctx: MessageContext) -> None:
        await self._client.create([UserMessage(content=message.text, source="user")])
        if self._broken:
            raise LookupError("no shelf to put it")


class Solver(RoutedAgent):
    """Reads its answer in a form that its prompt only gives an example of, and raises without it."""

    def __init__(self) -> None:
        super().__init__("solves")
        self._client = autogen_client(api_key="none")

    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> None:
        form = "Say the number in the form of {{answer}}. For example, 'The answer is {{42}}.'"
        found = await self._client.create([UserMessage(content=f"{message.text} {form}", source="user")])
        if (number := re.search(r"\{\{(\d+)\}\}", str(found.content))) is None:
            raise ValueError("The response does not contain the answer.")
        await self.publish_message(Job(number.group(1)), DefaultTopicId())


def core(broken: bool = False, first: type = Ask, asks: type[Router | Solver] = Router) -> Any:
    @cotune.workflow
    async def solve(one: Any) -> float:
        runtime = SingleThreadedAgentRuntime()
        await asks.register(runtime, "router", asks)
        await Worker.register(runtime, "worker", lambda: Worker(broken))
        for name in ("router", "worker"):
            await runtime.add_subscription(TypeSubscription("default", name))
        runtime.start()
        await runtime.publish_message(first(one["question"]), DefaultTopicId())
        await runtime.stop_when_idle()
        return 1.0

    return solve


ROWS = {
    "core_quotes_an_example": Row(lambda: core(asks=Solver), {"router", "worker"}, never=["swallowed"]),
    "swarm": Row(swarm, {"planner", "analyst", "lawyer", "writer"}),
    "flow_with_a_condition": Row(flow_with_a_condition, {"writer", "critic", "editor"}),
    "shared_team": Row(shared_team, {"one", "two"}, NOT, [("blocks", "two episodes"), ("warns", "outlives")]),
    "with_a_person": Row(with_a_person, {"assistant"}, NOT, [("blocks", "waits for a person")]),
    "core_reads_json": Row(
        core, {"router"}, says=[("warns", "Last answer of that run: router"), ("note", "worker: ran without a call")]
    ),
    "core_handler_raises": Row(
        lambda: core(True, Job), {"worker"}, says=[("warns", "no shelf to put it"), ("note", "router")]
    ),
}
