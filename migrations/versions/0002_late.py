"""An index for jobs that are to start before a time."""

from pathlib import Path

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    # by psycopg itself: SQLAlchemy would look for placeholders in it
    op.get_bind().connection.driver_connection.execute(Path(__file__).with_suffix(".sql").read_text())
