"""The mathematics workload: answers against exact arithmetic, what cannot be had for nothing, the application."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import random
import re
import signal
import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.integrations.apps.activation import activate
from examples.tiny_model import word_tokenizer
from examples.workloads.code import programs
from examples.workloads.maths import app, base, equal, tasks, train, verifier
from examples.workloads.maths.answers import answer_in, number, plain, printed
from examples.workloads.sandbox.bubblewrap import Limits, Ran, Sandbox
from tests.integrations.recorded import Recorded

activate()
TOWER = "9^{9^{9^{9}}}"


def asked(answer: str, question: str = "What is it?", tolerance: str = "0") -> verifier.Problem:
    return {"id": "t", "kind": "t", "question": question, "answer": answer, "tolerance": tolerance}


TASK = asked("14", "What is 3*4+2?")


def accepted(message: str, task: verifier.Problem = TASK) -> bool:
    return verifier.right(answer_in(message), task)


def ran(stdout: str, code: int = 0, cut: bool = False) -> Ran:
    return Ran(code, "exit", stdout, "", cut, 0.1)


@pytest.fixture(scope="module", autouse=True)
def one_comparer() -> Iterator[None]:
    yield
    verifier.comparer().close()


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("So it is twelve.\n\nAnswer: 12\n", "12"),
        (r"So it is \boxed{\frac{3}{4}}, as we wanted.", r"\frac{3}{4}"),
        ("Answer: $12$.", "12"),
        (r"Answer: \(\sqrt{2}\)", r"\sqrt{2}"),
        (r"Answer: \boxed{12}", "12"),
        ("<think>\nAnswer: 3? No: \\boxed{4}\n</think>\nAnswer: 12", "12"),
        ("Answer: 3, 5", "3, 5"),  # one value or several: the right answer tells
        ("", None),
        ("12", None),
        ("The answer is 12.", None),
        ("answer: 12", None),
        ("Answer:", None),
        ("Answer: 12\nor so", None),
        ("Answer: 11\nAnswer: 12", None),
        (r"\boxed{11} or \boxed{12}", None),
        ("\\boxed{11}\nAnswer: 12", None),
        (r"Answer: about \boxed{12}", None),
        (r"\boxed{12", None),
        (r"\boxed{}", None),
        ("Answer: " + "1" * 500, None),
    ],
)
def test_the_form_of_an_answer(message: str, answer: str | None) -> None:
    assert answer_in(message) == answer


@pytest.mark.parametrize(
    "message",
    [
        "Answer: 3*4+2",  # the problem over again
        "Answer: 28/2",
        "Answer: 14/1",
        "Answer: 13, 14, 15",
        "Answer: 13 or 14",
        "Answer: 13-15",
        "Answer: [14, 14]",
        "Answer: {14}",
        "Answer: 14 legs",
        "Answer: x = 14",
        "Answer: 1400%",
        "Answer: 14 (the program's output)",
        "Answer: the program's output",
        "Answer: print(14)",
        "Answer: None",
        "The program:\nprint(14)\nIt wrote:\n14",
        "```python\nprint(14)\n```",
        "It wrote:\n14\n",
        "14",
    ],
)
def test_what_is_no_number_alone_is_wrong_where_a_number_is_right(message: str) -> None:
    assert accepted("Answer: 14") and accepted("Answer: 14.0") and accepted(r"\boxed{14}") and accepted("Answer: +14")
    assert not accepted(message)
    assert verifier.reasoner_reward(message, TASK)["team"] == verifier.judge_reward(message, TASK)["team"] == 0


def written(rng: random.Random, value: Fraction) -> str:
    """A value in one of the forms that are right for it."""
    forms = [str(value)]
    if value.denominator == 1:
        forms += [f"{value.numerator:,}", f"{value.numerator}.00"]
    else:
        sign = "-" if value < 0 else ""
        forms.append(rf"{sign}\{rng.choice(['', 'd', 't'])}frac{{{abs(value.numerator)}}}{{{value.denominator}}}")
    if not 10**6 % value.denominator:
        forms.append(f"{sympy.Rational(value.numerator, value.denominator).n(30)}"[:28])
    return rng.choice(forms)


def spoilt(rng: random.Random, value: Fraction) -> str:
    """The same in a form that is wrong."""
    above, below = value.numerator, value.denominator
    return rng.choice(
        [
            f"{2 * above}/{2 * below}",
            f"{above - 1}/{below}+1/{below}",
            f"{value}, {value}",
            f"{value}, {value + 1}",
            f"{value} or {value + 1}",
            f"({value})",
            f"{value} km",
            f"{value}e0",
            f"x={value}",
            f"{value};",
            f"{value} {value}",
            f"2*{value / 2}",
        ]
    )


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_answers_are_judged_as_exact_fractions_are(count: int) -> None:
    rng = random.Random(1)
    seen = {True: 0, False: 0}
    for _ in range(count):
        value = Fraction(rng.randrange(-5000, 5000), rng.choice([1, 1, 2, 3, 4, 7, 8, 10, 25, 100, 360]))
        near = value + Fraction(rng.choice([1, -1]), rng.choice([1, 2, 10**6, 10**12]))
        said = rng.choice([value, value, near, -value, 1 / value if value else value])
        spoil = rng.random() < 0.3
        text = spoilt(rng, said) if spoil else written(rng, said)
        form = rng.choice(["So:\nAnswer: {}", "Answer: ${}$.", r"It is \boxed{{{}}}.", r"Answer: \boxed{{{}}}"])
        expected = not spoil and said == value
        assert accepted(form.format(text), asked(written(rng, value))) == expected, (text, value)
        seen[expected] += 1
    assert min(seen.values()) > count / 4


@settings(max_examples=300, deadline=None)
@given(
    st.text("0123456789./-+,e _%\\{}frac", max_size=14) | st.text(max_size=12), st.sampled_from(["3/7", "12", "0.5"])
)
def test_no_other_text_is_taken_for_a_number(text: str, gold: str) -> None:
    if verifier.right(plain(text), asked(gold)):
        bare = re.sub(r"\\[dt]?frac\{?(-?\d+?)\}?\{?(\d+)\}?", r"\1/\2", (plain(text) or "").replace("{,}", ""))
        assert sympy.Rational(bare.replace(",", "").removeprefix("+")) == sympy.Rational(gold)


def test_a_number_may_be_off_by_its_tolerance_alone() -> None:
    assert accepted("Answer: 3.14", asked("3.1416", tolerance="1/100"))
    assert not accepted("Answer: 3.12", asked("3.1416", tolerance="1/100"))
    assert not accepted("Answer: 0.333333333333333", asked(r"\frac{1}{3}"))  # math-verify alone would take it
    assert not accepted("Answer: 9%", asked("9"))  # and this
    assert accepted("Answer: 3/2", asked(r"\frac{6}{4}"))


def surd(rng: random.Random) -> tuple[int, int, int]:
    return rng.choice([-2, -1, 0, 1, 3]), rng.choice([-3, -1, 1, 2]), rng.choice([2, 3, 8, 12, 18, 27])


def simplest(a: int, b: int, c: int) -> tuple[int, int, int]:
    """a + b * sqrt(c) with no square in c."""
    root = max(n for n in range(1, 6) if not c % (n * n))
    return a, b * root, c // root**2


@pytest.mark.parametrize("count", [40, pytest.param(150, marks=pytest.mark.long)])
def test_random_expressions_are_equal_where_their_simplest_forms_are(count: int) -> None:
    rng = random.Random(2)
    equals = 0
    for _ in range(count):
        one = surd(rng)
        a, b, c = other = rng.choice([one, simplest(*one), surd(rng)])
        gold = rf"{one[0]}+{one[1]}\sqrt{{{one[2]}}}".replace("+-", "-").removeprefix("0+").removeprefix("0")
        found = rf"\sqrt{{{c}}}\cdot ({b})" + (f"+({a})" if a else "")
        expected = simplest(*one) == simplest(*other)
        assert accepted(f"Answer: {found}", asked(gold)) == expected, (gold, found)
        equals += expected
    assert 0.4 * count < equals < 0.95 * count


@pytest.mark.parametrize(
    ("gold", "answer", "is_right"),
    [
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"2\sqrt{3}", r"2\sqrt3", True),
        (r"2\sqrt{3}", "3.4641016151", False),
        (r"2\sqrt{3}", r"\pm 2\sqrt{3}", False),
        (r"2\sqrt{3}", r"2\sqrt{3}, \sqrt{5}", False),
        (r"2\sqrt{3}", r"2\sqrt{3} cm", False),
        (r"2\sqrt{3}", r"\text{see the output}", False),
        (r"7\sqrt{2}", r"3\sqrt{2}+4\sqrt{2}", False),
        ("x+7", "x+3+4", False),
        (r"6\pi", r"2\cdot 3\pi", False),
        (r"6\pi", r"\int_0^6 \pi dx", False),
        (r"6\pi", r"\sum_{i=1}^6 \pi", False),
        (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", True),
        ("n!", r"(n)!", True),
        ("n(n-1)", "n!", False),
        ("1, 2", "2, 1", True),
        ("1, 2", "1, 2, 3", False),
        ("1, 2", "1", False),
        ("(1, 2)", "1, 2", False),
        ("(1, 2)", "(2, 1)", False),
        ("(1, 2]", r"\left(1, 2\right]", True),
        ("(1, 2]", "(1, 2)", False),
        ("x=5", "5", True),
        ("x=5", "x=x", False),
        ("x=5", "0=0", False),
        (r"x \le 3", r"3 \geq x", True),
        ("x>3", "3<x", True),
        ("x>3", "x<3", False),
        ("1, 2", r"\{1, 2\}", True),
        (r"\infty", r"\frac{1}{0}", False),
        (r"\sqrt{2}", r"\frac{0}{0}", False),
        (r"\pi+\sqrt{2}", rf"\pi+\frac{{141421356237309504880168872}}{{{10**26}}}", False),  # to the 26th digit
        ("2^{100}", "1267650600228229401496703205376", True),
        (r"\sqrt{2}", ")(" * 30, False),
    ],
)
def test_expressions(gold: str, answer: str, is_right: bool) -> None:
    assert accepted(f"Answer: {answer}", asked(gold)) == is_right


def test_an_expression_copied_from_the_question_is_no_answer() -> None:
    task = asked(r"5+2\sqrt{6}", r"Expand $(\sqrt{2} + \sqrt{3})^2$.")
    assert not accepted(r"Answer: (\sqrt{2}+\sqrt{3})^2", task)
    assert accepted(r"Answer: 2\sqrt{6}+5", task)
    assert accepted(r"Answer: \sqrt{2}", asked(r"\sqrt{2}", r"Which is less, $\sqrt{2}$ or $\sqrt{3}$?"))


def test_what_takes_too_long_is_wrong_and_stops_neither_the_event_loop_nor_its_alarms(
    caplog: pytest.LogCaptureFixture,
) -> None:
    comparer = verifier.comparer()
    assert comparer.equal("x", "x")  # started
    alarms = signal.getsignal(signal.SIGALRM)

    async def judged() -> tuple[bool, int]:
        judging = asyncio.create_task(asyncio.to_thread(comparer.equal, r"\sqrt{2}", TOWER))
        turns = 0
        while not judging.done():
            turns += 1
            await asyncio.sleep(0.01)
        return judging.result(), turns

    comparer.patience = 0.3
    try:
        with caplog.at_level(logging.WARNING, equal.__name__):
            found, turns = asyncio.run(judged())
    finally:
        comparer.patience = equal.PATIENCE
    assert not found and turns > 2
    assert "within the limits: it counts as wrong" in caplog.text and TOWER in caplog.text
    assert comparer._child is None  # ended
    assert signal.getsignal(signal.SIGALRM) is alarms
    assert accepted(r"Answer: \sqrt{18}", asked(r"3\sqrt{2}"))  # the next one is compared all the same


def test_answers_are_compared_from_any_threads() -> None:
    found: list[bool] = []
    pairs = [(r"\sqrt{8}", r"2\sqrt{2}"), ("x+y", "y+x"), ("x", "y"), (r"\pi", "e")]
    threads = [
        threading.Thread(target=lambda pair=pair: found.append(verifier.comparer().equal(*pair))) for pair in pairs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [False, False, True, True]


def test_without_math_verify_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install math-verify"):
        equal.Comparer()


@functools.cache
def quick_sandbox() -> Sandbox:
    return Sandbox(Limits(cpu_s=1))


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("print(3 * 4 + 2)", "14"),
        ("from fractions import Fraction\nprint(Fraction(6, 4))", "3/2"),
        ("pass", None),
        ("print('\\n'.join(map(str, range(100))))", None),  # every number
        ("print(14); raise SystemExit(1)", None),
        ("import glob\nfor name in [*glob.glob('/root/**'), *glob.glob('/tmp/*')]: print(open(name).read())", None),
        ("print(open('/etc/passwd').read(), open('tasks.jsonl').read())", None),
        ("print(14, flush=True)\nwhile True: pass", None),
    ],
)
def test_the_output_of_a_program_is_an_answer_where_it_is_one_line_of_a_program_that_ended(
    program: str, answer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "sandbox", quick_sandbox)
    assert printed(app.run(program)) == answer


def test_each_role_earns_by_its_own_answer_and_loses_by_the_wrong_form() -> None:
    right, wrong, no_form = ({"team": 1, "local": 0}, {"team": 0, "local": 0}, {"team": 0, "local": -0.5})
    for reward in (verifier.reasoner_reward, verifier.judge_reward):
        assert reward("So.\nAnswer: 14", TASK) == right
        assert reward("So.\nAnswer: 15", TASK) == wrong
        assert reward("So it is 14.", TASK) == no_form
    assert verifier.tool_reward(ran("14\n"), TASK) == right
    assert verifier.tool_reward(ran("15\n"), TASK) == verifier.tool_reward(ran("13, 14\n"), TASK) == wrong
    for failed in (None, ran(""), ran("13\n14\n"), ran("14\n", code=1), ran("14\n", cut=True)):
        assert verifier.tool_reward(failed, TASK) == no_form


def test_the_tasks_have_answers_in_the_right_form_that_exact_arithmetic_confirms() -> None:
    made = tasks.make_tasks(400)
    assert made[:20] == tasks.make_tasks(20)
    assert len({task["id"] for task in made}) == len({task["question"] for task in made}) == 400
    assert not {task["question"] for task in made} & {task["question"] for task in tasks.make_tasks(400, seed=1)}
    confirmed = 0
    for task in made:
        assert json.loads(json.dumps(task)) == task and accepted(f"Answer: {task['answer']}", task)
        assert not accepted(f"Answer: {Fraction(task['answer']) + 1}", task)
        if found := re.fullmatch(r"(?:Calculate|State .*:|What is) ([-+*/.\d ()]+?)(?: =|\.|\?)?", task["question"]):
            exact = re.sub(r"\d+(\.\d+)?", lambda term: f"Fraction('{term[0]}')", found[1])
            assert eval(exact) == number(task["answer"]), task
            confirmed += 1
    assert confirmed > 80


def coded(program: str) -> str:
    return f"```python\n{program}\n```"


@pytest.mark.parametrize(
    ("reasoned", "program", "verdict", "roles", "reward"),
    [
        (["Answer: 14"], ["print(14)"], "Answer: 14", ["reasoner", "tool_user", "judge"], 1.0),
        (["Answer: 12", "Answer: 14"], ["print(14)"] * 2, "Answer: 14", ["reasoner", "tool_user"] * 2 + ["judge"], 1.0),
        (["Answer: 15"], ["print(15)"], "Answer: 14", ["reasoner", "tool_user", "judge"], 1.0),
        (["Answer: 15"], ["print(15)"], "Answer: 15", ["reasoner", "tool_user", "judge"], 0.0),  # copied blindly
        (["Answer: 14"], ["print(14)"], "They agree: 14.", ["reasoner", "tool_user", "judge"], 0.0),
        (["14"] * 4, ["print(14)"] * 4, "Answer: 14", ["reasoner", "tool_user"] * 4 + ["judge"], 1.0),
        (["Answer: 14"] * 4, [""] * 4, "Answer: 12", ["reasoner", "tool_user"] * 4 + ["judge"], 0.0),
    ],
)
def test_they_go_on_until_they_agree_and_what_the_judge_says_counts(
    reasoned: list[str], program: list[str], verdict: str, roles: list[str], reward: float
) -> None:
    said = {"reasoner": iter(reasoned), "tool_user": map(coded, program), "judge": iter([verdict])}
    record = Recorded()

    async def solve(_: Any) -> Any:
        return await train.solve(TASK)

    outcome = record(solve, lambda call: next(said[call.role]))
    assert outcome.rewards == {"team": reward}
    assert record.roles == roles


def test_each_sees_what_the_others_found_and_the_judge_sees_both() -> None:
    attempt = app.Attempt("Q")
    attempt.reasoned, attempt.program, attempt.ran = "Answer: 12", "print(14)", ran("14\n")
    assert attempt.shown_answer == "The reasoner:\nAnswer: 12"
    assert attempt.shown_program == "The program:\nprint(14)\nIt wrote:\n14\n"
    attempt.ran = Ran(1, "exit", "", "ZeroDivisionError", False, 0.1)
    assert attempt.shown_program.endswith("It wrote (exit, code 1: ZeroDivisionError):\n")


@pytest.mark.parametrize(
    ("says", "messages", "reward"),
    [
        (["Answer: 14"], 1, 1.0),
        (["Answer: 15", "Answer: 14"], 1, 0.0),  # the first answer counts
        ([coded("print(14)"), "Answer: 14"], 2, 1.0),
        ([coded("print(13)"), "14", coded("print(14)"), "Answer: 14"], 4, 1.0),
        ([f"{coded('print(14)')}\nAnswer: 12"], 1, 0.0),
        ([coded("print(14)")] * 5, 5, 0.0),  # the last message must be an answer
    ],
)
def test_a_single_agent_goes_on_until_it_answers(says: list[str], messages: int, reward: float) -> None:
    said = iter(says)
    record = Recorded()

    async def alone(_: Any) -> Any:
        return await train.alone(TASK)

    assert record(alone, lambda call: next(said)).rewards == {"team": reward}
    assert record.roles == ["agent"] * messages


def test_a_single_agent_without_a_tool_answers_once() -> None:
    record = Recorded()

    async def without_tool(_: Any) -> Any:
        return await train.without_tool(TASK)

    assert record(without_tool, lambda call: coded("print(14)")).rewards == {"team": 0.0}
    assert record(without_tool, lambda call: "Answer: 14").rewards == {"team": 1.0}
    assert record.roles == ["reasoner"] * 2


def test_a_single_agent_sees_what_its_program_wrote() -> None:
    asked: list[Any] = []
    said = iter([coded("print(14)"), "Answer: 14"])

    def reply(call: Any) -> str:
        asked.append([message["content"] for message in call.messages])
        return next(said)

    async def alone(_: Any) -> Any:
        return await train.alone(TASK)

    Recorded()(alone, reply)
    system, question = app.SYSTEM["agent"], "What is 3*4+2?"
    assert asked == [
        [system, question],
        [system, f"{question}\n\nThe program:\nprint(14)\n\nIt wrote:\n14\n"],
    ]


def test_a_single_agent_earns_half_a_point_for_a_program_that_tells_it_the_answer_and_no_second_time() -> None:
    right, wrong, failed = ran("14\n"), ran("15\n"), ran("", code=1)
    assert verifier.agent_reward("", right, None, TASK) == {"team": 0.5, "local": 0}
    assert verifier.agent_reward("", right, wrong, TASK) == {"team": 0.5, "local": 0}
    assert verifier.agent_reward("", right, right, TASK) == {"team": 0, "local": 0}
    assert verifier.agent_reward("", wrong, None, TASK) == {"team": 0, "local": 0}
    assert verifier.agent_reward("", failed, None, TASK) == {"team": 0, "local": -0.5}
    assert verifier.agent_reward("Answer: 14", None, right, TASK) == {"team": 1, "local": 0}
    assert verifier.agent_reward("Answer: 15", None, right, TASK) == {"team": 0, "local": 0}
    assert verifier.agent_reward(coded("print(14)"), None, right, TASK) == {"team": 0, "local": -0.5}


def test_a_program_that_comes_again_is_not_run_again() -> None:
    app.run.cache_clear()
    assert app.run("print(3 * 4 + 2)") is app.run("print(3 * 4 + 2)")
    assert app.run.cache_info().misses == 1


SUMS = tasks.make_tasks(120, seed=3, kinds=tasks.SUMS)


def test_the_sums_are_of_three_numbers_and_differ_by_seed() -> None:
    shape = r"State the final answer to the following arithmetic problem: (\d\d [+-] \d\d [+-] \d\d) ="
    for task in SUMS:
        found = re.fullmatch(shape, task["question"])
        assert found and eval(found[1]) == int(task["answer"])
    assert not {task["question"] for task in SUMS} & {t["question"] for t in tasks.make_tasks(120, kinds=tasks.SUMS)}


def test_the_words_of_the_demonstrations_are_all_in_the_vocabulary_and_so_are_those_of_the_application() -> None:
    tokenizer, rng = word_tokenizer(base.WORDS), random.Random(0)
    for at, task in enumerate(SUMS):
        role = tuple(app.SYSTEM)[at % 4]
        messages, answer = base.demonstration(rng, task, role, begun=at % 8 > 3)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + answer
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"], text
        assert tokenizer.decode(tokenizer(answer)["input_ids"]) == answer

    said = {"reasoner": "Answer: -7", "tool_user": base.program(rng, SUMS[0]), "judge": "Answer: 7"}
    asked: list[str] = []

    def reply(call: Any) -> str:
        asked.append(tokenizer.apply_chat_template(call.messages, tokenize=False))
        return said[call.role]

    async def solve(_: Any) -> Any:
        return await train.solve(SUMS[0])

    Recorded()(solve, reply)
    assert len(asked) == 9  # they never agree
    assert all(tokenizer.unk_token_id not in tokenizer(text)["input_ids"] for text in asked)


def test_without_errors_the_demonstrations_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in ("ERRING_PROGRAM", "AT_ONCE", "BAD_FORM", "MENTAL"):
        monkeypatch.setattr(base, error, 0)
    rng = random.Random(1)
    for at, task in enumerate(SUMS):
        role, begun = tuple(app.SYSTEM)[at % 4], at % 8 > 3
        _, answer = base.demonstration(rng, task, role, begun=begun)
        if role == "tool_user" or (role == "agent" and not begun):
            found = base.ended(train.program_in(answer))
            assert found is not None and verifier.tool_reward(found, task)["team"] == 1
        else:
            assert verifier.judge_reward(answer, task)["team"] == 1


def test_the_demonstrations_end_programs_as_the_sandbox_does() -> None:
    program = train.program_in(base.program(random.Random(0), SUMS[0])) or ""
    for text in (program, program.replace(")", "+")):
        found, true = base.ended(text), app.run(text)
        assert found is not None and (found.ok, found.stdout) == (true.ok, true.stdout)
