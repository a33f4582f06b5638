"""What a worker of vLLM answers after a transfer: an error of the transfer, or of the model that loads the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from cotune.integrations.cluster.weight_transfer import Received, Receiver, new_ticket
from tests.integrations.models.samplers.test_vllm_receive import answer


class Model:
    """Stands for vLLM's transfer engine. It takes the tensors, or fails at the first one."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def load(self, tensors: Iterator[Any]) -> None:
        for _ in tensors:
            if self.error is not None:
                raise self.error


@pytest.mark.parametrize(
    ("lost", "refused", "unfinished", "expected"),
    [
        (None, None, None, answer("empty")),
        (OSError("lost"), None, None, answer(transfer_error="OSError: lost")),
        (None, ValueError("refused"), None, answer(load_error="ValueError: refused")),
        (OSError("lost"), None, ValueError("unfinished"), answer(load_error="ValueError: unfinished")),
        (None, None, ValueError("unfinished"), answer(load_error="ValueError: unfinished")),
    ],
)
def test_only_an_error_of_the_transfer_lets_the_worker_load_files(
    monkeypatch: pytest.MonkeyPatch,
    lost: Exception | None,
    refused: Exception | None,
    unfinished: Exception | None,
    expected: Received,
) -> None:
    from cotune.integrations.models.vllm import worker

    def receive(receiver: Receiver) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1)
        if lost is not None:
            raise lost

    def finish() -> None:
        if unfinished is not None:
            raise unfinished

    monkeypatch.setattr(worker, "set_current_vllm_config", nullcontext)
    monkeypatch.setattr(Receiver, "_receive", receive)
    monkeypatch.setattr(Receiver, "fingerprint", lambda receiver: "empty")
    made = worker.CotuneWorker()
    made.rank, made.device, made.vllm_config = 0, torch.device("cpu"), None
    made.weight_transfer_engine = Model(refused)
    made.start_weight_update, made.finish_weight_update = (lambda: None), finish
    offer: Any = type("Offer", (), {"host": "", "port": 1, "device": "cpu", "shapes": {}})
    assert made.cotune_receive(new_ticket(offer, 1, "cpu")) == expected
