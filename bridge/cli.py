"""The commands. Each is one call; loaded by every `celery` command of a virtualenv, so imports stay inside."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click


@click.group()
@click.option("-A", "--app", "app_name", envvar="CELERY_APP", default="bridge", help="Celery app (default: bridge).")
@click.version_option(package_name="celery-bridge")
@click.pass_context
def main(context: click.Context, app_name: str) -> None:
    """Keep Celery, and make a PostgreSQL row the truth."""
    context.obj = app_name


@click.group("bridge")
@click.pass_context
def plugin(context: click.Context) -> None:
    """The bridge: migrate, dispatcher."""
    context.obj = context.obj.app  # Celery's own context has found the app


@click.command()
@click.option("--sql", is_flag=True, help="Print the SQL instead, for a database without tables of ours.")
@click.pass_obj
def migrate(found: Any, sql: bool) -> None:
    """Bring the database to the tables that this version needs."""
    with _sentences():
        from bridge.database import Database
        from bridge.migrating import migrate as apply
        from bridge.migrating import script

        if sql:
            click.echo(script(), nl=False)
            return
        version = apply(Database(_bridge(found).settings.database, name="bridge-migrate"))
        click.echo(f"The database is at schema version {version}.")


@click.command()
@click.option("--once", is_flag=True, help="One turn: hand over what is due, then end.")
@click.pass_obj
def dispatcher(found: Any, once: bool) -> None:
    """Hand due jobs to the broker, until stopped (SIGTERM, Ctrl-C)."""
    with _sentences():
        import logging
        import signal

        from bridge.migrating import check

        logging.basicConfig(level=logging.INFO, format="[%(asctime)s: %(levelname)s/%(name)s] %(message)s")
        bridge = _bridge(found)
        with bridge.database.connection() as conn:
            check(conn)
        loop = bridge.new_dispatcher()
        if once:
            click.echo(f"Handed over: {loop.once()}.")
            return
        logging.getLogger(__name__).info("dispatching for tenant %s, until stopped", bridge.settings.tenant)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: loop.stop())
        loop.run()


for _command in (migrate, dispatcher):
    main.add_command(_command)
    plugin.add_command(_command)


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def dev(command: tuple[str, ...]) -> None:
    """Servers from wheels, migrated, for a COMMAND or a shell: bridge dev -- celery -A bridge worker."""
    with _sentences():
        from bridge.dev import run

        sys.exit(run(command))


@main.command()
@click.option("--orders", type=click.IntRange(1, 200), default=200, show_default=True, help="How many orders.")
@click.option("--keep", type=click.Path(file_okay=False), help="Where the invoices are kept.")
def demo(orders: int, keep: str | None) -> None:
    """A small shop on servers from wheels: real jobs from rows through Celery and back."""
    with _sentences():
        from bridge.demo import run

        sys.exit(run(orders=orders, keep=keep))


@contextmanager
def _sentences() -> Iterator[None]:
    """Our own errors are sentences for the user, not tracebacks."""
    from bridge.errors import BridgeError

    try:
        yield
    except BridgeError as error:
        raise click.ClickException(str(error)) from None


def _bridge(found: Any) -> Any:
    from celery.app.utils import find_app

    from bridge import celery, runtime
    from bridge.errors import ConfigurationError

    sys.path.insert(0, os.getcwd())
    try:
        app = find_app(found) if isinstance(found, str) else found
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigurationError(f"The Celery app {found!r} (-A or CELERY_APP) cannot be imported: {error}") from None
    try:
        celery.install(app)
        _ = app.conf.imports  # reads the configuration, which names modules too
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"The configuration of the Celery app cannot be imported: {error}") from None
    return runtime.of(app)
