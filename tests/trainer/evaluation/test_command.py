"""`cotune eval`, `export`, `deployed` and `serve` of a run, on an application with one role more than it trained."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import cotune
from cotune.adapters.manifest import read_manifest
from cotune.adapters.serving import serving
from cotune.cli.main import main
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.provider import Provider
from tests.integrations.provider import serving as serving_provider
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask, converse, letters

TASKS = [{"id": str(i), "letter": letter} for i, letter in enumerate("abcd")]
ME = "tests.trainer.evaluation.test_command"


async def late(task: Any) -> dict[str, Any]:
    """The critic is asked on the last task only; the first role asks for its own temperature and seed."""
    if task["letter"] == "d":
        await ask("critic", "check")
    said = await ask("first", f"say {task['letter']}", temperature=0.25, top_p=0.5, seed=7)
    return {**await converse(task), "success": task["letter"] in said}


async def broken(task: Any) -> bool:
    raise ValueError(f"no {task['letter']}" if task["letter"] == "d" else "not at all")


async def half_broken(task: Any) -> bool:
    """Fails without its own provider."""
    if "re:" not in await ask("first", "say a"):
        raise ValueError("where is my provider?")
    return True


SOLVE, BROKEN, HALF = application(late, first=letters), application(broken), application(half_broken)


@pytest.fixture(scope="module")
def run(module_trainer: Trainer) -> Path:
    """A run of one step that never saw the critic."""
    module_trainer(SOLVE, TASKS[:3], steps=1, to="eval", sampling={"max_tokens": 4})
    (module_trainer.folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return module_trainer.folder / "eval"


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    with serving_provider() as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        yield made


def evaluated(run: Path, app: str, *more: str) -> int:
    return main(["eval", f"{ME}:{app}", "--tasks", str(run.parent / "tasks.jsonl"), "--run", str(run), *more])


def test_today_stands_beside_base_and_trained_with_what_they_cost(
    run: Path, provider: Provider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--modes", "base,trained,today", "--price", "m=1000/2000", "--out", str(tmp_path / "out")]
    assert evaluated(run, "SOLVE", *words) == 0
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    today = written["evaluations"]["today"]
    # 13 calls of 7 + 3 tokens each: 13 * (7 * 1000 + 3 * 2000) / 1e6
    assert today["use"] | {"seconds": None} == {
        "calls": 13, "prompt_tokens": 91, "completion_tokens": 39, "uncounted": 0, "seconds": None,
        "cost": pytest.approx(0.169), "unpriced": 0,
    }  # fmt: skip
    assert len(provider.requests) == 13
    assert today["roles"]["first"]["policies"] == ["provider"]
    assert written["evaluations"]["trained"]["use"]["cost"] is None
    assert [(c["label"], c["against"]) for c in written["comparisons"]] == [
        ("trained", "base"), ("trained", "today"),
    ]  # fmt: skip
    said = " ".join(capsys.readouterr().out.split())
    assert "0.042250" in said
    assert "Role 'critic' has no policy: the untrained model answered its 2 calls (other_roles)." in said
    assert all(c["verdict"] in said for c in written["comparisons"])
    with SqliteStore.open(tmp_path / "out", read_only=True) as store:
        sampled = {
            mode: {
                c.sampling["temperature"]
                for e in store.episodes(EpisodeFilters(phase=f"eval-{mode}"))
                for c in store.calls(e.id)
            }
            for mode in ("base", "trained")
        }
        seeds = [
            {
                (e.task.id, c.role, c.turn): c.sampling["seed"]
                for e in store.episodes(EpisodeFilters(phase=p))
                for c in store.calls(e.id)
            }
            for p in ("eval-base", "eval-trained")
        ]
    assert sampled == {"base": {0.25, 1.0}, "trained": {0.25, 1.0}}, "as the application asks"
    assert {mode["temperature"] for mode in written["evaluations"].values()} == {"app"}
    assert "Results at the application's own temperature" in said
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 13


def test_several_episodes_of_each_task_show_how_often_one_succeeds(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--samples", "3", "--out", str(run.parent / "several")]
    assert evaluated(run, "SOLVE", "--modes", "base", *more) == 0
    greedy = ["--modes", "base", "--temperature", "0", "--samples", "3", "--out", str(run.parent / "greedy")]
    found = json.loads((run.parent / "several" / "evaluation.json").read_text())["evaluations"]
    assert found["base"]["episodes"] == 12 and sorted(found["base"]["pass_at"]) == ["1", "2", "3"]
    chances = [found["base"]["pass_at"][k]["mean"] for k in "123"]
    assert chances == sorted(chances)
    shown = capsys.readouterr().out
    assert "At least one of k episodes succeeds" in shown and "pass@3" in shown
    with SqliteStore.open(run.parent / "several", read_only=True) as store:
        said = {}
        for episode in store.episodes(EpisodeFilters(phase="eval-base")):
            said.setdefault(episode.task.id, set()).add(store.calls(episode.id)[-1].candidates[0].token_ids)
        assert max(map(len, said.values())) > 1, "each episode draws its own"
    assert evaluated(run, "SOLVE", *greedy) == 0
    found = json.loads((run.parent / "greedy" / "evaluation.json").read_text())["evaluations"]
    assert found["base"]["episodes"] == 4 and found["base"]["pass_at"] == {}
    assert found["base"]["temperature"] == 0.0 and "Results at temperature 0," in capsys.readouterr().out
    assert evaluated(run, "SOLVE", "--samples", "0") == 1
    assert "samples = 0 must be a number above 0" in capsys.readouterr().err


def test_all_episodes_failed_is_an_error_that_names_the_commonest_cause(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(run, "BROKEN", "--modes", "base,trained") == 1
    heard = capsys.readouterr()
    assert "All 8 episodes failed, so there is nothing to evaluate; the commonest cause, 6 times: error: " in heard.err
    assert "not at all" in heard.err and "No success rate" not in heard.out


def test_a_mode_in_which_all_failed_is_exit_status_1_too(
    run: Path, provider: Provider, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(run, "HALF", "--modes", "trained,today") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "All 4 episodes of trained failed, most often of: error: " in said and "where is my provider?" in said


def test_a_folder_with_other_records_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "records.db").stat().st_mtime_ns
    assert evaluated(run, "SOLVE", "--out", str(run)) == 1
    assert "already has records.db" in capsys.readouterr().err
    assert (run / "records.db").stat().st_mtime_ns == before


def test_trace_prints_the_success_rate(provider: Provider, run: Path, tmp_path: Path, capsys: Any) -> None:
    provider.reply = lambda body, number: (500, "text/plain", ["no"]) if number == 0 else said_a(body)
    words = ["trace", f"{ME}:SOLVE", "--tasks", str(run.parent / "tasks.jsonl"), "--out", str(tmp_path / "traced")]
    assert main([*words, "--concurrency", "1"]) == 0
    assert "success 33.3% (1 of 3 episodes)" in capsys.readouterr().out, "the provider failed one"


def said_a(body: dict[str, Any]) -> tuple[int, str, list[Any]]:
    from tests.integrations.provider import completion, json_reply

    return json_reply(completion({"role": "assistant", "content": "b"}))


@pytest.mark.parametrize("others", ["frozen", "provider"])
def test_a_role_without_a_policy_is_played_alike_in_deployed_and_serve(
    run: Path, provider: Provider, others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = json.loads((run / "run.json").read_text())
    described["config"]["other_roles"] = others
    (run / "run.json").write_text(json.dumps(described))
    assert main(["export", str(run), "--out", str(tmp_path / "adapters")]) == 0
    assert read_manifest(tmp_path / "adapters").other_roles == others
    deployment = cotune.deployed(tmp_path / "adapters")

    async def inside() -> None:
        async with deployment:
            await late(TASKS[3])

    asyncio.run(inside())
    own = others == "provider"
    assert (dict(deployment.unlisted), dict(deployment.passed_through)) == ({"critic": 1}, {"critic": 1} if own else {})
    assert len(provider.requests) == int(own)
    with serving(tmp_path / "adapters", default="" if own else "base") as endpoint:
        asked = {"model": "critic", "messages": [{"role": "user", "content": "check"}], "max_tokens": 2}
        answer = httpx.post(f"{endpoint.url}/chat/completions", json=asked, timeout=60)
        unlisted = httpx.get(endpoint.url.removesuffix("/v1") + "/health", timeout=60).json()["unlisted"]
    assert (answer.status_code, unlisted) == ((404, {}) if own else (200, {"critic": 1}))


def test_the_bill_of_recorded_episodes_beside_the_trained_policies(
    run: Path, provider: Provider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is asked again; the run's model prices its policies, and a task that was recorded twice counts once."""
    tasks = tmp_path / "some.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS[:3]))
    for _ in range(2):
        assert main(["trace", f"{ME}:SOLVE", "--tasks", str(tasks), "--out", str(tmp_path / "traced")]) == 0
    run = Path(shutil.copytree(run, tmp_path / "run"))
    described = json.loads((run / "run.json").read_text())
    described["config"]["other_roles"] = "frozen"
    (run / "run.json").write_text(json.dumps(described))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    asked = len(provider.requests)
    model = described["model"]
    words = ["--modes", "base,trained", "--records", str(tmp_path / "traced"), "--out", str(tmp_path / "out")]
    assert evaluated(run, "SOLVE", *words, "--price", "m=1000/2000", "--price", f"{model}=10/20") == 0
    assert len(provider.requests) == asked == 18
    said = capsys.readouterr().out
    whole = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    written = whole["evaluations"]
    # 9 calls of 7 + 3 tokens each: 9 * (7 * 1000 + 3 * 2000) / 1e6
    assert {name: written["recorded"]["use"][name] for name in ("calls", "prompt_tokens", "cost", "unpriced")} == {
        "calls": 9, "prompt_tokens": 63, "cost": pytest.approx(0.117), "unpriced": 0,
    }  # fmt: skip
    use = written["trained"]["use"]
    assert use["cost"] == pytest.approx((use["prompt_tokens"] * 10 + use["completion_tokens"] * 20) / 1e6)
    bill = [line for line in said.splitlines() if "per 1,000 tasks" in line]
    assert [line.partition(":")[0] for line in bill] == ["recorded", "base", "trained"]
    assert bill[0].startswith("recorded: success ") and bill[0].endswith("at 39 per 1,000 tasks")
    assert [(c["label"], c["against"]) for c in whole["comparisons"]] == [("trained", "base"), ("trained", "recorded")]
    assert whole["comparisons"][1]["success"]["n"] == 3
    assert whole["notes"][-1] == f"recorded: 3 of 4 tasks are in {tmp_path / 'traced'}."


def test_records_of_other_tasks_are_compared_with_nothing(
    run: Path, provider: Provider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "other.jsonl"
    tasks.write_text(json.dumps({"id": "other", "letter": "d"}) + "\n")
    assert main(["trace", f"{ME}:SOLVE", "--tasks", str(tasks), "--out", str(tmp_path / "traced")]) == 0
    assert evaluated(run, "SOLVE", "--modes", "trained", "--records", str(tmp_path / "traced")) == 0
    said = capsys.readouterr().out
    assert "none of the tasks is in" in said and "per 1,000 tasks" not in said and "than recorded" not in said
    assert evaluated(run, "SOLVE", "--modes", "trained", "--records", str(tmp_path / "nothing")) == 1
    assert "There is no records file" in capsys.readouterr().err


def test_another_base_than_that_of_the_run_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `cotune export --model` refuses it; a copy elsewhere is the same model."""
    monkeypatch.syspath_prepend(str(run.parent))
    (other := tmp_path / "other").mkdir()
    shutil.copytree(json.loads((run / "run.json").read_text())["model"], other, dirs_exist_ok=True)
    (tmp_path / "one.jsonl").write_text(json.dumps(TASKS[0]))
    command = ["eval", f"{ME}:SOLVE", "--tasks", str(tmp_path / "one.jsonl"), "--run", str(run)]
    command += ["--modes", "trained", "--model", str(other)]
    assert main(command) == 0
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "rope_theta": 5.0}))
    capsys.readouterr()
    assert main(command) == 1
    cause = f"cotune eval: {other} is not the base model that the run was started with: its config differ. "
    assert capsys.readouterr().err == cause + "Put the old one back, or name its place with --model.\n"
