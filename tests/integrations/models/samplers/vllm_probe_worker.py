"""What the probe asks of vLLM's worker processes. vLLM imports it there."""

from __future__ import annotations

import sys

import torch

from cotune.integrations.models.vllm.worker import CotuneWorker


class ProbeWorker(CotuneWorker):
    def cotune_requests(self) -> int:
        """Requests that the engine was working on at its last step."""
        return len(self.model_runner.requests)

    def cotune_finders(self) -> int:
        """Finders of cotune's on the path of imports."""
        return sum(type(finder).__module__.startswith("cotune") for finder in sys.meta_path)

    def cotune_spoil(self) -> None:
        """Change one number of the base's weights."""
        with torch.no_grad():
            next(p for p in self.model_runner.get_model().parameters() if p.numel()).view(-1)[0] += 1.0
