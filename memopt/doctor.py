"""What is installed, which devices there are, what can be planned here and what is missing."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .backend import INSTALL, backend_names, load_backend
from .errors import MemoptError

PACKAGES = (
    "memopt", "numpy", "pydantic", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "jax-cuda13-plugin", "libtpu",
    "torch", "transformers", "safetensors", "plotly",
)  # fmt: skip


def examine() -> dict[str, Any]:
    """`python`, `platform`, `packages` (None: not installed), `memory`, and per backend what it says of itself."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "memory": _memory(),
        "backends": {name: _backend(name) for name in backend_names()},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory() -> dict[str, int]:
    import psutil

    memory = psutil.virtual_memory()
    return {"total_bytes": memory.total, "available_bytes": memory.available}


def _backend(name: str) -> dict[str, Any]:
    """The backend's own account; a framework that is not installed is an answer, not a failure."""
    try:
        return {"ok": True, **load_backend(name).doctor()}
    except ModuleNotFoundError as error:
        return {"ok": False, "missing": error.name, "install": INSTALL.get(name)}
    except MemoptError as error:
        return {"ok": False, "problems": [problem.to_json() for problem in error.problems]}
