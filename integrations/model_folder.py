"""Model folders in Hugging Face form: found, read as weights, written with new weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cotune.errors import ConfigError
from cotune.sampler import Weights

_NEEDED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def locate_model(model: str | Path) -> Path:
    """Folder of a model: the path itself, or the local snapshot of a Hugging Face id (fetched where it is missing).

    Raises ConfigError when neither exists.
    """
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path.resolve()
    if path.exists() or str(model).startswith(("/", ".", "~")) or str(model).count("/") > 1:
        raise ConfigError("model", str(model), "a model folder with a config.json", "Correct the path.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=_NEEDED))
    except (OSError, ValueError) as error:
        remedy = "Correct the id, or fetch the model where there is a network (`hf download`) and name its folder."
        allowed = f"a model folder, or a Hugging Face id that can be fetched ({_cause(error)})"
        raise ConfigError("model", str(model), allowed, remedy) from None


def _cause(error: Exception) -> str:
    first = str(error).partition("\n")[0].strip().rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def read_parameters(folder: Path) -> Weights:
    """All parameters of a model folder as fp32 arrays under their names in the model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def write_model(base: Path, weights: Weights, to: Path) -> None:
    """Write `base` with these parameters, in fp32, with its tokenizer and chat template.

    Raises ConfigError when the weights are not all the parameters of the base.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    if odd := sorted(parameters.keys() ^ weights.keys()):
        raise ConfigError(
            "weights", odd[0], f"the {len(parameters)} parameters of {base}", "Name the right base model."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(weights[name], dtype=np.float32)))
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(base).save_pretrained(to)
