"""Parts found in recorded calls."""

import random
import re
from pathlib import Path

import pytest

from cotune.prompts.parts import FoundParts, find_parts
from cotune.records.structs import ToolResult
from tests.core.prompts.written import Asked, store_of

QUESTIONS = [
    "Where is the parcel that I sent to Rome?",
    "My invoice of last month shows the wrong address.",
    "Please cancel the second seat of my booking.",
]
WORDS = [f"word{number}" for number in range(400)]
SYSTEM = "You are a careful assistant of a small shop. Answer in one sentence, and never promise a refund."


def pieces(found: FoundParts, name: str) -> tuple:
    (one,) = [one for one in found.parts if one.part.name == name]
    return one.part.old.pieces


def found_in(tmp_path: Path, episodes, **options) -> FoundParts:
    with store_of(tmp_path / "records.db", episodes) as store:
        return find_parts(store, **options)


def test_a_system_message_and_an_instruction_around_the_task(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        [
            (
                {"q": q},
                [
                    Asked("router", [("system", SYSTEM), q], f"to the desk of {len(q)}"),
                    Asked(
                        "writer",
                        [f"Write a reply to this customer:\n{q}\n\nThe router said: to the desk of {len(q)}. Be kind."],
                    ),
                ],
            )
            for q in QUESTIONS
        ],
    )
    assert [one.part.name for one in found.parts] == ["router.system", "writer.user"]
    assert pieces(found, "router.system") == (SYSTEM,)
    assert pieces(found, "writer.user") == (
        "Write a reply to this customer:\n",
        1,
        "\n\nThe router said: ",
        2,
        ". Be kind.",
    )
    writer = found.parts[1]
    assert writer.part.support.calls == writer.part.support.tasks == 3
    assert writer.examples[0] == tuple(QUESTIONS[:2])
    assert not writer.why and writer.first and found.parts[0].first
    assert found.prompts().parts == tuple(one.part for one in found.parts)


def test_from_one_task_nothing_can_be_edited(tmp_path: Path) -> None:
    found = found_in(
        tmp_path, [({"id": n, "q": QUESTIONS[0]}, [Asked("router", [("system", SYSTEM)])]) for n in range(3)]
    )
    assert "seen in one task" in found.parts[0].why and not found.editable


def test_tasks_without_input_differ_by_their_first_request(tmp_path: Path) -> None:
    found = found_in(tmp_path, [(None, [Asked("a", [("system", SYSTEM), q])]) for q in QUESTIONS])
    assert found.parts[0].part.support.tasks == 3


def test_a_date_is_a_slot_though_it_was_the_same_all_day(tmp_path: Path) -> None:
    text = "You plan trips. Today is Thursday, 26 November 2026 (2026-11-26). Trips begin on a later day."
    found = found_in(tmp_path, [(q, [Asked("planner", [("system", text), q])]) for q in QUESTIONS])
    assert pieces(found, "planner.system") == (
        "You plan trips. Today is ",
        1,
        " (",
        2,
        "). Trips begin on a later day.",
    ) or pieces(found, "planner.system") == ("You plan trips. Today is ", 1, "). Trips begin on a later day.")


def test_what_an_earlier_call_answered_is_a_slot_though_it_was_always_the_same(tmp_path: Path) -> None:
    draft = "A draft that a stubborn model gives for each of the tasks."
    found = found_in(
        tmp_path,
        [
            (
                q,
                [
                    Asked("writer", [q], draft),
                    Asked("critic", [f"Criticise this draft in two sentences: {draft} Be strict."]),
                ],
            )
            for q in QUESTIONS
        ],
    )
    assert pieces(found, "critic.user") == ("Criticise this draft in two sentences: ", 1, " Be strict.")


DOCUMENT = "Parcels to Italy take five days.\nDelivery: by ship\n\nRefunds need the number of the invoice, in writing."


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Answer the customer kindly.\n\nContext: ", "\n\nQuestion: {q}\nName the page, and be brief."),
        ("Answer from these documents alone:\n", "\n\n{q}\n\nName the page of it, and be brief."),
        ("You know this text.\n<context>\n", "\n</context>\nName the page of it, and be brief.\n{q}"),
    ],
)
def test_a_document_that_code_looked_up_is_a_slot_though_only_one_was_seen(
    tmp_path: Path, before: str, after: str
) -> None:
    def parts(name: str, documents: list[str]) -> tuple:
        asked = [
            (q, [Asked("a", [before + document + after.format(q=q)])])
            for q, document in zip(QUESTIONS, documents, strict=True)
        ]
        with store_of(tmp_path / name, asked) as store:
            return pieces(find_parts(store), "a.user")

    one, several = parts("one.db", [DOCUMENT] * 3), parts("several.db", [DOCUMENT, SYSTEM, "No document fits."])
    for found in (one, several):
        constant = "".join(piece for piece in found if isinstance(piece, str))
        assert "Parcels" not in constant and "Delivery" not in constant and "invoice" not in constant
        assert constant.startswith(before.rstrip()) and "and be brief." in constant
    asked = [(q, [Asked("a", [("system", before + DOCUMENT), q])]) for q in QUESTIONS]
    with store_of(tmp_path / "system.db", asked) as store:
        assert pieces(find_parts(store), "a.system") == (before, 1)


def test_a_sentence_that_names_documents_is_prompt(tmp_path: Path) -> None:
    text = "You edit documents: mend the grammar, keep all names as they are, and never shorten a table."
    found = found_in(tmp_path, [(q, [Asked("a", [("system", text), q])]) for q in QUESTIONS])
    assert pieces(found, "a.system") == (text,)


def test_a_short_answer_is_a_slot_where_it_is_a_line_of_its_own(tmp_path: Path) -> None:
    asks = "Say whether this is wrong or right, and why.\n\nSolution:\nwrong\n\nBe brief."
    found = found_in(tmp_path, [(q, [Asked("a", [q], "wrong"), Asked("b", [asks])]) for q in QUESTIONS])
    before, after = asks.split("wrong\n\nBe")
    assert pieces(found, "b.user") == (before, 1, "\n\nBe" + after)


def test_what_only_looks_like_an_answer_stays(tmp_path: Path) -> None:
    """A text that one episode explains, and another does not, is the application's own."""
    stop = "Say APPROVED AS IT IS when the text is good enough, else name one fault of it."
    answers = ["APPROVED AS IT IS", "Name the author.", "Too long."]
    found = found_in(
        tmp_path,
        [
            (q, [Asked("writer", [q], a), Asked("critic", [("system", stop), a])])
            for q, a in zip(QUESTIONS, answers, strict=True)
        ],
    )
    assert pieces(found, "critic.system") == (stop,)


def test_what_was_answered_after_a_text_does_not_explain_it(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        [
            (q, [Asked("a", [("system", SYSTEM), q], SYSTEM[:60]), Asked("a", [("system", SYSTEM), q, "again"], "ok")])
            for q in QUESTIONS
        ],
    )
    assert pieces(found, "a.system") == (SYSTEM,)


def test_what_an_application_remembers_of_earlier_tasks_is_no_prompt(tmp_path: Path) -> None:
    asked = [Asked("bot", [("system", SYSTEM), *QUESTIONS[: n + 1]]) for n in range(3)]
    found = found_in(tmp_path, [({"q": q}, [one]) for q, one in zip(QUESTIONS, asked, strict=True)])
    assert [one.part.name for one in found.parts] == ["bot.system"]


def test_a_label_that_prompts_name_stays(tmp_path: Path) -> None:
    sort = "Sort the mail: say accounting or shipping, and nothing else."
    labels = ["accounting", "shipping", "shipping"]
    found = found_in(
        tmp_path,
        [({"q": q, "label": a}, [Asked("a", [("system", sort), q])]) for q, a in zip(QUESTIONS, labels, strict=True)],
    )
    assert pieces(found, "a.system") == (sort,)


def test_tool_results_are_slots(tmp_path: Path) -> None:
    down = "The service for weather is not available."
    asked = Asked(
        "scout", ["Look: " + QUESTIONS[0]], "", tool_calls=[{"id": "1", "function": {"name": "w", "arguments": "{}"}}]
    )
    found = found_in(
        tmp_path,
        [
            (
                q,
                [
                    asked,
                    Asked(
                        "scout",
                        [
                            {"role": "tool", "tool_call_id": "1", "content": down},
                            f"Use what the tool has told you: {down} Now answer {q}",
                        ],
                    ),
                ],
            )
            for q in QUESTIONS
        ],
    )
    assert pieces(found, "scout.user.2") == ("Use what the tool has told you: ", 1, " Now answer ", 2)


def test_two_prompts_with_one_last_sentence_stay_two(tmp_path: Path) -> None:
    end = " Always answer in plain English, and in fewer than fifty words."
    facts = "List what is known about the order, what is missing, and whom one could ask about it: "
    plan = "Make a plan with numbered steps; each names one colleague who carries out the work: "
    found = found_in(
        tmp_path,
        [(q, [Asked("lead", [facts + q + end]), Asked("lead", [plan + q + end])]) for q in QUESTIONS],
    )
    assert pieces(found, "lead.user") == (facts.rstrip() + " ", 1, end)
    assert pieces(found, "lead.user.2") == (plan.rstrip() + " ", 1, end)


def test_an_optional_section_is_a_slot_that_may_be_empty(tmp_path: Path) -> None:
    base, end = (
        "Answer the customer from the notes below.",
        "\nKeep to the facts that the notes give you, and be brief.",
    )
    extra = "\nThe customer is known to the shop."
    found = found_in(
        tmp_path,
        [(q, [Asked("a", [("system", base + (extra if n == 1 else "") + end)])]) for n, q in enumerate(QUESTIONS)],
    )
    (one,) = found.parts
    assert one.part.old.pieces == (base, 1, end) and sorted(one.examples[0]) == ["", extra]


def test_a_message_under_another_roles_name_is_no_prompt(tmp_path: Path) -> None:
    relayed = {"role": "user", "name": "writer", "content": "What the other one says in each of the tasks."}
    own = {"role": "user", "name": "boss", "content": "What the framework itself says in each of the tasks."}
    found = found_in(tmp_path, [(q, [Asked("writer", [q]), Asked("critic", [q, relayed, own])]) for q in QUESTIONS])
    assert [one.part.old.pieces for one in found.parts] == [(own["content"],)]


def test_a_role_that_sends_nothing_but_the_task(tmp_path: Path) -> None:
    found = found_in(tmp_path, [({"q": q}, [Asked("reader", [q])]) for q in QUESTIONS])
    assert found.roles[0].bare and not found.parts


def test_what_differs_between_tasks_is_input_not_a_part(tmp_path: Path) -> None:
    found = found_in(tmp_path, [(n, [Asked("a", [("system", SYSTEM), q])]) for n, q in enumerate(QUESTIONS)])
    assert [one.part.kind for one in found.parts] == ["system"] and found.roles[0].inputs == 3


def test_tools_and_schemas_have_parts_by_their_place(tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "The city to look for."}}}
    tools = [
        {
            "type": "function",
            "function": {"name": "find", "description": "Finds things in a city.", "parameters": parameters},
        }
    ]
    schema = {"properties": {"ok": {"description": "Whether it is done."}}}
    params = {"response_format": {"type": "json_schema", "json_schema": {"name": "Answer", "schema": schema}}}
    found = found_in(tmp_path, [(q, [Asked("a", [q], tools=tools, params=params)]) for q in QUESTIONS])
    assert [one.part.name for one in found.parts] == ["a.tool.find", "a.tool.find/city", "a.format.Answer/ok"]
    assert not any(one.first for one in found.parts) and found.roles[0].bare


def test_the_same_prompt_of_several_roles_is_one_part(tmp_path: Path) -> None:
    found = found_in(
        tmp_path, [(q, [Asked(f"debater {n}", [("system", SYSTEM), q]) for n in range(3)]) for q in QUESTIONS]
    )
    (one,) = found.parts
    assert one.part.name == "debater 0.system" and one.part.roles == ("debater 0", "debater 1", "debater 2")
    assert one.part.support.calls == 9 and one.part.support.tasks == 3


def test_kept_text_is_a_slot(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        [(q, [Asked("a", [("system", SYSTEM)])]) for q in QUESTIONS],
        keep=[re.compile("never promise a refund")],
    )
    assert pieces(found, "a.system")[-2:] == (1, ".")


def test_calls_after_a_lost_result_of_a_tool_are_left_out_and_counted(tmp_path: Path) -> None:
    calls = [Asked("writer", [("system", "You write about the weather, in short words.")])]
    lost = ToolResult("look", "", -1.0, "no-such-message")
    with store_of(tmp_path / "records.db", [(f"task {n}", calls) for n in range(2)], results=(lost,)) as store:
        found = find_parts(store)
    assert (found.parts, found.left_out) == ((), {"after a lost result of a tool": 2})


def test_redacted_calls_are_left_out_and_counted(tmp_path: Path) -> None:
    found = found_in(
        tmp_path, [(q, [Asked("a", [("system", SYSTEM)], redacted=n == 0)]) for n, q in enumerate(QUESTIONS)]
    )
    assert found.left_out == {"redacted": 1} and found.parts[0].part.support.calls == 2


def test_a_list_of_documents_is_read_in_one_way(tmp_path: Path) -> None:
    """The mark between documents stands several times: it is no constant text, as each text must read in one way."""

    def prompt(n: int) -> str:
        documents = "".join(
            f"\n\n--- next document ---\n\nText {n}{i} about {QUESTIONS[i % 3][:9]}" for i in range(n + 1)
        )
        return (
            f"Answer from these documents alone:{documents}\n\nThe question is: {n}? Give the number of the document."
        )

    found = found_in(tmp_path, [(n, [Asked("a", [prompt(n)])]) for n in range(5)])
    (one,) = found.parts
    for n in range(5):
        assert isinstance(one.part.old.match(prompt(n)), tuple)
    assert one.part.old.texts[0].startswith("Answer from these documents alone:")


@pytest.mark.parametrize("limit", [1_000, 6])
def test_no_more_calls_than_asked_are_read_of_all_tasks_alike(tmp_path: Path, limit: int) -> None:
    episodes = [(q, [Asked("a", [("system", SYSTEM), q])]) for q in QUESTIONS for _ in range(4)]
    found = found_in(tmp_path, episodes, calls=limit)
    assert found.roles[0].tasks == 3
    assert found.roles[0].calls == min(limit, 12)
    assert found.left_out.get("more than are needed", 0) == 12 - min(limit, 12)


def test_long_texts_are_compared_by_lines_first(tmp_path: Path) -> None:
    dice = random.Random(3)
    text = lambda lines: "".join(" ".join(dice.choices(WORDS, k=8)) + "\n" for _ in range(lines))  # noqa: E731
    top, middle, end = text(300), text(300), text(300)
    prompts = [f"{top}First {text(200)}{middle}Then {text(200)}{end}" for _ in QUESTIONS]
    found = found_in(tmp_path, [(q, [Asked("a", [("system", p)])]) for q, p in zip(QUESTIONS, prompts, strict=True)])
    (one,) = found.parts
    assert one.part.old.constant >= len(top + middle + end) and len(one.part.old.slots) == 2
    for prompt in prompts:
        assert isinstance(one.part.old.match(prompt), tuple)


def test_examples_of_answers_are_shown_and_not_edited(tmp_path: Path) -> None:
    shown, real = "The parcel is on its way, and you get a mail.", "I have looked, and the lamp is paid."
    asked = lambda q: [("system", SYSTEM), "Where is it?", ("assistant", shown), q]  # noqa: E731
    episodes = [
        ({"q": q}, [Asked("writer", asked(q), real), Asked("writer", [*asked(q), ("assistant", real), "And now?"])])
        for q in ("Who pays for the lamp?", "When do you open?")
    ]
    with store_of(tmp_path / "records.db", episodes) as store:
        found = find_parts(store)
    examples = [one for one in found.parts if one.part.kind == "assistant"]
    assert [(one.part.name, one.part.old.pieces) for one in examples] == [("writer.assistant", (shown,))]
    assert "cannot be changed" in examples[0].why and examples[0] not in found.editable


def test_runs_with_edited_prompts_are_not_pooled_with_those_of_the_application(tmp_path: Path) -> None:
    tasks = [{"q": "Where is the parcel?"}, {"q": "Who pays for the broken lamp?"}]
    calls = lambda q: [Asked("writer", [("system", SYSTEM), q])]  # noqa: E731
    store_of(tmp_path / "r.db", [(task, calls(task["q"])) for task in tasks]).close()
    edited = [(task, calls(task["q"])) for task in tasks for _ in range(3)]
    with store_of(tmp_path / "r.db", edited, prompts="abc") as store:
        assert [role.calls for role in find_parts(store).roles] == [2]
