"""The wheel, as a user has it: installed into an empty environment, far from the repository, and put to work there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 900
PINNED: Final = ("hypothesis", "mypy", "pytest", "pytest-asyncio")
COPIED_TESTS: Final = ("conftest.py", "processes.py", "examples")
LEFT_OUT: Final = shutil.ignore_patterns("__pycache__")

# No word of the repository: neither its settings nor its paths.
PYTEST_INI: Final = """\
[pytest]
asyncio_mode = strict
asyncio_default_fixture_loop_scope = function
addopts = --strict-markers --import-mode=importlib
filterwarnings = error
pythonpath = .
markers =
    sweep: a long sweep
"""

CONFTEST: Final = """\
import ditto, ditto_workers

def pytest_report_header():
    return [f"origin {ditto.__file__}", f"origin {ditto_workers.__file__}"]
"""

PROBE: Final = """\
import importlib, json, sys, threading

done = []

def watched(event, args):
    if event in ("socket.connect", "socket.bind", "sqlite3.connect", "subprocess.Popen", "os.mkdir", "os.fork"):
        done.append(event)
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        done.append(f"write {args[0]}")

sys.addaudithook(watched)
origins = [importlib.import_module(name).__file__ for name in sys.argv[1:]]
print(json.dumps({"done": done, "threads": threading.active_count(), "origins": origins}))
"""

pytestmark = pytest.mark.sweep


@dataclass(frozen=True, slots=True)
class Site:
    """A folder with the program, the examples and their tests, and an environment that has the wheel."""

    folder: Path
    environment: Path

    @property
    def packages(self) -> Path:
        """Where the environment has its packages."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.environment / "lib" / version / "site-packages"

    def python(self, *arguments: object, code: int = 0) -> str:
        """Run the environment's Python in the folder: what it prints. `code` is how it must end."""
        return run(self.environment / "bin" / "python", *arguments, cwd=self.folder, code=code)


def run(*command: object, cwd: Path, code: int = 0) -> str:
    """A command, without the repository's paths in its environment: what it prints."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MYPYPATH", "DITTO_ACCEPTANCE_CONFIG")
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name not in hidden and "PYTEST" not in name},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    base = tmp_path_factory.mktemp("wheel")
    assert not base.resolve().is_relative_to(ROOT), "the site is to be outside the repository"
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", base / "dist", ROOT, cwd=base)
    (wheel,) = (base / "dist").glob("*.whl")
    made = Site(base / "site", base / "venv")
    run(sys.executable, "-m", "venv", made.environment, cwd=base)

    pins = ROOT / "requirements-dev.txt"
    tools = [line for line in pins.read_text(encoding="utf-8").splitlines() if line.partition("==")[0] in PINNED]
    assert len(tools) == len(PINNED)
    made.folder.mkdir()
    made.python("-m", "pip", "install", "--quiet", "--constraint", pins, f"{wheel}[testing]", *tools)

    shutil.copytree(ROOT / "examples", made.folder / "examples", ignore=LEFT_OUT)
    for name in COPIED_TESTS:
        source, target = ROOT / "tests" / name, made.folder / "tests" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=LEFT_OUT)
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    shutil.copy(ROOT / "tests" / "acceptance" / "seed_listing.py", made.folder)
    (made.folder / "pytest.ini").write_text(PYTEST_INI, encoding="utf-8")
    (made.folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    yield made
    shutil.rmtree(base, ignore_errors=True)


def test_the_listing_runs_and_goes_on(site: Site) -> None:
    found = json.loads(site.python("seed_listing.py"))
    assert found["stages"] == ["reserved", "completed"]
    assert found["calls"] == 1
    assert found["operations"] == [["reserve", "committed"], ["ship", "committed"]]
    assert all(Path(origin).is_relative_to(site.packages) for origin in found["modules"])


def test_the_listing_is_well_typed(site: Site) -> None:
    (site.folder / "mypy.ini").write_text("[mypy]\n", encoding="utf-8")
    told = site.python("-m", "mypy", "--strict", "--config-file", "mypy.ini", "seed_listing.py")
    assert "Success: no issues found in 1 source file" in told


def test_types_are_those_of_the_package(site: Site) -> None:
    """A wrong use is found, so that what the listing says is really looked at."""
    (site.folder / "wrong.py").write_text("from ditto import create_ditto\n\ncreate_ditto(stoer=1)\n", encoding="utf-8")
    (site.folder / "mypy.ini").write_text("[mypy]\n", encoding="utf-8")
    told = site.python("-m", "mypy", "--strict", "--config-file", "mypy.ini", "wrong.py", code=1)
    assert 'Unexpected keyword argument "stoer" for "create_ditto"' in told


def test_the_recovery_cases_pass(site: Site) -> None:
    cases = ["tests/examples/test_recovery_cases.py", "tests/examples/test_recovery_processes.py"]
    told = site.python("-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "not sweep", *cases)
    origins = [Path(origin) for origin in re.findall(r"^origin (.+)$", told, re.MULTILINE)]
    assert origins == [site.packages / name / "__init__.py" for name in ("ditto", "ditto_workers")]
    passed = {int(number) for number in re.findall(r"::test_(?:case_)?(\d\d)_\S* PASSED", told)}
    assert passed >= set(range(1, 21)), "the twenty recovery cases"
    assert not re.search(r"\b(SKIPPED|XFAIL|XPASS)\b", told)


def test_imports_do_no_work(site: Site) -> None:
    files = sorted((site.folder / "examples").rglob("*.py"))
    examples = [".".join(path.relative_to(site.folder).with_suffix("").parts) for path in files]
    assert len([name for name in examples if ".recovery." in name]) == 8
    before = sorted(site.folder.rglob("*"))
    for names in (["ditto", "ditto_workers", "ditto.recovery"], examples):
        found = json.loads(site.python("-B", "-c", PROBE, *names))
        assert found["done"] == []
        assert found["threads"] == 1
        home = site.folder / "examples" if names is examples else site.packages
        assert all(Path(origin).is_relative_to(home) for origin in found["origins"])
    assert sorted(site.folder.rglob("*")) == before
