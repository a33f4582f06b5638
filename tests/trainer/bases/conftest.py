from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import tiny_models


@pytest.fixture(scope="session")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of a larger vocabulary with another chat template than the tiny one's."""
    folder = tmp_path_factory.mktemp("other") / "base"
    tiny_models.build("llama", folder)
    return folder
