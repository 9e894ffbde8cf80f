"""What every contract shares: data only, unknown fields refused, immutable once validated."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, JsonValue

Json = JsonValue
"""Any JSON value: None, bool, int, float, str, list or dict with text keys."""


class Contract(BaseModel):
    """Base of node inputs and outputs: frozen, unknown fields refused, NaN refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
