"""A run folder is data: no command that only reads one, and no page of the viewer, imports code from it."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlsplit

import httpx
import pytest

from cotune.integrations.web.viewer.pages import PAGES

ROOT = Path(__file__).parents[4]
LAYERS = ("core", "integrations", "adapters", "trainer")
PROOF = "code_ran"
"""File that a module of the folder writes when it is imported."""
COMMANDS = """
import json, sys
from cotune.cli.main import main

sys.argv[0] = "cotune"
for words in json.loads(sys.argv[1]):
    before = list(sys.path)
    status = main(words)
    print("STATUS", " ".join(words), status, flush=True)
    assert sys.path == before, (words, sys.path)
"""
READING = [
    ["show", "."],
    ["show", ".", "--steps"],
    ["show", ".", "--groups"],
    ["show", ".", "--json"],
    ["show", ".."],
    ["show", ".", "--html", "out/report.html"],
    ["records", "list", "."],
    ["records", "copy", ".", "out/copy.db"],
    ["records", "sft", ".", "--out", "out/sft.jsonl"],
    ["otel", "export", ".", "--out", "out/spans.jsonl"],
    ["prompts", "show", ".", "--out", "out/prompts.json"],
    ["prompts", "diff", "out/prompts.json"],
    ["prompts", "export", "out/prompts.json", "--out", "out/md"],
    ["records", "judge", ".", "--to-label", "out/blanks.jsonl"],
    ["doctor", "--run", "."],
    ["export", ".", "--out", "out/export"],
]


@functools.cache
def imported_names() -> frozenset[str]:
    """The names of all packages that cotune imports, and of all that are installed here."""
    names = set(importlib.metadata.packages_distributions())
    for layer in LAYERS:
        for file in (ROOT / layer).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    names.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names.add(node.module.partition(".")[0])
    return frozenset(name for name in names if name.isidentifier())


@pytest.fixture
def trap(run: Path, tmp_path: Path) -> Path:
    """A copy of the trained run that names functions and folders of its own, with a module for every import."""
    folder = tmp_path / "sent"
    shutil.copytree(run, folder)
    described = json.loads((folder / "run.json").read_text())
    described |= {"folder": str(folder), "run": str(folder), "workflow": "application:solve"}
    own = {"redact": "redactors:hide", "roles_by": "roles:name"}
    described["config"] |= {**own, "recipe": "methods:Ranked"}
    (folder / "run.json").write_text(json.dumps(described))
    (folder / "out").mkdir()
    proof = folder / PROOF
    for name in {*imported_names(), "application", "redactors", "roles", "methods"}:
        (folder / f"{name}.py").write_text(f"open({str(proof)!r}, 'a').write(__name__ + ' ')\n")
    return folder


def test_commands_that_read_a_run_import_nothing_from_it(trap: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMANDS, json.dumps(READING)],
        cwd=trap, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert not (trap / PROOF).exists(), f"{(trap / PROOF).read_text()}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, done.stderr
    # Each one has done its work, so that the test would see what it imports.
    statuses = re.findall(r"^STATUS (.*) (\d+)$", done.stdout, re.MULTILINE)
    assert [words for words, _ in statuses] == [" ".join(words) for words in READING]
    useless = [words for words, status in statuses if status != "0"]
    nothing_found = {"prompts show . --out out/prompts.json", "doctor --run ."}
    nothing_found |= {"prompts export out/prompts.json --out out/md"}
    assert set(useless) <= nothing_found, f"{useless}\n{done.stderr}"


def test_the_pages_of_a_run_import_nothing_from_it(trap: Path) -> None:
    command = [sys.executable, "-P", "-m", "cotune.cli.main", "view", ".", "--port", "0"]
    with subprocess.Popen(command, cwd=trap, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stderr is not None
        first = server.stdout.readline()
        try:
            assert first.startswith("Open "), server.stderr.read()
            pages = crawl(first.removeprefix("Open ").strip())
        finally:
            server.terminate()
    assert not (trap / PROOF).exists(), (trap / PROOF).read_text()
    assert any("by=logprob" in page for page in pages)
    patterns = {page.path: re.sub(r"\{[^}]*\}", ".+", page.path) for page in PAGES if page.method == "GET"}
    missed = [path for path, pattern in patterns.items() if not any(re.fullmatch(pattern, _path(p)) for p in pages)]
    assert missed == []


def _path(page: str) -> str:
    return urlsplit(page).path


def crawl(start: str) -> dict[str, str]:
    """Open the pages that links lead to, a few of each kind; their texts by their addresses."""
    waiting = [start, *(urljoin(start, page.path) for page in PAGES if "{" not in page.path)]
    # Scripts fetch these parts; no link leads to them.
    waiting += [urljoin(start, page.path.format(run="sent")) for page in PAGES if page.path.count("{") == 1]
    opened: dict[str, str] = {}
    kinds: dict[str, int] = {}
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        while waiting:
            page = urldefrag(waiting.pop(0)).url
            parts = urlsplit(page)
            names = sorted(pair.partition("=")[0] for pair in parts.query.split("&"))
            kind = f"{re.sub('[0-9A-Z]{20,}', 'ID', parts.path)}?{names}{'by=logprob' in page}"
            if page in opened or kinds.get(kind, 0) == 2 or "/static/" in page or not page.startswith(start):
                continue
            kinds[kind] = kinds.get(kind, 0) + 1
            answer = client.get(page)
            assert answer.status_code < 500, (page, answer.text)
            opened[page] = answer.text
            links = re.findall(r'(?:href|src|data-fetch)="([^"]+)"', answer.text)
            waiting += [urljoin(page, link.replace("&amp;", "&")) for link in links]
    return opened
