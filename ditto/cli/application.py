"""The application's own code, named on the command line as `module:factory`."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

from ditto.errors import ConfigError
from ditto.runtime import Runtime


def load_application(name: str, store: Path | None) -> Runtime:
    """What the factory returns: a runtime with its workers and workflows. Raises ConfigError.

    The current folder is importable, as with `python -m`. A factory that takes `store` gets `--store`. Only what a
    person names here is ever imported; nothing that is stored names code.
    """
    module_name, _, factory_name = name.partition(":")
    if not module_name or not factory_name:
        raise ConfigError(f"--app {name!r}: write module:factory, for example shop.app:create_runtime")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--app {name}: {error}; run the command where the module can be imported") from None
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise ConfigError(f"--app {name}: module {module_name} has no function {factory_name}")
    takes_store = "store" in inspect.signature(factory).parameters
    if store is not None and not takes_store:
        raise ConfigError(f"--app {name}: the factory takes no store=, so --store cannot be given")
    runtime = factory(store=store) if store is not None else factory()
    if not isinstance(runtime, Runtime):
        raise ConfigError(
            f"--app {name}: the factory returned {type(runtime).__name__}; it must return create_ditto(…)"
        )
    return runtime
