"""Starts Ray on this machine or joins a cluster. A process has one Ray, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from cotune.errors import ConfigError, error_line, install_extra
from cotune.integrations.cluster.temp_dir import owned_folder
from cotune.integrations.versions import require_version

log = logging.getLogger("cotune")

START_SECONDS = 120
"""Seconds that Ray's own processes may take to start. On a busy machine they need over a minute."""

REACH_SECONDS = 5.0
"""Seconds that the address of a cluster may take to answer."""

_BEFORE_RAY = {
    "RAY_raylet_start_wait_time_s": str(START_SECONDS),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_worker_niceness": "0",
}
"""Environment variables that Ray reads before it starts. They set a longer time limit, turn off telemetry and idle
workers, and hide GPUs from workers that ask for none. Actors get the same priority as the process that waits for them:
with Ray's default niceness of 15, any other process on the machine starves them."""

_START_TIMEOUT = "timed out during startup"
"""Part of Ray's error if a local node has not started after 30 seconds. No setting changes this limit. A busy machine
may need longer, but less at the second attempt, when all files are in memory."""
_LONGEST_FOLDER = 24
"""Longest path of Ray's folder. Ray adds up to 80 characters for sockets; the system allows 107 in all."""


@contextmanager
def open_ray(
    address: str | None = None, *, num_cpus: float | None = None, env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Start Ray on this machine (`address` None or "local") or join the cluster at `address`. Yields its address.

    The block's end stops or leaves Ray. If this process has a Ray already, that one is used and left running.
    `num_cpus` is the number of CPUs of a local Ray (default: all of the machine), `env` the environment of its workers.
    Enter the block in a thread that lives as long as Ray is needed, because a local Ray ends with the thread.

    Raises ConfigError if Ray is missing, does not start, is not at the address, or runs at another one;
    UnsupportedVersion.
    """
    ray = _import_ray()
    local = address in (None, "local")
    if ray.is_initialized():
        yield _joined_address(ray, address)
        return
    if not local:
        _check_reachable(str(address))
        _use_token()
    arguments: dict[str, Any] = {"address": address or "local", "namespace": "cotune", "logging_level": "error"}
    if env:
        arguments["runtime_env"] = {"env_vars": dict(env)}
    with ExitStack() as stack:
        if local:
            parent = Path(tempfile.gettempdir())
            if len(str(parent)) > _LONGEST_FOLDER:  # too long for the paths of Ray's sockets
                parent = Path("/tmp")
            folder = stack.enter_context(owned_folder(parent, "cotune-ray"))
            arguments |= {"num_cpus": num_cpus, "include_dashboard": False, "_temp_dir": str(folder)}
        stack.enter_context(_sigterm_runs_finally())
        _start(ray, arguments)
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()


def gpus_of_cluster() -> int:
    """The GPUs of the cluster that this process has joined."""
    return int(_import_ray().cluster_resources().get("GPU", 0))


def _import_ray() -> Any:
    """Import Ray with cotune's settings. Raises ConfigError if it is not installed."""
    for name, value in _BEFORE_RAY.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ConfigError("cluster", "ray", "is not installed", install_extra("ray")) from error
    require_version("ray")
    return ray


def _check_reachable(address: str) -> None:
    """Raise ConfigError if nothing answers at the address. Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            "cluster.address", address, f"is not local, auto, or HOST:PORT of a running Ray ({error})",
            "Start one with ray start --head, or correct the address.",
        ) from None  # fmt: skip


def _use_token() -> None:
    """Send the token that Ray stores for this user. If there is one, `ray start` requires it; `ray.init` sends none."""
    try:
        from ray._private.authentication import authentication_token_setup as tokens
    except ImportError:
        return  # a Ray without tokens
    logger = logging.getLogger(tokens.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    finally:
        logger.setLevel(level)


def _start(ray: Any, arguments: Mapping[str, Any]) -> None:
    """Start or join a cluster. Ray replaces the handler of SIGTERM meanwhile, so it is restored afterwards."""
    handler_before = _sigterm()
    try:
        _init_ray(ray, arguments)
    except Exception as error:
        ray.shutdown()
        raise ConfigError(
            "cluster",
            arguments["address"],
            f"cannot be started or joined ({error_line(error)})",
            "Check the address, or look at the machine's load and memory.",
        ) from error
    finally:
        _handle_sigterm(handler_before)


def _init_ray(ray: Any, arguments: Mapping[str, Any]) -> None:
    """Call `ray.init`, a second time if Ray's processes were only slow to start."""
    try:
        ray.init(**arguments)
    except Exception as error:
        ray.shutdown()
        if _START_TIMEOUT not in str(error):
            raise
        log.warning("Ray's processes did not start within half a minute; starting them once more")
        ray.init(**arguments)


def _joined_address(ray: Any, address: str | None) -> str:
    """The address of the cluster that this process has joined. Raises ConfigError if `address` names another one."""
    running: str = ray.get_runtime_context().gcs_address
    if address not in (None, "local", "auto", running):
        raise ConfigError(
            "cluster",
            address,
            f"is another cluster than {running}, which this process has joined",
            "Use one Ray per process.",
        )
    return running


@contextmanager
def _sigterm_runs_finally() -> Iterator[None]:
    """Let SIGTERM end this process through its `finally` blocks, unless the application handles the signal itself."""
    before = _sigterm()
    if before is signal.SIG_DFL:
        _handle_sigterm(_end_by_signal)
    try:
        yield
    finally:
        _handle_sigterm(before)


def _end_by_signal(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _sigterm() -> Any:
    return signal.getsignal(signal.SIGTERM)


def _handle_sigterm(handler: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


_WITNESS = "import sys; sys.stdin.buffer.read() or sys.stderr.write(sys.argv[1] + chr(10))"
"""A program that prints its argument if its input ends without any text, as it does when the writer is killed."""


@contextmanager
def crash_notice(text: str) -> Iterator[None]:
    """Print `text` to stderr if this process ends while the block runs.

    This covers SIGKILL, a lack of memory, and Ray, which ends a process at once if it loses its node.
    """
    command = [sys.executable, "-I", "-S", "-c", _WITNESS, text]
    witness = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        witness.communicate(b"all is well")
