"""The weights that come with maglev, served by their name."""

from pathlib import Path

import maglev
from maglev.runs import SHIPPED
from tests.processes import Processes
from tests.serve.running import serving

TINY = "maglev-tiny"


def test_they_are_served_and_not_written_to(processes: Processes, tmp_path: Path) -> None:
    before = sorted((SHIPPED / TINY).rglob("*"))
    lm = maglev.load(TINY, device="cpu")
    expected = "".join(lm.generate("The river", max_tokens=20, temperature=0))
    with serving(processes, Path(TINY), tmp_path / "sessions") as server:
        assert server.text(prompt="The river", max_tokens=12, temperature=0, save_as="river") in expected
        rest = server.text(session="river", max_tokens=8, temperature=0)
        assert expected.endswith(rest) and rest
    assert list((tmp_path / "sessions").glob("*.safetensors"))
    assert sorted((SHIPPED / TINY).rglob("*")) == before
