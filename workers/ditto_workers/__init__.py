"""The workers that come with ditto: contexts, models, and everything else outside.

Each `create_…_worker()` gives a `ditto.Worker` for `create_ditto(workers=[…])`. Importing this package brings in
neither httpx nor jsonschema: they are imported when a worker that needs them is created or started.
"""

from ditto_workers.context import create_context_worker
from ditto_workers.infer import create_infer_worker
from ditto_workers.interaction import create_interaction_worker

__all__ = ["create_context_worker", "create_infer_worker", "create_interaction_worker"]
