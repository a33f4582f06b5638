"""Ray's actors have the titles by which faults find their victims."""

from __future__ import annotations

import os

import psutil
import pytest

from cotune.integrations.cluster.process import Host
from cotune.integrations.cluster.sampler import SamplerActor
from cotune.integrations.cluster.worker_group import Worker
from tests.trainer import chaos

pytestmark = pytest.mark.slow


def test_rays_actors_have_the_titles_that_victims_are_found_by(ray_runtime: str) -> None:
    import ray

    pid = os.getpid
    made = {
        chaos.SAMPLER: ray.remote(SamplerActor).options(num_cpus=0).remote(),
        chaos.LEARNER: ray.remote(Worker).options(num_cpus=0).remote("builtins:slice", 0, 1),
        chaos.WORKER: ray.remote(Host).options(num_cpus=0).remote(),
    }
    pids = {kind: ray.get(actor.__ray_call__.remote(lambda _: pid())) for kind, actor in made.items()}
    driver = psutil.Process()
    for kind, actor in made.items():
        assert pids[kind] in [process.pid for process in chaos.actors(driver, kind)]
        ray.kill(actor)
