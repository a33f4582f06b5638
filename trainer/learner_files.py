"""What a learner writes into a checkpoint. Local and FSDP learners write and read the same files.

| file | what it holds |
|---|---|
| `learner.json` | the policies |
| `<i>.safetensors` | weights of the i-th trained policy, whole |
| `<i>.optimizer.pt` or `<i>.optimizer/` | its optimizer state: of a learner of one process, or sharded |
| `<i>.rng.pt` | the state of its row order, and how many steps it has made |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from cotune.errors import RunError
from cotune.policies import PolicySpec
from cotune.trainer.policy_model import PolicyModel
from cotune.trainer.ranks import Ranks, fill, is_sharded, whole

MOMENTS = ("exp_avg", "exp_avg_sq")


def write_identity(folder: Path, specs: Sequence[PolicySpec]) -> None:
    (folder / "learner.json").write_bytes(msgspec.json.encode(_identity(specs)))


def check_identity(folder: Path, specs: Sequence[PolicySpec]) -> None:
    """Raises RunError when `folder` holds other policies than these, or nothing readable."""
    with restoring(folder):
        found = msgspec.json.decode((folder / "learner.json").read_bytes())
        if found != (own := msgspec.json.decode(msgspec.json.encode(_identity(specs)))):
            raise RunError(f"{folder} holds the policies {found}, this run trains {own}.")


def write_weights(folder: Path, policy: PolicyModel, ranks: Ranks) -> None:
    """`<i>.safetensors`, by the first rank; each tensor is gathered in turn."""
    from safetensors.torch import save_file

    state = {}
    for name, tensor in policy.state().items():
        gathered = whole(tensor)
        if ranks.rank == 0:
            state[name] = gathered.contiguous().cpu()
    if ranks.rank == 0:
        save_file(state, folder / f"{policy.index}.safetensors")


def read_weights(folder: Path, policy: PolicyModel) -> None:
    from safetensors import safe_open

    path = folder / f"{policy.index}.safetensors"
    with safe_open(path, "pt") as file:
        if set(file.keys()) != policy.state().keys():
            raise RunError(f"{path} holds other tensors than policy {policy.spec.name!r}.", "Use another checkpoint.")
        for name in file.keys():  # noqa: SIM118 - no mapping
            policy.load({name: file.get_tensor(name)})


def write_optimizer(folder: Path, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
    parameters = policy.parameters()
    if any(is_sharded(parameter) for parameter in parameters.values()):
        from cotune.trainer.fsdp_checkpoint import write_sharded

        write_sharded(folder / f"{policy.index}.optimizer", _state(parameters, optimizer))
    else:
        torch.save(optimizer.state_dict(), folder / f"{policy.index}.optimizer.pt")


def read_optimizer(folder: Path, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
    """Restore moments and step counts, written by whichever learner, into this one's parts of the tensors."""
    parameters = policy.parameters()
    optimizer.state.clear()
    if (folder / f"{policy.index}.optimizer").is_dir():
        from cotune.trainer.fsdp_checkpoint import read_sharded, sharded_names

        path = folder / f"{policy.index}.optimizer"
        known = {name.partition("/")[2] for name in sharded_names(path)}
        for name in known:
            optimizer.state[parameters[name]] = _blank(parameters[name])
        read_sharded(path, _state(parameters, optimizer))
        return
    saved = torch.load(folder / f"{policy.index}.optimizer.pt", map_location="cpu", mmap=True, weights_only=True)
    tensors = list(parameters.values())
    for index, found in saved["state"].items():
        state = optimizer.state[tensors[index]] = _blank(tensors[index])
        for name, tensor in state.items():
            fill(tensor, found[name])


def write_progress(folder: Path, policy: PolicyModel, order: torch.Generator, steps: int) -> None:
    torch.save({"order": order.get_state(), "steps": steps}, folder / f"{policy.index}.rng.pt")


def read_progress(folder: Path, policy: PolicyModel, order: torch.Generator) -> int:
    """Restore the order of rows; returns the steps made."""
    found = torch.load(folder / f"{policy.index}.rng.pt", weights_only=True)
    order.set_state(found["order"])
    return found["steps"]


@contextmanager
def restoring(folder: Path) -> Iterator[None]:
    """Whatever breaks while `folder` is read becomes a RunError that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, KeyError, IndexError, RuntimeError, ValueError, msgspec.DecodeError, SafetensorError) as error:
        raise RunError(f"Cannot restore the learner from {folder}: {error}", "Use another checkpoint.") from error


def _identity(specs: Sequence[PolicySpec]) -> dict[str, Any]:
    return {spec.name: msgspec.to_builtins(spec) for spec in specs}


def _blank(parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of one tensor, sharded like it."""
    moments = {name: torch.zeros_like(parameter.detach()) for name in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}


def _state(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as "kind/parameter"."""
    return {
        f"{kind}/{name}": tensor
        for name, parameter in parameters.items()
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }
