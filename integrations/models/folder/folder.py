"""Finds, reads and writes models and adapters as folders in Hugging Face form."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cotune.errors import ConfigError, error_line
from cotune.integrations.models.folder.gguf import find_gguf, unpack_gguf
from cotune.integrations.models.folder.kinds import auto_class, sees_images
from cotune.near_names import did_you_mean, near_names
from cotune.records.policies import LoraSpec
from cotune.sampling.protocol import Weights

TRUST = "COTUNE_TRUST_REMOTE_CODE"
"""Environment variable: "1" allows the code in a model folder to run. That code may do anything."""
TRANSFORMERS_LOCK = threading.RLock()
"""Held while transformers is imported and while it loads a model. A second thread may find a half-imported module, and
to load a model changes settings of the whole process. Reentrant: to load a model imports more of it."""
_NEEDED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def locate_model(model: str | Path, weights: bool = True) -> Path:
    """The folder of a model: the path itself, the folder of an unpacked GGUF file, or the local snapshot of a Hugging
    Face id, which is downloaded if it is missing. Without `weights`, the weights of a GGUF file are not unpacked.

    Raises ConfigError if the model does not exist, if its weights are no safetensors, or if it needs its own code and
    that is not allowed.
    """
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return _check_folder(path.resolve())
    if (path / "run.json").is_file():
        raise _no_model(model, "it is a run folder", f"Export it first: cotune export {model} --out adapters/")
    if (path / "roles.json").is_file():
        raise _no_model(model, "it is an export", "Use the base model that it was trained on, or cotune serve.")
    if (path / "adapter_config.json").is_file():
        remedy = "Use its base model."
        if (path.parent / "roles.json").is_file():
            remedy = f"Use the export, {path.parent}."
        raise _no_model(model, "it is an adapter", remedy)
    gguf_file = find_gguf(path)
    if gguf_file is not None:
        return unpack_gguf(gguf_file, weights)
    if path.exists():
        raise _no_model(model, "it has no config.json", "Correct the path.")
    if not _may_be_id(str(model)):
        remedy = f"{_similar_folder(path)} An id has the form owner/name.".strip()
        raise _no_model(model, "there is no such folder", remedy)

    # There is nothing under this path, so it is the id of a model on the Hub.
    from huggingface_hub import snapshot_download

    try:
        return _check_folder(Path(snapshot_download(str(model), allow_patterns=_NEEDED)))
    except (OSError, ValueError) as error:
        remedy = "Correct the id, or fetch the model on a machine with a network (`hf download`) and use its folder."
        fault = f"is not a model folder, nor a Hugging Face id that can be fetched ({error_line(error)})"
        raise ConfigError("model", str(model), fault, remedy) from None


def locate_base(model: str | Path, of: str = "") -> Path:
    """`locate_model` for a base of a run or an export, which may have been moved since.

    `of` names the policy whose base it is; empty for the run's own base.
    """
    try:
        return locate_model(model)
    except ConfigError as error:
        if of:
            raise of_policy(error, of) from None
        remedy = f"{error.remedy} If it was moved, give its place with --model."
        raise ConfigError("model", error.value, error.fault, remedy) from None


def of_policy(error: ConfigError, policy: str) -> ConfigError:
    """An error of a base model, as the error of the [[policy]] that has it."""
    fault = f"(the base of policy {policy!r}) {error.fault}"
    return ConfigError("policy.model", error.value, fault, error.remedy.replace("--model", "its `model`"))


def loading_options() -> dict[str, Any]:
    """Arguments of every `from_pretrained`. With them, transformers never asks a question on the terminal."""
    return {"trust_remote_code": os.environ.get(TRUST) == "1"}


def loading_weights() -> dict[str, Any]:
    """Arguments to load a model with its weights, which are never read from a pickle."""
    return {**loading_options(), "use_safetensors": True}


@contextlib.contextmanager
def errors_of_model(model: str | Path) -> Iterator[None]:
    """Turn any error of reading a model's files into a ConfigError that names the model."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        fault = f"cannot be read as a model ({error_line(error)})"
        raise ConfigError("model", str(model), fault, "Check --model.") from error


def _check_folder(folder: Path) -> Path:
    """The folder, if its weights can be read without running foreign code. Otherwise raises ConfigError."""
    bins = sorted(path.name for path in folder.glob("*.bin"))
    if bins and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            "model",
            str(folder),
            f"has no weights in *.safetensors ({bins[0]} is a pickle, which may run code when read)",
            "If you trust it, convert it: model.save_pretrained(FOLDER) writes safetensors.",
        )
    code = None if loading_options()["trust_remote_code"] else _own_code(folder)
    if code:
        raise ConfigError(
            "model",
            str(folder),
            f"needs code of its own, as transformers does not know it ({code})",
            "Read that code, then allow it: set COTUNE_TRUST_REMOTE_CODE=1 in the environment.",
        )
    return folder


def _own_code(folder: Path) -> str | None:
    """The code (`auto_map`) that a model or its tokenizer needs; None if transformers itself can load both."""
    config = _read_settings(folder / "config.json")
    tokenizer = _read_settings(folder / "tokenizer_config.json")
    if not config.get("auto_map") and not tokenizer.get("auto_map"):
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING_NAMES:
        return f"auto_map of config.json: {config['auto_map']}"
    has_class = tokenizer_class_from_name(str(tokenizer.get("tokenizer_class"))) is not None
    if "AutoTokenizer" in (tokenizer.get("auto_map") or ()) and not has_class:
        return f"auto_map of tokenizer_config.json: {tokenizer['auto_map']}"
    return None


def _read_settings(file: Path) -> dict[str, Any]:
    """The content of a JSON file of a model; empty without the file. Raises ConfigError for a malformed one."""
    try:
        settings = json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        fault = f"has a {file.name} that is not a JSON object"
        raise ConfigError("model", str(file.parent), fault, "Fetch it again.")
    return settings


def _no_model(model: str | Path, why: str, remedy: str) -> ConfigError:
    return ConfigError("model", str(model), f"is not a model folder or GGUF file: {why}", remedy)


def _may_be_id(model: str) -> bool:
    """Whether a name that is no folder can be a Hugging Face id: owner/name, without a local folder `owner`."""
    owner, _, name = model.partition("/")
    return bool(owner and name) and "/" not in name and owner[0] not in ".~" and not Path(owner).is_dir()


def _similar_folder(path: Path) -> str:
    """The folder that may have been meant."""
    try:
        folders = [entry.name for entry in path.absolute().parent.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    return did_you_mean([str(path.with_name(near)) for near in near_names(path.name, folders, most=1)])


def read_parameters(folder: Path) -> Weights:
    """All parameters of a model folder as fp32 arrays under their names in the model."""
    return {name: tensor.detach().numpy() for name, tensor in _load_float32(folder).named_parameters()}


def write_model(base: Path, weights: Weights, to: Path) -> None:
    """Write `base` with these parameters, in fp32, with its tokenizer and chat template.

    Raises ConfigError when the weights are not all the parameters of the base.
    """
    import torch

    model = _load_float32(base)
    parameters = dict(model.named_parameters())
    names_in_one_only = sorted(parameters.keys() ^ weights.keys())
    if names_in_one_only:
        raise ConfigError(
            "weights",
            names_in_one_only[0],
            f"is missing in the weights or in {base}",
            "Pass the right base model.",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(weights[name], dtype=np.float32)))
    _save(model, base, to)


def write_merged(base: Path, weights: Weights, lora: LoraSpec, to: Path) -> Weights:
    """Write `base` with an adapter added to its weights, W + (alpha / rank) * B A, and return its parameters.

    Raises ConfigError for an adapter of another model.
    """
    import torch

    model = _load_float32(base)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, lora_a in weights.items():
            if not name.endswith(_LORA_A):
                continue
            layer = name.removesuffix(_LORA_A)
            target = layer.removeprefix("base_model.model.") + ".weight"
            if target not in parameters:
                raise ConfigError("weights", name, f"is not of an adapter of {base}", "Pass the right base model.")
            lora_b = weights[f"{layer}.lora_B.weight"]
            delta = lora.scale * (np.asarray(lora_b, np.float32) @ np.asarray(lora_a, np.float32))
            parameters[target].add_(torch.from_numpy(delta))
    _save(model, base, to)
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


def context_length(model: str | Path) -> int:
    """Most tokens that a model takes with its reply. Raises ConfigError."""
    from transformers import AutoConfig

    with errors_of_model(model):
        config = AutoConfig.from_pretrained(model, **loading_options()).get_text_config()
    return int(getattr(config, "max_position_embeddings", 1 << 20))


def tokenizer_of(model: str | Path) -> Any:
    """The tokenizer of a model folder or Hugging Face id. Raises ConfigError."""
    from transformers import AutoTokenizer

    with errors_of_model(model):
        return AutoTokenizer.from_pretrained(model, **loading_options())


def read_tokenizer(model: str | Path) -> Any:
    """The tokenizer of a model, or None for a folder that has only weights. Raises ConfigError."""
    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        return None
    return tokenizer_of(model)


def count_token_ids(tokenizer: Any, logits: int) -> int:
    """Number of token ids that a model with so many logits may draw: from 0 to the tokenizer's last.

    Many vocabularies are padded to a round number. Qwen3 has 151,936 logits and 151,669 tokens; the other ids decode to
    nothing. Samplers and learners leave them out of the distribution. Without a tokenizer (None) all ids count.
    """
    if tokenizer is None:
        return logits
    return min(logits, max(tokenizer.get_vocab().values()) + 1)


def count_parameters(folder: Path) -> int:
    """Number of values in the weights of a model folder, by the headers of the files. Raises ConfigError."""
    from safetensors import safe_open

    count = 0
    with errors_of_model(folder):
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "np") as tensors:
                count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


def folder_sees_images(folder: Path) -> bool:
    """Whether the model in a folder reads images in addition to text. Raises ConfigError."""
    from transformers import AutoConfig

    with errors_of_model(folder):
        return sees_images(AutoConfig.from_pretrained(folder, **loading_options()))


def _load_float32(base: Path) -> Any:
    """Load a base model in float32, to merge adapters in full precision."""
    import torch
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with errors_of_model(base):
        kind = auto_class(AutoConfig.from_pretrained(base, **loading_options()))
        return kind.from_pretrained(base, dtype=torch.float32, **loading_weights())


def _save(model: Any, base: Path, to: Path) -> None:
    """Save a model with the tokenizer and the processor files of its base."""
    from transformers import AutoTokenizer

    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(base, **loading_options()).save_pretrained(to)
    for name in _PROCESSOR:
        if (base / name).is_file():
            shutil.copyfile(base / name, to / name)


_PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files with the settings of image processing, for a model that sees images."""


_LORA_A = ".lora_A.weight"


ADAPTER_FILE = "adapter_model.safetensors"


def write_adapter(folder: Path, weights: Weights, lora: LoraSpec, base: str) -> None:
    """Write an adapter over the model `base` into an existing folder, in fp32."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
    write_tensors(folder, {name: np.asarray(array, np.float32) for name, array in weights.items()})


def write_tensors(folder: Path, weights: Weights) -> None:
    """Write weights without a configuration, in their precision."""
    from safetensors.numpy import save_file

    tensors = {name: np.ascontiguousarray(array) for name, array in weights.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
