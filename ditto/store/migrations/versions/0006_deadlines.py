"""Deadlines: until when a run may take, and all tries at a step."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """New columns that no older row needs, and an index."""
    op.add_column("ditto_runs", sa.Column("deadline_at", sa.BigInteger))
    op.add_column("ditto_steps", sa.Column("deadline_at", sa.BigInteger))
    op.create_index("ditto_runs_deadline", "ditto_runs", ["deadline_at"], sqlite_where=sa.text("status = 'waiting'"))
