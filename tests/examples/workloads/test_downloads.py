"""Public data sets from a hub on the loopback interface: what is written, checked, resumed and refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.workloads import downloads
from examples.workloads.code import verifier as code
from examples.workloads.data_files import count_rows, draw_rows
from examples.workloads.downloads import SOURCES, DownloadError, Source, fetch
from examples.workloads.maths import verifier as maths
from examples.workloads.search import verifier as search
from examples.workloads.search.tasks import Question
from tests.examples.workloads.hub import Hub, loopback_hub
from tests.examples.workloads.public_rows import REPOS, json_lines, parquet

ROOT = Path(__file__).parents[3]
SMALL = Source("owner/small", "none", ("train.jsonl",), ("test.jsonl",))
LARGE = Source("owner/large", "none", ("train.jsonl",))
MEGABYTE = 1_000_000
CHUNK = 10 * 1024 * 1024
"""Bytes that huggingface_hub writes at once: of a cut answer, whole chunks arrive."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with loopback_hub() as served:
        yield served


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No token of this user goes to the loopback hub."""
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)


def download(hub: Hub, workload: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command of a workload against the hub."""
    command = [sys.executable, "-m", f"examples.workloads.{workload}.tasks", "--download", *options, "--out", str(out)]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


def tasks_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def large_content() -> bytes:
    """24 MB that do not repeat."""
    return random.Random(0).randbytes(24 * MEGABYTE)


SPLIT = {
    "apps": (8, 8),
    "codecontests": (10, 10),
    "livecodebench": (None, 10),
    "polaris": (9, None),
    "aime24": (None, 10),
    "aime25": (None, 10),
    "olympiadbench": (None, 9),
    "hotpotqa": (9, 9),
    "2wiki": (9, 9),
    "musique": (9, 9),
    "bamboogle": (None, 10),
}
"""By set: tasks to train on and held-out tasks of ten rows each; None for a split that the set does not have."""


@pytest.mark.parametrize(
    ("workload", "names"),
    [
        ("code", ("apps", "codecontests", "livecodebench")),
        ("maths", ("polaris", "aime24", "aime25", "olympiadbench")),
        ("search", ("hotpotqa", "2wiki", "musique", "bamboogle")),
    ],
)
def test_every_set_is_downloaded_recorded_and_split(
    workload: str, names: tuple[str, ...], hub: Hub, tmp_path: Path
) -> None:
    commits = {repo: hub.add(repo, files, licence) for repo, (licence, files) in REPOS.items()}
    options: list[str] = []
    if workload == "search":
        corpus = tmp_path / "corpus.jsonl"
        corpus.write_bytes(json_lines([{"title": "Land 3", "text": "Land 3 sells salt."}]))
        options = ["--corpus", str(corpus)]
    done = download(hub, workload, tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    for name in names:
        source, folder = SOURCES[name], tmp_path / name
        licence, files = REPOS[source.repo]
        record = json.loads((folder / "download.json").read_text())
        assert (record["repo"], record["commit"]) == (source.repo, commits[source.repo])
        assert record["licence"] == (licence or "none is stated on the hub")
        for file in record["files"]:
            content = files[file["path"]]
            assert (folder / "files" / file["path"]).read_bytes() == content
            assert (file["size"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())

        # Licence and size are said before the first file.
        stated = done.stderr.index(f"{source.repo} at {commits[source.repo]}, licence: {record['licence']}, ")
        assert stated < done.stderr.index(f"  {record['files'][0]['path']}, ", stated)
        counts = []
        for split in downloads.SPLITS.values():
            counts.append(len(tasks_of(folder / split)) if (folder / split).exists() else None)
        assert tuple(counts) == SPLIT[name]
        assert not list(folder.rglob("*.part")) and not list(folder.rglob("*.drawn"))
    # No script, and no file of another set or configuration, was asked for.
    assert not [path for _, path, _ in hub.requests if path.endswith(".py") or "fullwiki" in path or "OE_MM" in path]
    check_tasks(workload, tmp_path)


def check_tasks(workload: str, out: Path) -> None:
    """The tasks of a workload are what its rewards need."""
    if workload == "code":
        for name in ("apps", "codecontests"):
            task = tasks_of(out / name / "tasks.jsonl")[3]
            assert code.solved(task["reference"], task) == 1 and code.solved(task["wrong"][0], task) < 1
        assert code.solved("print(int(input()) + 4)", tasks_of(out / "livecodebench" / "held_out.jsonl")[4]) == 1
    elif workload == "maths":
        assert maths.right(r"\frac{3}{7}", tasks_of(out / "polaris" / "tasks.jsonl")[3])
        assert maths.right("4", tasks_of(out / "aime24" / "held_out.jsonl")[3])
        assert maths.right("5", tasks_of(out / "aime25" / "held_out.jsonl")[3])
        assert maths.right(r"\sqrt{5}", tasks_of(out / "olympiadbench" / "held_out.jsonl")[3])
    else:
        for name in ("hotpotqa", "2wiki"):
            task: Question = tasks_of(out / name / "tasks.jsonl")[3]
            assert task["documents"][1] == {"title": "Land 3", "text": "It is wide. Land 3 sells salt."}
            assert task["evidence"] == ["Town 3", "Land 3"]
            assert task["facts"] == ["Town 3 lies in Land 3.", "Land 3 sells salt."]
            assert search.solved(task, "salt", ["Land 3", "Town 3"]) and not search.solved(task, "salt", ["Land 3"])
        task = tasks_of(out / "musique" / "held_out.jsonl")[3]
        assert [document["title"] for document in task["documents"]] == ["Town", "Land", "Land (2)"]
        assert (task["evidence"], task["facts"]) == (["Town", "Land"], ["Land 3", "salt"])
        assert search.solved(task, "sea salt", ["Town", "Land"]) and not search.solved(
            task, "salt", ["Town", "Land (2)"]
        )
        task = tasks_of(out / "bamboogle" / "held_out.jsonl")[3]
        assert task["documents"] == [{"title": "Land 3", "text": "Land 3 sells salt."}]
        assert search.solved(task, "salt", []) and not search.solved(task, "pepper", [])
        assert search.answer_reward(task, [], "salt") == {"team": 2.0, "local": 0.0}


def test_a_set_that_fails_does_not_stop_the_others(hub: Hub, tmp_path: Path) -> None:
    """One set is not there, one has rows of another kind, and one has an answer that cannot be read."""
    hub.add("POLARIS-Project/Polaris-Dataset-53K", {"polaris-data-53K.jsonl": json_lines([{"text": "a"}])})
    rows = [{"problem": "P", "answer": "336^\\circ", "id": 1}, {"problem": "P", "answer": "none", "id": 2}]
    hub.add("math-ai/aime25", {"test.jsonl": json_lines(rows)})
    licence, files = REPOS["Hothan/OlympiadBench"]
    hub.add("Hothan/OlympiadBench", files, licence)
    done = download(hub, "maths", tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    polaris, aime24 = done.stderr.splitlines()[-2:]
    assert polaris.startswith("polaris: ") and "row 1: no field problem, answer" in polaris
    assert aime24.startswith("aime24: HuggingFaceH4/aime_2024 could not be downloaded")
    assert [task["answer"] for task in tasks_of(tmp_path / "aime25" / "held_out.jsonl")] == ["336"]
    assert "held_out.jsonl: 1 tasks from 2 of 2 rows; 1 rows are left out" in done.stderr
    assert (tmp_path / "olympiadbench" / "held_out.jsonl").exists()


def test_bamboogle_needs_documents(hub: Hub, tmp_path: Path) -> None:
    done = download(hub, "search", tmp_path, "bamboogle")
    assert done.returncode == 1 and "pass --corpus FILE" in done.stderr
    assert hub.requests == []


@pytest.mark.parametrize("first", ["close", "reset"])
def test_a_cut_connection_continues_where_it_was_cut(first: str, hub: Hub, tmp_path: Path) -> None:
    content = large_content()
    hub.add("owner/large", {"train.jsonl": content})
    hub.cuts = [(20 * MEGABYTE, first), (12 * MEGABYTE, "close")]
    fetch(LARGE, tmp_path, endpoint=hub.url)
    assert (tmp_path / "files" / "train.jsonl").read_bytes() == content
    assert list(dict.fromkeys(hub.ranges())) == [f"bytes={CHUNK}-", f"bytes={2 * CHUNK}-"]


def test_the_next_command_continues_after_an_error(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = large_content()
    hub.add("owner/large", {"train.jsonl": content})
    hub.cuts = [(20 * MEGABYTE, "reset"), (5 * MEGABYTE, "reset")]
    with pytest.raises(DownloadError, match=r"10\.5 MB of train\.jsonl are here; Run the command again to continue"):
        fetch(LARGE, tmp_path, endpoint=hub.url)
    assert not (tmp_path / "download.json").exists() and not (tmp_path / "files" / "train.jsonl").exists()
    hub.requests.clear()
    capsys.readouterr()
    fetch(LARGE, tmp_path, endpoint=hub.url)
    assert "train.jsonl, 24.0 MB, continues at 10.5 MB" in capsys.readouterr().err
    assert set(hub.ranges()) == {f"bytes={CHUNK}-"}
    assert (tmp_path / "files" / "train.jsonl").read_bytes() == content


def test_a_part_of_another_version_is_not_continued(hub: Hub, tmp_path: Path) -> None:
    hub.add("owner/large", {"train.jsonl": large_content()})
    hub.cuts = [(20 * MEGABYTE, "reset"), (5 * MEGABYTE, "reset")]
    with pytest.raises(DownloadError):
        fetch(LARGE, tmp_path, endpoint=hub.url)
    newer = large_content()[::-1]
    hub.add("owner/large", {"train.jsonl": newer})
    hub.requests.clear()
    fetch(LARGE, tmp_path, endpoint=hub.url)
    assert (tmp_path / "files" / "train.jsonl").read_bytes() == newer
    assert hub.ranges() == []


def small_files(text: str) -> dict[str, bytes]:
    return {"train.jsonl": json_lines([{"text": text}]), "test.jsonl": json_lines([{"text": text * 2}])}


def test_a_second_download_checks_the_files_and_fetches_none(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("owner/small", small_files("a"))
    first = fetch(SMALL, tmp_path, endpoint=hub.url)
    hub.requests.clear()
    assert fetch(SMALL, tmp_path, endpoint=hub.url) == first
    assert [path for _, path, _ in hub.requests] == ["/api/datasets/owner/small"]
    # With the commit, the hub is not asked: this works without a network.
    assert fetch(SMALL, tmp_path, revision=commit, endpoint="http://127.0.0.1:9") == first


@pytest.mark.parametrize("by_commit", [False, True])
def test_a_file_that_has_changed_is_named_and_can_be_fetched_again(by_commit: bool, hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("owner/small", small_files("a"))
    fetch(SMALL, tmp_path, endpoint=hub.url)
    file = tmp_path / "files" / "train.jsonl"
    file.write_text("changed\n")
    with pytest.raises(DownloadError, match=rf"{file} has changed: its SHA-256 is \w+, not \w+\. Delete it"):
        fetch(SMALL, tmp_path, revision=commit if by_commit else None, endpoint=hub.url)
    file.unlink()
    hub.requests.clear()
    fetch(SMALL, tmp_path, endpoint=hub.url)
    assert file.read_bytes() == small_files("a")["train.jsonl"]
    assert [path for _, path, _ in hub.requests if "/resolve/" in path] == [
        f"/datasets/owner/small/resolve/{commit}/train.jsonl"
    ]


def test_a_newer_commit_replaces_the_data_only_if_it_is_named(hub: Hub, tmp_path: Path) -> None:
    old = hub.add("owner/small", small_files("a"))
    fetch(SMALL, tmp_path, endpoint=hub.url)
    new = hub.add("owner/small", small_files("b"))
    with pytest.raises(DownloadError, match=f"--revision {old} to keep the data, or --revision {new} to replace it"):
        fetch(SMALL, tmp_path, endpoint=hub.url)
    assert fetch(SMALL, tmp_path, revision=old, endpoint=hub.url).commit == old
    assert fetch(SMALL, tmp_path, revision=new, endpoint=hub.url).commit == new
    assert (tmp_path / "files" / "test.jsonl").read_bytes() == small_files("b")["test.jsonl"]
    assert json.loads((tmp_path / "download.json").read_text())["commit"] == new


def test_a_recorded_hash_that_the_hub_no_longer_states_is_an_error(hub: Hub, tmp_path: Path) -> None:
    """A hub that serves other content at the same commit, or a record that was changed."""
    hub.add("owner/small", small_files("a"))
    fetch(SMALL, tmp_path, endpoint=hub.url)
    record = json.loads((tmp_path / "download.json").read_text())
    record["files"][0]["sha256"] = "0" * 64
    (tmp_path / "download.json").write_text(json.dumps(record))
    with pytest.raises(DownloadError, match=f"not {'0' * 64}"):
        fetch(SMALL, tmp_path, endpoint=hub.url)
    (tmp_path / "download.json").write_text("{}")
    with pytest.raises(DownloadError, match="cannot be read"):
        fetch(SMALL, tmp_path, endpoint=hub.url)


@pytest.mark.parametrize("kind", ["large", "small"])
def test_content_that_is_not_what_the_hub_states_is_not_kept(kind: str, hub: Hub, tmp_path: Path) -> None:
    """The hub states a SHA-256 for large files, and git's hash for small ones."""
    file = "train.parquet" if kind == "large" else "train.jsonl"
    rows = [{"text": "a"}]
    hub.add("owner/set", {file: parquet(rows) if kind == "large" else json_lines(rows)})
    hub.spoiled = True
    with pytest.raises(DownloadError, match="did not arrive as the hub states it"):
        fetch(Source("owner/set", "none", ("train.*",)), tmp_path, endpoint=hub.url)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_the_hub_does_not_have_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.add("owner/small", {"other.csv": b"a,b\n"})
    with pytest.raises(
        DownloadError, match=r"no file of this set that matches train.jsonl, test.jsonl. It has: other.csv"
    ):
        fetch(SMALL, tmp_path, endpoint=hub.url)
    with pytest.raises(DownloadError, match="owner/large could not be downloaded: RepositoryNotFoundError"):
        fetch(LARGE, tmp_path, endpoint=hub.url)
    with pytest.raises(DownloadError, match="RevisionNotFoundError"):
        fetch(SMALL, tmp_path, revision="v9", endpoint=hub.url)
    with pytest.raises(DownloadError, match="owner/small could not be downloaded: Connect"):
        fetch(SMALL, tmp_path, endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize("name", ["../outside.jsonl", "data/../../../outside.jsonl", "/{folder}/outside.jsonl"])
def test_a_file_outside_of_the_data_set_is_refused(name: str, hub: Hub, tmp_path: Path) -> None:
    name = name.format(folder=str(tmp_path).lstrip("/"))
    hub.add("owner/odd", {name: json_lines([{"text": "a"}])})
    with pytest.raises(DownloadError, match=r"owner/odd names the file .*, which is outside of the data set"):
        fetch(Source("owner/odd", "none", ("*.jsonl",)), tmp_path / "a" / "set", endpoint=hub.url)
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]
    assert not list(tmp_path.rglob("*outside*"))

    # The same holds for a record, whose files are checked without asking the hub.
    commit = hub.add("owner/small", small_files("a"))
    fetch(SMALL, tmp_path, endpoint=hub.url)
    record = json.loads((tmp_path / "download.json").read_text())
    record["files"][0]["path"] = name
    (tmp_path / "download.json").write_text(json.dumps(record))
    with pytest.raises(DownloadError, match=r"download\.json names the file .*, which is outside of the data set"):
        fetch(SMALL, tmp_path, revision=commit, endpoint=hub.url)


def test_an_interrupted_download_whose_file_changes_on_the_hub_is_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    large = large_content()
    hub.add("owner/small", {"train.jsonl": b'{"text": "a"}\n', "test.jsonl": large})
    hub.cuts = [(100, "close"), (5 * MEGABYTE, "reset")]  # the small file is shorter than its cut, and arrives
    with pytest.raises(DownloadError):
        fetch(SMALL, tmp_path, endpoint=hub.url)
    train = tmp_path / "files" / "train.jsonl"
    assert train.exists() and not (tmp_path / "download.json").exists()
    hub.cuts.clear()
    hub.add("owner/small", {"train.jsonl": b'{"text": "b"}\n', "test.jsonl": large})
    fetch(SMALL, tmp_path, endpoint=hub.url)
    assert train.read_bytes() == b'{"text": "b"}\n'


def test_a_split_without_files_keeps_no_tasks_of_an_earlier_download(hub: Hub, tmp_path: Path) -> None:
    licence, files = REPOS["codeparrot/apps"]
    hub.add("codeparrot/apps", files, licence)
    folder = tmp_path / "apps"
    assert download(hub, "code", tmp_path, "apps").returncode == 0
    ids = {split: {task["id"] for task in tasks_of(folder / split)} for split in ("tasks.jsonl", "held_out.jsonl")}
    assert all(name.startswith("apps-train-") for name in ids["tasks.jsonl"])
    assert all(name.startswith("apps-test-") for name in ids["held_out.jsonl"])
    assert download(hub, "code", tmp_path, "apps", "--files", "test.jsonl", "--tasks", "5").returncode == 0
    assert not (folder / "tasks.jsonl").exists()
    drawn = {task["id"] for task in tasks_of(folder / "held_out.jsonl")}
    assert drawn and drawn <= ids["held_out.jsonl"], "drawn rows have the same ids"


def test_some_files_of_a_set(hub: Hub, tmp_path: Path) -> None:
    licence, files = REPOS["livecodebench/code_generation_lite"]
    hub.add("livecodebench/code_generation_lite", files, licence)
    done = download(hub, "code", tmp_path, "livecodebench", "--files", "test2.jsonl", "--tasks", "3")
    assert "held_out.jsonl: 3 tasks from 3 of 5 rows; 0 rows are left out" in done.stderr
    assert [path.name for path in (tmp_path / "livecodebench" / "files").iterdir()] == ["test2.jsonl"]
    done = download(hub, "code", tmp_path, "livecodebench", "--livecodebench", "test2.jsonl")
    assert done.returncode == 1 and "leave out --livecodebench, or --download" in done.stderr
    done = download(hub, "code", tmp_path, "--revision", "main")
    assert done.returncode == 1 and "--revision and --files are for one set, not for apps" in done.stderr


def test_rows_are_drawn_from_the_whole_of_all_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    first.write_bytes(json_lines([{"n": n} for n in range(60)]).rstrip(b"\n"))  # the last line may lack its end
    second.write_bytes(parquet([{"n": n} for n in range(60, 100)]))
    assert (count_rows(first), count_rows(second)) == (60, 40)
    assert draw_rows([first, second], 100, 0, tmp_path / "drawn") == ([first, second], 100)
    draws = []
    for draw, seed in enumerate((0, 0, 1)):
        drawn, total = draw_rows([first, second], 20, seed, tmp_path / f"drawn {draw}")
        assert total == 100 and [file.stem for file in drawn] == ["a", "b"]
        draws.append([row["n"] for file in drawn for row in tasks_of(file)])
    assert draws[0] == draws[1] != draws[2]
    for numbers in draws:
        assert numbers == sorted(set(numbers)) and len(numbers) == 20
        assert 4 <= sum(number < 60 for number in numbers) <= 18
