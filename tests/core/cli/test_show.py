"""What `cotune show` prints, at a width of 100 columns."""

import io
import json
import re

import msgspec
import pytest
from rich.console import Console

from cotune.cli.printing.as_json import episode_as_json
from cotune.cli.printing.overview import show_run
from cotune.errors import RecordError, RunError
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Episode, PolicyRef, RewardRecord, Task, Usage
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.terminal import terminal


def shown(path, **options):
    """Lines on the terminal, with ids, times and runs of spaces made plain."""
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(show_run(path, **options))
    assert all(len(line) <= 100 for line in out.getvalue().splitlines())
    plain = re.sub(r"\d+\.\d+ s\b", "0 s", out.getvalue())
    return [re.sub(r"\s+", " ", line).strip() for line in plain.splitlines()]


def ask(live, role, *messages):
    return live.start(
        CallerContext(role, "test"), {"model": "m", "messages": [{"role": "user", "content": m} for m in messages]}
    )


def candidate(index, said, *token_ids, **fields):
    message = {"role": "assistant", "content": said}
    return Candidate(
        index=index, text=said, message=message, token_ids=token_ids, logprobs=(-0.5,) * len(token_ids), **fields
    )


def tree_answer(rewards, said, chosen=0, role="navigator"):
    candidates = tuple(candidate(i, f"{said}{i}", 10 + i, 11) for i in range(len(rewards)))
    components = tuple({"local": value} for value in rewards)
    return Answer(
        candidates=candidates,
        chosen=chosen,
        prompt_ids=(1, 2, 3),
        policy=PolicyRef(role, 0 if role == "base" else 2),
        rewards=components,
    )


@pytest.fixture
def run(tmp_path):
    """Two training episodes, one that failed, and one interrupted."""
    store = SqliteStore.open(tmp_path)
    ids = []
    for number, rewards in enumerate([(0.0, 1.0), (1.0, 1.0)]):
        live = LiveEpisode(
            store, Task(id=f"t{number}", input={"goal": 4}), workflow="w", phase="train", training_step=0
        )
        ask(live, "navigator", "where?").finish(tree_answer(rewards, "go ", chosen=1))
        later = live.start(
            CallerContext("driver", "test"),
            {"messages": [{"role": "assistant", "content": "go 1"}, {"role": "user", "content": "[b]now[/b]"}]},
        )
        later.finish(tree_answer((0.0, -1.0), "turn ", role="driver"))
        live.end("ok", rewards={"team": 0.5})
        ids.append(live.id)
    broken = LiveEpisode(store, Task(id="t2", input=None), workflow="w", phase="train", training_step=0)
    ask(broken, "navigator", "where?").fail("timeout", "no answer in 3 s")
    broken.end("error", error="ValueError: no answer")
    open_end = LiveEpisode(store, Task(id="t3", input=None), workflow="w", phase="train", training_step=0)
    ask(open_end, "navigator", "where?").finish(tree_answer((1.0,), "go "))
    store.flush()
    ids += [broken.id, open_end.id]
    first = store.calls(ids[0])[0]
    store.consume([first.id], 0)
    store.write([RewardRecord(f"{first.id}.0", "late", 1.0)])
    store.close()
    return tmp_path, ids


def test_what_applications_left_out_is_shown(tmp_path):
    with SqliteStore.open(tmp_path) as store:
        store.commit([], {"dropped": 2, "sampled": 1200})
    told = (
        "0 records lost · 0 late rewards refused · 2 records dropped by applications · 1,200 calls left out by sampling"
    )
    assert told in " ".join(shown(tmp_path))


def test_overview_and_list(run):
    path, ids = run
    lines = shown(path)
    assert lines[0] == f"records {path}/records.db"
    assert lines[2] == "no verdict: there is nothing to compare these episodes with"
    assert "1 episode of train failed: ValueError: no answer" in lines
    text = "\n".join(lines)
    assert re.search(r"^train 3 2 1 0 3 1 \d\.\d\d team 0\.333$", text, re.M), "the failed episode counts 0"
    assert re.search(r"^navigator 4 1 1 5 9 10 \d\.\d{3} local 0\.8$", text, re.M)
    assert re.search(r"^driver 2 0 1 4 6 8 \d\.\d{3} local -0\.5$", text, re.M)
    assert "1 unfinished episode · 0 records lost · 1 late reward refused" in lines
    assert "1 call of navigator: timeout" in lines
    at = lines.index("3 episodes")
    assert [re.sub(r" \d\.\d\d ", " SECONDS ", line) for line in lines[at + 4 : at + 9]] == [
        f"{ids[0][-8:]} t0 train 1 2 SECONDS ok team 0.5",
        'asked {"goal": 4} answered turn 0',
        f"{ids[1][-8:]} t1 train 1 2 SECONDS ok team 0.5",
        'asked {"goal": 4} answered turn 0',
        f"{ids[2][-8:]} t2 train 1 1 SECONDS error",
    ]


def test_the_list_shows_80_characters_of_question_and_answer(tmp_path):
    store = SqliteStore.open(tmp_path)
    live = LiveEpisode(store, Task(id="t", input="why\u202e " * 40), workflow="w", phase="trace")
    ask(live, "writer", "write").finish(Answer(candidates=(candidate(0, "so\n" * 60),)))
    live.end("ok")
    store.close()
    question, answer = f"asked {('why� ' * 16)[:79]}…", f"answered {('so ' * 27)[:79]}…"
    lines = shown(tmp_path)
    assert lines[lines.index(question) + 1] == answer, "100 columns have no room for both on one line"
    out = io.StringIO()
    terminal(file=out, width=200, color_system=None).print(show_run(tmp_path))
    assert f"  {question}  {answer}" in out.getvalue().splitlines()


def test_causes_and_roles_without_a_policy_come_first(tmp_path):
    store = SqliteStore.open(tmp_path)
    for number, cause in enumerate(["late", "no answer\nat all", "late", "a", "b"]):
        live = LiveEpisode(store, Task(id=f"t{number}", input=None), workflow="w", phase="train", training_step=0)
        ask(live, "critic", "?").finish(tree_answer((), "go ", role="base"))
        live.end("error", error=cause)
    store.close()
    lines = shown(tmp_path)
    at = lines.index("2 episodes of train failed: late")
    assert lines[at : at + 5] == [
        "2 episodes of train failed: late",
        "1 episode of train failed: a",
        "1 episode of train failed: b",
        "1 more episode failed, for 1 other reason",
        "role critic has no policy: base@0, the untrained model, answered 5 calls",
    ]


def test_list_of_one_task_and_limit(run):
    path, ids = run
    assert "1 episode of task t1" in shown(path, filters=EpisodeFilters(task="t1"))
    lines = shown(path, limit=1)
    assert "the latest 1 of 3 episodes" in lines
    assert [line for line in lines if ids[2][-8:] in line]
    assert not [line for line in lines if ids[0][-8:] in line]


def test_episode_as_a_tree(run):
    path, ids = run
    lines = shown(path, episode=ids[0])
    assert lines[0] == f"episode {ids[0]} task t0 · train step 1 · 2 calls · 0 s · ok team 0.5"
    assert lines[1].endswith("input {'goal': 4}")
    assert lines[2:] == [
        "├── 0 navigator turn 0 · 3+4 tokens · 0 s · navigator@2",
        "│ ├── < where?",
        "│ ├── local 0 go 0",
        "│ └── > local 1 go 1",
        "└── 1 driver turn 0 reads 0 · 3+4 tokens · 0 s · driver@2",
        "├── < [b]now[/b]",
        "├── > local 0 turn 0",
        "└── local -1 turn 1",
    ]


def test_failures_are_shown(run):
    path, ids = run
    lines = shown(path, episode=ids[2])
    assert lines[0] == "error (call 0, navigator: timeout): ValueError: no answer"
    assert lines[1].startswith(f"episode {ids[2]} task t2")
    assert "└── 0 navigator turn 0 · 0+0 tokens · 0 s · m · timeout" in lines
    assert lines[-1] == "└── no answer in 3 s"
    assert shown(path, episode=ids[3])[0] == f"episode {ids[3]} unfinished: it has calls but no end"


def test_an_error_takes_one_line_and_many_rewards_leave_room_for_the_answer(tmp_path):
    store = SqliteStore.open(tmp_path)
    live = LiveEpisode(store, Task(id="t", input=1), workflow="w", phase="trace")
    ask(live, "writer", "write").fail("error", "\nAPIError: no answer\nTraceback:\n  line 1")
    named = {"cites_its_sources": 0.25, "follows_the_style": -0.5}
    long = candidate(0, "an answer " * 40, 1, finish_reason="length")
    ask(live, "writer", "write").finish(Answer(candidates=(long,), rewards=(named,)))
    live.end("error", error="\nValueError: no plan\nTraceback:\n  line 2")
    store.close()
    lines = shown(tmp_path, episode=live.id)
    assert lines[0] == "error (call 0, writer: error): ValueError: no plan"
    assert lines[5] == "│ └── APIError: no answer"
    assert lines[8] == "└── > cites_its_sources 0.25 follows_the_style -0.5"
    assert lines[9].startswith("[cut at the length limit] an answer an answer") and lines[9].endswith("…")
    assert "│ Traceback:" in shown(tmp_path, episode=live.id, full=True)
    assert "1 episode of trace failed: ValueError: no plan" in shown(tmp_path)


def test_texts_beside_rewards_stand_below_what_they_are_about(tmp_path):
    store = SqliteStore.open(tmp_path)
    live = LiveEpisode(store, Task(id="t", input=1), workflow="w", phase="trace")
    why = "names no source\nand is " + "very " * 40 + "long"
    answer = tree_answer((0.25, 1.0), "go ", chosen=1)
    ask(live, "writer", "write").finish(msgspec.structs.replace(answer, feedback=(why, "[b]fine[/b]")))
    live.end("ok", rewards={"team": 0.5}, feedback="half right")
    store.close()
    lines = shown(tmp_path, episode=live.id)
    assert lines[2] == "├── why: half right"
    at = lines.index("├── local 0.25 go 0")
    assert lines[at + 1].startswith("├── why: names no source and is very very") and lines[at + 1].endswith("…")
    assert lines[at + 2 :] == ["├── > local 1 go 1", "└── why: [b]fine[/b]"]
    whole = "\n".join(shown(tmp_path, episode=live.id, full=True))
    assert "why: names no source\n" in whole and "very long" in " ".join(whole.split())
    with SqliteStore.open(tmp_path, read_only=True) as store:
        told = json.loads(episode_as_json(store, live.id))
    assert told["feedback"] == {"team": "half right"}
    assert [c["feedback"] for c in told["calls"][0]["candidates"]] == [{"local": why}, {"local": "[b]fine[/b]"}]


def test_a_text_that_was_cut_is_counted(tmp_path):
    store = SqliteStore.open(tmp_path)
    live = LiveEpisode(store, Task(id="t", input=1), workflow="w", phase="trace")
    live.end("ok", rewards={"team": 0.5}, feedback="x" * 5000)
    store.close()
    assert "1 feedback text was too long, and its middle is cut" in shown(tmp_path)


def test_where_nothing_fits_there_is_no_empty_table(run, tmp_path):
    assert shown(run[0], filters=EpisodeFilters(role="nobody"))[-2:] == ["0 episodes", ""]
    store = SqliteStore.open(tmp_path / "traced")
    LiveEpisode(store, Task(id="t", input=1), workflow="w", phase="trace").end("ok")
    store.close()
    assert "no groups" in shown(tmp_path / "traced", groups=True)


def test_parallel_calls_stand_below_what_they_read(tmp_path):
    store = SqliteStore.open(tmp_path)
    live = LiveEpisode(store, Task(id="t", input=1), workflow="w")
    plan = ask(live, "planner", "plan")
    plan.finish(Answer(candidates=(candidate(0, "do a, b"),), usage=Usage(5, 4)))
    body = {"messages": [{"role": "assistant", "content": "do a, b"}, {"role": "user", "content": "write " * 50}]}
    for writer in [live.start(CallerContext("writer", "test"), body) for _ in range(2)]:
        call = [{"id": "1", "function": {"name": "search", "arguments": '{"q":1}'}}]
        said = Candidate(index=0, text="", message={"role": "assistant", "tool_calls": call}, finish_reason="length")
        writer.finish(Answer(candidates=(said,)))
    live.end("ok")
    store.close()
    lines = shown(tmp_path, episode=live.id)
    assert lines[2] == "└── 0 planner turn 0 · 5+4 tokens · 0 s · m"
    assert lines[5] == "├── 1 writer turn 0 reads 0 · 0+0 tokens · 0 s · no model name"
    assert lines[6].startswith("│ ├── < write write") and lines[6].endswith("…")
    assert lines[7] == '│ └── > [cut at the length limit] search({"q":1})'
    assert lines[8] == "└── 2 writer turn 1 reads 0 · 0+0 tokens · 0 s · no model name"


def test_groups_and_what_was_left_out(run):
    path, _ = run
    lines = shown(path, groups=True)
    assert lines[0] == "groups of 1 training step"
    assert lines[1] == "plan tree, recipe at_grpo, as the records suggest; key task, role, turn, branch"
    assert "driver 0 2 4 2 -0.500 0.500 0% 2" in lines
    assert "navigator 0 2 4 2 0.750 0.250 50% 1" in lines
    assert "6 of 9 candidates trained on; left out:" in lines
    assert "zero_variance 2 22.2% all rewards of the group are equal" in lines
    assert "timed_out_call 1 11.1% the request timed out" in lines


def test_groups_follow_the_configuration_of_the_run(run):
    path, _ = run
    config = {"plan": {"kind": "independent"}, "recipe": None, "rewards": {"team_weight": 1.0}, "loss": {}}
    (path / "run.json").write_text(json.dumps({"config": config}))
    lines = shown(path, groups=True)
    assert lines[1] == "plan independent, recipe dr_mas, as the run was configured; key task, role"
    assert "group_of_one 4 44.4% nothing to compare it with" in lines


def test_groups_are_of_the_roles_that_the_run_trains(run):
    path, _ = run
    (path / "run.json").write_text("{}")
    saved = path / "checkpoints" / "step-000001"
    saved.mkdir(parents=True)
    policies = [
        {"name": "navigator", "kind": "lora", "version": 1, "roles": ["navigator"]},
        {"name": "frozen", "kind": "frozen", "version": 0, "roles": ["driver"]},
    ]
    (saved / "policies.json").write_text(json.dumps(policies))
    (path / "checkpoints" / "latest").write_text(saved.name)
    lines = shown(path, groups=True)
    assert [line for line in lines if line.startswith("untrained_role 4 44.4% ")]
    assert not [line for line in lines if line.startswith("driver")]


def test_several_choices_of_one_answer_are_no_tree(tmp_path):
    store = SqliteStore.open(tmp_path)
    live = LiveEpisode(store, Task(id="t", input=None), workflow="w", phase="train", training_step=0)
    answer = Answer(candidates=tuple(candidate(i, "go", 10 + i) for i in range(3)), prompt_ids=(1,))
    ask(live, "navigator", "where?").finish(answer)
    live.end("ok", rewards={"team": 1.0})
    store.close()
    assert shown(tmp_path, groups=True)[1].startswith("plan independent, recipe dr_mas, as the records suggest")


def test_an_episode_is_named_by_the_end_of_its_id(tmp_path):
    ids = ["01M8E430T69TPCKBN48RNY9PNG", "01M8E430T69TPCKBN48RNY9PNH", "02M8E430T69TPCKBN48RNY9PNH"]
    with SqliteStore.open(tmp_path) as store:
        store.write([Episode(id=id, task=Task(id=id[-1:], input=None), workflow="w", phase="trace") for id in ids])
        store.flush()
        assert store.figures().episode_named("RNY9PNG") == store.figures().episode_named(ids[0]) == ids[0]
        assert store.figures().episode_named("nowhere") == "nowhere"
        with pytest.raises(RecordError, match="2 episodes end in '9PNH'"):
            store.figures().episode_named("9PNH")
    assert "task G" in "\n".join(shown(tmp_path, episode="NY9PNG"))


def test_three_roles_with_long_names_and_two_rewards_keep_their_tables(tmp_path):
    with SqliteStore.open(tmp_path) as store:
        for number in range(3):
            live = LiveEpisode(store, Task(id=f"t{number}", input=None), workflow="w", phase="train", training_step=0)
            for role in ("classifier", "translator", "summarizer"):
                call = ask(live, role, "?")
                call.finish(tree_answer((), "go ", role="base"))
                target = f"{call.record.id}.0" if hasattr(call, "record") else f"{call.id}.0"
                store.write([RewardRecord(target, name, 0.25) for name in ("correctness", "politeness")])
            id = live.end("ok").id
            store.write([RewardRecord(id, name, 1.0) for name in ("correctness", "politeness")])
    out = io.StringIO()
    terminal(file=out, width=80, color_system=None).print(show_run(tmp_path))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "·" not in "".join(line for line in lines if "0 records lost" not in line)
    assert "  tokens  " in out.getvalue(), "counts have a unit"
    assert sum(line.rstrip().endswith("correctness 1 politeness 1") for line in lines) == 3, "an episode is one line"


def test_unknown_episode_and_missing_run(run, tmp_path):
    with pytest.raises(RecordError, match="No finished episode 'nope'"):
        show_run(run[0], episode="nope")
    with pytest.raises(RunError, match="neither a run nor a records file"):
        show_run(tmp_path / "nowhere")


def test_an_empty_run_can_be_shown(tmp_path):
    SqliteStore.open(tmp_path).close()
    assert "0 episodes" in shown(tmp_path)
    assert "0 of 0 candidates trained on; left out:" in shown(tmp_path, groups=True)
