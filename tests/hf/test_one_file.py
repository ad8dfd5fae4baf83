"""The remote code of an export is our sources, and works where maglev cannot be imported."""

import ast
import subprocess
import sys

import pytest

from tests.small_runs import Train

transformers = pytest.importorskip("transformers", reason="needs transformers (the extra hf)")


def test_the_file_is_what_our_sources_give_now(exported: Train) -> None:
    from maglev.hf.one_file import generate

    generate.cache_clear()
    assert (exported("swa-ssss") / "modeling_maglev.py").read_text(encoding="utf-8") == generate()


def test_the_file_holds_all_of_every_module_and_needs_no_other() -> None:
    from maglev.hf import one_file

    sources: dict[str, one_file.Source] = {}
    one_file.collect(one_file.ENTRANCE, sources)
    tree = ast.parse(one_file.generate())
    defined = [name for statement in tree.body for name in sorted(one_file.bound_by(statement))]
    assert len(defined) == len(set(defined)) == sum(len(source.defined) for source in sources.values())
    imported = {node.module.split(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom) and node.module}
    imported |= {alias.name.split(".")[0] for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    # transformers itself needs numpy
    assert imported - set(sys.stdlib_module_names) == {"numpy", "torch", "transformers"}
    # the prefiller is in it for training; kernels that need a compiler, data and the command line are not
    assert not any(
        name.startswith(("maglev.data", "maglev.train", "maglev.cli", "maglev.ops.fused")) for name in sources
    )


def test_a_name_that_would_change_its_meaning_is_refused() -> None:
    from maglev.hf.one_file import Source, check_scopes

    text = b"def rotate(norm):\n    return norm\n"
    source = Source("maglev.example", text, ast.parse(text))
    check_scopes(source, {"rotate"})
    with pytest.raises(AssertionError, match="norm"):
        check_scopes(source, {"norm"})


@pytest.mark.parametrize(
    "order",
    ["import maglev; import transformers", pytest.param("import transformers; import maglev", marks=pytest.mark.soak)],
)
def test_importing_maglev_is_enough_and_costs_no_transformers(order: str) -> None:
    code = (
        "import sys, maglev; assert not {'torch', 'transformers'} & set(sys.modules)"
        if order.startswith("import maglev")
        else "from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_config; import sys, maglev"
    )
    check = (
        "from transformers import AutoConfig, AutoModelForCausalLM; from maglev.hf import MaglevConfig\n"
        "assert type(AutoConfig.for_model('maglev')) is MaglevConfig\n"
        "assert AutoModelForCausalLM._model_mapping[MaglevConfig].__name__ == 'MaglevForCausalLM'"
    )
    done = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
