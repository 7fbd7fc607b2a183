"""Says where a GPU's collectives stand still, before NCCL's own watchdog ends the process.

Waiting for a collective on a GPU blocks no processor: the stream waits, and an error has nobody to be raised to. NCCL
ends the process once the group's timeout is over, and knows neither unit nor step. So a thread looks at the collectives
that have not finished, now and then, by asking their events; the training loop only writes down what it has issued.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("memopt")

_TOLD_AT = 0.9  # of the timeout: NCCL's watchdog takes the process with it
_LOOKS = 20  # in one timeout


@dataclass(frozen=True, slots=True)
class _Issued:
    what: str
    work: Any
    at_s: float


class StallWatch:
    """Remembers collectives until they have finished.

    Args:
        timeout_s: Of the process group.
        clock: Seconds; for tests.
    """

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = _TOLD_AT * timeout_s
        self._every_s = timeout_s / _LOOKS
        self._clock = clock
        self._issued: deque[_Issued] = deque()
        self._is_told = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, what: str, work: Any) -> None:
        """A collective has been issued."""
        self._issued.append(_Issued(what, work, self._clock()))

    def start(self) -> None:
        """Looks from now on until the interpreter ends."""
        self._thread = threading.Thread(target=self._run, name="memopt-stalls", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Looks no more, and lets go of what it remembers."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._issued.clear()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.look()

    def look(self) -> None:
        """Forgets what has finished; the oldest that has not for too long is told, once a stall."""
        while self._issued and self._issued[0].work.is_completed():
            self._issued.popleft()
            self._is_told = False
        if not self._issued or self._is_told:
            return
        oldest = self._issued[0]
        waited_s = self._clock() - oldest.at_s
        if waited_s > self._limit_s:
            self._is_told = True
            log.error(
                "%s has not finished for %.0f s: another rank has died or stalled, and its own log says why; the "
                "process group ends this process soon",
                oldest.what,
                waited_s,
            )
