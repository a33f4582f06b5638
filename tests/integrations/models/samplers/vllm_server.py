"""A real `vllm serve` on a free port, for the tests of samplers by URL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import ends_with
from tests.ports import free_port

IN_CORE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""On a CPU: the worker is in the engine's own process, not in another one that would import vLLM, too."""
ENVIRONMENT = {
    **IN_CORE,
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
ENGINE = ["--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill", "--max-num-seqs", "64"]
ARGUMENTS = [*ENGINE, "--logprobs-mode", "processed_logprobs"]
ADAPTERS = ["--enable-lora", "--max-loras", "7", "--max-cpu-loras", "7", "--max-lora-rank", "8"]
START_SECONDS = 600


@contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    """Serve a model folder; yields the server's URL. What the server says goes to `log`."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--port", str(port), *ARGUMENTS, *ADAPTERS],
            env={**os.environ, **ENVIRONMENT},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ends_with.this_process,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(server, url, log)
            yield url
        finally:
            _stop(server)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"vllm serve did not start:\n{log.read_text()[-3000:]}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
