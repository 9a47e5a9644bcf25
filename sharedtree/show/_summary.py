"""`summary` shows a model as a table. `_tables` makes the lines, from the outline that `_outline` makes."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

from ._live_models import description_of
from ._outline import Outline, Row
from ._tables import RICH_STYLES, Line, html_table, table_lines

# Default of the most rows to print.
MOST_ROWS = 1_000

# A table is at least this wide, in characters, even on a narrower terminal.
_NARROWEST = 20


class Summary:
    """Table of a model. It prints as text of the terminal's width, as HTML in notebooks, in colours with `rich.print`.

    Attributes:
        parameters: number of trainable numbers in the model. Those of a tied array count once.
        state: number of numbers that are state of the model, such as the statistics of a batch norm and random streams.
        optimizer_state: number of numbers that are state of an optimizer.
        untied_parameters: number of trainable numbers if nothing were tied. At most 10^30.
        nbytes: bytes of all arrays. Those of a tied array count once.
        untied_nbytes: bytes of all arrays if nothing were tied. At most 10^30.
        num_ties: number of objects with several places. An object inside a tied module counts only if it has places
            outside that module, too.
        rows: all rows of the table, down to the chosen depth.

    A summary holds texts and numbers only, so it keeps nothing of the model alive.
    """

    def __init__(self, outline: Outline, depth: int | None, lines: int) -> None:
        """Takes the totals of an outline. For `depth` and `lines`, see `summary`."""
        self._outline, self._depth, self._lines = outline, depth, lines
        description = outline.description
        size, untied_size = description.size, description.untied_size
        self.parameters, self.state, self.optimizer_state = size.parameters, size.state, size.optimizer_state
        self.nbytes = size.nbytes
        self.untied_parameters, self.untied_nbytes = untied_size.parameters, untied_size.nbytes
        self.num_ties = description.num_ties

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows down to the chosen depth, including those beyond the most rows to print."""
        return tuple(self._outline.iterate(self._depth))

    def text(self, width: int | None = None) -> str:
        """Returns the table as text.

        Args:
            width: most characters of a line. Columns are left out and paths shortened to fit. Default: any number.
        """
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self._styled_lines(width))

    def _styled_lines(self, width: int | None) -> Iterator[Line]:
        width = None if width is None else max(width, _NARROWEST)
        return table_lines(self._outline, depth=self._depth, most=self._lines, width=width)

    def __str__(self) -> str:
        # 120 columns where there is no terminal, as in a log file.
        return self.text(shutil.get_terminal_size((120, 24)).columns)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self._outline, depth=self._depth, most=self._lines)

    def __rich__(self) -> Any:
        return _ForRich(self._styled_lines)


class _ForRich:
    """Renderable of `rich`. It makes the lines only when rich asks for them, with the width of its console.

    Args:
        lines: takes a width, and returns the lines of the table.
    """

    def __init__(self, lines: Callable[[int], Iterator[Line]]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        # Only rich calls this method, so rich is installed.
        from rich.text import Text

        for line in self._lines(options.max_width):
            yield Text.assemble(*[(text, RICH_STYLES[style]) for text, style in line], no_wrap=False)


def summary(tree: Any, *, depth: int | None = None, lines: int = MOST_ROWS) -> Summary:
    """Shows a model as a table: path, class, shape, dtype, parameters, bytes. Every tie is marked and counted once.

    Parameters are what an optimizer trains. If the model has state, such as the statistics of a batch norm, or there is
    state of an optimizer beside it, each has a column and a total of its own.

    Three or more equal neighbours (`.layers[0]` to `.layers[11]`) are one row with `×12 each`, above the rows of the
    first. Its numbers are those of one of them. Neighbours are equal if they have one class, and equal fields, shapes,
    dtypes and ties. Values and static fields are not compared. A neighbour tied to another part of the model has a row
    of its own.

    Args:
        tree: a model of any library, any container of models and arrays, or a `Dag`. Its arrays may be abstract.
        depth: number of levels shown below the root. Default: all.
        lines: most rows to print. Default: 1,000.

    Returns:
        A table that prints as text, is HTML in a notebook, and has colours in `rich.print`. Its attributes have the
        totals.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is no pytree. The message says what to do.
        ValueError: if `depth` or `lines` is negative.

    Cost: one walk over the nodes, about 20 microseconds for each, however many paths lead to them. No array is read,
    copied or kept.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((4, 3))
        >>> table = st.summary({"embed": w, "head": w, "bias": jnp.ones(3)})
        >>> print(table.text())
        path       class       shape   dtype    parameters  bytes  tie
        (root)     dict                                 15     60
          ['bias']             [3]     float32           3     12
          ['embed']            [4, 3]  float32          12     48  #1
          ['head'] = ['embed']                                     #1
        <BLANKLINE>
        total   15 parameters, 60 bytes
        untied  27 parameters, 108 bytes if each place had its own
        ties    1, each counted once:
          #1  ['embed'] = ['head']
        >>> table.parameters, table.untied_parameters
        (15, 27)

    Limitations: static leaves and None have no row. Parameters are floating-point or complex numbers that are not
    state, whether they are trained or not, as in `count_parameters`. State is what a library says is state; in a plain
    dict, such as Linen's `variables`, nobody says so. A variable of Flax NNX is one row with its array.
    """
    for name, value in (("depth", depth), ("lines", lines)):
        if value is not None and value < 0:
            raise ValueError(f"`{name}` is at least 0, not {value}.")
    return Summary(Outline(description_of(tree)), depth, lines)
