"""The viewer in headless Chromium: every page opens without an error, and one leads to the next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from cotune.integrations.web.viewer.report import write_report
from cotune.integrations.web.viewer.server import viewing
from cotune.records.structs import CallRecord, Episode, Task
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.config.load import convert
from cotune.trainer.reporting.activity import Activity
from cotune.trainer.run.run_folder import RunFolder
from tests.integrations.web.viewer.conftest import STEPS

PAGES = ("", "/curves", "/evaluations", "/episodes", "/groups", "/tasks", "/config")
WAIT = 60.0


def until(driver: Chrome, condition) -> None:
    WebDriverWait(driver, WAIT, poll_frequency=0.05).until(condition)


def opened(driver: Chrome, url: str) -> None:
    """Open a page, and wait for its script."""
    driver.get(url)
    until(driver, ready)


def arrived(driver: Chrome, there) -> None:
    """Wait for a page whose address is as expected, and for its script: keys that are pressed before are lost."""
    until(driver, lambda d: there(d.current_url) and ready(d))


def ready(driver: Chrome) -> bool:
    return driver.execute_script("return document.documentElement.dataset.ready") == "yes"


def click(driver: Chrome, selector: str) -> None:
    """Click what a selector finds, and wait for the page that it leads to."""
    before = driver.current_url
    driver.find_element(By.CSS_SELECTOR, selector).click()
    arrived(driver, lambda url: url != before)


def errors(driver: Chrome) -> list[str]:
    return [entry["message"] for entry in driver.get_log("browser")]


def screen(driver: Chrome, width: int, height: int, scheme: str) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 800, "light"), (390, 844, "dark")])
def test_every_page_opens_and_fits_the_screen(driver, site, width, height, scheme):
    screen(driver, width, height, scheme)
    errors(driver)
    for path in PAGES:
        opened(driver, f"{site}/run/trained{path}")
        script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert driver.execute_script(script) <= 0, path
        assert errors(driver) == [], path
    dark = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(20, 22, 26)") == (scheme == "dark")


def test_long_names_and_errors_leave_room_for_the_rest(driver, tmp_path):
    role = "quality_assurance_reviewer_for_regulatory_compliance_documents"
    error = "ValueError: no plan\n" + "  File app.py, line 3\n" * 60
    record = CallRecord(id="C", episode="E", role=role, step=0, turn=0, messages=(), status="error", error=error)
    with SqliteStore.open(tmp_path / "traced") as store:
        store.write([record, Episode(id="E", task=Task(id="t", input="x"), workflow="w", calls=1)])
    wider = "return arguments[0].scrollWidth - arguments[0].clientWidth"
    with viewing([tmp_path / "traced"]) as server:
        screen(driver, 390, 844, "light")
        driver.get(f"{server.url}/run/traced/episode/E")
        assert driver.execute_script(wider, driver.find_element(By.TAG_NAME, "html")) <= 0
        assert driver.find_element(By.CSS_SELECTOR, ".errorbox").size["height"] <= 300
        screen(driver, 1280, 800, "light")
        driver.get(f"{server.url}/run/traced")
        until(driver, lambda d: d.find_elements(By.CSS_SELECTOR, "[data-load] .scroll"))
        assert driver.execute_script(wider, driver.find_element(By.CSS_SELECTOR, "[data-load] .scroll")) <= 0


def test_numbers_beside_an_axis_differ(driver, site):
    opened(driver, f"{site}/run/trained/curves")
    ticks = [[3.46, False], [3.465, False], [1.25e-7, False], [0.6, True], [0.605, True], [25000, False]]
    told = driver.execute_script("return arguments[0].map((one) => tick(...one))", ticks)
    assert told == ["3.46", "3.465", "1.25e-7", "60%", "60.5%", "25,000"]


def test_from_a_curve_to_an_episode_to_a_group(driver, site):
    screen(driver, 1280, 800, "light")
    opened(driver, f"{site}/run/trained/curves")
    chart = driver.find_element(By.CSS_SELECTOR, "[data-chart=roles-reward] .u-over")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    right = ActionChains(driver).move_to_element_with_offset(chart, int(chart.size["width"] * 0.45), 0)
    right.click().perform()
    arrived(driver, lambda url: "/episodes" in url)
    assert f"step={STEPS}" in driver.current_url and "phase=train" in driver.current_url
    click(driver, "a.main.mono")
    assert "/episode/" in driver.current_url
    click(driver, "#call-0 h2 a.more")
    assert "/group/" in driver.current_url
    assert len(driver.find_elements(By.CSS_SELECTOR, ".candidate")) == 4
    assert "Candidates, the best first" in driver.page_source
    assert errors(driver) == []


def test_a_stretch_of_a_curve_is_zoomed_into(driver, site):
    screen(driver, 1280, 800, "light")
    opened(driver, f"{site}/run/trained/curves")
    chart = driver.find_element(By.CSS_SELECTOR, "[data-chart=roles-reward] .u-over")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    shown = "const {min, max} = PLOTS.get('roles-reward').plot.scales.x; return [min, max]"
    whole_start, whole_end = driver.execute_script(shown)
    # Both ends lie well inside the chart's left half, so that its width in pixels, which scroll bars and fonts change,
    # decides nothing.
    tenth = chart.size["width"] // 10
    ActionChains(driver).move_to_element_with_offset(chart, -4 * tenth, 0).click_and_hold().move_by_offset(
        3 * tenth, 0
    ).release().perform()
    until(driver, lambda d: d.execute_script(shown)[1] < (whole_start + whole_end) / 2)
    assert driver.execute_script(shown)[0] > whole_start
    assert "/curves" in driver.current_url


def test_the_keyboard_leads_through_lists_and_pages(driver, site):
    screen(driver, 1280, 800, "light")
    opened(driver, f"{site}/run/trained/episodes")
    ActionChains(driver).send_keys("j", "j").perform()
    second = driver.find_elements(By.CSS_SELECTOR, ".item .main")[1].get_attribute("href")
    assert driver.switch_to.active_element.get_attribute("href") == second
    ActionChains(driver).send_keys(Keys.ENTER).perform()
    arrived(driver, lambda url: url == second)
    ActionChains(driver).send_keys("n").perform()
    arrived(driver, lambda url: url != second and "/episode/" in url)
    ActionChains(driver).send_keys("6").perform()
    arrived(driver, lambda url: url.endswith("/groups"))
    ActionChains(driver).send_keys("?").perform()
    assert driver.find_element(By.ID, "keys").is_displayed()


def test_a_run_under_way_appears_by_itself(driver, tmp_path):
    screen(driver, 1280, 800, "light")
    with SqliteStore.open(tmp_path / "traced") as store, viewing([tmp_path / "traced"]) as server:
        driver.get(f"{server.url}/run/traced/episodes")
        assert "No episode has ended yet" in driver.page_source
        store.write([Episode(id="E1", task=Task(id="t", input="x"), workflow="w")])
        store.flush()
        until(driver, lambda d: "episode/E1" in d.page_source)


def test_the_phase_of_a_run_under_way_is_told_as_it_changes(driver, tmp_path):
    folder = RunFolder.create(tmp_path / "r1", convert({"model": "m", "steps": 4}), workflow=None, tasks=None)
    activity = Activity(4, folder.path)
    activity.begin(0)
    with viewing([folder.path]) as server, activity.phase("rollout"):
        opened(driver, f"{server.url}/run/r1")
        assert driver.find_element(By.ID, "now").text == "step 1 of 4: rollout"
        with activity.phase("update", "writer"):
            until(driver, lambda d: d.find_element(By.ID, "now").text == "step 1 of 4: update of writer")
    folder.close()


def test_a_script_in_a_message_is_text_on_every_page(driver, hostile):
    screen(driver, 1280, 800, "light")
    with viewing([hostile]) as server:
        for path in ("", "/evaluations", "/episodes", "/episode/episode1", "/call/call1", "/groups", "/tasks"):
            opened(driver, f"{server.url}/run/traced{path}")
            assert driver.title != "taken over"
            assert driver.find_elements(By.CSS_SELECTOR, "main script:not([type]), main img") == []
        driver.get(f"{server.url}/run/traced/call/call1")
        assert "<script>document.title = 'taken over'</script>" in driver.find_element(By.TAG_NAME, "main").text
        driver.execute_script("document.body.insertAdjacentHTML('beforeend', '<p onclick=\"document.title=1\">x</p>')")
        driver.execute_script("document.body.lastElementChild.click()")
        assert driver.title != "1"


def test_the_report_is_one_file_that_needs_no_server(driver, run, hostile, tmp_path: Path):
    screen(driver, 1280, 800, "light")
    errors(driver)
    write_report(run, tmp_path / "report.html")
    driver.get((tmp_path / "report.html").as_uri())
    assert len(driver.find_elements(By.CSS_SELECTOR, ".plot canvas")) > 10
    said = driver.find_element(By.TAG_NAME, "main").text
    assert "held-out success" in said and "Task a" in said and "The same held-out tasks" in said
    loaded = driver.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    write_report(hostile, tmp_path / "hostile.html")
    driver.get((tmp_path / "hostile.html").as_uri())
    assert "taken over" in driver.find_element(By.TAG_NAME, "main").text and "taken over" not in driver.title
    assert errors(driver) == [], json.dumps(errors(driver))


def test_small_numbers_beside_an_axis_keep_what_tells_them_apart(driver, site):
    driver.get(f"{site}/run/trained/curves")
    script = "return [5e-6, 5.2e-6, -4e-6, 0, 0.05, 1.125, 2000].map((value) => tick(value, false))"
    assert driver.execute_script(script) == ["5e-6", "5.2e-6", "-4e-6", "0", "0.05", "1.125", "2,000"]


def test_a_narrow_list_of_runs_has_its_figures_on_the_screen(driver, site):
    screen(driver, 390, 844, "light")
    driver.get(f"{site}/?all=1")
    right = "return Math.max(...[...document.querySelectorAll('#runs td')].map((e) => e.getBoundingClientRect().right))"
    assert driver.execute_script(right) <= 390
