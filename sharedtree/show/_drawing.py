"""`draw` shows a model as a picture. `_drawing_layout` chooses and places boxes and wires; the SVG is written here."""

import importlib
import os
from typing import Any

from ._drawing_as_svg import svg_of
from ._drawing_layout import MOST_BOXES, Boxes, boxes_of
from ._live_models import description_of
from ._outline import Outline
from ._tables import figure


class Drawing:
    """Picture of a model, in SVG. Notebooks show it, and `.save("m.svg")` writes it.

    Attributes:
        svg: the picture, as text.

    A drawing holds that text only, so it keeps nothing of the model alive.
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture to a file, as UTF-8. A file that exists is replaced.

        Args:
            path: path of the file. Should end in `.svg`, which is the format that is written.

        Raises:
            ValueError: if the path ends in the name of another format, such as `.png`.
        """
        ending = os.path.splitext(os.fspath(path))[1].lower()
        if ending in _OTHER_FORMATS:
            raise ValueError(
                f"A drawing is SVG, and `{ending}` is another format. Save it as `.svg`; a browser opens it, and other "
                "programs convert it, such as `rsvg-convert m.svg -o m.png`."
            )
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)

    def _repr_svg_(self) -> str:
        # The text begins with an XML declaration, which must not stand inside a page.
        return self.svg[self.svg.index("<svg") :]

    def __repr__(self) -> str:
        return f'<a drawing, {len(self.svg):,} bytes of SVG: save it with .save("m.svg")>'


# Endings that people try. Any other ending is accepted.
_OTHER_FORMATS = frozenset({".png", ".pdf", ".jpg", ".jpeg", ".gif", ".webp", ".eps", ".ps"})


def draw(tree: Any, *, depth: int | None = None, boxes: int = MOST_BOXES) -> Drawing:
    """Draws a model as a picture of its DAG: modules are boxes, fields are wires, and every tie stands out.

    A tied object is one box with a double frame and the number of its tie. Thick dashed wires lead to that box from
    each of its places. Arrays are lines in the box of their module. Plain containers are part of the names of fields.
    Three or more equal neighbours are a stack with `×12`. Ties have the same numbers as in `summary`. The picture is
    light or dark, like the reader's system.

    Args:
        tree: a model of any library, any container of models and arrays, or a `Dag`. Its arrays may be abstract.
        depth: number of levels below the root that have boxes. Default: all.
        boxes: most boxes. If there are more, the uppermost are drawn, and the others are lines. Default: 150.

    Returns:
        A drawing, which a notebook shows. The same model has the same drawing.

    Raises:
        ImportError: if igraph or drawsvg is not installed. The message says how to install them.
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is no pytree.
        ValueError: if `depth` is negative, or `boxes` is less than 1.

    Cost: one walk over the nodes, and up to a second for the layout of 150 boxes. No array is read, copied or kept.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((4, 3))
        >>> drawing = st.draw({"embed": w, "head": w})
        >>> "12 parameters, at 2 places" in drawing.svg  # `drawing.save("model.svg")` writes it
        True

    Limitations: the width of boxes is computed for a usual monospaced font. Drawings of many unequal layers are large:
    choose a `depth`.
    """
    for name, value, least in (("depth", depth, 0), ("boxes", boxes, 1)):
        if value is not None and value < least:
            raise ValueError(f"`{name}` is at least {least}, not {value}.")
    igraph, drawsvg = libraries()
    return drawing_of(Outline(description_of(tree)), depth, boxes, igraph, drawsvg)


def drawing_of(outline: Outline, depth: int | None, most: int, igraph: Any, drawsvg: Any) -> Drawing:
    """Draws an outline.

    Args:
        outline: the outline of a model.
        depth: number of levels below the root that have boxes. None for all.
        most: most boxes.
        igraph: the module `igraph`.
        drawsvg: the module `drawsvg`.
    """
    boxes = boxes_of(outline, depth=depth, most=most)
    return Drawing(svg_of(boxes, _notes(outline, boxes), igraph=igraph, drawsvg=drawsvg))


def _notes(outline: Outline, boxes: Boxes) -> list[str]:
    """Returns the lines of text below a drawing: the totals, and the ties that are not drawn."""
    description = outline.description
    notes = [f"{figure(description.size.parameters)} parameters"]
    if description.num_ties:
        notes[0] += f"; untied {figure(description.untied_size.parameters)}"
    if boxes.hidden:
        marks = ", ".join(f"#{mark}" for mark in boxes.hidden[:_MOST_HIDDEN])
        marks += f" and {len(boxes.hidden) - _MOST_HIDDEN:,} more" if len(boxes.hidden) > _MOST_HIDDEN else ""
        notes.append(f"ties within what is not drawn: {marks}")
    return notes


# Most marks of ties that are not drawn, in the text below a drawing.
_MOST_HIDDEN = 12


def libraries() -> tuple[Any, Any]:
    """Imports igraph and drawsvg and returns both modules, in this order.

    Raises:
        ImportError: if one of them is not installed.
    """
    try:
        return importlib.import_module("igraph"), importlib.import_module("drawsvg")
    except ImportError as error:
        raise ImportError(
            f"`sharedtree.draw` needs igraph and drawsvg, and `{error.name}` cannot be imported. Install both:\n"
            "    pip install igraph drawsvg\n"
            "They are also what the extra of sharedtree brings: `sharedtree[show]`.",
            name=error.name,
        ) from error
