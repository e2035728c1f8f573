"""The report of a reconciliation as a browser shows it."""

from __future__ import annotations

from pathlib import Path

from selenium.webdriver.common.by import By

from tests.fixtures_browser import Browser
from tests.spark.letters import letter
from tests.spark.test_report import HOSTILE, NOW, found
from txmq_spark.plan.report import html_page
from txmq_spark.plan.summary import MissingMessage

# A name that would be run as a script wherever it is not escaped sets the title.
TITLE = "document.title='owned'"
HOSTILE_NAMES = [
    *HOSTILE,
    f"<script>{TITLE}</script>",
    f'"><img src="https://example.org/x" onerror="{TITLE}">',
    f"</title><svg onload={TITLE}>",
]


def test_the_report_opens_without_errors_and_requests_and_shows_hostile_texts(
    browser: Browser, tmp_path: Path
) -> None:
    letters = [
        letter(n, text, error_type=text, error=text, fingerprint=text, dead_at=NOW)
        for n, text in enumerate(HOSTILE_NAMES)
    ]
    path = tmp_path / "report.html"
    path.write_text(
        html_page(
            *found(letters, [MissingMessage("key", "orders", HOSTILE_NAMES[-1], "missing", None)])
        ),
        "utf-8",
    )
    page = browser.open(path)
    assert (page.errors, page.requests) == ([], [])
    assert page.driver.title == "Dead letters of billing"
    tables = page.driver.find_elements(By.TAG_NAME, "table")
    assert len(tables) >= 2
    assert all(table.is_displayed() for table in tables)
    assert page.driver.find_elements(By.CSS_SELECTOR, "script, img, [onload], [onerror]") == []
    shown = page.driver.find_element(By.TAG_NAME, "body").text
    for text in HOSTILE_NAMES[-3:]:
        assert text in shown
    charts = page.driver.find_elements(By.TAG_NAME, "svg")
    assert charts
    assert all(chart.rect["width"] > 0 for chart in charts)


def test_labels_of_charts_are_shown_whole(browser: Browser, tmp_path: Path) -> None:
    kinds = ("__main__.BadOrder", "W" * 17, "shop.billing.errors.BadOrder")
    letters = [
        letter(n, error_type=kind, fingerprint="436b19f1e77898fb", dead_at=NOW)
        for n, kind in enumerate(kinds)
    ]
    path = tmp_path / "report.html"
    path.write_text(html_page(*found(letters)), "utf-8")
    starts = browser.open(path).driver.execute_script(
        "return [...document.querySelectorAll('svg .label')].map(label => label.getBBox().x)"
    )
    assert len(starts) > len(kinds)
    assert min(starts) >= 0
