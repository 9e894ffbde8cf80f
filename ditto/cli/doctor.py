"""The examination of a store: is the file sound, what is open, who drives it, what waits for a person."""

from __future__ import annotations

from typing import Any

from ditto.runtime import Runtime


async def examine(runtime: Runtime) -> dict[str, Any]:
    """What was found: `sound` is False if the file fails SQLite's own checks."""
    health = await runtime.health()
    return {
        "store": str(runtime.location.path),
        "schema": health.schema_version,
        "sound": not health.faults,
        "faults": list(health.faults),
        "size_bytes": health.size_bytes,
        "wal_bytes": health.wal_bytes,
        "runs": health.runs,
        "live_owners": health.live_owners,
        "unknown": [f"{run_id} {path}" for run_id, path in health.unknown],
    }
