import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import DATA
from tests.support.reports import H200, HOSTILE, problem, result, table, write_results, write_run
from tritongemm.cli import report

NO_PLOTLY = "plotly is not installed: pip install 'tritongemm[report]'"
pytestmark = [pytest.mark.heavy, pytest.mark.skipif(find_spec("plotly") is None, reason=NO_PLOTLY)]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FIGURES = ("roofline", "ratios", "uplift", "left", "winners", "ranges", "regret", "quality", "failures")
# What plotly draws the traces of some figure as.
MARKS = ".scatterlayer .trace, .heatmaplayer image, .barlayer .trace, .waterfalllayer .trace"
WAIT_MS = 20_000
GROUND = "getComputedStyle(document.body).backgroundColor"
DRAWN_GROUND = "document.querySelector('[data-figure] .main-svg').style.background"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    installed = next(filter(None, map(shutil.which, BROWSERS)), None)
    with playwright.sync_playwright() as driver:
        try:
            # Without its own sandbox it starts for root and in containers too; the page is ours.
            opened = driver.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium starts here: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def entire(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of which nothing is missing, with text from files that would run, were it not text."""
    folder = tmp_path_factory.mktemp("report")
    run = write_run(folder / "out.yaml", [*table(4096, 4096), *table(1024, 8192)], HOSTILE)
    named = result(problem(15), 1e-6, winner=HOSTILE, error=1e-4, toolchain={**H200, HOSTILE: HOSTILE})
    other, real = write_results(folder / "other.yaml", [named]), DATA / "h200_fp8_journal.jsonl"
    output = folder / "report.html"
    assert report.main([str(run), str(other), str(real), "-o", str(output), "--title", HOSTILE]) == 0
    return output


@pytest.fixture(scope="module")
def page(browser: Any, entire: Path) -> Iterator[Any]:
    """The report as a browser shows it; nothing may have gone wrong when all tests are over."""
    shown, faults, asked = browser.new_page(viewport={"width": 1240, "height": 900}), list[str](), list[str]()
    shown.set_default_timeout(WAIT_MS)
    shown.on("console", lambda message: faults.append(message.text))
    shown.on("pageerror", lambda error: faults.append(str(error)))
    shown.on("request", lambda request: asked.append(request.url))
    shown.goto(entire.as_uri())
    shown.wait_for_selector("html[data-drawn=light]")
    yield shown
    assert faults == [] and asked == [entire.as_uri()]
    assert shown.evaluate("window.broken") is None, "text from a file ran"


def column(page: Any, name: str) -> int:
    names: list[str] = page.locator("#sizes-table th").all_text_contents()
    return names.index(name)


def sort(page: Any, name: str) -> list[str]:
    page.locator("#sizes-table th button").nth(column(page, name)).click()
    return cells(page, name)


def cells(page: Any, name: str) -> list[str]:
    """What a column of the table of sizes holds, from above, in the rows that are shown."""
    place = column(page, name) + 1
    found: list[str] = page.locator(f"#sizes-table tbody tr:not([hidden]) td:nth-child({place})").all_text_contents()
    return found


def test_every_figure_is_drawn_and_text_from_files_shown_as_it_is(page: Any) -> None:
    assert [f.get_attribute("data-figure") for f in page.locator("[data-figure]").all()] == list(FIGURES)
    for name in FIGURES:
        box = page.locator(f"[data-figure={name}] .main-svg").first.bounding_box()
        assert box["width"] > 600 and box["height"] > 150, name
        assert page.locator(f"[data-figure={name}]").locator(MARKS).count() > 0, name
    assert page.locator("h1").inner_text() == HOSTILE
    assert HOSTILE in page.locator("[data-figure=winners] .ytick").all_text_contents()
    assert HOSTILE in cells(page, "winner")
    assert page.locator("img").count() == 0 and page.locator("main b").count() == page.locator(".tiles b").count()


def test_rows_are_sorted_and_searched(page: Any) -> None:
    times = [float(text) for text in sort(page, "us")]
    assert times == sorted(times) and len(set(times)) > 5
    assert page.locator("#sizes-table th[aria-sort]").get_attribute("aria-sort") == "ascending"
    assert [float(text) for text in sort(page, "us")] == sorted(times, reverse=True)
    assert page.locator("#sizes-table th[aria-sort]").all_text_contents() == ["us"]
    winners = sort(page, "winner")
    assert winners == sorted(winners, key=str.lower) and len(set(winners)) > 2
    for _ in range(2):
        errors = sort(page, "error")
        assert errors[-1] == "-" != errors[0]
    words = page.locator("input[data-filters=sizes-table]")
    words.fill("1024x8192 torch")
    assert cells(page, "size") == ["4096x1024x8192_bf16_TN"]
    words.fill("")
    assert len(cells(page, "size")) == 14


def test_light_and_dark(page: Any) -> None:
    """As the system says, until someone says otherwise; the figures turn with the page."""
    light = page.evaluate(GROUND)
    assert page.evaluate(DRAWN_GROUND) == light == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("html[data-drawn=dark]")
    assert page.evaluate(DRAWN_GROUND) == page.evaluate(GROUND) != light
    page.locator("#theme").click()
    page.wait_for_selector("html[data-drawn=light]")
    assert page.evaluate(DRAWN_GROUND) == page.evaluate(GROUND) == light


@pytest.mark.parametrize("width", [500, 1280])
def test_a_page_of_any_width(browser: Any, entire: Path, width: int) -> None:
    """The page itself does not scroll sideways, the buttons hide no name, and figures have more room than names."""
    shown = browser.new_page(viewport={"width": width, "height": 900})
    shown.goto(entire.as_uri())
    shown.wait_for_selector("html[data-drawn]")
    assert shown.evaluate("document.documentElement.scrollWidth") == width
    for name in ("roofline", "winners", "ranges"):
        figure = shown.locator(f"[data-figure={name}]")
        figure.scroll_into_view_if_needed()
        buttons, legend = (figure.locator(part).first.bounding_box() for part in (".modebar", ".legend"))
        assert buttons["y"] + buttons["height"] < legend["y"], name
    for name in ("ratios", "ranges"):
        plot = shown.locator(f"[data-figure={name}] .draglayer .nsewdrag").bounding_box()
        assert plot["width"] > 0.5 * (width - 40), name
    heads = shown.locator("#sizes-table th.number").all_text_contents()
    assert heads[:4] == ["M from", "M", "N", "K"] and "winner" not in heads
    shown.close()


def test_the_policy_lets_nothing_else_run_or_load(browser: Any, entire: Path, tmp_path: Path) -> None:
    """Were text of a file written as a script by mistake, the browser would not run it, nor load what it names."""
    planted = tmp_path / "planted.html"
    script = "<script>window.broken = 1</script><img src='https://example.invalid/x' onerror='window.broken = 1'>"
    planted.write_text(entire.read_text(encoding="utf-8").replace("<main>", f"<main>{script}", 1), encoding="utf-8")
    shown, refused, answered = browser.new_page(), list[str](), list[str]()
    shown.on("console", lambda message: refused.append(message.text))
    shown.on("response", lambda response: answered.append(response.url))
    shown.goto(planted.as_uri(), wait_until="domcontentloaded")
    assert shown.evaluate("window.broken") is None and answered == [planted.as_uri()]
    assert len([text for text in refused if "Content Security Policy" in text]) >= 2


def test_labels_of_shares_differ(page: Any) -> None:
    """Also where all are near 100 %."""
    for name in ("regret", "quality"):
        figure = f"[data-figure={name}]"
        page.evaluate("name => Plotly.relayout(document.querySelector(name), {'yaxis.range': [0.9985, 1]})", figure)
        labels = page.locator(f"{figure} .ytick text").all_text_contents()
        assert len(labels) > 1 and len(set(labels)) == len(labels)
