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
        stack: Where the model has several stacks, the one the rule is about.
        comment: Why.
    """

    action: Action
    tensors: tuple[str, ...]
    layers: Mapping[str, Any] | None
    stack: str | None = None
    comment: str = ""

    def render(self, name: str) -> str:
        """One line of YAML, its comment above."""
        match: dict[str, Any] = {"tensor": self.tensors[0] if len(self.tensors) == 1 else list(self.tensors)}
        if self.stack is not None:
            match["unit"] = f"{self.stack}.*"
        if self.layers is not None:
            match["layers"] = {**self.layers, **({"of": self.stack} if self.stack is not None else {})}
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
    """The keep and offload rules; what no rule names is recomputed by the rule after them.

    Keeps come first, so an offload rule may reach over layers that a keep rule has already decided.
    """
    stacks = list(dict.fromkeys(_stack_of(layer_class) for layer_class in classes))
    if len(stacks) == 1:
        return _stack_rules(classes, assignment, stack=None)
    rules: list[TensorRule] = []
    start = 0
    for stack in stacks:
        own = [layer_class for layer_class in classes if _stack_of(layer_class) == stack]
        count = sum(layer_class.count for layer_class in own)
        rules += _stack_rules(own, assignment[start : start + count], stack=stack)
        start += count
    return tuple(rules)


def _stack_of(layer_class: LayerClass) -> str:
    """`layers` of the class `layers[0:3]`."""
    return layer_class.name.partition("[")[0]


def _stack_rules(classes: Sequence[LayerClass], assignment: Assignment, *, stack: str | None) -> tuple[TensorRule, ...]:
    having, keeps, offloads = _by_tensor(classes, assignment)
    length = len(assignment)
    drafts: dict[tuple[Action, str], tuple[Mapping[str, Any] | None, list[str]]] = {}
    for tensor, layers in having.items():
        if keeps[tensor]:
            _draft(drafts, "keep", tensor, pattern(keeps[tensor], layers, length=length))
        if offloads[tensor]:
            wide = pattern(offloads[tensor] | keeps[tensor], layers, length=length)
            exact = pattern(offloads[tensor], layers, length=length)
            _draft(drafts, "offload", tensor, min((wide, exact), key=_complexity))
    rules = [TensorRule(action, tuple(tensors), layers, stack) for (action, _), (layers, tensors) in drafts.items()]
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


def pattern(wanted: Iterable[int], among: Iterable[int], *, length: int | None = None) -> Mapping[str, Any] | None:
    """The shortest `layers:` selector for `wanted` layers of a stack where `among` have the tensor; None: no selector.

    Args:
        wanted: Layers to select.
        among: Layers that have the tensor: others may be selected too, nothing happens to them.
        length: Of the stack; left out: up to the last of `among`.

    >>> pattern({2, 3}, range(4)), pattern({0, 2}, range(4)), pattern({0, 1, 2, 3}, range(4))
    ({'last': 2}, {'every': 2}, None)
    """
    wanted, having = sorted(set(wanted)), set(among)
    length = max(having) + 1 if length is None else length
    if set(wanted) == having:
        return None
    candidates: list[dict[str, Any]] = [{"first": wanted[-1] + 1}, {"last": length - wanted[0]}]
    for stride in range(2, length):
        offset = wanted[0] % stride
        candidates.append({"every": stride, **({"offset": offset} if offset else {})})
    for candidate in candidates:
        if [layer for layer in _selected(candidate, length) if layer in having] == wanted:
            return candidate
    return {"index": wanted}


def _selected(layers: Mapping[str, Any], length: int) -> range:
    if "first" in layers:
        return range(layers["first"])
    if "last" in layers:
        return range(length - layers["last"], length)
    return range(layers.get("offset", 0), length, layers["every"])


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
