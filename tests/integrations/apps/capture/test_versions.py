"""Frameworks in versions that cannot be recorded: refused with a clear error, never recorded in part."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from cotune.errors import CotuneError
from cotune.integrations import versions
from cotune.integrations.apps import activation
from cotune.integrations.apps.activation import INTEGRATIONS
from cotune.integrations.versions import (
    SUPPORTED,
    UnsupportedVersion,
    VersionRange,
    is_untested,
    require_version,
    versions_of_installed,
)
from cotune.runtime import warn_once
from tests.integrations.recorded import Recorded

ROOT = Path(__file__).parents[4]


def test_the_installed_versions_are_supported():
    assert require_version("openai").startswith("2.")
    assert require_version("langgraph").startswith("1.")


@pytest.fixture
def openai_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the installed version of openai another one."""
    warn_once._first_of.cache_clear()
    monkeypatch.delenv("COTUNE_UNTESTED", raising=False)
    monkeypatch.setitem(SUPPORTED, "openai", VersionRange("2.45", "3.57"))
    return lambda name: monkeypatch.setattr(versions, "version", lambda _: name)


@pytest.mark.parametrize("older", ["2.44.9", "2.30.0", "1.99"])
def test_an_older_version_is_refused_by_name_range_and_remedy(
    older: str, openai_version: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COTUNE_UNTESTED", "1")
    openai_version(older)
    with pytest.raises(UnsupportedVersion) as error:
        require_version("openai")
    assert str(error.value) == (
        f"openai {older} cannot be recorded: tested is 2.45 to 3.57.x. "
        "Install a supported version: pip install 'openai>=2.45,<4'."
    )


@pytest.mark.parametrize("newer", ["4.0.0", "4.0.0rc1", "10.0"])
def test_a_newer_major_version_is_refused_unless_it_is_allowed(
    newer: str,
    openai_version: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    openai_version(newer)
    with pytest.raises(UnsupportedVersion, match="or try this one with COTUNE_UNTESTED=1"):
        require_version("openai")
    monkeypatch.setenv("COTUNE_UNTESTED", "1")
    assert require_version("openai") == newer
    assert f"openai {newer} is newer than the versions that cotune is tested with (2.45 to 3.57.x)" in caplog.text


@pytest.mark.parametrize("tested", ["2.45.0", "2.54.0", "3.0.0", "3.57.0", "3.57.1.post2"])
def test_a_tested_version_passes_without_a_word(
    tested: str, openai_version: Callable[[str], None], caplog: pytest.LogCaptureFixture
):
    openai_version(tested)
    assert require_version("openai") == tested
    assert caplog.text == ""


@pytest.mark.parametrize("newer", ["3.58.0", "3.99.1.post2"])
def test_a_newer_version_is_used_with_one_warning(
    newer: str, openai_version: Callable[[str], None], caplog: pytest.LogCaptureFixture
):
    openai_version(newer)
    assert require_version("openai") == require_version("openai") == newer
    (warning,) = caplog.messages
    assert warning.startswith(f"openai {newer} is newer than the versions that cotune is tested with (2.45 to 3.57.x).")


def test_the_installed_versions_are_not_newer_than_the_tested_ones():
    assert [name for name, found in versions_of_installed(SUPPORTED).items() if is_untested(name, found)] == []


def test_an_episode_fails_when_a_loaded_framework_cannot_be_recorded(record: Recorded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(activation._installations, "waiting", {"openai._base_client": ("openai.sdk", ("openai",))})
    monkeypatch.setattr(activation._installations, "refused", [])
    monkeypatch.setattr(versions, "version", lambda _: "2.30.0")
    import openai  # noqa: F401

    with pytest.raises(CotuneError, match=r"openai 2\.30\.0 cannot be recorded"):
        record(lambda task: 1.0)


def test_a_framework_first_imported_inside_an_episode_fails_it(monkeypatch: pytest.MonkeyPatch, record: Recorded):
    monkeypatch.setattr(activation._installations, "waiting", {})
    monkeypatch.setattr(activation._installations, "refused", [])
    monkeypatch.setattr(versions, "version", lambda _: "2.30.0")

    def app(task: object) -> float:
        activation._installations.waiting["openai._base_client"] = ("openai.sdk", ("openai",))
        activation._install("openai._base_client")
        return 1.0

    outcome = record.any(app)
    assert outcome.error is not None
    assert "openai 2.30.0 cannot be recorded" in str(outcome.error)


def test_the_extras_allow_what_is_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {pin for extra in project["optional-dependencies"].values() for pin in extra}
    for name, tested in SUPPORTED.items():
        assert f"{name}>={tested.oldest},<{tested.next_major}" in pins


def test_the_page_on_versions_shows_the_ranges():
    page = (ROOT / "docs" / "reference" / "versions.md").read_text(encoding="utf-8")
    for name, tested in SUPPORTED.items():
        assert re.search(rf"^\| [^|]*\b{name}\b[^|]* \| {re.escape(str(tested))} \|", page, re.MULTILINE), name


HOOKS = {
    "openai.sdk": ("openai._base_client", "SyncAPIClient", "_send_request"),
    "langgraph.identity": (
        "langchain_core.callbacks.manager",
        "AsyncCallbackManager",
        "on_tool_start",
    ),
    "langchain.models": ("langchain_core.language_models.chat_models", "BaseChatModel", None),
    "autogen.agents": ("autogen_agentchat.agents", "BaseChatAgent", None),
    "autogen.runtime": ("autogen_core.tools", "BaseTool", "run_json"),
    "openai.agents_sdk": ("agents.run_internal.run_loop", "get_model", None),
    "crewai.hooks": ("crewai", "Task", "_execute_core"),
}
"""By integration: one of the things it hooks into."""


LONG = ("crewai.hooks", "openai.agents_sdk")
"""One look for missing hooks serves all integrations. These frameworks take longest to import."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in HOOKS]
)
def test_a_framework_without_a_hook_is_refused_and_the_application_goes_on(name: str):
    """In a process of its own, since an integration is installed once."""
    module, owner, hook = HOOKS[name]
    distributions = next(needed for integration, needed in INTEGRATIONS.values() if integration == name)
    target = f"{owner}, {hook!r}" if hook else f"sys.modules[{module!r}], {owner!r}"
    script = f"""
import importlib, sys
from cotune.integrations.apps import activation
activation._installations.waiting.clear()
where = importlib.import_module({module!r})
{owner} = getattr(where, {owner!r})
delattr({target})
activation._installations.waiting["x"] = ({name!r}, {distributions!r})
activation._install("x")
try:
    activation.activate()
except activation.CotuneError as error:
    print(type(error).__name__, error)
"""
    environment = {**os.environ, "CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert run.stdout.startswith("UnsupportedVersion "), run.stderr
    for distribution in distributions:
        assert distribution in run.stdout or "cannot be recorded" in run.stdout or "has no" in run.stdout
