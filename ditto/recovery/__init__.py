"""The eight recovery workflows: jobs whose effects are made once, whatever fails and wherever it is killed.

An application composes nothing: it gives an adapter, whose tools keep the job, read its source and reach the service
that makes the effects, and calls one of the entries below. The workflows know no domain: payload, prompt, sources,
operations and what undoes what come from the adapter's `recovery_read`, as a `Profile`.

They use ditto's public names only. `runtime` is whatever has `run` and `loop`; its caller opens and closes it.
Start reading at `entry.advance`; what is decided is in `checkpoint`, what runs in `graphs`.
"""

from __future__ import annotations

from ditto.recovery.catalog import run_fallback, run_timeout
from ditto.recovery.compensation import run_compensation
from ditto.recovery.errors import RecoveryError
from ditto.recovery.job import (
    ID_PATTERN,
    TERMINAL,
    Approval,
    Job,
    JobError,
    Operation,
    Reason,
    RecoveryInput,
    SessionResult,
    Stage,
)
from ditto.recovery.operations import run_checkpoint, run_side_effect_check
from ditto.recovery.pause import resume_paused, run_pause
from ditto.recovery.profile import PlannedOperation, Profile
from ditto.recovery.retry import run_retry
from ditto.recovery.runs import RecoveryRuntime
from ditto.recovery.session import run_session

__all__ = [
    "Approval",
    "ID_PATTERN",
    "Job",
    "JobError",
    "Operation",
    "PlannedOperation",
    "Profile",
    "Reason",
    "RecoveryError",
    "RecoveryInput",
    "RecoveryRuntime",
    "SessionResult",
    "Stage",
    "TERMINAL",
    "resume_paused",
    "run_checkpoint",
    "run_compensation",
    "run_fallback",
    "run_pause",
    "run_retry",
    "run_session",
    "run_side_effect_check",
    "run_timeout",
]
