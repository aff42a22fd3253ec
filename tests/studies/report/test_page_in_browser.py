"""The page in a real browser: it draws, filters, and has nothing to complain about."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up import study_of

from fedglimpse.studies.report.analysis import analyse
from fedglimpse.studies.report.page import page

webdriver = pytest.importorskip("selenium.webdriver", reason="needs the package selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(30)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {
        "digits mobile": {"data.name": "digits"},
        "digits random": {"data.name": "digits", "visibility.kind": "random"},
    }
    variants = {"fedavg": 0.6, "fedprox": 0.601, "glimpse": 0.7}
    study = study_of(settings, variants, range(5), 60, 40)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(analyse(study)))
    return path


@pytest.fixture
def opened(browser: Any, file: Path) -> Any:
    show(browser, 1280, "light")
    browser.get(file.as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready") == "true"
    yield browser
    assert [line for line in browser.get_log("browser") if line["level"] != "DEBUG"] == []


def show(browser: Any, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def visible(browser: Any, selector: str) -> int:
    script = (
        "return [...document.querySelectorAll(arguments[0])].filter(n => n.offsetParent).length"
    )
    return int(browser.execute_script(script, selector))


def inked(browser: Any, selector: str) -> int:
    """Return how many pixels of a canvas are not empty."""
    script = """const c = document.querySelector(arguments[0]);
        const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        let n = 0; for (let i = 3; i < data.length; i += 4) n += data[i] > 0; return n;"""
    return int(browser.execute_script(script, selector))


def choose(browser: Any, element: str, value: str) -> None:
    script = """const e = document.getElementById(arguments[0]); e.value = arguments[1];
        for (const name of ["input", "change"]) e.dispatchEvent(new Event(name));"""
    browser.execute_script(script, element, value)


def press(browser: Any, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def test_filters_filter(opened: Any) -> None:
    assert visible(opened, "#results tbody tr") == 6
    press(opened, '#variants [data-value="glimpse"]')
    assert visible(opened, "#results tbody tr") == 2
    assert visible(opened, "#fairness tbody tr") == 2
    press(opened, '#settings [data-value="digits random"]')
    assert visible(opened, "#results tbody tr") == 1
    assert visible(opened, "#charts .chart") == 1
    press(opened, '#variants [data-value="glimpse"]')  # the last one off brings all back
    assert visible(opened, "#results tbody tr") == 3
    choose(opened, "verdict", "up")
    assert visible(opened, "#results tbody tr") == 1
    choose(opened, "search", "nothing like this")
    assert visible(opened, "#results tbody tr") == 0
    assert visible(opened, "#results .empty") == 1


def test_curves_draw_and_answer_the_mouse(opened: Any) -> None:
    assert visible(opened, "#charts canvas") == 2
    smooth = inked(opened, "#charts canvas")
    assert smooth > 3000
    for axis in ("uplink_bytes", "client_flops", "rounds"):
        choose(opened, "axis", axis)
        assert inked(opened, "#charts canvas") > 3000
    opened.execute_script(
        """const over = document.querySelector("#charts .u-over");
        over.scrollIntoView({block: "center"});
        const box = over.getBoundingClientRect();
        const at = {bubbles: true, clientX: box.left + 200, clientY: box.top + 60};
        over.dispatchEvent(new MouseEvent("mouseenter", at));
        over.dispatchEvent(new MouseEvent("mousemove", at));"""
    )
    text = opened.execute_async_script("setTimeout(() => arguments[0](tip.innerText), 200)")
    assert text.startswith("round ")
    assert "glimpse" in text


def test_costs_show_one_measure_at_a_time(opened: Any) -> None:
    assert visible(opened, "#costs .bar") == 6
    choose(opened, "measure", "rounds")
    assert visible(opened, '#costs .bars[data-measure="rounds"]') == 2
    assert visible(opened, '#costs .bars[data-measure="uplink_bytes"]') == 0


def test_inside_a_run(opened: Any) -> None:
    assert inked(opened, "#rounds") > 1000
    assert inked(opened, "#mix") > 1000
    assert visible(opened, "#agent .moment .q") == 10
    assert visible(opened, "#agent .attention i") == 10 * 6
    assert visible(opened, "#theory canvas") == 1
    said = "return document.querySelector('#agent p').innerText"
    before = opened.execute_script(said)
    opened.execute_script(
        "const s = document.querySelector('#agent input'); s.value = 0;"
        "s.dispatchEvent(new Event('input'))"
    )
    assert opened.execute_script(said) != before
    opened.execute_script(
        """const c = document.getElementById("rounds"), box = c.getBoundingClientRect();
        const at = {clientX: box.left + 3, clientY: box.top + 3};
        c.dispatchEvent(new PointerEvent("pointermove", at));"""
    )
    assert "client 0" in opened.execute_script("return tip.innerText")
    assert "class" in opened.execute_script("return tip.innerText")
    choose(opened, "run-order", "chosen")
    choose(opened, "run-variant", "fedavg")
    assert visible(opened, "#agent .moment") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_themes_and_widths(browser: Any, file: Path, width: int, scheme: str) -> None:
    show(browser, width, scheme)
    browser.get(file.as_uri())
    colour = "return getComputedStyle(document.body).backgroundColor"
    asked = browser.execute_script(colour)
    assert (int(asked.split("(")[1].split(",")[0]) < 128) == (scheme == "dark")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    press(browser, "#theme")
    assert browser.execute_script(colour) != asked
    assert [line for line in browser.get_log("browser") if line["level"] != "DEBUG"] == []


def test_tables_are_there_without_scripts(browser: Any, file: Path) -> None:
    show(browser, 1280, "light")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(file.as_uri())
        rows = browser.find_elements("css selector", "#results tbody tr")
        assert sum(row.is_displayed() for row in rows) == 6
        assert not browser.find_element("id", "curves").is_displayed()
        bars = browser.find_elements("css selector", "#costs .bar")
        assert sum(bar.is_displayed() for bar in bars) == 6 * 5
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_it_prints(opened: Any) -> None:
    pdf = opened.execute_cdp_cmd("Page.printToPDF", {})["data"]
    assert len(pdf) > 20_000
    assert opened.execute_script("return document.documentElement.dataset.theme") == "light"
