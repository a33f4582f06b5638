"""The files of a learner in a checkpoint. Local and FSDP learners write and read the same files.

| file | content |
|---|---|
| `learner.json` | the policies |
| `<i>.safetensors` | weights of the i-th trained policy, whole |
| `<i>.optimizer.safetensors` | its optimizer state, if one process trains |
| `<i>.optimizer/` | its optimizer state, if several processes train: each writes its part |
| `<i>.progress.safetensors` | the state of its row order, and its number of optimizer steps |
| `<i>.critic.safetensors` | its value head with the optimizer state of the head, if the recipe has a critic |

All are JSON or safetensors, so that reading a file from somebody else never runs code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from cotune.errors import RunError
from cotune.records.policies import PolicySpec
from cotune.trainer.learner.dist import ProcessGroup, copy_whole, is_sharded
from cotune.trainer.learner.policy_model import PolicyModel

MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARED = ("qmap1", "qmap2")
"""State that adamw8bit shares among all parameters. In the file each parameter has a copy."""


def write_identity(folder: Path, specs: Sequence[PolicySpec]) -> None:
    (folder / "learner.json").write_bytes(msgspec.json.encode(_policy_identity(specs)))


def check_identity(folder: Path, specs: Sequence[PolicySpec]) -> None:
    """Raise RunError if `folder` holds other policies than these, or cannot be read."""
    with errors_of_folder(folder):
        stored = msgspec.json.decode((folder / "learner.json").read_bytes())
        expected = msgspec.json.decode(msgspec.json.encode(_policy_identity(specs)))
        if stored != expected:
            raise RunError(f"{folder} holds the policies {stored}, this run trains {expected}.")


def write_weights(folder: Path, policy: PolicyModel, group: ProcessGroup) -> None:
    """Write `<i>.safetensors` on rank 0; sharded tensors are gathered one by one, on all ranks."""
    weights = policy.weights(keep=group.rank == 0)
    if group.rank == 0:
        _write(folder / f"{policy.index}.safetensors", {name: torch.from_numpy(w) for name, w in weights.items()})


def read_weights(folder: Path, policy: PolicyModel) -> None:
    """Load a policy's trained tensors from the `<i>.safetensors` of a checkpoint. Raises RunError if the file holds
    other tensors."""
    from safetensors import safe_open

    path = folder / f"{policy.index}.safetensors"
    tensors = policy.state()
    with safe_open(path, "pt") as file, torch.no_grad():
        if set(file.keys()) != tensors.keys():
            raise RunError(f"{path} holds other tensors than policy {policy.spec.name!r}.", "Use another checkpoint.")
        for name, tensor in tensors.items():
            copy_whole(tensor, file.get_tensor(name))


def write_optimizer(folder: Path, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
    parameters = policy.parameters()
    state = _optimizer_tensors(parameters, optimizer)
    if any(is_sharded(parameter) for parameter in parameters.values()):
        _write_sharded(folder / f"{policy.index}.optimizer", state)
    else:
        _write(folder / f"{policy.index}.optimizer.safetensors", state)


def read_optimizer(folder: Path, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
    """Restore moments and step counts. The file may be of a local or an FSDP learner; this learner reads its part."""
    from safetensors import safe_open

    parameters = policy.parameters()
    optimizer.state.clear()
    sharded_folder = folder / f"{policy.index}.optimizer"
    if sharded_folder.is_dir():
        _create_state(parameters, optimizer, _sharded_names(sharded_folder))
        _read_sharded(sharded_folder, _optimizer_tensors(parameters, optimizer))
        return
    with safe_open(folder / f"{policy.index}.optimizer.safetensors", "pt") as file:
        names = list(file.keys())
        # Only adamw8bit has a tensor "state1".
        if any(name.startswith("state1/") for name in names):
            _read_8bit_state(parameters, optimizer, {name: file.get_tensor(name) for name in names})
            return
        _create_state(parameters, optimizer, names)
        for name, tensor in _optimizer_tensors(parameters, optimizer).items():
            copy_whole(tensor, file.get_tensor(name))


def write_progress(folder: Path, policy: PolicyModel, order: torch.Generator, steps: int) -> None:
    _write(folder / f"{policy.index}.progress.safetensors", {"order": order.get_state(), "steps": torch.tensor(steps)})


def read_progress(folder: Path, policy: PolicyModel, order: torch.Generator) -> int:
    """Restore the state of the row order, and return the number of optimizer steps."""
    from safetensors.torch import load_file

    progress = load_file(folder / f"{policy.index}.progress.safetensors")
    order.set_state(progress["order"])
    return int(progress["steps"])


def write_critic(folder: Path, policy: PolicyModel, tensors: Mapping[str, Tensor]) -> None:
    _write(folder / f"{policy.index}.critic.safetensors", tensors)


def read_critic(folder: Path, policy: PolicyModel) -> dict[str, Tensor]:
    """Read the tensors that `write_critic` has written."""
    from safetensors.torch import load_file

    return dict(load_file(folder / f"{policy.index}.critic.safetensors"))


@contextmanager
def errors_of_folder(folder: Path) -> Iterator[None]:
    """Raise a RunError that names `folder` for any error of reading it."""
    from safetensors import SafetensorError

    broken = (OSError, LookupError, RuntimeError, ValueError, TypeError, AssertionError, SafetensorError)
    try:
        yield
    except broken as error:
        raise RunError(f"Cannot restore the learner from {folder}: {error}", "Use another checkpoint.") from error


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file. Raises OSError, also if safetensors raises an error of its own."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def _policy_identity(specs: Sequence[PolicySpec]) -> dict[str, Any]:
    """Return the policies by name, without the paths of their base models: these may have moved, and run.json has
    their digests."""
    return {spec.name: msgspec.to_builtins(msgspec.structs.replace(spec, model=None)) for spec in specs}


def _create_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, names: Iterable[str]
) -> None:
    """Create AdamW's state, with zeros, for the parameters in `names` ("kind/parameter"). It is sharded as they are."""
    for parameter_name in {name.partition("/")[2] for name in names}:
        parameter = parameters[parameter_name]
        moments = {kind: torch.zeros_like(parameter.detach()) for kind in MOMENTS}
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = {"step": step, **moments}


def _read_8bit_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]
) -> None:
    """Restore the state of adamw8bit from its tensors, by "kind/parameter". Its step is a number, and no tensor."""
    for name, tensor in state.items():
        kind, _, parameter_name = name.partition("/")
        parameter = parameters[parameter_name]
        optimizer.state[parameter][kind] = int(tensor) if kind == "step" else tensor.to(parameter.device)


def _optimizer_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of the optimizer's state by "kind/parameter". They are not copied, except for kinds that
    several parameters share."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            # safetensors refuses to write one tensor under several names.
            tensors[f"{kind}/{name}"] = value.clone() if kind in _SHARED else torch.as_tensor(value)
    return tensors


def _write_sharded(folder: Path, state: dict[str, Tensor]) -> None:
    """Write this rank's part into `folder`; called by all ranks at once. Files are synced to disk. Raises OSError.

    It uses Hugging Face's form: PyTorch's distributed checkpoint contains a pickle, which runs code when it is read.
    """
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(state, storage_writer=writer)
    except dcp.api.CheckpointException as error:
        raise OSError(f"{folder}: {_error_causes(error)}") from error


def _sharded_names(folder: Path) -> set[str]:
    """Return the names of the tensors that `_write_sharded` has written into `folder`."""
    import torch.distributed.checkpoint as dcp

    return set(dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def _read_sharded(folder: Path, state: dict[str, Tensor]) -> None:
    """Fill the tensors of `state`, whole or sharded, from `folder`, which any number of ranks may have written.

    Raises RunError if values are missing in the folder.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    for name, tensor in state.items():
        stored_values = 0
        if name in stored:
            stored_values = sum(chunk.sizes.numel() for chunk in stored[name].chunks)
        if stored_values != tensor.numel():
            raise RunError(
                f"The optimizer state in {folder} is not whole: {stored_values} of {tensor.numel()} values of {name}.",
                "Use another checkpoint.",
            )
    try:
        dcp.load(state, storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    except dcp.api.CheckpointException as error:
        raise RunError(
            f"Cannot read the optimizer state in {folder}: {_error_causes(error)}", "Use another checkpoint."
        ) from error


def _error_causes(error: Any) -> str:
    """Return the errors of all ranks in one line. `error` is a CheckpointException."""
    return "; ".join(str(failure[0]) for failure in error.failures.values())
