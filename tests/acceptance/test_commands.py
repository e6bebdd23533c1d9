"""The commands as a user types them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import ROOT, Stack, until

CELERY = [sys.executable, "-m", "celery"]


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**{k: v for k, v in os.environ.items() if not k.startswith(("BRIDGE_", "CELERY_"))}, **env}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_celery_has_one_command_of_ours_which_migrates(database_url: str) -> None:
    said = run(*CELERY, "-A", "bridge", "bridge", "migrate", BRIDGE_DATABASE_URL=database_url)
    assert (said.returncode, said.stdout) == (0, "The database is at schema version 0002.\n"), said.stderr
    listed = run(*CELERY, "--help").stdout
    assert "\n  bridge " in listed
    assert "plugin" not in listed


def test_bridge_broker_url_is_the_broker_of_every_celery_command() -> None:
    url = "redis://elsewhere:6379/3"
    shown = run(*CELERY, "-A", "bridge", "report", BRIDGE_BROKER_URL=url).stdout
    assert "transport:redis" in shown
    program = "from bridge.celery import app; print(app.connection().as_uri(), app.connection_for_write().as_uri())"
    assert run(sys.executable, "-c", program, BRIDGE_BROKER_URL=url).stdout.replace(":**@", "").split() == [url, url]


def test_no_secret_is_shown(database_url: str) -> None:
    secret = {
        "BRIDGE_DATABASE_URL": "postgresql://someone:hush@localhost:1/db",
        "BRIDGE_BROKER_URL": "redis://:hush@localhost:1/0",
    }
    for command in ([*CELERY, "-A", "bridge", "report"], [sys.executable, "-m", "bridge", "migrate"]):
        said = run(*command, **secret)
        assert "hush" not in said.stdout + said.stderr


NOWHERE = "PostgreSQL at localhost:1, database 'db', cannot be reached: "
MISTAKES = {
    "a database that does not answer": (["migrate"], {"BRIDGE_DATABASE_URL": "postgresql://x@localhost:1/db"}, NOWHERE),
    "an address of SQLAlchemy's": (
        ["migrate"],
        {"BRIDGE_DATABASE_URL": "postgresql+psycopg://x"},
        "names a driver, as",
    ),
    "a host that is none": (
        ["dispatcher"],
        {"BRIDGE_DATABASE_URL": "postgresql://x@no-such-host.invalid/db"},
        "PostgreSQL at no-such-host.invalid:5432, database 'db', cannot be reached: ",
    ),
    "no database": (["migrate"], {}, "No database is set. Set BRIDGE_DATABASE_URL"),
    "no app": (["-A", "nope", "migrate"], {}, "The Celery app 'nope' (-A or CELERY_APP) cannot be imported"),
    "an address of another kind": (["migrate"], {"BRIDGE_DATABASE_URL": "mysql://x"}, "BRIDGE_DATABASE_URL: its value"),
    "a broker that is none": (["dispatcher"], {"BRIDGE_BROKER_URL": "localhost"}, "BRIDGE_BROKER_URL: its value"),
    "a bad duration": (["migrate"], {"BRIDGE_LEASE": "soon"}, "BRIDGE_LEASE: 'soon' is not a duration"),
    "two brokers": (
        ["migrate"],
        {"BRIDGE_BROKER_URL": "redis://a", "CELERY_BROKER_WRITE_URL": "redis://b"},
        "are both set",
    ),
}


@pytest.mark.parametrize(("command", "env", "sentence"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_answered_by_one_sentence(command: list[str], env: dict[str, str], sentence: str) -> None:
    said = run(sys.executable, "-m", "bridge", *command, **env)
    assert said.returncode == 1
    assert sentence in said.stderr
    assert "Traceback" not in said.stderr
    assert len(said.stderr.splitlines()) <= 2  # the sentence, and once in the log where Celery is configured


def test_a_password_that_is_not_escaped_is_not_shown() -> None:
    for name, address in {
        "BRIDGE_DATABASE_URL": "postgresql://app:hush/hush@localhost:1/db",
        "BRIDGE_LISTEN_URL": "postgresql://app:hu@hush@localhost:1/db",
        "BRIDGE_BROKER_URL": "redis://:hush/hush@localhost:1/0",
    }.items():
        env = {"BRIDGE_DATABASE_URL": "postgresql://x@localhost:1/db", name: address}
        for command in (["-m", "bridge", "dispatcher", "--once"], ["-m", "celery", "-A", "bridge", "worker"]):
            said = run(sys.executable, *command, **env)
            assert said.returncode == 1
            assert f"{name}: its value holds a / @ or # in its password" in said.stderr
            assert "hush" not in said.stdout + said.stderr
            assert "Traceback" not in said.stderr


@pytest.mark.parametrize("app", ["", ".", "os:getcwd", "sys:path", "bridge:nothing"])
def test_an_app_that_is_none_is_one_sentence(app: str, database_url: str) -> None:
    said = run(sys.executable, "-m", "bridge", "-A", app, "migrate", BRIDGE_DATABASE_URL=database_url)
    assert said.returncode == 1, said.stdout
    assert "Traceback" not in said.stderr
    assert len(said.stderr.splitlines()) == 1


def test_a_misspelled_setting_is_named(database_url: str) -> None:
    said = run(sys.executable, "-m", "bridge", "migrate", BRIDGE_DATABASE_URL=database_url, BRIDGE_LEESE="3")
    assert "BRIDGE_LEESE is no setting, did you mean BRIDGE_LEASE?" in said.stderr


def test_dispatcher_once_fails_if_the_broker_does(database_url: str) -> None:
    import psycopg

    with psycopg.connect(database_url) as conn:
        conn.execute("INSERT INTO job (name) VALUES ('anything')")
    env = {"BRIDGE_DATABASE_URL": database_url, "BRIDGE_BROKER_URL": "redis://localhost:1/0"}
    said = run(sys.executable, "-m", "bridge", "dispatcher", "--once", **env)
    assert said.returncode == 1
    assert "the broker does not take queue default" in said.stderr


def test_dev_runs_a_command_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(
        "set -m\n"  # job control, as in an interactive shell: the worker has a process group of its own
        f"{shlex.quote(sys.executable)} -m celery -A bridge worker -c 1 -l info >worker.log 2>&1 &\n"
        "for i in $(seq 300); do grep -q ready. worker.log && break; sleep 0.1; done\n"
        'echo "$BRIDGE_DATABASE_URL" "$(psql -At "$BRIDGE_DATABASE_URL" -c "SELECT count(*) FROM job")"\n'
        "exit 7\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "BRIDGE_IMPORTS": "tests.jobs"}
    command = [sys.executable, "-m", "bridge", "dev", "--", "bash", str(script)]
    said = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert said.returncode == 7, said.stderr
    address, count = said.stdout.split()
    assert count == "0"
    folder = address.partition("host=")[2]
    assert not Path(folder).exists()
    left = subprocess.run(["pgrep", "-f", folder], capture_output=True, text=True, check=False).stdout
    assert left == ""
    environments = [path for path in Path("/proc").glob("[0-9]*/environ") if folder in _read(path)]
    assert environments == []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_dev_says_what_it_cannot_run() -> None:
    said = run(sys.executable, "-m", "bridge", "dev", "--", "no-such-command")
    assert said.returncode == 127
    assert said.stderr == "no-such-command: No such file or directory\n"


def test_two_demos_of_servers_at_once_do_not_meet(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bridge", "dev", "--", "sh", "-c", 'echo "$BRIDGE_BROKER_URL"; sleep 1']
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate(timeout=60)[0] for process in both}
    assert len(said) == 2
    assert [process.returncode for process in both] == [0, 0]


def test_dev_that_is_stopped_while_it_starts_leaves_nothing_behind() -> None:
    for how in (signal.SIGINT, signal.SIGTERM):
        process = dev("sleep", "60")
        folder = until(lambda pid=process.pid: folder_of(pid), what="its folder")
        process.send_signal(how)
        said, trouble = process.communicate(timeout=60)
        assert (process.returncode, said) == (128 + how, ""), trouble
        assert trouble == "Stopped: the servers and their folder are gone.\n"
        assert not folder.exists()


def folder_of(pid: int) -> Path | None:
    """The folder that a process has a lock in."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if (found := path.readlink()).name == "owner":
                return found.parent
    return None


def test_dev_is_not_led_elsewhere_and_ends_only_what_it_started(admin_url: str, tmp_path: Path) -> None:
    """Variables of libpq and of Celery name other servers; and a neighbour is this process's child before `exec`."""
    script = (
        f'sleep 300 >/dev/null 2>&1 & echo $! > "{tmp_path}/neighbour"\n'
        f"exec {shlex.quote(sys.executable)} -m bridge dev -- sh -c "
        """'psql -Atc "SHOW data_directory" "$BRIDGE_DATABASE_URL"; env | grep -E "^(PG|BRIDGE|CELERY)"'\n"""
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PGHOSTADDR": "192.0.2.1",
        "PGSERVICE": "elsewhere",
        "PGTARGETSESSIONATTRS": "standby",
        "BRIDGE_LISTEN_URL": "postgresql://elsewhere",
        "CELERY_BROKER_READ_URL": "redis://elsewhere",
    }
    said = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, timeout=90, check=False)
    neighbour = int((tmp_path / "neighbour").read_text())
    try:
        assert said.returncode == 0, said.stderr
        assert said.stdout.startswith("/tmp/bridge-")
        assert "elsewhere" not in said.stdout
        os.kill(neighbour, 0)
    finally:
        os.kill(neighbour, signal.SIGKILL)


def test_a_killed_dev_of_a_scripts_background_leaves_no_server(tmp_path: Path) -> None:
    """There SIGQUIT is ignored, and inherited so; it is what ends the servers when their parent is gone."""
    inner = f'echo "$BRIDGE_DATABASE_URL" > "{tmp_path}/there"; exec sleep 60'
    script = f"{shlex.quote(sys.executable)} -m bridge dev -- sh -c '{inner}' & echo $! > \"{tmp_path}/pid\"; wait"
    process = subprocess.Popen(["sh", "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)})
    there = tmp_path / "there"
    until(lambda: there.exists() and there.read_text().strip())
    folder = there.read_text().strip().partition("host=")[2]
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    process.wait(60)
    until(lambda: not subprocess.run(["pgrep", "-f", folder], capture_output=True, check=False).stdout)


def test_a_folder_of_somebodys_own_is_not_removed() -> None:
    mine = Path(f"/tmp/bridge-test-notes-{os.getpid()}")
    mine.mkdir()
    try:
        (mine / "owner").write_text("me\n")
        assert dev("true").communicate(timeout=60) == ("", "")
        assert (mine / "owner").exists()
    finally:
        shutil.rmtree(mine)


def test_what_a_killed_dev_leaves_is_removed_by_the_next() -> None:
    killed = dev("sh", "-c", 'echo "$BRIDGE_DATABASE_URL"; exec sleep 60')
    assert killed.stdout is not None
    folder = Path(killed.stdout.readline().strip().partition("host=")[2])
    killed.kill()
    killed.communicate(timeout=60)
    assert folder.exists()
    after = dev("true")
    assert after.communicate(timeout=60) == ("", "")
    assert after.returncode == 0
    assert not folder.exists()


def test_what_others_put_into_the_temporary_folder_does_not_hold_dev_up(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    pipe, link = (Path(f"/tmp/bridge-test-{each}-{os.getpid()}") for each in ("pipe", "link"))
    pipe.mkdir()
    os.mkfifo(pipe / "owner")
    (tmp_path / "owner").touch()
    link.symlink_to(tmp_path)
    try:
        process = dev("true")
        assert process.communicate(timeout=60) == ("", "")
        assert (pipe / "owner").exists()
        assert (tmp_path / "kept").exists()
    finally:
        link.unlink()
        shutil.rmtree(pipe)


def dev(*command: str) -> subprocess.Popen[str]:
    """Start `bridge dev` on a command."""
    return subprocess.Popen(
        [sys.executable, "-m", "bridge", "dev", "--", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_worker_says_what_is_wrong_with_its_modules_in_one_sentence(stack: Stack, tmp_path: Path) -> None:
    twice = ("import bridge", *(f"@bridge.job('x')\ndef h{n}(context, params): ..." for n in (1, 2)))
    (tmp_path / "twice.py").write_text("\n".join(twice))
    (tmp_path / "misses.py").write_text("import no_such_library")
    command = ["-m", "celery", "-A", "bridge", "worker", "-c", "1"]
    for module, sentence in {
        "nowhere": "bridge: The job module 'nowhere' (BRIDGE_IMPORTS, or",
        "bridge.nowhere": "bridge: The job module 'bridge.nowhere' (BRIDGE_IMPORTS, or",
        "twice": "bridge: Two handlers are named 'x': twice.h1 and twice.h2. Rename one.",
    }.items():
        process = stack.start(command, BRIDGE_IMPORTS=module)
        assert process.popen.wait(30) == 1
        assert process.log.splitlines()[-1].startswith(sentence), process.log
        assert "Traceback" not in process.log
    process = stack.start(command, BRIDGE_IMPORTS="misses")
    assert process.popen.wait(30) == 1
    assert "No module named 'no_such_library'" in process.log
    assert "Traceback" in process.log, "the module is theirs, and so is the place where it fails"


def test_a_worker_says_what_is_wrong_with_its_database_in_one_sentence(stack: Stack, admin_url: str) -> None:
    process = stack.start(["-m", "celery", "-A", "bridge", "worker", "-c", "1"], BRIDGE_DATABASE_URL=admin_url)
    until(lambda: process.popen.poll() is not None)
    assert "bridge: The database is at schema version none" in process.log
    assert "Run: python -m bridge migrate" in process.log
    assert "Traceback" not in process.log
