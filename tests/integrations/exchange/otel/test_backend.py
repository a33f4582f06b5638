"""A real backend takes the spans over OTLP/HTTP, understands them, and gives them back: MLflow's tracking server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.integrations.exchange.otel.importer import import_file
from cotune.storage.sqlite_store import SqliteStore
from tests import ends_with
from tests.integrations.exchange.otel.records import record, seen
from tests.ports import free_port

EXPERIMENT = "0"


class Backend:
    """MLflow's server on a local port, with its REST interface."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    def traces(self) -> list[Any]:
        """Every stored trace, with its spans."""
        where = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": EXPERIMENT}}
        found = self.ask("/api/3.0/mlflow/traces/search", {"locations": [where]}).get("traces") or []
        return [self.ask(f"/api/3.0/mlflow/traces/get?trace_id={one['trace_id']}") for one in found]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    folder = tmp_path_factory.mktemp("mlflow")
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "mlflow.server.fastapi_app:app", "--port", str(port)],
        cwd=folder,
        env={
            **os.environ,
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder}/mlflow.db",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": str(folder / "artifacts"),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "true",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=ends_with.this_process,
    )
    made = Backend(f"http://127.0.0.1:{port}")
    try:
        _wait(server, made)
        yield made
    finally:
        server.terminate()
        server.wait()


def _wait(server: subprocess.Popen[bytes], backend: Backend) -> None:
    """Until the server answers from its database."""
    deadline = time.monotonic() + 120
    while True:
        try:
            backend.ask(f"/api/2.0/mlflow/experiments/get?experiment_id={EXPERIMENT}")
            return
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                pytest.fail((server.communicate()[1] or b"").decode()[-2000:])
            time.sleep(0.02)


@pytest.mark.long
def test_a_backend_understands_the_spans_and_gives_them_back(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    with record(tmp_path / "run") as store:
        before = seen(store)
    command = ["otel", "export", str(tmp_path / "run"), "--endpoint", backend.url, "--content"]
    assert main([*command, "--header", f"x-mlflow-experiment-id={EXPERIMENT}"]) == 0
    assert "exported 10 spans of 1 episode" in capsys.readouterr().out

    (told,) = backend.traces()
    kinds = {span["name"]: _attributes(span).get("mlflow.spanType") for span in told["trace"]["spans"]}
    assert kinds["invoke_agent writer"] == "AGENT"
    assert kinds["chat m"] == "CHAT_MODEL"
    assert kinds["execute_tool look"] == "TOOL"
    usage = json.loads(told["trace"]["trace_info"]["trace_metadata"]["mlflow.trace.tokenUsage"])
    assert (usage["input_tokens"], usage["output_tokens"]) == (3 + 6 + 11, 2 + 2 + 1)

    (tmp_path / "told.json").write_text(json.dumps(told))
    with SqliteStore.open(tmp_path / "back" / "records.db") as store:
        made = import_file(tmp_path / "told.json", store)
        store.flush()
        assert (made.episodes, made.calls, made.left_out) == (1, 4, {})
        assert seen(store) == before


def _attributes(span: Any) -> dict[str, Any]:
    found = {pair["key"]: next(iter(pair["value"].values())) for pair in span["attributes"]}
    return {
        key: json.loads(value) if key == "mlflow.spanType" and value[:1] == '"' else value
        for key, value in found.items()
    }
