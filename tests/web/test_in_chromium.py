"""The page of a real plan in headless Chromium: opened from a file, searched, clicked, printed."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.models import build

import korch
from korch.cli import main

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None,
    reason="Chromium or Playwright is not installed",
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
         "--disable-component-update", "--no-first-run"]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    found = korch.optimize(build("tiny_segformer"), budget=30, cache_folder=folder / "cache")
    found.save(folder / "m.korch")
    assert main(["explain", str(folder / "m.korch"), "--html", str(folder / "r.html")]) == 0
    return folder / "r.html"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


@pytest.fixture(params=["light", "dark"])
def opened(request, browser, report):
    context = browser.new_context(color_scheme=request.param, offline=True,
                                  viewport={"width": 1400, "height": 1000})  # fmt: skip
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(report.as_uri())
    page.wait_for_selector("tr.kernel")
    yield page
    assert said == []
    context.close()


def test_it_opens_with_the_slowest_kernel(opened, report):
    rows = opened.locator("tr.kernel")
    assert rows.count() > 10
    assert rows.first.get_attribute("aria-selected") == "true"
    assert opened.locator("#details pre code").inner_text().strip() != ""
    opened.screenshot(path=report.with_name("opened.png"), full_page=True)


def test_search_click_and_keys(opened):
    total = opened.locator("tr.kernel").count()
    opened.fill("#search", "matmul")
    found = opened.locator("tr.kernel").count()
    assert 0 < found < total
    opened.locator("tr.kernel").nth(1).click()
    second = opened.locator("tr.kernel").nth(1).get_attribute("data-kernel")
    assert opened.locator("#details-title").inner_text() == f"Kernel {second}"
    opened.locator("tr.kernel").first.focus()
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("Enter")
    third = opened.locator("tr.kernel").nth(2).get_attribute("data-kernel")
    assert opened.locator("#details-title").inner_text() == f"Kernel {third}"
    opened.fill("#search", "no such thing")
    assert opened.locator("tr.kernel").count() == 0


def test_columns_sort_and_graphs_change(opened):
    button = opened.get_by_role("button", name="bytes")
    button.click()
    header = opened.locator("th", has_text="bytes")
    assert header.get_attribute("aria-sort") == "descending"
    for name in ("Primitives", "Operators", "Kernels"):
        opened.get_by_role("button", name=name, exact=True).click()
        opened.wait_for_timeout(100)
        pressed = opened.get_by_role("button", name=name, exact=True).get_attribute("aria-pressed")
        assert pressed == "true"
    opened.emulate_media(media="print")
    assert not opened.locator("#graph").is_visible()
