"""The house: which way imports point, what is public, and that importing does no work."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ditto
import ditto_workers

ROOT = Path(__file__).parents[2]

# From low to high. A module may import its own layer and the ones above it in this list, never one below.
LAYERS = [
    ["errors", "clock"],
    ["complaints", "secrets", "effects", "signatures", "contracts", "receipts", "pieces"],
    ["sandbox", "config", "config_yaml"],
    ["items"],
    ["worker", "tool", "waits"],
    ["graph", "loop", "flow", "turn", "drawing"],
    ["runs"],
    ["store"],
    ["engine"],
    ["runtime"],
    ["recovery", "journal"],
    ["testing", "cli"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

PUBLIC_TO_WORKERS = {"ditto", "ditto.contracts", "ditto.effects", "ditto.signatures", "ditto.worker", "ditto.config"}


def modules(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each imported module's name, and whether it is imported for types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [str(node.module)]
            if node.module == "ditto":
                names = [f"ditto.{alias.name}" if alias.name in LEVEL else "ditto" for alias in node.names]
        yield from ((name, id(node) in for_types) for name in names)


def layer_of(path: Path) -> str:
    relative = path.relative_to(ROOT / "ditto")
    return relative.parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", list(modules(ROOT / "ditto")), ids=lambda path: str(path.relative_to(ROOT)))
def test_lower_layers_never_import_higher_ones(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":
        return
    assert layer in LEVEL, f"{path} belongs to no layer: put it into LAYERS"
    for name, for_types in imports(path):
        if not name.startswith("ditto") or name in ("ditto", "ditto_workers"):
            assert name != "ditto_workers", f"{path}: the engine imports no worker"
            assert name != "ditto" or LEVEL[layer] >= LEVEL["recovery"], f"{path}: import the module, not the package"
            continue
        other = name.split(".")[1]
        if not for_types:
            assert LEVEL[other] <= LEVEL[layer], f"{path} ({layer}) imports {name} ({other}), which is higher"


def test_nothing_in_the_engine_imports_workers_or_examples() -> None:
    for path in modules(ROOT / "ditto"):
        for name, _ in imports(path):
            assert not name.startswith(("ditto_workers", "examples", "tests")), f"{path} imports {name}"


def test_workers_import_only_public_names() -> None:
    for path in modules(ROOT / "workers"):
        for name, _ in imports(path):
            if name.startswith("ditto") and not name.startswith("ditto_workers"):
                assert name in PUBLIC_TO_WORKERS or name.startswith("ditto.contracts"), f"{path} imports {name}"


def test_the_recovery_workflows_use_public_names_only() -> None:
    for path in modules(ROOT / "ditto" / "recovery"):
        for name, _ in imports(path):
            if name.startswith("ditto"):
                assert name == "ditto" or name.startswith("ditto.recovery"), f"{path} imports {name}"


def test_the_journal_uses_public_names_only() -> None:
    for path in modules(ROOT / "ditto" / "journal"):
        for name, _ in imports(path):
            if name.startswith("ditto"):
                assert name in ("ditto", "ditto.contracts") or name.startswith("ditto.journal"), (
                    f"{path} imports {name}"
                )


def test_a_framework_is_imported_by_its_own_package_only() -> None:
    for path in modules(ROOT / "ditto"):
        if not path.is_relative_to(ROOT / "ditto" / "journal" / "pydantic_ai"):
            for name, _ in imports(path):
                assert name.split(".")[0] != "pydantic_ai", f"{path} imports {name}"


def test_only_the_store_speaks_sql() -> None:
    for path in modules(ROOT / "ditto"):
        # The scripted provider is a server of its own with a file of its own, like any other program.
        if layer_of(path) in ("store", "testing"):
            continue
        for name, for_types in imports(path):
            if name.split(".")[0] in ("sqlite3", "sqlalchemy"):
                assert for_types, f"{path} imports {name}"


def test_the_conformance_suite_knows_no_dialect() -> None:
    """Else a second store could not be put through it. What is SQLite's alone is tested in `tests/store` itself."""
    folder = ROOT / "tests" / "store" / "conformance"
    of_sqlite = ("sqlite3", "ditto.store.connection", "tests.store.files", "tests.store.faults")
    paths = [folder / "under_test.py", *folder.glob("test_*.py"), folder.parent / "scenes.py"]
    assert len(paths) > 5
    for path in paths:
        assert not {name for name, _ in imports(path)} & set(of_sqlite), path
        assert not {word for word in ("PRAGMA", "sqlite", "create_ditto(") if word in path.read_text()}, path


def test_public_names_are_pinned() -> None:
    assert sorted(ditto.__all__) == sorted(PUBLIC_NAMES)
    for name in ditto.__all__:
        assert getattr(ditto, name) is not None
    assert sorted(ditto_workers.__all__) == [
        "create_context_worker",
        "create_infer_worker",
        "create_interaction_worker",
    ]


def test_every_module_has_a_docstring() -> None:
    for folder in ("ditto", "workers", "examples"):
        for path in modules(ROOT / folder):
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} does not say what it owns"


def test_no_module_is_named_after_nothing() -> None:
    empty = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}
    for folder in ("ditto", "workers", "examples"):
        for path in modules(ROOT / folder):
            assert path.stem not in empty, path


def test_examples_are_no_package() -> None:
    assert not list((ROOT / "examples").rglob("__init__.py"))


PROBE = """
import json, socket, sqlite3, sys
opened = []
def watched(event, args):
    if event in ("socket.connect", "socket.bind", "sqlite3.connect", "subprocess.Popen", "os.mkdir"):
        opened.append(event)
    code = (".py", ".pyc", ".so", ".json", ".txt")
    if event == "open" and isinstance(args[0], str) and not args[0].endswith(code):
        libraries = args[0].startswith((sys.prefix, sys.base_prefix)) or "site-packages" in args[0]
        if not libraries and "/proc" not in args[0]:
            opened.append(args[0])
sys.addaudithook(watched)
import importlib, threading
for name in {modules!r}:
    importlib.import_module(name)
loaded = {{name.split(".")[0] for name in sys.modules}}
heavy = {{"sqlalchemy", "networkx", "httpx", "alembic", "starlette", "uvicorn", "cryptography", "rfc8785"}}
heavy = sorted(loaded & heavy)
print(json.dumps({{"opened": opened, "heavy": heavy, "threads": threading.active_count()}}))
"""


def probe(*names: str) -> dict[str, object]:
    script = PROBE.format(modules=list(names))
    done = subprocess.run(
        [sys.executable, "-B", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True,
        env={"PATH": "", "PYTHONPATH": "workers"},
    )  # fmt: skip
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_importing_ditto_does_no_work_and_brings_in_nothing_heavy() -> None:
    assert probe("ditto", "ditto_workers", "ditto.recovery") == {"opened": [], "heavy": [], "threads": 1}


def test_importing_an_example_does_no_work() -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules(ROOT / "examples")]
    assert names
    found = probe(*names)
    assert found["opened"] == []
    assert found["threads"] == 1


PUBLIC_NAMES = [
    "Absent",
    "Action",
    "Checked",
    "Approval",
    "Committed",
    "Config",
    "ConfigError",
    "Context",
    "ContextItem",
    "Contract",
    "Decision",
    "DefinitionError",
    "DittoError",
    "EffectClass",
    "EffectNotMade",
    "EffectRejected",
    "Ended",
    "Endpoint",
    "EventInfo",
    "ExternalResult",
    "Flow",
    "TurnFunction",
    "TurnContext",
    "Turn",
    "ModelRequest",
    "ReceiptEvent",
    "ReceiptSink",
    "FlowContext",
    "Graph",
    "Health",
    "Heard",
    "InvalidValueError",
    "Items",
    "Json",
    "LimitExceededError",
    "LookupResult",
    "Loop",
    "Many",
    "Message",
    "ModelRef",
    "NewItem",
    "Node",
    "NodeHandler",
    "OpenWait",
    "Outcome",
    "OutputError",
    "Pending",
    "Piece",
    "Recovered",
    "Rejected",
    "ReplayMismatchError",
    "Restarted",
    "ResultError",
    "Retry",
    "RunBlockedError",
    "RunBusyError",
    "RunCancelledError",
    "RunConflictError",
    "RunInfo",
    "RunNotFoundError",
    "RunPausedError",
    "RunSummary",
    "Runtime",
    "Sample",
    "Sandbox",
    "SandboxDenied",
    "StepContext",
    "StepError",
    "StepInfo",
    "StepTimeoutError",
    "StoreBusyError",
    "StoreClosedError",
    "StoreDamagedError",
    "StoreError",
    "StoreForeignError",
    "StoreFullError",
    "StoreSchemaError",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolOffer",
    "TransitionRefusedError",
    "UnknownOutcomeError",
    "Usage",
    "WaitKind",
    "Waiting",
    "Worker",
    "WorkerSetup",
    "create_ditto",
    "load_config",
    "load_dotenv_file",
]
