"""Drawings: a workflow as Mermaid text and as data; nothing of it is run."""

from __future__ import annotations

import json
from typing import Any

from ditto import Flow, FlowContext, Graph, Loop, Retry
from ditto.drawing import to_data, to_mermaid


def large(a: int) -> bool:
    raise AssertionError("a drawing asks nobody")


ORDER = (
    Graph("order", version="3")
    .step("a", lambda: 1, effect="pure")
    .step("b", lambda a: 1, after=("a",), effect=lambda arguments: "read", retry=Retry(5), timeout_s=2)
    .node("c", "SHOP.PRICE", after=("a",), bind=lambda a: a, when=large)
    .node("d", "INFER.REASONING.SAMPLE", after=("b", "c"), bind=lambda b, c: b)
    .approval("review", show=lambda d: d, after=("d",), expires_s=60)
    .wait("paid", signal="bank.paid", after=("review",), when=lambda review: True, timeout_s=lambda review: 5.0)
    .sleep("cool", 0.5, after=("paid",))
)


def test_a_graph_shows_conditions_waits_and_effect_classes() -> None:
    assert to_mermaid(ORDER) == (
        "flowchart TD\n"
        '    n0["a<br/><small>step, pure</small>"]\n'
        '    n1["b<br/><small>step, effect by its arguments</small>"]\n'
        "    n0 --> n1\n"
        '    n2["c<br/><small>SHOP.PRICE, effect by its worker</small><br/><small>when large(a)</small>"]\n'
        "    n0 -.-> n2\n"
        '    n3["d<br/><small>INFER.REASONING.SAMPLE, infer</small>"]\n'
        "    n1 --> n3\n"
        "    n2 --> n3\n"
        '    n4{{"review<br/><small>waits for an approval</small><br/><small>expires after 60 s</small>"}}\n'
        "    n3 --> n4\n"
        '    n5{{"paid<br/><small>waits for signal bank.paid</small><br/><small>times out after f(review) s</small>'
        '<br/><small>when f(review)</small>"}}\n'
        "    n4 -.-> n5\n"
        '    n6{{"cool<br/><small>sleeps 0.5 s</small>"}}\n'
        "    n5 --> n6\n"
    )
    assert ORDER.to_mermaid() == to_mermaid(ORDER)
    assert to_mermaid(Graph("empty")) == "flowchart TD\n"


def loop_over(graph: Any) -> Loop:
    return Loop("retry", graph, lambda state, outputs: state, lambda state: True, max_iterations=3, append=("found",))


def choose(state: Any) -> Graph:
    raise AssertionError("a drawing asks nobody")


def test_a_loop_has_its_graph_inside() -> None:
    assert to_mermaid(loop_over(Graph("body").step("a", lambda: 1))) == (
        "flowchart TD\n"
        '    state(["state<br/><small>loop retry</small>"])\n'
        '    done{"done?"}\n'
        '    last(["last state"])\n'
        '    subgraph body["graph body, at most 3 iterations"]\n'
        '        n0["a<br/><small>step, idempotent</small>"]\n'
        "    end\n"
        "    state --> done\n"
        '    done -- "no" --> body\n'
        '    body -- "update" --> state\n'
        '    done -- "yes" --> last\n'
    )
    assert (
        '    body["a graph that the state chooses<br/><small>by choose(state)</small>'
        '<br/><small>at most 3 iterations</small>"]\n'
    ) in to_mermaid(loop_over(choose))


def test_of_a_flow_nothing_is_known_before_it_runs() -> None:
    async def function(ctx: FlowContext, input: Any) -> None:
        raise AssertionError("a drawing asks nobody")

    flow = Flow("order", function, version="2")
    told = '    flow["flow order<br/><small>its calls are known only by running it</small>"]\n'
    assert to_mermaid(flow) == "flowchart TD\n" + told
    assert to_data(flow) == {"kind": "flow", "name": "order", "version": "2", "calls": None}


def test_the_data_is_json_and_has_all_nodes() -> None:
    data = to_data(ORDER)
    assert json.loads(json.dumps(data)) == data
    nodes = {node["name"]: node for node in data["nodes"]}
    assert list(nodes) == list(ORDER.nodes)
    assert nodes["b"] == {
        "name": "b", "type": "STEP", "version": "1", "after": ["a"], "effect": "by its arguments", "when": None,
        "wait": None, "max_attempts": 5, "timeout_s": 2,
    }  # fmt: skip
    assert nodes["c"]["when"] == {"function": "large", "names": ["a"]}
    assert nodes["paid"]["wait"] == {"name": "bank.paid", "seconds": "by its arguments"}
    assert nodes["cool"]["wait"] == {"name": "cool", "seconds": 0.5}
    looped = to_data(loop_over(Graph("body").step("a", lambda: 1)))
    assert (looped["max_iterations"], looped["append"], looped["chosen_by"]) == (3, ["found"], None)
    assert looped["graph"]["nodes"][0]["name"] == "a"
    assert to_data(loop_over(choose))["chosen_by"] == "choose"


def test_a_type_cannot_break_out_of_its_label() -> None:
    graph = Graph("g").node("a", 'A."]\n    evil --> n0["<b>`#')
    [_, label] = to_mermaid(graph).splitlines()
    assert label == (
        '    n0["a<br/><small>A.#34;]#10;    evil --#62; n0[#34;#60;b#62;#96;#35;, effect by its worker</small>"]'
    )
