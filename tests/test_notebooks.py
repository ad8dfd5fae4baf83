"""The notebooks run from top to bottom in a kernel of their own, and are kept without outputs."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbformat (the extra notebooks)")
NotebookClient = pytest.importorskip("nbclient", reason="needs nbclient (the extra notebooks)").NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["lifted-and-recurrent", "states"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "clear all outputs"
    # what the notebook writes goes where the test's files go, and its kernel has no files in a home
    for name in ("TMPDIR", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        (tmp_path / name.lower()).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", str(path.parent.parent))
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not [output for output in shown if output.get("name") == "stderr"]
