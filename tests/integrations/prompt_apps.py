"""Applications whose prompts are known, in each of the frameworks: what stands in their source is what is found."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any, TypedDict

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", CREWAI_TESTING="true")
os.environ.setdefault("CREWAI_STORAGE_DIR", "cotune-tests")

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from crewai import LLM, Agent, Crew, Task
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

import cotune
from tests.integrations.autogen_models import autogen_client

TRIAGE = "You sort the mail of a small shop. Today is {today}. Answer with one word: orders, payments or other."
REPLY = """Write a reply to this customer.

<mail>
{mail}
</mail>

The desk is {desk}. Use {{curly}} braces never, keep to three sentences, and promise nothing."""
PRIMARY = "You write short poems on request. Use plain words, four lines, and no title."
CRITIC = "You criticise poems. Name one weak line and say why; when nothing is weak, say APPROVED."
SOLVER = "You solve word problems. Think step by step, then give the number alone on the last line."
CHECKER = """Check the solution of a word problem.

Problem:
{problem}

Solution:
{solution}

Say correct or wrong, and why."""
GOAL, BACKSTORY = "Plan trips that fit the wishes of a guest", "You know every train."
TOOL = "Evaluate an arithmetic expression with the four operations and brackets."
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": TOOL,
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "The expression, such as (3 + 4) * 2."}},
            },
        },
    }
]


class Mail(TypedDict, total=False):
    mail: str
    desk: str
    reply: str


def _graph() -> Any:
    # Clients of one address share connections, and an earlier test may have had a server at this one.
    model = ChatOpenAI(model="m", max_retries=1)
    chain = ChatPromptTemplate.from_messages([("human", REPLY)]) | model

    async def triage(state: Mail) -> Any:
        today = datetime.now(UTC).strftime("%A, %d %B %Y")
        asked = [SystemMessage(TRIAGE.format(today=today)), HumanMessage(state["mail"])]
        return {"desk": str((await model.ainvoke(asked)).content)}

    async def reply(state: Mail) -> Any:
        return {"reply": str((await chain.ainvoke({"mail": state["mail"], "desk": state["desk"]})).content)}

    builder = StateGraph(Mail)
    builder.add_node("triage", triage)
    builder.add_node("reply", reply)
    builder.add_edge(START, "triage")
    builder.add_edge("triage", "reply")
    builder.add_edge("reply", END)
    return builder.compile()


async def langgraph(task: Any) -> float:
    state = await _graph().ainvoke({"mail": task["q"]})
    return float(bool(state["reply"]))


async def autogen(task: Any) -> float:
    client = autogen_client(max_retries=0)
    members = [
        AssistantAgent("primary", client, system_message=PRIMARY),
        AssistantAgent("critic", client, system_message=CRITIC),
    ]
    result = await RoundRobinGroupChat(members, max_turns=4).run(task=task["q"])
    return len(result.messages) / 10


async def crewai(task: Any) -> float:
    llm = LLM(model="openai/gpt-4o-mini", max_retries=0)
    agent = Agent(
        role="Travel Guide",
        goal="Plan trips that fit the wishes of a guest",
        backstory="You know every train.",
        llm=llm,
    )
    plan = Task(description=f"Plan a day trip: {task['q']}", expected_output="A plan with times.", agent=agent)
    return float(bool((await Crew(agents=[agent], tasks=[plan]).kickoff_async()).raw))


async def sdk(task: Any) -> float:
    client = openai.AsyncOpenAI(max_retries=0)
    with cotune.role("solver"):
        asked = [{"role": "system", "content": SOLVER}, {"role": "user", "content": task["q"]}]
        made = await client.chat.completions.create(model="m", messages=asked, tools=TOOLS)  # type: ignore[arg-type]
    solution = str(made.choices[0].message.content)
    with cotune.role("checker"):
        text = CHECKER.format(problem=task["q"], solution=solution)
        made = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    with cotune.role("reader"):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["q"]}])
    return float("correct" in str(made.choices[0].message.content))


APPLICATIONS = {"langgraph": langgraph, "autogen": autogen, "crewai": crewai, "sdk": sdk}
plain = cotune.workflow(sdk)
