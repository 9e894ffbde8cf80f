"""Receipts: the signed records of outcomes, in the order of their commits."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """A new table, empty: what an older release committed has no receipts."""
    op.create_table(
        "ditto_receipts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run", sa.Integer, sa.ForeignKey("ditto_runs.id"), nullable=False),
        sa.Column("step", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("line", sa.Text, nullable=False),
    )
    op.create_index("ditto_receipts_run", "ditto_receipts", ["run"])
