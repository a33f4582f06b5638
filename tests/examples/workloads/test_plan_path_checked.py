"""Plan-Path with a path checker: its rules against graphs of networkx, what cannot be gained, and the application."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.integrations.apps.activation import activate
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.records.structs import Message
from examples.workloads.plan_path_checked import base, board, train
from examples.workloads.plan_path_checked.tasks import make_tasks
from examples.workloads.plan_path_checked.verifier import path_called, planner_reward, team_reward, verdict, walk_reward
from tests.integrations.recorded import Recorded, answer, asks, candidate, tool_call

activate()
TASKS = [*make_tasks(20, 7), *make_tasks(20, 7, size=5)]
TASK: board.Task = {"id": "t", "rows": ["S.#.", "..#G", "#...", "...."], "shortest": 6}
BOARD, START = board.parsed(TASK["rows"])
BEST = "down right down right right up"
DELTAS = {"up": -1j, "down": 1j, "left": -1, "right": 1}
Graph = tuple[Any, complex, complex]


def graph_of(rows: list[str]) -> Graph:
    """The free cells as a graph, start and goal: complex numbers, which know nothing of the rules here."""
    marks = {complex(x, y): mark for y, row in enumerate(rows) for x, mark in enumerate(row)}
    graph = nx.Graph()
    graph.add_nodes_from(cell for cell, mark in marks.items() if mark != "#")
    graph.add_edges_from((cell, cell + d) for cell in graph.nodes for d in (1, 1j) if marks.get(cell + d, "#") != "#")
    start, goal = (next(cell for cell, mark in marks.items() if mark == which) for which in "SG")
    return graph, start, goal


def reached(graph: Graph, paths: list[list[str]]) -> tuple[bool, int]:
    """Whether paths reach the goal, and the moves walked, by networkx."""
    nodes, at, goal = graph
    moves = 0
    for path in paths:
        cells = [at]
        for move in path:
            if cells[-1] == goal:
                break
            cells.append(cells[-1] + DELTAS[move])
        if at != goal and nx.is_simple_path(nodes, cells):
            at, moves = cells[-1], moves + len(cells) - 1
    return at == goal, moves


def way(task: board.Task) -> list[str]:
    """Moves of a shortest path, by networkx."""
    cells = nx.shortest_path(*graph_of(task["rows"]))
    return [next(m for m, d in DELTAS.items() if b - a == d) for a, b in pairwise(cells)]


GRAPHS = [graph_of(task["rows"]) for task in TASKS]
WAYS = [way(task) for task in TASKS]


def test_10_000_random_answers_are_judged_as_networkx_judges_them() -> None:
    rng = random.Random(3)
    right = shortest = faulty = 0
    for number in range(10_000):
        which = number % len(TASKS)
        moves = list(WAYS[which]) if number % 2 else []
        for _ in range(rng.randrange(3)):
            moves.insert(rng.randrange(len(moves) + 1), rng.choice(list(board.MOVES)))
        if number % 3 == 0 and moves:
            del moves[rng.randrange(len(moves))]
        cuts = sorted(rng.randrange(len(moves) + 1) for _ in range(rng.randrange(board.TURNS)))
        paths = [moves[a:b] for a, b in zip([0, *cuts], [*cuts, len(moves)], strict=True)]
        found, (by_graph, walked) = verdict(TASKS[which], paths), reached(GRAPHS[which], [p for p in paths if p])
        assert found.reached == by_graph, (TASKS[which], paths)
        assert found.shortest == (by_graph and walked == nx.shortest_path_length(*GRAPHS[which]))
        right, shortest = right + found.reached, shortest + found.shortest
        faulty += any(found.faults)
    assert right > shortest > 1000 and right > 1500 and faulty > 2000


def test_every_goal_can_be_reached_by_the_moves_that_the_task_names_and_by_no_fewer() -> None:
    for task, graph, moves in zip(TASKS, GRAPHS, WAYS, strict=True):
        assert task["shortest"] == nx.shortest_path_length(*graph) == len(moves)
        assert verdict(task, [moves]) == verdict(task, [moves[:2], moves[2:]]).__class__(True, True, ("",))
    assert [task["rows"] for task in make_tasks(5, 7)] == [task["rows"] for task in TASKS[:5]]
    assert not {tuple(task["rows"]) for task in make_tasks(20, 8)} & {tuple(task["rows"]) for task in TASKS}
    assert 0.18 < sum(row.count("#") for task in TASKS[:20] for row in task["rows"]) / 2000 < 0.24


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 39), st.data())
def test_distances_are_those_of_the_graph(number: int, data: st.DataObject) -> None:
    nodes, _, goal = GRAPHS[number]
    far = nx.single_source_shortest_path_length(nodes, goal)
    cell = data.draw(st.sampled_from(sorted(nodes.nodes, key=lambda c: (c.real, c.imag))))
    found = board.parsed(TASKS[number]["rows"])[0]
    assert board.distance(found, (int(cell.real), int(cell.imag))) == far.get(cell)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(["up ", "right ", "down\n", "\n"]), st.text(max_size=4)), max_size=8))
def test_whatever_is_said_only_moves_are_a_path(parts: list[str]) -> None:
    text = "".join(parts)
    moves = board.moves_in(text)
    line = text.strip().split("\n")[-1].split()
    assert moves == (line if line and set(line) <= set(DELTAS) else None)
    assert not verdict(TASK, [text.split()]).reached


def test_out_of_turns_is_lost_whatever_comes_after() -> None:
    moves = BEST.split()
    assert verdict(TASK, [[move] for move in moves[:2]] + [moves[2:4], moves[4:]]).reached
    late = verdict(TASK, [moves[:1], ["up"], moves[1:2], ["left", "left"], moves[2:]])
    assert not late.reached and late.faults == ("", "", "", "outside")
    assert not verdict(TASK, []).reached


def test_a_list_of_all_moves_again_and_again_reaches_nothing() -> None:
    """The reference implementation leaves out moves into walls and walks the others, 10,000 of them at no cost."""
    rng = random.Random(0)
    for task in TASKS:
        wandering = rng.choices(list(board.MOVES), k=10_000)
        assert not verdict(task, [wandering]).reached
        assert walk_reward(*board.parsed(task["rows"]), " ".join(wandering)) == {"team": 0.0, "local": -0.5}


def test_one_move_into_a_wall_and_nothing_is_walked() -> None:
    found = verdict(TASK, [["right", "right"], BEST.split()])
    assert found.reached and found.faults == ("wall", "")
    assert board.walked(BOARD, START, ["right", "right"]) == START
    assert walk_reward(BOARD, START, "right right") == {"team": 0.0, "local": -0.5}
    assert planner_reward(BOARD, START, "down right right") == {"team": 0.5, "local": -0.5}
    assert planner_reward(BOARD, START, "down right down") == {"team": 0.75, "local": 0.0}


def test_who_stands_beside_the_goal_behind_a_wall_is_no_nearer() -> None:
    """The reference implementation's shaping goes by the straight distance, through walls."""
    rows = ["S..#G", "...#.", "....."]
    here, start = board.parsed(rows)
    assert team_reward(here, start, (2, 0)) == 0.5
    assert board.distance(here, (2, 0)) == 6 and board.distance(here, (2, 2)) == 4
    assert team_reward(here, (2, 0), (2, 2)) == 0.5
    dead_end, _ = board.parsed(["S.#G", "#..."])
    assert team_reward(dead_end, (1, 1), (1, 0)) < 0


def test_reaching_the_goal_is_paid_once() -> None:
    """In the reference implementation the team's reward and the role's own are the same 1."""
    assert walk_reward(BOARD, START, BEST) == {"team": 6 / 4 + 1, "local": 0.0}
    assert planner_reward(BOARD, START, BEST) == {"team": 6 / 4 + 1, "local": 0.0}
    assert team_reward(BOARD, BOARD.goal, BOARD.goal) == 0.0


def test_settings_without_a_board_are_refused_and_not_answered_with_an_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference implementation goes on with a board without walls."""
    monkeypatch.setitem(make_tasks.__globals__, "SHORTEST", 9)
    with pytest.raises(ValueError, match=r"no board in 1000 of size 3 with 0\.5 walls has a goal 9 moves away"):
        list(make_tasks(1, 0, size=3, walls=0.5))
    with pytest.raises(ValueError, match="a size of 3 to 100"):
        list(make_tasks(1, 0, size=2))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from(list(board.MOVES)), max_size=6), max_size=6), st.integers(0, 39))
def test_going_back_and_forth_gains_nothing(paths: list[list[str]], number: int) -> None:
    here, start = board.parsed(TASKS[number]["rows"])
    at, earned = start, 0.0
    for moves in paths:
        after = board.walked(here, at, moves)
        earned += team_reward(here, at, after) if at != here.goal else 0.0
        at = after if at != here.goal else at
    assert earned == pytest.approx(team_reward(here, start, at))


@pytest.mark.parametrize(
    "text", ["", "reached", "walked 6", "4,1", "up, up", "U U R", "up up ²", "down right\nThat is it."]
)
def test_what_is_no_path_earns_least(text: str) -> None:
    assert planner_reward(BOARD, START, text) == {"team": 0.0, "local": -1.0}
    assert walk_reward(BOARD, START, text) == {"team": 0.0, "local": -1.0}


def test_of_a_message_the_last_line_counts() -> None:
    assert planner_reward(BOARD, START, "A wall to the right.\ndown right\n") == {"team": 0.5, "local": 0.0}


CALLS: list[tuple[list[dict[str, Any]], str | None]] = [
    ([tool_call("walk", {"path": "up"})], "up"),
    ([], None),
    ([tool_call("walk", {"path": "up"}), tool_call("walk", {"path": "up"})], None),
    ([tool_call("run", {"path": "up"})], None),
    ([tool_call("walk", {"way": "up"})], None),
    ([tool_call("walk", {"path": ["up"]})], None),
    ([{"function": {"name": "walk", "arguments": "{"}}], None),
    ([{"function": {"name": "walk", "arguments": "[]"}}], None),
]


@pytest.mark.parametrize(("calls", "path"), CALLS)
def test_one_call_of_the_tool_with_a_path_is_wanted(calls: list[dict[str, Any]], path: str | None) -> None:
    assert path_called(calls) == path


@pytest.mark.parametrize(
    "rows", [[], ["SG", "."], ["S."], ["SG", "SG"], ["S?G"]], ids=["empty", "ragged", "goal", "two", "mark"]
)
def test_what_is_no_board_is_refused(rows: list[str]) -> None:
    with pytest.raises(ValueError, match="a board has "):
        board.parsed(rows)


def test_each_role_sees_its_part() -> None:
    common = "size 4,4\nwalls 2,0 2,1 0,2\nat 0,0\nfree right down\n"
    assert board.planner_sees(BOARD, START, "wall after 2") == f"{common}goal 3,1 right 3 down 1\nlast wall after 2"
    assert "goal 3,1 up 2\n" in board.planner_sees(BOARD, (3, 3), "nothing")
    assert board.checker_sees(BOARD, START, "down right") == f"{common}said down right"


def played(reply: Any, workflow: Any = train.solve) -> tuple[Recorded, dict[str, float]]:
    """One episode on TASK."""
    record = Recorded()

    async def solve(_: Any) -> Any:
        return await workflow(TASK)

    return record, dict(record(solve, reply).rewards)


def shown(record: Recorded, number: int) -> str:
    """The last message of a call's prompt."""
    stored = {r.id: r.body for r in record.sink if isinstance(r, Message)}
    return str(stored[record.calls[number].messages[-1]]["content"])


def test_a_perfect_team_is_recorded_by_role_and_reaches_the_goal() -> None:
    parts = iter(["down right", "down right", "right up"])

    def reply(call: Any) -> Any:
        return next(parts) if call.role == "planner" else asks(tool_call("walk", {"path": call.state.flow["said"]}))

    record, rewards = played(reply)
    assert record.roles == ["planner", "checker"] * 3
    assert rewards == {"team": 6 / 4 + 1}
    assert "at 1,1\nfree up down left\ngoal 3,1 right 2\nlast walked 2" in shown(record, 2)
    assert "at 0,0\nfree right down\nsaid down right" in shown(record, 1)
    assert "goal" not in shown(record, 1)


def test_the_same_path_is_walked_again_when_it_is_called_again() -> None:
    """CrewAI answers a call that it has seen from a cache, unless it is told that there is none."""
    record, _ = played(lambda call: "x" if call.role == "planner" else asks(tool_call("walk", {"path": "down"})))
    lines = [line for n in (0, 2, 4, 6) for line in shown(record, n).splitlines()]
    assert [line for line in lines if line.startswith(("at", "last"))] == [
        *("at 0,0", "last nothing", "at 0,1", "last walked 1"),
        *("at 0,1", "last wall after 0", "at 0,1", "last wall after 0"),
    ]


@pytest.mark.parametrize(
    ("message", "report"),
    [
        ("walked 6", "last nothing"),
        ("down right", "last nothing"),
        ("", "last nothing"),
        (asks(tool_call("walk", {"path": "reached"})), "last nothing"),
        (asks(tool_call("walk", {"path": "down"}), tool_call("walk", {"path": "right"}, "2")), "last walked 1"),
    ],
)
def test_claims_and_the_tools_output_as_an_answer_walk_nothing(message: Any, report: str) -> None:
    record, rewards = played(lambda call: "up" if call.role == "planner" else message)
    assert shown(record, 2).rstrip().splitlines().count(report) == 1
    assert rewards["team"] <= 0.5


def test_a_call_that_cannot_be_run_costs_the_turn_and_no_more_calls_than_one() -> None:
    record, rewards = played(lambda call: "up" if call.role == "planner" else asks(tool_call("run", {"path": "down"})))
    assert rewards == {"team": 0.0}
    assert record.roles == ["planner", "checker", "checker"] * board.TURNS


def test_candidates_are_scored_where_they_were_drawn_and_the_chosen_one_goes_on() -> None:
    """In the reference implementation the second role was scored on copies of the first one's winner, and after the
    first choice prompts and rewards came from a copy of the board that nobody walked on."""
    seen: list[list[float]] = []

    def reply(call: Any) -> Any:
        if call.role == "planner":
            said = ["right right", "down right", "down"]
            seen.append([sum(train.path_said(candidate(0, text), call, TASK).values()) for text in said])
            return answer(*said, chosen=1)
        paths = ["right", "down right", "down right right"]
        messages = [asks(tool_call("walk", {"path": path})) for path in paths]
        seen.append([sum(train.path_walked(candidate(0, m), call, TASK).values()) for m in messages])
        return answer(*messages, chosen=1)

    record, _ = played(reply)
    assert seen[:2] == [[0.25 - 0.5, 0.5, 0.25], [0.25, 0.5, -0.5]]
    assert "at 1,1" in shown(record, 2)
    assert seen[2] == [-0.5, 0.5, 0.25]


def test_an_agent_alone_walks_too() -> None:
    record, rewards = played(lambda call: asks(tool_call("walk", {"path": BEST})), train.alone)
    assert record.roles == ["agent"] and rewards == {"team": 6 / 4 + 1}


def test_the_base_speaks_to_the_prompts_that_crewai_makes_in_words_that_it_knows() -> None:
    tokenizer, rng = base.tokenizer(), random.Random(0)
    boards = [board.parsed(task["rows"]) for task in TASKS[20:]]
    for _ in range(20):
        for show in (base.planner_demonstration, base.checker_demonstration, base.agent_demonstration):
            messages, said = show(rng, *base.scene(rng, boards))
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + said
            assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"], text
    record, _ = played(lambda call: "up" if call.role == "planner" else asks(tool_call("walk", {"path": "down"})))
    stored = {r.id: r.body for r in record.sink if isinstance(r, Message)}
    sees = {"planner": board.planner_sees(BOARD, START, "nothing"), "checker": board.checker_sees(BOARD, START, "up")}
    for call in record.calls[:2]:
        assert [{k: stored[i][k] for k in ("role", "content")} for i in call.messages] == base.asked(
            call.role, sees[call.role]
        )


def test_a_call_is_in_the_vocabulary_and_in_the_grammar_that_crewai_asks_for() -> None:
    tokenizer, tools = base.tokenizer(), []
    played(lambda call: "up" if call.role == "planner" else tools.append(call.tools) or "up")
    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id])
    ids = tokenizer(base.called(["up", "left"]))["input_ids"]
    assert len(ids) == 6 and tokenizer.decode(ids) == base.called(["up", "left"])
    prompt = template.render(base.asked("checker", "size 4,4"), tools[0])
    grammar = template.grammar({}, tools[0], prompt)
    assert template._grammars.replay(grammar, [*ids, tokenizer.eos_token_id]).shape[0] == 7
    _, message, finish = template.parse([*ids, tokenizer.eos_token_id], prompt=prompt, tools=tools[0])
    assert finish == "tool_calls" and path_called(message["tool_calls"]) == "up left"
