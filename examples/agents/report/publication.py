"""The publication tool of the report agent: it writes one row into a database of its own.

The database is the outside world here. Each publication is filed under the operation's key, so a lost outcome can be
looked up, and an unused key proves that nothing was published.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from ditto import Absent, Committed, LookupResult, StepContext, Tool

TABLE = "CREATE TABLE IF NOT EXISTS reports (key TEXT PRIMARY KEY, title TEXT NOT NULL, text TEXT NOT NULL)"


class Report(BaseModel):
    """What is published."""

    title: str = Field(min_length=1, max_length=200)
    text: str = Field(min_length=1, max_length=20_000)


def create_publication_tool(database: Path) -> Tool:
    """`publish_report`: publishes a report in this database, once for each operation."""

    def publish(report: Report, ctx: StepContext) -> dict[str, Any]:
        with closing(sqlite3.connect(database)) as db, db:
            db.execute(TABLE)
            db.execute("INSERT INTO reports (key, title, text) VALUES (?, ?, ?)", (ctx.key, report.title, report.text))
        return {"published": report.title}

    def look_up(key: str, report: Report, ctx: StepContext) -> LookupResult:
        with closing(sqlite3.connect(database)) as db:
            db.execute(TABLE)
            row = db.execute("SELECT title FROM reports WHERE key = ?", (key,)).fetchone()
        return Absent() if row is None else Committed({"published": row[0]})

    return Tool(
        "publish_report",
        publish,
        Report,
        description="Publishes a report. Call it once, with the whole report.",
        lookup=look_up,
        absence_is_final=True,
    )


def count_publications(database: Path) -> int:
    """How many reports were published, counted in the tool's own database."""
    if not database.exists():
        return 0
    with closing(sqlite3.connect(database)) as db:
        db.execute(TABLE)
        return int(db.execute("SELECT count(*) FROM reports").fetchone()[0])
