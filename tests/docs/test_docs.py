"""The documentation: its links lead somewhere, its programs run as they are shown, and it names all that the code has.

A block is run where a comment stands on the line before it; blocks of one page share a folder, in their order:

    <!-- file: order.py -->   the block is written to that file
    <!-- run -->              a python block is a program that must succeed; in a console block each `$` line is a
                              command, and what follows it is what the command prints (`…` stands for any text)
    <!-- output -->           what the program before it prints
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import ditto
import ditto.errors
import ditto.journal
import ditto.journal.pydantic_ai
import ditto.recovery
import ditto.runs
import ditto.turn
import ditto_workers
from ditto.cli.main import app
from ditto.config_yaml import key_paths
from ditto.contracts import NODE_TYPES
from ditto.store.schema import RunStatus, StepState, metadata

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
PAGES: Final = sorted(path for path in DOCS.rglob("*.md") if "decisions" not in path.parts)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


# --- blocks ----------------------------------------------------------------------------------------------------------

_MARK: Final = re.compile(r"<!-- (file|run|output)(?:: (\S+))? -->")
_FENCED: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: `mark` is the word of the comment before it, `name` what the comment names."""

    language: str
    text: str
    line: int
    mark: str | None
    name: str | None


def blocks(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        if not lines[number].startswith("```"):
            number += 1
            continue
        start, language = number, lines[number].removeprefix("```").strip()
        number += 1
        while lines[number] != "```":
            number += 1
        found = _MARK.fullmatch(lines[start - 1])
        mark, name = found.groups() if found else (None, None)
        yield Block(language, "\n".join(lines[start + 1 : number]) + "\n", start + 1, mark, name)
        number += 1


# --- the programs run as they are shown ------------------------------------------------------------------------------

_PROGRAMS: Final = {
    "python": [sys.executable],
    "ditto": [sys.executable, "-c", "from ditto.cli.main import main; main()"],
}


def call(command: list[str], folder: Path) -> tuple[int, str]:
    """The exit code, and what is printed, standard error included; the shell's word for a process that was killed."""
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
    environment |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "workers"))), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, timeout=180,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + ("Killed\n" if done.returncode == -signal.SIGKILL else "")


def assert_printed(printed: str, shown: str, where: str) -> None:
    pattern = re.escape(shown.strip()).replace("…", ".*?")
    assert re.fullmatch(pattern, printed.strip(), re.DOTALL), f"{where} prints:\n{printed}\nnot:\n{shown}"


def run_console(block: Block, folder: Path, where: str) -> None:
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        program, *arguments = shlex.split(command)
        _, printed = call([*_PROGRAMS[program], *arguments], folder)
        assert_printed(printed, shown, f"{where}: {command}")


def run_page(page: Path, folder: Path) -> None:
    printed: str | None = None
    for block in blocks(page.read_text(encoding="utf-8")):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.mark == "file":
            assert block.name is not None
            (folder / block.name).write_text(block.text, encoding="utf-8")
        elif block.mark == "run" and block.language == "console":
            run_console(block, folder, where)
        elif block.mark == "run":
            program = folder / f"program_{block.line}.py"
            program.write_text(block.text, encoding="utf-8")
            code, printed = call([sys.executable, program.name], folder)
            assert code == 0, f"{where} ends with {code}:\n{printed}"
        elif block.mark == "output":
            assert printed is not None, f"{where}: no program stands before it"
            assert_printed(printed, block.text, where)


@pytest.fixture(scope="module")
def stories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, Future[None]]]:
    """The pages that are asked for, told at the same time: most of a program's time goes into its start."""
    chosen = {spec.params.get("page") for item in request.session.items if (spec := getattr(item, "callspec", None))}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield {
            page: pool.submit(run_page, page, tmp_path_factory.mktemp(page.stem)) for page in PAGES if page in chosen
        }


@pages
def test_programs_run_as_they_are_shown(page: Path, stories: dict[Path, Future[None]]) -> None:
    stories[page].result()


@pages
def test_python_blocks_compile_and_import_what_there_is(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language != "python":
            continue
        tree = ast.parse(block.text, filename=f"{page.name}:{block.line}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ditto"):
                module = __import__(str(node.module), fromlist=["*"])
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page.name}:{block.line}: {node.module} has no {alias.name}"


def test_each_kind_of_block_is_there() -> None:
    found = [block for page in PAGES for block in blocks(page.read_text(encoding="utf-8"))]
    assert {block.mark for block in found} == {None, "file", "run", "output"}
    assert not [block for block in found if block.mark and block.language not in ("python", "console", "text", "yaml")]


def test_the_quickstart_drafts_once(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quickstart = next(block for block in blocks(readme) if block.language == "python")
    assert "sleep(5)" in quickstart.text
    (tmp_path / "letter.py").write_text(quickstart.text.replace("sleep(5)", "sleep(0)"), encoding="utf-8")
    outputs = "{'draft': 'Dear Ada, it is on its way.', 'send': 'sent'}\n"
    code, printed = call([sys.executable, "letter.py"], tmp_path)
    assert (code, printed) == (0, f"drafting\nsending: press Ctrl-C\n{outputs}")
    code, printed = call([sys.executable, "letter.py"], tmp_path)
    assert (code, printed) == (0, outputs)


# --- links -----------------------------------------------------------------------------------------------------------

_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as they are commonly made."""
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(_FENCED.sub("", text)))
    return {heading.strip().replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.relative_to(ROOT)}: {link} leads nowhere"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page.relative_to(ROOT)}: no {link}"


def test_every_page_is_reached_from_the_first() -> None:
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = _LINK.findall(page.read_text(encoding="utf-8"))
        waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links if "://" not in link]
    assert set(PAGES) <= reached


# --- what the code has is named --------------------------------------------------------------------------------------


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table; a `|` in code is written `\\|`."""
    found = (line for line in _FENCED.sub("", text).splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found]


def default_text(value: Any) -> str:
    """A default as the reference shows it."""
    if value is Ellipsis or callable(value) or "factory" in repr(value):
        return "…"
    if value is os.environ:
        return "os.environ"
    return repr(value.value) if isinstance(value, Enum) else repr(value)


def signature_text(name: str, function: Any) -> str:
    """A signature without its types, such as `Graph.node(name, type, *, after=())`."""
    shown: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown and not any(s.startswith("*") for s in shown):
            shown.append("*")
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        default = "" if parameter.default is parameter.empty else f"={default_text(parameter.default)}"
        shown.append(f"{stars}{parameter.name}{default}")
    return f"`{name}({', '.join(shown)})`"


_VIEWS: Final = {
    "Checked",
    "Ended",
    "EventInfo",
    "Health",
    "OpenWait",
    "Piece",
    "Recovered",
    "Restarted",
    "RunInfo",
    "RunSummary",
    "StepInfo",
    "Waiting",
}

_MADE_ELSEWHERE: Final = _VIEWS | {
    "AgentResult",
    "Bindings",
    "Decision",
    "FlowContext",
    "JournaledModel",
    "JournaledTool",
    "Node",
    "Runtime",
    "StepContext",
    "TurnClient",
    "TurnContext",
    "Outcome",
    "WorkerSetup",
}
"""Classes that users are given, and do not construct."""

_TURN_TYPES: Final = {"Ask", "CallIds", "ReceiptSink", "TurnFunction"}

_FOR_THE_ENGINE: Final = {"Items.loaded", "Items.over", "Loop.choose", "Node.plan_step", "Retry.delay_s"}
"""Methods of public classes that users have no use for."""


def signatures(module: ModuleType) -> Iterator[str]:
    """The signature of each public function, constructor and method."""
    for name in module.__all__:
        public = getattr(module, name)
        if inspect.isfunction(public):
            yield signature_text(name, public)
        if not inspect.isclass(public) or issubclass(public, Exception | BaseModel | Enum):
            continue
        if name not in _MADE_ELSEWHERE:
            yield signature_text(name, public)
        for method, function in vars(public).items():
            function = getattr(function, "__func__", function)
            for_users = not method.startswith("_") and f"{name}.{method}" not in _FOR_THE_ENGINE
            if inspect.isfunction(function) and for_users:
                yield signature_text(f"{name}.{method}", function)


def test_every_public_name_is_in_the_reference() -> None:
    text = read("reference/api.md")
    names = set(re.findall(r"`(\w+)", text))
    assert not set(ditto.__all__) - names
    assert not set(ditto.recovery.__all__) - names
    assert not set(ditto_workers.__all__) - names
    assert not {name for name, cls in vars(ditto.runs).items() if dataclasses.is_dataclass(cls)} - names
    assert not set(NODE_TYPES) - set(re.findall(r"`([A-Z.]+)`", text))


def test_every_signature_is_in_the_reference() -> None:
    text = read("reference/api.md")
    missing = [signature for signature in signatures(ditto) if signature not in text]
    assert not missing, "\n".join(missing)


def test_every_name_of_the_journal_is_in_its_reference() -> None:
    text = read("reference/journal.md")
    assert not set(ditto.journal.__all__) - set(re.findall(r"`(\w+)", text))
    missing = [signature for signature in signatures(ditto.journal) if signature not in text]
    assert not missing, "\n".join(missing)
    assert not {name for name in vars(ditto.turn) if name in _TURN_TYPES} - set(re.findall(r"`(\w+)", text))
    assert not set(ditto.journal.pydantic_ai.__all__) - set(re.findall(r"`(\w+)", text))
    assert signature_text("DittoDurability", ditto.journal.pydantic_ai.DittoDurability) in text


def test_every_field_of_a_contract_is_in_its_row() -> None:
    by_name = {cells[0].strip("`"): " ".join(cells) for cells in rows(read("reference/api.md"))}
    for name in ditto.__all__:
        public = getattr(ditto, name)
        if inspect.isclass(public) and issubclass(public, BaseModel):
            for field in public.model_fields:
                assert f"`{field}`" in by_name[name], f"{name}.{field} is not in its row"


def test_every_field_of_a_node_types_input_is_in_its_row() -> None:
    takes = {cells[0].strip("`"): cells[2] for cells in rows(read("reference/api.md")) if len(cells) == 4}
    takes["INTERACTION.OBSERVE"] = takes["INTERACTION.ACT.TOOL"]
    for name, node_type in NODE_TYPES.items():
        assert set(re.findall(r"`(\w+)`", takes[name])) == set(node_type.input.model_fields), name


def subclasses(cls: type[ditto.DittoError]) -> Iterator[type[ditto.DittoError]]:
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_error_and_its_code_is_documented() -> None:
    text = read("reference/errors.md")
    known: list[type[ditto.DittoError]] = [ditto.DittoError, *subclasses(ditto.DittoError)]
    documented = [cls for cls in known if cls.__module__.startswith("ditto.") and "testing" not in cls.__module__]
    assert len(documented) > 25
    for cls in documented:
        if not cls.__name__.startswith("_"):
            assert f"`{cls.__name__}`" in text, cls
            assert f"`{cls.default_code}`" in text, cls


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in (ROOT / "ditto", ROOT / "workers"):
        for path in sorted(folder.rglob("*.py")):
            if "testing" not in path.parts:
                yield path, ast.parse(path.read_text(encoding="utf-8"))


def calls() -> Iterator[tuple[Path, ast.Call]]:
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield path, node


def words(node: ast.AST) -> set[str]:
    """The texts in an expression, the tests of its conditions left out."""
    if isinstance(node, ast.IfExp):
        return words(node.body) | words(node.orelse)
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def event_kinds() -> set[str]:
    found: set[str] = set()
    for path, node in calls():
        if isinstance(node.func, ast.Name) and node.func.id == "Event":
            kind = node.args[0] if node.args else next(k.value for k in node.keywords if k.arg == "kind")
            named = words(kind)
            assert named, f"{path}:{node.lineno}: the kind of this event is not to be read from the code"
            found |= named
    return found


def test_every_kind_of_event_is_documented() -> None:
    documented = {cells[0].strip("`") for cells in rows(read("reference/events.md")) if cells[0].startswith("`")}
    assert documented == event_kinds()


def test_every_code_word_is_documented() -> None:
    text = read("reference/errors.md")
    for path, node in calls():
        for keyword in node.keywords:
            if keyword.arg == "code":
                for word in words(keyword.value):
                    assert f"`{word}`" in text, f"{path}:{node.lineno}: {word}"


def test_every_state_is_documented() -> None:
    runs, store = read("concepts/runs.md"), read("reference/store.md")
    for word in (*RunStatus, *StepState):
        assert f"`{word}`" in runs
    for table in metadata.tables.values():
        section = store.partition(f"\n### `{table.name}`\n")[2].partition("\n###")[0]
        assert section, f"{table.name} has no section"
        documented = {cells[0].strip("`") for cells in rows(section) if cells[0].startswith("`")}
        assert documented == {column.name for column in table.columns}, table.name


def test_every_effect_class_is_documented() -> None:
    for word in ditto.EffectClass:
        assert f"`{word}`" in read("concepts/effects.md")


def verbs_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each verb by its full name, `receipt export` for one of a group."""
    for name, verb in group.commands.items():
        if hasattr(verb, "commands"):
            yield from verbs_of(verb, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", verb


def test_every_verb_and_option_of_the_command_is_documented() -> None:
    text = read("reference/cli.md")
    command: Any = typer.main.get_command(app)
    documented = set(re.findall(r"^### `ditto ([a-z-]+(?: [a-z-]+)?)", text, re.MULTILINE))
    verbs = dict(verbs_of(command))
    assert documented == set(verbs)
    for name, verb in verbs.items():
        section = text.partition(f"\n### `ditto {name}")[2].partition("\n###")[0]
        options = {option for parameter in verb.params for option in parameter.opts if option.startswith("--")}
        for option in options - {"--store", "--json", "--help"}:
            assert re.search(rf"`{option}[ `]", section), f"ditto {name}: {option}"
        named = set(re.findall(r"`(--[a-z-]+)", section))
        assert not named - options, f"ditto {name} has no {named - options}"


# --- configuration ---------------------------------------------------------------------------------------------------


def leaf_defaults(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path and default of each key that holds a value, not a section."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaf_defaults(value, f"{prefix}{name}.")
        elif not field.exclude:
            default = field.default if field.default is not PydanticUndefined else value
            yield f"{prefix}{name}", default


def yaml_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[]"
    return "{}" if isinstance(value, Mapping) else f"{value:g}" if isinstance(value, float) else str(value)


def test_every_key_of_the_configuration_is_documented() -> None:
    documented = {cells[0].strip("`"): cells[1].strip("`") for cells in rows(read("how-to/configure.md"))}
    keys = set(key_paths(ditto.Config))
    text = read("how-to/configure.md")
    assert not {key for key in keys if f"`{key}`" not in text}
    expected = dict(leaf_defaults(ditto.Config()))
    expected |= {f"providers.<name>.{name}": default for name, default in leaf_defaults(ditto.Config().provider("any"))}
    for key, default in expected.items():
        assert documented[key] == yaml_text(default), key


def test_no_page_names_a_machine_or_a_registry() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for word in ("/work/", "/root/", "/tmp/", "/home/", "pypi", "PyPI"):
            assert word not in text, f"{page.name}: {word}"
