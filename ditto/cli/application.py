"""The application's own code, named on the command line as `module:name`."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from ditto.errors import ConfigError
from ditto.flow import Flow
from ditto.graph import Graph
from ditto.loop import Loop
from ditto.runtime import Runtime


def load_application(name: str, store: Path | None) -> Runtime:
    """What the factory returns: a runtime with its workers and workflows. Raises ConfigError.

    The current folder is importable, as with `python -m`. A factory that takes `store` gets `--store`. Only what a
    person names here is ever imported; nothing that is stored names code.
    """
    factory = _load(name, "--app ", "module:factory", "shop.app:create_runtime")
    if not callable(factory):
        raise ConfigError(f"--app {name}: module {name.partition(':')[0]} has no function {name.partition(':')[2]}")
    takes_store = "store" in inspect.signature(factory).parameters
    if store is not None and not takes_store:
        raise ConfigError(f"--app {name}: the factory takes no store=, so --store cannot be given")
    runtime = factory(store=store) if store is not None else factory()
    if not isinstance(runtime, Runtime):
        raise ConfigError(
            f"--app {name}: the factory returned {type(runtime).__name__}; it must return create_ditto(…)"
        )
    return runtime


def load_workflow(name: str) -> Graph | Loop | Flow:
    """The Graph, Loop or Flow of that name. Raises ConfigError. Imports as `load_application` does."""
    workflow = _load(name, "", "module:name", "shop.orders:order")
    if not isinstance(workflow, Graph | Loop | Flow):
        found = "nothing" if workflow is None else f"a {type(workflow).__name__}"
        raise ConfigError(f"{name}: it names {found}; name a Graph, a Loop or a Flow")
    return workflow


def _load(name: str, option: str, form: str, example: str) -> Any:
    """What a module has under that name; None if there is none."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{option}{name!r}: write {form}, for example {example}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{option}{name}: {error}; run the command where the module can be imported") from None
    return getattr(module, attribute, None)
