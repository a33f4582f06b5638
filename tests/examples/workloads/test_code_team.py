"""The code-agent team: its rules, its rewards, how it is played with scripted agents, and its small training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.integrations.apps.activation import activate
from cotune.storage.metrics_file import read_metrics
from examples.workloads.code_team import app, base, expert, programs, puzzles, tasks, train, verifier
from examples.workloads.plan_path_checked import board
from examples.workloads.sokoban import game
from tests.examples.applications import check_knows_nothing_of_cotune, imported_again
from tests.integrations.recorded import Recorded, asks, candidate, tool_call

activate()
FOLDER = Path(app.__file__).parent
PATH: puzzles.Puzzle = {"id": "p", "kind": "plan_path", "rows": ["S.#.", "..#G", "#...", "...."], "turns": 3}
WAY = "down right down right right up"
LEVEL: puzzles.Puzzle = {"id": "l", "kind": "sokoban", "rows": ["######", "#@$ .#", "#    #", "######"]}
GRID: puzzles.Puzzle = {
    "id": "g",
    "kind": "sudoku",
    "rows": ["1.34", "34.2", ".143", "432."],
    "solution": ["1234", "3412", "2143", "4321"],
}
FAILS = "print(undefined)"


def prints(answer: str) -> str:
    return f"print({answer!r})"


def program(text: str) -> dict[str, Any]:
    """A message of the code agent that runs a program."""
    return asks(tool_call("run_python", {"program": text}))


@dataclass
class Asked:
    """A request of an agent: the last message of its prompt."""

    role: str
    prompt: str


def play(workflow: Any, task: puzzles.Puzzle, says: Mapping[str, list[Any]]) -> tuple[dict[str, float], list[Asked]]:
    """Play a task with scripted agents. Returns its rewards and the requests of its agents."""
    scripts = {role: iter(messages) for role, messages in says.items()}
    requests: list[Asked] = []

    def reply(call: Any) -> Any:
        requests.append(Asked(call.role, str(call.messages[-1]["content"])))
        return next(scripts[call.role])

    async def run(_: Any) -> Any:
        return await workflow(task)

    return dict(Recorded()(run, reply).rewards), requests


def prompts(requests: list[Asked], role: str) -> list[str]:
    return [request.prompt for request in requests if request.role == role]


# The puzzles.


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("plan_path", "I walk:\nup right", ["up", "right"]),
        ("plan_path", "up, right", None),
        ("plan_path", "", None),
        ("sokoban", "up " * puzzles.MOST_MOVES, ["up"] * puzzles.MOST_MOVES),
        ("sokoban", "up " * (puzzles.MOST_MOVES + 1), None),
        ("sudoku", "1234 3412 2143 4321", ["1234", "3412", "2143", "4321"]),
        ("sudoku", "1234 3412 2143", None),
        ("sudoku", "1.34 3412 2143 4321", None),
        ("sudoku", "up up up up", None),
    ],
)
def test_the_last_line_is_read_or_nothing(kind: puzzles.Kind, text: str, answer: list[str] | None) -> None:
    assert puzzles.answer_in(kind, text, 4) == answer


def test_a_path_moves_the_start_and_ends_at_the_goal() -> None:
    rows, useless = puzzles.carry_out("plan_path", PATH["rows"], ["up", "right", "right", "down"])
    assert (rows, useless) == (["..#.", ".S#G", "#...", "...."], 2)
    rows, useless = puzzles.carry_out("plan_path", PATH["rows"], [*WAY.split(), "left"])
    assert (rows[1], useless) == ("..#*", 0)
    assert puzzles.is_solved("plan_path", rows) and not puzzles.is_solved("plan_path", PATH["rows"])
    assert puzzles.carry_out("plan_path", rows, ["left"]) == (rows, 0)


def test_a_push_moves_the_box() -> None:
    rows, useless = puzzles.carry_out("sokoban", LEVEL["rows"], ["up", "right"])
    assert (rows[1], useless) == ("# @$.#", 1)
    rows, _ = puzzles.carry_out("sokoban", rows, ["right"])
    assert rows[1] == "#  @*#" and puzzles.is_solved("sokoban", rows)


def test_only_the_solution_of_a_sudoku_changes_it() -> None:
    assert puzzles.carry_out("sudoku", GRID["rows"], GRID["solution"]) == (GRID["solution"], 0)
    # Another grid that breaks no rule, but changes clues.
    assert puzzles.carry_out("sudoku", GRID["rows"], ["2134", "3421", "1243", "4312"]) == (GRID["rows"], 1)


def test_tasks_are_of_all_kinds_repeat_with_their_seed_and_show_no_solution() -> None:
    made = tasks.make_tasks(9, 5)
    assert made == tasks.make_tasks(9, 5) and made != tasks.make_tasks(9, 6)
    assert [task["kind"] for task in made] == [*puzzles.KINDS] * 3
    assert len({task["id"] for task in made}) == 9
    for task in made:
        assert json.loads(json.dumps(task)) == task
        assert "solution" not in app.start(task)
        assert not puzzles.is_solved(task["kind"], task["rows"])
    assert {len(task["rows"]) for task in tasks.make_tasks(2, kinds=["plan_path"], size=10)} == {10}


# Programs.


def every_program(kind: str, right: bool) -> Iterator[str]:
    """All programs with right pieces alone, or all that have one wrong piece."""
    choices = programs.PROGRAMS[kind]
    for written in itertools.product(*((*choice.right, *choice.wrong) for choice in choices)):
        wrong = sum(piece not in choice.right for piece, choice in zip(written, choices, strict=True))
        if wrong == (not right):
            yield "".join(written)


@pytest.mark.parametrize("kind", puzzles.KINDS)
def test_programs_of_right_pieces_solve_every_puzzle(kind: puzzles.Kind) -> None:
    for task in tasks.make_tasks(4, 11, kinds=[kind]):
        for text in every_program(kind, right=True):
            output, answer = app.run_on_puzzle(text, kind, task["rows"])
            assert answer is not None and verifier.solved(task, [answer]), (output, text)


@pytest.mark.parametrize("kind", puzzles.KINDS)
def test_a_wrong_piece_fails_on_some_puzzle(kind: puzzles.Kind) -> None:
    """The program without the box rule may pass by luck: rows and columns usually decide a grid of 4 x 4."""
    failing = 0
    every = list(every_program(kind, right=False))
    for text in every:
        for task in tasks.make_tasks(6, 12, kinds=[kind]):
            answer = app.run_on_puzzle(text, kind, task["rows"])[1]
            if answer is None or not verifier.solved(task, [answer]):
                failing += 1
                break
    assert failing >= 0.6 * len(every)


def test_an_error_is_shown_by_its_last_line() -> None:
    output, answer = app.run_on_puzzle(FAILS, "plan_path", PATH["rows"])
    assert (output, answer) == ("error: NameError: name 'undefined' is not defined", None)
    assert app.run_on_puzzle(prints("nowhere"), "plan_path", PATH["rows"]) == ("nowhere", None)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise SystemExit(3)", "it ended with exit code 3 and printed no error"),
        ("print('up ' * 40_000)", "it printed more than 64 KB"),
        ("import sys; print('a warning', file=sys.stderr); print('up ' * 40_000)", "it printed more than 64 KB"),
        ("while True: pass", "ended by the limit on cpu"),
    ],
)
def test_an_end_without_an_error_is_reported_as_it_happened(text: str, error: str) -> None:
    assert app.run_on_puzzle(text, "plan_path", PATH["rows"]) == (f"error: {error}", None)


# The team, with scripted agents.


def test_the_plan_agent_accepts_what_the_program_prints() -> None:
    outcome, calls = play(train.solve, PATH, {"coder": [program(prints(WAY))], "planner": ["It is right.\naccept"]})
    assert outcome == {"team": 1.0}
    assert [call.role for call in calls] == ["coder", "planner"]
    shown = prompts(calls, "planner")[0]
    assert "S.#.\n..#G" in shown and f"Program:\n{prints(WAY)}" in shown and shown.endswith(f"Output:\n{WAY}")


def test_a_failing_program_is_shown_its_error_and_may_be_written_again() -> None:
    says = {"coder": [program(FAILS), program(prints(WAY))], "planner": ["accept"]}
    outcome, calls = play(train.solve, PATH, says)
    assert outcome == {"team": 1.0}
    assert [call.role for call in calls] == ["coder", "coder", "planner"]
    assert prompts(calls, "coder")[1] == "error: NameError: name 'undefined' is not defined"


def test_a_rejected_program_changes_nothing_and_the_code_agent_is_told() -> None:
    says = {"coder": [program(prints("up up")), program(prints(WAY))], "planner": ["reject", "accept"]}
    outcome, calls = play(train.solve, PATH, says)
    assert outcome == {"team": 1.0}
    first, second = prompts(calls, "coder")
    assert first == "Puzzle:\n" + "\n".join(PATH["rows"])
    assert second == first + "\nLast turn: no answer"


def test_the_plan_agent_may_answer_by_itself_and_the_next_turn_continues_from_there() -> None:
    says = {"coder": [program(FAILS), program(FAILS), program(prints("down right right up"))]}
    outcome, calls = play(train.solve, PATH, {**says, "planner": ["down right", "accept"]})
    assert outcome == {"team": 1.0}
    assert "..#.\n.S#G" in prompts(calls, "coder")[-1]


def test_the_turns_of_a_task_are_its_limit() -> None:
    says = {"coder": [program(prints("up")) for _ in range(9)], "planner": ["accept"] * 9}
    outcome, calls = play(train.solve, PATH, says)
    assert outcome == {"team": 0.0}
    assert [call.role for call in calls] == ["coder", "planner"] * 3


def test_agents_at_the_same_time_see_the_program_of_the_turn_before() -> None:
    says = {"coder": [program(prints(WAY)), program(FAILS), program(FAILS)], "planner": ["reject", "accept"]}
    outcome, calls = play(train.parallel, PATH, says)
    assert outcome == {"team": 1.0}
    first, second = prompts(calls, "planner")
    assert first.endswith("Program:\nno program\nOutput:")
    assert second.endswith(f"Output:\n{WAY}")


def test_each_agent_plays_alone() -> None:
    outcome, calls = play(train.alone_planner, GRID, {"planner": ["1 2 3 4", "1234 3412 2143 4321"]})
    assert outcome == {"team": 1.0} and [call.role for call in calls] == ["planner"] * 2
    outcome, calls = play(train.alone_coder, LEVEL, {"coder": [program(prints("right right"))]})
    assert outcome == {"team": 1.0} and [call.role for call in calls] == ["coder"]


# Rewards.


class Call:
    """A call in a turn of a task."""

    def __init__(self, task: puzzles.Puzzle, **state: Any) -> None:
        self.state = {**app.start(task), **state}


def coder_earns(message: Any, task: puzzles.Puzzle = PATH) -> dict[str, float]:
    said = candidate(0, message)
    calls = tuple(message["tool_calls"]) if isinstance(message, dict) else ()
    return train.program_written(_with_calls(said, calls), Call(task), task)  # type: ignore[arg-type]


def _with_calls(said: Any, calls: Any) -> Any:
    class Said:
        text = said.text
        tool_calls = calls

    return Said()


def planner_earns(text: str, task: puzzles.Puzzle = PATH, **state: Any) -> dict[str, float]:
    return train.decision_made(candidate(0, text), Call(task, **state), task)  # type: ignore[arg-type]


def test_a_program_earns_its_answer() -> None:
    assert coder_earns(program(prints(WAY))) == {"team": 6 / 4 + 1, "local": 0}
    assert coder_earns(program(prints("down up right up down"))) == {"team": 0.5, "local": -0.1}
    assert coder_earns(program(prints("1234 3412 2143 4321")), GRID) == {"team": 1.5, "local": 0}


@pytest.mark.parametrize(
    "message",
    [
        "I would write a program.",
        program(FAILS),
        program("while True: pass"),
        program(prints("north")),
        program(""),
        asks(tool_call("run_python", {"text": prints(WAY)})),
        asks(tool_call("other", {"program": prints(WAY)})),
        asks(*[tool_call("run_python", {"program": prints(WAY)})] * 2),
        asks({"id": "1", "type": "function", "function": {"name": "run_python", "arguments": "{"}}),
    ],
)
def test_a_message_without_an_answer_earns_a_penalty(message: Any) -> None:
    assert coder_earns(message) == {"team": 0.0, "local": -1.0}


def test_a_decision_earns_the_answer_that_it_stands_for() -> None:
    answer = WAY.split()
    assert planner_earns("accept", program_answer=answer) == {"team": 2.5, "local": 0}
    assert planner_earns("reject", program_answer=answer) == {"team": 0, "local": 0}
    assert planner_earns("accept", program_answer=None) == {"team": 0, "local": -1}
    assert planner_earns("maybe", program_answer=answer) == {"team": 0, "local": -1}
    assert planner_earns("down right", program_answer=None) == {"team": 0.5, "local": 0}


def test_a_harmful_answer_earns_less_than_a_rejection() -> None:
    # The box against the right wall, which no move can undo.
    level: puzzles.Puzzle = {"id": "h", "kind": "sokoban", "rows": ["######", "#.   #", "# @$ #", "#    #", "######"]}
    assert game.distance(*game.parsed(level["rows"])) is not None
    assert planner_earns("right", level) == {"team": -1, "local": 0}
    wrong = planner_earns("1134 3432 1143 4321", GRID)
    assert wrong["team"] < 0.5 and wrong["local"] < 0
    assert sum(planner_earns("up up up", PATH).values()) < 0


@pytest.mark.parametrize("kind", ["plan_path", "sokoban"])
def test_nothing_is_gained_by_going_back_and_forth(kind: puzzles.Kind) -> None:
    """What a way earns depends on its ends alone. The published shaping is not so: it pays 0.01 of the distance."""
    for task in tasks.make_tasks(5, 3, kinds=[kind]):
        for moves in itertools.product(board.MOVES, repeat=3):
            first, rows = 0.0, task["rows"]
            for move in moves:
                first += verifier.answer_reward(task, rows, [move])["team"]
                rows, _ = puzzles.carry_out(kind, rows, [move])
            together = verifier.answer_reward(task, task["rows"], list(moves))["team"]
            # -1 stands for all the moves away from a solution once a level cannot be solved any more.
            assert together == pytest.approx(first) or together == -1


def test_success_is_worked_out_from_the_answers_alone() -> None:
    assert verifier.solved(PATH, [["down", "right"], ["down", "right", "right", "up"]])
    assert not verifier.solved({**PATH, "turns": 1}, [["down", "right"], ["down", "right", "right", "up"]])


# The expert, the tokenizer and the training.


@pytest.mark.parametrize("kind", puzzles.KINDS)
def test_the_tokenizer_writes_and_reads_every_message_of_the_expert(kind: puzzles.Kind) -> None:
    fast = base.tokenizer()
    tools = [{"type": "function", "function": {"name": "run_python"}}]
    for task in tasks.make_tasks(10, 4, kinds=[kind]):
        state = app.start(task)
        messages = app.coder_messages(state)
        call = expert.next_message(messages)
        arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
        call["tool_calls"][0]["function"]["arguments"] = arguments
        text = fast.apply_chat_template([*messages, call], tools=tools, tokenize=False)
        ids = fast.encode(text, add_special_tokens=False)
        assert fast.decode(ids) == text and len(ids) < 120
        state["program"] = arguments["program"]
        state["output"], _ = app.run_on_puzzle(state["program"], kind, task["rows"])
        shown = app.planner_messages(state)
        text = fast.apply_chat_template([*shown, expert.next_message(shown)], tokenize=False)
        assert fast.decode(fast.encode(text, add_special_tokens=False)) == text


def test_the_application_knows_nothing_of_cotune() -> None:
    for name in ("app.py", "puzzles.py", "programs.py", "tasks.py", "verifier.py", "expert.py"):
        check_knows_nothing_of_cotune(FOLDER / name)


@pytest.mark.timeout(600)
def test_a_small_model_learns_from_solved_examples_and_then_by_at_grpo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_thread: None
) -> None:
    def in_this_process(url: str, *words: str) -> None:
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        with imported_again("examples."):  # the application's clients read the address when they are made
            assert main(list(words)) == 0

    monkeypatch.setattr(base, "run_cotune", in_this_process)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    start = base.build(tmp_path, examples=24, settings=("--steps", "2", "--set", "tasks_per_step=4"))
    sft = list(read_metrics(tmp_path / "sft"))
    assert len(sft) == 2 and "below_reward" in json.dumps(sft[0])

    task_file = tmp_path / "tasks.jsonl"
    task_file.write_text("".join(json.dumps(task) + "\n" for task in tasks.make_tasks(3, turns=2)))
    words = ["train", "examples.workloads.code_team.train:solve", "--config", str(FOLDER / "small.toml")]
    words += ["--model", str(start), "--tasks", str(task_file), "--steps", "1", "--tasks-per-step", "3"]
    assert main([*words, "--set", "plan.k=4", "--out", str(tmp_path / "run")]) == 0
    (line,) = read_metrics(tmp_path / "run")
    assert line["candidates"] > 0
