"""Pages in Chromium, clicked through as a reader does: by mouse, by keyboard, on a phone."""

import json
import time

import pytest
import torch
from torch import nn

import threshold_gating as tg
from threshold_gating.show import report

pytestmark = pytest.mark.slow
NAME = "<img src=x onerror=broken=1>'\""
PHONE = 390


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.acts = nn.ModuleList([nn.GELU(), nn.SiLU(), nn.ReLU()][k % 3] for k in range(12))
        self.rnn, self.idle = nn.LSTM(8, 8, batch_first=True), nn.Mish()
        self.add_module(NAME, nn.Tanh())

    def forward(self, x):
        for layer, act in zip(self.layers, self.acts, strict=True):
            x = x + act(layer(x))
        return getattr(self, NAME)(self.rnn(x)[0].softmax(-1))


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(6, 5, 8)
    return report.gather(model, tg.convert(model, inputs=x), x, name="a <b>network</b>")


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    found.write(path)
    return path


@pytest.fixture(scope="module")
def browser(driver):
    """Chromium, left as it was found: other pages are tested in it too."""
    driver.get_log("browser")
    yield driver
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture
def opened(browser, page):
    """Opens the page as a reader of some kind does; nothing may be said in the console."""

    def open_page(width=1200, dark=False, scripts=True, at=""):
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        disabled = {"value": not scripts}
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", disabled)
        browser.get("about:blank")
        browser.get(page.as_uri() + at)
        return browser

    yield open_page
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert browser.get_log("browser") == []


def all_of(browser, selector):
    return browser.find_elements("css selector", selector)


def names(browser):
    return [e.text for e in all_of(browser, "tbody:not([hidden]) > tr:first-child > th")]


def shown(browser):
    """The text of the details that are open."""
    return [e.text for e in all_of(browser, ".more") if e.is_displayed()]


def test_a_click_opens_a_site_and_another_closes_it(opened, found):
    browser = opened()
    rows = [row.site for row in found.certificate.rows]
    assert names(browser) == rows
    assert not shown(browser)
    link = all_of(browser, "tr[data-opens] a")[0]
    link.click()
    (text,) = shown(browser)
    assert repr(found.seen[0].gates[0]) in text
    assert "All 240 values, from" in text
    assert "max " in text
    svg = all_of(browser, "#site1-more svg")[0]
    assert svg.is_displayed()
    assert svg.size["height"] > 100
    assert link.get_attribute("aria-expanded") == "true"
    all_of(browser, "#site2 td")[2].click()  # anywhere in a row
    assert [text.splitlines()[0] for text in shown(browser)] == [rows[1]]
    all_of(browser, "#site2-more a")[-1].click()  # Close
    assert not shown(browser)


def test_columns_sort_both_ways_and_details_stay_with_their_rows(opened, found):
    browser = opened()
    worst = sorted(found.certificate.rows, key=lambda row: row.max if row.ok is not None else -1)
    button = all_of(browser, "thead button")[3]
    button.click()
    largest = names(browser)
    assert largest[0] == worst[-1].site
    assert largest[-1] == "idle"  # nothing to sort by comes last,
    button.click()
    assert names(browser)[-1] == "idle"  # in either direction
    assert names(browser)[0] in [row.site for row in worst if row.max == 0]
    assert all_of(browser, "thead th")[3].get_attribute("aria-sort") == "ascending"
    all_of(browser, "thead button")[0].click()
    assert names(browser)[:4] == sorted(names(browser))[:4]
    all_of(browser, "tr[data-opens] a")[0].click()
    (text,) = shown(browser)
    assert text.startswith(names(browser)[0])


def test_search_finds_sites(opened, found):
    browser = opened()
    field = all_of(browser, "input[type=search]")[0]
    field.send_keys("GELU")
    wanted = [row.site for row in found.certificate.rows if row.kind == "gelu"]
    assert names(browser) == wanted
    assert all_of(browser, "[role=status]")[0].text == f"4 of {len(found.certificate.rows)}"


def test_it_is_used_by_keyboard_alone(opened):
    keys = pytest.importorskip("selenium.webdriver").Keys
    browser = opened()
    browser.execute_script("document.querySelector('tr[data-opens] a').focus()")
    browser.switch_to.active_element.send_keys(keys.ENTER)
    assert len(shown(browser)) == 1
    browser.switch_to.active_element.send_keys(keys.ESCAPE)
    assert not shown(browser)
    assert browser.switch_to.active_element.get_attribute("hash") == "#site1-more"
    browser.execute_script("document.querySelector('thead button').focus()")
    browser.switch_to.active_element.send_keys(keys.SPACE)
    assert all_of(browser, "thead th")[0].get_attribute("aria-sort") == "ascending"
    # and every control can be reached
    focusable = "document.querySelectorAll('a[href], button, input, summary')"
    script = f"return [...{focusable}].filter((e) => e.tabIndex < 0).length"
    assert browser.execute_script(script) == 0


def test_the_json_is_downloaded(opened, found, tmp_path):
    browser = opened()
    folder = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", folder)
    all_of(browser, "#download")[0].click()
    wanted = tmp_path / "a_b_network_b_.json"
    for _ in range(100):
        if wanted.exists():
            break
        time.sleep(0.1)
    data = json.loads(wanted.read_text("utf-8"))
    assert data["certificate"] == json.loads(found.certificate.to_json())
    assert data["audit"] == found.audit.to_dict()


def test_names_are_shown_and_never_run(opened):
    browser = opened()
    assert browser.execute_script("return window.broken") is None
    assert NAME in names(browser)
    assert browser.title == "a <b>network</b>"
    script = "const s = document.createElement('script'); s.textContent = 'window.broken = 2';"
    browser.execute_script(f"{script} document.body.append(s)")
    assert browser.execute_script("return window.broken") is None  # the policy refuses it
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


@pytest.mark.parametrize("width", [PHONE, 320])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_a_phone(opened, width, dark):
    browser = opened(width, dark, at="#site1-more")
    script = "return document.documentElement.scrollWidth"
    assert browser.execute_script(script) <= width
    box = all_of(browser, "#site1-more article")[0].rect
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert len(shown(browser)) == 1


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_in_light_and_dark(opened, dark):
    """4.5 to 1, which the guidelines for accessible pages (WCAG 2.1) ask for."""
    browser = opened(dark=dark, at="#site1-more")
    script = """
    const rgb = (c) => c.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const light = (c) => rgb(c).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
      .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
    const behind = (e) => {
      const c = getComputedStyle(e).backgroundColor;
      return c === "rgba(0, 0, 0, 0)" ? behind(e.parentElement) : c;
    };
    return [...document.querySelectorAll("h1, h2, h3, p, li, dt, dd, th, td, a, button, summary")]
      .map((e) => [light(getComputedStyle(e).color), light(behind(e))])
      .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
    """
    ratios = browser.execute_script(script)
    assert len(ratios) > 100
    assert min(ratios) >= 4.5
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(20, 23, 28)") == dark


def test_without_scripts_summary_table_and_sites_are_there(opened, found):
    browser = opened(scripts=False)
    assert names(browser) == [row.site for row in found.certificate.rows]
    assert "JavaScript" in all_of(browser, "noscript")[0].text
    assert not all_of(browser, "#download")[0].is_displayed()
    all_of(browser, "tr[data-opens] a")[0].click()  # links alone
    (text,) = shown(browser)
    assert "All 240 values" in text


def test_without_pictures_the_numbers_are_there(opened, found):
    browser = opened(at="#site1-more")
    browser.execute_script("for (const e of document.querySelectorAll('svg')) e.remove()")
    (text,) = shown(browser)
    for words in ("All 240 values", "TG(tau=", "max ", "gelu"):
        assert words in text
