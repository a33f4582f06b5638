"""Unpacks models in GGUF form once, into a folder that the rest of cotune can read."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from cotune.errors import ConfigError, error_line

log = logging.getLogger("cotune")


def find_gguf(model: Path) -> Path | None:
    """The GGUF file of a path, which is the file or its folder; None if there is none.

    Raises ConfigError for a folder with several GGUF files.
    """
    if model.suffix == ".gguf" and model.is_file():
        return model.resolve()
    files = sorted(model.glob("*.gguf")) if model.is_dir() else []
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4]) + (", …" if len(files) > 4 else "")
        raise ConfigError("model", str(model), f"holds several models: {names}", "Give the path of one file.")
    return files[0].resolve() if files else None


def unpack_gguf(file: Path, weights: bool = True) -> Path:
    """Folder with the model of a GGUF file: configuration, tokenizer, chat template and, with `weights`, safetensors in
    fp32.

    It is written once, to `$XDG_CACHE_HOME/cotune/models` (default `~/.cache/...`), under the file's name and SHA-256.
    Raises ConfigError if the file cannot be read, or if transformers does not support its architecture.
    """
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "cotune" / "models" / f"{file.stem}-{digest[:16]}"
    # Without weights, the folder of the whole model will do if it is there; otherwise a folder without weights is made.
    if not weights and not folder.is_dir():
        folder = folder.with_name(f"{folder.name}-tokenizer")
    if not folder.is_dir():
        log.log(logging.WARNING if weights else logging.INFO, "Unpacking %s into %s, once", file.name, folder)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder.parent) as temporary:
                _write_as_folder(file, Path(temporary) / "model", weights)
                (Path(temporary) / "model").rename(folder)
            if weights:
                size = sum(part.stat().st_size for part in folder.iterdir()) / 1e6
                log.warning("It takes %s MB there, for later runs too; you may remove it", f"{size:,.0f}")
        except OSError as error:
            # Another process may have unpacked it meanwhile.
            if not folder.is_dir():
                fault = f"cannot be unpacked into {folder.parent} ({error.strerror or error})"
                raise ConfigError(
                    "model", str(file), fault, "Free space there, or set XDG_CACHE_HOME to a folder on another disk."
                ) from error
    return folder


def public_name(model: str) -> str:
    """The name of a model without paths of this machine.

    It is the Hugging Face id of a local snapshot, the file name of an unpacked GGUF, or the name of any other folder.
    """
    path = Path(model)
    if not path.is_absolute():
        return model
    if stored := re.fullmatch(r"models--(.+?)--(.+)", path.parent.parent.name):
        return f"{stored[1]}/{stored[2]}"
    unpacked = path.parent.parts[-2:] == ("cotune", "models")
    return re.sub(r"-[0-9a-f]{16}$", ".gguf", path.name) if unpacked else path.name


def _write_as_folder(file: Path, to: Path, weights: bool) -> None:
    """Write a GGUF file as a model folder: its tokenizer, and its weights or only its configuration. Raises
    ConfigError.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # transformers has no option to turn off its progress bars for three passes over hundreds of tensors.
    modeling_gguf_pytorch_utils.tqdm = functools.partial(modeling_gguf_pytorch_utils.tqdm, disable=True)
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        AutoTokenizer.from_pretrained(**source).save_pretrained(to)
        if not weights:
            AutoConfig.from_pretrained(**source).save_pretrained(to)
            return
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except ImportError as error:
        raise ConfigError("model", str(file), f"cannot be read ({error})", "Run: pip install gguf") from None
    except Exception as error:  # the reader raises any error for a file in another format
        fault = f"is not a GGUF file of an architecture that transformers reads ({error_line(error)})"
        raise ConfigError("model", str(file), fault, "Fetch it again, or use the model's own folder.") from error
    model.config.rope_parameters = _rope_parameters(file, model.config)
    # A model from GGUF counts as quantized, although its weights are float32 now, and transformers does not save it.
    # Save a second model with the same weights.
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        savable = type(model)(type(model.config).from_dict(settings))
    savable.load_state_dict(model.state_dict(), assign=True)
    savable.tie_weights()
    savable.generation_config = model.generation_config
    savable.save_pretrained(to)


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Settings by which Llama 3.1 to 3.3 slow their positions. Their `factor` differs."""


def slowed_positions(config: Any) -> np.ndarray:
    """The factors that a GGUF file needs for a model with `rope_type` llama3: by how much the model slows each
    frequency of its positional encoding, to reach longer contexts.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    slowed_frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")  # one for each pair of a head's dimensions
    head_size = 2 * len(slowed_frequencies)
    # The usual frequencies of rotary positions: theta ** (-2i / head size).
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / head_size
    plain_frequencies = config.rope_parameters["rope_theta"] ** -exponents
    return (plain_frequencies / slowed_frequencies.numpy()).astype(np.float32)


def _rope_parameters(file: Path, config: Any) -> dict[str, Any]:
    """The `rope_parameters` of a model from a GGUF file, with the slowed positions of Llama 3.

    The file has the factors by which its frequencies are slowed, which transformers ignores. Of Llama 3's settings for
    them, only `factor` differs between models: it is the largest of the factors. Raises ConfigError for factors that
    Llama 3's settings do not give.
    """
    from gguf import GGUFReader

    plain: dict[str, Any] = config.rope_parameters
    factors = next((tensor.data for tensor in GGUFReader(file).tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is None:
        return plain
    config.rope_parameters = {**plain, **LLAMA3, "factor": float(factors.max())}
    if not np.allclose(slowed_positions(config), factors, rtol=1e-3):
        fault = "slows its positions (rope_freqs) in another way than Llama 3.1 to 3.3"
        raise ConfigError("model", str(file), fault, "Use the model's own folder.")
    return dict(config.rope_parameters)
