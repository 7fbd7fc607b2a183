"""One YAML memory policy, applied to the same model in JAX and in PyTorch.

Names are loaded when first used: `import memopt` imports no framework, no numpy and no pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import apply_policy, inspect_model, make_plan
    from .applied import Applied
    from .comparison import compare
    from .errors import MemoptError
    from .loading import load_policy
    from .plan import Plan
    from .policy import Policy
    from .workloads import Workload

__all__ = [
    "Applied",
    "MemoptError",
    "Plan",
    "Policy",
    "Workload",
    "apply_policy",
    "compare",
    "inspect_model",
    "load_policy",
    "make_plan",
]

_HOMES = {
    "Applied": "applied",
    "MemoptError": "errors",
    "Plan": "plan",
    "Policy": "policy",
    "Workload": "workloads",
    "apply_policy": "api",
    "compare": "comparison",
    "inspect_model": "api",
    "load_policy": "loading",
    "make_plan": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `memopt` has no attribute `{name}`")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
