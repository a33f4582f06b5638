"""The code workload: its problems, what programs and tests are worth, and how neither can be had for nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cotune.integrations.apps.activation import activate
from examples.workloads.code import app, base, families, programs, tasks, train, verifier
from examples.workloads.sandbox.bubblewrap import Limits, Sandbox
from tests.examples.applications import check_knows_nothing_of_cotune
from tests.integrations.recorded import Recorded

activate()
FOLDER = Path(app.__file__).parent
RIGHT = "print(sum(n > 4 for n in map(int, input().split())))"
TASK: verifier.Problem = {
    "id": "t",
    "question": "Print how many are greater than 4.",
    "examples": [{"input": "4 5 6", "output": "2\n"}],
    "tests": [{"input": "1 9", "output": "1\n"}, {"input": "4 4", "output": "0"}, {"input": "7 8 9", "output": "3\n"}],
    "function": "",
    "reference": RIGHT,
    "wrong": [RIGHT.replace(">", ">="), RIGHT.replace("> 4", "> 7")],
}


def coded(program: str) -> str:
    return f"So:\n```python\n{program}\n```"


def written_tests(*tests: tuple[str, str]) -> str:
    return "\n".join(f"**Test Input:**\n```\n{given}\n```\n**Test Output:**\n```\n{out}\n```" for given, out in tests)


def worth(*tests: tuple[str, str]) -> float:
    return verifier.tests_worth(programs.tests_in(written_tests(*tests)), TASK)


def coder(program: str) -> float:
    reward = verifier.coder_reward(coded(program), TASK)
    assert reward["team"] == reward["local"]  # as published: the same share twice
    return reward["local"]


def test_problems_of_our_own_have_hidden_tests_that_tell_their_wrong_programs() -> None:
    made = tasks.make_tasks(3 * len(families.FAMILIES))
    assert len({task["id"] for task in made}) == len(made) >= 40
    assert len({task["question"] for task in made}) == len(made)
    assert made[:5] == tasks.make_tasks(5)
    assert not {task["question"] for task in made} & {task["question"] for task in tasks.make_tasks(28, seed=1)}
    for task in made:
        assert json.loads(json.dumps(task)) == task
        inputs = [test["input"] for test in (*task["examples"], *task["tests"])]
        assert len(set(inputs)) == 6 and task["wrong"] and task["examples"][0]["output"] in task["question"]
    for task in made[:3]:
        assert verifier.solved(task["reference"], task) == 1
        assert verifier.solved(task["wrong"][0], task) < 1


def test_programs_and_tests_are_read_from_messages() -> None:
    assert programs.program_in("no program") is None
    assert programs.program_in("```python\n\n```") is None
    assert programs.program_in("```python\nold\n```\nbetter:\n```\nnew\n```") == "new\n"
    assert programs.tests_in("Test Input: 1, Test Output: 2") == []
    assert programs.tests_in(written_tests(("1 2", "3"), ("1 2", "4"), ("", ""))) == [
        {"input": "1 2\n", "output": "3\n"},
        {"input": "\n", "output": "\n"},
    ]
    assert len(programs.tests_in(written_tests(*[(str(n), "0") for n in range(50)]))) == programs.MAX_TESTS


def test_a_program_earns_the_share_of_hidden_tests_that_it_passes() -> None:
    assert coder(RIGHT) == 1
    assert coder(TASK["wrong"][0]) == pytest.approx(2 / 3)
    assert coder("print(3)   ") == pytest.approx(1 / 3)
    assert verifier.coder_reward("I cannot.", TASK) == {"team": 0, "local": 0}
    assert coder("this is no program") == 0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "try:\n    print(undefined)\nexcept BaseException:\n    pass",
        "print('\\n'.join(map(str, range(10))))",  # every answer
        "for name in ('/program.py', '/tmp/tests', '../tests.json'):\n    try:\n        print(open(name).read())\n"
        "    except OSError:\n        pass",
        "import glob; [print(open(f).read()) for f in glob.glob('/tmp/*') + glob.glob('/*.json*')]",
        "print(2)",  # copied from the example and from a test that the tester has shown
        "print(1); import sys; sys.exit(1)",
        "print(1); raise SystemExit('done')",
    ],
)
def test_a_program_that_does_not_solve_the_task_earns_nothing(program: str) -> None:
    assert coder(program) == 0


def test_a_program_that_runs_into_a_limit_is_not_run_on_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, asked = Sandbox(Limits(cpu_s=1)), list[str]()
    monkeypatch.setattr(programs, "sandbox", lambda: quick)
    monkeypatch.setattr(programs, "run", lambda *given, run=programs.run: (asked.append(given[1]), run(*given))[1])
    assert coder("n = input()\nprint(0 if n == '4 4' else 1, flush=True)\nwhile n != '1 9': pass") == pytest.approx(
        1 / 3
    )
    assert asked == ["1 9", "4 4"]


def test_tests_earn_for_right_answers_that_tell_wrong_programs() -> None:
    assert worth(("3 4", "0"), ("5", "1")) == 1  # both wrong programs fail one of them
    assert worth(("3 4", "0")) == 0.5
    assert worth(("3 4", "0"), ("5", "1"), ("9", "7"), ("8", "2")) == 0.5  # half of the answers are wrong


@pytest.mark.parametrize(
    "tests",
    [
        [],
        [("9", "1")],  # every program passes it
        [("9", "1"), ("8 9", "2"), ("1", "0")],
        [("3 4", "1"), ("5", "0")],  # wrong answers, which wrong programs fail too
        [("4 5 6", "2")],  # the example in the question
        [("", "0")],  # an input that the reference fails on
        [("x", "")],
        [("4 4", ""), ("3 4", " ")],  # expects nothing
        [("3 4", "0\n0\n1\n2")],  # every answer
    ],
)
def test_tests_that_tell_nothing_earn_nothing(tests: list[tuple[str, str]]) -> None:
    assert worth(*tests) == 0


def test_the_example_among_good_tests_counts_as_a_failed_one() -> None:
    assert worth(("3 4", "0"), ("5", "1"), ("4 5 6", "2")) == pytest.approx(2 / 3)


def test_without_a_right_program_or_wrong_ones_tests_earn_nothing() -> None:
    tests = programs.tests_in(written_tests(("3 4", "0")))
    assert verifier.tests_worth(tests, {**TASK, "reference": ""}) == 0
    assert verifier.tests_worth(tests, {**TASK, "wrong": []}) == 0


def test_a_tester_earns_with_the_program_that_its_tests_are_for() -> None:
    message = written_tests(("3 4", "0"))
    assert verifier.tester_reward(message, RIGHT, TASK) == {"team": 1, "local": 0.5}
    assert verifier.tester_reward(message, None, TASK) == {"team": 0, "local": 0.5}


def test_a_function_is_called_with_the_arguments_and_its_result_compared_as_json() -> None:
    tests: list[programs.Test] = [
        {"input": "[[1, 2], 3]", "output": "[[1, 2, 3]]", "also": "[1, 2, 3]"},
        {"input": "[[], 1]", "output": "[1]"},
    ]
    plain = "def join(a, b):\n    print('noise')\n    return a + [b]"
    method = "class Solution:\n    def join(self, a, b):\n        return a + [b]"
    assert programs.passed(plain, tests, "join") == programs.passed(method, tests, "join") == [True, True]
    assert programs.passed("def join(a, b):\n    return 1", tests, "join") == [False, False]
    assert programs.passed("join = 3", tests, "join") == [False, False]


def test_the_application_knows_nothing_of_cotune() -> None:
    for name in ("app.py", "programs.py", "tasks.py", "families.py", "datasets.py", "mutants.py", "verifier.py"):
        check_knows_nothing_of_cotune(FOLDER / name)


@pytest.mark.parametrize(
    ("written", "tests", "roles", "reward"),
    [
        ([RIGHT], [(("3 4", "0"), ("5", "1"))], 1, 1.0),
        ([TASK["wrong"][0], RIGHT], [(("4", "0"),)] * 2, 2, 1.0),
        (["print(7)"] * 4, [(("3 4", "0"),)] * 4, 4, 0.0),
        (["print(2)"], [(("4 5 6", "2"),)], 1, 0.0),  # the coder copied what the tester expects, and both agree
        (["print(7)"] * 4, [()] * 4, 4, 0.0),
    ],
)
def test_both_go_on_until_program_and_tests_agree_and_hidden_tests_judge(
    written: list[str], tests: list[Any], roles: int, reward: float
) -> None:
    said = {"coder": map(coded, written), "tester": (written_tests(*pairs) for pairs in tests)}
    record = Recorded()

    async def solve(_: Any) -> Any:
        return await train.solve(TASK)

    outcome = record(solve, lambda call: next(iter(said[call.role])))
    assert outcome.rewards == {"team": reward}
    assert record.roles == ["coder", "tester"] * roles
    hidden = [test["input"] for test in TASK["tests"]]
    asked = json.dumps([message for call in record.calls for message in call.params.get("messages", [])])
    assert not [given for given in hidden if given in asked]


@pytest.mark.parametrize(("program", "reward"), [(RIGHT, 1.0), (TASK["wrong"][0], pytest.approx(2 / 3))])
def test_a_single_agent_writes_one_program_and_sees_no_tests(program: str, reward: float) -> None:
    asked: list[Any] = []

    def reply(call: Any) -> str:
        asked.append([message["content"] for message in call.messages])
        return coded(program)

    record = Recorded()

    async def alone(_: Any) -> Any:
        return await train.alone(TASK)

    assert record(alone, reply).rewards == {"team": reward}
    assert record.roles == ["agent"]
    assert asked == [[app.CODER, TASK["question"]]]


def test_a_program_that_comes_again_is_not_run_again_on_the_same_input() -> None:
    programs.run.cache_clear()
    assert programs.passed(RIGHT, TASK["tests"]) == [True] * 3
    assert programs.passed(RIGHT, [*TASK["tests"], {"input": "1 9", "output": "7"}]) == [True] * 3 + [False]
    assert programs.run.cache_info().misses == 3


SMALL = tasks.make_tasks(40, seed=3, families=families.SMALL_FAMILIES, problems=16)


def test_problems_come_again_and_again_under_names_of_their_own() -> None:
    assert len({task["id"] for task in SMALL}) == 40
    assert [{**task, "id": ""} for task in SMALL[16:32]] == [{**task, "id": ""} for task in SMALL[:16]]
    assert len({task["question"] for task in SMALL}) == 16
    assert SMALL[:5] == tasks.make_tasks(5, seed=3, families=families.SMALL_FAMILIES, problems=16)
    assert {task["id"].split("-")[0] for task in SMALL} == {family.name for family in families.SMALL_FAMILIES}
    assert all(task["wrong"] for task in SMALL)


def test_the_base_model_knows_all_that_the_application_says() -> None:
    tokenizer, rng = base.tokenizer(), random.Random(0)
    again = 0
    for role in ("coder", "tester", "agent") * 40:
        messages, answer = base.demonstration(rng, rng.choice(SMALL), role)
        again += "Program:" in messages[1]["content"]
        asked = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
        said = tokenizer(answer)["input_ids"]
        assert tokenizer.unk_token_id not in [*asked, *said]
        assert tokenizer.decode(said) == answer
        assert len(said) < 24  # sampling.max_tokens in small.toml
        assert role != "agent" or "Program:" not in messages[1]["content"]
    assert again > 20


def test_demonstrated_programs_and_tests_are_right_and_wrong_and_read_by_the_application() -> None:
    rng = random.Random(1)
    for task in SMALL[:2]:
        right, *wrong = base.programs()[task["reference"]]
        assert verifier.coder_reward(base.said(right.pieces), task)["local"] == 1
        assert min(verifier.coder_reward(base.said(one.pieces), task)["local"] for one in wrong) < 1
    of_tests, first, later = list[bool](), list[bool](), list[bool]()
    for task in SMALL * 20:
        (test,) = programs.tests_in(base.said(base.tests(rng, task)[0]))
        right = base.programs()[task["reference"]][0]
        of_tests.append(test["output"].split() == right.outputs[test["input"].strip()].split())
        first.append(base.program(rng, task, base.RIGHT) is right)
        later.append(base.program(rng, task, base.CORRECTED) is right)
    assert 0.6 < programs.share(of_tests) < 0.95
    assert 0.3 < programs.share(first) < 0.45 < programs.share(later) < 0.6


def test_what_demonstrated_programs_write_is_what_the_sandbox_says() -> None:
    known = [written for programs_of_one in base.programs().values() for written in programs_of_one]
    for written in random.Random(2).sample(known, 4):
        given = random.Random(len(written.pieces)).choice(base.INPUTS)
        found = programs.run(programs.program_in(base.said(written.pieces)) or "", given)
        assert found.ok and found.stdout == written.outputs[given]
