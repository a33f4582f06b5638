"""The format of tool calls, from a run's configuration through its export to what serves it; wrong names are errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cotune.adapters.export import TrainedPolicy, write_export
from cotune.adapters.manifest import read_manifest
from cotune.adapters.open_policies import open_local
from cotune.cli.main import main
from cotune.errors import ConfigError, SamplerError
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.sampling.protocol import SamplerInfo
from cotune.storage.run_layout import read_run
from cotune.trainer.config.load import convert


class Silent:
    async def info(self) -> SamplerInfo:
        return SamplerInfo(name="silent", max_model_len=64)


def test_an_export_says_how_its_model_writes_calls(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"config": {"tool_format": "mistral"}}))
    assert read_run(tmp_path).config.tool_format == "mistral"
    told = read_run(tmp_path).config.tool_format
    frozen = TrainedPolicy(
        name="writer", kind="frozen", version=0, roles=("writer",), model=str(base), tool_format=told
    )
    write_export(tmp_path / "export", [frozen])
    assert [base.tool_format for base in read_manifest(tmp_path / "export").bases] == ["mistral"]

    async def opened(model: str, **_: object) -> Silent:
        return Silent()

    monkeypatch.setattr(TransformersSampler, "open", opened)

    def served(given: str | None) -> str:
        local = asyncio.run(open_local(tmp_path / "export", tool_format=given))
        return local.chat.tool_format.name  # type: ignore[attr-defined,no-any-return]

    assert [served(None), served("hermes")] == ["mistral", "hermes"]


def test_serve_refuses_a_format_that_there_is_not(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(base), "--port", "0", "--tool-format", "gpt4"]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "tool_format = 'gpt4' is not auto, hermes, qwen3_coder, mistral, mistral_v11, llama3_json, or" in said


def test_a_run_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="tool_format = 'gpt4'"):
        convert({"model": "m", "tool_format": "gpt4"})
    assert convert({"model": "m", "tool_format": "vllm:kimi_k2"}).tool_format == "vllm:kimi_k2"


def test_a_model_whose_calls_nobody_reads_says_so_at_the_start(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from cotune.integrations.models.chat.template import ChatTemplate

    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "do {{ c.function.name }} with {{ c.function.arguments.probe_key }}{% endfor %}{% endfor %}"
    )
    chat = ChatTemplate.load(tmp_path)
    assert "writes tool calls in an unknown form: 'do probe_function with probe value'" in caplog.text
    assert "vllm:NAME" in caplog.text
    with pytest.raises(SamplerError, match="in an unknown form"):
        chat.render([{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "go"}}])


@pytest.mark.slow
def test_a_parser_of_vllm_reads_what_no_other_does(base: Path) -> None:
    from cotune.integrations.models.chat.template import ChatTemplate
    from cotune.integrations.models.chat.tool_formats import tool_format

    chat = ChatTemplate.load(base, "vllm:pythonic")
    offered = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}]
    ids = chat.tokenizer.encode('[go(to="é", by=[1, 2]), go()]', add_special_tokens=False)
    _, message, finish = chat.parse(ids, tools=offered)
    called = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert (finish, called) == ("tool_calls", [("go", {"to": "é", "by": [1, 2]}), ("go", {})])
    plain = chat.tokenizer.encode("No, thanks.", add_special_tokens=False)
    assert chat.parse(plain, tools=offered)[1:] == ({"role": "assistant", "content": "No, thanks."}, "stop")
    with pytest.raises(ConfigError, match=r"vllm: and one of .*deepseek_v31.*pythonic"):
        tool_format("vllm:nobody", chat.tokenizer)
