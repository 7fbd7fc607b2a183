"""Workloads: the models, batches and optimizers that plans and comparisons are made for.

Configurations and the initialiser know numpy alone; each backend builds the model from them.
"""

from __future__ import annotations

from .config import MlaConfig, MoeConfig, OptimizerConfig, RopeScaling, WorkloadConfig
from .references import load_workload
from .workload import HfWorkload, Workload

__all__ = [
    "HfWorkload",
    "MlaConfig",
    "MoeConfig",
    "OptimizerConfig",
    "RopeScaling",
    "Workload",
    "WorkloadConfig",
    "load_workload",
]
