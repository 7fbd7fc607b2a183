"""`python -m memopt.worker JOB.json`: runs one row of a comparison in this process, or this rank of it.

Events are JSON lines: `{"event": "step", "step", "loss"}` as training goes, `{"event": "stage", "text"}`, and at the
end either `{"event": "result", "result": {...}}` or `{"event": "problems", "problems": [...]}`.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from .backend import load_backend
from .comparing.jobs import Job
from .errors import MemoptError
from .guarding import CRASHED, guarded


def main(arguments: list[str]) -> int:
    """Exit code 0 with a result, 1 when the job was refused or its code raised; the traceback goes to stderr."""
    (path,) = arguments
    job = Job.read(path)

    def emit(event: dict[str, Any]) -> None:
        # One write per line in append mode: lines of several ranks do not mix.
        with open(job.events, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    try:
        what = f"training `{job.workload}`"
        guarded(what, lambda: load_backend(job.backend).train(job, emit=emit), code=CRASHED)
    except MemoptError as error:
        emit({"event": "problems", "problems": [problem.to_json() for problem in error.problems]})
        traceback.print_exception(error.__cause__ or error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
