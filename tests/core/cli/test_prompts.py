"""`cotune prompts show|edit|diff|export`, as a user runs them."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from cotune.cli.main import main
from cotune.prompts.file import read_prompts
from tests.core.prompts.written import Asked, store_of

SYSTEM = "You are a careful assistant of a small shop. Answer in one sentence."
MAILS = ["Where is the parcel that I sent to Rome?", "My bill shows a lamp twice."]


@pytest.fixture
def records(tmp_path: Path) -> str:
    folder = tmp_path / "run"
    folder.mkdir()
    store_of(
        folder / "records.db",
        [
            (
                {"q": q},
                [
                    Asked("router", [("system", SYSTEM), q], f"desk {len(q)}"),
                    Asked(
                        "writer", [f"Write a kind reply to this mail:\n{q}\nKeep it short, and promise nothing at all."]
                    ),
                    Asked("reader", [q]),
                ],
            )
            for q in MAILS
        ],
    ).close()
    return str(folder)


def lines(capsys) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_show(records: str, capsys) -> None:
    assert main(["prompts", "show", records]) == 0
    shown = lines(capsys)
    assert shown[0] == "app:solve · 6 calls · 3 roles · m"
    assert "  writer.user  76 characters, 1 slot" in shown
    at = shown.index("    Write a kind reply to this mail:")
    assert shown[at + 1 : at + 5] == [
        "    ⟦1⟧",
        "    Keep it short, and promise nothing at all.",
        f"      ⟦1⟧ {MAILS[0]}",
        f"          {MAILS[1]}",
    ]
    assert "  sends only the task and the answers of others: no prompt to improve" in shown


def test_show_as_json_and_of_one_role(records: str, capsys) -> None:
    assert main(["prompts", "show", f"{records}/records.db", "--json", "--role", "writer"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(part["name"], part["editable"]) for part in found["parts"]] == [("writer.user", True)]
    assert found["parts"][0]["examples"] == [MAILS]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["show", "app:solve"], "--tasks is missing"),
        (["show", "RECORDS", "--role", "writr"], "Did you mean writer?"),
        (["show", "RECORDS", "--part", "poem"], "Kinds: system, user, assistant, tool, format."),
        (["edit", "RECORDS", "--part", "writer.usr"], "Did you mean writer.user?"),
        (
            ["edit", "RECORDS", "--part", "writer.user", "--text", "TEXT"],
            "slot 1 is lost. Use its slots once each: ⟦1⟧.",
        ),
        (["edit", "RECORDS", "--part", "writer.user", "--text", "LATIN"], "is not in UTF-8"),
        (["diff", "RECORDS"], "has no file of prompts"),
        (["export", "PROMPTS"], "has no edited part"),
    ],
)
def test_errors_say_what_to_do(records: str, tmp_path: Path, capsys, line: list[str], said: str) -> None:
    (tmp_path / "text.txt").write_text("No slot.")
    (tmp_path / "latin.txt").write_bytes("Pr\u00fcfe ⟦1⟧".encode("latin-1", "replace"))
    main(["prompts", "show", records, "--out", str(tmp_path / "p.json")])
    names = {"TEXT": "text.txt", "LATIN": "latin.txt", "PROMPTS": "p.json"}
    given = {"RECORDS": records, **{word: str(tmp_path / name) for word, name in names.items()}}
    assert main(["prompts", *(given.get(word, word) for word in line)]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run/prompts.json").exists()


def test_no_further_edit_after_the_end_of_the_input(records: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("VISUAL", "true")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", Mock(side_effect=EOFError))
    monkeypatch.setattr("cotune.cli.prompts.edit._text_of", lambda path: "No slot.")
    assert main(["prompts", "edit", records, "--part", "writer.user"]) == 1
    said = capsys.readouterr()
    assert "no answer, which is taken as no" in said.out and "slot 1 is lost" in said.err


def test_edit_diff_export_and_undo(records: str, tmp_path: Path, monkeypatch, capsys) -> None:
    editor = tmp_path / "editor.sh"
    editor.write_text("#!/bin/sh\nprintf 'Reply in two lines.\\n⟦1⟧\\n' > \"$1\"\n")
    editor.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(editor))
    assert main(["prompts", "edit", records, "--part", "writer.user"]) == 0
    prompts = read_prompts(records)
    (part,) = [part for part in prompts.parts if part.edited]
    assert part.now.pieces == ("Reply in two lines.\n", 1) and prompts.provenance == {"records": records}
    capsys.readouterr()
    assert main(["prompts", "diff", records]) == 0
    shown = lines(capsys)
    assert shown[0].startswith("writer.user  76 -> 20 characters, 2 calls of 2 tasks")
    assert "  - Write a kind reply to this mail:" in shown and "  + Reply in two lines." in shown
    assert main(["prompts", "export", records, "--out", str(tmp_path / "pages")]) == 0
    page = (tmp_path / "pages/writer.md").read_text()
    assert "```text\nReply in two lines.\n⟦1⟧\n```" in page and "-Write a kind reply to this mail:" in page
    assert main(["prompts", "edit", records, "--part", "writer.user", "--undo"]) == 0
    assert read_prompts(records).id == ""
    assert main(["prompts", "diff", records]) == 0
    assert lines(capsys)[-1] == "nothing is changed"


def test_an_editor_that_changes_nothing_writes_nothing(records: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("VISUAL", "true")
    assert main(["prompts", "edit", records, "--part", "router.system"]) == 0
    assert "as it was" in capsys.readouterr().out and not (Path(records) / "prompts.json").exists()
    monkeypatch.setenv("VISUAL", "no-such-editor")
    assert main(["prompts", "edit", records, "--part", "router.system"]) == 1
    assert "Set EDITOR to an editor, or pass the text: --text FILE." in capsys.readouterr().err
