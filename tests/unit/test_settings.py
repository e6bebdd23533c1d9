from __future__ import annotations

from dataclasses import fields
from datetime import timedelta

import pytest

from bridge.encoding import safe_text
from bridge.errors import ConfigurationError, SettingError
from bridge.settings import Settings, duration

SECOND = timedelta(seconds=1)
URL = "postgresql://app:hunter2@db/shop"

# name, default, text of BRIDGE_<NAME>, its value, value of Celery's bridge_<name>, its value
SETTINGS = [
    ("database_url", None, URL, URL, "postgres://c/d", "postgres://c/d"),
    ("listen_url", None, "off", "off", URL, URL),
    ("tenant", "default", "acme_1", "acme_1", "other", "other"),
    ("dispatcher", "worker", "worker", "worker", "standalone", "standalone"),
    ("poll_interval", SECOND, "250ms", SECOND / 4, 2, SECOND * 2),
    ("batch_size", 100, "7", 7, 8, 8),
    ("window", 1000, "9", 9, 10, 10),
    ("lease", SECOND * 180, "90s", SECOND * 90, 0.5, SECOND / 2),
    ("lost_after", SECOND * 300, "2m", SECOND * 120, "1h", SECOND * 3600),
    ("retry_max_delay", SECOND * 3600, "1d", SECOND * 86400, 5, SECOND * 5),
    ("unknown_job", "fail", "fail", "fail", "defer", "defer"),
]
ENVIRONMENT_ONLY = [
    ("broker_url", "BRIDGE_BROKER_URL", None, "redis://h/0", "redis://h/0"),
    ("imports", "BRIDGE_IMPORTS", (), " shop.jobs, ,mail.jobs ", ("shop.jobs", "mail.jobs")),
]
IDS = [row[0] for row in SETTINGS]


def test_every_setting_is_in_these_tables():
    assert {each.name for each in fields(Settings)} == {row[0] for row in SETTINGS + ENVIRONMENT_ONLY}


@pytest.mark.parametrize(("name", "default", "text", "value", "given", "configured"), SETTINGS, ids=IDS)
def test_environment_beats_celery_configuration_beats_default(name, default, text, value, given, configured):
    env, key = f"BRIDGE_{name.upper()}", f"bridge_{name}"
    assert getattr(Settings.load({}, {}), name) == default
    assert getattr(Settings.load({}, {key: given}), name) == configured
    assert getattr(Settings.load({env: text}, {key: given}), name) == value


@pytest.mark.parametrize(("name", "env", "default", "text", "value"), ENVIRONMENT_ONLY, ids=["broker_url", "imports"])
def test_what_celery_has_a_key_of_its_own_for_is_read_from_the_environment(name, env, default, text, value):
    assert getattr(Settings.load({}, {name: "amqp://celery//"}), name) == default
    assert getattr(Settings.load({env: text}, {}), name) == value


def test_an_empty_variable_is_an_unset_one():
    assert Settings.load({"BRIDGE_TENANT": "", "BRIDGE_LEASE": ""}, {"bridge_tenant": "acme"}).tenant == "acme"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("1500ms", 1.5), ("2", 2), ("2s", 2), (" 3 m ", 180), ("1.5h", 5400), ("30d", 2592000), (4, 4), (0.25, 0.25)],
)
def test_a_duration_is_seconds_or_has_a_unit(given, seconds):
    assert duration(given) == timedelta(seconds=seconds)


BAD_DURATIONS = ["", "soon", "1w", "-1s", "1s 2s", "0", "nan", "inf", "1e3", "\u0663s", "9" * 400, "3661d", True]
BAD_NUMBERS = ["", "0", "-1", "1.5", "many", "\u0663", "9" * 5000, "0" * 19 + "1" + "9" * 9, True]
BAD = [
    *[("BRIDGE_LEASE", value) for value in BAD_DURATIONS],
    *[(f"BRIDGE_{name}", "soon") for name in ("POLL_INTERVAL", "LOST_AFTER", "RETRY_MAX_DELAY")],
    *[("BRIDGE_BATCH_SIZE", value) for value in [*BAD_NUMBERS, "10001"]],
    ("BRIDGE_WINDOW", "1000001"),
    *[("BRIDGE_TENANT", value) for value in ("a.b", "a b", "x" * 64, "ä", "acme\n")],
    ("BRIDGE_DISPATCHER", "both"),
    ("BRIDGE_UNKNOWN_JOB", "ignore"),
]


@pytest.mark.parametrize(("env", "value"), BAD, ids=[f"{env}-{str(value)[:12]!a}" for env, value in BAD])
def test_a_bad_value_is_refused_by_name_and_shown(env, value):
    source, load = (env, ({env: value}, {})) if value not in ("", True) else (env.lower(), ({}, {env.lower(): value}))
    with pytest.raises(SettingError) as caught:
        Settings.load(*load)
    assert str(caught.value).startswith(f"{source}: {safe_text(value, limit=80)!r} is ")
    assert len(str(caught.value)) < 300


SECRETS = [
    *[("DATABASE_URL", value) for value in ("mysql://a:hunter2@h/d?x=1", "hunter2", "postgresql://a:hunter2@[::1/d")],
    ("LISTEN_URL", "redis://:hunter2@h/0"),
    ("BROKER_URL", "user:hunter2@host"),
]


@pytest.mark.parametrize(("name", "value"), SECRETS)
def test_a_bad_address_is_refused_by_name_and_not_shown(name, value):
    with pytest.raises(SettingError, match=f"BRIDGE_{name}: its value is not a .* address") as caught:
        Settings.load({f"BRIDGE_{name}": value}, {})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["postgresql://h/d", "postgres://h/d", "host=db dbname=shop", "postgresql:///d?host=/s"]
)
def test_an_address_is_a_url_or_a_conninfo(url):
    assert Settings.load({"BRIDGE_DATABASE_URL": url}, {}).database() == url


def test_without_a_database_the_error_says_how_to_set_one():
    with pytest.raises(
        ConfigurationError, match=r"Set BRIDGE_DATABASE_URL, .*bridge_database_url.*`python -m bridge d"
    ):
        Settings.load({}, {}).database()


def test_settings_can_be_logged_without_a_password():
    loaded = Settings.load({"BRIDGE_DATABASE_URL": URL, "BRIDGE_BROKER_URL": "redis://:hunter2@h/0"}, {})
    assert "hunter2" not in repr(loaded)
