"""Alembic's entry: run the steps on the connection that `upgrade` hands over. Not to be imported."""

from alembic import context

VERSION_TABLE = "ditto_alembic"

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table=VERSION_TABLE)
with context.begin_transaction():
    context.run_migrations()
