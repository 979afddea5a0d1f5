"""The page of a run in a real browser: nothing overlaps, nothing runs over, and both colour schemes hold."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders as folders
from matplotlib.image import imread

from megatron_wsd.reporting.page import write_page
from megatron_wsd.rundir import RunDir
from megatron_wsd.schedule import Schedule

BROWSER = next(
    filter(
        None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))
    ),
    None,
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium or Chrome on this machine; on Debian: apt-get install chromium"
)

# Run in the page: what is wider than the page, and which texts of one chart lie on each other. A pixel of
# tolerance, since boxes of text are larger than their ink.
_LOOK = """
<script>
addEventListener('load', () => {
  const wrong = [];
  if (document.documentElement.scrollWidth > innerWidth) wrong.push('the page is wider than its window');
  for (const svg of document.querySelectorAll('svg')) {
    const name = svg.querySelector('title').textContent, frame = svg.getBoundingClientRect();
    if (frame.width < 300 || frame.height < 80) wrong.push(name + ': too small');
    const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([said, a], i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1
          || a.bottom > frame.bottom + 1) wrong.push(name + ': ' + said + ' is cut');
      for (const [other, b] of texts.slice(i + 1))
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1)
          wrong.push(name + ': ' + said + ' lies on ' + other);
    });
  }
  for (const cell of document.querySelectorAll('td.short, td.n')) {
    const range = document.createRange();
    range.selectNodeContents(cell);
    if (range.getBoundingClientRect().height > 30) wrong.push(cell.textContent + ' is on two lines');
  }
  const svgs = document.querySelectorAll('svg').length;
  const texts = document.querySelectorAll('svg text').length;
  const told = document.createElement('pre');
  told.id = 'told';
  told.textContent = JSON.stringify({wrong, svgs, texts});
  document.body.append(told);
});
</script>
"""


def browse(tmp_path: Path, page: Path, *options: str) -> str:
    """Let the browser load a page, with no network and a profile of its own; its standard output."""
    assert BROWSER is not None
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    away = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *fixed, *away, *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with faults, compared with an asynchronous one."""
    tmp = tmp_path_factory.mktemp("browser")
    out = tmp / "report.html"
    write_page(folders.faulty(tmp / "first"), out, [folders.asynchronous(tmp / "second")])
    return out


def looked_at(tmp_path: Path, page: Path, width: int) -> dict[str, Any]:
    text = page.read_text()
    policy = re.search(r"<meta http-equiv=[^>]*>", text)
    assert policy is not None
    with_script = tmp_path / "looked_at.html"
    with_script.write_text(text.replace(policy[0], "").replace("</body>", f"{_LOOK}</body>"))
    dom = browse(tmp_path, with_script, f"--window-size={width},2000", "--dump-dom")
    told = re.search(r'<pre id="told">(.*?)</pre>', dom, flags=re.DOTALL)
    assert told is not None, "the script in the page has not run"
    return dict(json.loads(told[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")))


@pytest.mark.parametrize("width", [1280, 700, 500])  # the least that a window of this browser has
def test_nothing_overlaps_is_cut_or_runs_over(tmp_path: Path, written: Path, width: int) -> None:
    told = looked_at(tmp_path, written, width)
    assert told["wrong"] == []
    assert told["svgs"] == 5 and told["texts"] > 100


def test_an_asynchronous_page_with_many_decisions(tmp_path: Path) -> None:
    run = folders.asynchronous(tmp_path / "run")
    file = run / "island_0" / "metrics.jsonl"
    orders = [folders.event("order", n, f"step {n}: decay number {n}") for n in (10, 11, 12, 30, 44, 46, 58)]
    file.write_text(file.read_text() + "".join(json.dumps(r) + "\n" for r in orders))
    write_page(run, tmp_path / "r.html")
    assert looked_at(tmp_path, tmp_path / "r.html", 1280)["wrong"] == []


@pytest.mark.parametrize("width", [1280, 500])
def test_a_branch_beside_its_parent_with_a_warning_and_folded_checkpoints(tmp_path: Path, width: int) -> None:
    parent = folders.validated(tmp_path / "a-run-with-quite-a-long-name", 0, 300, {"broad": 0.0, "web": 0.1})
    corpora = {"broad": 0.05, "web": 0.1, "code": -0.8}
    branch = folders.validated(tmp_path / f"{parent.name}-code", 200, 240, corpora, parent)
    file = parent / "island_0" / "metrics.jsonl"
    for island, digest in enumerate("ab"):
        last = folders.outer(300, 30, digest=16 * digest)
        (parent / f"island_{island}").mkdir(exist_ok=True)
        (parent / f"island_{island}" / file.name).write_text(f"{file.read_text()}{json.dumps(last)}\n")
    for n in range(10, 101, 10):
        folders.checkpoint(RunDir(parent), 0, n, Schedule(5))
    write_page(parent, tmp_path / "r.html", [branch])
    assert "<details><summary>7 older ones" in (tmp_path / "r.html").read_text()
    assert 'class="warning"' in (tmp_path / "r.html").read_text()
    told = looked_at(tmp_path, tmp_path / "r.html", width)
    assert told["wrong"] == [] and told["svgs"] == 6


def test_a_screenshot_in_light_and_in_dark(tmp_path: Path, written: Path) -> None:
    shots = {}
    for name, scheme in (("light", 1), ("dark", 0)):
        png = tmp_path / f"{name}.png"
        scheme_option = f"--blink-settings=preferredColorScheme={scheme}"
        browse(tmp_path, written, "--window-size=1100,1600", f"--screenshot={png}", scheme_option)
        shots[name] = imread(png)[..., :3]
    for shot in shots.values():
        assert shot.shape == (1600, 1100, 3)
        # Coloured pixels: curves, phases, links. A page of text alone would have next to none.
        coloured = (shot.max(axis=2) - shot.min(axis=2)) > 0.25
        assert coloured.mean() > 0.002
    # the paper of the style sheet at the edge, and ink that stands out from it
    assert np.allclose(shots["light"][5, 5], 1.0, atol=0.01)
    assert np.allclose(shots["dark"][5, 5], np.array([0x14, 0x17, 0x1A]) / 255, atol=0.01)
    assert shots["light"].min() < 0.2 and shots["dark"].max() > 0.85
