"""Says whether this machine has an accelerator, and imports JAX so that a missing one is no error.

The CUDA plugin installed for planning checks its libraries as soon as JAX starts a backend, and prints a traceback on a
machine with no GPU. Where there is no accelerator JAX is told to use the processor, unless the user chose a platform.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

_GPU_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg", "/dev/kfd")
_TPU_PATTERNS = ("accel[0-9]*", "vfio/[0-9]*")


def present(root: Path = Path("/")) -> tuple[str, ...]:
    """Kinds of accelerator whose driver is loaded: `gpu`, `tpu`; nothing is imported.

    Args:
        root: Where the file system starts; for tests.
    """
    kinds = []
    if any((root / name.lstrip("/")).exists() for name in _GPU_FILES):
        kinds.append("gpu")
    if any(any((root / "dev").glob(pattern)) for pattern in _TPU_PATTERNS):
        kinds.append("tpu")
    return tuple(kinds)


def import_jax() -> ModuleType:
    """JAX, set to the processor where no accelerator is present and the user chose no platform.

    Call it before anything asks JAX for its devices; afterwards it changes nothing.
    """
    import jax

    if not present() and not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")
    return jax
