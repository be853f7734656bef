"""The explorer in Chromium: its numbers, its speed, and everything that a hand or a key does."""

import contextlib
import json
import re
import shutil
import statistics
import threading
import time

import pytest

from tests.show import explorer_checks as checks
from threshold_gating import TAXONOMY, TG, family
from threshold_gating.show import explorer
from threshold_gating.show.explorer.server import Server

pytestmark = pytest.mark.slow

FRAME = 4.0  # milliseconds
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1400,1000"
)
PLAIN = (
    "(key, value) => ArrayBuffer.isView(value) ? Array.from(value)"
    " : typeof value === 'number' && !Number.isFinite(value) ? String(value) : value"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, control = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or control is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(control))
    made.set_script_timeout(120)
    yield made
    made.quit()


@contextlib.contextmanager
def served(contents):
    with Server(contents, 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


class Page:
    """The explorer in a tab."""

    def __init__(self, driver, url):
        self.driver, self.url = driver, url

    def open(self, fragment=""):
        self.driver.get(
            "about:blank"
        )  # the same page with another fragment would not be loaded anew
        self.driver.get(f"{self.url}#{fragment}" if fragment else self.url)
        self.settle()
        return self

    def settle(self):
        """Until the next frame was drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"
        )

    def run(self, code, *arguments):
        script = f"return JSON.stringify(({code})(...arguments), {PLAIN})"
        return json.loads(self.driver.execute_script(script, *arguments))

    def at(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector):
        return self.at(selector).get_property("textContent")

    def put(self, selector, text):
        """Type into a field and leave it."""
        self.driver.execute_script("arguments[0].select()", self.at(selector))
        self.at(selector).send_keys(f"\ue017{text}\t")  # delete, type, leave
        self.settle()

    @property
    def instance(self):
        return TG.from_dict(self.run("() => Gates.write(Explorer.state.t)"))

    @property
    def message(self):
        return self.text("#said") if self.at("#message").is_displayed() else ""


@pytest.fixture(scope="module")
def url():
    with served(explorer.files()) as found:
        yield found


@pytest.fixture
def page(driver, url):
    driver.set_window_size(1400, 1000)
    page = Page(driver, url).open()
    driver.get_log("browser")
    yield page
    assert driver.get_log("browser") == []  # no error, and nothing that the policy had to stop


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


FIVE = "tau=2,1.5,1.5,2&theta=-1.5,-0.5,0.5,1.5&s=0,0.1,0.5,0.9,1&c=0,0,0,0,0"


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
    want = TAXONOMY["silu"](checks.torch.tensor(xs, dtype=checks.torch.float64)).tolist()
    assert len(points) > 250
    assert (
        max(abs(a - b) for a, b in zip(ys, want, strict=True)) < 0.02
    )  # a tenth of a pixel each way


# By hand and by key


def drag(page, handle, by):
    from selenium.webdriver import ActionChains

    actions = ActionChains(page.driver).click_and_hold(handle).move_by_offset(by // 2, 3)
    actions.move_by_offset(by - by // 2, 0).release().perform()
    page.settle()


def test_a_threshold_follows_the_pointer_and_the_address_keeps_it(page):
    grip = page.at(".handle rect")
    width = page.run("() => Explorer.plots.function.inner.width")
    drag(page, grip, 150)
    theta = page.instance.theta[0]
    assert theta == pytest.approx(150 / width * 10, abs=0.1)
    assert float(page.at("#theta0-number").get_property("value")) == theta
    assert float(page.at("#theta0").get_property("value")) == pytest.approx(theta, abs=0.05)
    assert page.at(".handle").get_attribute("aria-valuenow") == str(theta)
    time.sleep(0.5)  # the address follows when the hand rests
    assert f"theta={theta}" in page.driver.current_url
    again = page.instance
    page.driver.refresh()
    page.settle()
    assert page.instance == again


def test_thresholds_in_order_stop_at_their_neighbours_and_free_ones_pass(page):
    page.open("tau=inf&theta=-1,1&s=0,1,0&c=-1,0,1")
    drag(page, page.all(".handle rect")[0], 400)
    assert page.instance.theta == (1, 1)
    page.open("tau=2&theta=-1,1&s=0,1,0&c=-1,0,1")
    drag(page, page.all(".handle rect")[0], 400)
    assert page.instance.theta[0] > 1.5
    assert page.instance.theta[1] == 1


def test_everything_works_from_the_keyboard(page):
    from selenium.webdriver import ActionChains, Keys

    page.at("body").click()
    ActionChains(page.driver).send_keys(Keys.TAB).perform()
    assert page.driver.switch_to.active_element.accessible_name == "threshold 1"
    ActionChains(page.driver).send_keys(Keys.ARROW_RIGHT * 3).perform()
    page.settle()
    assert page.instance.theta[0] == pytest.approx(0.125, abs=0.01)
    for selector in ("#K", "#tau", "#theta0", "#s1", "#c0"):
        before = page.instance
        page.at(selector).send_keys(Keys.ARROW_RIGHT)
        page.settle()
        assert page.instance != before, selector
    assert page.instance.K == 3
    page.at("#hard").send_keys(Keys.SPACE)
    page.settle()
    assert page.instance.hard


def test_every_control_has_a_name_and_the_tab_order_is_that_of_the_page(page):
    page.open("tau=inf&theta=-1,1&s=0,1,0&c=-1,0,1&pair=sky130-weak")
    controls = [e for e in page.all("input, select, button, .handle") if e.is_displayed()]
    assert len(controls) > 25
    assert [e.get_attribute("outerHTML") for e in controls if not e.accessible_name] == []
    order = page.run("() => [...document.querySelectorAll('[tabindex]')].map((e) => e.tabIndex)")
    assert set(order) == {0}


def test_branches_come_and_go_and_nothing_is_lost(page):
    page.open("tau=2&theta=-1,0.5&s=0,0.25,1&c=0.1,0.2,0.3")
    before = page.instance
    for K in (1, 2, 3):
        page.run(
            "(K) => { const e = document.getElementById('K'); e.value = K; return e.dispatchEvent(new Event('input')); }",
            K,
        )
        page.settle()
        assert page.instance.K == K
    assert page.instance == before
    page.at("#hard").click()
    page.settle()
    assert page.instance.hard
    page.at("#hard").click()
    page.settle()
    assert page.instance == before


def test_a_field_that_keeps_the_focus_shows_what_it_set(page):
    from selenium.webdriver import Keys

    page.driver.execute_script("arguments[0].select()", page.at("#tau-number"))
    page.at("#tau-number").send_keys("3.25", Keys.ENTER)
    page.settle()
    assert page.instance.tau == 3.25
    assert page.at("#tau-number").get_property("value") == "3.25"
    page.at("#tau-number").send_keys("x", Keys.ENTER)
    page.settle()
    assert page.message
    assert page.at("#tau-number").get_property("value") == "3.25"


def test_what_is_ticked_can_be_unticked(page):
    page.open(FIVE + "&q=0,0.5,0,0,0&clamp=-2,3")
    for selector in ("#own", "#curved", "#clamp"):
        assert page.at(selector).is_selected()
        page.at(selector).click()
        page.settle()
        assert not page.at(selector).is_selected(), selector
    assert page.instance == TG(2, (-1.5, -0.5, 0.5, 1.5), (0, 0.1, 0.5, 0.9, 1), (0,) * 5)
    for selector in ("#own", "#curved", "#clamp"):
        page.at(selector).click()
        page.settle()
        assert page.at(selector).is_selected(), selector
    assert page.instance.clamp == (-2, 3)
    assert page.at("#tau3").is_displayed()
    page.put("#q1-number", "0.25")
    assert page.instance.q == (0, 0.25, 0, 0, 0)


def test_link_and_code_are_copied(page):
    asked = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    allowed = {"permissions": asked, "origin": page.url.rstrip("/")}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", allowed)
    page.open("tau=2&theta=1&s=0,1&c=0,0")
    read = "const done = arguments[0]; navigator.clipboard.readText().then(done, (e) => done(String(e)));"
    for button, copied in (
        ("#copy-python", "TG(tau=2, theta=(1,), s=(0, 1), c=(0, 0))"),
        ("#copy-link", f"{page.url}#tau=2&theta=1&s=0,1&c=0,0"),
    ):
        page.at(button).click()
        wait(page, lambda: "is on the clipboard" in page.message)
        assert page.driver.execute_async_script(read) == copied
        page.at("#close").click()
    page.run("() => delete Navigator.prototype.clipboard")  # as a page that is not trusted has it
    page.at("#copy-link").click()
    assert page.message == f"The link could not be copied; here it is: {copied}"


def test_rows_of_the_table_are_there_to_start_from(page):
    from selenium.webdriver.support.select import Select

    for key in ("gelu", "hardswish", "gelu_k3_product", "identity", "relu6_clamp", "softsign"):
        Select(page.at("#start")).select_by_value(key)
        page.settle()
        want = TAXONOMY[key].to_dict()
        want.pop("anchor", None)
        assert page.instance == TG.from_dict(want)
        assert f"This is the row {key} of the table" in page.text("#nearness") or key == "softsign"


# What is refused


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("#tau-number", "-1", "tau must be a positive number, or inf for hard gates; got -1"),
        ("#tau-number", "NaN", "tau must be a number, or inf; got 'NaN'"),
        ("#theta0-number", "one", "theta must be a number; got 'one'"),
        ("#s0-number", "1e999", "s must be finite numbers; got Infinity"),
        ("#c1-number", "", "c must be a number; got ''"),
        ("#variance-number", "0", "variance is from 0.01 to 100; got 0"),
        ("#view-number", "-3", "view is from 0.5 to 100; got -3"),
    ],
)
def test_a_wrong_number_says_why_and_changes_nothing(page, field, text, said):
    before = page.run("() => State.write(Explorer.state)")
    value = page.at(field).get_property("value")
    page.put(field, text)
    assert said in page.message
    assert "The picture is as it was." in page.message
    assert page.run("() => State.write(Explorer.state)") == before
    assert page.at(field).get_property("value") == value
    page.at("#close").click()
    assert page.message == ""


def test_thresholds_out_of_order_are_sorted_only_when_asked(page):
    page.open("tau=2&theta=1,-1&s=0,1,0&c=-1,0,1")
    before = page.instance
    page.at("#hard").click()
    page.settle()
    assert "hard gates need thresholds in order" in page.message
    assert page.instance == before
    assert not page.at("#hard").is_selected()
    page.at("#said button").click()
    page.settle()
    assert page.instance.hard
    assert page.instance.theta == (-1, 1)
    assert page.message == ""


def test_a_damaged_address_is_said_and_the_picture_stays(page):
    page.open("tau=-1&theta=0&s=0,1&c=0,0")
    assert "The link is damaged: tau must be a positive number" in page.message
    assert page.instance == TAXONOMY["silu"]
    page.put("#theta0-number", "0.7")
    before = page.instance
    page.driver.execute_script("location.hash = '#%%%'")
    page.settle()
    assert "The link is damaged" in page.message
    assert page.instance == before
    page.driver.execute_script("location.hash = '#tau=3&theta=1&s=0,1&c=0,0'")
    page.settle()
    assert page.message == ""
    assert page.instance == TG(3, 1, (0, 1), (0, 0))


@pytest.mark.parametrize(
    ("fragment", "said"),
    [
        ("&pair=nmos", "there is no preset 'nmos'; there are sky130-weak"),
        ("&chip=32", "chip is a whole number from 0 to 31; got 32"),
    ],
)
def test_an_unknown_pair_or_chip_is_named(page, fragment, said):
    page.open(f"tau=1&theta=0&s=0,1&c=0,0{fragment}")
    assert said in page.message


# Pairs


def test_a_pair_shows_its_chip_and_says_what_is_not_drawn(page):
    from selenium.webdriver.support.select import Select

    assert not page.at("#pair-settings").is_displayed()
    Select(page.at("#pair")).select_by_visible_text("sky130-weak")
    page.settle()
    assert "Noise is not drawn" in page.text("#pair-says")
    assert "those of tg simulate (one gate for a layer, seed 0)" in page.text("#pair-says")
    first = page.at("path.chip").get_attribute("d")
    page.put("#chip-number", "5")
    assert page.at("path.chip").get_attribute("d") != first
    page.put("#celsius-number", "200")
    assert "was measured from -40 to 125 C; 200 C is outside" in page.message
    Select(page.at("#pair")).select_by_visible_text("none: ideal gates")
    page.settle()
    assert page.at("path.chip").get_attribute("d") == ""


# Networks


def network():
    site = {"says": "", "total": 1}
    rows = [TAXONOMY[key].to_dict() for key in ("relu", "tanh")]
    return {
        "name": "net",
        "sites": [
            {**site, "name": "a.act", "kind": "relu", "instances": rows[:1]},
            {**site, "name": ":softmax#0", "kind": "softmax", "instances": [], "says": "no function of one number"},
            {**site, "name": "b:<b>tanh</b>", "kind": "tanh", "instances": rows, "total": 5, "says": "learned"},
        ],
    }  # fmt: skip


def test_sites_of_a_network_are_walked(driver):
    with served(explorer.files(network=network())) as url:
        page = Page(driver, url).open()
        assert page.text("#network") == "net: 3 sites"
        assert page.instance == TAXONOMY["relu"]
        page.at("#after").click()  # over the one that has no curve
        page.settle()
        assert page.at("#sites").get_property("value") == "2"
        assert page.text("#which") == "0 of 5"
        from selenium.webdriver import Keys

        page.at("#group").send_keys(Keys.ARROW_RIGHT)
        page.settle()
        assert page.instance == TAXONOMY["tanh"]
        assert page.text("#says") == "learned"
        page.put("#theta0-number", "1")
        assert "changed here" in page.text("#says")
        time.sleep(0.5)
        link = page.driver.current_url
        page.driver.get("about:blank")
        page.driver.get(link)
        page.settle()
        assert page.at("#sites").get_property("value") == "2"
        assert page.instance.theta == (1,)
        page.at("#before").click()
        page.settle()
        assert page.instance == TAXONOMY["relu"]


def test_a_link_to_a_site_that_is_not_here_shows_its_curve(page):
    page.open("tau=1&theta=2&s=0,1&c=0,0&site=layer1.act")
    assert page.message == "This page has no site layer1.act; the curve is that of the link."
    assert page.instance.theta == (2,)


def test_a_config_is_opened_and_a_damaged_one_is_not(page, tmp_path):
    good, bad = tmp_path / "tg_config.json", tmp_path / "bad.json"
    call = {"kind": "relu", "exact": True, "sup": 0, "instance": TAXONOMY["relu"].to_dict()}
    config = {
        "model": "Net",
        "modules": [{"name": "act", "calls": [call]}],
        "owners": [],
        "recurrent": [],
    }
    good.write_text(json.dumps(config))
    bad.write_text(good.read_text()[:-20])
    before = page.instance
    page.at("#file").send_keys(str(bad))
    wait(page, lambda: page.message)
    assert page.message.startswith("bad.json was not opened: it is not JSON")
    assert page.instance == before
    page.at("#file").send_keys(str(good))
    wait(page, lambda: page.at("#walking").is_displayed())
    page.settle()
    assert page.text("#network") == "Net: 1 site"
    assert page.instance == TAXONOMY["relu"]
    page.at("#file").send_keys(str(bad))
    wait(page, lambda: page.message)
    assert page.text("#network") == "Net: 1 site"


def wait(page, happened):
    for _ in range(50):
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen within five seconds")


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
