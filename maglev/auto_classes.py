"""transformers' Auto classes learn of Maglev when they are imported, whether before `import maglev` or after.

Until then nothing of transformers is imported, so that `import maglev` costs next to nothing.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def register_config() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    from maglev.hf.configuration_maglev import MaglevConfig

    AutoConfig.register("maglev", MaglevConfig, exist_ok=True)


def register_model() -> None:
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from maglev.hf.configuration_maglev import MaglevConfig
    from maglev.hf.modeling_maglev import MaglevForCausalLM

    AutoModelForCausalLM.register(MaglevConfig, MaglevForCausalLM, exist_ok=True)


REGISTRATIONS = {
    "transformers.models.auto.configuration_auto": register_config,
    "transformers.models.auto.modeling_auto": register_model,
}


def announce() -> None:
    """Register now what is there already, the rest as soon as it is imported."""
    for name, register in REGISTRATIONS.items():
        if name in sys.modules:
            attempt(register)
    if not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport())


def attempt(register: Callable[[], None]) -> None:
    """What fails here must not fail the import of transformers, which may have nothing to do with Maglev."""
    try:
        register()
    except (ImportError, AttributeError) as error:
        warnings.warn(f"maglev's models need transformers 5.17 or newer: {error}", stacklevel=2)


class AfterImport:
    """Finds the modules of REGISTRATIONS as the path does, and registers when they have been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REGISTRATIONS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            attempt(REGISTRATIONS[fullname])

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
