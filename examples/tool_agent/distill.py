"""From a provider's model to one's own: record the clerk with a provider, learn from it, then reinforce, and compare.

    python -m examples.tool_agent.distill --out runs/tool_agent/distilled

The provider is a script behind a real address. Each stage prints the command that does the same by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from examples.stages import run_cotune
from examples.tool_agent.provider import serving
from examples.tool_agent.shop import make_tasks

WORKFLOW = "examples.tool_agent.train:solve"
CONFIG = str(Path(__file__).parent / "train.toml")


def write_tasks(path: Path, count: int, seed: int) -> str:
    path.write_text("".join(json.dumps(task) + "\n" for task in make_tasks(count, seed)))
    return str(path)


def main() -> None:
    """Record, learn, reinforce, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tool_agent/distilled"))
    parser.add_argument("--recorded", type=int, default=500, help="episodes recorded with the provider")
    parser.add_argument("--sft-steps", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8, help="reinforcement steps after that")
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    base, traced, learned, reinforced = (str(out / name) for name in ("base", "traced", "sft", "rl"))
    if not Path(base).exists():
        subprocess.run([sys.executable, "-m", "examples.tool_agent.clerk_base", "--out", base], check=True)
    tasks = write_tasks(out / "tasks.jsonl", options.recorded, options.seed)
    held_out = write_tasks(out / "held_out.jsonl", options.held_out, options.seed + 1)
    common = ["--config", CONFIG, "--model", base, "--set", f"seed={options.seed}", "--policies", "shared"]
    with serving() as url:
        run_cotune(url, "trace", WORKFLOW, "--tasks", tasks, "--out", traced)
        run_cotune(url, "trace", WORKFLOW, "--tasks", held_out, "--out", str(out / "today"))
        sft = [
            "--recipe",
            "sft",
            "--records",
            traced,
            "--set",
            "records.min_reward=1",
            "--steps",
            str(options.sft_steps),
        ]
        run_cotune(url, "train", WORKFLOW, *common, *sft, "--out", learned)
        rl = ["--tasks", tasks, "--init", learned, "--steps", str(options.steps)]
        run_cotune(url, "train", WORKFLOW, *common, *rl, "--out", reinforced)
        prices = ["--price", "clerk=0.15/0.60", "--price", f"{base}=0.01/0.02"]
        for run in (learned, reinforced):
            words = ["--run", run, "--modes", "base,trained", "--records", str(out / "today"), "--out", f"{run}/eval"]
            run_cotune(url, "eval", WORKFLOW, "--tasks", held_out, *words, *prices)


if __name__ == "__main__":
    main()
