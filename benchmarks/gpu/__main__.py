"""Measurements of cotune on one GPU, in a few minutes and without network access.

    make gpu
    python -m benchmarks.gpu --minutes 7 --out build/gpu.jsonl --parts device,correctness,updates
    make gpu-vllm
    python -m benchmarks.gpu --vllm --minutes 11 --out build/gpu-vllm.jsonl

The weights are random and made on the device, in the shapes of Qwen3-0.6B, 1.7B and 4B; prompts are token ids. Each
part runs in a process of its own and has its share of the minutes; a part that does not fit is named as omitted. Every
figure is appended to the file as a line of JSON at once, so a part that fails or hangs is a line, too, and loses
nothing. Without a GPU only `--tiny` runs, which measures nothing. The last line is a summary as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.tools import Bench
from benchmarks.gpu.vllm_parts import VLLM_PARTS

PATIENCE = 60.0
"""Seconds that a part may take beyond its share before it is stopped: the figure that it is at, and its imports."""


def run_part(name: str, seconds: float, tiny: bool, out: Path) -> None:
    """Run one part here, and append its figures to the file."""
    on_gpu = torch.cuda.is_available()
    bench = Bench(
        device="cuda" if on_gpu else "cpu",
        dtype="bfloat16" if on_gpu else "float32",
        until=time.monotonic() + seconds,
        tiny=tiny,
    )
    try:
        for figures in {**PARTS, **VLLM_PARTS}[name][1](bench):
            write(out, name, figures)
    except Exception as error:  # noqa: BLE001
        write(out, name, {"failed": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-2000:]})


def write(out: Path, part: str, figures: dict[str, Any]) -> None:
    """Append a line to the file, and print it."""
    line = json.dumps({"part": part, **figures})
    with out.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def run_all(args: argparse.Namespace, parts: list[str]) -> None:
    """Run the parts one after the other, each in a process that is stopped when it takes too long."""
    table = VLLM_PARTS if parts[0] in VLLM_PARTS else PARTS
    share = 60.0 * args.minutes / sum(seconds for seconds, _ in table.values())
    for name in parts:
        seconds = table[name][0] * share
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--seconds", str(seconds)]
        command += ["--out", str(args.out), *(["--tiny"] if args.tiny else [])]
        try:
            status = subprocess.run(command, timeout=seconds + PATIENCE).returncode
        except subprocess.TimeoutExpired:
            write(args.out, name, {"failed": f"stopped after {seconds + PATIENCE:.0f} s"})
        else:
            if status:
                write(args.out, name, {"failed": f"the process ended with status {status}"})


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts that failed or were omitted, and the number of checks that passed."""
    checks = [line for line in lines if "check" in line]
    return {
        "checks": len(checks),
        "checks_failed": [line["check"] for line in checks if not line["ok"]],
        "parts_failed": sorted({line["part"] for line in lines if "failed" in line}),
        "left_out": [f"{line['part']}: {line['left_out']}" for line in lines if "left_out" in line],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM, which must be installed")
    parser.add_argument("--minutes", type=float, help="for all parts together (default: 7, with --vllm 11)")
    parser.add_argument("--out", type=Path, default=Path("build/gpu.jsonl"), help="file (default: %(default)s)")
    parser.add_argument("--parts", help=f"some of {','.join(PARTS)}; with --vllm of {','.join(VLLM_PARTS)}")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the parts themselves; on any device")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    table = VLLM_PARTS if args.vllm else PARTS
    args.minutes = args.minutes or (11.0 if args.vllm else 7.0)
    parts = args.parts.split(",") if args.parts else list(table)
    if unknown := [name for name in parts if name not in table]:
        parser.error(f"--parts: {', '.join(unknown)} is none of {', '.join(table)}")
    if not args.tiny and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --tiny tries the parts with small shapes")
    if args.part:
        run_part(args.part, args.seconds, args.tiny, args.out)
        return 0

    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("")
    run_all(args, parts)
    figures = summary([json.loads(line) for line in args.out.read_text().splitlines()])
    print(json.dumps(figures))
    return 1 if figures["checks_failed"] or figures["parts_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
