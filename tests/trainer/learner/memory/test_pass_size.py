"""Passes are as large as fits, and become smaller where memory runs out."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cotune.algorithms.recipes import LossSpec
from cotune.config.learner import LearnerSettings
from cotune.config.sizes import parse_size
from cotune.errors import ConfigError, LearnerError
from cotune.integrations.models.memory import process_memory
from cotune.records.policies import policies_for
from cotune.trainer.learner import load
from cotune.trainer.learner.batching import micro_batches, pass_tokens
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.memory import pass_size
from cotune.trainer.learner.pass_inputs import PassInputs
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows

OPTIMIZER_BYTES = pass_size.GRADIENT_BYTES + pass_size.MOMENT_BYTES["adamw"]


def open_one(base: str, settings: LearnerSettings = FAST) -> LocalLearner:
    return LocalLearner.open(base, policies_for("lora", ["a"], SMALL), settings, LossSpec())


def test_a_size_in_words() -> None:
    assert [parse_size(text) for text in ("6GiB", "800 MB", "1.5kib", "12B")] == [6 * 2**30, 800 * 10**6, 1536, 12]


@pytest.mark.parametrize("text", ["6", "six GiB", "-1GiB", "1TiBB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"learner\.memory = .*not a size such as 6GiB or 800MB"):
        LearnerSettings(memory=text)


def test_a_small_model_takes_the_largest_passes(base: str) -> None:
    metrics = open_one(base).update("a", make_rows())
    assert (metrics["pass_tokens"], metrics["halved_passes"]) == (8192, 0)


@pytest.mark.parametrize("shared", [True, False])
def test_what_a_token_takes_is_what_the_graph_of_a_pass_holds(base: str, shared: bool) -> None:
    model = open_one(base, change(FAST, shared_prompts=shared))._policies["a"]
    rows = make_rows(groups=20, k=2, prompt=(24, 24), response=(9, 9))
    held: dict[int, torch.Tensor] = {}
    own = {p.untyped_storage().data_ptr() for p in model.network.parameters()}

    def hold(tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda none: none):
        model.token_logprobs(rows)
    tokens = pass_tokens(rows, shared)
    assert tokens <= 20 * (24 + 2 * 8) if shared else tokens == 40 * (24 + 8)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    assert pass_size.kept_bytes(model, checkpointed=False).token * tokens == pytest.approx(measured, rel=0.15)


@given(st.floats(0, 1e5))
def test_auto_takes_most_of_what_fits(fit: float) -> None:
    most = min(max(int(fit), pass_size.LEAST), 8192)
    assert 7 / 8 * most < pass_size.auto_tokens(fit, "cpu") <= most
    most = min(max(int(fit), pass_size.LEAST), 65536)  # a GPU takes larger passes
    power = pass_size.auto_tokens(fit, "cuda")
    assert most / 2 < power <= most and power.bit_count() == 1


def test_auto_takes_one_of_few_numbers() -> None:
    assert len({pass_size.auto_tokens(number, "cpu") for number in range(1024, 2048)}) == 8


def test_a_limit_makes_passes_smaller(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_one(base)._policies["a"]
    used = process_memory()
    memory = pass_size.pass_memory(model)
    per_token = memory.planned(checkpointed=False)
    trained = sum(p.numel() for p in model.parameters().values())
    fixed = int(memory.fixed + memory.logits) + OPTIMIZER_BYTES * trained
    monkeypatch.setattr(pass_size, "process_memory", lambda: used)
    learner = open_one(base, change(FAST, memory=f"{int(used + fixed + 100 * per_token)}B"))
    assert learner.update("a", make_rows())["pass_tokens"] == 96  # of 100
    with pytest.raises(ConfigError, match=r"learner\.memory = '\d+B' is too little: this model takes at least \d"):
        open_one(base, change(FAST, memory=f"{int(used + fixed + 5 * per_token)}B"))


@pytest.mark.parametrize("tokens", ["auto", 64])
def test_pages_are_kept_during_an_update_and_given_back_after_it_where_little_is_left(
    base: str, monkeypatch: pytest.MonkeyPatch, tokens: int | str
) -> None:
    asked: list[str] = []
    libc = SimpleNamespace(
        mallopt=lambda option, value: asked.append(f"{value >> 10} KiB"),
        malloc_trim=lambda left: asked.append("give back"),
    )
    monkeypatch.setattr(pass_size, "_glibc", lambda: libc)
    open_one(base, change(FAST, micro_batch_tokens=tokens)).update("a", make_rows())
    assert asked == []  # a small model: its passes take hardly any pages
    monkeypatch.setattr(pass_size, "_is_large", lambda network: True)
    learner = open_one(base, change(FAST, micro_batch_tokens=tokens))
    assert asked == (kept := ["32768 KiB", "2096128 KiB"])
    with monkeypatch.context() as patch:
        for free, then in ((60, []), (40, ["give back"])):
            patch.setattr(pass_size, "machine_memory", lambda free=free: (free, 100))
            learner.update("a", make_rows())
            assert asked == [*kept, *then]
    asked.clear()
    open_one(base, change(FAST, micro_batch_tokens=tokens, memory="100GiB"))
    assert asked == ["256 KiB"]  # under a limit the gaps count


def test_pages_are_kept_only_where_there_is_room() -> None:
    memory = pass_size.PassMemory(plain=80.0, checkpointed=8.0, layers=8, fixed=0.0, logits=0.0)
    # Ten plain tokens: 10 * (1.25 * (80 + 80 / 8) + 1.3 * 80). 100 checkpointed: 100 * (1.25 * (8 + 1.4 * 10) + 40).
    for sizes, needed in (({False: 10}, 2165), ({False: 10, True: 100}, 6750)):
        assert pass_size.may_keep_freed_pages(memory, sizes, needed + 1) and not pass_size.may_keep_freed_pages(
            memory, sizes, needed - 1
        )


class Scarce:
    """A policy's forward pass on a machine that has memory for so many tokens."""

    def __init__(self, learner: LocalLearner, tokens: int) -> None:
        model = learner._policies["a"]
        whole = model.token_logprobs

        def limited(inputs: PassInputs) -> tuple[torch.Tensor, torch.Tensor]:
            found = whole(inputs)
            rows = inputs.rows
            if len(micro_batches(rows, range(len(rows)), tokens, model.logprob_model.shares)) > 1:
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory")
            return found

        model.token_logprobs = limited  # type: ignore[method-assign, assignment]


def test_out_of_memory_halves_the_passes_and_changes_nothing_else(base: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = make_rows(groups=6, prompt=(9, 9), response=(4, 6))
    settings = change(FAST, micro_batch_tokens=128, mini_batch=12)
    plain, scarce = open_one(base, settings), open_one(base, settings)
    Scarce(scarce, 40)
    expected, found = plain.update("a", rows), scarce.update("a", rows)
    assert (found["pass_tokens"], found["halved_passes"]) == (32, 2)
    for name in ("tokens", "rows", "steps", "loss", "grad_norm", "entropy", "ratio_mean"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    for name, weights in plain.weights("a").items():
        assert scarce.weights("a")[name] == pytest.approx(weights, abs=1e-5)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "Memory ran out in a pass of 128 tokens: passes are of 64 from now on",
        "Memory ran out in a pass of 64 tokens: passes are of 32 from now on",
    ]
    assert scarce.update("a", rows)["halved_passes"] == 0


def test_memory_for_nothing_is_an_error(base: str) -> None:
    learner = open_one(base, change(FAST, micro_batch_tokens=64))
    Scarce(learner, 1)
    with pytest.raises(LearnerError, match=r"Memory ran out in a pass of 16 tokens\. Set learner\.memory"):
        learner.update("a", make_rows())


def test_other_errors_pass(base: str) -> None:
    sizes = pass_size.PassSize(64, alone=True)
    with pytest.raises(RuntimeError, match="shape"):
        sizes.run_in_memory(lambda: torch.zeros(2).view(3))
    assert sizes.tokens == 64


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_a_gpu_says_in_several_ways_that_it_has_no_memory(text: str) -> None:
    assert pass_size.is_out_of_memory(RuntimeError(text))
    assert not pass_size.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_a_device_that_is_not_there_is_an_error_of_the_configuration(base: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"device = 'cuda' is not a torch device.*CUDA_VISIBLE_DEVICES"):
        open_one(base, change(FAST, device="cuda"))


KIB = 1024


class FakeGpu:
    """A GPU with so much free memory, of which each token of a pass takes 1 KiB and allocations above it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
        self.tokens = tokens
        monkeypatch.setattr(pass_size, "_free_room", self._room)
        monkeypatch.setattr(pass_size.PassMemory, "planned", lambda memory, checkpointed: KIB)
        auto_tokens = pass_size.auto_tokens
        monkeypatch.setattr(pass_size, "auto_tokens", lambda fit, device: auto_tokens(fit, "cuda"))

    def _room(self, *_: object) -> pass_size.Room:
        return pass_size.Room(KIB * self.tokens, KIB * self.tokens, "the memory that is free")


def test_sizes_are_those_that_fit_when_an_update_begins(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In colocate mode the engine's memory is free only while it sleeps."""
    gpu = FakeGpu(monkeypatch, 256)
    learner = open_one(base)
    assert learner._passes["a"].tokens == 256
    gpu.tokens = 100_000
    learner._passes.choose()
    assert learner._passes["a"].tokens == 65536
    gpu.tokens = 40
    learner._passes.choose()
    assert learner._passes["a"].tokens == 32
    with pytest.raises(LearnerError, match="a pass of one row fits up to 40 into the memory that is free"):
        learner.check("a", make_rows(groups=1, k=1, prompt=(50, 50)))


@pytest.mark.parametrize(("asked", "wanted"), [("auto", 256), (256, 1)], ids=["auto", "a number"])
def test_a_learner_tells_which_passes_fit(
    base: str, monkeypatch: pytest.MonkeyPatch, asked: int | str, wanted: int
) -> None:
    """A number in the settings stands, whatever the rows would take."""
    gpu = FakeGpu(monkeypatch, 256)
    learner = open_one(base, msgspec.structs.replace(FAST, micro_batch_tokens=asked))
    assert learner.has_room(wanted)
    gpu.tokens = 255
    assert not learner.has_room(wanted)


def test_passes_that_were_halved_grow_again_when_there_is_more_room(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, 1024)
    learner = open_one(base)
    size, limit = learner._passes["a"], 512

    def allocate() -> int:
        """A pass that the forecast thinks fits, and the allocator does not."""
        if size.tokens > limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size.tokens} KiB.")
        return size.tokens

    def update() -> int:
        learner._passes.choose()
        return size.run_in_memory(allocate)

    assert (update(), size.halved) == (512, 1)
    assert (update(), size.halved) == (512, 1)  # not tried again with the same room
    gpu.tokens = 1100
    assert (update(), size.halved) == (512, 1)
    gpu.tokens, limit = 4096, 4096
    assert (update(), size.halved) == (4096, 1)
    gpu.tokens, limit = 300, 4096
    assert (update(), size.halved) == (256, 1)


@pytest.mark.parametrize(
    ("dtype", "advice"), [("float32", 'Use learner.dtype = "auto"'), ("bfloat16", "Use learner.q")]
)
def test_a_model_that_does_not_fit_is_an_error_with_figures(
    base: str, monkeypatch: pytest.MonkeyPatch, dtype: str, advice: str
) -> None:
    def move(network: torch.nn.Module, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(torch.nn.Module, "to", move)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2e9, 24e9))
    with pytest.raises(LearnerError) as raised:
        load._load(base, dtype, torch.device("cuda"), change(FAST, dtype=dtype))
    text = str(raised.value)
    assert (
        f"The learner cannot load {base}: 2.0 of 24.0 GB are free on cuda. Its weights take 0.0 GB in {dtype}." in text
    )
    assert advice in text
    assert text.endswith("`cotune doctor` forecasts the memory of a run.")


def test_a_model_that_the_machine_has_no_memory_for_is_not_read(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would kill the process in the middle."""
    needed = load.weight_bytes(base, "float32")
    assert needed == 2 * load.weight_bytes(base, "bfloat16") > 0
    monkeypatch.setattr(load, "machine_memory", lambda: (needed - 1, 2 * needed))
    with pytest.raises(LearnerError, match=r"are free on cpu\. Its weights take .* GB in float32"):
        load._load(base, "float32", torch.device("cpu"), FAST)
    monkeypatch.setattr(load, "machine_memory", lambda: (needed, 2 * needed))
    load._load(base, "float32", torch.device("cpu"), FAST)
