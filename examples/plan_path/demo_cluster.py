"""The whole loop on Ray: vLLM samples, FSDP trains, two processes run the application, and vLLM serves the result.

    python -m examples.plan_path.demo_cluster

The same application and the same stages as demo.py; ends with a table and OUT/summary.json.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from examples.plan_path.demo import (
    APP,
    BASE,
    HELD_OUT_SEED,
    HERE,
    MODES,
    TRAIN_SEED,
    WORKFLOW,
    Stages,
    conclude,
    console,
    run_app,
    write_tasks,
)

CONFIG = HERE / "cluster.toml"
ROLES = ("navigator", "driver")
START_SECONDS = 900


def vllm_command(base: Path, export: Path, port: int) -> list[str]:
    """`vllm serve` with one model name per role."""
    from cotune.adapters.manifest import read_manifest

    manifest = read_manifest(export)
    folders = {entry.role: export / entry.policy for entry in manifest.roles}
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(base), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--max-model-len", "512", "--enable-lora", "--max-lora-rank", "16"]
    return [*command, "--lora-modules", *(f"{role}={folders[role]}" for role in ROLES)]


@contextlib.contextmanager
def vllm_serving(command: list[str], port: int, log: Path) -> Iterator[str]:
    """Run vLLM's server until the block ends; its output goes to `log`."""
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not Path("/dev/nvidia0").exists():
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        command = [*command, "--enforce-eager", "--dtype", "float32"]
    with log.open("w") as file:
        server = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(START_SECONDS):
        if server.poll() is not None:
            raise SystemExit(f"vLLM ended with code {server.returncode}:\n{log.read_text()[-3000:]}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5)
            return
        time.sleep(1)
    raise SystemExit(f"vLLM did not start in {START_SECONDS} s: see {log}")


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main() -> None:
    """Run all stages into the folder `--out`, replacing the results of an earlier demo."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-cluster"))
    parser.add_argument("--eval-tasks", type=int, default=300, help="held-out tasks (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="training steps (default: those of cluster.toml)")
    options = parser.parse_args()
    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.environ.setdefault("OPENAI_API_KEY", "none")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    base, run, export = out / "base", out / "run", out / "export"
    stages = Stages()

    with stages("warm up a base model", f"python -m {BASE} --out {base}"):
        subprocess.run([sys.executable, "-m", BASE, "--out", str(base)], check=True)
    tasks = write_tasks(out / "tasks.jsonl", 4096, TRAIN_SEED)
    held_out = write_tasks(out / "held_out.jsonl", options.eval_tasks, HELD_OUT_SEED)

    from cotune.adapters.export import export_run
    from cotune.intervals import share
    from cotune.storage.metrics_file import read_metrics
    from cotune.trainer.config.load import load_config
    from cotune.trainer.evaluation.evaluate import evaluate
    from cotune.trainer.evaluation.report import render
    from cotune.trainer.train import train

    config = load_config(CONFIG, {"model": str(base), "steps": options.steps})
    with stages(
        "train on Ray",
        f"cotune train {WORKFLOW} --tasks {tasks} --model {base} --config {CONFIG} --cluster local --out {run}",
    ):
        trained = train(WORKFLOW, tasks, config, out=run, console=console)
    if not trained.finished:
        raise SystemExit(f"stopped; continue with: cotune train --resume {run}")
    with stages("evaluate", f"cotune eval {WORKFLOW} --tasks {held_out} --run {run} --modes base,trained,swapped"):
        report = evaluate(run, WORKFLOW, held_out, modes=MODES)
        console.print(render(report))
    with stages("export", f"cotune export {run} --out {export}"):
        export_run(run, export)
    port = free_port()
    command = vllm_command(base, export, port)
    with (
        stages("serve with vLLM", f"{' '.join(command)} & OPENAI_BASE_URL=... python -m {APP}"),
        vllm_serving(command, port, out / "vllm.log") as url,
    ):
        served = share(*run_app(url, options.eval_tasks))

    rewards = [{role: line["roles"][role]["reward"] for role in ROLES} for line in read_metrics(run)]
    conclude(out, run, report, served, trained, stages, {"rewards": rewards})


if __name__ == "__main__":
    main()
