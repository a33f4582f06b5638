"""`cotune COMMAND` in a process of its own, forked from one that has imported what training needs: it starts in a tenth
of a second of a processor's time instead of six seconds."""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from cotune.cli.main import run

FORKED = multiprocessing.get_context("forkserver")
"""Starts processes from the one that has imported what training needs."""
FORKED.set_forkserver_preload(
    [
        "cotune.cli.main",
        "cotune.trainer.step",
        "cotune.trainer.learner.local",
        "cotune.integrations.models.transformers.engine",
        "openai",
        "peft",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)


class Command:
    """The command, begun in `folder` in a session of its own; what it says goes to the end of the file `log`. None of
    its files may grow beyond `file_size` bytes."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        log: Path,
        file_size: int = resource.RLIM_INFINITY,
    ) -> None:
        given = (list(words), str(folder), dict(environment), str(log), file_size)
        self._process = FORKED.Process(target=_begin, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status, negative where a signal ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises TimeoutExpired as Popen does."""
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("cotune", timeout or 0.0)
        return status

    def kill(self) -> None:
        self._process.kill()


def _begin(words: list[str], folder: str, environment: dict[str, str], log: str, file_size: int) -> NoReturn:
    """As `python -m cotune` begins."""
    os.setsid()
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.close(said)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    sys.path.insert(0, folder)
    sys.argv = ["cotune", *words]
    multiprocessing.current_process()._config.pop("daemon", None)  # it may have processes of its own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "SAMPLER_IN_THREAD" in environment:
        sample_in_thread()
    run()


def sample_in_thread() -> None:
    """Open samplers in a thread of this process, which has imported what they need. A process of their own would
    import it again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401 - before two threads ask for them

    from cotune.integrations.models.transformers.sampler import TransformersSampler

    opened = functools.partial(TransformersSampler.open, host="thread", device="cpu")
    setattr(TransformersSampler, "open", opened)  # noqa: B010 - a method is no variable of its class for mypy
