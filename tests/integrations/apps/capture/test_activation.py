"""Where integrations are installed: by `import cotune` and by episodes, and not in a process that works for cotune."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cotune.integrations.apps.activation import NO_ACTIVATION, graph_runner

LOOK = """
import sys
import openai

def look():
    finders = sum(type(finder).__module__.startswith("cotune") for finder in sys.meta_path)
    print(finders, hasattr(openai._base_client.SyncAPIClient._send_request, "__wrapped__"))

import cotune.sampling.protocol
look()
with cotune.trace(sys.argv[1]):
    look()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "at_import"), [({}, "1 True"), (NO_ACTIVATION, "0 False")])
def test_the_environment_decides_what_an_import_installs_and_a_trace_always_does(environment, at_import, tmp_path):
    command = [sys.executable, "-c", LOOK, str(tmp_path / "traced")]
    bare = {name: value for name, value in os.environ.items() if name not in NO_ACTIVATION}
    done = subprocess.run(command, capture_output=True, text=True, env={**bare, **environment})
    assert done.stdout.splitlines() == [at_import, "1 True"], done.stderr


SPAWNED = """
import multiprocessing, os, sys

def look():
    import cotune.integrations.models.vllm.adapters
    return [type(finder).__name__ for finder in sys.meta_path if type(finder).__module__.startswith("cotune")]

if __name__ == "__main__":
    from cotune.integrations.models.vllm.engine import prepare_environment
    prepare_environment()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(look))
"""


def test_processes_that_vllm_spawns_from_ours_watch_no_imports(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


class Other:
    """An object of another package that is named as a framework's."""


Other.__module__ = "agents.agent"


def test_an_object_of_no_framework_has_no_runner():
    from langgraph.pregel.main import Pregel

    for app in (Other(), Other, Pregel, len, 3):
        assert graph_runner(app) is None


def test_crewai_is_kept_from_asking_where_cotune_runs_a_workflow_and_nothing_was_set() -> None:
    code = (
        "import os, crewai, cotune, asyncio\n"
        "from cotune.episodes.episode import run_episode\n"
        "from cotune.recording.recorder import Nowhere\n"
        "from cotune.records.structs import Task\n"
        "names = ['CREWAI_DISABLE_TELEMETRY', 'CREWAI_TRACING_ENABLED', 'CREWAI_DISABLE_VERSION_CHECK']\n"
        "before = [os.environ.get(name) for name in names]\n"
        "@cotune.workflow\n"
        "async def solve(task): return 1.0\n"
        "asyncio.run(run_episode(solve.cotune, Task(id='t', input=None), sink=Nowhere()))\n"
        "print(before, [os.environ.get(name) for name in names])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CREWAI")}
    environment["CREWAI_TRACING_ENABLED"] = "true"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[None, 'true', None] ['true', 'true', 'true']"
