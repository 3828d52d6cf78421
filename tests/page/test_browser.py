"""The page in a browser, where there is one, and what can be known of its looks without one."""

import json
import re
import shutil
import subprocess
from html import unescape
from importlib.resources import files
from pathlib import Path

import pytest
from test_page import page_of, write_run

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
# Runs after the page's own script: zooms and reads a curve by keys, and tells what it has seen.
PROBE = """<script>
const plot = document.querySelector("#loss .plot");
plot.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
const tip = document.querySelector("#loss .tip").textContent;
const wide = [...document.querySelectorAll("main *")].filter(
  (each) => each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".scroll")
    && !each.closest("svg")).map((each) => each.className || each.tagName);
parent.postMessage({scroll: document.documentElement.scrollWidth, width: innerWidth,
  tip, wide, loaded: performance.getEntriesByType("resource").length}, "*");
</script>"""
# A window is never as narrow as a phone, but a frame is.
FRAMES = """<!doctype html><title>nothing</title><script>
const seen = [];
onmessage = (event) => { seen.push(event.data); document.title = JSON.stringify(seen); };
</script><iframe src="page.html" width="420" height="900" frameborder="0"></iframe>
<iframe src="page.html" width="1400" height="900" frameborder="0"></iframe>"""


@pytest.mark.seconds
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
def test_a_browser_shows_the_page_without_an_error_or_a_request(tmp_path):
    assert BROWSER
    run = write_run(tmp_path / "run", mesh={"pipeline": 2}, train={"global_batch": 8})
    (tmp_path / "page.html").write_text(page_of(run).replace("</body>", f"{PROBE}</body>"))
    (tmp_path / "frames.html").write_text(FRAMES)
    done = subprocess.run(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--virtual-time-budget=10000", (tmp_path / "frames.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title and title[1] != "nothing", done.stderr[-2000:]
    seen = json.loads(unescape(title[1]))
    assert sorted(each["width"] for each in seen) == [420, 1400]
    for each in seen:
        assert each["scroll"] <= each["width"] and each["wide"] == [], each
        assert each["tip"].startswith("step ") and each["loaded"] == 0
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]


def colours(scheme: str) -> dict[str, str]:
    """The colours of the page, by name: in `light`, `dark` or on `print`."""
    style = (files("spmdtrain.lab.page") / "page.css").read_text()
    blocks = re.findall(r":root\{(.*?)\}", style)
    found = {}
    for block in {"light": blocks[:1], "dark": blocks[:2], "print": [blocks[0], blocks[2]]}[scheme]:
        found |= dict(re.findall(r"--([\w]+):(#[0-9a-f]{3,6})", block))
    return found


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.2."""
    digits = colour[1:] if len(colour) == 7 else "".join(each * 2 for each in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_texts_and_curves_stand_out_from_what_is_behind_them(scheme):
    found = colours(scheme)
    for name, least in {
        **dict.fromkeys(("fg", "dim", "good", "poor", "bad"), 4.5),
        **dict.fromkeys(("c0", "c1", "c2", "c3", "c4", "c5"), 3.0),
    }.items():
        for behind in ("bg", "soft"):
            light, dark = sorted(map(luminance, (found[name], found[behind])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= least, (scheme, name, behind)


def test_the_parts_of_a_page_are_installed_with_the_package():
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    for file in ("page.css", "page.js"):
        assert (files("spmdtrain.lab.page") / file).is_file()
        assert f"page/*{Path(file).suffix}" in text
