"""The page of a real plan in headless Chromium: it is opened from a file, searched, clicked and printed."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import korch
from benchmarks.models import build
from korch.cli import main

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None, reason="Chromium or Playwright is not installed"
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--no-first-run",
]


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
    context = browser.new_context(color_scheme=request.param, offline=True, viewport={"width": 1400, "height": 1000})
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


def test_the_slowest_are_named_first_and_lead_to_their_kernels(opened):
    links = opened.locator("#slowest button")
    assert links.count() == 3
    assert "% of the time" in opened.locator("#slowest li").first.inner_text()
    assert opened.locator("#timeline-box").is_visible()
    assert "nearest to their medians" in opened.locator("#run-note").inner_text()
    links.nth(1).click()
    number = links.nth(1).inner_text().removeprefix("Kernel ")
    assert opened.locator("#details-title").inner_text() == f"Kernel {number}"
    assert opened.evaluate("document.activeElement.id") == "details-title"
    opened.keyboard.press("Escape")
    assert opened.evaluate("document.activeElement.dataset.kernel") == number
    status = opened.get_by_role("status")
    assert status.inner_text().startswith(f"Kernel {number}: ")


def test_what_lost_is_told(opened, report):
    groupings = korch.load(report.with_name("m.korch")).report.groupings
    details = opened.locator("#details")
    assert "Other groupings of the same work" in details.inner_text()
    found = 0
    for row in opened.locator("tr.kernel").all():
        row.click()
        found += details.locator(".groupings li").count()
    assert found == sum(map(len, groupings))
    note = opened.locator("#trace-note").inner_text()
    assert "bound" in note and "measured" in note


def test_one_row_is_a_stop_of_the_tab_key(opened):
    rows = opened.locator("tr.kernel")
    stops = opened.locator("tr.kernel[tabindex='0']")
    assert stops.count() == 1
    rows.first.focus()
    opened.keyboard.press("End")
    last = rows.nth(rows.count() - 1).get_attribute("data-kernel")
    assert opened.evaluate("document.activeElement.dataset.kernel") == last
    assert stops.count() == 1 and stops.first.get_attribute("data-kernel") == last
    opened.fill("#search", "matmul")
    assert stops.count() == 1
    opened.locator("#search").press("Escape")
    assert opened.locator("#search").input_value() == ""


def test_a_phone_shows_the_headline_and_the_slowest_kernels_first(browser, report):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(report.as_uri())
    page.wait_for_selector("tr.kernel")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("#headline dt").first.inner_text().endswith(" ms")
    assert "gap" in page.locator("#headline").inner_text()
    for part in ("#headline", "#slowest li:last-child"):
        box = page.locator(part).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= 844
    page.close()


def test_the_graph_opens_whole_with_whole_labels(opened):
    for name in ("Primitives", "Operators", "Kernels"):
        opened.get_by_role("button", name=name, exact=True).click()
        whole, seen = opened.evaluate("[graph.elements().boundingBox(), graph.extent()]")
        assert seen["x1"] <= whole["x1"] and whole["x2"] <= seen["x2"]
        assert seen["y1"] <= whole["y1"] and whole["y2"] <= seen["y2"]
    node = "graph.getElementById('k0')"
    given = opened.evaluate("data.graphs.kernels.nodes[0].label")
    shown = opened.evaluate(f"{node}.data('label')")
    assert shown.replace("\n", " ") == given and "..." not in given
    label = opened.evaluate(f"{node}.boundingBox({{includeNodes: false}})")
    box = opened.evaluate(f"{node}.boundingBox({{includeLabels: false}})")
    assert label["w"] <= box["w"] and label["h"] <= box["h"]
    opened.locator("tr.kernel").nth(1).click()
    assert opened.evaluate("graph.zoom() >= READABLE")


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
