"""What may run next: `next_steps` says it from all that has settled, a `Frontier` step by step; they agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ditto.engine.scheduling import Frontier, next_steps
from ditto.graph import Graph


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    graph = Graph("g")
    for number in range(draw(st.integers(0, 12))):
        after = draw(st.lists(st.sampled_from(range(number)), unique=True, max_size=4)) if number else []
        graph = graph.step(f"n{number}", lambda: None, after=tuple(f"n{parent}" for parent in after))
    return graph


def names(frontier: Frontier) -> set[str]:
    return {node.name for node in frontier.ready}


@given(graph=graphs(), data=st.data())
def test_a_frontier_agrees_with_next_steps_in_every_order(graph: Graph, data: st.DataObject) -> None:
    settled: dict[str, bool] = {}
    frontier = Frontier(graph, settled)
    while True:
        assert names(frontier) == {node.name for node in next_steps(graph, settled)}
        assert frontier.unsettled == len(graph.nodes) - len(settled)
        # A frontier that begins here sees the same as one that came here.
        assert names(Frontier(graph, settled)) == names(frontier)
        if not frontier.ready:
            break
        node = data.draw(st.sampled_from(list(frontier.ready)))
        frontier.ready.remove(node)
        settled[node.name] = data.draw(st.booleans())
        frontier.settle(node.name)
    assert settled.keys() == graph.nodes.keys()


@given(graph=graphs(), data=st.data())
def test_a_node_starts_once_and_only_when_all_before_it_are_settled(graph: Graph, data: st.DataObject) -> None:
    running: list[str] = []
    started: list[str] = []
    settled: dict[str, bool] = {}
    frontier = Frontier(graph, {})
    while frontier.ready or running:
        if frontier.ready and (not running or data.draw(st.booleans())):
            node = frontier.ready.popleft()
            assert all(parent in settled for parent in node.after)
            running.append(node.name)
            started.append(node.name)
        else:
            name = running.pop(data.draw(st.integers(0, len(running) - 1)))
            settled[name] = True
            frontier.settle(name)
    assert sorted(started) == sorted(graph.nodes)


def test_next_steps_come_in_the_order_of_the_graph() -> None:
    graph = Graph("g").step("z", lambda: 1).step("a", lambda: 1).step("m", lambda: 1, after=("z",))
    assert [node.name for node in next_steps(graph, {})] == ["z", "a"]
    assert [node.name for node in next_steps(graph, {"z": False})] == ["a", "m"]
