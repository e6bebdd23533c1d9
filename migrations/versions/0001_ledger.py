"""The ledger: job, job_event, and the wake-up of the dispatchers."""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    # by psycopg itself: SQLAlchemy would look for placeholders in it
    op.get_bind().connection.driver_connection.execute(Path(__file__).with_suffix(".sql").read_text())
