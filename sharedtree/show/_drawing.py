"""`draw`: a model as a picture."""

import importlib
import os
from typing import Any

from ._drawing_as_svg import svg_of
from ._drawing_layout import MOST_BOXES, Boxes, boxes_of
from ._live_models import description_of
from ._outline import Outline
from ._tables import figure


class Drawing:
    """A picture of a model, in SVG: notebooks show it, and `.save("m.svg")` writes it.

    Attributes:
        svg: the picture, as text.

    It holds texts only, and keeps nothing of the model alive.
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture to a file, as UTF-8. What was there is replaced.

        Args:
            path: of the file. It should end in `.svg`, since that is what is written.

        Raises:
            ValueError: if it ends in the name of another format.
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
        # Within a page there is no place for a declaration.
        return self.svg[self.svg.index("<svg") :]

    def __repr__(self) -> str:
        return f'<a drawing, {len(self.svg):,} bytes of SVG: save it with .save("m.svg")>'


_OTHER_FORMATS = frozenset({".png", ".pdf", ".jpg", ".jpeg", ".gif", ".webp", ".eps", ".ps"})


def draw(tree: Any, *, depth: int | None = None, boxes: int = MOST_BOXES) -> Drawing:
    """A model as a picture of its DAG: modules are boxes, fields are wires, and every tie is seen at a glance.

    What is tied is one box with a double frame and the number of its tie, to which thick dashed wires lead from each
    place. Arrays are lines in the box of their module, plain containers part of the fields' names, and three or more
    equal neighbours a stack with `×12`, as in `summary`. Numbers of ties are those of `summary`, too. The picture is
    light or dark as the reader's system is.

    Args:
        tree: as for `summary`.
        depth: how many levels below the root have boxes. Default: all.
        boxes: how many boxes there are at most; of more, the uppermost are drawn, and the others are lines. Default:
            150.

    Returns:
        A drawing, which a notebook shows. The same model has the same drawing.

    Raises:
        ImportError: if igraph or drawsvg is not installed; it says how to.
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is no pytree.
        ValueError: if `depth` is negative, or `boxes` is less than 1.

    Cost: that of `summary`, and up to a second for the layout of 150 boxes. No array is read, copied or kept.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((4, 3))
        >>> drawing = st.draw({"embed": w, "head": w})
        >>> "12 parameters, at 2 places" in drawing.svg  # `drawing.save("model.svg")` writes it
        True

    Limitations: the boxes are as wide as texts are in a usual monospaced font. Drawings of many unequal layers are
    large: choose a `depth`.
    """
    for name, value, least in (("depth", depth, 0), ("boxes", boxes, 1)):
        if value is not None and value < least:
            raise ValueError(f"`{name}` is at least {least}, not {value}.")
    igraph, drawsvg = libraries()
    return drawing_of(Outline(description_of(tree)), depth, boxes, igraph, drawsvg)


def drawing_of(outline: Outline, depth: int | None, most: int, igraph: Any, drawsvg: Any) -> Drawing:
    """The drawing of an outline, by these libraries."""
    boxes = boxes_of(outline, depth=depth, most=most)
    return Drawing(svg_of(boxes, _notes(outline, boxes), igraph=igraph, drawsvg=drawsvg))


def _notes(outline: Outline, boxes: Boxes) -> list[str]:
    description = outline.description
    notes = [f"{figure(description.size.parameters)} parameters"]
    if description.num_ties:
        notes[0] += f"; untied {figure(description.untied_size.parameters)}"
    if boxes.hidden:
        marks = ", ".join(f"#{mark}" for mark in boxes.hidden[:_MOST_HIDDEN])
        marks += f" and {len(boxes.hidden) - _MOST_HIDDEN:,} more" if len(boxes.hidden) > _MOST_HIDDEN else ""
        notes.append(f"ties within what is not drawn: {marks}")
    return notes


_MOST_HIDDEN = 12


def libraries() -> tuple[Any, Any]:
    """The two that draw, igraph and drawsvg.

    Raises:
        ImportError: if one is missing.
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
