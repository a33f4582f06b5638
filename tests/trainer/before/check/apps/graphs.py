"""LangGraph: agents with tools, routers, loops, interrupts, the functional API, a memory."""

from __future__ import annotations

import json
import operator
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlparse

from langchain.agents import create_agent
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

import cotune
from tests.trainer.before.check.apps.table import NOT, UNDECIDED, Row, model, said


class State(TypedDict, total=False):
    question: str
    draft: str
    score: int
    topics: list[str]
    notes: Annotated[list[str], operator.add]
    route: str


def of(graph: Any) -> Any:
    return cotune.workflow(graph, inputs=lambda one: {"question": one["question"]}, reward=lambda state, one: 1.0)


def writes(key: str, prompt: str) -> Any:
    def node(state: State) -> dict[str, Any]:
        text = said(f"{prompt} {state.get('question', '')}")
        return {key: [text] if key == "notes" else text}

    return node


def travel_agent() -> Any:
    @tool
    def search_flights(destination: str, departure: str) -> str:
        """Search flights.

        Args:
            destination: The city to fly to
            departure: The day of departure, YYYY-MM-DD
        """
        return f"{(datetime.strptime(departure, '%Y-%m-%d') - datetime(2000, 1, 1)).days} days to {destination}"

    @tool
    def read_page(url: str) -> str:
        """Read a web page."""
        if urlparse(url).scheme not in ("http", "https"):
            raise ValueError(f"no address of the web: {url}")
        return "a page"

    agent = create_agent(model(), [search_flights, read_page], name="travel_agent")

    @cotune.workflow
    async def solve(one: Any) -> float:
        found = await agent.ainvoke({"messages": [("user", one["question"])]})
        return float(len(found["messages"]))

    return solve


PASSAGES = ["the only passage"]


def reads_by_index() -> Any:
    @tool
    def passage(number: int) -> str:
        """Give a passage of the document."""
        return PASSAGES[number]

    agent = create_agent(model(), [passage], name="reader")

    @cotune.workflow
    def solve(one: Any) -> float:
        agent.invoke({"messages": [("user", one["question"])]})
        return 1.0

    return solve


SPECIALISTS = {"billing": "You do bills.", "refunds": "You do refunds."}


def routes_by_dict() -> Any:
    def triage(state: State) -> dict[str, Any]:
        choice = said(f"Which department answers? {state['question']}").strip().lower()
        return {"route": choice, "notes": [SPECIALISTS[choice]]}

    builder = StateGraph(State)
    builder.add_node("triage", triage)
    for name, prompt in SPECIALISTS.items():
        builder.add_node(name, writes("notes", prompt))
        builder.add_edge(name, END)
    builder.add_edge(START, "triage")
    builder.add_conditional_edges("triage", lambda state: state["route"])
    return of(builder.compile())


def reflects() -> Any:
    """Goes on until its critic says two words, which its prompt quotes."""

    def ready(state: State) -> str:
        return END if "looks good" in state["notes"][-1].lower() else "write"

    builder = StateGraph(State)
    builder.add_node("write", writes("draft", "Write an essay."))
    builder.add_node("reflect", writes("notes", 'Criticise the essay. Say "looks good" where nothing is wrong.'))
    builder.add_edge(START, "write")
    builder.add_edge("write", "reflect")
    builder.add_conditional_edges("reflect", ready, ["write", END])
    return of(builder.compile().with_config(recursion_limit=9))


class Grade(BaseModel):
    score: int
    why: str


def graded() -> Any:
    """A loop that ends at a high grade; how high a grade can be, no schema says."""

    def grade(state: State) -> dict[str, Any]:
        return {"score": model().with_structured_output(Grade).invoke(f"Grade: {state['draft']}").score}

    builder = StateGraph(State)
    builder.add_node("write", writes("draft", "Write a poem."))
    builder.add_node("grade", grade)
    builder.add_edge(START, "write")
    builder.add_edge("write", "grade")
    builder.add_conditional_edges("grade", lambda state: END if state["score"] >= 80 else "write")
    return of(builder.compile().with_config(recursion_limit=12))


def interrupted() -> Any:
    def ask(state: State) -> dict[str, Any]:
        return {"notes": [interrupt({"draft": state["draft"]})]}

    builder = StateGraph(State)
    builder.add_node("draft", writes("draft", "Draft a mail."))
    builder.add_node("ask", ask)
    builder.add_node("send", writes("notes", "Polish the mail."))
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "ask")
    builder.add_edge("ask", "send")
    graph = builder.compile(checkpointer=InMemorySaver())

    @cotune.workflow
    async def solve(one: Any) -> float:
        config: Any = {"configurable": {"thread_id": str(id(object()))}}
        state = await graph.ainvoke({"question": one["question"]}, config)
        assert "__interrupt__" in state
        return float(len((await graph.ainvoke(Command(resume="yes"), config))["notes"]))

    return solve


def functional() -> Any:
    @task
    def outline(topic: str) -> str:
        return said(f"Outline {topic}")

    @task
    def essay(plan: str) -> str:
        return said(f"Write by this plan: {plan}")

    @entrypoint()
    def writing(topic: str) -> str:
        return essay(outline(topic).result()).result()

    @cotune.workflow
    async def solve(one: Any) -> float:
        return float(len(await writing.ainvoke(one["question"])))

    return solve


def maps_over_json() -> Any:
    """Reads JSON that only a sentence describes, and sends each part to a worker."""

    def plan(state: State) -> dict[str, Any]:
        found = json.loads(said(f"Name three topics on {state['question']}, as a JSON object with the list topics."))
        return {"topics": list(found["topics"])}

    builder = StateGraph(State)
    builder.add_node("plan", plan)
    builder.add_node("research", writes("notes", "Research"))
    builder.add_node("report", writes("draft", "Report"))
    builder.add_edge(START, "plan")
    each = lambda state: [Send("research", {"question": topic}) for topic in state["topics"]]  # noqa: E731
    builder.add_conditional_edges("plan", each, ["research"])
    builder.add_edge("research", "report")
    return of(builder.compile())


def has_a_mistake() -> Any:
    """Whatever the model says, a key is missing."""

    def write(state: State) -> dict[str, Any]:
        text = said(state["question"])
        return {"draft": text + state["qestion"]}  # type: ignore[typeddict-item]

    builder = StateGraph(State)
    builder.add_node("write", write)
    builder.add_edge(START, "write")
    return of(builder.compile())


TABLES = {"orders": "id, total", "customers": "id, name"}


def corrected_by_a_tool() -> Any:
    """A tool that says which names there are; only behind a right one another agent works, which is not found."""

    @tool
    def describe(table: str) -> str:
        """Describe a table of the shop."""
        if table not in TABLES:
            return f"Error: there is no {table!r}. Valid tables: {', '.join(TABLES)}"
        return str(explainer.invoke({"messages": [("user", TABLES[table])]})["messages"][-1].text)

    explainer = create_agent(model(), [], name="explainer")
    analyst = create_agent(model(), [describe], name="analyst")

    @cotune.workflow
    async def solve(one: Any) -> float:
        await analyst.ainvoke({"messages": [("user", one["question"])]})
        return 1.0

    return solve


def remembers() -> Any:
    """A memory with one thread for every episode."""

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model().invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    graph = builder.compile(checkpointer=InMemorySaver())

    @cotune.workflow
    async def solve(one: Any) -> float:
        config: Any = {"configurable": {"thread_id": "1"}}
        await graph.ainvoke({"messages": [("user", one["question"])]}, config)
        return 1.0

    return solve


def waits_for_a_person() -> Any:
    """It reads what comes behind an interrupt, which nobody answers."""

    def ask(state: State) -> dict[str, Any]:
        return {"notes": [interrupt({"draft": state["draft"]})]}

    builder = StateGraph(State)
    builder.add_node("draft", writes("draft", "Draft a mail."))
    builder.add_node("ask", ask)
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "ask")
    graph = builder.compile(checkpointer=InMemorySaver())

    @cotune.workflow
    async def solve(one: Any) -> float:
        config: Any = {"configurable": {"thread_id": str(id(object()))}}
        state = await graph.ainvoke({"question": one["question"]}, config)
        return float(len(state["sent"]))

    return solve


def stops_for_a_person() -> Any:
    """It takes what there is before an interrupt for its outcome, and never goes on."""

    def ask(state: State) -> dict[str, Any]:
        return {"notes": [interrupt({"draft": state["draft"]})]}

    builder = StateGraph(State)
    builder.add_node("draft", writes("draft", "Draft a mail."))
    builder.add_node("ask", ask)
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "ask")
    return of(builder.compile(checkpointer=InMemorySaver()))


def pauses(**where: Any) -> Any:
    """It stops where the graph was told to, and is never resumed."""
    builder = StateGraph(State)
    for before, node in ((START, "draft"), ("draft", "send")):
        builder.add_node(node, writes("draft", f"{node} a mail."))
        builder.add_edge(before, node)
    return of(builder.compile(checkpointer=InMemorySaver(), **where))


def forced_tool() -> Any:
    """A tool that must be called, and a second agent that reads the call, whose id is chance."""

    @tool
    def schema(table: str) -> str:
        """The columns of a table."""
        return "id, name"

    def look(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model().bind_tools([schema], tool_choice="any").invoke(state["messages"])]}

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model().invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("look", look)
    builder.add_node("run", ToolNode([schema]))
    builder.add_node("answer", answer)
    builder.add_edge(START, "look")
    builder.add_edge("look", "run")
    builder.add_edge("run", "answer")
    return cotune.workflow(
        builder.compile(),
        inputs=lambda one: {"messages": [("user", one["question"])]},
        reward=lambda state, one: 1.0,
    )


class Grounded(BaseModel):
    binary_score: str = Field(description="The answer is grounded in the documents, 'yes' or 'no'")


class Useful(BaseModel):
    binary_score: str = Field(description="The answer is useful, 'yes' or 'no'")


def two_graders() -> Any:
    """A loop that ends when both graders, alike but for their names, say yes."""

    def grades(state: State) -> str:
        for kind in (Grounded, Useful):
            grade: Any = model().with_structured_output(kind).invoke(f"Grade: {state['draft']}")
            if grade.binary_score != "yes":
                return "write"
        return END

    builder = StateGraph(State)
    builder.add_node("write", writes("draft", "Write."))
    builder.add_edge(START, "write")
    builder.add_conditional_edges("write", grades, ["write", END])
    return of(builder.compile())


def routes_on_a_word() -> Any:
    """Only a word in the code of an edge leads to the second agent; nothing fails without it."""

    def way(state: State) -> str:
        return "escalate" if "urgent" in state["draft"].lower() else END

    builder = StateGraph(State)
    builder.add_node("sort", writes("draft", "Sort the mail."))
    builder.add_node("escalate", writes("notes", "Write to the manager."))
    builder.add_edge(START, "sort")
    builder.add_conditional_edges("sort", way, ["escalate", END])
    return of(builder.compile())


def _pipeline() -> Any:
    """It fails before its first call: the template has a variable that nobody fills."""

    def write(state: State) -> dict[str, Any]:
        prompt = ChatPromptTemplate.from_template('Answer {question} like {"answer": 1}')
        return {"draft": (prompt | model()).invoke({"question": state["question"]}).text}

    builder = StateGraph(State)
    builder.add_node("write", write)
    builder.add_edge(START, "write")
    return builder.compile()


def swallows() -> Any:
    graph = _pipeline()

    @cotune.workflow
    def solve(one: Any) -> float:
        try:
            return float(len(graph.invoke({"question": one["question"]})["draft"]))
        except Exception:  # noqa: BLE001 - as applications do
            return 0.0

    return solve


ROWS = {
    "stops_for_a_person": Row(stops_for_a_person, {"draft"}, says=[("warns", "stopped at an interrupt()")]),
    "pauses_before": Row(
        lambda: pauses(interrupt_before=["send"]), {"draft"}, says=[("warns", "send: the graph stops before it")]
    ),
    "pauses_after": Row(
        lambda: pauses(interrupt_after="*"), {"draft"}, says=[("warns", "send: the graph stops before it")]
    ),
    "forced_tool": Row(forced_tool, {"look", "answer"}, never=["outlives", "first prompt"]),
    "two_graders": Row(two_graders, {"write"}, never=["failed"]),
    "routes_on_a_word": Row(routes_on_a_word, {"sort", "escalate"}, never=["never ran"]),
    "fails_first": Row(lambda: of(_pipeline()), set(), NOT, [("blocks", "missing variables")], ["OpenAI SDK"]),
    "swallows": Row(swallows, set(), NOT, [("blocks", "It swallowed KeyError")], ["OpenAI SDK"]),
    "waits_for_a_person": Row(waits_for_a_person, {"draft"}, NOT, [("blocks", "stopped at an interrupt()")]),
    "travel_agent": Row(travel_agent, {"travel_agent"}, never=["failed"]),
    "reads_by_index": Row(reads_by_index, {"reader"}, says=[("warns", "IndexError")]),
    "routes_by_dict": Row(routes_by_dict, {"triage", "billing", "refunds"}),
    "reflects": Row(reflects, {"write", "reflect"}),
    "graded": Row(graded, {"write", "grade"}),
    "interrupted": Row(interrupted, {"draft", "send"}, never=["never"]),
    "functional": Row(functional, {"writing/outline", "writing/essay"}, unlisted=("writing/essay", "writing/outline")),
    "maps_over_json": Row(maps_over_json, {"plan", "research", "report"}),
    "has_a_mistake": Row(has_a_mistake, {"write"}, UNDECIDED, [("undecided", "KeyError: 'qestion'")]),
    "corrected_by_a_tool": Row(corrected_by_a_tool, {"analyst"}),
    "remembers": Row(remembers, {"answer"}, says=[("warns", "outlives an episode")]),
}
