"""An export keeps its earlier versions, which can be brought back."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from cotune.adapters.deployed import deployed
from cotune.adapters.export import TrainedPolicy, write_export
from cotune.adapters.load import load_export
from cotune.adapters.manifest import read_manifest
from cotune.adapters.open_policies import open_local
from cotune.adapters.versions import VERSIONS, earlier_versions, roll_back
from cotune.cli.main import main
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.exchange.trackers.tracker import Tracker
from cotune.sampling.protocol import Weights
from cotune.trainer.export import export
from tests.adapters.test_export import write_run


def version_of(export: Path) -> int:
    """The version of an export, after checking the hashes of its files."""
    load_export(export)
    return read_manifest(export).export_version


def kept(export: Path) -> list[int]:
    """The earlier versions of an export, after checking the hashes of their files."""
    return [version_of(folder) for folder in earlier_versions(export).values()]


def write_whole_run(tmp_path: Path, base: Path, policies: list[TrainedPolicy]) -> Path:
    assert policies[0].lora is not None and policies[0].weights is not None
    write_run(tmp_path / "run", base, policies[0].lora, policies[0].weights)
    return tmp_path / "run"


def test_the_newest_version_stays_in_place_and_three_earlier_ones_are_kept(
    tmp_path: Path, policies: list[TrainedPolicy]
) -> None:
    out = tmp_path / "adapters"
    for number in range(1, 6):
        assert write_export(out, policies).export_version == number
        assert version_of(out) == number
    assert kept(out) == [2, 3, 4]
    assert not list((out / VERSIONS).glob(f"*/{VERSIONS}")), "versions are not nested"
    assert list(tmp_path.iterdir()) == [out], "nothing is left next to the export"


def test_an_earlier_version_is_brought_back(tmp_path: Path, policies: list[TrainedPolicy]) -> None:
    out = tmp_path / "adapters"
    for _ in range(3):
        write_export(out, policies)
    assert roll_back(out).export_version == 2
    assert (version_of(out), kept(out)) == (2, [1, 3])
    assert roll_back(out).export_version == 1
    assert (version_of(out), kept(out)) == (1, [2, 3])
    with pytest.raises(ConfigError, match=r"replaced no version.*These are kept: 2, 3\."):
        roll_back(out)
    assert roll_back(out, 3).export_version == 3
    assert (version_of(out), kept(out)) == (3, [1, 2])
    with pytest.raises(ConfigError, match=r"roll_back = 7 is not an earlier version.*kept: 1, 2\."):
        roll_back(out, 7)


def test_after_a_roll_back_the_next_export_goes_back_to_the_version_that_it_replaced(
    tmp_path: Path, policies: list[TrainedPolicy]
) -> None:
    out = tmp_path / "adapters"
    for _ in range(4):
        write_export(out, policies)
    roll_back(out, 1)
    assert write_export(out, policies).export_version == 5
    assert kept(out) == [1, 3, 4], "the version just replaced stays, although it is the oldest"
    assert roll_back(out).export_version == 1


def test_one_earlier_version_of_whole_models_is_kept(tmp_path: Path, policies: list[TrainedPolicy]) -> None:
    out = tmp_path / "merged"
    for _ in range(3):
        write_export(out, policies, merge=True)
    assert (version_of(out), kept(out)) == (3, [2])


def test_no_earlier_version_is_removed_below_the_limit(
    tmp_path: Path, policies: list[TrainedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotune.adapters.versions.EARLIER_ADAPTERS", 5)
    out = tmp_path / "adapters"
    for _ in range(7):
        present = write_export(out, policies).export_version
        assert kept(out) == list(range(max(1, present - 5), present))


def test_a_link_to_an_export_stays_a_link(tmp_path: Path, policies: list[TrainedPolicy]) -> None:
    (tmp_path / "store").mkdir()
    link = tmp_path / "adapters"
    link.symlink_to(tmp_path / "store" / "team")
    write_export(link, policies)
    write_export(link, policies)
    assert link.is_symlink()
    assert (version_of(link), kept(link)) == (2, [1])


class Killed(BaseException):
    """Stands for kill -9."""


def kill_at_rename(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """After `last` renames every further one fails, also those that would clean up."""
    count = 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count > last:
            raise Killed
        return original(self, target)

    original = Path.rename
    monkeypatch.setattr(Path, "rename", rename)


@pytest.mark.parametrize("last", range(4))
def test_a_crash_between_two_renames_loses_no_version(
    last: int, tmp_path: Path, policies: list[TrainedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "adapters"
    write_export(out, policies)
    write_export(out, policies)
    with monkeypatch.context() as patched:
        kill_at_rename(patched, last)
        with pytest.raises(Killed):
            write_export(out, policies)
    if last == 1:
        with pytest.raises(AdapterError, match=r"was interrupted.*mv .*\.adapters\.replaced .*adapters"):
            load_export(out)

    write_export(out, policies)
    third = [3] if last >= 2 else []
    assert (version_of(out), kept(out)) == (3 + len(third), [1, 2, *third])
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("last", range(4))
def test_a_crash_in_a_roll_back_loses_no_version(
    last: int, tmp_path: Path, policies: list[TrainedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "adapters"
    for _ in range(3):
        write_export(out, policies)
    with monkeypatch.context() as patched:
        kill_at_rename(patched, last)
        with pytest.raises(Killed):
            roll_back(out)
    assert roll_back(out, 1).export_version == 1
    assert (version_of(out), kept(out)) == (1, [2, 3])
    assert list(tmp_path.iterdir()) == [out]


def test_a_damaged_earlier_version_takes_no_place(tmp_path: Path, policies: list[TrainedPolicy]) -> None:
    out = tmp_path / "adapters"
    for _ in range(3):
        write_export(out, policies)
    weights = out / VERSIONS / "2" / "planner" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(AdapterError, match=r"(?s)Version 2 of .* is damaged: .*SHA-256.*Name another .*\(kept: 1, 2\)"):
        roll_back(out)
    assert version_of(out) == 3
    (out / VERSIONS / "2" / "roles.json").write_text("{")
    with pytest.raises(AdapterError, match=r"Version 2 .* is damaged"):
        roll_back(out)
    assert roll_back(out, 1).export_version == 1


def test_a_broken_present_version_can_be_rolled_back_and_replaced(
    tmp_path: Path, policies: list[TrainedPolicy]
) -> None:
    out = tmp_path / "adapters"
    write_export(out, policies)
    write_export(out, policies)
    (out / "roles.json").write_text("{")
    assert roll_back(out).export_version == 1
    assert list(earlier_versions(out)) == [2]
    assert write_export(out, policies).export_version == 3
    (out / "roles.json").write_text("{")
    assert write_export(out, policies).export_version == 4
    assert list(earlier_versions(out)) == [1, 2, 3]


def test_an_engine_that_restarts_keeps_the_version_that_is_served(
    tmp_path: Path, policies: list[TrainedPolicy], adapter: Callable[[int], Weights], in_thread: None
) -> None:
    out = tmp_path / "adapters"
    write_export(out, policies)

    async def restart_after_a_new_export() -> int:
        local = await open_local(out)
        try:
            write_export(out, [dataclasses.replace(policy, weights=adapter(9)) for policy in policies])
            engine = local.engines[0]
            again = await engine.open_engine()  # what a restart does
            await again.aclose()
            assert local.manifest is not None
            return local.manifest.export_version
        finally:
            await local.aclose()

    assert asyncio.run(restart_after_a_new_export()) == 1
    served = load_export(out / VERSIONS / "1")
    shutil.rmtree(out / VERSIONS)
    with pytest.raises(AdapterError, match="no longer has version 1 of "):
        served.weights(served.manifest.policies[0])


def test_the_commands_name_the_version(
    tmp_path: Path,
    base: Path,
    policies: list[TrainedPolicy],
    capsys: pytest.CaptureFixture[str],
    in_thread: None,
) -> None:
    run, out = str(write_whole_run(tmp_path, base, policies)), str(tmp_path / "adapters")
    assert main(["export", run, "--out", out]) == 0
    assert "--roll-back" not in capsys.readouterr().out
    assert main(["export", run, "--out", out]) == 0
    said = " ".join(capsys.readouterr().out.split())
    back = f"cotune export --roll-back --out {out} goes back"
    assert f"run run, step-000002; it replaces version 1, to which {back}" in said
    assert main(["export", "--roll-back", "--out", out]) == 0
    assert "is version 1 of " in " ".join(capsys.readouterr().out.split())
    assert main(["export", "--roll-back", "2", "--out", out]) == 0
    with deployed(out) as deployment:
        assert deployment.version == read_manifest(Path(out)).title
        assert deployment.version.startswith("version 2 of ") and deployment.version.endswith("run run, step-000002")
    assert deployment.version == ""


def test_roll_back_takes_no_other_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "adapters")
    for other in (["runs/r1"], ["--merge"], ["--push", "me/team"], ["--step", "best"], ["--model", "base"]):
        assert main(["export", *other, "--out", out, "--roll-back"]) == 1
        assert "has no effect with --roll-back. Leave it out." in capsys.readouterr().err
    assert main(["export", "--out", out]) == 1
    assert (
        "run is missing. Name a run folder, or a team (--use ROLE=SOURCE), or restore an earlier export"
        in capsys.readouterr().err
    )
    assert main(["export", "--out", out, "--roll-back"]) == 1
    assert "is no export" in capsys.readouterr().err


def test_the_disk_space_of_whole_models_is_printed_before_they_are_written(
    tmp_path: Path, base: Path, policies: list[TrainedPolicy]
) -> None:
    run = write_whole_run(tmp_path, base, policies)
    said: list[str] = []
    for _ in range(2):
        export(run, tmp_path / "merged", merge=True, say=said.append)
    said = [text for text in said if "disk space" in text]
    size = (tmp_path / "merged" / "planner" / "model.safetensors").stat().st_size
    named = [float(text.removeprefix("this export will take about ").split(" GB")[0]) * 1e9 for text in said]
    assert named == pytest.approx([size, size], rel=0.05)
    assert [text.endswith("disk space, in addition to one earlier version") for text in said] == [False, True]
    export(run, tmp_path / "adapters", say=said.append)
    assert "disk space" not in " ".join(said[2:]), "adapters are small"


def test_trackers_get_the_present_version_alone(
    tmp_path: Path, policies: list[TrainedPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "adapters"
    write_export(out, policies)
    write_export(out, policies)
    sent: list[str] = []
    mlflow = Mock(
        log_artifacts=lambda folder, to: sent.append(f"{Path(folder).name} in {to}"),
        log_artifact=lambda file, to: sent.append(f"{Path(file).name} in {to}"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    tracker = Tracker.__new__(Tracker)
    tracker._tool = "mlflow"
    tracker.keep(out, "export", without=VERSIONS)
    assert sent == [
        "README.md in export",
        "planner in export/planner",
        "roles.json in export",
        "writer in export/writer",
    ]
