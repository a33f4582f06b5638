"""Downloads public data sets from the Hugging Face hub as files, checks them, and splits them into tasks.

Next to the files of a set is `download.json`: the repository, the commit, and the size and SHA-256 of each file. The
next download of the set is checked against it. No code of a repository is run.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from examples.workloads.data_files import DatasetError, draw_rows

RECORD = "download.json"
"""What was downloaded, next to the files."""
FILES = "files"
"""Folder of the downloaded files, as they are on the hub."""
SPLITS = {"train": "tasks.jsonl", "held_out": "held_out.jsonl"}
"""By split: the file that its tasks are written to."""
Reader = Callable[[Path], Iterator[Any]]
"""The tasks of a file; None for a row that is left out."""


class DownloadError(DatasetError):
    """A data set cannot be downloaded, or is not what was downloaded before: why, and what to do."""


@dataclass(frozen=True)
class Source:
    """A data set on the hub: its repository, and the patterns of its files by split.

    A set without files for training is for evaluation only.
    """

    repo: str
    reader: str
    train: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()


SOURCES = {
    "apps": Source("codeparrot/apps", "apps", ("train.jsonl",), ("test.jsonl",)),
    "codecontests": Source(
        "deepmind/code_contests",
        "codecontests",
        ("data/train-*.parquet",),
        ("data/valid-*.parquet", "data/test-*.parquet"),
    ),
    "livecodebench": Source("livecodebench/code_generation_lite", "livecodebench", held_out=("test*.jsonl",)),
    "polaris": Source("POLARIS-Project/Polaris-Dataset-53K", "polaris", ("polaris-data-53K.*",)),
    "aime24": Source("HuggingFaceH4/aime_2024", "aime", held_out=("data/train-*.parquet",)),
    "aime25": Source("math-ai/aime25", "aime", held_out=("test.jsonl",)),
    "olympiadbench": Source("Hothan/OlympiadBench", "olympiadbench", held_out=("*/OE_TO_maths_en_COMP.parquet",)),
    "hotpotqa": Source(
        "hotpotqa/hotpot_qa", "hotpotqa", ("distractor/train-*.parquet",), ("distractor/validation-*.parquet",)
    ),
    "2wiki": Source(
        "framolfese/2WikiMultihopQA", "hotpotqa", ("data/train-*.parquet",), ("data/validation-*.parquet",)
    ),
    "musique": Source(
        "dgslibisey/MuSiQue", "musique", ("musique_ans_v1.0_train.jsonl",), ("musique_ans_v1.0_dev.jsonl",)
    ),
    "bamboogle": Source("chiayewken/bamboogle", "bamboogle", held_out=("data/test-*.parquet",)),
}
"""By the name of a set. The readers are in `datasets.py` of its workload."""


@dataclass(frozen=True)
class DataFile:
    """A file of a download. `sha256` is of its content."""

    path: str
    split: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Download:
    """What was downloaded: a repository at a commit, with the licence that the hub stated, and the files."""

    repo: str
    commit: str
    licence: str
    patterns: list[str] = field(default_factory=list)
    """What `--files` asked for; empty for all files of the set."""
    files: list[DataFile] = field(default_factory=list)


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it. The hub states the SHA-256 of large files, and git's hash of the others."""

    path: str
    split: str
    size: int
    hash: str
    is_large: bool


def add_download(parser: argparse.ArgumentParser, names: Sequence[str], workload: str) -> None:
    """Add the flags of a download to the parser of a workload's tasks."""
    group = parser.add_argument_group("download of public data sets")
    group.add_argument(
        "--download",
        nargs="*",
        choices=names,
        metavar="SET",
        help=f"download these sets and split them into tasks (default: all): {', '.join(names)}",
    )
    group.add_argument("--revision", help="branch, tag or commit of a set's repository (default: the newest commit)")
    group.add_argument("--files", nargs="+", default=[], metavar="PATTERN", help="only these files of a set")
    group.add_argument(
        "--out", type=Path, default=Path("runs", "data", workload), help="folder for all sets (default: %(default)s)"
    )


def download_tasks(options: argparse.Namespace, names: Sequence[str], readers: Mapping[str, Reader]) -> None:
    """Download the sets `names`, and write the tasks of each split next to its files.

    Of each split at most `options.tasks` rows are used, drawn by `options.seed`. A set that fails does not stop the
    others. Raises DatasetError with the errors of all sets that failed.
    """
    with_files = [f"--{reader}" for reader in readers if getattr(options, reader, None)]
    if with_files:
        raise DownloadError(f"--download fetches its files itself: leave out {', '.join(with_files)}, or --download.")
    if len(names) > 1 and (options.revision or options.files):
        raise DownloadError(f"--revision and --files are for one set, not for {', '.join(names)}; pass --download SET")
    errors: list[str] = []
    for name in names:
        try:
            download_set(options, name, readers[SOURCES[name].reader])
        except DatasetError as error:
            errors.append(f"{name}: {error}")
    if errors:
        raise DownloadError("\n".join(errors))


def download_set(options: argparse.Namespace, name: str, reader: Reader) -> None:
    """Download one set, and write the tasks of each split next to its files. Raises DatasetError."""
    folder = options.out / name
    download = fetch(SOURCES[name], folder, revision=options.revision, patterns=options.files)
    for split, task_file in SPLITS.items():
        files = [folder / FILES / file.path for file in download.files if file.split == split]
        if files:
            write_tasks(reader, files, folder / task_file, most=options.tasks, seed=options.seed)
        else:
            (folder / task_file).unlink(missing_ok=True)  # its tasks are of an earlier download, with other --files


def write_tasks(reader: Reader, files: Sequence[Path], out: Path, *, most: int, seed: int) -> None:
    """Write the tasks of at most `most` rows of the files to `out`, a line of JSON each."""
    drawn = out.with_suffix(".drawn")
    written = left_out = 0
    unfinished = out.with_suffix(".part")
    shutil.rmtree(drawn, ignore_errors=True)  # of a command that was killed
    try:
        to_read, total = draw_rows(files, most, seed, drawn)
        with unfinished.open("w") as lines:
            for file in to_read:
                for task in reader(file):
                    if task is None:
                        left_out += 1
                        continue
                    lines.write(json.dumps(task) + "\n")
                    written += 1
        unfinished.replace(out)
    finally:
        shutil.rmtree(drawn, ignore_errors=True)
        unfinished.unlink(missing_ok=True)
    say(f"{out}: {written:,} tasks from {min(most, total):,} of {total:,} rows; {left_out:,} rows are left out")


def fetch(
    source: Source,
    folder: Path,
    *,
    revision: str | None = None,
    patterns: Sequence[str] = (),
    endpoint: str | None = None,
) -> Download:
    """Download the files of a set into `folder`, or check the files that are there.

    `revision` defaults to the newest commit. `patterns` name some of the set's files. A file that was cut off continues
    at its last byte. `endpoint` is the address of the hub (default: HF_ENDPOINT, or huggingface.co).

    Raises DownloadError if the hub does not answer, has no such file, sends something else than it states, or has a
    newer commit than the one that was downloaded; and if a file on this machine has changed.
    """
    record = read_record(folder)
    if record is not None and record.commit == revision and record.patterns == list(patterns):
        check_files(folder, record)  # a commit never changes, so the hub need not be asked
        say(f"{source.repo} at {record.commit}: all {len(record.files)} files are here and unchanged")
        return record

    commit, licence, hub_files = ask_hub(source, revision, patterns, endpoint)
    if record is not None and record.commit != commit and revision is None:
        raise DownloadError(
            f"{source.repo} has a newer commit than the one in {folder}: {commit} instead of {record.commit}. "
            f"Pass --revision {record.commit} to keep the data, or --revision {commit} to replace it."
        )
    same_commit = record is not None and record.commit == commit
    known = {file.path: file.sha256 for file in record.files} if record is not None and same_commit else {}
    total = sum(file.size for file in hub_files)
    say(f"{source.repo} at {commit}, licence: {licence}, {len(hub_files)} files, {megabytes(total)}")

    files: list[DataFile] = []
    for file in hub_files:
        path = folder / FILES / file.path
        if path.exists() and file.path not in known and hub_hash(path, file) != file.hash:
            # It is a file of another commit: --revision asks to replace it, or its download was never finished.
            path.unlink()
        if not path.exists():
            download_file(source.repo, commit, file, path, endpoint)
        sha256 = hash_file(path)
        stated = sha256 if file.is_large else hub_hash(path, file)
        if stated != file.hash or known.get(file.path, sha256) != sha256:
            raise changed(path, sha256, known.get(file.path, file.hash))
        files.append(DataFile(file.path, file.split, file.size, sha256))
    download = Download(source.repo, commit, licence, list(patterns), files)
    folder.joinpath(RECORD).write_text(json.dumps(asdict(download), indent=2) + "\n")
    return download


def ask_hub(
    source: Source, revision: str | None, patterns: Sequence[str], endpoint: str | None
) -> tuple[str, str, list[HubFile]]:
    """The commit of a revision, the licence that the hub states, and the files of the set. Raises DownloadError."""
    from huggingface_hub import HfApi

    try:
        info = HfApi(endpoint=endpoint).dataset_info(source.repo, revision=revision, files_metadata=True)
    except Exception as error:
        raise unreachable(source.repo, error) from error
    listed = info.siblings or []
    files: list[HubFile] = []
    for split in SPLITS:
        wanted: Sequence[str] = getattr(source, split)
        for entry in listed:
            name = entry.rfilename
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted):
                continue
            if patterns and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                continue
            check_path(name, source.repo)
            stated = entry.lfs.sha256 if entry.lfs is not None else entry.blob_id
            if info.sha is None or entry.size is None or stated is None:
                raise DownloadError(f"The hub states no commit, size or hash of {name} of {source.repo}.")
            files.append(HubFile(name, split, entry.size, stated, is_large=entry.lfs is not None))
    if not files:
        asked = ", ".join([*(patterns or (*source.train, *source.held_out))])
        names = ", ".join(entry.rfilename for entry in listed[:20])
        raise DownloadError(
            f"{source.repo} has no file of this set that matches {asked}. It has: {names or 'no file'}."
        )
    licence = info.card_data.license if info.card_data is not None else None
    return str(info.sha), str(licence or "none is stated on the hub"), files


def check_path(path: str, source: str) -> None:
    """Raise DownloadError if the path of a file leads out of the folder of its set. `source` is who states the path."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        raise DownloadError(f"{source} names the file {path!r}, which is outside of the data set. It is not read.")


def download_file(repo: str, commit: str, file: HubFile, path: Path, endpoint: str | None) -> None:
    """Download one file. What arrives before an error stays next to it, and the next call continues there.

    Raises DownloadError. `hf_hub_download` of huggingface_hub 2.4 deletes what has arrived when it fails, so it would
    start over.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    path.parent.mkdir(parents=True, exist_ok=True)
    # The name has the hash, so that a part of another version is never continued.
    partial = path.with_name(f"{path.name}.{file.hash[:12]}.part")
    if partial.exists() and partial.stat().st_size > file.size:
        partial.unlink()  # two commands wrote to it
    url = hf_hub_url(repo, file.path, repo_type="dataset", revision=commit, endpoint=endpoint)
    with partial.open("ab") as out:
        while True:
            start = out.tell()
            say(f"  {file.path}, {megabytes(file.size)}" + (f", continues at {megabytes(start)}" if start else ""))
            try:
                http_get(url, out, resume_size=start, headers=build_hf_headers(), expected_size=file.size)
                break
            except Exception as error:
                out.flush()
                if out.tell() <= start:  # else something arrived, so another try may get further
                    arrived = f"{megabytes(out.tell())} of {file.path} are here; "
                    raise unreachable(repo, error, arrived) from error
    if hub_hash(partial, file) != file.hash:
        partial.unlink()
        raise DownloadError(f"{file.path} of {repo} did not arrive as the hub states it: its hash differs. Try again.")
    partial.replace(path)


def check_files(folder: Path, record: Download) -> None:
    """Raise DownloadError if a file is missing, or is not what was downloaded."""
    for file in record.files:
        path = folder / FILES / file.path
        if not path.is_file():
            raise DownloadError(f"{path} is gone. Delete {folder / RECORD} to download it again.")
        sha256 = hash_file(path)
        if sha256 != file.sha256:
            raise changed(path, sha256, file.sha256)


def changed(path: Path, sha256: str, expected: str) -> DownloadError:
    """The error for a file that is not what was downloaded, or not what the hub states."""
    return DownloadError(
        f"{path} has changed: its SHA-256 is {sha256}, not {expected}. Delete it to download it again."
    )


def unreachable(repo: str, error: Exception, arrived: str = "") -> DownloadError:
    """The error for a hub that does not answer or refuses."""
    lines = str(error).strip().splitlines() or [""]
    return DownloadError(
        f"{repo} could not be downloaded: {type(error).__name__}: {lines[0]}. {arrived}"
        "Run the command again to continue. For a set that you have, pass the --revision in its download.json."
    )


def read_record(folder: Path) -> Download | None:
    """What was downloaded into a folder before; None for nothing. Raises DownloadError if the record is broken."""
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text())
        files = [DataFile(**file) for file in values.pop("files")]
        record = Download(**values, files=files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DownloadError(f"{path} cannot be read ({error}). Delete it, and the files are checked anew.") from None
    for file in files:
        check_path(file.path, str(path))
    return record


def hub_hash(path: Path, file: HubFile) -> str:
    """The hash of a file on this machine, of the kind that the hub states for it."""
    if file.is_large:
        return hash_file(path)
    header = b"blob %d\0" % path.stat().st_size
    return hash_file(path, lambda: hashlib.sha1(header))  # as git hashes a file


def hash_file(path: Path, digest: Any = "sha256") -> str:
    """The digest of a file in hexadecimal. `digest` is a name of hashlib, or makes a hasher."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, digest).hexdigest()


def megabytes(size: int) -> str:
    """A number of bytes as text."""
    return f"{size / 1e6:,.1f} MB"


def say(text: str) -> None:
    """Print a line on standard error: standard output is for tasks."""
    print(text, file=sys.stderr)
