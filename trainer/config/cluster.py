"""The [cluster] table: where the parts of a run live."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cotune.errors import ConfigError, check_bounds
from cotune.integrations.models.engines import ENGINES, Engine, engine_of

Placement = Literal["pack", "spread"]

CPUS = 1.0
"""CPUs that Ray counts for an engine, an FSDP worker or a rollout worker."""


class Demand(msgspec.Struct, frozen=True):
    """Processes of one kind that a run starts, and the GPUs of each; each also takes `CPUS`."""

    part: str
    count: int
    gpus: float = 0.0


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[cluster] What samples; and samplers, learners and rollout workers as Ray actors. Without this table a run stays
    on this machine: the sampler in a process of its own, everything else in this one."""

    address: str = ""
    """local: a Ray of its own on this machine, gone after the run | auto or HOST:PORT: a Ray cluster that is up |
    none: no Ray, one engine on this machine; see docs/how-to/cluster.md. A table without an address means local."""
    engine: str = ""
    """What samples: vllm (the default on Ray) | vllm-url (a vLLM server that runs already, at engine_url) |
    transformers (the default without Ray) | module:function (an async function that opens a `Sampler` of your own,
    called with model and engine_args)."""
    engine_url: str = ""
    """Address of the server of engine = "vllm-url", such as http://10.0.0.5:8000; with several base models one for
    each, separated by commas, in any order. The key is read from VLLM_API_KEY."""
    engines: int = 1
    """Engines that sample: of each base model, and with vLLM of each policy that trains all weights."""
    gpus_per_engine: int = 0
    """GPUs of one engine; above 1 it is tensor parallel. 0: the CPU build of vLLM."""
    engine_timeout: float = 60.0
    """Seconds that an engine may take to answer a health check; then it is restarted, and others do its work."""
    engine_args: dict[str, Any] = {}
    """[cluster.engine_args] Further arguments of vLLM's engine, such as max_model_len or gpu_memory_utilization; of
    vllm-url: folder, where adapters are written for a server on another machine."""
    learners: int = 1
    """FSDP workers; they train all policies in turn, and a batch is divided among them."""
    gpus_per_learner: int = 0
    """GPUs of each FSDP worker; 0: it trains on the CPU."""
    learner_timeout: float = 1800.0
    """Seconds that one update, checkpoint or start of a learner may take; then it counts as lost."""
    rollout_workers: int = 1
    """Processes that run the application; one that crashes costs its episodes only."""
    colocate: bool = False
    """One engine and one learner share a GPU: vLLM sleeps while the learner updates, and is checked as it wakes. It
    takes engine_args.gpu_memory_utilization of the GPU (0.5 where that is not set), the learner keeps the rest."""
    placement: Placement = "pack"
    """pack: learners on as few machines as possible | spread: on as many."""
    env: dict[str, str] = {}
    """[cluster.env] Environment variables of the actors, such as keys that the application needs."""
    runtime_env: dict[str, Any] = {}
    """[cluster.runtime_env] Ray's runtime environment of the rollout workers, such as working_dir or pip."""

    def __post_init__(self) -> None:
        check_bounds(self, "engines", "learners", "rollout_workers", least=1, table="cluster.")
        check_bounds(self, "gpus_per_engine", "gpus_per_learner", least=0, table="cluster.")
        check_bounds(self, "engine_timeout", "learner_timeout", table="cluster.")
        if self.engine and self.engine not in ENGINES and ":" not in self.engine:
            known = ", ".join(sorted(ENGINES))
            raise ConfigError("cluster.engine", self.engine, f"is not one of {known}, nor module:function")
        self._check_url()
        if not self.address:
            self._check_local()
        if self.gpus_per_learner > 1:
            fault = "is more than a learner can use: it is one process on one GPU"
            raise ConfigError("cluster.gpus_per_learner", self.gpus_per_learner, fault, "Set cluster.learners higher.")
        if self.colocate:
            self._check_colocated()

    def _check_url(self) -> None:
        if not self.kind.by_url:
            if self.engine_url:
                raise ConfigError("cluster.engine_url", self.engine_url, 'needs cluster.engine = "vllm-url"')
            return
        if not all(url.startswith(("http://", "https://")) for url in self.engine_urls or ("",)):
            raise ConfigError(
                "cluster.engine_url", self.engine_url, "is not the address of a vLLM server: http://HOST:PORT"
            )
        for name, allowed in (("engines", 1), ("gpus_per_engine", 0)):
            if getattr(self, name) != allowed:
                raise ConfigError(f"cluster.{name}", getattr(self, name), f"must be {allowed} if a server samples")

    def _check_colocated(self) -> None:
        for name, value in (("engines", self.engines), ("learners", self.learners)):
            if value != 1:
                raise ConfigError(f"cluster.{name}", value, "must be 1 if cluster.colocate is true")
        if not self.kind.sleeps:
            able = " or ".join(name for name, kind in ENGINES.items() if kind.sleeps)
            raise ConfigError("cluster.engine", self.sampled_by, f"must be {able} if cluster.colocate is true")
        if self.gpus_per_engine != self.gpus_per_learner or self.gpus_per_engine > 1:
            both = f"{self.gpus_per_engine} and {self.gpus_per_learner}"
            fault = "must be 1 and 1 if cluster.colocate is true (0 and 0 without a GPU)"
            raise ConfigError("cluster.gpus_per_engine and gpus_per_learner", both, fault)

    def _check_local(self) -> None:
        """Raises ConfigError for what only Ray can do."""
        own = ("address", "engine", "engine_url", "engine_args")
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.name not in own and value and value != field.default:
                remedy = 'Set cluster.address = "local", or leave it out.'
                raise ConfigError(f"cluster.{field.name}", value, "needs Ray", remedy)

    @property
    def sampled_by(self) -> str:
        """The name of the engine."""
        return self.engine or ("vllm" if self.address else "transformers")

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The addresses that `engine_url` names."""
        return tuple(url.strip() for url in self.engine_url.split(",") if url.strip())

    @property
    def kind(self) -> Engine:
        """The row of the engine in the table of engines."""
        return engine_of(self.sampled_by)

    @property
    def gpu_shares(self) -> tuple[float, float]:
        """GPUs that Ray counts for an engine and for a learner."""
        half = 2 if self.colocate else 1
        return self.gpus_per_engine / half, self.gpus_per_learner / half

    def demands(self, samplers: int = 1) -> tuple[Demand, ...]:
        """What the run asks of the cluster, with this many sets of engines."""
        engine, learner = self.gpu_shares
        return (
            Demand("engine", self.engines * samplers, engine),
            Demand("learner", self.learners, learner),
            Demand("rollout worker", self.rollout_workers),
        )
