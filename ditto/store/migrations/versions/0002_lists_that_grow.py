"""Lists that grow: `ditto_lists`, for the Items in the states of Loops."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """A new table; no row of an older store refers to it."""
    op.create_table(
        "ditto_lists",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("base", sa.Integer, sa.ForeignKey("ditto_lists.id")),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("added", sa.Text, nullable=False),
    )
