"""What an import costs: frameworks are loaded by those who use them."""

from __future__ import annotations

import json
import subprocess
import sys

import memopt


def _modules_after(code: str) -> set[str]:
    script = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_import_memopt_loads_no_framework_and_no_library() -> None:
    loaded = _modules_after("import memopt")
    assert not loaded & {
        "torch",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "numpy",
        "scipy",
        "pydantic",
        "ruamel",
        "wcmatch",
        "typer",
    }


def test_validating_loads_no_framework_and_no_numpy() -> None:
    run = "from memopt.cli import main\ntry: main(['validate', '--help'])\nexcept SystemExit: pass"
    code = f"{run}\nimport memopt.checking"
    assert not _modules_after(code) & {
        "torch",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "numpy",
        "scipy",
        "rich",
        "transformers",
    }


def test_loading_the_backends_loads_no_framework() -> None:
    code = "from memopt.backend import backend_names, load_backend\nfor n in backend_names(): load_backend(n).options()"
    assert not _modules_after(code) & {"torch", "jax", "jaxlib", "flax", "optax", "transformers"}


def test_every_public_name_can_be_had() -> None:
    assert set(memopt.__all__) <= set(dir(memopt))
    for name in memopt.__all__:
        assert getattr(memopt, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(memopt, "aply_policy")
