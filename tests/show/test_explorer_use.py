"""The explorer in Chromium: what a hand and a key do, what is refused, and networks that are walked."""

import json
import time

import pytest

from tests.show.explorer_page import FIVE, Page, served, wait
from threshold_gating import TAXONOMY, TG
from threshold_gating.show import explorer

pytestmark = pytest.mark.slow


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


def test_a_link_to_a_site_whose_name_ends_like_a_channel_finds_it(driver):
    known = network()
    known["sites"][0]["name"], known["sites"][1] = "act[1]", {**known["sites"][2], "name": "act"}
    with served(explorer.files(network=known)) as url:
        page = Page(driver, url).open("tau=inf&theta=0&s=0,1&c=0,0&site=act%5B1%5D")
        assert page.at("#sites").get_property("value") == "0"
        page.open("tau=1&theta=0&s=0,1&c=0,0&site=act%5B0%5D")
        assert page.at("#sites").get_property("value") == "1"


@pytest.mark.parametrize("largest", ["tau", "c", "s", "q", "all"])
def test_the_largest_numbers_are_drawn_and_larger_ones_are_refused(page, largest):
    usual = {"tau": "1", "theta": "0", "s": "0,1", "c": "0,0", "q": "0,0"}
    huge = {"tau": "1e30", "s": "0,1e30", "c": "-1e30,1e30", "q": "0,1e30"}
    given = usual | {k: v for k, v in huge.items() if largest in (k, "all")}
    fragment = "&".join(f"{name}={value}" for name, value in given.items())
    page.open(f"{fragment}&pair=sky130-weak")  # the fixture looks for errors in the console
    assert page.text("#python").startswith("TG(")
    assert page.text("#near-name")
    page.open(fragment.replace("1e30", "1e200"))
    assert "the explorer shows numbers up to 1e+30" in page.message
    assert page.instance == TAXONOMY["silu"]


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
