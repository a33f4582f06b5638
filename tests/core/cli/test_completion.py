"""Completion in the shell: the line that the documentation gives, then asked for as bash asks for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "terminal.md"
ASK = """
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9 COMP_WORDS=($1)
$(complete -p cotune | sed 's/.*-F \\([^ ]*\\) .*/\\1/') cotune
echo "${COMPREPLY[*]}"
"""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("cotune tra", ["trace", "train"]),
        ("cotune show --st", ["--status", "--steps"]),
        ("cotune train --policies ", ["full", "lora", "shared"]),
    ],
)
def test_bash_completes_commands_flags_and_choices(line: str, offered: list[str]) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (given,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    command = [bash, "--norc", "-c", given + ASK, "bash", line]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    assert sorted(done.stdout.split()) == offered, done.stderr
