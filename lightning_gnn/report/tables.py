"""Tables of forecasts and plans on the console."""

from collections.abc import Collection

from rich import box
from rich.table import Table


def make_table(title: str, *columns: str, left: Collection[str] = ()) -> Table:
    """Return an empty table; the first column and those of ``left`` are aligned to the left, others to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if not index or name in left else "right")
    table.columns[0].style = "cyan"
    return table
