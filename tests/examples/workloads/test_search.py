"""Search over local text: answers that rest on what was found, what cannot be gained, and the application."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from cotune.integrations.apps.activation import activate
from examples.tiny_model import word_tokenizer
from examples.workloads.search import base, train
from examples.workloads.search.index import Index
from examples.workloads.search.tasks import Question, make_tasks
from examples.workloads.search.verifier import answer_reward, exact, f1, query_reward, reader_reward, solved
from tests.integrations.recorded import Recorded

activate()
TASKS = list(make_tasks(60, 7))
TASK: Question = {
    "id": "t",
    "question": "What does the province sell in which Ada was born?",
    "documents": [
        {"title": "Ada", "text": "The baker Ada was born in Coral long ago."},
        {"title": "Bram", "text": "The clerk Bram was born in Elm long ago."},
        {"title": "Coral", "text": "The town Coral lies in North and has a mill known to all."},
        {"title": "Elm", "text": "The town Elm lies in South and has a mill known to all."},
        {"title": "North", "text": "The province North sells salt to all others."},
        {"title": "South", "text": "The province South sells wine to all others."},
    ],
    "answer": "salt",
    "evidence": ["Ada", "Coral", "North"],
    "facts": ["Coral", "North", "salt"],
}
INDEX = Index(TASK["documents"])


def answered_by_reading(task: Question) -> tuple[str, list[str]]:
    """The answer and its documents, from the text alone: names of the corpus are followed to what is said of them."""
    texts = {document["title"]: document["text"] for document in task["documents"]}
    at = next(word for word in task["question"].rstrip("?").split() if word in texts)
    read = []
    wanted = {"sell": "sells", "province was": "lies in", "known where": "has a"}
    last = next(said for asked, said in wanted.items() if asked in task["question"])
    while True:
        read.append(at)
        found = re.search(rf"{last} (\w+)", texts[at])
        if found:
            return found[1], read
        at = re.search(r"(?:born in|lies in) (\w+)", texts[at])[1]


def test_the_answer_of_every_question_can_be_read_and_takes_all_its_documents() -> None:
    for task in make_tasks(500, 3):
        answer, read = answered_by_reading(task)
        assert (answer, read) == (task["answer"], task["evidence"])
        assert len(task["evidence"]) in (2, 3)
    assert list(make_tasks(60, 7)) == TASKS
    assert not {str(t["documents"]) for t in TASKS} & {str(t["documents"]) for t in make_tasks(60, 8)}


def test_10_000_random_answers_are_right_where_they_say_the_answer_and_found_the_documents() -> None:
    rng = random.Random(5)
    right = 0
    for number in range(10_000):
        task = TASKS[number % len(TASKS)]
        names = [document["title"] for document in task["documents"]]
        retrieved = rng.sample(names, 3) if rng.random() < 0.5 else [*task["evidence"], rng.choice(names)]
        answer = rng.choice([task["answer"], f" The {task['answer']}. ", rng.choice(base.NAMES), ""])
        said = answer.strip(" .").removeprefix("The ")
        expected = said == task["answer"] and all(title in retrieved for title in task["evidence"])
        assert solved(task, answer, retrieved) == expected
        right += expected
    assert right > 2000


def test_an_answer_without_its_evidence_is_wrong() -> None:
    assert solved(TASK, "salt", ["North", "Ada", "Coral"])
    assert not solved(TASK, "salt", ["North", "Ada"])
    assert answer_reward(TASK, ["North"], "salt") == {"team": 0.0, "local": 0.0}
    assert answer_reward(TASK, TASK["evidence"], "salt") == {"team": 2.0, "local": 0.0}


def test_an_answer_that_lists_everything_is_not_exact_and_earns_little() -> None:
    assert f1("salt wine silk linen", "salt") == pytest.approx(0.4)
    assert not exact("salt wine", "salt") and exact("The salt.", "salt") and not exact("", "salt")
    assert f1("salt salt salt", "salt") == 0.5
    assert answer_reward(TASK, TASK["evidence"], "salt wine silk linen")["team"] == pytest.approx(0.4)


def test_a_query_earns_by_the_document_that_it_finds_next() -> None:
    assert query_reward(TASK, INDEX, [], "Ada") == {"team": 1.0, "local": 0.0}
    assert query_reward(TASK, INDEX, [], "Coral") == {"team": 0.5, "local": 0.0}
    assert query_reward(TASK, INDEX, ["Ada"], "Coral") == {"team": 1.0, "local": 0.0}
    assert query_reward(TASK, INDEX, ["Ada"], "Ada") == {"team": 0.0, "local": 0.0}  # found again
    assert query_reward(TASK, INDEX, [], "Bram") == {"team": 0.0, "local": 0.0}
    for nothing in ("", "?!", "zebra", '" OR title:*'):
        assert query_reward(TASK, INDEX, [], nothing) == {"team": 0.0, "local": -0.5}


def test_a_query_of_every_name_still_finds_one_document() -> None:
    everything = " ".join(document["title"] for document in TASK["documents"])
    assert INDEX.best(everything)["title"] in {"Ada", "Bram", "Coral", "Elm", "North", "South"}
    assert query_reward(TASK, INDEX, TASK["evidence"][:2], "u v w x y z North") == {"team": 0.0, "local": -0.5}


def test_of_a_message_the_last_line_counts() -> None:
    assert query_reward(TASK, INDEX, [], "Bram or Ada?\nAda")["team"] == 1.0
    assert reader_reward(TASK, "Ada", TASK["documents"][0]["text"], "It says where.\nCoral") == {
        "team": 1.0,
        "local": 0.0,
    }
    assert answer_reward(TASK, TASK["evidence"], "wine\nsalt")["team"] == 2.0
    assert answer_reward(TASK, TASK["evidence"], "salt\nwine")["team"] == 0.0


def test_a_note_that_copies_the_passage_earns_less_than_what_matters_in_it() -> None:
    passage = TASK["documents"][0]["text"]
    assert reader_reward(TASK, "Ada", passage, "Coral") == {"team": 1.0, "local": 0.0}
    assert reader_reward(TASK, "Ada", passage, passage)["team"] == pytest.approx(2 / 9)
    assert reader_reward(TASK, "Ada", passage, "North") == {"team": 0.0, "local": -0.5}
    assert reader_reward(TASK, "Bram", "The clerk Bram was born in Elm long ago.", "Elm") == {"team": 0.0, "local": 0.0}
    assert reader_reward(TASK, "Ada", passage, "")["local"] == -0.5


def best(call: Any) -> str:
    state = call.state
    hop = len(state["retrieved"])
    if call.role == "writer":
        return TASK["evidence"][hop]
    return TASK["facts"][hop - 1]


def test_a_perfect_team_is_recorded_by_role_and_earns_the_outcome() -> None:
    record = Recorded()

    async def solve(_: Any) -> Any:
        return await train.solve(TASK)

    rewards = record(solve, best).rewards
    assert record.roles == ["writer", "reader"] * 3 + ["answerer"]
    assert rewards == {"team": 2.0}


def test_a_question_may_say_how_many_searches_it_takes_and_have_several_right_answers() -> None:
    task: Question = {**TASK, "searches": 4, "also": ["sea salt"]}
    record = Recorded()

    async def solve(_: Any) -> Any:
        return await train.solve(task)

    def reply(call: Any) -> str:
        hop = len(call.state["retrieved"])
        if call.role == "answerer":
            return "sea salt"
        return TASK["evidence"][min(hop, 2)] if call.role == "writer" else TASK["facts"][min(hop, 3) - 1]

    assert record(solve, reply).rewards == {"team": 2.0}
    assert record.roles == ["writer", "reader"] * 4 + ["answerer"]
    assert answer_reward(task, TASK["evidence"], "sea salt") == {"team": 2.0, "local": 0.0}
    assert answer_reward(TASK, TASK["evidence"], "sea salt")["team"] == pytest.approx(2 / 3)


def test_where_no_document_is_known_to_be_needed_the_answer_alone_counts() -> None:
    task: Question = {**TASK, "evidence": [], "facts": []}
    assert solved(task, "salt", []) and not solved(task, "wine", [])
    assert query_reward(task, INDEX, [], "Ada") == {"team": 0.0, "local": 0.0}
    assert reader_reward(task, "Ada", TASK["documents"][0]["text"], "Coral") == {"team": 0.0, "local": 0.0}


def test_the_words_of_the_demonstrations_are_all_in_the_vocabulary() -> None:
    tokenizer, rng = word_tokenizer(base.WORDS), random.Random(0)
    for number, task in enumerate(TASKS):
        messages, answer = base.demonstration(rng, task, tuple(base.ERRING)[number % 4])
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + answer
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"], text
