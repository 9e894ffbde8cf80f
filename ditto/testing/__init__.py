"""What users need to test their own workflows: a scripted provider over real HTTP, and crash points.

    from ditto.testing.provider import ScriptedProvider     # also: python -m ditto.testing.provider
    from ditto.testing import crash                         # also: python -m ditto.testing.crash

Needs the extra `ditto-runtime[testing]`. Import the modules by name: this one imports nothing.
"""
