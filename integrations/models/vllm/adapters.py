"""Adapters as PEFT folders that vLLM loads, in shared memory if it has enough space and otherwise on disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from cotune.errors import SamplerError
from cotune.file_names import file_name
from cotune.integrations.cluster.temp_dir import owned_folder, remove_together
from cotune.integrations.models.folder import folder as model_folder
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Weights

SHARED_MEMORY = Path("/dev/shm")
FOLDERS = "cotune-weights"
"""How the names of folders with weights begin."""
_FILES_OF_VLLM = ("/dev/shm/psm_", "/dev/shm/sem.mp-")


class SharedFolders:
    """Folders that both the publisher and the engine can read. They are removed by `close`, or after this process was
    killed.

    They are made in `parent`. Its default is /dev/shm if twice the required space is free there, and otherwise the
    temporary folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._own_folders: dict[Path, Path] = {}
        self._owned = ExitStack()

    def make(self, name: str, size: int) -> Path:
        """Make a new folder for `size` bytes."""
        parent = self._parent
        if parent is None:
            fits_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size
            parent = SHARED_MEMORY if fits_memory else Path(tempfile.gettempdir())
        folder = self._folder_in(parent) / file_name(name)
        folder.mkdir()
        return folder

    def adopt(self, files: Sequence[Path]) -> None:
        """Also remove these files in `close`, or after this process was killed."""
        if files:
            remove_together(self._folder_in(self._parent or SHARED_MEMORY), files)

    def _folder_in(self, parent: Path) -> Path:
        """This object's own folder in `parent`, made at its first use."""
        if parent not in self._own_folders:
            self._own_folders[parent] = self._owned.enter_context(owned_folder(parent, FOLDERS))
        return self._own_folders[parent]

    def remove(self, name: str) -> None:
        for parent in self._own_folders.values():
            shutil.rmtree(parent / file_name(name), ignore_errors=True)

    def close(self) -> None:
        self._owned.close()
        self._own_folders.clear()


def write_shared(folders: SharedFolders, name: str, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> Path:
    """Write an adapter in PEFT's format, or full weights, into a new folder. Raises SamplerError if the disk or the
    shared memory is full."""
    folder = folders.make(name, sum(array.nbytes for array in weights.values()))
    try:
        if lora is None:
            model_folder.write_tensors(folder, weights)
        else:
            # PEFT wants the names of modules, such as q_proj. It is the part before `lora_A` or `lora_B` in the name of
            # a weight: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
            modules = set()
            for weight_name in weights:
                module_path, _, _ = weight_name.partition(".lora_")
                modules.add(module_path.rpartition(".")[2])
            spec = msgspec.structs.replace(lora, targets=tuple(modules))
            model_folder.write_adapter(folder, weights, spec, base="")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise SamplerError(f"{policy} cannot be written to {folder}: {error}.", "Free space there.") from error
    return folder


def read_weights(folder: Path) -> Weights:
    """Read the weights in a folder as the engine reads them: arrays by name."""
    from safetensors.numpy import load_file

    return load_file(folder / model_folder.ADAPTER_FILE)


def left_in_shared_memory() -> list[Path]:
    """Files in shared memory that vLLM's processes have open. They remain if vLLM is killed."""
    import psutil

    files = set()
    for process in psutil.Process().children(recursive=True):
        try:
            files |= {Path(m.path) for m in process.memory_maps() if m.path.startswith(_FILES_OF_VLLM)}
        except psutil.Error:
            continue  # it has ended, or may not be read
    return sorted(files)
