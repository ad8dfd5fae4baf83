"""Small data and runs, made once, and their exports."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.small_runs import Train, data, trained

__all__ = ["data", "exported", "trained"]

Export = Callable[..., Path]


@pytest.fixture(scope="session")
def exported(trained: Train, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """`exported(recipe)`: a Hugging Face folder, made once per session. Tests leave it as it is."""
    pytest.importorskip("transformers", reason="needs transformers (the extra hf)")
    from maglev.hf.convert import to_hugging_face

    folder = tmp_path_factory.mktemp("exports")

    @cache
    def export(recipe: str) -> Path:
        to_hugging_face(trained(recipe, 2), folder / recipe, pytest.fail)
        return folder / recipe

    return export
