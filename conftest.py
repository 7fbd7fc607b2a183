"""The snippets of the README and the how-to pages run: Python ones in order, policies are loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

ROOT = Path(__file__).parent


def _is_policy(example: Example) -> None:
    """A YAML block that says it is a policy must be one."""
    from memopt import load_policy

    if "version: 1" in example.parsed:
        Path("snippet.yaml").write_text(example.parsed, encoding="utf-8")
        load_policy("snippet.yaml")


def _enter_scratch(namespace: dict) -> None:
    """Snippets name `policy.yaml`: the tutorial's, in a folder of their own."""
    namespace["came_from"] = Path.cwd()
    folder = ROOT / ".cache" / "snippets"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "docs" / "tutorial" / "policy.yaml", folder)
    os.chdir(folder)
    namespace["__file__"] = str(ROOT / "README.md")


def _leave_scratch(namespace: dict) -> None:
    os.chdir(namespace["came_from"])


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), CodeBlockParser(language="yaml", evaluator=_is_policy)],
    patterns=["README.md", "docs/how-to/*.md"],
    setup=_enter_scratch,
    teardown=_leave_scratch,
).pytest()

collect_ignore = [str(ROOT / "docs" / "tutorial")]


def _turn(item: pytest.Item) -> int:
    """When a test's file comes: the longest first, then files that fork ranks, then all others."""
    if item.path.name == "test_quickstart.py":
        return 0
    names = vars(getattr(item, "module", pytest))
    return 1 if any(getattr(value, "__module__", None) == "memopt_torch.testing" for value in names.values()) else 2


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process whose JAX has started must not fork, so files that fork torch ranks run before any that starts JAX.

    xdist hands files out in this order too (`--no-loadscope-reorder`), so it holds within each worker.
    """
    items.sort(key=_turn)


@pytest.fixture(autouse=True, scope="session")
def _quiet_frameworks() -> None:
    """No look-up of anything online, and a JAX that does not look for accelerators."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
