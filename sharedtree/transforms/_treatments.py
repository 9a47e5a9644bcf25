"""One object, two treatments: what a transform would do to an object at each of its paths must be one thing."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from .._errors import InconsistentSharingError
from .._prefix import label_at, labels
from .._structure import LEAF, Record, edges
from ._crossing import Argument, Names


def require_one_treatment(
    arguments: Iterable[tuple[Argument, Any]],
    records: Sequence[Record],
    names: Names,
    *,
    transform: str,
    fix: str,
    is_label: Callable[[Any], bool] = lambda _: True,
    name: str = "prefix",
    describe: Callable[[Any], str] = str,
    resolve: Callable[[Any, int], Any] = lambda label, _: label,
) -> dict[int, Any]:
    """Finds what the transform does to each traced leaf.

    Args:
        arguments: each packed module with its treatment, or with a prefix tree of treatments.
        records: of all arguments.
        names: for paths.
        transform: its name, for the error.
        fix: the last lines of the error.
        is_label: whether an object in a prefix is a treatment.
        name: what the prefix is called.
        describe: treatment → words.
        resolve: (treatment, record) → treatment, for those that depend on the leaf.

    Returns:
        record → treatment.

    Raises:
        InconsistentSharingError: if a leaf has two treatments; names every path of it, with its treatment there.
    """
    arguments = list(arguments)
    found: dict[int, dict[str, Any]] = {}
    for argument, treatment in arguments:
        for label in labels(treatment, records, argument.structure.root, is_label, name):
            if records[label.record][0] is not LEAF:
                continue
            at_paths = found.setdefault(label.record, {})
            at_paths[names.text(argument.position, (*argument.path, *label.path))] = resolve(label.label, label.record)
            first, *others = at_paths.values()
            if any(type(other) is not type(first) or other != first for other in others):
                everywhere = _everywhere(label.record, arguments, records, names, is_label, resolve)
                _raise_inconsistent(transform, fix, everywhere | at_paths, describe)
    return {record: next(iter(at_paths.values())) for record, at_paths in found.items()}


def _everywhere(
    record: int,
    arguments: Sequence[tuple[Argument, Any]],
    records: Sequence[Record],
    names: Names,
    is_label: Callable[[Any], bool],
    resolve: Callable[[Any, int], Any],
) -> dict[str, Any]:
    """Every path of a leaf, as far as they lead through first paths within an argument, with its treatment there."""
    at_paths: dict[str, Any] = {}
    for argument, treatment in arguments:
        root = argument.structure.root
        for number, path in edges(records, [((), root)]):
            if number == record:
                label = resolve(label_at(treatment, records, root, path, is_label), record)
                at_paths[names.text(argument.position, (*argument.path, *path))] = label
    return at_paths


def _raise_inconsistent(transform: str, fix: str, at_paths: dict[str, Any], describe: Callable[[Any], str]) -> NoReturn:
    treatments = [describe(treatment) for treatment in at_paths.values()]
    lines = [f"    `{path}`: {treatment}" for path, treatment in zip(at_paths, treatments, strict=True)]
    raise InconsistentSharingError(
        "\n".join([f"One object, but `{transform}` would treat its occurrences differently:", *lines, fix]),
        tuple(at_paths),
        treatments,
    )


def part_them(names: Names, arguments: Iterable[Argument]) -> str:
    """The fix that always works: give each occurrence an object of its own."""
    involved = list(dict.fromkeys(names.text(argument.position) for argument in arguments))
    all_of_them = ", ".join(involved)
    parted = f"({all_of_them}), lambda t: t[1:]" if len(involved) > 1 else all_of_them
    return f"Treat them alike, or part them before the call:\n    {all_of_them} = sharedtree.untie({parted})"
