"""The verbs for receipts: export them, verify a file of them, make a new key where the store's is lost.

`verify` needs no store: it works wherever the file and the public key are.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from ditto.cli.session import FAILED, JsonOption, StoreOption, errors_told, with_store
from ditto.cli.terminal import line, print_json
from ditto.errors import ConfigError, InvalidValueError
from ditto.receipts.body import ReceiptError, read_json_strictly
from ditto.runtime import Runtime

if TYPE_CHECKING:
    from ditto.receipts import Verified

app = typer.Typer(no_args_is_help=True, help="Export and verify signed receipts.")


@app.command("export")
def export_receipts(
    store: StoreOption = None,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Only those of this run: a selection.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file, not to the screen.")] = None,
) -> None:
    """Write the receipts as they were signed, one a line; the id of the last one goes to standard error."""

    async def write(runtime: Runtime) -> None:
        with ExitStack() as opened:
            out = typer.get_binary_stream("stdout") if output is None else opened.enter_context(_open(output, "wb"))
            count, head = await _write_lines(runtime.receipts(run), out)
        line(f"{count} receipts" + ("" if run is None else f", a selection: those of run {run}"), err=True)
        if head is not None and run is None:
            line(f"head {head}", err=True)

    with_store(store, write)


@app.command("verify")
def verify_file(
    file: Annotated[Path, typer.Option("--input", metavar="FILE", help="The receipts, one a line (- reads stdin).")],
    keys: Annotated[
        list[Path],
        typer.Option("--trusted-pubkey", metavar="FILE", help="A public key that you trust, in PEM; may be repeated."),
    ],
    head: Annotated[
        str | None, typer.Option(metavar="HASH", help="The id of the last receipt, recorded elsewhere.")
    ] = None,
    args: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON object: operation keys, and the arguments of each.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every line of a file of receipts. Needs no store. Exit code 1 if anything is wrong, or there is none."""
    with errors_told():
        if head is not None and re.fullmatch("[0-9a-f]{64}", head) is None:
            raise ConfigError("--head is the id of a receipt: 64 hex digits in lower case")
        found = _verify(file, keys, head, None if args is None else _read_arguments(args))
    _print_verified(found, as_json=as_json)
    if found.fault is not None:
        raise typer.Exit(FAILED)


@app.command("new-key")
def make_key(store: StoreOption = None) -> None:
    """Make another key for a store whose key is lost. Earlier receipts stay what they are."""

    async def make(runtime: Runtime) -> None:
        from ditto.receipts.signing import make_new_key, public_path

        store_path = runtime.location.path
        line(f"signer {make_new_key(store_path).id}")
        line(f"give its public half, in {public_path(store_path)}, to whoever verifies", err=True)

    with_store(store, make)


async def _write_lines(lines: AsyncIterator[str], out: BinaryIO) -> tuple[int, str | None]:
    """How many were written, and the id of the last one."""
    count, last = 0, None
    async for last in lines:
        out.write(last.encode() + b"\n")
        count += 1
    out.flush()
    return count, None if last is None else json.loads(last)["id"]


def _verify(file: Path, keys: list[Path], head: str | None, arguments: dict[str, Any] | None) -> Verified:
    from ditto.receipts import load_trusted_keys, verify_receipts

    trusted = load_trusted_keys(keys)
    with ExitStack() as opened:
        stdin = str(file) == "-"
        lines = typer.get_binary_stream("stdin") if stdin else opened.enter_context(_open(file, "rb"))
        return verify_receipts(lines, trusted, head=head, arguments=arguments)


def _open(file: Path, mode: str) -> BinaryIO:
    try:
        opened: Any = file.open(mode)
    except OSError as error:
        raise InvalidValueError(f"{file}: it cannot be opened ({error.strerror})") from None
    result: BinaryIO = opened
    return result


def _read_arguments(file: Path) -> dict[str, Any]:
    with _open(file, "rb") as opened:
        try:
            arguments = read_json_strictly(opened.read().decode("utf-8"))
        except (ReceiptError, UnicodeDecodeError) as error:
            raise InvalidValueError(f"{file}: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidValueError(f"{file}: it holds no JSON object from operation keys to arguments")
    return arguments


def _print_verified(found: Verified, *, as_json: bool) -> None:
    if as_json:
        print_json({"sound": found.fault is None, **asdict(found), "summary": found.summary})
        return
    if found.fault is None:
        for name in ("lines", "unique", "repeats", "gaps", "head"):
            line(f"{name:<8} {getattr(found, name)}")
    line(found.summary)
