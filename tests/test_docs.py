"""Documentation says only what exists: commands parse, files are there, configurations are valid."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cotune.cli import main as cli
from cotune.trainer.config.load import convert
from cotune.trainer.config.resolve import resolve_plan
from docs.pictures import LARGEST, PICTURES

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "RESULTS.md"]
FOLDERS = "core|integrations|adapters|trainer|examples|benchmarks|tests|docs"
FOREIGN = ("llama-server", "ollama")
"""Programs that an export is served by."""
parser = functools.cache(cli.parser)
"""The parser of all commands takes a tenth of a second to make."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SAVED = {name for page in PAGES for name in re.findall(r"^```\w+\n# (\w+\.\w+)$", page.read_text(), re.MULTILINE)}
"""Files that pages tell their reader to save."""
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[Any]:
    """Every command line of every sh block, by page."""
    return [
        pytest.param(words, id=f"{page.name}: {' '.join(words)}")
        for page in PAGES
        for block in blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if (words := shlex.split(re.sub(r"(^|\s)#.*", "", line)))  # as a shell: r2#40 has no comment
    ]


@pytest.mark.parametrize("words", commands())
def test_every_command_exists(words: list[str]) -> None:
    match [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]:
        case ["cotune", *arguments]:
            assert parser().parse_args(arguments).command == arguments[0]
        case ["export"]:
            pass
        case ["make", *targets]:
            assert targets and set(targets) <= MAKE_TARGETS
        case ["python", "-m", "pytest", *_, file]:
            assert (ROOT / file).is_file()
        case ["python", "-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        case ["python" | "bash", script, *_]:
            assert script in SAVED or (ROOT / script).is_file()
        case ["pip", "install", *names]:
            for name in names:
                match name.removesuffix("]").split("["):
                    case ["-e"]:
                        pass
                    case ["."]:
                        pass
                    case ["." | "cotune", extras]:
                        assert set(extras.split(",")) <= set(EXTRAS)
                    case _:
                        assert any(line.startswith(name) for extra in EXTRAS.values() for line in extra)
        case [program, *_]:
            assert program in FOREIGN


def test_readme_names_every_subcommand() -> None:
    (choices,) = (action.choices for action in parser()._subparsers._group_actions)  # type: ignore[union-attr]
    table = (ROOT / "README.md").read_text().partition("\n## Commands\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`cotune (\w+)`", table)) == set(choices)


def test_every_extra_is_explained() -> None:
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    assert [name for name in EXTRAS if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_is_there(page: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w./]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs" / "pages.md").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [name for name in pages if name not in ("index.md", "pages.md") and f"({name})" not in index] == []


def test_the_index_is_read_in_thirty_seconds() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "docs" / "index.md").read_text())
    assert len(links) <= 15 and (ROOT / "README.md").read_text().count("\n") < 100


def test_every_page_begins_with_what_one_can_do_after_it() -> None:
    pages = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in ("index.md", "pages.md"))
    bodies = {page: re.sub(r"\A---\n.*?\n---\n\s*", "", page.read_text(), flags=re.DOTALL) for page in pages}
    assert [page.name for page, text in bodies.items() if not re.match(r"# .+\n\n(After|To) ", text)] == []


def test_pictures_are_small() -> None:
    pictures = sorted((ROOT / "docs" / "assets").glob("*.png"))
    assert {picture.stem for picture in pictures} == set(PICTURES)
    assert [picture.name for picture in pictures if picture.stat().st_size > LARGEST] == []


def test_what_coding_assistants_read_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "docs" / "llms.txt").read_text())
    assert len(links) > 10 and [link for link in links if not (ROOT / "docs" / link).is_file()] == []


def test_every_page_that_the_code_names_exists() -> None:
    folders = ("core", "integrations", "adapters", "trainer")
    text = "\n".join(file.read_text() for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    named = set(re.findall(r"\bdocs/[\w/-]+\.md\b", text))
    assert named and {name for name in named if not (ROOT / name).is_file()} == set()


@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param(page, text, id=f"{page.name}-{number}")
        for page in PAGES
        for number, text in enumerate(blocks(page, "toml"), start=1)
    ],
)
def test_every_configuration_is_valid(page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that a page shows are in the current folder."""
    monkeypatch.chdir(tmp_path)
    for code in blocks(page, "python"):
        if named := re.match(r"# (\w+\.py)\n", code):
            Path(named[1]).write_text(code)
    config = convert({"model": "m", **tomllib.loads(text)})
    assert config.from_records or resolve_plan(config, ["writer"] if config.plan.kind == "tree" else [])[1].run.name
