"""Every page of the documentation's site in Chromium: nothing is wider than a telephone, and all text can be read."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import THEMES, WIDTHS, chromium

ROOT = Path(__file__).resolve().parent.parent.parent
SMALLEST = 10
"""Pixels of the smallest text."""

ASK = """
<script>
const parse = c => { const v = c.match(/[\\d.]+/g).map(Number); return v.length < 4 ? [...v.slice(0, 3), 1] : v; };
const over = (a, b) => a.slice(0, 3).map((v, i) => v * a[3] + b[i] * (1 - a[3])).concat(1);
const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (e, w) => { const own = e ? parse(w.getComputedStyle(e).backgroundColor) : [255, 255, 255, 1];
  return own[3] === 1 ? own : over(own, behind(e.parentElement, w)); };
const ask = f => { const d = f.contentDocument, w = f.contentWindow, root = d.documentElement;
  const texts = [...d.querySelectorAll('article h1,article h2,article h3,article p,article li,article td,article th,' +
    'article code,article a:not(.headerlink)')].filter(e => e.textContent.trim() && e.getBoundingClientRect().width);
  const read = texts.map(e => { const b = behind(e, w), t = over(parse(w.getComputedStyle(e).color), b);
    const [x, y] = [light(t), light(b)]; return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05); });
  const least = read.indexOf(Math.min(...read));
  const overflow = root.scrollWidth - root.clientWidth;
  return { page: f.dataset.page, width: w.innerWidth, texts: texts.length, overflow,
    contrast: read[least], where: texts[least].outerHTML.slice(0, 120), back: behind(d.body, w),
    size: Math.min(...texts.map(e => parseFloat(w.getComputedStyle(e).fontSize))),
    broken: [...d.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
    fetched: w.performance.getEntriesByType('resource').map(e => e.name).filter(n => n.startsWith('http')) }; };
onload = () => { document.title = JSON.stringify([...document.querySelectorAll('iframe')].map(ask)); };
</script>
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    return out


def pages(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("index.html"))


def asked(site: Path, names: list[str], theme: str, width: int) -> list[dict]:
    """Return what Chromium says of pages, each in a frame of this width."""
    style = f"border:0;width:{width}px;height:1200px;display:block"
    frames = "".join(f"<iframe src='{name}' data-page='{name}' style='{style}'></iframe>" for name in names)
    (site / "frames.html").write_text(f"<!doctype html><body style='margin:0'>{frames}{ASK}")
    options = f"--blink-settings=preferredColorScheme={THEMES[theme]}", "--allow-file-access-from-files"
    dom = chromium(*options, "--window-size=1400,2000", "--dump-dom", (site / "frames.html").as_uri())
    return json.loads(html.unescape(re.search("<title>(.*)</title>", dom)[1]))


@pytest.fixture(scope="module", params=[("light", 390), ("light", 1280), ("dark", 1280)], ids=str)
def answers(site, request) -> tuple[str, int, list[dict]]:
    theme, width = request.param
    return theme, width, asked(site, pages(site), theme, width)


def test_no_page_is_too_wide_or_hard_to_read(answers, site):
    theme, width, found = answers
    assert len(found) == len(pages(site)) > 40
    for one in found:
        assert one["width"] == width and one["overflow"] <= 0, one
        assert one["contrast"] >= 4.5 and one["size"] >= SMALLEST, one
        assert not one["fetched"] and not one["broken"] and one["texts"] > 3, one
        assert (sum(one["back"][:3]) < 250) == (theme == "dark"), one


def test_what_is_wrong_would_be_noticed(site):
    text = (site / "glossary" / "index.html").read_text()
    bad = "<p style='width:3000px;color:#eee;background:#fff;font-size:4px'>wide and pale</p></article>"
    (site / "glossary" / "bad.html").write_text(text.replace("</article>", bad))
    (one,) = asked(site, ["glossary/bad.html"], "light", 390)
    assert one["overflow"] > 0 and one["contrast"] < 4.5 and one["size"] < SMALLEST and "pale" in one["where"]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_screenshot_shows_it(site, tmp_path, width):
    picture = tmp_path / f"{width}.png"
    page = (site / "concepts" / "index.html").as_uri()
    chromium(f"--window-size={max(width, 500)},2000", f"--screenshot={picture}", page)
    assert picture.stat().st_size > 20_000
