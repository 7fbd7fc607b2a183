"""Writes an assignment as a policy a person would have written: globs, `layers:`, and comments that say why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .problem import Action, Assignment, LayerClass

Layers = frozenset[int]


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One activation rule.

    Attributes:
        action: `keep` or `offload`.
        tensors: Neutral names, in model order.
        layers: The `layers:` selector; None: all.
        comment: Why.
    """

    action: Action
    tensors: tuple[str, ...]
    layers: Mapping[str, Any] | None
    comment: str = ""

    def render(self, name: str) -> str:
        """One line of YAML, its comment above."""
        match: dict[str, Any] = {"tensor": self.tensors[0] if len(self.tensors) == 1 else list(self.tensors)}
        if self.layers is not None:
            match["layers"] = dict(self.layers)
        line = f"  - {flow({'name': name, 'action': self.action, 'match': match})}"
        return f"  # {self.comment}\n{line}" if self.comment else line


def flow(value: Any) -> str:
    """A value in YAML's flow style; strings are quoted only where YAML would read something else.

    >>> flow({"name": "mlp", "match": {"tensor": ["q", "k"], "path": "layers.*"}})
    '{name: mlp, match: {tensor: [q, k], path: "layers.*"}}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        plain = value.replace("_", "").replace("-", "").replace(".", "")
        is_word = (
            plain.isalnum()
            and not value[0].isdigit()
            and value.lower() not in ("yes", "no", "on", "off", "null", "true", "false")
        )
        return value if is_word else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def tensor_rules(classes: Sequence[LayerClass], assignment: Assignment) -> tuple[TensorRule, ...]:
    """The keep and offload rules of one stack; what no rule names is recomputed by the rule after them.

    Keeps come first, so an offload rule may reach over layers that a keep rule has already decided.
    """
    having, keeps, offloads = _by_tensor(classes, assignment)
    drafts: dict[tuple[Action, str], tuple[Mapping[str, Any] | None, list[str]]] = {}
    for tensor, layers in having.items():
        if keeps[tensor]:
            _draft(drafts, "keep", tensor, pattern(keeps[tensor], layers))
        if offloads[tensor]:
            wide = pattern(offloads[tensor] | keeps[tensor], layers)
            exact = pattern(offloads[tensor], layers)
            _draft(drafts, "offload", tensor, min((wide, exact), key=_complexity))
    rules = [TensorRule(action, tuple(tensors), layers) for (action, _), (layers, tensors) in drafts.items()]
    return tuple(sorted(rules, key=lambda rule: (rule.action != "keep", _complexity(rule.layers))))


def _by_tensor(
    classes: Sequence[LayerClass], assignment: Assignment
) -> tuple[dict[str, Layers], dict[str, Layers], dict[str, Layers]]:
    order = [layer_class for layer_class in classes for _ in range(layer_class.count)]
    having: dict[str, set[int]] = {}
    found: dict[str, dict[str, set[int]]] = {"keep": {}, "offload": {}}
    for index, (layer_class, actions) in enumerate(zip(order, assignment, strict=True)):
        for choice, action in zip(layer_class.choices, actions, strict=True):
            for tensor in choice.name.split("+"):
                having.setdefault(tensor, set()).add(index)
                if action in found:
                    found[action].setdefault(tensor, set()).add(index)
    frozen = {tensor: frozenset(layers) for tensor, layers in having.items()}
    keeps = {tensor: frozenset(found["keep"].get(tensor, ())) for tensor in having}
    offloads = {tensor: frozenset(found["offload"].get(tensor, ())) for tensor in having}
    return frozen, keeps, offloads


def _draft(
    drafts: dict[tuple[Action, str], tuple[Mapping[str, Any] | None, list[str]]],
    action: Action,
    tensor: str,
    layers: Mapping[str, Any] | None,
) -> None:
    drafts.setdefault((action, repr(layers)), (layers, []))[1].append(tensor)


def pattern(wanted: Iterable[int], among: Iterable[int]) -> Mapping[str, Any] | None:
    """The shortest `layers:` selector for `wanted` layers of a stack where `among` have the tensor; None: no selector.

    >>> pattern({2, 3}, range(4)), pattern({0, 2}, range(4)), pattern({0, 1, 2, 3}, range(4))
    ({'last': 2}, {'every': 2}, None)
    """
    wanted, layers = sorted(set(wanted)), sorted(set(among))
    if wanted == layers:
        return None
    if layers == list(range(len(layers))):
        if wanted == layers[: len(wanted)]:
            return {"first": len(wanted)}
        if wanted == layers[-len(wanted) :]:
            return {"last": len(wanted)}
        for stride in range(2, len(layers)):
            if wanted == layers[wanted[0] :: stride] and wanted[0] < stride and len(wanted) > 1:
                return {"every": stride, **({"offset": wanted[0]} if wanted[0] else {})}
    elif wanted == layers[-len(wanted) :]:
        return {"last": len(wanted)}
    return {"index": wanted}


def _complexity(layers: Mapping[str, Any] | None) -> int:
    if layers is None:
        return 0
    return 1 if "index" not in layers else 1 + len(layers["index"])


def render_policy(
    *,
    header: Sequence[str],
    settings: Mapping[str, Any],
    layout_rules: Sequence[Mapping[str, Any]],
    rules: Sequence[TensorRule],
    units: Sequence[str],
    backend_options: Mapping[str, Any],
) -> str:
    """The whole file.

    Args:
        header: Comment lines: for what it was tuned, and what came out.
        settings: `mesh`, `units`, `precision`, `accumulate`, `budget` as plain data; empty ones are left out.
        layout_rules: The rules that are not about activations, as plain data, unchanged.
        rules: From `tensor_rules`, with comments.
        units: Globs of the recomputed units; empty: no regions, everything is kept.
        backend_options: As in a policy.
    """
    lines = [*(f"# {line}".rstrip() for line in header), "version: 1"]
    lines += [f"{key}: {flow(value)}" for key, value in settings.items() if value not in (None, {}, ())]
    body = [f"  - {flow(rule)}" for rule in layout_rules]
    taken = {str(rule["name"]) for rule in layout_rules}
    for rule in rules:
        body.append(rule.render(_free_name(f"{rule.action}-{rule.tensors[0].replace('_', '-')}", taken)))
    if units:
        match = {"unit": units[0] if len(units) == 1 else list(units)}
        again = {"name": _free_name("rest", taken), "action": "recompute", "match": match}
        body.append("  # Everything else in a layer is computed again in the backward pass.")
        body.append(f"  - {flow(again)}")
    lines += ["rules:", *body] if body else ["rules: []"]
    if backend_options:
        lines.append(f"backend_options: {flow(backend_options)}")
    return "\n".join(lines) + "\n"


def _free_name(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 2
    while name in taken:
        name, number = f"{wanted}-{number}", number + 1
    taken.add(name)
    return name
