"""Waits: when a waiting step is due, the signals that are sent to a run, and how often its process died in a row."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """New columns that no older row needs, their indexes, and a new table."""
    op.add_column("ditto_runs", sa.Column("crashes", sa.Integer, nullable=False, server_default="0"))
    op.add_column("ditto_runs", sa.Column("claimed_seq", sa.Integer, nullable=False, server_default="0"))
    op.add_column("ditto_steps", sa.Column("due_at", sa.BigInteger))
    op.create_index("ditto_steps_due", "ditto_steps", ["due_at"], sqlite_where=sa.text("state = 'waiting'"))
    op.create_index("ditto_steps_waiting", "ditto_steps", ["key"], sqlite_where=sa.text("state = 'waiting'"))
    op.create_table(
        "ditto_signals",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run", sa.Integer, sa.ForeignKey("ditto_runs.id"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("signal_id", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("step", sa.Text),
        sa.UniqueConstraint("run", "signal_id"),
    )
