"""When a worker of vLLM computes prompts, single tokens and samples, and loads weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from cotune.integrations.models.torch_trace import Tracer
from cotune.step_profile import Trace


class WorkerTrace:
    """Traces what a worker's model runner does from `begin` to `end`; outside of these nothing is in its way."""

    def __init__(self, runner: Any, receiver: Any, device: torch.device) -> None:
        self._tracer = Tracer(device)
        self._watched: list[tuple[Any, str, Callable[..., str]]] = [
            (runner, "execute_model", _pass),
            (runner, "sample_tokens", lambda _: "sampling"),
            (runner, "add_lora", lambda _: "load"),
            (receiver, "update_weights", lambda _: "load"),
        ]

    def begin(self) -> None:
        for place, method, name in self._watched:
            if place is not None:
                setattr(place, method, self._traced(getattr(place, method), name))
        self._tracer.begin()

    def end(self) -> Trace:
        for place, method, _ in self._watched:
            if place is not None:
                vars(place).pop(method, None)
        return self._tracer.end()

    def _traced(self, original: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(original)
        def traced(*arguments: Any, **named: Any) -> Any:
            span = name(*arguments[:1])
            with self._tracer.span(span) if span else contextlib.nullcontext():
                return original(*arguments, **named)

        return traced


def _pass(scheduled: Any) -> str:
    """vLLM computes prompts and single tokens in one pass: one with any prompt, or part of one, counts as prefill. One
    without tokens only tells the worker which requests have ended."""
    if not scheduled.total_num_scheduled_tokens:
        return ""
    cached = scheduled.scheduled_cached_reqs
    prompts = scheduled.scheduled_new_reqs or any(map(cached.is_context_phase, cached.req_ids))
    return "prefill" if prompts else "decode"
