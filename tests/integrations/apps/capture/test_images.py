"""Messages with images: recorded by hash, each image once, by every client; replayed, shown and exported whole."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", CREWAI_TESTING="true")
os.environ.setdefault("CREWAI_STORAGE_DIR", "cotune-tests")

import httpx
import openai
import pytest
from autogen_core import Image
from autogen_core.models import UserMessage
from crewai import LLM
from langchain_openai import ChatOpenAI
from PIL import Image as Picture

import cotune
from cotune.cli.main import main
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.episodes.workflows import workflow, workflow_of
from cotune.errors import RequestRefused
from cotune.integrations.apps.activation import activate
from cotune.integrations.exchange.otel.messages import to_parts
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.vllm.requests import http_params
from cotune.integrations.web.viewer.server import viewing
from cotune.recording.redaction import each_text
from cotune.records.structs import PolicyRef, Task
from cotune.replay.script import Replay, read_script
from cotune.sampling.protocol import SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations import tiny_models
from tests.integrations.autogen_models import SEEING, autogen_client
from tests.integrations.pictures import asks, picture, url
from tests.integrations.recorded import Responder, Sink
from tests.integrations.seeing_models import build_seeing

pytestmark = pytest.mark.usefixtures("nowhere")
activate()
RED, BLUE = picture("red"), picture("blue", 40)


async def plain(picture: bytes) -> Any:
    client = openai.AsyncOpenAI()
    return await client.chat.completions.create(model="m", messages=[asks("what is it?", picture)])


async def langchain(picture: bytes) -> Any:
    image = {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": url(picture).partition(",")[2]}
    content = [image, {"type": "text", "text": "what is it?"}]
    return await ChatOpenAI(model="m").ainvoke([{"role": "user", "content": content}])


async def autogen(picture: bytes) -> Any:
    shown = Image(Picture.open(io.BytesIO(picture)))
    client = autogen_client(model_info=SEEING)
    return await client.create([UserMessage(content=[shown, "what is it?"], source="user")])


async def crewai(picture: bytes) -> Any:
    return await asyncio.to_thread(LLM(model="openai/gpt-4o-mini").call, [asks("what is it?", picture)])


def record(folder: Path, app: Callable[[Any], Any], times: int = 1, **options: Any) -> None:
    with SqliteStore.open(folder) as store:
        asyncio.run(run(store, app, times, **options))


async def run(store: SqliteStore, app: Any, times: int, *, replays: Any = None, said: str = "red") -> list[Any]:
    tasks = [Task(id=str(n), input={"n": n}) for n in range(times)]
    batch = EpisodeBatch(tasks=tasks, sink=store, phase="trace" if replays is None else "replay", replays=replays or {})
    made = app if hasattr(app, "cotune") else workflow(app)
    episodes = await rollout(workflow_of(made), batch, Responder(lambda call: said))
    store.flush()
    return episodes


def tables(folder: Path) -> tuple[list[tuple[str, str, bytes]], list[str]]:
    db = sqlite3.connect(folder / "records.db")
    try:
        images = db.execute("SELECT id, media_type, data FROM images ORDER BY length(data)").fetchall()
        return images, [body for (body,) in db.execute("SELECT body FROM messages")]
    finally:
        db.close()


@pytest.mark.parametrize("ask", [plain, langchain, autogen, crewai], ids=lambda ask: ask.__name__)
def test_the_bytes_are_stored_once_and_the_message_refers_to_them(tmp_path, ask):
    async def app(task):
        for _ in range(3):
            await ask(RED)
        await ask(BLUE)

    record(tmp_path, app, times=2)
    images, bodies = tables(tmp_path)
    assert len(images) == 2
    assert [(id, kind) for id, kind, _ in images] == [
        (hashlib.sha256(data).hexdigest(), "image/png") for _, _, data in images
    ]
    assert not [body for body in bodies if "base64" in body]
    with SqliteStore.open(tmp_path, read_only=True) as store:
        calls = [call for episode in store.episodes() for call in store.calls(episode.id)]
        assert len(calls) == 8 and len({call.messages for call in calls}) == 2
        (message,) = (store.message(id) for id in calls[0].messages)
        (shown,) = (part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url")
        assert shown in [url(data) for _, _, data in images]
        assert store.image(images[0][0]) == images[0][2]


def test_what_comes_by_its_address_or_in_odd_base64_stays_as_it_was(tmp_path):
    address = {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}}
    lines = {"type": "image_url", "image_url": url(RED)[:60] + "\n" + url(RED)[60:]}
    sent = {"role": "user", "content": [address, lines, {"type": "text", "text": "and?"}]}

    async def app(task):
        await openai.AsyncOpenAI().chat.completions.create(model="m", messages=[sent])

    record(tmp_path, app)
    with SqliteStore.open(tmp_path, read_only=True) as store:
        (call,) = (call for episode in store.episodes() for call in store.calls(episode.id))
        assert store.message(call.messages[0]) == sent
    assert [data for _, _, data in tables(tmp_path)[0]] == [RED]


def test_an_image_that_was_changed_on_disk_counts_as_lost(tmp_path):
    async def app(task):
        await plain(RED)

    record(tmp_path, app)
    db = sqlite3.connect(tmp_path / "records.db")
    db.execute("UPDATE images SET data = ?", (BLUE,))
    db.commit()
    db.close()
    id = hashlib.sha256(RED).hexdigest()
    with SqliteStore.open(tmp_path, read_only=True) as store:
        (call,) = (call for episode in store.episodes() for call in store.calls(episode.id))
        part = store.message(call.messages[0])["content"][0]
        assert part["image_url"]["url"] == f"data:image/png;sha256,{id}"
        with pytest.raises(cotune.CotuneError, match=f"No image '{id}'"):
            store.image(id)


def test_a_redactor_withholds_an_image_as_any_content(tmp_path):
    @cotune.workflow
    async def app(task):
        await plain(RED)

    app.redactor(each_text(lambda text: "[hidden]" if text.startswith("data:") else text))
    record(tmp_path, app)
    images, bodies = tables(tmp_path)
    assert images == [] and not [body for body in bodies if "base64" in body or hashlib.sha256(RED).hexdigest() in body]
    with SqliteStore.open(tmp_path, read_only=True) as store:
        (call,) = (call for episode in store.episodes() for call in store.calls(episode.id))
        assert call.redacted and call.prompt is None
        assert store.message(call.messages[0])["content"][0] == {"type": "image_url", "image_url": {"url": "[hidden]"}}


def test_an_episode_with_images_runs_again_and_another_image_is_a_difference(tmp_path):
    shown = [RED]

    async def app(task):
        reply = await plain(shown[0])
        said = {"role": "user", "content": reply.choices[0].message.content}
        await openai.AsyncOpenAI().chat.completions.create(model="m", messages=[asks("again", BLUE), said])
        return 1.0

    with SqliteStore.open(tmp_path) as store:
        (trunk,) = asyncio.run(run(store, app, 1))
        replays = {(trunk.task.id, 0): Replay(script=read_script(store, trunk.id))}
        (again,) = asyncio.run(run(store, app, 1, replays=replays, said="new"))
        assert again.status == "ok"
        assert [call.replayed for call in store.calls(again.id)] == [call.id for call in store.calls(trunk.id)]
        shown[0] = BLUE
        replays = {(trunk.task.id, 0): Replay(script=read_script(store, trunk.id))}
        (other,) = asyncio.run(run(store, app, 1, replays=replays))
        assert other.blame == "divergence"
        was, now = (hashlib.sha256(data).hexdigest()[:12] for data in (RED, BLUE))
        assert f"sha256 {was}" in other.error and f"sha256 {now}" in other.error
        assert url(BLUE)[30:60] not in other.error


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """One episode: an image is asked about."""
    folder = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        patch.setenv("OPENAI_API_KEY", "none")

        async def app(task):
            await plain(RED)
            return 1.0

        record(folder, app)
    return folder


def test_the_terminal_names_it_and_json_has_it_whole(traced, capsys):
    (episode,) = json_of(capsys, "show", str(traced), "--json")
    assert main(["show", str(traced), "--episode", episode["id"], "--full"]) == 0
    said = capsys.readouterr().out
    phrase = f"[image/png, {len(RED)} bytes, sha256 {hashlib.sha256(RED).hexdigest()[:12]}]"
    assert phrase in " ".join(said.split()) and "base64" not in said
    (whole,) = json_of(capsys, "show", str(traced), "--episode", episode["id"], "--json")
    assert url(RED) in json.dumps(whole)


def json_of(capsys, *words):
    assert main(list(words)) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_viewer_shows_a_picture_and_runs_nothing_of_one(tmp_path, traced):
    script = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    svg = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(script, "image/svg+xml")}}]}

    async def app(task):
        await openai.AsyncOpenAI().chat.completions.create(model="m", messages=[svg])

    record(tmp_path, app)
    pages = []
    for folder in (traced, tmp_path):
        with SqliteStore.open(folder, read_only=True) as store, viewing([folder]) as server:
            (episode,) = store.episodes()
            found = httpx.get(f"{server.url}/run/{folder.name}/episode/{episode.id}", timeout=60)
            assert found.status_code == 200 and found.headers["x-content-type-options"] == "nosniff"
            pages.append(found.text)
    assert f'<img src="{url(RED)}"' in pages[0].replace("&#43;", "+")
    assert "<img" not in pages[1] and "image by its address" in pages[1]


def test_spans_carry_the_image_and_bring_it_back(traced, tmp_path, capsys):
    assert main(["otel", "export", str(traced), "--out", str(tmp_path / "spans.jsonl"), "--content"]) == 0
    sent = (tmp_path / "spans.jsonl").read_text().replace("\\", "").replace(" ", "")
    assert '"type":"blob"' in sent and '"mime_type":"image/png"' in sent
    assert main(["otel", "import", str(tmp_path / "spans.jsonl"), "--out", str(tmp_path / "back")]) == 0
    assert [data for _, _, data in tables(tmp_path / "back")[0]] == [RED]
    with SqliteStore.open(tmp_path / "back", read_only=True) as store:
        (call,) = (call for episode in store.episodes() for call in store.calls(episode.id))
        assert store.message(call.messages[0])["content"] == asks("what is it?", RED)["content"]
    left_out: Counter[str] = Counter()
    detailed = {"type": "image_url", "image_url": {"url": url(RED), "detail": "low"}}
    assert to_parts({"role": "user", "content": [detailed]}, left_out)["parts"][0]["type"] == "blob"
    assert left_out == {"image_url.detail": 1}
    assert main(["otel", "export", str(traced), "--out", str(tmp_path / "bare.jsonl")]) == 0
    assert "base64" not in (tmp_path / "bare.jsonl").read_text() and "blob" not in (tmp_path / "bare.jsonl").read_text()


def test_lines_to_fine_tune_on_hold_it(traced, tmp_path):
    assert main(["records", "sft", str(traced), "--out", str(tmp_path / "sft.jsonl")]) == 0
    (line,) = map(json.loads, (tmp_path / "sft.jsonl").read_text().splitlines())
    assert line["messages"][0] == asks("what is it?", RED)


def test_a_policy_that_sees_no_images_refuses_by_role_and_call_and_what_has_no_bytes_is_not_fetched(tmp_path):
    tiny_models.build("qwen3", tmp_path / "blind")
    build_seeing(tmp_path / "seeing")
    refused = []

    async def answer(folder, message):
        chat = ChatTemplate.load(folder)
        responder = PolicyResponder(None, chat, {"app": PolicyRef("p")})  # type: ignore[arg-type]

        async def app(task):
            with pytest.raises(openai.OpenAIError):
                await openai.AsyncOpenAI(max_retries=0).chat.completions.create(model="m", messages=[message])
            return 1.0

        batch = EpisodeBatch(tasks=[Task(id="t", input=None)], sink=Sink(), phase="trace")
        await rollout(workflow_of(workflow(app)), batch, responder)
        refused.extend(call.error for call in batch.sink.calls())

    asyncio.run(answer(tmp_path / "blind", asks("what?", RED)))
    address = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}
    asyncio.run(answer(tmp_path / "seeing", address))
    who = "Call 0, turn 0 of role 'app', has an image."
    assert f"{who} The policy's model sees no images. Train a model that sees images" in refused[0]
    assert f"{who} An image comes as 'https' and not with its bytes; a policy fetches nothing." in refused[1]
    with pytest.raises(RequestRefused, match="no images"):
        http_params(1, SamplingParams(images=(RED,)))
