"""INTERACTION.*: tools, observations and output. Start at `worker.py`; one tool is a `BoundTool` of `binding.py`."""

from ditto_workers.interaction.worker import create_interaction_worker

__all__ = ["create_interaction_worker"]
