"""How a comparison's torch ranks are started: torchrun, or one process alone. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
import sys

from memopt.backend import INSTALL, Launch
from memopt.errors import MemoptError


def launch(job_file: str, *, world_size: int) -> Launch:
    """torchrun with `world_size` ranks on this machine, each with its share of the cores; no process group for one.

    Raises:
        MemoptError: `extra-missing` without torch or transformers.
    """
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise MemoptError.of("extra-missing", f"{' and '.join(missing)} not installed", hint=INSTALL["torch"])
    command = (sys.executable, "-m")
    if world_size > 1:
        command += ("torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size), "-m")
    threads = max(1, (os.cpu_count() or 1) // world_size)
    return Launch(
        command=(*command, "memopt.worker", job_file),
        environment={"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
    )
