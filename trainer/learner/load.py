"""Loads the models of a run's trained policies: one PEFT model per base for all its adapters, a model per `full`."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Container, Mapping
from typing import Any

import torch

from cotune.algorithms.recipes import LossSpec
from cotune.config.learner import LearnerSettings
from cotune.errors import ConfigError, LearnerError
from cotune.integrations.models.devices import usual_device
from cotune.integrations.models.folder.folder import (
    count_parameters,
    errors_of_model,
    loading_options,
    loading_weights,
    locate_model,
)
from cotune.integrations.models.folder.kinds import auto_class, beside_language, language_prefix
from cotune.integrations.models.memory import machine_memory
from cotune.records.policies import ALL_LINEAR, Policies, PolicySpec
from cotune.trainer.config.learner import PolicyTraining
from cotune.trainer.learner.logprob_model import LogprobModel
from cotune.trainer.learner.memory.optimizer import quantization
from cotune.trainer.learner.memory.pass_size import is_out_of_memory
from cotune.trainer.learner.policy_model import PolicyModel

log = logging.getLogger(__name__)

LARGE = 1000.0
"""The largest logit in the check of the output embedding: far above every cap of known models."""
SEED_STRIDE = 7919
"""Sets the seeds of a run's policies so far apart that neighbouring seeds of two runs share none."""


def open_policy_models(
    model: str,
    policies: Policies,
    settings: LearnerSettings,
    *,
    reference: Container[str],
    seed: int = 0,
    empty: bool = False,
    device_name: str | None = None,
) -> dict[str, PolicyModel]:
    """Load the models of the trained policies, by name. Frozen and provider policies are left out.

    They are on the learner's device, or on `device_name`. With `empty` they have all modules but no weights: their
    tensors are on torch's meta device, and take no memory. A `full` model in `reference` keeps a frozen copy; an
    adapter's reference is its base. The initial weights of a policy's adapter depend only on `seed` and on its number
    among the trained policies. Raises ConfigError for a model that cannot be trained this way.
    """
    device = torch.device("meta") if empty else _torch_device(device_name or settings.device)
    trained = [spec for spec in policies.specs.values() if spec.trained]
    models: dict[str, PolicyModel] = {}
    policy_of_base: dict[str, PolicyModel] = {}  # a policy with an adapter, by the path of its base
    with torch.random.fork_rng(devices=[]):
        for index, spec in enumerate(trained):
            torch.manual_seed(seed + SEED_STRIDE * index)
            path = spec.model or model
            if spec.kind == "full":
                has_reference = spec.name in reference
                models[spec.name] = _open_full(spec, index, path, device, settings, has_reference=has_reference)
            else:
                # Adapters of one base share its network.
                policy = _open_adapter(spec, index, path, device, settings, base_user=policy_of_base.get(path))
                policy_of_base[path] = policy
                models[spec.name] = policy
    if not models:
        kinds = {name: spec.kind for name, spec in policies.specs.items()}
        raise ConfigError("policies", kinds, "has nothing to train", "Add a policy of kind lora or full.")
    if not empty:
        for network in {id(policy.network): policy.network for policy in models.values()}.values():
            _check_head(network)
    if settings.shared_prompts:
        for architecture in sorted({type(p.network).__name__ for p in models.values() if not p.logprob_model.shares}):
            reason = "not every layer is full attention, or it sees images"
            log.warning("%s: %s. Common beginnings of rows are computed for each row.", architecture, reason)
    return models


def _open_full(
    spec: PolicySpec, index: int, path: str, device: torch.device, settings: LearnerSettings, *, has_reference: bool
) -> PolicyModel:
    """Load the network of a `full` policy, and a frozen copy of it if its loss needs the untrained policy."""
    network = LogprobModel(_freeze_vision(_load(path, "float32", device, settings)), settings)
    frozen_copy: LogprobModel | None = None
    if has_reference:
        frozen_network = _load(path, "float32", device, settings).requires_grad_(False)
        frozen_copy = LogprobModel(frozen_network, settings)
    return PolicyModel(spec, index, network, frozen_copy=frozen_copy)


def _open_adapter(
    spec: PolicySpec,
    index: int,
    path: str,
    device: torch.device,
    settings: LearnerSettings,
    *,
    base_user: PolicyModel | None,
) -> PolicyModel:
    """Add the adapter of a `lora` policy to its base model at `path`.

    `base_user` is a policy that uses the same base, if one is open already: both then share the network. Without it,
    the base is loaded.
    """
    adapter = f"policy{index}"
    if base_user is not None:
        with _built_on(device):
            base_user.peft.add_adapter(adapter, _lora_config(spec, base_user.network))
        return PolicyModel(spec, index, base_user.logprob_model, peft=base_user.peft, adapter=adapter)
    base = _load(path, settings.precision, device, settings)
    with _built_on(device):
        peft = add_adapter(base, spec, adapter)
    return PolicyModel(spec, index, LogprobModel(peft.get_base_model(), settings), peft=peft, adapter=adapter)


def needing_untrained(policies: Policies, loss: LossSpec, own: Mapping[str, PolicyTraining]) -> list[str]:
    """Return the policies whose loss needs the log-probabilities of the untrained policy. `loss` is the loss of all
    policies that are not in `own`."""
    losses = {name: own[name].loss if name in own else loss for name in policies.trained}
    return [name for name, policy_loss in losses.items() if policy_loss.needs_untrained]


def load_frozen(model: str, settings: LearnerSettings) -> LogprobModel:
    """Load a model that is not trained, in the learner's precision. Raises ConfigError, also if its logits are not just
    its output embedding times the last hidden state."""
    network = _load(model, settings.precision, _torch_device(settings.device), settings)
    _check_head(network)
    return LogprobModel(network.requires_grad_(False), settings)


def _load(path: str, dtype: str, device: torch.device, settings: LearnerSettings) -> Any:
    """Load the network at `path` for evaluation onto `device`; on the meta device it has shapes and no weights. Raises
    ConfigError if it does not fit into memory."""
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    quantized = quantization(settings)  # empty for weights of 16 bits and more
    allow_tf32(device)
    try:
        with errors_of_model(path):
            config = AutoConfig.from_pretrained(path, **loading_options())
            kind = auto_class(config)
            if device.type == "meta":
                with device:
                    return kind.from_config(config, dtype=getattr(torch, dtype), **loading_options()).eval()
            # A system that runs out of memory kills the process instead of refusing the memory.
            free, _ = machine_memory()
            if not quantized and weight_bytes(path, dtype) > free:
                raise _does_not_fit(path, dtype, torch.device("cpu"), settings)
            network = kind.from_pretrained(path, dtype=getattr(torch, dtype), **loading_weights(), **quantized)
        if not quantized:  # quantized weights are loaded onto the device
            network = network.to(device)
        return network.eval()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _does_not_fit(path, dtype, device, settings) from error


def _built_on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context that makes modules without weights if `device` is the meta device."""
    return device if device.type == "meta" else contextlib.nullcontext()


def weight_bytes(path: str, dtype: str) -> int:
    """Return the bytes of a model's weights. 0 if they are not in safetensors files."""
    itemsize: int = getattr(torch, dtype).itemsize
    return count_parameters(locate_model(path)) * itemsize


def _does_not_fit(path: str, dtype: str, device: torch.device, settings: LearnerSettings) -> LearnerError:
    """Return the error for a model whose weights do not fit into memory."""
    size = ""
    if settings.quantize == "none":
        size = f" Its weights take {weight_bytes(path, dtype) / 1e9:.1f} GB in {dtype}."
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else machine_memory()
    remedies = []
    if device.type == "cuda":
        if dtype == "float32" and settings.precision == "float32":
            remedies.append('learner.dtype = "auto", which halves frozen weights on a GPU that has bfloat16')
        if settings.quantize == "none":
            remedies.append('learner.quantize = "4bit" for adapters')
        remedies.append("less memory for the engine (engine_args.gpu_memory_utilization)")
    remedies.append("a smaller model")
    return LearnerError(
        f"The learner cannot load {path}: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free on {device}.{size}",
        f"Use {', or '.join(remedies)}. `cotune doctor` forecasts the memory of a run.",
    )


def allow_tf32(device: torch.device) -> None:
    """Let a process with a GPU multiply float32 in TF32, which rounds operands to 11 significant bits: several times
    faster, and 8 times as exact as bfloat16."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def _freeze_vision(network: Any) -> Any:
    """Freeze all weights of a network that sees images, except its language model and its output embedding. Other
    networks do not change. Returns the network."""
    prefix = language_prefix(network)
    if prefix:
        head = {id(parameter) for parameter in network.get_output_embeddings().parameters()}
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name.startswith(prefix) or id(parameter) in head)
    return network


def _lora_config(spec: PolicySpec, network: Any) -> Any:
    """Return PEFT's configuration of a policy's adapter. Raises ConfigError for targets that are not layers of the
    network, and for embeddings."""
    from peft import LoraConfig

    lora = spec.lora
    if "lm_head" in lora.targets:
        raise ConfigError(
            "lora.targets", lora.targets, "names the output embedding, which stays as it is", "Remove lm_head."
        )
    embedding = network.get_input_embeddings()
    target_layers = {target.rpartition(".")[2] for target in lora.targets}
    for name, module in network.named_modules():
        layer = name.rpartition(".")[2]
        if module is embedding and layer in target_layers:
            fault = f"of policy {spec.name!r} names the input embedding, which stays as it is"
            raise ConfigError("lora.targets", lora.targets, fault, f"Remove {layer}.")

    names = [name for name, _ in network.named_modules()]
    missing = [t for t in lora.targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    # The default targets name layers of several architectures. A network has only some of them.
    uses_default = lora.targets == ALL_LINEAR
    if missing and (not uses_default or len(missing) == len(lora.targets)):
        fault = f"of policy {spec.name!r} are not layers of its base, {network.config.name_or_path}"
        remedy = f"Choose from {', '.join(_linear_layer_names(network))}."
        raise ConfigError("lora.targets", ", ".join(missing), fault, remedy)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        exclude_modules=beside_language(network),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def _linear_layer_names(network: Any) -> list[str]:
    """Return the last parts of the names of all linear layers, each once, without layers of adapters."""
    names: dict[str, None] = {}
    for name, module in network.named_modules():
        parts = name.split(".")
        is_of_adapter = any(part == "base_layer" or part.startswith("lora_") for part in parts)
        if type(module).__name__ in ("Linear", "Conv1D") and not is_of_adapter:
            names[parts[-1]] = None
    return list(names)


def add_adapter(network: Any, spec: PolicySpec, adapter: str) -> Any:
    """Return the network as a PEFT model with an adapter of this name. Raises ConfigError for targets that are not
    layers of the network."""
    from peft import get_peft_model

    try:
        with warnings.catch_warnings():  # peft asks for a name that transformers 5.24 has deprecated
            warnings.simplefilter("ignore", FutureWarning)
            return get_peft_model(network, _lora_config(spec, network), adapter_name=adapter)
    except ValueError as error:
        raise ConfigError("lora.targets", spec.lora.targets, f"names no linear layers of the model ({error})") from None


def _check_head(network: Any) -> None:
    """Raises ConfigError unless the logits are the output embedding times the last hidden state.

    Some models cap or scale the logits after the embedding. A cap changes small logits only slightly, so a hook
    multiplies the embedding's outputs until the largest one is LARGE, and the model's logits must then be the same.
    """
    head = network.get_output_embeddings()
    ids = torch.tensor([[0, 1]], device=head.weight.device)
    with torch.no_grad():
        states = network.base_model(input_ids=ids, use_cache=False).last_hidden_state
        expected = torch.nn.functional.linear(states, head.weight, head.bias)
        factor = LARGE / max(float(expected.abs().max()), 1e-30)
        hook = head.register_forward_hook(lambda module, inputs, output: output * factor)
        try:
            logits = network(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        # Divided by LARGE, the largest expected logit is 1, so the tolerance is a share of it.
        same = torch.allclose(logits.float() / LARGE, expected.float() / LARGE * factor, atol=1e-2, rtol=0.0)
    if not same:
        fault = "has other logits than its output embedding times the last hidden state"
        raise ConfigError("model", type(network).__name__, fault, "Use another model.")


def _torch_device(name: str) -> torch.device:
    """Return the device of the setting `device`. Raises ConfigError if this machine does not have it."""
    if name == "auto":
        name = usual_device()
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch is built without CUDA
        remedy = 'Set CUDA_VISIBLE_DEVICES to another GPU, or to "" to train on the CPU.'
        raise ConfigError("device", name, f"is not a torch device of this machine ({error})", remedy) from None
