"""The report worker: one turn of an agent that writes a report and publishes it.

    python -m examples.agents.report.worker --directory DIR --endpoint URL [--stream] [--model PROVIDER/NAME]

Started again with the same directory, it goes on where it was: a saved answer of the model is not asked for again, a
publication that was made is not made again, and its receipt is handed over again, byte for byte. Prints one JSON line:
`{"complete": true, "text": …}`, or, on standard error, `{"complete": false, "code": …, "permanent": …}`.

Exit codes: 0 the report is done; 1 it failed; 2 wrong usage or configuration; 4 the outcome of a call is unknown;
75 enter it again later.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from ditto import (
    Config,
    ConfigError,
    DefinitionError,
    DittoError,
    Endpoint,
    Message,
    ModelRef,
    RunBusyError,
    Sandbox,
    UnknownOutcomeError,
    create_ditto,
)
from ditto.journal import Bindings, JournaledAgent, ReceiptEvent
from ditto_workers import create_infer_worker, create_interaction_worker
from examples.agents.report.publication import create_publication_tool

PROMPT = "Write a short report on the tides of last week, and publish it."
SYSTEM = "You write reports. Publish the report with the tool, once; then say in one sentence what you published."

DONE, FAILED, USAGE, UNKNOWN, LATER = 0, 1, 2, 4, 75


@dataclass(frozen=True, slots=True)
class Job:
    """What the worker is started with. The same directory is the same turn."""

    directory: Path
    endpoint: str
    model: ModelRef
    stream: bool = False

    @property
    def receipts(self) -> Path:
        """Where each receipt is appended, as it was signed."""
        return self.directory / "receipts.ndjson"

    @property
    def reports(self) -> Path:
        """The publication tool's own database."""
        return self.directory / "reports.db"

    @property
    def store(self) -> Path:
        """The runtime's file."""
        return self.directory / "ditto.db"


async def write_report(job: Job) -> str:
    """The whole turn; what the agent says at its end. Raises DittoError."""
    publish = create_publication_tool(job.reports)
    config = Config(model=job.model, endpoints={job.model.provider: Endpoint(base_url=job.endpoint)})
    async with create_ditto(
        config,
        store=job.store,
        workers=[create_infer_worker(), create_interaction_worker(tools=[publish])],
        sandbox=Sandbox(tools=("publish_report",)),
    ) as runtime:
        agent = JournaledAgent(
            runtime,
            job.model,
            [publish],
            namespace="report-v1",
            thread="tides",
            turn="last-week",
            model_key=f"{job.model}/1",
            max_model_calls=8,
            on_receipt=lambda event: save_receipt(job.receipts, event),
        )
        return await agent.run(lambda bindings: converse(bindings, stream=job.stream))


async def converse(bindings: Bindings, *, stream: bool) -> str:
    """Ask, make the calls that are asked for, until the model only talks."""
    messages = [Message(role="system", content=SYSTEM), Message(role="user", content=PROMPT)]
    while True:
        sample = await bindings.model.sample(messages, stream=stream)
        if not sample.message.tool_calls:
            return sample.message.content
        messages += [sample.message, *await bindings.act(sample)]


def save_receipt(file: Path, event: ReceiptEvent) -> None:
    """Append the receipt's original text; it is on disk before this returns."""
    opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(opened, event.receipt_json.encode() + b"\n")
        os.fsync(opened)
    finally:
        os.close(opened)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    try:
        job = parse_job(arguments)
        text = anyio.run(write_report, job)
    except RunBusyError as error:
        return _report(error, LATER)
    except (ConfigError, DefinitionError) as error:
        return _report(error, USAGE)
    except UnknownOutcomeError as error:
        return _report(error, UNKNOWN)
    except DittoError as error:
        return _report(error, FAILED)
    sys.stdout.write(json.dumps({"complete": True, "text": text}) + "\n")
    return DONE


def parse_job(arguments: Sequence[str] | None) -> Job:
    """The job that the command line names; the directory is made if it is not there. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m examples.agents.report.worker", description="The report worker.")
    parser.add_argument(
        "--directory", type=Path, required=True, help="where the turn, its receipts and reports are kept"
    )
    parser.add_argument("--endpoint", required=True, help="where the model is reached, up to and with the version")
    parser.add_argument("--model", default="scripted/report", help="provider/name; default: %(default)s")
    parser.add_argument("--stream", action="store_true", help="ask for the answers in pieces")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Job(options.directory, options.endpoint, ModelRef.parse(options.model), options.stream)


def _report(error: DittoError, code: int) -> int:
    told: dict[str, Any] = {"complete": False, "code": error.code, "permanent": not error.retryable}
    sys.stderr.write(json.dumps({**told, "message": error.message}) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
