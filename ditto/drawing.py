"""Drawings: a workflow as Mermaid text for people, and as data for programs. Runs nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from ditto.contracts import NODE_TYPES
from ditto.flow import Flow
from ditto.graph import STEP_TYPE, Graph, Node
from ditto.loop import Loop
from ditto.waits import Wait, WaitKind

BY_ARGUMENTS: Final = "by its arguments"
BY_WORKER: Final = "by its worker"

_ESCAPED: Final = {ord(each): f"#{ord(each)};" for each in '"#&<>`'}


def to_mermaid(workflow: Graph | Loop | Flow) -> str:
    """A flowchart: each node with its type and effect class, edges into a conditional one dotted, waits as hexagons.

    A Loop's Graph is a subgraph. What a Flow calls is known only by running it.
    """
    lines = ["flowchart TD"]
    match workflow:
        case Graph():
            lines += _draw_nodes(workflow)
        case Loop():
            lines += _draw_loop(workflow)
        case Flow():
            lines.append(_box("flow", f"flow {workflow.name}", ["its calls are known only by running it"]))
    return "\n".join(lines) + "\n"


def to_data(workflow: Graph | Loop | Flow) -> dict[str, Any]:
    """The same as JSON data: `kind`, `name`, `version`, and what belongs to the kind."""
    data = {"kind": workflow.kind, "name": workflow.name, "version": workflow.version}
    match workflow:
        case Graph():
            return {**data, "nodes": [_node_data(node) for node in workflow.nodes.values()]}
        case Loop():
            graph = workflow.graph
            return {
                **data,
                "max_iterations": workflow.max_iterations,
                "append": list(workflow.append),
                "graph": to_data(graph) if isinstance(graph, Graph) else None,
                "chosen_by": None if isinstance(graph, Graph) else _name_of(graph),
            }
        case Flow():
            return {**data, "calls": None}


def _draw_nodes(graph: Graph) -> Iterator[str]:
    ids = {name: f"n{number}" for number, name in enumerate(graph.nodes)}
    for node in graph.nodes.values():
        left, right = ("{{", "}}") if node.wait else ("[", "]")
        yield _box(ids[node.name], node.name, _remarks(node), left, right)
        arrow = "-.->" if node.when else "-->"
        yield from (f"    {ids[parent]} {arrow} {ids[node.name]}" for parent in node.after)


def _draw_loop(loop: Loop) -> Iterator[str]:
    times = f"at most {loop.max_iterations} iterations"
    yield _box("state", "state", [f"loop {loop.name}"], "([", "])")
    yield '    done{"done?"}'
    yield _box("last", "last state", [], "([", "])")
    if isinstance(loop.graph, Graph):
        yield f'    subgraph body["graph {_escape(loop.graph.name)}, {times}"]'
        yield from (f"    {line}" for line in _draw_nodes(loop.graph))
        yield "    end"
    else:
        yield _box("body", "a graph that the state chooses", [f"by {_name_of(loop.graph)}(state)", times])
    yield "    state --> done"
    yield '    done -- "no" --> body'
    yield '    body -- "update" --> state'
    yield '    done -- "yes" --> last'


def _box(id: str, title: str, remarks: Iterable[str], left: str = "[", right: str = "]") -> str:
    small = "".join(f"<br/><small>{_escape(each)}</small>" for each in remarks)
    return f'    {id}{left}"{_escape(title)}{small}"{right}'


def _remarks(node: Node) -> Iterator[str]:
    if node.wait is not None:
        yield from _wait_remarks(node.wait)
    else:
        effect = _effect(node)
        kind = "step" if node.type == STEP_TYPE else node.type
        yield f"{kind}, effect {effect}" if effect in (BY_ARGUMENTS, BY_WORKER) else f"{kind}, {effect}"
    if node.when is not None:
        yield f"when {_name_of(node.when)}({', '.join(node.when_names)})"


def _wait_remarks(wait: Wait) -> Iterator[str]:
    match wait.kind:
        case WaitKind.SIGNAL:
            yield f"waits for signal {wait.name}"
            over = "times out after"
        case WaitKind.APPROVAL:
            yield "waits for an approval"
            over = "expires after"
        case _:
            over = "sleeps"
    if callable(wait.seconds):
        yield f"{over} {_name_of(wait.seconds)}({', '.join(wait.seconds_names)}) s"
    elif wait.seconds is not None:
        yield f"{over} {wait.seconds:g} s"


def _effect(node: Node) -> str | None:
    """The effect class, or what decides it; None for a wait."""
    if node.wait is not None:
        return None
    if node.type == STEP_TYPE:
        return BY_ARGUMENTS if callable(node.effect) else str(node.effect)
    known = NODE_TYPES.get(node.type)
    return BY_WORKER if known is None else BY_ARGUMENTS if known.effect is None else known.effect.value


def _node_data(node: Node) -> dict[str, Any]:
    wait = node.wait
    return {
        "name": node.name,
        "type": node.type,
        "version": node.version,
        "after": list(node.after),
        "effect": _effect(node),
        "when": None if node.when is None else {"function": _name_of(node.when), "names": list(node.when_names)},
        "wait": None
        if wait is None
        else {"name": wait.name, "seconds": BY_ARGUMENTS if callable(wait.seconds) else wait.seconds},
        "max_attempts": 1 if node.retry is None else node.retry.max_attempts,
        "timeout_s": node.timeout_s,
    }


def _name_of(function: Callable[..., Any]) -> str:
    """A function's name; `f` for one that has none."""
    name = getattr(function, "__name__", "f")
    return name if name.isidentifier() else "f"


def _escape(text: str) -> str:
    """Text inside quotes; Mermaid writes a character as `#code;`."""
    return "".join(each if each.isprintable() else f"#{ord(each)};" for each in text.translate(_ESCAPED))
