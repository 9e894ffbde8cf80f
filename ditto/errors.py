"""Every error that ditto raises, with one root.

    DittoError
    ├── ConfigError                 the configuration is wrong; nothing was started
    ├── DefinitionError             a Graph, Loop, Flow, Worker or Tool is wrong; nothing was started
    ├── InvalidValueError           a value is not JSON data, or would come back changed
    ├── LimitExceededError          a size, a count or a loop's guard
    ├── StoreError                  the store could not do it; nothing is half written
    │   ├── StoreBusyError          another process held the lock for too long
    │   ├── StoreFullError          the disk, or the file's limit, is full
    │   ├── StoreDamagedError       the file is damaged
    │   ├── StoreForeignError       the file is no store of ditto
    │   ├── StoreSchemaError        the store was written by a newer ditto
    │   └── StoreClosedError        the store, or the runtime, is closed
    ├── TransitionRefusedError      the guard of a transition matched no row: somebody else moved first
    ├── RunNotFoundError            no run has that id
    ├── RunConflictError            the id belongs to another workflow or input
    ├── RunBusyError                another live runtime drives the run
    ├── RunBlockedError             the code changed under the run, or is missing
    ├── RunCancelledError           the run was cancelled for good
    ├── RunPausedError              somebody paused the run; it stays so until it is resumed
    ├── UnknownOutcomeError         a step was attempted and its outcome is not known
    ├── ReplayMismatchError         a Flow asked for something other than what is recorded
    └── StepError                   a step failed
        ├── EffectNotMade           nothing happened in the world; may be tried again
        │   └── SandboxDenied       the sandbox said no, before anything was attempted
        ├── EffectRejected          the other side said no; final
        ├── StepTimeoutError        the step missed its deadline
        ├── OutputError             the effect was made, but its result cannot be used
        └── ToolError               a tool's own classified error

A message says what is wrong and what to do next. Ids are attributes, so that a program need not read the
message. `code` is stable: it may be matched on. Suspension and cancellation are outcomes, not errors.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final


class DittoError(Exception):
    """Root of the tree.

    `code` is a stable word, `retryable` says whether the same call may succeed later, `run_id` and `step` name
    the run and the step path where there is one.
    """

    default_code: ClassVar[str] = "ditto"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool = False,
        run_id: str | None = None,
        step: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.retryable = retryable
        self.run_id = run_id
        self.step = step


class ConfigError(DittoError):
    """The configuration is wrong. Nothing was started."""

    default_code = "config"


class DefinitionError(DittoError):
    """A Graph, Loop, Flow, Worker or Tool is wrong. Nothing was started."""

    default_code = "definition"


class InvalidValueError(DittoError):
    """A value is not JSON data, or would come back changed; `path` says where in it."""

    default_code = "value"

    def __init__(self, message: str, *, path: str = "", run_id: str | None = None, step: str | None = None) -> None:
        super().__init__(message, run_id=run_id, step=step)
        self.path = path


class LimitExceededError(DittoError):
    """A stated limit was reached: a size, a count, a loop's guard."""

    default_code = "limit"


class StoreError(DittoError):
    """The store could not do it. Nothing is half written; a later start goes on."""

    default_code = "store"


class StoreBusyError(StoreError):
    """Another process held the write lock for longer than the busy timeout."""

    default_code = "store.busy"


class StoreFullError(StoreError):
    """The disk, or the file's own size limit, is full."""

    default_code = "store.full"


class StoreDamagedError(StoreError):
    """The file is damaged."""

    default_code = "store.damaged"


class StoreForeignError(StoreError):
    """The file is no SQLite database, or belongs to another application."""

    default_code = "store.foreign"


class StoreSchemaError(StoreError):
    """The store has a schema that this release of ditto does not know."""

    default_code = "store.schema"


class StoreClosedError(StoreError):
    """The store, or the runtime that owns it, is closed."""

    default_code = "store.closed"


class TransitionRefusedError(DittoError):
    """The guard of a transition matched no row: somebody else moved the run or the step first."""

    default_code = "transition.refused"

    def __init__(self, transition: str, message: str, *, run_id: str | None = None, step: str | None = None) -> None:
        super().__init__(f"{transition}: {message}", run_id=run_id, step=step)
        self.transition = transition


class RunNotFoundError(DittoError):
    """No run has that id."""

    default_code = "run.not_found"


class RunConflictError(DittoError):
    """The run id belongs to another workflow or to another input; the message names the difference."""

    default_code = "run.conflict"


class RunBusyError(DittoError):
    """Another live runtime drives the run."""

    default_code = "run.busy"


class RunBlockedError(DittoError):
    """The run's completed steps do not fit the code; `differences` lists each one."""

    default_code = "run.blocked"

    def __init__(self, message: str, *, differences: tuple[str, ...] = (), run_id: str | None = None) -> None:
        super().__init__(message, run_id=run_id)
        self.differences = differences


class RunCancelledError(DittoError):
    """The run was cancelled for good by `runtime.cancel`."""

    default_code = "run.cancelled"


class RunPausedError(DittoError):
    """The run is paused: by `runtime.pause` while it was driven, or before. `runtime.resume` goes on with it."""

    default_code = "run.paused"


class UnknownOutcomeError(DittoError):
    """A step was attempted and its outcome is not known.

    `steps` holds the path of every step that is unknown. Running again asks each one's look-up once more;
    `runtime.resolve` records a person's decision.
    """

    default_code = "outcome.unknown"

    def __init__(self, message: str, *, steps: tuple[str, ...], run_id: str | None = None) -> None:
        super().__init__(message, run_id=run_id, step=steps[0] if steps else None)
        self.steps = steps


class ReplayMismatchError(DittoError):
    """A Flow asked for something other than what is recorded."""

    default_code = "replay.mismatch"


class StepError(DittoError):
    """A step failed. What is raised is rebuilt from the record, the same now and after a restart.

    `error_type` is the name of the exception that the handler raised; no class is ever called to rebuild it.
    """

    default_code = "step.failed"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool = False,
        run_id: str | None = None,
        step: str | None = None,
        error_type: str | None = None,
    ) -> None:
        super().__init__(message, code=code, retryable=retryable, run_id=run_id, step=step)
        self.error_type = error_type or type(self).__name__


class EffectNotMade(StepError):
    """Raised by a handler: nothing happened in the world, and trying again is safe.

    `retryable=False` says that trying again would come to the same. `retry_after_s` is how long the other side asks to
    wait first.
    """

    default_code = "effect.not_made"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool = True,
        run_id: str | None = None,
        step: str | None = None,
        error_type: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code, retryable=retryable, run_id=run_id, step=step, error_type=error_type)
        self.retry_after_s = retry_after_s


class SandboxDenied(EffectNotMade):
    """The sandbox does not allow it. Nothing was attempted; allow it in the configuration, and reopen the run."""

    default_code = "sandbox.denied"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool = False,
        run_id: str | None = None,
        step: str | None = None,
        error_type: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(
            message,
            code=code,
            retryable=retryable,
            run_id=run_id,
            step=step,
            error_type=error_type,
            retry_after_s=retry_after_s,
        )


class EffectRejected(StepError):
    """Raised by a handler: the other side refused for good, and nothing happened in the world."""

    default_code = "effect.rejected"


class StepTimeoutError(StepError):
    """The step missed its deadline, set by `timeout_s`."""

    default_code = "step.timeout"


class OutputError(StepError):
    """The effect was made, but its result fails its contract or cannot be stored. Never retried.

    `kept` is what was received, as JSON data: it is stored with the failed step.
    """

    default_code = "step.output"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool = False,
        run_id: str | None = None,
        step: str | None = None,
        error_type: str | None = None,
        kept: Any = None,
    ) -> None:
        super().__init__(message, code=code, retryable=retryable, run_id=run_id, step=step, error_type=error_type)
        self.kept = kept


class ToolError(StepError):
    """Raised by a tool's handler: a classified failure with a definite outcome, which becomes a value.

    `details` is JSON data about it, for the program that reads the value.
    """

    default_code = "tool.failed"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool = False,
        run_id: str | None = None,
        step: str | None = None,
        error_type: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, code=code, retryable=retryable, run_id=run_id, step=step, error_type=error_type)
        self.details = details or {}


STEP_ERRORS: Final[dict[str, type[StepError]]] = {
    cls.__name__: cls
    for cls in (
        StepError,
        EffectNotMade,
        EffectRejected,
        SandboxDenied,
        StepTimeoutError,
        OutputError,
        ToolError,
    )
}
"""The classes that a recorded step error may come back as. A record can name only these."""
