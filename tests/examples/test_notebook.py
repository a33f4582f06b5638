"""The notebook runs as it stands, cell by cell, in a kernel, whose event loop is running."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.core.installed import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
IN_THREAD = """
import functools
from cotune.integrations.models.transformers.sampler import TransformersSampler
TransformersSampler.open = functools.partial(TransformersSampler.open, host="thread", device="cpu")
"""


def test_the_notebook_traces_trains_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_FOLDER", str(tmp_path / "work"))
    monkeypatch.setenv("NOTEBOOK_STEPS", "2")
    monkeypatch.setenv("NOTEBOOK_WARM_UP", "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in notebook.cells), "no outputs"
    (training,) = (cell for cell in notebook.cells if "tasks_per_step=32" in cell.source)
    training.source = training.source.replace("tasks_per_step=32", "tasks_per_step=4")
    (tasks,) = (cell for cell in notebook.cells if "range(200)" in cell.source)
    tasks.source = tasks.source.replace("range(200)", "range(20)")  # of which a share is held out and evaluated
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    notebook.cells.insert(0, nbformat.v4.new_code_cell(IN_THREAD))
    client.execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    texts = [output["data"].get("text/plain", "") for output in outputs if "data" in output]
    assert any(text.startswith("[('triage', 0, '") and "('writer', 0, '" in text for text in texts)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    lines = (tmp_path / "work" / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
