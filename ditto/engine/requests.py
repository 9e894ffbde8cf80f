"""Requests to a model: what identifies one, and how two of them differ."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ditto.engine.differences import first_difference
from ditto.turn import ModelRequest


def request_hash(request: ModelRequest) -> str:
    """SHA-256 over all parts, the items of the growing ones by their own digests; 64 hex digits."""
    parts = {
        name: [_digest(item) for item in value] if name in request.growing else value
        for name, value in request.parts.items()
    }
    return _digest(parts)


def list_differences(recorded: Any, now: dict[str, Any]) -> list[str]:
    """The paths at which a request differs from the recorded one; never a value, which might be private."""
    if not isinstance(recorded, dict):
        return ["the whole request"]
    names = [*recorded, *(name for name in now if name not in recorded)]
    found = [first_difference(recorded.get(name), now.get(name), name) for name in names]
    return [each for each in found if each] or ["the order of keys"]


def _digest(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
