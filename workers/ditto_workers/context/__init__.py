"""CONTEXT.*: what a model is shown. Start at `worker.py`.

What may be dropped is decided in `limits.py`, what a summary may replace in `compression.py`.
"""

from ditto_workers.context.worker import create_context_worker

__all__ = ["create_context_worker"]
