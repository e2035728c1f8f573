"""The browser of the tests finds what is wrong with a page."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tests.fixtures_browser import Browser, needed_programs, start_browser
from txmq.testing.wait import wait_until

BROKEN = """<!doctype html><title>broken</title>
<img src="https://example.org/pixel.png"><script>missing.call()</script>"""
GUARDED = """<!doctype html>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'">
<title>guarded</title><script>document.title = "run"</script>"""


def test_errors_and_requests_of_a_page_are_found(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "broken.html").write_text(BROKEN)
    (tmp_path / "guarded.html").write_text(GUARDED)
    (tmp_path / "fine.html").write_text("<!doctype html><title>fine</title>")
    page = browser.open(tmp_path / "broken.html")
    assert page.outside == ["https://example.org/pixel.png"]
    assert any("missing is not defined" in error for error in page.errors)
    page = browser.open(tmp_path / "guarded.html")
    assert page.driver.title == "guarded"
    assert any("Content Security Policy" in error for error in page.errors)
    page = browser.open(tmp_path / "fine.html")
    assert (page.driver.title, page.errors, page.requests) == ("fine", [], [])


def test_no_process_of_a_browser_is_left() -> None:
    def processes(profile: str) -> list[str]:
        """Those that were started with this path."""
        found: list[bytes] = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended
                found.append(path.read_bytes())
        return [line.decode() for line in found if profile.encode() in line]

    with start_browser(*needed_programs()) as browser:
        profile = browser.driver.capabilities["chrome"]["userDataDir"]
        assert processes(profile)
    wait_until(lambda: not processes(profile))
