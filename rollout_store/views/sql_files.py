"""Reads the SQL of the views from the `.sql` files of this folder.

The files are package data, so that they also load from an installed wheel. A `$name` in a file is
replaced by a piece of SQL; values from the configuration must be quoted with `tables.sql.literal`.
"""

from functools import cache
from importlib.resources import files
from string import Template


def read_sql(name: str, **parts: object) -> str:
    """The SQL of one file with its placeholders replaced, without the comment at its head.

    Args:
        name: Name of the file, without `.sql`.
        **parts: The SQL for each placeholder of the file.

    Raises:
        KeyError: a placeholder has no part.
    """
    return _template(name).substitute(parts)


@cache
def _template(name: str) -> Template:
    text = files(__package__).joinpath(f"{name}.sql").read_text(encoding="utf-8")
    lines = text.splitlines()
    while lines and lines[0].startswith("--"):
        del lines[0]
    return Template("\n".join(lines))
