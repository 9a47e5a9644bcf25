"""Marks ties where treescope shows a model: a number, the paths of all places, and a click that leads to the next one.

treescope calls *wrapper hooks* for each object that it shows. treescope's own hook marks mutable objects that appear
twice, by their address, and no arrays. The hook of this file, `mark_ties`, works for models of every library, since it
takes the ties from the flat DAG of the model: the records and objects that every transform reads, too.
"""

import contextlib
import contextvars
import html
import importlib
import itertools
from typing import Any, NamedTuple

from ..core._by_identity import IdentityDict
from ..core._errors import SharedTreeError
from ..core._node_types import carries_identity, node_type_of
from ..ties._list_ties import can_be_tied
from ..ties._policy_and_context import walk_alone
from ..tree._dag import Dag, in_treescope

# Most paths of a tie that are shown.
_MOST_PATHS = 8


class _Mark(NamedTuple):
    """Mark of a tied object.

    Attributes:
        number: number of the tie, from 1 on.
        paths: the paths of all its places.
        group: name that all marks of the tie have in common on a page, and no others.
    """

    number: int
    paths: tuple[str, ...]
    group: str


_Marks = IdentityDict[_Mark]
"""Tied object of one model → its mark."""

# Marks of the model that is being shown. None outside of models.
_marks: contextvars.ContextVar[_Marks | None] = contextvars.ContextVar("sharedtree_ties", default=None)

# Number of the next model that is shown. It keeps the names of several models on one page apart.
_view_numbers = itertools.count()


def register() -> None:
    """Makes treescope mark ties in every model shown from now on.

    A tied object has a mark such as `#1` before it at each of its places, and the paths of all places behind it. In a
    notebook, a click on the mark leads to the next place. Ties are numbered in the order of their first places.
    `summary` may have fewer numbers, since it shows equal blocks as one. Further calls of `register` change nothing.

    Raises:
        ImportError: if treescope is not installed. The message says how to install it.

    Cost: each time that a model is shown, one walk over its nodes. Nothing is copied, and nothing is kept.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.show.register()  # doctest: +SKIP
        >>> w = jnp.ones((4, 3))
        >>> treescope.show({"embed": w, "head": w})  # doctest: +SKIP

    Limitations: `register` changes the renderer of the whole process (`treescope.active_renderer`). A model with a
    cycle is shown without marks. A `Dag` has marks without `register`.
    """
    treescope = _import_treescope()
    renderer = treescope.active_renderer.get()
    if mark_ties not in renderer.wrapper_hooks:
        treescope.active_renderer.set_globally(renderer.extended_with(wrapper_hooks=[mark_ties]))


def _import_treescope() -> Any:
    """Imports treescope and returns the module.

    Raises:
        ImportError: if treescope is not installed.
    """
    try:
        return importlib.import_module("treescope")
    except ImportError as error:
        raise ImportError(
            "`sharedtree.show.register` needs treescope. Install it:\n    pip install treescope", name=error.name
        ) from error


def mark_ties(node: Any, path: str | None, node_renderer: Any) -> Any:
    """Shows an object, with its mark if it is tied. The wrapper hook that treescope calls.

    Args:
        node: the object.
        path: its path in the view, which treescope uses for its own links. None if there is none.
        node_renderer: shows an object as it would be shown without this hook.

    Returns:
        The rendering. NotImplemented for an object without a mark, which treescope then shows as usual.
    """
    marks = _marks.get()
    # Inside a model, whose marks are known.
    if marks is not None:
        return _show_with_mark(marks, node, path, node_renderer)
    if node_type_of(node) is None or type(node) is Dag:
        # A leaf has no ties. A `Dag` shows its model by `_show_dag`, and this hook is called for that model.
        return NotImplemented
    # The outermost node of a model. It is shown here, even without a mark, so that `_marks` holds for all below it.
    token = _marks.set(_marks_of(node))
    try:
        marked = _show_with_mark(_marks.get(), node, path, node_renderer)
        return node_renderer(node, path) if marked is NotImplemented else marked
    finally:
        _marks.reset(token)


def _marks_of(tree: Any) -> _Marks:
    """Returns the marks of a model. None at all for a model that cannot be walked, such as one with a cycle."""
    with contextlib.suppress(SharedTreeError):
        flat_dag = walk_alone(tree)
        group = f"sharedtree-{next(_view_numbers)}"
        # Record of each tied object → the paths of its places.
        ties = {
            record: paths
            for record, paths in flat_dag.paths_of_edges.items()
            if len(paths) > 1 and can_be_tied(flat_dag.records[record][0])
        }
        marks: _Marks = IdentityDict()
        for number, (record, paths) in enumerate(ties.items(), 1):
            tied = flat_dag.objects[record]
            # Not for Python numbers, which are one object in many places by accident.
            if node_type_of(tied) is not None or carries_identity(tied):
                marks[tied] = _Mark(number, tuple(paths), f"{group}-{number}")
        return marks
    return IdentityDict()


def _show_with_mark(marks: _Marks | None, node: Any, path: str | None, node_renderer: Any) -> Any:
    """Shows an object with its mark before it and the paths of all places behind it.

    Args:
        marks: the marks of the model, or None.
        node: the object.
        path: see `mark_ties`.
        node_renderer: see `mark_ties`.

    Returns:
        The rendering, or NotImplemented for an object without a mark.
    """
    mark = None if marks is None else marks.get(node)
    if mark is None:
        return NotImplemented
    parts = importlib.import_module("treescope.rendering_parts")
    rendering = node_renderer(node, path)
    paths = [place or "(root)" for place in mark.paths[:_MOST_PATHS]]
    if len(mark.paths) > _MOST_PATHS:
        paths.append(f"... {len(mark.paths) - _MOST_PATHS:,} more places")
    # The annotations of `rendering` are dropped: treescope's own hook names there the same object by its address.
    return parts.RenderableAndLineAnnotations(
        renderable=parts.siblings(_link(parts, mark), rendering.renderable),
        annotations=parts.comment_color(parts.text(f"  # tie #{mark.number}: {' = '.join(paths)}")),
    )


# CSS of a mark.
_STYLE = (
    "color:#c65d1e;border:1.5px solid;border-radius:4px;padding:0 3px;margin-right:1ch;font-weight:bold;cursor:pointer"
)

# JavaScript of a click on a mark: it opens all that is folded around the next place, and scrolls there. A plain link
# would not do, since treescope puts its output into a shadow root, and links to names do not lead into those.
_NEXT_PLACE = (
    "event.preventDefault();event.stopPropagation();"
    "const all=[...this.getRootNode().querySelectorAll('[data-tie=&quot;'+this.dataset.tie+'&quot;]')];"
    "const to=all[(all.indexOf(this)+1)%all.length];"
    "for(let up=to.parentElement;up;up=up.parentElement)if(up.classList.contains('foldable_node'))"
    "for(const box of up.querySelectorAll(':scope>input,:scope>label>input'))box.checked=true;"
    "to.scrollIntoView({block:'center'});to.focus()"
)


def _link(parts: Any, mark: _Mark) -> Any:
    """Makes the mark that stands before an object: a link in HTML, plain text in a terminal.

    Args:
        parts: the module `treescope.rendering_parts`.
        mark: the mark.
    """
    text = f"#{mark.number}"
    title = html.escape("one object at " + ", ".join(place or "(root)" for place in mark.paths[:_MOST_PATHS]))

    # treescope is imported only when it is used, so its base class is not available at the level of the module.
    class Link(parts.RenderableTreePart):
        """Mark to click on. treescope requires these methods of a part of a rendering."""

        def _compute_collapsed_width(self) -> int:
            return len(text) + 1

        def _compute_newlines_in_expanded_parent(self) -> int:
            return 0

        def _compute_layout_marks_in_this_part(self) -> frozenset[Any]:
            return frozenset()

        def foldables_in_this_part(self) -> tuple[Any, ...]:
            return ()

        def html_setup_parts(self, _context: Any, /) -> set[Any]:
            return set()

        def render_to_html(self, stream: Any, **_: Any) -> None:
            stream.write(
                f'<a role="button" tabindex="0" data-tie="{mark.group}" title="{title}" style="{_STYLE}" '
                f'onclick="{_NEXT_PLACE}">{text}</a>'
            )

        def render_to_text(self, stream: Any, **_: Any) -> None:
            stream.write(f"{text} ")

    return Link()


def _show_dag(dag: Dag[Any], path: str | None, subtree_renderer: Any) -> Any:
    """Shows a `Dag` as `Dag(...)` around its model, whose ties are marked even if `register` was not called.

    Args:
        dag: the `Dag`.
        path: its path in the view. None if there is none.
        subtree_renderer: shows an object with the current renderer.
    """
    treescope = _import_treescope()
    parts = importlib.import_module("treescope.rendering_parts")
    renderer = treescope.active_renderer.get()
    if mark_ties in renderer.wrapper_hooks:
        rendering = subtree_renderer(dag.tree, path=None if path is None else f"{path}.tree")
    else:
        marking = renderer.extended_with(wrapper_hooks=[mark_ties])
        rendering = marking.to_foldable_representation(dag.tree)
    return parts.build_foldable_tree_node_from_children(
        prefix=parts.siblings(parts.text("Dag(")),
        children=[rendering],
        suffix=")",
        path=path,
    )


# `Dag` calls the entry of this list when treescope shows it. So `tree` need not import `show`.
in_treescope[:] = [_show_dag]
