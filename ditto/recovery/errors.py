"""The one error of this package; everything else that an entry raises is ditto's own.

DittoError
└── RecoveryError       an entry was called wrongly, or the adapter's profile is wrong; nothing was started
"""

from __future__ import annotations

from ditto import DittoError


class RecoveryError(DittoError):
    """An entry was called wrongly, or the adapter's profile is wrong. Nothing was started.

    Codes: `recovery.option` (an option is out of its range), `recovery.approval` (the job was not created with
    requires_approval), `recovery.profile` (the adapter's answer is no job or no profile).
    """

    default_code = "recovery"
