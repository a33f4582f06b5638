"""Seconds to each page of the viewer, in a browser, on a run of 100,000 calls, and the memory of its server.

    python -m benchmarks.viewer --calls 100000

Needs Debian's packages chromium and chromium-driver. The run is made up: 100 steps of 50 episodes of 20 calls, each
with 4 candidates of 60 tokens. A tenth of the episodes failed, each with other numbers in its error, and an evaluation
tried 1,000 tasks in four modes. Time is from the start of the navigation until the page's script has run; the last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from cotune.records.ids import candidate_id, pack_ids, segment_id
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    Message,
    PolicyRef,
    Record,
    RewardRecord,
    Segment,
    Task,
    Usage,
)
from cotune.storage.sqlite_store import SqliteStore

EPISODES, CALLS, CANDIDATES = 50, 20, 4
TASKS = 1000
"""Tasks of its evaluation."""
ROLES = ("planner", "coder", "tester", "critic")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,800",
)
_WORDS = (
    "the",
    "plan",
    "is",
    "to",
    "read",
    "what",
    "tester",
    "said",
    "and",
    "change",
    "one",
    "line",
    "at",
    "a",
    "time",
)


def build(folder: Path, calls: int, tokens: int = 60) -> Path:
    """Write a run with so many calls: one step by the store, the others as copies of its rows under other ids."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = max(1, calls // (EPISODES * CALLS))
    with SqliteStore.open(folder) as store:
        store.write(list(_step(random.Random(0), tokens)))
        store.flush()
        assert store.health.lost == 0
    db = sqlite3.connect(folder / "records.db")

    def columns(table: str, **changed: str) -> str:
        """The columns of a copied row, some of them with new values."""
        names = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]
        return ", ".join(changed.get(name, f"{table[0]}.{name}") for name in names)

    own = {"id": "n.at || substr(id, 11)", "body": "replace(body, 'STEP000000', n.at)"}
    of_episodes = {
        "training_step": "k",
        "success": f"iif(abs(random()) % {steps} < k, 1.0, 0.0)",
        "error": "replace(error, 'STEP000000', n.at)",
    }
    with db:
        db.executescript(
            f"""CREATE TEMP TABLE n AS WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n WHERE k < {steps})
                    SELECT k, printf('STEP%06d', k) AS at FROM n WHERE k < {steps};
                CREATE TEMP TABLE c AS SELECT * FROM calls; CREATE TEMP TABLE e AS SELECT * FROM episodes;
                CREATE TEMP TABLE r AS SELECT * FROM rewards;
                INSERT INTO calls SELECT {columns("calls", **own, episode="n.at || substr(episode, 11)")} FROM n, c
                    ORDER BY k, id;
                INSERT INTO episodes SELECT {columns("episodes", **own, **of_episodes)} FROM n, e ORDER BY k, id;
                INSERT INTO rewards SELECT {columns("rewards", target="n.at || substr(target, 11)")} FROM n, r
                    ORDER BY k, target;
                UPDATE episodes SET body = json_set(body, '$.training_step', training_step) WHERE training_step > 0;
                INSERT INTO consumed SELECT id, CAST(substr(id, 5, 6) AS INTEGER), 1 FROM calls;"""
        )
    db.close()
    _evaluation(folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(_line(step, steps)) + "\n" for step in range(steps)))
    config = {"recipe": "at_grpo", "plan": {"kind": "tree", "k": CANDIDATES}, "steps": steps, "policies": "lora"}
    (folder / "run.json").write_text(json.dumps({"model": "synthetic", "workflow": "app:solve", "config": config}))
    return folder


def _step(rng: random.Random, tokens: int) -> Any:
    for number in range(EPISODES):
        id = f"STEP000000{number:016d}"
        yield from _calls(rng, id, tokens)
        yield Episode(
            id=id,
            task=Task(id=f"task-{number}", input={"question": " ".join(rng.choices(_WORDS, k=30))}),
            workflow="solve",
            phase="train",
            training_step=0,
            calls=CALLS,
            latency=CALLS * 0.5,
            status="error" if number % 10 == 0 else "ok",
            error=f"ValueError: answer {number} of STEP000000 is no plan" if number % 10 == 0 else None,
            started=1.7e9,
            metrics={"success": 0.0},
        )
        yield RewardRecord(id, "team", rng.random())


def _calls(rng: random.Random, episode: str, tokens: int) -> Any:
    history: list[str] = []
    before = ""
    for step in range(CALLS):
        id = f"STEP000000{episode[-4:]}{step:012d}"
        asked = Message(rng.randbytes(16).hex(), {"role": "user", "content": " ".join(rng.choices(_WORDS, k=60))})
        history.append(asked.id)
        prompt = [rng.randrange(1000) for _ in range(80)]
        segment = Segment(segment_id(prompt), None, pack_ids(prompt))
        found: list[Record] = [asked, segment]
        candidates = [_candidate(rng, index, tokens) for index in range(CANDIDATES)]
        found += [RewardRecord(candidate_id(id, c.index), "local", rng.random()) for c in candidates]
        yield from found
        yield CallRecord(
            id=id,
            episode=episode,
            role=ROLES[step % len(ROLES)],
            step=step,
            turn=step // len(ROLES),
            parents=(before,) if before else (),
            messages=tuple(history[-6:]),
            model="m",
            prompt=segment.id,
            prompt_tokens=80,
            policy=PolicyRef(ROLES[step % len(ROLES)], 0),
            started=1.7e9 + step * 0.5,
            latency=0.45,
            usage=Usage(80, tokens),
            candidates=tuple(candidates),
            chosen=0,
            sampling={"temperature": 1.0},
        )
        before = id


def _evaluation(folder: Path) -> None:
    """An evaluation of the run on `TASKS` tasks, without its episodes."""
    modes = {}
    for place, name in enumerate(("base", "trained", "swapped", "today")):
        endings = {
            f"task-{n}": {"status": "ok", "success": (n + place) % 3 > 0, "reward": n % 7 / 7, "seconds": 1.0}
            for n in range(TASKS)
        }
        modes[name] = {
            "episodes": TASKS,
            "success": {"mean": 0.5, "low": 0.4, "high": 0.6, "n": TASKS},
            "endings": endings,
        }
    compared = [{"label": "trained", "against": "base", "verdict": "trained is better than base"}]
    (folder / "eval").mkdir()
    (folder / "eval" / "evaluation.json").write_text(json.dumps({"evaluations": modes, "comparisons": compared}))


def _candidate(rng: random.Random, index: int, tokens: int) -> Candidate:
    text = " ".join(rng.choices(_WORDS, k=tokens))
    return Candidate(
        index=index,
        text=text,
        message={"role": "assistant", "content": text},
        token_ids=tuple(rng.randrange(1000) for _ in range(tokens)),
        logprobs=tuple(-rng.random() for _ in range(tokens)),
    )


def _line(step: int, steps: int) -> dict[str, Any]:
    share = step / steps
    roles = {
        role: {"reward": share, "group_spread": 0.3, "zero_variance": 0.1, "entropy": 1 - share, "tokens_mean": 60}
        for role in ROLES
    }
    return {
        "step": step,
        "episodes": EPISODES,
        "failed": 0,
        "calls": EPISODES * CALLS,
        "candidates": EPISODES * CALLS * CANDIDATES,
        "groups": EPISODES * CALLS,
        "rows": EPISODES * CALLS * CANDIDATES,
        "outcome": {"success": share, "team": share},
        "roles": roles,
        "policies": {},
        "left_out": {"zero_variance": 100},
        "seconds": {"rollout": 5.0, "update": 3.0},
        "tokens_per_s": 1000.0,
    }


def browser(profile: str) -> webdriver.Chrome:
    """A headless Chromium. Raises RuntimeError if there is none."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        raise RuntimeError("Chromium is missing: make browser, or as root: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(str(programs[1])))


def measure(run: Path, repeats: int) -> tuple[dict[str, list[float]], float]:
    """Seconds until each page can be used, each time it was opened, and the server's memory in MB at the end."""
    command = [sys.executable, "-m", "cotune", "view", str(run), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout
        url = next(line.split()[1] for line in server.stdout if line.startswith("Open")).rstrip("/")
        with tempfile.TemporaryDirectory() as profile:
            driver = browser(profile)
            try:
                driver.get("about:blank")
                seconds = {
                    name: [_open(driver, url + path) for _ in range(repeats)] for name, path in pages(run).items()
                }
            finally:
                driver.quit()
        return seconds, psutil.Process(server.pid).memory_info().rss / 2**20
    finally:
        server.terminate()
        server.wait()


def pages(run: Path) -> dict[str, str]:
    """Paths of pages of a run that `build` wrote, by their kind."""
    with SqliteStore.open(run, read_only=True) as store:
        ((episode, call),) = store.rows("SELECT episode, id FROM calls ORDER BY rowid DESC LIMIT 1")
    prefix = f"/run/{run.name}"
    step = int(episode[4:10])
    return {
        "run": prefix,
        "curves": f"{prefix}/curves",
        "episodes": f"{prefix}/episodes",
        "episodes, in the middle": f"{prefix}/episodes?before=STEP{step // 2:06d}0",
        "episodes of a role, by reward": f"{prefix}/episodes?role=coder&low=0.999",
        "search, common text": f"{prefix}/episodes?q=tester",
        "search, nowhere": f"{prefix}/episodes?q=nowhere+to+be+found",
        "episodes, lowest reward first": f"{prefix}/episodes?order=lowest",
        "calls of a role": f"{prefix}/calls?role=coder",
        "calls, search nowhere": f"{prefix}/calls?q=nowhere+to+be+found",
        "episode": f"{prefix}/episode/{episode}",
        "episode, coloured": f"{prefix}/episode/{episode}?by=logprob",
        "call": f"{prefix}/call/{call}?by=logprob",
        "groups": f"{prefix}/groups?step={step + 1}",
        "group": f"{prefix}/group/{call}?step={step + 1}",
        "evaluations": f"{prefix}/evaluations",
        "tasks": f"{prefix}/tasks",
        "tokens by role": f"{prefix}/use",
        "configuration": f"{prefix}/config",
    }


def _open(driver: webdriver.Chrome, address: str) -> float:
    began = time.perf_counter()
    driver.get(address)
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the run if it does not exist, open every page, print the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", type=Path, help="folder to keep the run in (default: a temporary one)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        run = options.run or Path(temporary) / "synthetic"
        if not (run / "run.json").is_file():
            build(run, options.calls)
        size = (run / "records.db").stat().st_size / 2**20
        seconds, memory = measure(run, options.repeats)
    table = Table("page", "first, s", "median, s", title=f"{options.calls:,} calls, {size:,.0f} MB")
    for name, times in seconds.items():
        table.add_row(name, f"{times[0]:.2f}", f"{sorted(times)[len(times) // 2]:.2f}")
    Console().print(table)
    print(f"memory of the server: {memory:.0f} MB")
    first = {name: round(times[0], 3) for name, times in seconds.items()}
    print(json.dumps({"calls": options.calls, "records_mb": round(size), "first_s": first, "server_mb": round(memory)}))


if __name__ == "__main__":
    main()
