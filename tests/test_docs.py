"""Every Python block of the documents runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path) -> None:
    text = page.read_text()
    names: dict[str, Any] = {}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(page), "exec"), names)


def test_the_pages_that_promise_code_have_some() -> None:
    for name in ("README.md", "docs/operator.md"):
        assert BLOCK.search((ROOT / name).read_text()), name
    assert {page.name for page in PAGES} >= {"README.md", "operator.md"}


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_contributing_stays_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60
