"""Checks that each trained tensor is in exactly one optimizer, gets a gradient, and changes in its first step, or that
the step is too small for its precision, which is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cotune.errors import LearnerError
from cotune.trainer.learner.dist import ProcessGroup, SingleProcess, local_shard

BFLOAT16 = 2.0**16
"""A unit in the last place of bfloat16, as a multiple of a unit in the last place of float32."""

SURE = 2.0
"""A step of more than this number of half units moves its entry, even if the optimizer rounds on the way."""

CHUNK = 1 << 22
"""Entries looked at in one go: bounds the memory."""


def check_optimizers(
    trainable: Mapping[str, Mapping[str, nn.Parameter]], optimizers: Mapping[str, torch.optim.Optimizer]
) -> None:
    """Raises LearnerError unless each policy's tensors are in its optimizer, and in no other one.

    `trainable` gives the tensors of each policy by name.
    """
    held = {
        policy: Counter(id(p) for group in optimizer.param_groups for p in group["params"])
        for policy, optimizer in optimizers.items()
    }
    for policy, parameters in trainable.items():
        for name, parameter in parameters.items():
            holders = [owner for owner, ids in held.items() for _ in range(ids[id(parameter)])]
            if holders != [policy]:
                raise LearnerError(
                    f"Tensor {name} of policy {policy!r} is in the optimizers of {holders or 'no policy'}.",
                    "Build one optimizer per policy, after its adapter has been added, over its own tensors only.",
                )


class GradientChecks:
    """Checks a policy's tensors until each has changed once (`pending` holds those that have not); costs nothing after.

    Of each tensor one entry is compared before and after the step: the one, on whichever rank, whose step is largest in
    units in the last place. Where even that is under half a unit, float32 rounds the whole step away, as it may early
    in a warm-up: the tensor is in `lost` and checked again at the next step. B of a LoRA starts at zero, so A has no
    gradient before the second step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        group: ProcessGroup | None = None,
        *,
        dtype: str = "float32",
    ) -> None:
        """Check the tensors in `parameters`, by name, which `optimizer` steps. `dtype` is the precision of passes: with
        "bfloat16", steps too small for it are reported too."""
        self.pending = dict(parameters)
        self.lost: dict[str, float] = {}
        """By tensor that its last step did not change: the largest step, in halves of a unit in the last place."""
        self.steps = 0
        self._optimizer = optimizer
        self._dtype = dtype
        self._group = group or SingleProcess()
        self._before: dict[str, tuple[float, tuple[int, float] | None]] = {}
        self._counts = torch.zeros(3, dtype=torch.float64)
        self._found: dict[str, float] = {}
        self._reported: set[str] = set()

    def before_step(self) -> None:
        """Note the value of one entry of each tensor that has a gradient, and how far its step will reach."""
        names = list(self.pending)
        reaches = [_reach(self.pending[name], self._optimizer) for name in names]
        largest = self._group.max(torch.tensor([reach.largest for reach in reaches])).tolist()
        counts = torch.tensor([reach.counts for reach in reaches], dtype=torch.float64).reshape(-1, 3)
        self._counts = self._counts + self._group.sum(counts.sum(0))
        self._before = {}
        for name, reach, peak in zip(names, reaches, largest, strict=True):
            if peak > 0:
                held = reach.largest == peak
                value = (reach.entry, _entry_value(self.pending[name], reach.entry)) if held else None
                self._before[name] = (peak, value)

    def after_step(self) -> None:
        """Compare the entries. Raises LearnerError when one is unchanged though its step does not round away."""
        absent = all(parameter.grad is None for parameter in self.pending.values())
        self.steps += bool(self._before) or absent
        unchanged = [
            value is not None and _entry_value(self.pending[name], value[0]) == value[1]
            for name, (_, value) in self._before.items()
        ]
        unmoved = self._group.max(torch.tensor(unchanged, dtype=torch.float32)).tolist()
        for (name, (reach, _)), still in zip(self._before.items(), unmoved, strict=True):
            if still and reach > SURE:
                raise LearnerError(
                    f"Tensor {name} has a gradient but did not move in its first optimizer step, which reaches "
                    f"{reach:.3g} times half a unit in the last place.",
                    "The optimizer does not have the trained tensors: report this with the versions of torch and peft.",
                )
            if self._dtype == "bfloat16" and reach < BFLOAT16:
                self._found[f"lost_bfloat16/{name}"] = reach / BFLOAT16
            if still:
                self.lost[name] = self._found[f"lost/{name}"] = reach
            else:
                self.lost.pop(name, None)
                del self.pending[name]

    def after_update(self, policy: str) -> dict[str, float]:
        """Return the metrics of the update:

        - `lost_tensors`: the number of tensors that no step has changed yet
        - `lost_share`: the share of entries whose step was below half a unit in the last place, over the tensors that
          were checked; absent if none was
        - `lost/<tensor>`, once for each tensor without an entry above that: its largest step, in half units

        With passes in bfloat16, there are also `lost_share_bfloat16` and `lost_bfloat16/<tensor>` for its precision:
        these steps show in a pass once several have added up in float32.

        Raises LearnerError if a tensor has had no gradient although it should.
        """
        late = [name for name in self.pending if name not in self.lost and (self.steps > 1 or ".lora_A." not in name)]
        if late and self.steps:
            raise LearnerError(
                f"{len(late)} tensors of policy {policy!r} got no gradient from its first update: {late[:3]}",
                "Check lora.targets: the loss must depend on every target module.",
            )
        metrics = {"lost_tensors": float(len(self.lost))}
        entries, lost, unseen = self._counts.tolist()
        if entries:
            metrics["lost_share"] = lost / entries
            if self._dtype == "bfloat16":
                metrics["lost_share_bfloat16"] = unseen / entries
        metrics |= {name: reach for name, reach in self._found.items() if name not in self._reported}
        self._reported |= self._found.keys()
        self._counts = torch.zeros(3, dtype=torch.float64)
        self._found = {}
        return metrics


class _Reach(NamedTuple):
    """The next step of this rank's part of a tensor, in half units in the last place of float32.

    It has the index and the size of the largest step, and three counts of entries: with a step, with a step below one
    half unit, and with a step below one half unit of bfloat16.
    """

    entry: int
    largest: float
    counts: tuple[int, int, int]


def _reach(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> _Reach:
    """Compute the next step of every entry of this rank's part of a tensor, from its gradient and the optimizer's
    moments, and summarize how far the entries will move."""
    index = 0
    largest = 0.0
    counts = torch.zeros(3, dtype=torch.int64)
    if parameter.grad is None:
        return _Reach(index, largest, (0, 0, 0))
    # AdamW's step depends on the learning rate and betas of the tensor's group.
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    state = optimizer.state.get(parameter, {})
    parts = [parameter.detach(), parameter.grad]
    taken = 0
    if "exp_avg" in state:  # adamw8bit has its moments in another form
        parts += [state["exp_avg"], state["exp_avg_sq"]]
        taken = int(state["step"])
    for start, pieces in enumerate(zip(*(local_shard(p).reshape(-1).split(CHUNK) for p in parts), strict=True)):
        if not pieces[0].numel():
            continue
        value = pieces[0]
        size = _adam_step(group, taken, *pieces[1:]).abs()
        # The distance to the next float32 number: a step below half of it is rounded away.
        unit = torch.nextafter(value.abs(), value.new_tensor(torch.inf)) - value.abs()
        reach = size / (unit / 2).clamp(min=torch.finfo(torch.float32).tiny)
        place = int(reach.argmax())
        if reach[place] > largest:
            index = start * CHUNK + place
            largest = float(reach[place])
        has_step = size > 0
        lost = has_step & (reach < 1)
        lost_in_bfloat16 = has_step & (reach < BFLOAT16)
        counts += torch.stack([has_step.sum(), lost.sum(), lost_in_bfloat16.sum()]).cpu()
    return _Reach(index, largest, tuple(counts.tolist()))


def _adam_step(group: Mapping[str, Any], taken: int, gradient: Tensor, first: Any = 0.0, second: Any = 0.0) -> Tensor:
    """Return the next step of AdamW, without weight decay, from its moments after `taken` steps."""
    beta1, beta2 = group["betas"]
    mean = (beta1 * first + (1 - beta1) * gradient) / (1 - beta1 ** (taken + 1))
    square = (beta2 * second + (1 - beta2) * gradient**2) / (1 - beta2 ** (taken + 1))
    return group["lr"] * mean / (square.sqrt() + group["eps"])


def _entry_value(parameter: nn.Parameter, index: int) -> float:
    return float(local_shard(parameter.detach()).reshape(-1)[index])
