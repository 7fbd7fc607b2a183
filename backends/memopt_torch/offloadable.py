"""Which optimizers' state can live in host memory: those that update every parameter by itself."""

from __future__ import annotations

from torch.optim import Optimizer

from memopt.errors import MemoptError, did_you_mean
from memopt.plan import Plan

# torch.optim's optimizers whose update of a parameter reads nothing but it, its gradient and its own state.
_BY_PARAMETER = frozenset(
    {
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    }
)  # fmt: skip
_NEVER = {
    "LBFGS": "its update couples all parameters",
    "SparseAdam": "its state follows sparse gradients",
}


def check_optimizer(optimizer: Optimizer, plan: Plan) -> None:
    """Refuse optimizers whose state cannot be offloaded, before the first step.

    Raises:
        MemoptError: `optimizer-not-offloadable`, with what would work.
    """
    name = type(optimizer).__name__
    rules = sorted(
        {row.rule for row in plan.rows_of("optimizer_state") if row.memory_kind == "pinned_host" and row.rule}
    )
    rule = f"rule `{rules[0]}`" if rules else "the policy"
    if name in _NEVER:
        raise MemoptError.of(
            "optimizer-not-offloadable",
            f"{rule} offloads optimizer state, which `{name}` cannot do: {_NEVER[name]}",
            hint="use an optimizer that updates each parameter by itself (Adam, AdamW, SGD ...), or take the rule out",
        )
    trusted = tuple((plan.options.get("offload") or {}).get("trusted_optimizers") or ())
    is_torchs = type(optimizer).__module__.startswith("torch.optim") and name in _BY_PARAMETER
    if not is_torchs and name not in trusted:
        near = did_you_mean(name, sorted(_BY_PARAMETER))
        raise MemoptError.of(
            "optimizer-not-offloadable",
            f"{rule} offloads optimizer state; whether `{type(optimizer).__module__}.{name}` updates each parameter "
            "by itself is not known, and running it bucket by bucket could be wrong without a sign",
            hint="if its update of a parameter reads nothing but that parameter, its gradient and its state (and "
            "counts no steps of its own in a parameter group), say so: "
            f"backend_options.torch.offload.trusted_optimizers: [{name}]" + (f"; {near}" if near else ""),
        )
