"""axe-core finds no fault on any page of the viewer, in light and in dark."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from cotune.integrations.web.viewer.pages import PAGES
from cotune.integrations.web.viewer.report import write_report
from cotune.integrations.web.viewer.server import viewing
from tests.integrations.web.viewer.test_browser import opened, screen, until

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
RUN = """
for (const wide of document.querySelectorAll(".scroll")) wide.style.backgroundImage = "none"
const done = arguments[arguments.length - 1]
const rules = arguments[0] ? {runOnly: {type: "rule", values: arguments[0]}} : {}
axe.run(document, {resultTypes: ["violations", "incomplete"], ...rules}).then(done)
"""
"""The shadows at the edges of a wide table are taken off: axe-core knows no contrast before a gradient."""
UNREAD = ("Element content contains only non-text characters", "<text ")
"""Of these it cannot tell the contrast: arrows of buttons that have names, and text in drawings."""
STATES = (
    *("ok", "chosen", "finished", "error", "failed", "timeout", "malformed", "cancelled", "stopped"),
    *("redacted", "fail", "idle", "under-way", "recording"),
)
TOKENS = ("t1", "t2", "t3", "t4", "t5", "t-n2", "t-n1", "t-p1", "t-p2")
SAMPLES = (
    *(f"<span class='badge s-{state}'>{state}</span>" for state in STATES),
    "<span class='badge'>plain</span><small>small</small><span class='quiet'>quiet</span>",
    "<a href='/'>link</a>",
    *(f"<span class='role h{hue}'>role</span>" for hue in range(8)),
    *(f"<span data-style='background: var(--h{hue}); color: var(--panel)'>in a bar</span>" for hue in range(8)),
    *(f"<span class='reward {sign}'><i>name</i> 0.5</span>" for sign in ("good", "bad")),
    *(f"<span class='t {colour}'>token</span>" for colour in TOKENS),
    "<span class='diff'><del>gone</del><ins>new</ins></span><mark>found</mark><span class='cause'>cause</span>",
    "<button aria-pressed='true'>on</button><div class='errorbox'>error</div><div class='ending'>ended</div>",
    "<div class='thumbs'><button>off</button><button aria-pressed='true'>on</button></div>",
)
"""What pages show in colour, also what these runs lack."""
COLOUR = """
document.querySelector("main").innerHTML += arguments[0]
for (const one of document.querySelectorAll("[data-style]")) one.style.cssText = one.dataset.style
"""
"""Styles in HTML are refused by the page's policy."""


def faults(driver: Chrome, rules: list[str] | None = None) -> list[str]:
    """Findings of axe-core, by all of its rules or by those named: the rule, the element at fault, and the reason."""
    driver.execute_script(AXE)
    told = driver.execute_async_script(RUN, rules)
    nodes = [(rule["id"], node) for rule in (*told["violations"], *told["incomplete"]) for node in rule["nodes"]]
    found = [f"{rule}: {node['html'][:160]} {node['failureSummary']}" for rule, node in nodes]
    return [one for one in found if not any(unread in one for unread in UNREAD)]


def places(driver: Chrome, site: str) -> dict[str, str]:
    """An address of every page in the viewer's table that is a page, by its path there."""
    run = f"{site}/run/trained"
    found = {
        "/": f"{site}/?all=1",
        "/curves": f"{site}/curves?run=trained&run=traced",
        "/compare": f"{site}/compare?run=trained&run=traced",
        "/run/{run}/episode/{id:path}": link(driver, f"{run}/episodes", "a.main"),
        "/run/{run}/call/{id:path}": link(driver, f"{run}/calls", "a.main"),
        "/run/{run}/group/{id:path}": link(driver, f"{run}/groups?step=1", "main a[href*='/group/']"),
    }
    found["/run/{run}/diff"] = link(driver, found["/run/{run}/group/{id:path}"], "a[href*='/diff?']")
    for page in PAGES:
        if not page.path.endswith(("changed", "use")) and page.method == "GET":
            found.setdefault(page.path, site + page.path.replace("{run}", "trained"))
    return found


def link(driver: Chrome, page: str, selector: str) -> str:
    opened(driver, page)
    return str(driver.find_element(By.CSS_SELECTOR, selector).get_attribute("href"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("ground", ["bg", "panel", "accentbg"])
def test_every_colour_can_be_read_on_every_ground(driver: Chrome, site: str, scheme: str, ground: str) -> None:
    screen(driver, 1280, 800, scheme)
    opened(driver, f"{site}/run/trained/notes")
    samples = "".join(f"<div>{one}</div>" for one in SAMPLES)
    section = f"<section data-style='background: var(--{ground})'><h2>Samples</h2>{samples}</section>"
    driver.execute_script(COLOUR, section)
    assert (found := faults(driver)) == [], "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_no_page_has_a_fault(driver: Chrome, run: Path, hostile: Path, tmp_path: Path, scheme: str) -> None:
    """A scheme changes colours only. `make test` looks at the dark one by the samples above alone."""
    screen(driver, 1280, 800, scheme)
    write_report(run, tmp_path / "report.html")
    found = {}
    with viewing([run, hostile]) as server:
        pages = places(driver, server.url)
        pages["no such page"] = f"{server.url}/none"
        pages["hostile"] = f"{server.url}/run/traced/episode/episode1"
        pages["hostile call"] = f"{server.url}/run/traced/call/call1"
        pages["report"] = (tmp_path / "report.html").as_uri()
        for name, url in pages.items():
            driver.get(url)
            until(driver, lambda d: not d.find_elements(By.CSS_SELECTOR, "[data-load]:empty"))
            told = faults(driver, None if scheme == "light" else ["color-contrast"])
            if told:
                found[name] = told
    assert found == {}, "\n".join(f"{name}\n  " + "\n  ".join(told) for name, told in found.items())
