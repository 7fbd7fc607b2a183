"""Judges an assignment with the event simulator: step time, peak, host bytes. Shares no constraint with the solver."""

from __future__ import annotations

from ..simulate import simulate
from ..timeline import Task, TimelineBuilder
from .problem import Action, Assignment, LayerClass, Outcome, Problem


def is_sound(problem: Problem, assignment: Assignment) -> bool:
    """Whether every action is allowed and everything recomputed has what it is made from."""
    return all(_is_layer_sound(layer, actions) for layer, actions in zip(problem.layers(), assignment, strict=True))


def _is_layer_sound(layer: LayerClass, actions: tuple[Action, ...]) -> bool:
    available = {choice.name for choice, action in zip(layer.choices, actions, strict=True) if action != "drop"}
    for choice, action in zip(layer.choices, actions, strict=True):
        if action == "drop" and choice.needed:
            return False
        if action != "drop" and action not in choice.actions:
            return False
        if action == "recompute" and not available.issuperset(choice.parents):
            return False
    return True


def judge(problem: Problem, assignment: Assignment) -> Outcome:
    """Simulate the step the assignment gives.

    Raises:
        ValueError: A layer recomputes something whose inputs are gone: a fault of the caller.
    """
    if not is_sound(problem, assignment):
        raise ValueError("the assignment recomputes a value from one that is neither kept, offloaded nor recomputed")
    tasks = step_tasks(problem, assignment)
    done = simulate(tasks, [task.seconds or 0.0 for task in tasks], link=problem.link)
    sent = [_bytes(layer, actions, "offload") for layer, actions in zip(problem.layers(), assignment, strict=True)]
    again_s = sum(_again_s(layer, actions) for layer, actions in zip(problem.layers(), assignment, strict=True))
    return Outcome(
        step_s=done.makespan_s,
        peak_bytes=_peak(problem, assignment, sent),
        host_bytes=sum(sent),
        exposed_s=done.exposed_s,
        recompute_s=again_s * problem.steps,
        waits_s=dict(done.waits_s),
    )


def step_tasks(problem: Problem, assignment: Assignment) -> tuple[Task, ...]:
    """The step as tasks: forward, backward in reverse, copies staged through `buffers`, weights gathered one ahead."""
    build = TimelineBuilder()
    before: tuple[int | None, ...] = ()
    for _ in range(problem.steps):
        before = _micro_batch(problem, assignment, build, before)
    build.add("optimizer", "compute", after=before, seconds=problem.tail_s, phase="optimizer")
    return build.done()


def _micro_batch(
    problem: Problem, assignment: Assignment, build: TimelineBuilder, before: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    layers, depth = tuple(problem.layers()), problem.buffers
    forward: list[int] = []
    sent: list[int | None] = []
    for index, (layer, actions) in enumerate(zip(layers, assignment, strict=True)):
        gathered = _gather(build, layer.gather_s, after=(forward[index - 2],) if index > 1 else before)
        freed = sent[index - depth] if index >= depth else None
        waits = (*before, gathered, freed)
        forward.append(build.add("forward", "compute", after=waits, seconds=layer.forward_s, phase="forward"))
        nbytes = _bytes(layer, actions, "offload")
        sent.append(build.add("to host", "to_host", after=(forward[-1],), nbytes=nbytes) if nbytes else None)
    middle = build.add("head and loss", "compute", after=(forward[-1],), seconds=problem.middle_s, phase="forward")
    return _backward(problem, assignment, build, turn=(forward[-1], middle), sent=sent)


def _backward(
    problem: Problem, assignment: Assignment, build: TimelineBuilder, *, turn: tuple[int, int], sent: list[int | None]
) -> tuple[int | None, ...]:
    """Layers in reverse. Weights of the layer after next are asked for before gradients are reduced, so that nothing
    waits behind a reduction.
    """
    layers, depth = tuple(problem.layers()), problem.buffers
    last_forward, middle = turn
    ends: dict[int, int] = {}
    gathered: dict[int, int | None] = {}
    reduced: int | None = None

    def gather(index: int) -> None:
        if index >= 0:
            gathered[index] = _gather(build, layers[index].again_s, after=(ends.get(index + 2, last_forward),))

    gather(len(layers) - 1)
    gather(len(layers) - 2)
    for index in reversed(range(len(layers))):
        layer, actions = layers[index], assignment[index]
        back = None
        if sent[index] is not None:
            nbytes = _bytes(layer, actions, "offload")
            back = build.add("to device", "to_device", after=(sent[index], ends.get(index + depth)), nbytes=nbytes)
        seconds = layer.backward_s + _again_s(layer, actions)
        waits = (middle, gathered.get(index), back)
        ends[index] = build.add("backward", "compute", after=waits, seconds=seconds, phase="backward")
        gather(index - 2)
        if layer.reduce_s:
            reduced = build.add("reduce", "collective", after=(ends[index],), seconds=layer.reduce_s)
    return ends[0], reduced


def _gather(build: TimelineBuilder, seconds: float, *, after: tuple[int | None, ...]) -> int | None:
    return build.add("gather", "collective", after=after, seconds=seconds) if seconds else None


def _bytes(layer: LayerClass, actions: tuple[Action, ...], wanted: Action) -> float:
    return sum(choice.nbytes for choice, action in zip(layer.choices, actions, strict=True) if action == wanted)


def _again_s(layer: LayerClass, actions: tuple[Action, ...]) -> float:
    pairs = zip(layer.choices, actions, strict=True)
    return layer.recompute_s + sum(choice.recompute_s for choice, action in pairs if action == "recompute")


def _peak(problem: Problem, assignment: Assignment, sent: list[float]) -> float:
    """Static bytes, the staging buffers, and the worst layer: what earlier layers keep plus all of its own values.

    A layer's values are all alive while it runs, forward or backward; an offloaded one's are in a staging buffer.
    """
    kept, worst = 0.0, 0.0
    for layer, actions in zip(problem.layers(), assignment, strict=True):
        own = _bytes(layer, actions, "recompute") + _bytes(layer, actions, "drop")
        kept += _bytes(layer, actions, "keep")
        worst = max(worst, kept + own)
    return problem.static_bytes + worst + problem.buffers * max(sent, default=0.0)
