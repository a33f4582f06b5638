"""`cotune doctor`: what it finds, and that it blocks what cannot run."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cotune.config.cluster import ClusterConfig, DividedCluster
from cotune.errors import ConfigError
from cotune.runtime import warn_once
from cotune.trainer.before.doctor.doctor import (
    _sampler_sets,
    examine,
    judge_machine,
    judge_placement,
    judge_precision,
    render,
)
from cotune.trainer.before.doctor.machine import Gpu, Machine, Node
from cotune.trainer.before.findings import Finding
from cotune.trainer.config.load import convert, load_config

GPU = Gpu(name="H200", memory_gb=139.0, free_gb=138.0)
MACHINE = Machine(
    python="3.11.7", system="Linux", cores=16, memory_gb=128.0, free_memory_gb=100.0, shared_gb=64.0, disk_gb=50.0,
    temporary_gb=50.0, open_files=65536, gpus=(GPU,), versions={"torch": "2.13.0", "ray": "2.60.0", "vllm": "0.28.0"},
)  # fmt: skip


def node(cpus: float, gpus: float = 0.0) -> Node:
    return Node(address="n", cpus=cpus, gpus=gpus, free_cpus=cpus, free_gpus=gpus)


def levels(findings: Any) -> dict[str, str]:
    return {finding.about: finding.level for finding in findings}


def blocking(findings: Any) -> list[Finding]:
    return [finding for finding in findings if finding.level == "blocks"]


@pytest.mark.parametrize(
    ("settings", "gpus", "said"),
    [
        ({}, (GPU,), False),
        ({"learner": {"dtype": "float32"}}, (GPU,), True),
        ({"learner": {"dtype": "float32"}, "cluster": {}}, (GPU,), False),
        ({"learner": {"dtype": "float32"}, "cluster": {"gpus_per_engine": 0.5}}, (GPU,), True),
        ({}, (), False),
    ],
)
def test_a_learner_in_float32_on_a_gpu_is_told_of_bfloat16(settings: dict[str, Any], gpus: Any, said: bool) -> None:
    machine = msgspec.structs.replace(MACHINE, gpus=gpus)
    found = list(judge_precision(convert({"model": "m", **settings}), machine))
    assert [(f.about, f.level, 'learner.dtype = "auto" is bfloat16' in f.text) for f in found] == (
        [("precision", "ok", True)] if said else []
    )


@pytest.mark.parametrize(("dtype", "there", "said"), [("float32", True, 1), ("float32", False, 0), ("auto", True, 0)])
def test_a_learner_in_float32_on_a_cpu_with_bfloat16_is_told_of_auto(dtype: str, there: bool, said: int) -> None:
    machine = msgspec.structs.replace(MACHINE, gpus=(), bfloat16=there)
    found = list(judge_precision(convert({"model": "m", "learner": {"dtype": dtype}}), machine))
    assert ['learner.dtype = "auto" multiplies in bfloat16' in f.text for f in found] == [True] * said


@pytest.mark.parametrize(
    ("changes", "subject", "level"),
    [
        ({"versions": {"torch": "2.13.0", "vllm": "0.28.0"}}, "ray", "blocks"),
        ({"versions": {"torch": "2.13.0", "ray": "2.60.0"}}, "vllm", "blocks"),
        ({"versions": {"ray": "2.60.0", "vllm": "0.28.0"}}, "torch", "blocks"),
        ({"shared_gb": 0.06}, "shared memory", "warns"),
        ({"disk_gb": 0.2}, "disk for runs", "warns"),
        ({"open_files": 256}, "open files", "warns"),
        ({"loopback": "Permission denied"}, "ports", "blocks"),
        ({"gpus": ()}, "GPU", "ok"),
    ],
)
def test_what_a_machine_lacks_is_named_with_its_remedy(changes: dict[str, Any], subject: str, level: str) -> None:
    cluster = ClusterConfig(address="local")
    assert not blocking(judge_machine(MACHINE, cluster))
    found = {f.about: f for f in judge_machine(msgspec.structs.replace(MACHINE, **changes), cluster, "vllm")}
    assert found[subject].level == level
    assert bool(found[subject].remedy) == (level != "ok")


def test_an_unsupported_framework_blocks() -> None:
    machine = msgspec.structs.replace(MACHINE, versions={**MACHINE.versions, "langgraph": "0.1"})
    (finding,) = blocking(judge_machine(machine, ClusterConfig()))
    assert "langgraph 0.1" in finding.text and "pip install" in finding.remedy


def test_a_framework_that_is_newer_than_the_tests_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once._first_of.cache_clear()
    machine = msgspec.structs.replace(MACHINE, versions={**MACHINE.versions, "langgraph": "1.99"})
    findings = {finding.about: finding for finding in judge_machine(machine, ClusterConfig())}
    assert (findings["langgraph"].level, findings["langgraph"].text) == ("warns", "1.99, tested is 1.1 to 1.2.x")
    assert caplog.text == ""  # the finding is printed, so a logged line would repeat it


def test_eight_gpus_hold_six_engines_and_two_learners_but_not_three() -> None:
    asked = DividedCluster(address="auto", engines=6, gpus_per_engine=1, learners=2, gpus_per_learner=1)
    assert not blocking(judge_placement([node(64, 8)], asked))
    (finding,) = blocking(judge_placement([node(64, 8)], msgspec.structs.replace(asked, learners=3)))
    assert finding.about == "learners" and "2 fit" in finding.text


def test_a_tensor_parallel_engine_needs_its_gpus_on_one_machine() -> None:
    asked = ClusterConfig(address="auto", engines=1, gpus_per_engine=4, learners=1)
    assert [f.about for f in blocking(judge_placement([node(8, 3), node(8, 3)], asked))] == ["engines"]
    assert not blocking(judge_placement([node(8, 3), node(8, 4)], asked))


def test_an_engine_and_a_learner_share_one_gpu() -> None:
    apart = DividedCluster(address="auto", engines=1, gpus_per_engine=1, learners=1, gpus_per_learner=1)
    assert blocking(judge_placement([node(8, 1)], apart))
    together = ClusterConfig(address="auto", engines=1, gpus_per_engine=0.5, learners=1)
    assert not blocking(judge_placement([node(8, 1)], together))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engines": 2}, r"cluster\.engines = 2 must be 1 if engine and learner share a GPU"),
        ({"learners": 2}, r"cluster\.learners = 2 must be 1"),
        ({"gpus_per_engine": 0.3}, r"cluster\.gpus_per_engine = 0.3 is not a whole number, nor 0.5"),
    ],
)
def test_what_cannot_share_a_gpu_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**{"address": "local", "gpus_per_engine": 0.5, **changes})


@pytest.mark.parametrize(
    ("settings", "gpu", "said"),
    [
        ({}, None, "transformers on the CPU; the learner on the CPU"),
        # `test_division.py` has the lines of all divisions.
        pytest.param({}, 24.0, "transformers on one GPU; the learner on the same GPU", marks=pytest.mark.long),
        pytest.param(
            {"cluster.address": "local"},
            None,
            "1 vllm engine on the CPU; 1 learner on the CPU (Ray: local)",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_division_is_printed(tiny_base: Path, settings: dict[str, Any], gpu: float | None, said: str) -> None:
    found = examine(load_config(None, {"model": str(tiny_base), **settings}), gpu=gpu).findings
    told = [finding.text for finding in found if finding.about == "division"]
    assert told[0] == said
    # vLLM's build for the CPU is installed, which a GPU would not be used by.
    assert len(told) == (1 if gpu is None else 2) and (gpu is None or "built for the CPU" in told[1])


def test_policies_of_full_weights_count_engines_of_their_own() -> None:
    full = [{"name": name, "roles": [name], "kind": "full"} for name in ("a", "b")]
    frozen = {"name": "c", "roles": ["c"], "kind": "frozen"}
    config = convert(
        {"model": "m", "policy": [*full, frozen], "engine": "vllm", "cluster": {"engines": 1, "gpus_per_engine": 1}}
    )
    assert blocking(judge_placement([node(8, 2)], config.cluster, samplers=_sampler_sets(config)))
    assert not blocking(judge_placement([node(8, 3)], config.cluster, samplers=_sampler_sets(config)))


def test_more_processes_than_cores_warns_on_a_local_ray() -> None:
    found = judge_placement([node(2)], ClusterConfig(address="local", engines=1, learners=2, rollout_workers=2))
    assert levels(found) == {"placement": "warns", "engines": "ok", "learners": "ok", "rollout workers": "ok"}


@given(cpus=st.lists(st.integers(0, 8), min_size=1, max_size=4), engines=st.integers(1, 5), learners=st.integers(1, 5))
def test_what_does_not_fit_in_all_machines_together_never_passes(cpus: list[int], engines: int, learners: int) -> None:
    asked = ClusterConfig(address="auto", engines=engines, learners=learners)
    fits = not blocking(judge_placement([node(c) for c in cpus], asked))
    assert fits == (sum(cpus) >= engines + learners + 1)


def test_this_machine_can_run_a_local_cluster(tiny_base: Path) -> None:
    report = examine(load_config(None, {"model": str(tiny_base), "cluster.address": "local"}))
    assert report.fits
    assert {"torch", "ray", "vllm", "engines", "learners", "rollout workers"} <= {f.about for f in report.findings}
    out = io.StringIO()
    lost = Finding("blocks", "ray", "not installed", "pip install -e '.[ray]'.")
    Console(file=out, width=200).print(render(msgspec.structs.replace(report, findings=(lost,))))
    assert "pip install -e '.[ray]'." in out.getvalue()


def test_the_command_blocks_a_cluster_that_is_not_there(tiny_base: Path) -> None:
    arguments = ["doctor", "--model", str(tiny_base), "--cluster", "127.0.0.1:9", "--json"]
    command = [sys.executable, "-m", "cotune", *arguments]  # this process may be in a cluster already
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert not found["fits"]
    assert "cluster.address = '127.0.0.1:9'" in {f["about"]: f["text"] for f in found["findings"]}["division"]
