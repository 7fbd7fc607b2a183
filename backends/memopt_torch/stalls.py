"""Says where a GPU's collectives stand still, before NCCL's own watchdog ends the process.

Waiting for a collective on a GPU blocks no processor: the stream waits, and an error has nobody to be raised to. NCCL
ends the process once the group's timeout is over, and knows neither unit nor step. So where a stream waits an event is
left behind, and a thread asks the events now and then. A collective itself holds its tensors, which are to be freed.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

log = logging.getLogger("memopt")

_TOLD_AT = 0.9  # of the timeout: NCCL's watchdog takes the process with it
_LOOKS = 20  # in one timeout


@dataclass(frozen=True, slots=True)
class _Wait:
    what: str
    is_over: Callable[[], bool]
    at_s: float


def leave_event() -> Callable[[], bool]:
    """Tells whether all that the current stream has been given by now is done."""
    event = torch.cuda.Event()
    event.record()
    return event.query


class StallWatch:
    """Remembers what a stream waits for until the wait is over.

    Args:
        timeout_s: Of the process group.
        mark: Called at a wait, gives what tells whether it is over; for tests.
        clock: Seconds; for tests.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        mark: Callable[[], Callable[[], bool]] = leave_event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = _TOLD_AT * timeout_s
        self._every_s = timeout_s / _LOOKS
        self._mark = mark
        self._clock = clock
        self._waits: deque[_Wait] = deque()
        self._is_told = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, what: str) -> None:
        """The current stream has been told to wait for that."""
        self._waits.append(_Wait(what, self._mark(), self._clock()))

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
        self._waits.clear()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.look()

    def look(self) -> None:
        """Forgets what is over; the oldest that has not been for too long is told, once a stall."""
        while self._waits and self._waits[0].is_over():
            self._waits.popleft()
            self._is_told = False
        if not self._waits or self._is_told:
            return
        oldest = self._waits[0]
        waited_s = self._clock() - oldest.at_s
        if waited_s > self._limit_s:
            self._is_told = True
            log.error(
                "%s has not finished for %.0f s: another rank has died or stalled, and its own log says why; the "
                "process group ends this process soon",
                oldest.what,
                waited_s,
            )
