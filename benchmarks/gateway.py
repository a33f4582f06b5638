"""The cost of the gateway. Prints a table; the last line is JSON: added_ms_p50, throughput_ratio_32, first_token_ms.

The client, the gateway (recording into a file) and a mock provider are a process each, all on this machine. The mock's
answers hold 500 prompt ids, 100 completion ids and a log-probability of each. The client is the OpenAI SDK, or with
`--client plain` httpx without any decoding. Direct requests and requests through the gateway take turns.

With `--beside PYTHON`, the gateway of another installation (that interpreter's) takes its turns too, and only calls one
at a time are measured: added_ms_p50 and beside_ms_p50.

added_ms_p50: difference of the median times of a call, one at a time. throughput_ratio_32: calls per second with 32 in
flight, through the gateway over direct, median of the rounds. first_token_ms: median time from the mock's first token
to the client, through the gateway less direct.

With `--clients N` that many clients call the gateway for `--seconds` without a pause. The last line is then
calls_per_s, p50_ms and p99_ms of a call, lost (answered and not recorded), and memory_mb (the most that the gateway
took).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import httpx
import openai

from benchmarks.peak_memory import peak_memory

PROMPT, REPLY = 500, 100
MESSAGES = [
    {"role": "system", "content": "You are the planner of a team. " * 20},
    {"role": "user", "content": "Which way does the corridor lead from here? " * 30},
]
ASK = {"model": "m", "messages": MESSAGES, "logprobs": True}
Call = Callable[[], Awaitable[Any]]


def mock(port: int) -> None:
    """A provider that answers at once; a streamed answer says when its first token left."""
    import uvicorn

    rng = random.Random(0)
    prompt_ids = [rng.randrange(150_000) for _ in range(PROMPT)]
    token_ids = [rng.randrange(150_000) for _ in range(REPLY)]
    content = [
        {"token": f"t{i % 1000}", "logprob": -rng.random(), "bytes": [116, 49], "top_logprobs": []} for i in token_ids
    ]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": token_ids, "logprobs": {"content": content}}
    message = {"role": "assistant", "content": "left " * REPLY}
    usage = {"prompt_tokens": PROMPT, "completion_tokens": REPLY, "total_tokens": PROMPT + REPLY}
    head = {"id": "c", "created": 1, "model": "m"}

    def event(text: str, finish: str | None = None) -> bytes:
        delta = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        return f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', 'choices': [delta]})}\n\n".encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raw, more = b"", True
        while more:
            part = await receive()
            raw, more = raw + part.get("body", b""), part.get("more_body", False)
        body_in = json.loads(raw or b"{}")
        if body_in.get("stream"):
            fields = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": fields})
            await asyncio.sleep(0.01)
            for i in range(5):
                await send({"type": "http.response.body", "body": event(f"{time.monotonic()} "), "more_body": True})
                await asyncio.sleep(0.002 * (i + 1))
            await send({"type": "http.response.body", "body": event("", "stop") + b"data: [DONE]\n\n"})
            return
        body = {**head, "object": "chat.completion", "usage": usage, "prompt_token_ids": prompt_ids}
        answer = json.dumps({**body, "choices": [{**choice, "message": message}]}).encode()
        fields = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": answer})

    uvicorn.run(app, port=port, log_level="error", access_log=False)


@contextmanager
def started(
    command: list[str], port: int, python: str = sys.executable, cwd: str | None = None
) -> Iterator[tuple[str, int]]:
    """The address and the id of a server process that accepts connections."""
    process = subprocess.Popen([python, *command], stdout=subprocess.DEVNULL, cwd=cwd)
    try:
        for _ in range(300):
            with suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            if process.poll() is not None:
                raise SystemExit(f"{python} {' '.join(command)} ended with status {process.returncode}.")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Client:
    """Calls to one address."""

    def __init__(self, url: str, kind: str) -> None:
        self.url = f"{url}/chat/completions"
        self.http = httpx.AsyncClient(limits=httpx.Limits(max_connections=64, max_keepalive_connections=64))
        self.sdk = openai.AsyncOpenAI(base_url=url, api_key="k", http_client=self.http) if kind == "sdk" else None

    async def call(self) -> None:
        if self.sdk is not None:
            answer = await self.sdk.chat.completions.create(**ASK)  # type: ignore[call-overload]
            assert len(answer.choices[0].logprobs.content) == REPLY
        else:
            answer = await self.http.post(self.url, json=ASK)
            assert answer.status_code == 200

    async def first_token(self) -> float:
        """Seconds from the mock's first token to here."""
        async with self.http.stream("POST", self.url, json={**ASK, "stream": True}) as answer:
            chunks = answer.aiter_raw()
            first = await anext(chunks)
            arrived = time.monotonic()
            async for _ in chunks:
                pass
        return arrived - float(json.loads(first[6:].split(b"\n\n")[0])["choices"][0]["delta"]["content"])


async def timed(call: Call) -> float:
    started_at = time.perf_counter()
    await call()
    return time.perf_counter() - started_at


async def throughput(client: Client, calls: int, width: int = 32) -> float:
    """Calls per second with `width` in flight."""
    numbers = iter(range(calls))

    async def worker() -> None:
        for _ in numbers:
            await client.call()

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(width)))
    return calls / (time.perf_counter() - began)


async def measure(direct: Client, through: Client, calls: int, rounds: int) -> dict[str, float]:
    for client in (direct, through):
        await throughput(client, 64)
    alone: tuple[list[float], list[float]] = ([], [])
    for _ in range(calls):
        for times, client in zip(alone, (direct, through), strict=True):
            times.append(await timed(client.call))
    rates = [(await throughput(direct, calls), await throughput(through, calls)) for _ in range(rounds)]
    tokens: tuple[list[float], list[float]] = ([], [])
    for _ in range(calls // 5):
        for times, client in zip(tokens, (direct, through), strict=True):
            times.append(await client.first_token())
    p50 = [1000 * statistics.median(times) for times in alone]
    first = [1000 * statistics.median(times) for times in tokens]
    seconds = [statistics.median(side) for side in zip(*rates, strict=True)]
    print(f"{'':24}{'direct':>10}{'gateway':>10}")
    print(f"{'a call alone, ms p50':24}{p50[0]:10.2f}{p50[1]:10.2f}")
    print(f"{'calls/s, 32 in flight':24}{seconds[0]:10.0f}{seconds[1]:10.0f}")
    print(f"{'first token, ms p50':24}{first[0]:10.2f}{first[1]:10.2f}")
    return {
        "added_ms_p50": round(p50[1] - p50[0], 2),
        "throughput_ratio_32": round(statistics.median(b / a for a, b in rates), 2),
        "first_token_ms": round(first[1] - first[0], 2),
    }


async def alone(clients: Mapping[str, Client], calls: int) -> dict[str, float]:
    """Median milliseconds of a call by client, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in clients}
    for client in clients.values():
        await throughput(client, 64)
    for _ in range(calls):
        for name, client in clients.items():
            times[name].append(1000 * await timed(client.call))
    return {name: statistics.median(taken) for name, taken in times.items()}


@contextmanager
def gateway_client(provider: str, kind: str, python: str) -> Iterator[tuple[Client, str, int]]:
    """A client of a gateway with an episode, and the gateway's address and process id."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = ["-m", "cotune", "gateway", "--upstream", f"{provider}/v1", "--records", folder, "--port", str(port)]
        with started(command, port, python, cwd=folder) as (gateway, process):
            opened = httpx.post(f"{gateway}/cotune/episodes", json={"task": {"id": "t"}}).json()
            yield Client(f"{opened['roles_url']}/planner/v1", kind), gateway, process


async def load(url: str, clients: int, seconds: float) -> list[float]:
    """Seconds of each call, by so many clients that call for so long."""
    taken: list[float] = []
    until = time.monotonic() + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        while (began := time.monotonic()) < until:
            async with session.post(url, json=ASK) as answer:
                await answer.read()
                assert answer.status == 200
            taken.append(time.monotonic() - began)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return taken


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--calls", type=int, default=400)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--client", choices=("sdk", "plain"), default="sdk")
    arguments.add_argument("--clients", type=int, metavar="N", help="many clients at once, through the gateway alone")
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--beside", metavar="PYTHON", help="interpreter of another installation of cotune")
    arguments.add_argument("--mock", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.mock:
        mock(options.mock)
        return
    port = free_port()
    with (
        started(["-m", "benchmarks.gateway", "--mock", str(port)], port) as (provider, _),
        gateway_client(provider, options.client, sys.executable) as (through, gateway, process),
    ):
        if options.clients:
            taken = sorted(asyncio.run(load(through.url, options.clients, options.seconds)))
            health = httpx.get(f"{gateway}/health").json()
            figures_of_load = {
                "calls_per_s": round(len(taken) / options.seconds),
                "p50_ms": round(1000 * taken[len(taken) // 2]),
                "p99_ms": round(1000 * taken[len(taken) * 99 // 100]),
                "lost": health["lost"] + len(taken) - health["records"]["calls"],
                "memory_mb": peak_memory(process) >> 20,
            }
            print(json.dumps(figures_of_load))
            return
        direct = Client(f"{provider}/v1", options.client)
        if options.beside:
            with gateway_client(provider, options.client, options.beside) as (other, *_):
                p50 = asyncio.run(alone({"direct": direct, "gateway": through, "beside": other}, options.calls))
            print("\n".join(f"{name:10}{taken:8.2f} ms" for name, taken in p50.items()))
            added = {name: round(p50[name] - p50["direct"], 2) for name in ("gateway", "beside")}
            print(json.dumps({"added_ms_p50": added["gateway"], "beside_ms_p50": added["beside"]}))
            return
        figures = asyncio.run(measure(direct, through, options.calls, options.rounds))
        health = httpx.get(f"{gateway}/health").json()
    assert health["lost"] == 0 and not health["failures"], health
    print(f"{health['records']['calls']} calls recorded")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
