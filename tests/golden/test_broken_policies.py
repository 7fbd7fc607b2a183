"""Each kind of broken policy gives the right code, line and hint; the whole answer is a snapshot.

The files say themselves what they expect (`# expect: CODE LINE`), so that renewing the snapshot cannot hide a change of
code or line. `# against: llama` judges the rules against a model, `# world: N` the mesh.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memopt import MemoptError, load_policy, make_plan
from memopt.checking import policy_problems
from memopt.errors import Problem

BROKEN = sorted((Path(__file__).parent / "broken").glob("*.yaml"))


def _header(text: str, key: str) -> list[str]:
    return re.findall(rf"^# {key}: (.*)$", text, re.MULTILINE)


def _problems(file: Path, text: str, llama_spec, fake_backend, everything) -> list[Problem]:
    world = int(next(iter(_header(text, "world")), "0"))
    if not _header(text, "against"):
        return policy_problems(file, world_size=world or None)
    backend = fake_backend(supported=everything - set(_header(text, "without")))
    with pytest.raises(MemoptError) as error:
        make_plan(load_policy(file), llama_spec(), backend=backend, world_size=world or 1)
    return list(error.value.problems)


@pytest.mark.parametrize("file", BROKEN, ids=[file.stem for file in BROKEN])
def test_a_broken_policy_says_what_where_and_what_next(file, llama_spec, fake_backend, everything, snapshot) -> None:
    text = file.read_text()
    problems = _problems(file, text, llama_spec, fake_backend, everything)
    assert sorted(f"{p.code} {p.line}" for p in problems) == sorted(_header(text, "expect"))
    assert {problem.file for problem in problems} == {str(file)}
    assert all(problem.column and problem.hint for problem in problems)
    rendered = "\n".join(problem.render() for problem in problems)
    assert rendered.replace(str(file), file.name) == snapshot


def test_there_are_at_least_twenty_kinds() -> None:
    codes = {line.split()[0] for file in BROKEN for line in _header(file.read_text(), "expect")}
    assert len(BROKEN) >= 20
    assert len(codes) >= 20
