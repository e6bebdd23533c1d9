"""Alembic's entry: runs the versions on the connection that bridge.migrating hands over."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table="bridge_version",
    transactional_ddl=True,
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
