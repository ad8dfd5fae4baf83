"""What documents say of the small table is what `maglev table` makes of results/small-table.json."""

from pathlib import Path

import pytest

from maglev.__main__ import main
from tests.documents import REPOSITORY

RESULTS = REPOSITORY / "results" / "small-table.json"


def test_the_page_is_what_the_verb_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(RESULTS), "--no-figures", "--out", str(tmp_path)]) == 0
    page = (REPOSITORY / "docs" / "small-table.md").read_text(encoding="utf-8")
    shown = page[page.index("| model |") :]
    assert shown == (tmp_path / "table.md").read_text(encoding="utf-8"), "put the verb's table.md below the page's words"
