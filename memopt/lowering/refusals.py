"""What a backend cannot do, refused by rule name and with what it can do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..backend import Capabilities
from ..errors import Problem
from ..plan import PlanUnit
from ..policy import Policy
from ..rules import OffloadRule, RecomputeRule, Rule, ShardRule
from ..spec import ModelSpec
from .entries import Entry
from .selectors import acting_roles
from .slots import Decisions, slots_of

_WORDS: Mapping[str, str] = {
    "recompute:activation": "recompute activations",
    "offload:activation": "offload activations",
    "offload:param": "offload parameters",
    "offload:grad": "offload gradients",
    "offload:optimizer_state": "offload optimizer state",
    "shard:param": "shard parameters",
    "shard:grad": "shard gradients by themselves",
    "shard:optimizer_state": "shard optimizer state by itself",
    "shard:dimension": "shard a chosen dimension",
    "fraction:activation": "take a fraction of the layers' activations",
    "fraction:optimizer_state": "take a fraction of the optimizer state",
    "fraction:param": "take a fraction of the parameters",
    "fraction:grad": "take a fraction of the gradients",
    "layers:scan": "select layers of a scanned stack",
    "update_on:host": "update offloaded optimizer state on the host",
    "update_on:device": "update offloaded optimizer state on the device",
    "reshard_after_forward:false": "keep a unit's parameters gathered after forward",
    "reshard_after_forward:int": "reshard to groups after forward",
    "prefetch": "change how many units are gathered ahead",
    "mesh:replicate": "replicate over a mesh axis",
    "mesh:custom": "use mesh axes other than replicate and fsdp",
    "precision": "set dtypes",
    "precision:float16": "compute in float16",
    "accumulate": "accumulate gradients over micro-batches",
    "accumulate:last": "reduce accumulated gradients only at the last micro-batch",
    "name": "select by checkpoint name",
}
Path = tuple[str | int, ...]


def refuse(
    policy: Policy,
    spec: ModelSpec,
    entries: Sequence[Entry],
    decisions: Decisions,
    mesh: Mapping[str, int],
    units: Sequence[PlanUnit],
    *,
    backend: str,
    capabilities: Capabilities,
) -> list[Problem]:
    """One problem for each feature that a rule or a setting needs and the backend lacks."""
    needs: list[tuple[str, Path, str]] = []
    scans = {stack.path for stack in spec.stacks if stack.kind == "scan"}
    for i, rule in enumerate(policy.rules):
        decided = [n for n, won in decisions.winners.items() if i in won.values()]
        roles = list(dict.fromkeys(entries[n].role for n in decided))
        scanned = any(entries[n].layers.keys() & scans for n in decided)
        for feature, path in _rule_needs(rule, roles, is_scanned=scanned):
            needs.append((feature, ("rules", i, *path), f"rule `{rule.name}`"))
    needs += [(feature, path, "the policy") for feature, path in _setting_needs(policy, mesh, units)]
    return _refused(policy, needs, backend, capabilities)


def refuse_by_policy(
    policy: Policy, mesh: Mapping[str, int], *, backend: str, capabilities: Capabilities
) -> list[Problem]:
    """What can be refused with no model at hand: rules whose roles are written, and settings."""
    needs: list[tuple[str, Path, str]] = []
    for i, rule in enumerate(policy.rules):
        roles = acting_roles(rule)
        is_certain = rule.match.role is not None or roles == {"activation"}
        for feature, path in _rule_needs(rule, sorted(roles) if is_certain else [], is_scanned=False):
            needs.append((feature, ("rules", i, *path), f"rule `{rule.name}`"))
    defaults = policy.unit_defaults
    written = [PlanUnit("", (), defaults.reshard_after_forward, defaults.prefetch.forward, defaults.prefetch.backward)]
    for unit in policy.units or ():
        reshard = defaults.reshard_after_forward if unit.reshard_after_forward is None else unit.reshard_after_forward
        prefetch = unit.prefetch or defaults.prefetch
        written.append(PlanUnit("", (), reshard, prefetch.forward, prefetch.backward))
    needs += [(feature, path, "the policy") for feature, path in _setting_needs(policy, mesh, written)]
    return _refused(policy, needs, backend, capabilities)


def _refused(
    policy: Policy, needs: Sequence[tuple[str, Path, str]], backend: str, capabilities: Capabilities
) -> list[Problem]:
    return [
        Problem(
            "unsupported-by-backend",
            f"{who} wants to {_words(feature)}, which the {backend} backend cannot do with these options ({feature})",
            hint=capabilities.instead.get(feature) or "run it on a backend that can, or take it out of this policy",
            **policy.source.at(path),
        )
        for feature, path, who in needs
        if feature not in capabilities.supported
    ]


def _words(feature: str) -> str:
    if feature.startswith("op:"):
        return f"select by operation `{feature[3:]}`"
    return _WORDS.get(feature, feature)


def _rule_needs(rule: Rule, roles: Sequence[str], *, is_scanned: bool) -> list[tuple[str, Path]]:
    acts = [role for role in roles if slots_of(rule, role)]
    needs: list[tuple[str, Path]] = []
    if isinstance(rule, ShardRule):
        needs += [(f"shard:{role}", ("action",)) for role in acts if rule.match.role is None or role in rule.match.role]
        if any(isinstance(dimension, int) for dimension in rule.axes.values()):
            needs.append(("shard:dimension", ("axis",)))
        if "param" in acts:  # gradients and state follow their parameter: no feature of their own
            needs = [need for need in needs if need[0] not in ("shard:grad", "shard:optimizer_state")]
    if isinstance(rule, OffloadRule):
        needs += [(f"offload:{role}", ("action",)) for role in acts]
        if "optimizer_state" in acts and rule.update_on is not None:
            needs.append((f"update_on:{rule.update_on}", ("update_on",)))
    if isinstance(rule, RecomputeRule) and acts:
        needs.append(("recompute:activation", ("action",)))
    if isinstance(rule, OffloadRule | RecomputeRule) and rule.fraction < 1:
        needs += [(f"fraction:{role}", ("fraction",)) for role in acts]
    if is_scanned and "activation" in acts and rule.match.layers is not None:
        needs.append(("layers:scan", ("match", "layers")))
    if acts and rule.match.name is not None:
        needs.append(("name", ("match", "name")))
    if acts and rule.match.op is not None:
        needs += [(f"op:{op}", ("match", "op")) for op in rule.match.op]
    return needs


def _setting_needs(policy: Policy, mesh: Mapping[str, int], units: Sequence[PlanUnit]) -> list[tuple[str, Path]]:
    """Settings at their default need nothing: they are what every backend does."""
    needs: list[tuple[str, Path]] = []
    values = {unit.reshard_after_forward for unit in units}
    if any(value is False for value in values):
        needs.append(("reshard_after_forward:false", _place_of(policy, "reshard_after_forward")))
    if any(not isinstance(value, bool) for value in values):
        needs.append(("reshard_after_forward:int", _place_of(policy, "reshard_after_forward")))
    if any((unit.prefetch_forward, unit.prefetch_backward) != (1, 1) for unit in units):
        needs.append(("prefetch", _place_of(policy, "prefetch")))
    if policy.precision is not None:
        needs.append(("precision", ("precision",)))
        dtypes = policy.precision.model_dump()
        needs += [("precision:float16", ("precision", key)) for key, dtype in dtypes.items() if dtype == "float16"]
    if policy.accumulate.steps > 1:
        needs.append(("accumulate", ("accumulate", "steps")))
        if policy.accumulate.reduce == "last":
            needs.append(("accumulate:last", ("accumulate", "reduce")))
    for axis, size in mesh.items():
        if policy.mesh is not None and axis in policy.mesh and size != 1 and axis != "fsdp":
            needs.append(("mesh:replicate" if axis == "replicate" else "mesh:custom", ("mesh", axis)))
    return needs


def _place_of(policy: Policy, key: str) -> Path:
    for i, unit in enumerate(policy.units or ()):
        if getattr(unit, key) is not None:
            return ("units", i, key)
    return ("unit_defaults", key)
