"""The applications of `benchmarks.blame_training`, and a provider that is always right in each of their roles."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph

import cotune
from cotune.types import Call, Candidate
from examples.word_problems.app import CHECKER, model
from examples.word_problems.tasks import make_tasks

Answers = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
"""Returns the answer to the messages of a call."""


# Orders: three roles read an order at the same time, each for one part of its label, and a writer puts them together.


class Order(TypedDict):
    """A task: the text of an order, and the label that belongs on it."""

    id: str
    text: str
    label: str


class Parts(TypedDict, total=False):
    """State of an order: its text, what three roles read in it, and the label that the writer wrote."""

    text: str
    number: str
    thing: str
    colour: str
    label: str


FORMS = (
    "Please send {number} {colour} {thing} to {city}.",
    "I would like {number} {thing} in {colour} for our shop in {city}.",
    "Our office in {city} needs {number} {colour} {thing}.",
    "Can {city} get {number} {thing}? They should be {colour}.",
)
THINGS = ("lamps", "cups", "chairs", "books", "shoes", "hats", "plates", "spoons", "desks", "gloves")
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "purple")
CITIES = ("Rome", "Paris", "Madrid", "Berlin", "Tokyo", "Cairo", "Lisbon", "Vienna", "Athens", "Dublin")
EXAMPLES: Sequence[tuple[str, Parts]] = (
    ("Please send 3 pink bags to Oslo.", {"number": "3", "thing": "bags", "colour": "pink"}),
    ("I would like 7 tables in grey for our shop in Delhi.", {"number": "7", "thing": "tables", "colour": "grey"}),
    ("Our office in Lima needs 5 brown coats.", {"number": "5", "thing": "coats", "colour": "brown"}),
)
"""The orders in the prompts of the roles, with their parts."""


@dataclass(frozen=True)
class Reader:
    """A role that reads one part of an order."""

    part: str
    question: str
    examples: int
    """Number of examples in its prompt. With fewer examples the untrained model errs more often."""


READERS = {
    "counter": Reader("number", "How many?", examples=3),
    "finder": Reader("thing", "Which thing?", examples=2),
    "colourist": Reader("colour", "Which colour?", examples=3),
}
WRITER = "Write the label."


def make_orders(count: int, skip: int = 0) -> list[Order]:
    """`count` orders that differ from each other and from the first `skip`."""
    chance = random.Random(0)
    labels: dict[str, str] = {}
    while len(labels) < skip + count:
        parts = {
            "number": str(chance.randint(2, 9)),
            "thing": chance.choice(THINGS),
            "colour": chance.choice(COLOURS),
        }
        text = chance.choice(FORMS).format(city=chance.choice(CITIES), **parts)
        labels[text] = label_of(parts)
    orders: list[Order] = []
    for number, (text, label) in enumerate(labels.items()):
        orders.append({"id": f"order-{number}", "text": text, "label": label})
    return orders[skip:]


def label_of(parts: Mapping[str, Any]) -> str:
    """The label of an order with these parts."""
    return f"{parts['number']} {parts['colour']} {parts['thing']}"


def reader_messages(role: str, text: str) -> list[dict[str, str]]:
    """The prompt of a reader."""
    reader = READERS[role]
    messages = [{"role": "system", "content": reader.question}]
    for example, parts in EXAMPLES[: reader.examples]:
        messages.append({"role": "user", "content": example})
        messages.append({"role": "assistant", "content": str(parts[reader.part])})  # type: ignore[literal-required]
    return [*messages, {"role": "user", "content": text}]


def writer_messages(parts: Mapping[str, Any]) -> list[dict[str, str]]:
    """The prompt of the writer."""
    messages = [{"role": "system", "content": WRITER}]
    for _, example in EXAMPLES[:2]:
        messages.append({"role": "user", "content": listed(example)})
        messages.append({"role": "assistant", "content": label_of(example)})
    return [*messages, {"role": "user", "content": listed(parts)}]


def listed(parts: Mapping[str, Any]) -> str:
    """The parts as the writer sees them."""
    return f"number: {parts['number']}, thing: {parts['thing']}, colour: {parts['colour']}"


def _order_graph() -> Any:
    """The three readers side by side, then the writer."""
    builder = StateGraph(Parts)
    for role, reader in READERS.items():
        reader_model = model(role, max_tokens=6, stop=["\n"])

        async def read(state: Parts, role: str = role, reader: Reader = reader, chat: Any = reader_model) -> Any:
            reply = await chat.ainvoke(reader_messages(role, state["text"]))
            return {reader.part: reply.text.strip()}

        builder.add_node(role, read)
        builder.add_edge(START, role)
    writer_model = model("writer", max_tokens=10, stop=["\n"])

    async def write(state: Parts) -> Any:
        return {"label": (await writer_model.ainvoke(writer_messages(state))).text.strip()}

    builder.add_node("writer", write)
    builder.add_edge(list(READERS), "writer")
    builder.add_edge("writer", END)
    return builder.compile()


graph = _order_graph()


@cotune.workflow
async def four_roles(task: Order) -> bool:
    """Write the label of an order."""
    state = await graph.ainvoke({"text": task["text"]})
    return bool(state["label"] == task["label"])


def part_read(candidate: Candidate, call: Call, task: Order) -> dict[str, float]:
    """Whether a reader read its part of the order."""
    number, colour, thing = task["label"].split()
    part = {"counter": number, "colourist": colour, "finder": thing}[call.role]
    return {"team": float(candidate.text.strip() == part)}


for _role in READERS:
    four_roles.scorer(_role)(part_read)


@four_roles.scorer("writer")
def label_written(candidate: Candidate, call: Call, task: Order) -> dict[str, float]:
    """Whether the label has the parts that the writer was given, right or wrong."""
    return {"team": float(candidate.text.strip() == label_of(call.state))}


def right_part(orders: Sequence[Order]) -> Answers:
    """Answers as the role that the system message belongs to, by the label of each order."""
    labels = {order["text"]: order["label"] for order in orders}
    questions = {reader.question: reader.part for reader in READERS.values()}

    def answer(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        instruction, request = messages[0]["content"], messages[-1]["content"]
        if instruction == WRITER:
            parts = dict(part.split(": ", 1) for part in request.split(", ", 2))
            text = label_of(parts)
        else:
            number, colour, thing = labels[request].split()
            text = {"number": number, "colour": colour, "thing": thing}[questions[instruction]]
        return {"role": "assistant", "content": text}

    return answer


# Word problems: the example with a planner and a checker


def right_sum(problems: Sequence[Mapping[str, Any]]) -> Answers:
    """Answers as the role that the system message belongs to, by the right answer of each question."""
    answers = {problem["question"]: problem["answer"] for problem in problems}

    def answer(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        instruction, request = messages[0]["content"], messages[-1]["content"]
        if instruction == CHECKER:
            question, _, rest = request.partition("\nSum: ")
            text = "yes" if rest.rpartition("Result: ")[2] == answers[question] else "no"
        else:
            text = answers[request]  # a number is a sum, too
        return {"role": "assistant", "content": text}

    return answer


@dataclass(frozen=True)
class Application:
    """An application, its roles, its tasks, and answers to them that are always right."""

    name: str
    workflow: str
    roles: tuple[str, ...]
    tasks: Callable[[int, int], Sequence[Any]]
    """Makes this number of tasks, after this number of others."""
    right_answers: Callable[[Sequence[Any]], Answers]
    """The answers to the calls that belong to these tasks."""


APPLICATIONS = {
    "word_problems": Application(
        "word_problems", "examples.word_problems.train:solve", ("planner", "checker"), make_tasks, right_sum
    ),
    "four_roles": Application("four_roles", f"{__name__}:four_roles", (*READERS, "writer"), make_orders, right_part),
}
