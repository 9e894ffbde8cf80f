"""The durable runs under one job: what each is called, and what it is given.

What must happen once has a run of its own, named by job and stage and shared by all entries: `<id>:prepare`,
`<id>:<kind>`, `<id>:session:<question>:<revision>`. Its input is all that the stage depends on, and nothing else: no
option of an entry, no address. What may be repeated has a fresh run each time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from pydantic import ValidationError

from ditto import ExternalResult, Graph, Json, Loop
from ditto.recovery import graphs
from ditto.recovery.answers import read_session_answer
from ditto.recovery.checkpoint import Checkpoint
from ditto.recovery.errors import RecoveryError
from ditto.recovery.job import Job, JobError, RecoveryInput, Stage
from ditto.recovery.profile import Profile

DIGEST_CHARS: Final = 16


class RecoveryRuntime(Protocol):
    """What the entries need of a runtime. `ditto.Runtime` has it; its caller opens and closes it."""

    async def run(
        self,
        graph: Graph,
        input: Any,
        /,
        *,
        id: str | None = None,
        on_finished: Literal["return", "new_if_failed"] = "return",
    ) -> Any: ...

    async def loop(self, loop: Loop, state: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class JobRuns:
    """Each method is one run. What the engine raises passes through: StepError, UnknownOutcomeError, RunBusyError, …"""

    runtime: RecoveryRuntime
    id: str
    model: str

    @classmethod
    def of(cls, runtime: RecoveryRuntime, input: RecoveryInput) -> JobRuns:
        """The runs of one entry."""
        return cls(runtime, input.id, input.model.key)

    async def read(self) -> Checkpoint:
        """The job as it is recorded now. RecoveryError `recovery.profile` if the adapter's answer is none."""
        result = await self._call(graphs.READ, "job")
        try:
            found = _members(result.structured, "job", "profile")
            return Checkpoint(Job.model_validate(found["job"]), Profile.model_validate(found["profile"]))
        except (TypeError, ValidationError) as error:
            raise RecoveryError(f"recovery_read: {error}", code="recovery.profile") from None

    async def read_source(self, max_bytes: int) -> ExternalResult:
        """The source's text and hash, if it is no longer than that."""
        return await self._call(graphs.SOURCE, "source", maxBytes=max_bytes)

    async def repeat(self, loop: Loop, state: dict[str, Any]) -> dict[str, Any]:
        """The last state of a loop over reads of this job."""
        ended: dict[str, Any] = await self.runtime.loop(loop, {"id": self.id, **state})
        return ended

    async def read_catalog(self, source: str, timeout_s: float | None = None) -> ExternalResult:
        """One source of the catalog; its selection is saved with the outcome. StepTimeoutError past the deadline."""
        return await self._call(graphs.catalog_graph(timeout_s), "catalog", source=source)

    async def look_up(self, kind: str) -> ExternalResult:
        """What the other side says of an operation, without submitting it."""
        return await self._call(graphs.LOOKUP, "found", kind=kind)

    async def record(self, stage: Stage, error: JobError | None = None) -> Checkpoint:
        """The job at another stage, and why."""
        await self._call(graphs.STATE, "changed", stage=stage.value, error=None if error is None else error.to_json())
        return await self.read()

    async def report(self) -> None:
        """The job's projection, as the job is now."""
        await self._call(graphs.REPORT, "reported")

    async def prepare(self, at: Checkpoint, text: str) -> None:
        """The source read by the model, and what it found saved on the job, once."""
        await self._once(
            graphs.PREPARE,
            "prepare",
            sourceHash=at.job.source_hash,
            text=text,
            model=self.model,
            prompt=at.profile.prompt,
            payload=at.profile.payload,
        )

    async def operate(self, at: Checkpoint, kind: str) -> None:
        """One operation looked up, submitted if it is absent, and saved on the job, once."""
        await self._once(graphs.OPERATION, kind, kind=kind, fingerprint=_digest(at.job.order))

    async def ask(self, at: Checkpoint, question: str) -> dict[str, Json]:
        """The model's answer about the job as it is at this revision, verified, and saved with the conversation."""
        job, profile = at.job, at.profile
        assert job.order is not None
        assert job.context is not None
        expected: dict[str, Json] = {**{name: job.order.get(name) for name in profile.answer}, "stage": job.stage}
        outputs = await self._once(
            graphs.SESSION,
            f"session:{_digest(question)[:DIGEST_CHARS]}:{job.revision}",
            question=question,
            model=self.model,
            context=job.context.model_dump(mode="json"),
            order=job.order,
            stage=job.stage,
            expected=expected,
            schema=profile.answer_schema,
        )
        return read_session_answer(outputs["sampled"], expected)

    async def _once(self, graph: Graph, run_name: str, /, **input: Any) -> dict[str, Any]:
        """The outputs of the run that all entries share: joined, gone on with, or returned as it was saved."""
        outputs: dict[str, Any] = await self.runtime.run(
            graph, {"id": self.id, **input}, id=f"{self.id}:{run_name}", on_finished="new_if_failed"
        )
        return outputs

    async def _call(self, graph: Graph, node: str, /, **input: Any) -> ExternalResult:
        """The result of the one tool of a fresh run."""
        outputs = await self.runtime.run(graph, {"id": self.id, **input})
        return graphs.result_of(outputs[node])


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _members(value: Json, *names: str) -> dict[str, Json]:
    if not isinstance(value, dict) or any(name not in value for name in names):
        raise TypeError(f"an object with {' and '.join(names)} was expected")
    return value
