"""The index of open runs, which no query could use, makes room for one of the runs that somebody may have to drive."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """One index for another."""
    op.drop_index("ditto_runs_open", "ditto_runs")
    op.create_index(
        "ditto_runs_undriven",
        "ditto_runs",
        ["owner"],
        sqlite_where=sa.text("status = 'running' OR status = 'interrupted'"),
    )
