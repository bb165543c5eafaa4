"""A real browser, where there is one: started once for all pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LOCAL = ("file:", "data:", "blob:")
NAMES = ("chromium", "chromium-browser", "google-chrome")


def browser_path() -> str | None:
    """Where Chromium is; CONVNN_CHROMIUM says it outright."""
    given = os.environ.get("CONVNN_CHROMIUM")
    return given or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = browser_path()
    if path is None:
        pytest.skip(f"no browser to open the explorer page in: none of {', '.join(NAMES)} is installed")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only where a page is opened

    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open a page from disk; whatever it asks the network for or says in the console fails the test."""
    complaints: list[str] = []
    contexts = []

    def opened(text: str | Path, **options: Any) -> Any:
        path = text if isinstance(text, Path) else tmp_path / "page.html"
        if isinstance(text, str):
            path.write_text(text, encoding="utf-8")
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda asked: complaints.extend([asked.url][: not asked.url.startswith(LOCAL)]))
        page.goto(path.as_uri() + options.get("hash", ""))
        page.evaluate("explorer.ready.then(() => null)")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned digits for an epoch of three steps."""
    from convnn_lab import cli  # noqa: PLC0415 - nobody else needs it

    folder = tmp_path_factory.mktemp("runs") / 'tiny "run" <b>'
    flags = ["--epochs", "1", "--batch", "512", "--width", "8", "--ratio", "0.5", "--accelerator", "cpu"]
    assert cli.main(["train", "digits", *flags, "--output", str(folder)]) == 0
    return folder
