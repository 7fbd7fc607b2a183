"""Pages without what they need."""

from __future__ import annotations

import sys

import pytest

from memopt import MemoptError
from memopt.plan_page import plan_page
from memopt.report import Report


@pytest.mark.parametrize("page", [lambda: Report(backend="fake").to_html(), lambda: plan_page([])])
def test_a_page_without_plotly_says_how_to_install_it(page, monkeypatch) -> None:
    for module in ("plotly", "plotly.graph_objects", "plotly.offline"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("memopt.pages._plotly_script", sys.modules["memopt.pages"]._plotly_script.__wrapped__)
    with pytest.raises(MemoptError) as error:
        page()
    (problem,) = error.value.problems
    assert (problem.code, problem.hint) == ("extra-missing", "pip install 'memopt[report]'")
