"""Rows of public data sets, from files of JSON lines or Parquet that are on this machine."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class DatasetError(ValueError):
    """A file is not what it should be: which one, which field, and what is expected."""


def rows(file: Path, *fields: str) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines or of Parquet. Raises DatasetError if one lacks a field, or there is no file."""
    if not file.is_file():
        raise DatasetError(f"{file} is no file; pass --download to fetch a public data set")
    for number, row in enumerate(_parquet(file) if file.suffix == ".parquet" else _json_lines(file), 1):
        if missing := [name for name in fields if name not in row]:
            raise DatasetError(f"{file}, row {number}: no field {', '.join(missing)}; it has {', '.join(row)}")
        yield row


def add_files(parser: argparse.ArgumentParser, loaders: Mapping[str, Callable[..., Any]]) -> None:
    """Add a flag for the files of each data set; the loader's docstring is its help."""
    for name, loader in loaders.items():
        about = " ".join((loader.__doc__ or "").split())
        parser.add_argument(f"--{name}", type=Path, nargs="+", default=[], metavar="FILE", help=about)


def text_id(text: str) -> str:
    """A short id for a row that has none: the same for the same text, wherever the row stands."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def count_rows(file: Path) -> int:
    """The number of rows of a file, without decoding them."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as parquet

        return int(parquet.ParquetFile(file).metadata.num_rows)
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def draw_rows(files: Sequence[Path], most: int, seed: int, folder: Path) -> tuple[list[Path], int]:
    """Draw `most` rows of all files, each with the same chance, and write them to files in `folder` as JSON lines.

    Data sets are often sorted by difficulty, so the first rows would be a biased choice. Returns the files to read, and
    the number of all rows. The drawn rows of a file are in one with the same name, because readers take ids from it. If
    there are no more than `most` rows, the files to read are `files` and nothing is written.
    """
    counts = [count_rows(file) for file in files]
    total = sum(counts)
    if total <= most:
        return list(files), total
    chosen = set(random.Random(seed).sample(range(total), most))
    drawn_files: list[Path] = []
    first = 0
    for number, file in enumerate(files):
        # Files of different folders may have the same name.
        drawn = folder / str(number) / f"{file.stem}.jsonl"
        drawn.parent.mkdir(parents=True)
        with drawn.open("w") as out:
            out.writelines(_chosen_lines(file, {row - first for row in chosen}))
        drawn_files.append(drawn)
        first += counts[number]
    return drawn_files, total


def _chosen_lines(file: Path, chosen: Collection[int]) -> Iterator[str]:
    """Lines of JSON of the rows with these numbers, from 0 on. Only chosen rows of Parquet are converted."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as parquet

        first = 0
        for batch in parquet.ParquetFile(file).iter_batches(64):
            for place in range(batch.num_rows):
                if first + place in chosen:
                    (row,) = batch.slice(place, 1).to_pylist()
                    yield json.dumps(row) + "\n"
            first += batch.num_rows
        return
    number = 0
    with file.open() as lines:
        for line in lines:
            if not line.strip():
                continue
            if number in chosen:
                yield line.rstrip("\n") + "\n"
            number += 1


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as parquet  # only for this form

    return (row for batch in parquet.ParquetFile(file).iter_batches(64) for row in batch.to_pylist())


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DatasetError(f"{file}, line {number}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise DatasetError(f"{file}, line {number}: not an object, but {line[:40]!r}")
            yield row
