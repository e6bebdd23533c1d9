"""Every setting once: its environment variable, its Celery key, its unit, its default.

The environment beats the Celery configuration, which beats the default held here (Celery's add_defaults
would beat the user's own file, so it is not used). Nothing is read before the first use.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from bridge.encoding import safe_text
from bridge.errors import ConfigurationError, SettingError

logger = logging.getLogger(__name__)

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", re.ASCII)
_TENANT = re.compile(r"[A-Za-z0-9_-]{1,63}", re.ASCII)


def duration(value: object) -> timedelta:
    """A number is seconds; text may carry a suffix: ms, s, m, h, d."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif match := _DURATION.fullmatch(str(value).strip()):
        seconds = float(match[1]) * _UNITS[match[2] or "s"]
    else:
        raise ValueError("is not a duration: give seconds, or a number with ms, s, m, h or d")
    if not 0.001 <= seconds <= 10 * 366 * 86400:
        raise ValueError("is out of range: from 1 ms to ten years")
    return timedelta(seconds=seconds)


def _whole(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        text = str(value).strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and low <= int(text) <= high):
            raise ValueError(f"is not a whole number from {low} to {high}")
        return int(text)

    return parse


def _choice(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"is none of: {', '.join(choices)}")
        return str(value)

    return parse


def _postgres_url(value: object) -> str:
    text = str(value).strip()
    try:
        scheme = urlsplit(text).scheme
    except ValueError:
        scheme = ""
    if scheme.startswith(("postgresql+", "postgres+")):
        raise ValueError("names a driver, as SQLAlchemy has it: drop the part from '+' to '://'")
    if scheme not in ("postgresql", "postgres") and "=" not in text.split("://")[0]:
        raise ValueError("is not a PostgreSQL address such as postgresql://user@host:5432/database")
    _check_password(text)
    return text


def _check_password(url: str) -> None:
    """What is not escaped ends the password early, and its rest would be shown as host or database."""
    for part in url.split(";"):
        authority, _, rest = part.partition("://")[2].partition("?")[0].partition("/")
        if (authority and "@" in rest) or "@" in authority.rpartition("@")[0] or "#" in authority:
            raise ValueError("holds a / @ or # in its password: write %2F for /, %40 for @, %23 for #")


def _listen_url(value: object) -> str:
    return "off" if str(value).strip() == "off" else _postgres_url(value)


def broker_url(value: object) -> str:
    """A broker's address, or ValueError."""
    text = str(value).strip()
    if "://" not in text:
        raise ValueError("is not a broker address such as redis://host:6379/0 or amqp://user@host//")
    _check_password(text)
    return text


def modules(value: object) -> tuple[str, ...]:
    """Module names, comma separated or as a list."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple | set | frozenset):
        raise ValueError("is not a list of module names")
    if not all(isinstance(name, str) and not name.strip().startswith(".") for name in names):
        raise ValueError("is not a list of module names: each is absolute, as in package.module")
    return tuple(name.strip() for name in names if name.strip())


def _tenant(value: object) -> str:
    text = str(value)
    if not _TENANT.fullmatch(text):
        raise ValueError("is not a tenant: 1 to 63 of letters, digits, _ and - (a '.' would mix up queues)")
    return text


def _setting(env: str, key: str, parse: Callable[[object], Any], default: object, *, secret: bool = False) -> Any:
    return field(
        default=cast(Any, default), repr=not secret, metadata={"env": env, "key": key, "parse": parse, "secret": secret}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the bridge runs with. Durations are timedeltas.

    Example:
        >>> Settings.load({"BRIDGE_LEASE": "90s"}, {}).lease
        datetime.timedelta(seconds=90)
    """

    database_url: str | None = _setting("BRIDGE_DATABASE_URL", "bridge_database_url", _postgres_url, None, secret=True)
    listen_url: str | None = _setting("BRIDGE_LISTEN_URL", "bridge_listen_url", _listen_url, None, secret=True)
    broker_url: str | None = _setting("BRIDGE_BROKER_URL", "", broker_url, None, secret=True)
    imports: tuple[str, ...] = _setting("BRIDGE_IMPORTS", "", modules, ())
    tenant: str = _setting("BRIDGE_TENANT", "bridge_tenant", _tenant, "default")
    dispatcher: Literal["worker", "standalone"] = _setting(
        "BRIDGE_DISPATCHER", "bridge_dispatcher", _choice("worker", "standalone"), "worker"
    )
    poll_interval: timedelta = _setting("BRIDGE_POLL_INTERVAL", "bridge_poll_interval", duration, timedelta(seconds=1))
    batch_size: int = _setting("BRIDGE_BATCH_SIZE", "bridge_batch_size", _whole(1, 10_000), 100)
    window: int = _setting("BRIDGE_WINDOW", "bridge_window", _whole(1, 1_000_000), 1000)
    lease: timedelta = _setting("BRIDGE_LEASE", "bridge_lease", duration, timedelta(seconds=180))
    lost_after: timedelta = _setting("BRIDGE_LOST_AFTER", "bridge_lost_after", duration, timedelta(seconds=300))
    retry_max_delay: timedelta = _setting(
        "BRIDGE_RETRY_MAX_DELAY", "bridge_retry_max_delay", duration, timedelta(hours=1)
    )
    unknown_job: Literal["fail", "defer"] = _setting(
        "BRIDGE_UNKNOWN_JOB", "bridge_unknown_job", _choice("fail", "defer"), "fail"
    )

    @classmethod
    def load(cls, environ: Mapping[str, str], configuration: Mapping[str, Any]) -> Settings:
        """Read the settings: environment over Celery configuration over default.

        Raises:
            SettingError: a value is bad; the message names the variable or key, and the value if it is no secret.
        """
        _warn_of_unknown(environ)
        return cls(**dict(_read(environ, configuration)))

    def database(self) -> str:
        """The address of PostgreSQL.

        Raises:
            ConfigurationError: there is none; the message says how to set it.
        """
        if self.database_url is None:
            raise ConfigurationError(
                "No database is set. Set BRIDGE_DATABASE_URL, for example "
                "BRIDGE_DATABASE_URL=postgresql://user@localhost/mydb, or bridge_database_url in the Celery "
                "configuration; `python -m bridge dev` brings its own."
            )
        return self.database_url


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    """A misspelled variable would be ignored in silence."""
    known = [each.metadata["env"] for each in fields(Settings)]
    for name in sorted(environ):
        if name.startswith("BRIDGE_") and not name.startswith("BRIDGE_TEST_") and name not in known:
            close = get_close_matches(name, known, 1)
            logger.warning("%s is no setting%s; it is ignored", name, f", did you mean {close[0]}?" if close else "")


def _read(environ: Mapping[str, str], configuration: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for each in fields(Settings):
        env, key = each.metadata["env"], each.metadata["key"]
        if environ.get(env, "") != "":
            source, value = env, environ[env]
        elif key and configuration.get(key) is not None:
            source, value = key, configuration[key]
        else:
            continue
        try:
            found.append((each.name, each.metadata["parse"](value)))
        except ValueError as error:
            shown = "its value" if each.metadata["secret"] else repr(safe_text(value, limit=80))
            raise SettingError(f"{source}: {shown} {error}.") from None
    return found
