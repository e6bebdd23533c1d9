"""One statement a file; the first line of each says what it is for."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def statement(name: str) -> str:
    """The text of `bridge/sql/<name>.sql`, with the columns of a Job where it says /*job*/.

    Example:
        >>> statement("get").splitlines()[0]
        '-- get: one job by its id'
    """
    folder = files(__package__)
    text = (folder / f"{name}.sql").read_text()
    if "/*job*/" in text:
        text = text.replace("/*job*/", (folder / "columns.sql").read_text().split("\n", 1)[1].strip())
    return text
