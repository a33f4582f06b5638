"""A setting that was removed gives an error that names what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotune.errors import ConfigError
from cotune.trainer.config.load import load_config
from cotune.trainer.config.removed import REMOVED
from cotune.trainer.prompts.options import load_options


@pytest.mark.parametrize(
    ("row", "toml", "field"),
    [
        ("old", "old = 3", "old"),
        ("learner.old", "[learner]\nold = 3", "learner.old"),
        ("gone", "[gone]\nsize = 3", "gone"),
        ("policy.old", '[[policy]]\nname = "a"\nroles = ["a"]\nold = 3', "policy.old"),
    ],
)
def test_a_removed_setting_names_its_replacement(
    row: str, toml: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REMOVED, row, "Use seed.")
    config = tmp_path / "run.toml"
    config.write_text(f'model = "m"\n{toml}')
    with pytest.raises(ConfigError, match=r"was removed from the configuration.*Use seed\.") as error:
        load_config(config, {})
    assert error.value.field == field


def test_a_removed_option_of_a_search_names_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "prompts.old", "Use seed.")
    with pytest.raises(ConfigError, match=r"was removed from the configuration.*Use seed\."):
        load_options(None, {"old": 3})


def test_no_row_names_a_setting_that_exists() -> None:
    for name in REMOVED:
        with pytest.raises(ConfigError, match="was removed from the configuration"):
            if name.startswith("prompts."):
                load_options(None, {name.removeprefix("prompts."): 1})
            elif name.startswith("policy."):
                load_config(None, {"model": "m", "policy": [{"name": "a", "roles": ["a"], name[len("policy.") :]: 1}]})
            else:
                load_config(None, {"model": "m", name: 1})
