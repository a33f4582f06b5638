from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotune.prompts.edits import PromptPart
from cotune.prompts.templates import Template
from cotune.prompts.wording import Wording
from cotune.trainer.prompts.reflection import new_text
from cotune.trainer.prompts.texts import as_wide

TEXTS = st.text(st.sampled_from("ab \n{}⟦⟧1<"), min_size=1)


def part(*pieces: str | int) -> PromptPart:
    return PromptPart(name="w.system", roles=("w",), kind="system", old=Template.of(pieces))


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_a_template_is_read_back_from_its_text(texts: list[str]) -> None:
    pieces = [piece for slot, text in enumerate(texts, 1) for piece in (text, slot)]
    one = part(*pieces)
    wording = Wording([one])
    assert wording.template(wording.text(one.old)) == one.old
    assert not wording.fault(one.old, wording.text(one.old))


def test_a_text_that_loses_or_repeats_a_slot_has_a_fault() -> None:
    one = part("Write to ", 1, " about ", 2, ".")
    wording = Wording([one])
    assert wording.fault(one.old, "About ⟦2⟧, to ⟦1⟧.") == ""
    assert wording.fault(one.old, "Write to ⟦1⟧.") == "slot 2 is lost"
    assert wording.fault(one.old, "⟦1⟧⟦2⟧ and ⟦1⟧") == "slot 1 occurs twice"


def test_signs_that_stand_in_a_prompt_do_not_mark_its_slots() -> None:
    one = part("Put it into ⟦brackets⟧: ", 1)
    assert Wording([one]).text(one.old) == "Put it into ⟦brackets⟧: ⟪1⟫"


def test_white_space_at_the_ends_stays_that_of_the_application() -> None:
    assert as_wide("  Be brief.\n\n", "\n\tSay it.\n") == "\n\tBe brief.\n"
    assert new_text("Sure!\n<new-text>\nBe brief.\n</new-text> Done.", "Say it.\n") == "Be brief.\n"
    assert new_text("Be brief.", "Say it.") is None
    aloud = "It goes between <new-text> and </new-text>. A draft: <new-text>No.</new-text>\n"
    assert new_text(f"{aloud}<new-text>Be brief.</new-text>", "Say it.") == "Be brief."
    assert new_text("<new-text>Be bri", "Say it.") is None
    assert new_text("<new-text>\n \n</new-text>", "Say it.") is None
