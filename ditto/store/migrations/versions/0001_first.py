"""The first released schema. Nothing leads to it: a store has it, or is laid out anew."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """A store without tables is laid out by `ditto.store.connection`, not from here."""
    raise RuntimeError("a store is never migrated to its first schema")
