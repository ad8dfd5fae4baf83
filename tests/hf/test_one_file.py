"""The remote code of an export is our sources, and works where maglev cannot be imported."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hf.models import KINDS
from tests.small_runs import Train

transformers = pytest.importorskip("transformers", reason="needs transformers (the extra hf)")

PROMPT = "Where nothing of maglev is installed"
WITHOUT_MAGLEV = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "maglev":
            raise ImportError("maglev is not here")

sys.meta_path.insert(0, Blocked())
from transformers import AutoModelForCausalLM, AutoTokenizer

found = {}
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = tokenizer(sys.argv[1], return_tensors="pt")
    written = model.generate(**ids, max_new_tokens=12, do_sample=False)
    model.train()
    loss = model(**ids, labels=ids["input_ids"]).loss
    loss.backward()
    found[folder] = {"written": written[0].tolist(), "loss": loss.item()}
model.save_pretrained("saved")
again = AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)
assert again.generate(**ids, max_new_tokens=12, do_sample=False)[0].tolist() == written[0].tolist()
assert not any(name.split(".")[0] == "maglev" for name in sys.modules)
print(json.dumps(found))
"""


def test_exports_run_where_maglev_is_not(exported: Train, tmp_path: Path) -> None:
    folders = [exported(recipe) for recipe in KINDS]
    command = [sys.executable, "-c", WITHOUT_MAGLEV, PROMPT, *map(str, folders)]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        ids = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
        written = model.generate(**ids, max_new_tokens=12, do_sample=False)
        assert found[str(folder)]["written"] == written[0].tolist()
        loss = model.train()(**ids, labels=ids["input_ids"]).loss
        torch.testing.assert_close(loss.item(), found[str(folder)]["loss"], rtol=1e-6, atol=1e-6)
    assert (tmp_path / "saved" / "modeling_maglev.py").read_bytes() == (folder / "modeling_maglev.py").read_bytes()


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


@pytest.mark.parametrize("order", ["import maglev; import transformers", "import transformers; import maglev"])
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
