"""The model of the recovery tests: the order script, or the real one of `DITTO_ACCEPTANCE_CONFIG`.

A real model is asked through the scripted provider, so that its calls are counted like those of a script: what the
provider is asked, it asks on. Tests that need an answer of their own say so by a script, and never reach it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import httpx

from ditto import Config, ConfigError, ModelRef, load_config
from ditto.config import load_dotenv_file
from ditto.testing.provider import Raw, Reply, Stall, order_script

VARIABLE: Final = "DITTO_ACCEPTANCE_CONFIG"
SCRIPTED: Final = Config(model=ModelRef("scripted", "order"))


def load_real_config(path: str) -> Config:
    """A ditto.yaml that names a model which can be reached. ConfigError."""
    config = load_config(path, {**load_dotenv_file(Path(path).parent / ".env"), **os.environ})
    if config.model is None:
        raise ConfigError(f"{path} names no model; add a line such as `model: openai/gpt-5-mini`")
    config.endpoint(config.model.provider)
    return config


def _choose_config() -> Config:
    return load_real_config(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else SCRIPTED


CONFIG: Final = _choose_config()
assert CONFIG.model is not None
MODEL: Final[ModelRef] = CONFIG.model


def default_script(request: dict[str, Any], index: int) -> Reply:
    """What the model answers, where a test does not say."""
    return order_script(request, index) if CONFIG is SCRIPTED else _ask_on(request)


def stalling_script(request: dict[str, Any], index: int) -> Reply:
    """The first request is never answered."""
    return Stall() if index == 0 else default_script(request, index)


def _ask_on(request: dict[str, Any]) -> Reply:
    endpoint = CONFIG.endpoint(MODEL.provider)
    headers = {name: value.get_secret_value() for name, value in endpoint.headers.items()}
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key.get_secret_value()}"
    timeout_s = CONFIG.provider(MODEL.provider).timeout_s
    response = httpx.post(
        endpoint.url("chat/completions"), json=request, headers=headers, timeout=timeout_s, trust_env=False
    )
    media_type = response.headers.get("content-type", "application/json")
    return Raw(response.content, status=response.status_code, content_type=media_type)
