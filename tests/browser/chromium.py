"""Chromium without a window, and what it says of a page."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MISSING = "no chromium here; on Debian: apt-get install -y chromium"
THEMES = {"dark": 0, "light": 1}
WIDTHS = (390, 1280)


def chromium(*arguments: str) -> str:
    """Run Chromium and return what it prints."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.fail(MISSING)
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


def answers_of_frames(page: Path, theme: str, *options: str) -> list:
    """Return the `answer` that each frame of a page found, a JSON text in its document's data."""
    take = (
        "<script>onload=()=>{document.title=JSON.stringify([...document.querySelectorAll('iframe')].map("
        "f=>JSON.parse(f.contentDocument.documentElement.dataset.answer||'null')))}</script>"
    )
    page.write_text(page.read_text() + take)
    scheme = f"--blink-settings=preferredColorScheme={THEMES[theme]}", "--allow-file-access-from-files"
    dom = chromium(*scheme, "--window-size=1400,2000", *options, "--dump-dom", page.as_uri())
    return json.loads(html.unescape(re.search("<title>(.*)</title>", dom)[1]))
