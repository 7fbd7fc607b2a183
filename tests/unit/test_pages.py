"""Pages without what they need."""

from __future__ import annotations

import sys

import pytest

from memopt import MemoptError
from memopt.plan_page import memory_figure, plan_page
from memopt.planning import plan_policy, prepare
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


@pytest.mark.parametrize("workload, has_line", [("llama-tiny", False), ("llama-3.1-8b", True)])
def test_a_limit_far_beyond_a_small_plans_bars_is_not_drawn(workload, has_line, sized_backend) -> None:
    """A device of 75 GiB beside bars of some MiB would leave nothing of them to see."""
    setting = prepare(workload=f"configs/workloads/{workload}.yaml", backend=sized_backend(), target="gpu:h100:4")
    figure = memory_figure([plan_policy("configs/policies/none.yaml", setting)])
    assert bool(figure.to_dict()["layout"].get("shapes")) is has_line
