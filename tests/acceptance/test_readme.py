"""README, typed as a stranger types it: its blocks are taken from the file, so that they cannot differ from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg

from tests.support import ROOT, Side, Stack, until

README = (ROOT / "README.md").read_text(encoding="utf-8")
OVER = """python - <<'END'
import os, time, psycopg
with psycopg.connect(os.environ["BRIDGE_DATABASE_URL"], autocommit=True) as conn:
    while conn.execute("SELECT 1 FROM job WHERE status IN ('new', 'scheduled', 'running', 'retry')").fetchone():
        time.sleep(0.1)
END
"""


def section(title: str) -> str:
    """The text below a heading."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert found, title
    return found[1]


def python(text: str) -> list[str]:
    """Its Python files."""
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def shell(text: str) -> list[str]:
    """Its commands, block by block."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [
        re.sub(r"^    ", "", block, flags=re.M).strip()
        for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.M)
    ]


def test_five_minutes(tmp_path: Path) -> None:
    text = section("Five minutes to the first audited job")
    (hello,) = python(text)
    (tmp_path / "hello.py").write_text(hello)
    start, submit, ask = shell(text)
    dev, activate, *rest = start.splitlines()
    assert (dev, activate) == (".venv/bin/python -m bridge dev", ". .venv/bin/activate")
    typed = "\n".join([*rest, submit, OVER, ask, "exit\n"])
    env = {k: v for k, v in os.environ.items() if not k.startswith(("BRIDGE_", "CELERY_"))}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PYTHONPATH": str(ROOT), "SHELL": "/bin/bash"}
    command = [sys.executable, *dev.split()[1:]]
    ended = subprocess.run(command, input=typed, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout
    assert "Job 'hello' was not submitted: when: no such field" in said, said + ended.stderr
    assert re.search(r'hello \| completed +\| "hello Ada, it is \d\d:\d\d" +\|', said), said + ended.stderr
    assert re.search(r'hello \| failed +\| +\| \{.*"hint": "Bob is not up yet".*\}', said), said
    assert len(re.findall(r"\| start +\| \{.*\} +\| celery@", said)) == 3  # Ada once, Bob twice
    assert re.search(r'\| retry +\| \{"reason": "backoff", "attempt": 2\}', said)


def test_an_app_that_you_have(stack: Stack, side: Side, tmp_path: Path) -> None:
    shop, transaction = python(section("With your own servers"))
    (tmp_path / "shop.py").write_text(shop)
    settings = {"BRIDGE_IMPORTS": "", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "CELERY_CONFIG_MODULE": ""}
    side.conn.execute("CREATE TABLE orders (id integer, total integer)")
    worker = stack.start(["-m", "celery", "-A", "shop", "worker", "-c", "1", "-l", "info"], **settings)
    worker.says(" ready.")
    program = f"import os, bridge, psycopg, shop\nurl = os.environ['BRIDGE_DATABASE_URL']\n{transaction}"
    own = stack.start(["-c", f"{program}\nshop.add.delay(1, 2)"], **settings)
    assert own.popen.wait(30) == 0, own.log
    until(lambda: side.counts() == {"completed": 1}, what=lambda: worker.tail)
    worker.says("succeeded in")
    until(lambda: "Task shop.add" in worker.log and ": 3" in worker.log, what=lambda: worker.tail)
    assert side.rows("SELECT name, result FROM job") == [{"name": "billing.invoice", "result": {"order": 7}}]
    assert side.rows("SELECT id FROM orders") == [{"id": 7}]


def test_a_row_by_plain_sql(stack: Stack, side: Side, tmp_path: Path) -> None:
    (hello,) = python(section("Five minutes to the first audited job"))
    (tmp_path / "hello.py").write_text(hello)
    (statement,) = [block for block in shell(section("With your own servers")) if block.startswith("INSERT")]
    stack.worker(BRIDGE_IMPORTS="hello", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    with psycopg.connect(stack.database_url) as conn:
        conn.execute(statement)
    until(lambda: side.counts() == {"completed": 1})
    assert side.rows("SELECT result FROM job") == [{"result": "hello Zoe, it is 12:00"}]
