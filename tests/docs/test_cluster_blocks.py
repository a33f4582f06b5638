"""The python blocks of the pages on clusters run as they stand, on this machine: with CPUs and fewer engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_blocks import needs_more
from tests.test_docs import ROOT, blocks
from tests.trainer.tiny_app import build_base

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

RUNNER = """
import ast, asyncio, inspect
from pathlib import Path
from cotune.algorithms.catalogue import recipe
from cotune.integrations.cluster.runtime import open_ray
from cotune.records.policies import LoraSpec, policies_for
from cotune.config.learner import LearnerSettings
from tests.trainer.learner.learner_rows import build_learner_base, make_rows

names = {"asyncio": asyncio, "recipe": recipe, "LearnerSettings": LearnerSettings}
names |= {"policies": policies_for("lora", ["navigator"], LoraSpec()), "rows": make_rows(role="navigator")}


async def run():
    found = eval(compile(TEXT, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.isawaitable(found):
        await found
    if "sampler" in names:
        print(await names["sampler"].info())
        await names["sampler"].aclose()


if __name__ == "__main__":
    names["model"] = build_learner_base(Path("models/learner"))
    AROUND
    print("ran to its end", names.get("metrics"))
"""
HERE = {"num_gpus=1": "num_gpus=0", "[engine] * 8": "[engine] * 2", "min_healthy=6": "min_healthy=2"}
SERVER = 'sampler = await VllmHttpSampler.open("http://10.0.0.5:8000", "models/base", api_key="...")'
"""What needs a server: `tests/integrations/models/samplers/test_vllm_url.py` has one."""


@pytest.mark.parametrize("page", ["internals/training.md", "internals/sampler.md", "how-to/vllm.md"])
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    build_base(tmp_path / "models" / "base")
    (text,) = (block for block in blocks(ROOT / "docs" / page, "python") if needs_more(block))
    for usual, here in {**HERE, SERVER: ""}.items():
        text = text.replace(usual, here)
    if page == "how-to/vllm.md":  # the engine ends with its Ray
        text = text.rstrip() + "\n    print(await sampler.info())\n    await sampler.aclose()\ndel sampler\n"
    asynchronous = "asyncio.run(run())" if "await" in text else 'exec(compile(TEXT, "block", "exec"), names)'
    around = f'with open_ray("local"):\n        {asynchronous}' if "open_ray" not in text else asynchronous
    script = RUNNER.replace("AROUND", around).replace("TEXT", repr(text))
    (tmp_path / "block.py").write_text(script)
    command = [sys.executable, "block.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "ran to its end" in done.stdout, done.stderr[-3000:]
