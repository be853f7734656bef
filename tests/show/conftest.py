"""Chromium for the tests of pages, and the explorer in it."""

import shutil

import pytest

from tests.show.explorer_page import Page, served
from threshold_gating.show import explorer

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1400,1000"
)


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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
