"""A headless Chromium for pages that people read: `page = browser.open(url)`.

The browser and its driver are those of Debian's packages chromium and chromium-driver.
Where these are not installed, the tests that ask for `browser` say so and are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from txmq.testing.wait import PATIENCE_S

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVERS = ("chromedriver", "chromium-driver")
# No name is resolved, so that a page reaches nothing but this machine.
OPTIONS = """
--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-extensions
--disable-background-networking --disable-component-update --disable-sync --no-first-run
--disable-default-apps --mute-audio --window-size=1280,1600 --lang=en
--host-resolver-rules=MAP|*|~NOTFOUND|,|EXCLUDE|127.0.0.1
"""
INSIDE = ("chrome", "data")
LOGS = {"browser": "ALL", "performance": "ALL"}


class Page(NamedTuple):
    """A page that was loaded: what its scripts and its policy complained about, and
    which addresses it asked for, other than its own.
    """

    driver: Chrome
    errors: list[str]
    requests: list[str]

    @property
    def outside(self) -> list[str]:
        """The requests that leave this machine."""
        return [one for one in self.requests if urlsplit(one).hostname not in (None, "127.0.0.1")]


class Browser:
    """A browser process, with one page at a time."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str | Path) -> Page:
        """Load a page by its address, or a file, and return what happened meanwhile."""
        address = url.absolute().as_uri() if isinstance(url, Path) else url
        for name in LOGS:
            self._log(name)  # what the page before has left
        self.driver.get(address)
        return Page(self.driver, self.errors(), [one for one in self.requests() if one != address])

    def errors(self) -> list[str]:
        """Return the errors in the console since the last look."""
        logged = self._log("browser")
        return [entry["message"] for entry in logged if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last look, without those
        of the browser's own pages, and without what stands in a page itself.
        """
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        asked = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return [address for address in asked if urlsplit(address).scheme not in INSIDE]

    def close(self) -> None:
        self.driver.quit()

    def _log(self, name: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.driver.get_log(name)  # type: ignore[no-untyped-call] # its own
        return entries


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The browser of this session."""
    with start_browser(*needed_programs()) as started:
        yield started


def needed_programs() -> tuple[str, str]:
    """Return the paths of browser and driver; skip the test where one is missing."""
    return found_programs() or pytest.skip("no chromium or no chromium-driver on PATH")


def found_programs() -> tuple[str, str] | None:
    """Return the paths of browser and driver; None where one is missing."""
    program, driver = _found(BROWSERS), _found(DRIVERS)
    return None if program is None or driver is None else (program, driver)


@contextmanager
def start_browser(program: str, driver: str) -> Iterator[Browser]:
    """A browser for the block."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = program
    for option in OPTIONS.split():
        options.add_argument(option.replace("|", " "))
    options.set_capability("goog:loggingPrefs", LOGS)
    # The driver makes the profile there, and the browser a socket in it, whose path may
    # have 107 bytes: the directories of tests have too long names.
    place = TemporaryDirectory(prefix="txmq-browser-", dir="/tmp", ignore_cleanup_errors=True)
    with place as directory:
        service = Service(driver, env={**os.environ, "TMPDIR": directory})
        with closing(Browser(Chrome(options, service))) as started:
            started.driver.set_page_load_timeout(PATIENCE_S)
            started.driver.set_script_timeout(PATIENCE_S)
            yield started


def _found(names: tuple[str, ...]) -> str | None:
    return next(filter(None, map(shutil.which, names)), None)
