"""`memopt tune`: costs from a plan, the policy's text, and the search through a backend."""

from __future__ import annotations

import json

import pytest

from memopt.errors import MemoptError
from memopt.loading import load_policy
from memopt.planning import lowered, plan_policy, prepare
from memopt.roofline import GUESS, rates_for
from memopt.targets import load_target
from memopt.tune import tune
from memopt.tuning.costs import assignment_of, model_costs
from memopt.tuning.layouts import default_units, layouts, micro_batch
from memopt.tuning.policy_text import flow, pattern, tensor_rules
from memopt.tuning.problem import Choice, LayerClass
from memopt.tuning.search import Wishes
from memopt.workloads import load_workload

GIB = 2**30
LLAMA_8B = "configs/workloads/llama-3.1-8b.yaml"
RECOMPUTE = {"version": 1, "rules": [{"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}}]}


@pytest.fixture
def setting(sized_backend):
    return prepare(workload=LLAMA_8B, backend=sized_backend(), target="gpu:h100:8")


@pytest.fixture
def costs(setting):
    return model_costs(lowered(load_policy(RECOMPUTE), setting), rates_for(setting.target, GUESS))


class TestCosts:
    def test_flops_are_six_per_parameter_and_token_and_attention(self, setting, costs):
        config = setting.workload
        tokens = config.batch * config.sequence / 8
        layer = 2 * config.hidden**2 + 2 * config.hidden * 1024 + 3 * config.hidden * config.intermediate
        products = 6 * tokens * (32 * layer + config.hidden * config.vocab)
        attention = 32 * (1 + 2.5) * 2 * config.sequence * 2 * tokens * config.hidden * 0.5
        assert costs.step_flops == pytest.approx(products + attention, rel=1e-6)

    def test_full_recompute_adds_about_a_fifth(self, costs):
        """A forward pass without its last product: contract and published measurements say about 20%."""
        layer = costs.classes[0]
        again = sum(choice.recompute_s for choice in layer.choices)
        assert 0.2 < again / (layer.forward_s + layer.backward_s) < 0.29

    def test_a_chain_reads_what_makes_it(self, costs):
        choices = {choice.name: choice for choice in costs.classes[0].choices}
        assert choices["attn_out+attn_stats"].parents == ("k", "q", "v")
        assert set(choices["mlp_gate"].parents) == {"layer_input", "o"}
        assert set(choices["mlp_act"].parents) == {"mlp_gate", "mlp_up"}
        assert "recompute" not in choices["layer_input"].actions
        assert "mlp_down" not in choices

    def test_a_plan_is_read_back_as_an_assignment(self, setting, costs):
        plan = lowered(load_policy("configs/policies/offload.yaml"), setting)
        names = [choice.name for choice in costs.classes[0].choices]
        for actions in assignment_of(plan, costs.classes):
            assert dict(zip(names, actions, strict=True)) == {
                **dict.fromkeys(names, "offload"),
                "mlp_act": "recompute",
            }

    def test_weights_are_gathered_twice_unless_they_stay(self, setting):
        def layer(**unit):
            rule = {"name": "w", "action": "shard", "match": {"role": "param"}, "axis": "fsdp"}
            policy = load_policy({"version": 1, "unit_defaults": unit, "rules": [rule]})
            return model_costs(lowered(policy, setting), rates_for(setting.target, GUESS)).classes[0]

        assert layer().gather_s > 0
        assert layer().gather_again
        assert not layer(reshard_after_forward=False).gather_again
        assert layer(reshard_after_forward=False).again_s == 0
        assert layer().again_s == layer().gather_s
        assert 0 < layer(reshard_after_forward=2).again_s < layer().gather_s

    def test_a_model_without_names_has_nothing_to_tune(self, llama_spec, fake_backend):
        from memopt.lowering import make_plan

        plan = make_plan(load_policy({"version": 1, "rules": []}), llama_spec(batch=0), backend=fake_backend())
        with pytest.raises(MemoptError) as error:
            model_costs(plan, rates_for(load_target("gpu:h100"), GUESS))
        assert error.value.problems[0].code == "nothing-to-tune"


class TestText:
    def test_patterns_are_what_a_person_would_write(self):
        assert pattern(range(4), range(4)) is None
        assert pattern(range(3), range(4)) == {"first": 3}
        assert pattern(range(1, 4), range(4)) == {"last": 3}
        assert pattern([1, 3, 5], range(6)) == {"every": 2, "offset": 1}
        assert pattern([0, 3, 4], range(6)) == {"index": [0, 3, 4]}

    def test_a_keep_rule_comes_before_the_offload_rule_that_reaches_over_it(self):
        layer = LayerClass("layers", 4, (Choice("q", 1.0, 1.0), Choice("attn_out+attn_stats", 1.0, 1.0)), 1.0, 2.0)
        assignment = (("recompute", "offload"), ("offload", "offload"), ("offload", "offload"), ("keep", "offload"))
        rules = tensor_rules([layer], assignment)
        assert [(rule.action, rule.tensors, rule.layers) for rule in rules] == [
            ("keep", ("q",), {"last": 1}),
            ("offload", ("attn_out", "attn_stats"), None),
            ("offload", ("q",), {"last": 3}),
        ]

    @pytest.mark.parametrize(
        "value", ["layers.*", "yes", "Null", "1e3", "a b", "", "**.x", 'quo"te', "plain-word", "x.y"]
    )
    def test_what_is_written_is_read_back(self, value, tmp_path):
        from ruamel.yaml import YAML

        assert YAML(typ="safe").load(flow({"key": [value, 1, True, None]})) == {"key": [value, 1, True, None]}


class TestLayouts:
    def test_the_world_must_divide(self, setting):
        with pytest.raises(MemoptError) as error:
            list(layouts(base=None, workload=setting.workload, target=setting.target, spec=setting.spec, fsdp=(3,)))
        assert error.value.problems[0].code == "tune-bad-fsdp"

    def test_replicas_take_what_is_not_sharded_over(self, setting):
        found = list(
            layouts(base=None, workload=setting.workload, target=setting.target, spec=setting.spec, fsdp=(2, 8))
        )
        assert [layout.settings.get("mesh") for layout in found] == [{"replicate": 4, "fsdp": 2}, None]

    def test_micro_batches_divide_the_batch(self, setting):
        config = setting.workload
        assert micro_batch(config, 2).batch * 2 == config.batch
        with pytest.raises(MemoptError) as error:
            micro_batch(config, config.batch + 1)
        assert error.value.problems[0].code == "tune-bad-accumulate"

    def test_large_modules_outside_the_layers_are_units(self, setting):
        assert default_units(setting.spec) == ["layers.*", "embed_tokens", "lm_head"]

    def test_a_base_policy_keeps_its_layout_and_loses_its_activation_rules(self, setting):
        base = load_policy(
            {
                "version": 1,
                "precision": {"compute": "bfloat16"},
                "rules": [
                    {"name": "zero", "action": "shard", "match": {"role": "optimizer_state"}},
                    {"name": "host", "action": "offload", "match": {"role": "optimizer_state"}, "fraction": 0.5},
                    {"name": "acts", "action": "offload", "match": {"tensor": "q"}},
                    {"name": "inputs", "action": "offload", "match": {"path": "layers.*.input"}},
                    {"name": "rest", "action": "recompute", "match": {"unit": "layers.*"}},
                ],
            }
        )
        (layout,) = layouts(base=base, workload=setting.workload, target=setting.target, spec=setting.spec)
        assert [rule["name"] for rule in layout.rules] == ["zero", "host"]
        assert layout.settings["precision"]["compute"] == "bfloat16"


def tuned(backend, *, budget_gib, target="gpu:h100:8", workload=LLAMA_8B, **wishes):
    return tune(
        workload=workload,
        backend=backend,
        target=target,
        wishes=Wishes(device_bytes=round(budget_gib * GIB), **{"num_points": 1, **wishes}),
    )


def jax_like(sized, *, exposed_share=0.0):
    """A backend that is judged as JAX is, whose compiled schedule exposes that share of the copies' seconds."""
    from dataclasses import replace

    from memopt_jax.options import Options

    class JaxLike(sized):
        def __init__(self, **changes):
            super().__init__(name="jax", **changes)

        def options(self):
            return Options

        def estimate(self, workload, plan, spec, *, target, **kwargs):
            found = super().estimate(workload, plan, spec, target=target, **kwargs)
            copies_s = 2 * found.to_host_bytes / target.host_link_bytes_per_s
            overlap = {"transfers": [], "synchronous": [], "exposed_s": exposed_share * copies_s}
            return replace(found, overlap=overlap)

    return JaxLike


class TestSearch:
    def test_the_written_policy_is_the_planned_one_and_fits(self, sized_backend, tmp_path):
        found = tuned(sized_backend(), budget_gib=24)
        file = tmp_path / "tuned.yaml"
        file.write_text(found.text, encoding="utf-8")
        setting = prepare(workload=LLAMA_8B, backend=sized_backend(), target="gpu:h100:8")
        again = plan_policy(file, setting)
        assert again.measured.peak_bytes == found.result.measured.peak_bytes <= 24 * GIB
        assert found.text.count("\n") < 30

    def test_no_policy_written_by_hand_is_faster(self, sized_backend):
        for budget_gib in (19.5, 26):
            found = tuned(sized_backend(), budget_gib=budget_gib)
            budget = budget_gib * GIB
            for name, outcome in found.presets.items():
                if outcome.peak_bytes <= budget and outcome.host_bytes <= found.host_bytes:
                    assert found.solution.outcome.step_s <= outcome.step_s * 1.0001, (name, budget_gib)

    def test_bytes_no_model_foretells_are_learnt_from_the_backend(self, sized_backend):
        """The backend holds 3 GiB more than rows say: the answer must still fit, and use what is left."""
        plain = tuned(sized_backend(), budget_gib=30)
        hidden = tuned(sized_backend(hidden_bytes=3 * GIB), budget_gib=30)
        assert hidden.result.measured.peak_bytes <= 30 * GIB
        assert hidden.solution.outcome.step_s >= plain.solution.outcome.step_s * (1 - 1e-9)

    def test_where_everything_fits_nothing_is_computed_again(self, sized_backend):
        found = tuned(sized_backend(), budget_gib=70)
        assert "recompute" not in found.text.partition("rules:")[2]
        assert "offload" not in found.text.partition("rules:")[2]
        assert found.result.fits
        assert "of which 0.00 µs computes values again" in found.text

    def test_layers_are_treated_alike_where_cutting_a_stack_costs_bytes(self, sized_backend):
        """A compiler may copy what a cut scan needs; each such answer is over budget, however much is learnt."""
        from dataclasses import replace

        class CopiesWhenCut(sized_backend):
            def estimate(self, workload, plan, spec, **kwargs):
                found = super().estimate(workload, plan, spec, **kwargs)
                layers = [[row.residual for row in plan.rows if row.unit == unit.name] for unit in plan.units[:32]]
                extra = 6 * GIB * len([cut for cut in range(1, 32) if layers[cut] != layers[cut - 1]])
                return replace(found, by_role={**found.by_role, "temp": extra})

        found = tuned(CopiesWhenCut(), budget_gib=24)
        assert found.result.measured.peak_bytes <= 24 * GIB
        assert "layers: {" not in found.text

    def test_a_budget_below_the_floor_says_what_makes_it_up(self, sized_backend):
        with pytest.raises(MemoptError) as error:
            tuned(sized_backend(), budget_gib=12)
        problem = error.value.problems[0]
        assert problem.code == "budget-infeasible"
        assert "optimizer_state 7.48 GiB" in problem.message
        nearest = float(problem.hint.split("--budget ")[1].split("GiB")[0])
        assert tuned(sized_backend(), budget_gib=nearest).result.fits

    def test_the_host_budget_is_kept(self, sized_backend):
        found = tuned(sized_backend(), budget_gib=19.5, host_bytes_per_node=16 * GIB)
        assert found.result.measured.host_bytes * 8 <= 16 * GIB

    def test_without_offload_in_the_backend_nothing_is_offloaded(self, sized_backend, everything):
        found = tuned(sized_backend(supported=everything - {"offload:activation"}), budget_gib=24)
        assert "action: offload" not in found.text

    def test_the_fastest_layout_is_taken(self, sized_backend):
        found = tuned(sized_backend(), budget_gib=40, fsdp=(4, 8), accumulate=(1,))
        assert len(found.tried) == 2
        assert f"fsdp {found.layout.fsdp}" == found.layout.label

    def test_accumulation_is_written_and_halves_the_micro_batch(self, sized_backend):
        batch = load_workload(LLAMA_8B).batch
        found = tuned(sized_backend(), budget_gib=40, target="gpu:h100:4", accumulate=(2,))
        assert "accumulate: {steps: 2, reduce: each}" in found.text
        assert found.layout.workload.batch * 2 == batch

    def test_the_frontier_falls(self, sized_backend):
        found = tuned(sized_backend(), budget_gib=24, num_points=4)
        points = [(point.outcome.peak_bytes, point.outcome.step_s) for point in found.frontier]
        assert len(points) >= 3
        assert points == sorted(points)
        data = json.loads(json.dumps(found.to_json()))
        assert all({"policy", "peak_bytes", "step_time"} <= set(point) for point in data["frontier"])
        assert sum(point["replanned"] for point in data["frontier"]) == 1

    def test_what_binds_is_said(self, sized_backend):
        tight = tuned(sized_backend(), budget_gib=19.5, host_bytes_per_node=8 * GIB)
        assert tight.explanation.binds
        assert any("buys" in sentence for sentence in tight.explanation.sentences())
        roomy = tuned(sized_backend(), budget_gib=70)
        assert roomy.explanation.sentences()[0] == "nothing binds but compute"

    def test_an_answer_that_pins_more_than_the_default_pool_declares_what_to_set(self, sized_backend, tmp_path):
        """The pool's cap is a setting: the policy, its header and the answer name it, and the plan is judged by it."""
        found = tuned(jax_like(sized_backend)(), budget_gib=26, target="gpu:h100:8")
        (setting,) = found.settings
        assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=" in setting
        gib = int(setting.partition("_GB=")[2].split()[0])
        assert f"# Set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={gib} " in found.text
        assert found.result.measured.host_bytes * 8 <= gib * GIB
        assert found.result.fits
        assert found.to_json()["feasible"] is True
        file = tmp_path / "tuned.yaml"
        file.write_text(found.text, encoding="utf-8")
        setting = prepare(workload=LLAMA_8B, backend=jax_like(sized_backend)(), target="gpu:h100:8")
        assert plan_policy(file, setting).fits

    def test_offload_on_jax_and_gpus_is_pipelined_and_checked(self, sized_backend):
        offloads = tuned(jax_like(sized_backend)(), budget_gib=26)
        assert "xla_gpu_enable_pipelined_host_offloading: true" in offloads.text
        assert "check: first_step" in offloads.text
        assert "backend_options" not in tuned(jax_like(sized_backend)(), budget_gib=70).text

    def test_a_schedule_that_exposes_copies_is_believed(self, sized_backend, everything):
        """The compiled schedule hides nothing: offloading costs all its copies, and the answer is no slower for it."""
        hidden = tuned(jax_like(sized_backend)(), budget_gib=26)
        exposed = tuned(jax_like(sized_backend, exposed_share=1.0)(), budget_gib=26)
        assert hidden.result.measured.host_bytes > 0
        assert exposed.result.measured.host_bytes < hidden.result.measured.host_bytes
        without = tuned(jax_like(sized_backend)(supported=everything - {"offload:activation"}), budget_gib=26)
        assert exposed.result.time.estimate_s <= without.result.time.estimate_s * 1.001

    def test_no_preset_that_fits_is_estimated_faster_when_planned(self, sized_backend):
        """By the plan's own estimate, not the model's: each preset is planned as a user would."""
        backend = jax_like(sized_backend, exposed_share=0.3)()
        found = tuned(backend, budget_gib=26)
        setting = prepare(workload=LLAMA_8B, backend=backend, target="gpu:h100:8")
        names = ("full-recompute", "offload-inputs", "offload-attention", "offload-all")
        planned = {name: plan_policy(f"configs/policies/gpu/{name}.yaml", setting) for name in names}
        fitting = {name: plan for name, plan in planned.items() if plan.measured.peak_bytes <= 26 * GIB}
        assert len(fitting) >= 3
        for name, plan in fitting.items():
            assert found.result.time.estimate_s <= plan.time.estimate_s * 1.0001, name

    def test_a_target_without_rates_is_refused(self, sized_backend):
        with pytest.raises(MemoptError) as error:
            tuned(sized_backend(), budget_gib=24, target="cpu")
        assert error.value.problems[0].code == "tune-needs-rates"
