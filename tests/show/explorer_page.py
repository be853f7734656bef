"""The explorer in a tab of Chromium, for tests."""

import contextlib
import json
import threading
import time

from threshold_gating import TG
from threshold_gating.show.explorer.server import Server

PLAIN = (
    "(key, value) => ArrayBuffer.isView(value) ? Array.from(value)"
    " : typeof value === 'number' && !Number.isFinite(value) ? String(value) : value"
)
FIVE = "tau=2,1.5,1.5,2&theta=-1.5,-0.5,0.5,1.5&s=0,0.1,0.5,0.9,1&c=0,0,0,0,0"


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


def wait(page, happened):
    for _ in range(50):
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen within five seconds")
