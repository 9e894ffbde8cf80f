"""INFER.*: asking models. Start at `worker.py`; `provider.py` is the seam for a provider of your own."""

from ditto_workers.infer.provider import Provider, ProviderFactory
from ditto_workers.infer.worker import create_infer_worker

__all__ = ["Provider", "ProviderFactory", "create_infer_worker"]
