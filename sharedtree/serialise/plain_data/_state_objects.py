"""The objects of a tree as a state sees them: static ones too, each once, whatever leads to it."""

from collections.abc import Sequence
from typing import Any

from jax import tree_util as jtu

from ...core._walk import MAX_DEPTH, cycle_error, raise_too_deep
from ._state_forms import Form, form_of


class _Frame:
    __slots__ = ("done", "form", "obj")

    def __init__(self, obj: Any, form: Form) -> None:
        self.obj = obj  # alive while its id is among the open ones
        self.form = form
        self.done = 0


class Objects:
    """Every object of a tree, each once, children before parents, and their forms.

    Raises:
        CycleError: if an object contains itself.
        DepthError: if a class comes apart for ever.
    """

    __slots__ = ("_forms", "in_order")

    def __init__(self, tree: Any) -> None:
        self._forms: dict[int, Form | None] = {}
        # Keeps them all alive, so that an id stands for one object as long as this exists.
        self.in_order: list[Any] = []
        frames: list[_Frame] = []
        open_ids: set[int] = set()  # of the objects in `frames`

        def visit(obj: Any) -> None:
            if id(obj) in self._forms:  # alive in `in_order`
                return
            if id(obj) in open_ids:  # alive in `frames`
                keys = [frame.form.keys[frame.done : frame.done + 1] for frame in frames]
                above = next(i for i, frame in enumerate(frames) if frame.obj is obj)
                raise cycle_error(obj, _text(keys[:above]), _text(keys))
            form = form_of(obj)
            if form is None or not form.parts:
                self._close(obj, form)
                return
            if len(frames) >= MAX_DEPTH:
                raise_too_deep("")
            frames.append(_Frame(obj, form))
            open_ids.add(id(obj))  # alive in `frames`

        visit(tree)
        while frames:
            frame = frames[-1]
            if frame.done == len(frame.form.parts):
                frames.pop()
                open_ids.discard(id(frame.obj))  # alive in `frame`
                self._close(frame.obj, frame.form)
                if frames:
                    frames[-1].done += 1
                continue
            part, depth = frame.form.parts[frame.done], len(frames)
            visit(part)
            if len(frames) == depth:
                frame.done += 1

    def _close(self, obj: Any, form: Form | None) -> None:
        self.in_order.append(obj)
        self._forms[id(obj)] = form  # alive in `in_order`

    def form(self, obj: Any) -> Form | None:
        """The form of an object of the tree."""
        return self._forms[id(obj)]  # alive in `in_order`


def _text(keys: Sequence[tuple[Any, ...]]) -> str:
    return jtu.keystr(tuple([key for each in keys for key in each]))
