"""Ties in treescope's views of models: a mark, the paths of all places, and a click that leads to the next of them.

treescope calls a hook for each object that it shows. Its own marks what can be mutated and comes twice, without arrays,
by its address. Ours knows what is tied from the walk that every transform uses, for models of every library.
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

_MOST_PATHS = 8


class _Mark(NamedTuple):
    number: int
    paths: tuple[str, ...]
    group: str


_Marks = IdentityDict[_Mark]
"""The ties of one model: each tied object with the mark of its tie."""

_marks: contextvars.ContextVar[_Marks | None] = contextvars.ContextVar("sharedtree_ties", default=None)

_views = itertools.count()  # tells views on one page apart


def register() -> None:
    """Lets treescope mark what is tied, in whatever it shows from now on, for models of every library.

    What is one object at several places has `#1` before it at each of them, and behind it the other paths. In a
    notebook, a click on the mark leads to the next place. Numbers count the ties in the order in which they come first;
    where `summary` shows equal blocks as one, its numbers are fewer. Calling it again changes nothing.

    Raises:
        ImportError: if treescope is not installed; it says how to.

    Cost: when something is shown, one walk over its nodes. Nothing is copied, and nothing is kept.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.show.register()  # doctest: +SKIP
        >>> w = jnp.ones((4, 3))
        >>> treescope.show({"embed": w, "head": w})  # doctest: +SKIP

    Limitations: it changes the renderer of the whole process (`treescope.active_renderer`). What has a cycle is shown
    without marks. A `Dag` has its marks without this.
    """
    treescope = _library()
    renderer = treescope.active_renderer.get()
    if mark_ties not in renderer.wrapper_hooks:
        treescope.active_renderer.set_globally(renderer.extended_with(wrapper_hooks=[mark_ties]))


def _library() -> Any:
    try:
        return importlib.import_module("treescope")
    except ImportError as error:
        raise ImportError(
            "`sharedtree.show.register` needs treescope. Install it:\n    pip install treescope", name=error.name
        ) from error


def mark_ties(node: Any, path: str | None, node_renderer: Any) -> Any:
    """The hook: shows an object as ever, with the mark of its tie if it has one."""
    marks = _marks.get()
    if marks is not None:
        return _marked(marks, node, path, node_renderer)
    if node_type_of(node) is None or type(node) is Dag:
        return NotImplemented
    token = _marks.set(_marks_of(node))
    try:
        # What it holds is shown meanwhile, also if it has no mark itself.
        marked = _marked(_marks.get(), node, path, node_renderer)
        return node_renderer(node, path) if marked is NotImplemented else marked
    finally:
        _marks.reset(token)


def _marks_of(tree: Any) -> _Marks:
    # What cannot be walked, such as a cycle, is shown as treescope shows it.
    with contextlib.suppress(SharedTreeError):
        walked = walk_alone(tree)
        group = f"sharedtree-{next(_views)}"
        tied = [
            (number, paths)
            for number, paths in walked.paths_of_edges.items()
            if len(paths) > 1 and can_be_tied(walked.records[number][0])
        ]
        return IdentityDict(
            (walked.objects[number], _Mark(mark, tuple(paths), f"{group}-{mark}"))
            for mark, (number, paths) in enumerate(tied, 1)
            if node_type_of(walked.objects[number]) is not None or carries_identity(walked.objects[number])
        )
    return IdentityDict()


def _marked(marks: _Marks | None, node: Any, path: str | None, node_renderer: Any) -> Any:
    mark = None if marks is None else marks.get(node)
    if mark is None:
        return NotImplemented
    parts = importlib.import_module("treescope.rendering_parts")
    shown = node_renderer(node, path)
    paths = [place or "(root)" for place in mark.paths[:_MOST_PATHS]]
    if len(mark.paths) > _MOST_PATHS:
        paths.append(f"... {len(mark.paths) - _MOST_PATHS:,} more places")
    # In place of treescope's own remark, which names the same object by its address.
    return parts.RenderableAndLineAnnotations(
        renderable=parts.siblings(_link(parts, mark), shown.renderable),
        annotations=parts.comment_color(parts.text(f"  # tie #{mark.number}: {' = '.join(paths)}")),
    )


_STYLE = (
    "color:#c65d1e;border:1.5px solid;border-radius:4px;padding:0 3px;margin-right:1ch;font-weight:bold;cursor:pointer"
)

# A view lies in a shadow of the page, where links to names do not lead. Whatever is folded around the place opens.
_NEXT_PLACE = (
    "event.preventDefault();event.stopPropagation();"
    "const all=[...this.getRootNode().querySelectorAll('[data-tie=&quot;'+this.dataset.tie+'&quot;]')];"
    "const to=all[(all.indexOf(this)+1)%all.length];"
    "for(let up=to.parentElement;up;up=up.parentElement)if(up.classList.contains('foldable_node'))"
    "for(const box of up.querySelectorAll(':scope>input,:scope>label>input'))box.checked=true;"
    "to.scrollIntoView({block:'center'});to.focus()"
)


def _link(parts: Any, mark: _Mark) -> Any:
    text = f"#{mark.number}"
    title = html.escape("one object at " + ", ".join(place or "(root)" for place in mark.paths[:_MOST_PATHS]))

    class Link(parts.RenderableTreePart):  # the library is imported when it is used, so its classes are known only here
        """A mark that can be clicked."""

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
    """`Dag(...)`, with the ties of its model marked, whether `register` was called or not."""
    treescope = _library()
    parts = importlib.import_module("treescope.rendering_parts")
    renderer = treescope.active_renderer.get()
    if mark_ties in renderer.wrapper_hooks:
        shown = subtree_renderer(dag.tree, path=None if path is None else f"{path}.tree")
    else:
        marking = renderer.extended_with(wrapper_hooks=[mark_ties])
        shown = marking.to_foldable_representation(dag.tree)
    return parts.build_foldable_tree_node_from_children(
        prefix=parts.siblings(parts.text("Dag(")),
        children=[shown],
        suffix=")",
        path=path,
    )


in_treescope[:] = [_show_dag]
