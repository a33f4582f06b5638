"""What the probe asks of vLLM's worker processes. vLLM imports it there."""

from __future__ import annotations

from cotune.integrations.vllm_worker import CotuneWorker


class ProbeWorker(CotuneWorker):
    def cotune_requests(self) -> int:
        """Requests that the engine was working on at its last step."""
        return len(self.model_runner.requests)
