"""AutoGen's core without agentchat: roles by the type of the agent, in runtimes started inside and before."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from autogen_core import (
    AgentId,
    CancellationToken,
    DefaultTopicId,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    message_handler,
    type_subscription,
)
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import AsyncOpenAI

from cotune.integrations.apps.activation import activate
from cotune.integrations.apps.autogen.models import silence_mismatch
from tests.integrations.autogen_models import autogen_client
from tests.integrations.recorded import Recorded, Sink, episode

activate()


@dataclass
class Ask:
    text: str


@dataclass
class Draft:
    text: str


class Writer(RoutedAgent):
    """Keeps its client where it likes."""

    def __init__(self, client: Any) -> None:
        super().__init__("writes")
        self._llm = client

    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> Draft:
        found = await self._llm.create([UserMessage(content=message.text, source="user")])
        review = await self.send_message(Draft(found.content), AgentId("critic", self.id.key))
        return Draft(f"{found.content}, {review.text}")


class Critic(RoutedAgent):
    """Asks the plain SDK, and a tool that does."""

    def __init__(self) -> None:
        super().__init__("criticises")
        self._tool = FunctionTool(self.look, "looks", name="look")

    async def look(self, text: str) -> str:
        return str(await plain(text))

    @message_handler
    async def on_draft(self, message: Draft, ctx: MessageContext) -> Draft:
        await self._tool.run_json({"text": "x"}, CancellationToken())
        return Draft(await plain(message.text))


async def plain(text: str) -> str:
    messages: Any = [{"role": "user", "content": text}]
    reply = await AsyncOpenAI().chat.completions.create(model="m", messages=messages)
    return str(reply.choices[0].message.content)


async def team() -> SingleThreadedAgentRuntime:
    runtime = SingleThreadedAgentRuntime()
    client = autogen_client()
    await Writer.register(runtime, "writer", lambda: Writer(client))
    await Critic.register(runtime, "critic", Critic)
    return runtime


def test_roles_are_types_of_agents(nowhere, record: Recorded) -> None:
    async def solve(task):
        runtime = await team()
        runtime.start()
        found = await runtime.send_message(Ask("hello"), AgentId("writer", "any"))
        await runtime.stop_when_idle()
        await plain("after")
        return float(found.text == "said, said")

    outcome = record(solve, lambda call: "said")
    assert outcome.rewards == {"team": 1.0}
    assert record.roles == ["writer", "critic/look", "critic", "app"]
    assert record.calls[0].integration == "autogen"


def test_a_runtime_started_before_serves_episodes_at_once(nowhere) -> None:
    async def episodes() -> list[Sink]:
        runtime = await team()
        runtime.start()
        sinks = [Sink() for _ in range(4)]

        def made(number: int) -> Any:
            async def solve(task):
                await runtime.send_message(Ask(f"hello {number}"), AgentId("writer", str(number)))
                return 1.0

            return solve

        solving = [episode(made(i), lambda call: "said", sink) for i, sink in enumerate(sinks)]
        outcomes = await asyncio.gather(*solving)
        await runtime.stop_when_idle()
        assert all(outcome.error is None for outcome in outcomes)
        return sinks

    for sink in asyncio.run(episodes()):
        assert [call.role for call in sink.calls()] == ["writer", "critic/look", "critic"]


@type_subscription("default")
class Listener(RoutedAgent):
    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> None:
        await plain(message.text)


def test_what_is_published_belongs_to_the_episode(nowhere, record: Recorded) -> None:
    async def run() -> None:
        runtime = SingleThreadedAgentRuntime()
        for name in ("left", "right"):
            await Listener.register(runtime, name, lambda: Listener("listens"))
        runtime.start()

        async def solve(task):
            await runtime.publish_message(Ask("x"), DefaultTopicId())
            await runtime.stop_when_idle()
            return 1.0

        outcome = await episode(solve, lambda call: "said", record.sink)
        assert outcome.error is None

    asyncio.run(run())
    assert sorted(record.roles) == ["left", "right"]


def test_no_warning_of_the_name_of_a_model_that_an_agent_of_the_core_asks(nowhere, record: Recorded) -> None:
    async def solve(task):
        runtime = SingleThreadedAgentRuntime()
        await Writer.register(runtime, "writer", lambda: Writer(OpenAIChatCompletionClient(model="gpt-4o")))
        await Critic.register(runtime, "critic", Critic)
        runtime.start()
        await runtime.send_message(Ask("hello"), AgentId("writer", "any"))
        await runtime.stop_when_idle()
        return 1.0

    silence_mismatch.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record(solve, lambda call: "said")
    assert record.roles[0] == "writer"
    assert not [one for one in caught if "mismatch" in str(one.message)]


@pytest.mark.parametrize("before", [True, False])
def test_an_episode_that_is_stopped_leaves_no_traceback_in_the_log(nowhere, before: bool, caplog) -> None:
    """The runtime logs a cancellation like an error, with its traceback: of the message handler that it hit."""
    asked = asyncio.Event()

    async def hangs(call: Any) -> str:
        asked.set()
        await asyncio.sleep(60)
        return "never"

    async def run() -> None:
        runtime = SingleThreadedAgentRuntime()
        await Listener.register(runtime, "listener", lambda: Listener("listens"))
        if before:
            runtime.start()

        async def solve(task):
            if not before:
                runtime.start()
            await runtime.publish_message(Ask("x"), DefaultTopicId())
            await runtime.stop_when_idle()
            return 1.0

        running = asyncio.ensure_future(episode(solve, hangs))
        await asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert not [record for record in caplog.records if record.name == "autogen_core" and record.exc_info]


def test_what_the_application_itself_cancels_is_logged_as_ever(nowhere, caplog) -> None:
    async def cancels(call: Any) -> str:
        raise asyncio.CancelledError

    async def solve(task):
        runtime = SingleThreadedAgentRuntime()
        await Listener.register(runtime, "listener", lambda: Listener("listens"))
        runtime.start()
        await runtime.publish_message(Ask("x"), DefaultTopicId())
        await runtime.stop_when_idle()
        return 1.0

    asyncio.run(episode(solve, cancels))
    assert [record for record in caplog.records if record.name == "autogen_core" and record.exc_info]


APP = """
    import asyncio, json, sys
    from dataclasses import dataclass
    import cotune
    from autogen_core import AgentId, MessageContext, RoutedAgent, SingleThreadedAgentRuntime, message_handler
    from openai import AsyncOpenAI

    @dataclass
    class Text:
        text: str

    class Echo(RoutedAgent):
        @message_handler
        async def on_text(self, message: Text, ctx: MessageContext) -> Text:
            messages = [{"role": "user", "content": message.text}]
            reply = await AsyncOpenAI().chat.completions.create(model="m", messages=messages)
            return Text(reply.choices[0].message.content)

    async def main():
        runtime = SingleThreadedAgentRuntime()
        await Echo.register(runtime, "echo", lambda: Echo("echoes"))
        runtime.start()
        await runtime.send_message(Text("hello"), AgentId("echo", "k"))
        await runtime.stop_when_idle()

    with cotune.trace() as t:
        asyncio.run(main())
    loaded = any(name.startswith("autogen_agentchat") for name in sys.modules)
    print(json.dumps([[call.role for call in t.calls], loaded]))
"""


@pytest.mark.slow
def test_agentchat_is_not_needed(provider, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    done = subprocess.run([sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["echo"], False]
