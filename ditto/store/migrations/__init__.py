"""Migrations: how a store of an older schema becomes one of this schema, by Alembic.

Loaded only when a store's schema differs. All steps run in the one transaction that the caller has open, so a process
that is killed in the middle leaves the store as it was. Revisions are named by the schema they lead to: `0002`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool

if TYPE_CHECKING:
    from ditto.store.connection import Driver

logger = logging.getLogger("ditto.store")


def upgrade(db: Driver, found: int, wanted: int) -> None:
    """Bring the open transaction's store from schema `found` to schema `wanted`. Raises what a step raises.

    The transaction stays open: closing SQLAlchemy's connection asks the driver to roll back, and ours does not.
    """
    from alembic import command
    from alembic.config import Config

    logger.info("the store is upgraded from schema %d to %d", found, wanted)
    engine = create_engine("sqlite://", creator=lambda: db, poolclass=StaticPool, pool_reset_on_return=None)
    with engine.connect() as connection:
        connection.begin()
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.stamp(config, f"{found:04}", purge=True)
        command.upgrade(config, f"{wanted:04}")
