"""The explorer in Chromium: its numbers, its speed and its looks."""

import re
import statistics

import pytest
import torch

from tests.show import explorer_checks as checks
from tests.show.explorer_page import FIVE, Page
from threshold_gating import TAXONOMY, TG, family
from threshold_gating.show import explorer

pytestmark = pytest.mark.slow

FRAME = 4.0  # milliseconds


# Its numbers


def test_values_derivatives_and_gates_are_torchs(page):
    checks.check_values(page.run)


def test_families_and_code_are_those_of_the_library(page):
    checks.check_families(page.run)


def test_the_nearest_named_activation_is_found(page):
    checks.check_nearest(page.run)


def test_the_edge_of_chaos_is_that_of_the_theory(page):
    checks.check_edges(page.run, [0.25, 4.0])


def test_chips_have_the_curves_of_the_simulation(page):
    checks.check_chips(page.run, ["sky130-strong", "gf180-weak", "sky130-npn"])


@pytest.mark.parametrize("more", ["", "&pair=sky130-weak"])
def test_a_frame_takes_four_milliseconds_with_five_branches(page, more):
    """All of it: values, texts, lines and the layout of the page.

    As processor time of the page's thread, and the least of five means: others use the same cores.
    """
    frames = (
        "(count) => { const times = []; for (let k = 0; k < count; k++) {"
        " const given = Gates.write(Explorer.state.t); given.theta[1] = -0.5 + k / count / 2;"
        " const from = performance.now(); Explorer.propose(given); Explorer.render();"
        " document.body.getBoundingClientRect(); times.push(performance.now() - from); } return times; }"
    )
    page.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    try:
        page.open(FIVE + more)
        page.run(frames, 100)  # the browser compiles what runs often
        means, times = [], []
        for _ in range(5):
            before = busy(page)
            times += page.run(frames, 60)
            means.append((busy(page) - before) / 60 * 1000)
    finally:
        page.driver.execute_cdp_cmd("Performance.disable", {})
    spent = f"{min(means):.2f} (up to {max(means):.2f}) ms of processor time"
    print(
        f"\na frame{more}: {spent}; {min(times):.2f}, median {statistics.median(times):.2f} ms passed"
    )
    assert page.run("() => Explorer.state.t.theta[1]") == pytest.approx(-0.5 + 59 / 120)
    assert 0.2 < min(means) <= FRAME


def busy(page):
    """Seconds that the page's thread has worked."""
    found = page.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(each["value"] for each in found if each["name"] == "TaskDuration")


def test_what_is_shown_is_what_is_computed(page):
    page.open("tau=2&theta=0.5&s=0,1&c=0,0.25")
    t = TG(2, 0.5, (0, 1), (0, 0.25))
    assert page.text("#family").startswith(family(t))
    page.put("#at", "0.5")
    shown = {key: float(page.text(f"#{key}-there").replace("−", "-")) for key in ("y", "d1", "d2")}
    assert shown == {"y": 0.375, "d1": 0.875, "d2": 1.0}
    assert [each.text for each in page.all("#gate-key .there")] == ["0.500", "0.500"]
    assert page.text("#python") == "TG(tau=2, theta=(0.5,), s=(0, 1), c=(0, 0.25))"
    words = page.text("#nearness")
    assert "root mean square difference over 129 inputs, evenly from −8 to 8" in words


def test_lines_pass_through_the_values(page):
    """The drawn curve, from its pixels back to numbers."""
    page.open("tau=1&theta=0&s=0,1&c=0,0")
    code = (
        "() => { const svg = document.getElementById('function').querySelector('.field');"
        " const path = svg.querySelector('.y'); return [path.getAttribute('d'), svg.getAttribute('width'),"
        " svg.getAttribute('height')]; }"
    )
    d, width, height = page.run(code)
    low, high = page.run("() => { const e = Explorer.plots.function; return [e.low, e.high]; }")
    points = [tuple(map(float, pair.split())) for pair in re.split("[ML]", d)[1:]]
    xs = [px / float(width) * 10 - 5 for px, _ in points]
    ys = [high - py / float(height) * (high - low) for _, py in points]
    want = TAXONOMY["silu"](torch.tensor(xs, dtype=torch.float64)).tolist()
    assert len(points) > 250
    assert (
        max(abs(a - b) for a, b in zip(ys, want, strict=True)) < 0.02
    )  # a tenth of a pixel each way


# How it looks


def boxes(page):
    code = "() => [...document.querySelectorAll('figure, figure > svg, .card, #readout')].map((e) => { const b = e.getBoundingClientRect(); return [e.id || e.tagName, b.x, b.y + scrollY, b.width]; })"
    return page.run(code)


def test_nothing_jumps_while_a_slider_moves_and_a_message_comes(page):
    page.open(FIVE)
    before = boxes(page)
    for theta in (-3.7, 0.0123, 2.4):
        page.put("#theta1-number", str(theta))
        assert boxes(page) == before
    page.put("#tau0-number", "-1")
    assert page.message
    assert boxes(page) == before


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 820, 390, 320])
def test_no_width_makes_the_page_wider_than_the_window(page, scheme, width):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.open(FIVE + "&pair=sky130-weak")
        assert page.run("() => document.documentElement.scrollWidth") <= width
        colours = page.run(
            "() => { const c = getComputedStyle(document.body); return [c.color, c.backgroundColor]; }"
        )
        ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert (ink < paper) == (scheme == "light")
        heights = page.run(
            "() => [...document.querySelectorAll('figure > svg')].map((e) => e.clientHeight)"
        )
        assert min(heights) >= 100
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_it_asks_nothing_of_any_other_place(page):
    page.open("tau=1&theta=0&s=0,1&c=0,0&pair=sky130-weak")
    names = page.run("() => performance.getEntriesByType('resource').map((e) => e.name)")
    assert {name.removeprefix(page.url) for name in names} == set(explorer.PARTS)


def test_it_works_as_files(driver, tmp_path):
    path = explorer.write(tmp_path / "files", explorer.files("mish"))
    page = Page(driver, path.as_uri()).open()
    assert page.instance == TAXONOMY["mish"]
    assert page.text("#nearest") == "mish – the same, to rounding"


def test_without_scripts_it_says_what_it_needs(driver, url):
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.get("about:blank")
        driver.get(url)
        words = driver.find_element("css selector", "noscript p")
        assert words.is_displayed()
        assert "needs JavaScript" in words.text
        assert not driver.find_element("css selector", "main").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_without_svg_it_says_so(driver, url):
    source = {"source": "delete SVGSVGElement.prototype.createSVGRect;"}
    added = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    try:
        driver.get("about:blank")
        driver.get(url)
        stop = driver.find_element("css selector", "#stop")
        assert stop.is_displayed()
        assert "draws with SVG, which this browser does not have" in stop.text
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
