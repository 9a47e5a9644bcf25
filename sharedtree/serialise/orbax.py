"""The same trees through Orbax, for many machines: `sharedtree.orbax.save` and `sharedtree.orbax.restore`.

Orbax writes and reads the arrays: asynchronously, from many processes, with retention, onto any file system that it
knows. It lacks the rest of the tree, so the manifest is saved beside the arrays. A step has two items:

    arrays      each distinct array once
    manifest    a text with its digest, as `docs/format.md` describes it

Orbax itself is imported when one of the functions is called.
"""

import contextlib
import json
import keyword
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..core._errors import CorruptFileError, FormatError, MissingStepError, SharedTreeError
from ..core._printing import printable
from .arrays._orbax_forms import (
    ANOTHER_STEP,
    from_orbax_form,
    is_in_checkpoint,
    key_of,
    not_restored_error,
    require_sound,
    to_orbax_form,
)
from .arrays._placing import ArrayEntry, Placement, Select, Shardings, place_arrays, placements_of
from .container._header import is_unicode
from .trust._trusted_names import Trust, Trusted
from .values._changed_classes import Renames
from .values._decoding import Plan
from .values._encoding import encode, names_in
from .values._manifest import Manifest, parse_manifest

__all__ = ["restore", "save"]

# Names of the items, and of the two values in the manifest's item. They are on disk.
_ARRAYS, _MANIFEST = "arrays", "manifest"
_TEXT, _CRC = "sharedtree", "sharedtree.crc32"
# Errors of `load` offer the first call, and here it becomes the second.
_LOAD, _RESTORE = "sharedtree.load(path", "sharedtree.orbax.restore(manager, step"
_ARGS = "orbax.checkpoint.args"
# How many items of a step an error lists.
_MAX_ITEMS = 20


def __dir__() -> list[str]:
    """Returns the public names, since this file is the public module."""
    return __all__


def save(
    manager: Any,
    step: int,
    tree: Any,
    *,
    leave_out: str | Iterable[str] = (),
    items: Mapping[str, Any] | None = None,
    **options: Any,
) -> bool:
    """Saves a tree as a step of an Orbax `CheckpointManager`, each shared array once.

    The manager decides about intervals, retention and asynchronous writing. As soon as this function returns, the
    arrays may be donated and changed. Every process calls it with the same tree; each writes its own shards.

    Args:
        manager: an `orbax.checkpoint.CheckpointManager`, made without `item_names`, or with `"arrays"`, `"manifest"`
            and those of `items`.
        step: the number of the step.
        tree: as for `sharedtree.save`, but arrays may be sharded over the devices of many processes.
        leave_out: as for `sharedtree.save`.
        items: more to save in the same step, such as the state of a data loader: Orbax's arguments, by name.
        **options: of `CheckpointManager.save`: `metrics`, `force`, `custom_metadata`.

    Returns:
        True if the step was saved. False if the manager skips it.

    Raises:
        UnserialisableError: if the tree holds something that cannot be saved. All of it is listed. Nothing was written.
        CycleError: if an object contains itself.
        TypeError: if `manager` is no `CheckpointManager`.
        ValueError: if `items` has a name that is taken, or the tree has nothing at a path in `leave_out`; or from
            Orbax, if the step exists.
        ImportError: if Orbax is not installed.

    Cost: one walk over the nodes, if the step is to be saved at all, and the cost of Orbax. Orbax gets arrays as they
    are, but for PRNG keys and dtypes TensorStore lacks, which are copied.

    Limitations: an array each process holds for itself, a NumPy array or a JAX array on its own devices, must be
    the same in all: the first process writes it. Orbax keeps no digests of the data of arrays of more than 1 KiB, so a
    flipped bit in them goes unnoticed; `sharedtree.save` has digests. In one manager, Orbax reads the items of a step
    with the kind of arguments it saw first: to read `arrays` by hand, use `PyTreeRestore`, or another manager.

    Example:
        >>> import tempfile, jax.numpy as jnp, orbax.checkpoint as ocp, sharedtree as st
        >>> w = jnp.ones(3)
        >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     saved = st.orbax.save(manager, 7, {"embed": w, "head": w, "name": "tied"})
        ...     model = st.orbax.restore(manager)
        >>> saved, model["embed"] is model["head"], model["name"]
        (True, True, 'tied')
    """
    # 1. Check the arguments.
    ocp = _orbax()
    _require_manager(manager, "should_save")
    taken = sorted({_ARRAYS, _MANIFEST} & set(items or ()))
    if taken:
        raise ValueError(
            f"`items` has the name `{taken[0]}`, under which the tree itself is saved. Give the item another name:\n"
            f'    sharedtree.orbax.save(manager, step, tree, items={{"my_{taken[0]}": items["{taken[0]}"]}})'
        )
    # 2. Ask the manager, before the tree is walked.
    if not options.get("force") and not manager.should_save(step):
        return False
    # 3. Encode the tree: a manifest, and the distinct arrays.
    encoded = encode(tree, leave_out)
    text = json.dumps(encoded.manifest, separators=(",", ":"), check_circular=False)
    arrays: dict[str, Any] = {}
    for fields, array in zip(encoded.manifest["arrays"], encoded.arrays, strict=True):
        entry = ArrayEntry(**{**fields, "shape": tuple(fields["shape"])})
        if is_in_checkpoint(entry):
            arrays[key_of(entry)] = to_orbax_form(entry, array)
    # 4. Pass both to Orbax.
    args = {**(items or {}), _MANIFEST: ocp.args.JsonSave({_TEXT: text, _CRC: _crc(text)})}
    # Orbax refuses an empty item.
    if arrays:
        args[_ARRAYS] = ocp.args.PyTreeSave(arrays)
    return manager.save(step, args=ocp.args.Composite(**args), **options)


def restore(
    manager: Any,
    step: int | None = None,
    *,
    trusted: Trusted | Iterable[Trusted] = (),
    like: Any = None,
    select: Select = None,
    sharding: Shardings = None,
    strict: bool = True,
    renames: Renames | None = None,
) -> Any:
    """Restores a tree of `sharedtree.orbax.save`. No template is needed, and any number of devices will do.

    Names are looked up as `sharedtree.load` does, and before any array is read.

    Args:
        manager: an `orbax.checkpoint.CheckpointManager` for the folder.
        step: the number of the step. Default: the latest.
        trusted: classes and functions, as for `sharedtree.load`.
        like: a template, as for `sharedtree.load`.
        select: a part to restore: a path, or a function from the name of an array.
        sharding: where JAX arrays go. Each process reads its own shards. If neither this nor the template says it, the
            whole array goes to the default device.
        strict: False to get the template and a report instead of an error for differences.
        renames: old name → new name, for what was renamed since.

    Returns:
        The tree; with `strict=False` and a template, (tree, report).

    Raises:
        UntrustedTypeError: as `sharedtree.load`, before any array is read.
        StructureMismatchError: as `sharedtree.load`, and if there is no memory for the arrays.
        FormatError: if the step has no manifest, a malformed one, or one of a newer version, or other arrays, or if
            Orbax fails in any other way. Shapes, dtypes and sizes were compared before any array was read.
        CorruptFileError: if the manifest was changed, or Orbax finds the arrays damaged or gone.
        MissingStepError: if the step does not exist, or none at all.
        TypeError: if `manager` is no `CheckpointManager`, or `select` or `sharding` is of another type than it may be.
        ImportError: if Orbax is not installed.

    Cost: one walk over the nodes. Orbax reads the metadata of all arrays (about 0.5 ms each), then the arrays. Without
    a sharding, the whole array passes through the memory of the host.

    Limitations: the arrays may have up to 65,536 times as many bytes as the files, since Orbax compresses. With
    `select`, the metadata of all arrays is read all the same.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, orbax.checkpoint as ocp, sharedtree as st
        >>> everywhere = jax.NamedSharding(jax.make_mesh((1,), ("data",)), jax.P())
        >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     saved = st.orbax.save(manager, 0, {"w": jnp.ones(2)})
        ...     again = st.orbax.restore(manager, 0, sharding=everywhere)
        >>> again["w"].sharding == everywhere
        True
    """
    # 1. Check the arguments, make the allow-list, and find the step.
    ocp = _orbax()
    _require_manager(manager, "directory")
    trust = Trust(trusted, names_in(like) if like is not None else None)
    step = manager.latest_step() if step is None else step
    if step is None:
        raise _missing(manager, step)
    label = printable(f"{manager.directory}/{step}")
    with _errors_offer_restore(manager, step):
        # 2. Read the manifest. 3. Plan: every name is judged before any array is read.
        manifest = _read_manifest(ocp, manager, step, label)
        plan = Plan(manifest, label, trust, like=like, select=select, sharding=sharding, strict=strict, renames=renames)
        # 4. Read the arrays. 5. Build the tree.
        return plan.tree(_read_arrays(ocp, manager, step, label, plan, manifest.arrays))


@contextlib.contextmanager
def _errors_offer_restore(manager: Any, step: int) -> Iterator[None]:
    """Makes errors of `load` offer `restore`, and the number of another step."""
    try:
        yield
    except SharedTreeError as error:
        advice = ANOTHER_STEP
        if any(type(arg) is str and ANOTHER_STEP in arg for arg in error.args):
            # The manager may fail in any way, and the advice stays general.
            with contextlib.suppress(Exception):
                other_steps = [other_step for other_step in sorted(manager.all_steps()) if other_step != step]
                advice = "There is no other step."
                if other_steps:
                    advice = f"Restore another step:\n    sharedtree.orbax.restore(manager, {other_steps[-1]})"
        texts = [arg.replace(ANOTHER_STEP, advice) if type(arg) is str else arg for arg in error.args]
        error.args = tuple([text.replace(_LOAD, _RESTORE) if type(text) is str else text for text in texts])
        raise


def _require_manager(manager: Any, needed: str) -> None:
    """Raises `TypeError` unless an object has a method of managers. A path and a `Checkpointer` lack it.

    Args:
        manager: the user's object.
        needed: name of the method.
    """
    if not hasattr(manager, needed):
        is_path = isinstance(manager, str | os.PathLike)
        folder = repr(os.path.abspath(os.fsdecode(manager))) if is_path else "folder"
        raise TypeError(
            f"A `{type(manager).__qualname__}` is no `CheckpointManager` of Orbax's. Make one:\n"
            f"    manager = orbax.checkpoint.CheckpointManager({folder})"
        )


def _missing(manager: Any, step: int | None) -> MissingStepError:
    """Returns the error for a missing step; None stands for the latest."""
    folder, steps = printable(str(manager.directory)), sorted(manager.all_steps())
    if not steps:
        return MissingStepError(f"`{folder}` has no checkpoint yet.")
    listed = ", ".join(map(str, [*steps[:20], *(["..."] if len(steps) > 20 else [])]))
    return MissingStepError(
        f"`{folder}` has no step {step}. It has {listed}. Restore one of these:\n"
        f"    sharedtree.orbax.restore(manager, {steps[-1]})"
    )


def _orbax() -> Any:
    """Imports Orbax, or raises `ImportError` with the command to install it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "`sharedtree.orbax` needs Orbax. Install it:\n    pip install orbax-checkpoint", name=error.name
        ) from error
    return orbax.checkpoint


def _read_manifest(ocp: Any, manager: Any, step: int, label: str) -> Manifest:
    """Returns the manifest of a step, once its digest is checked.

    Raises:
        MissingStepError: if the step does not exist.
        FormatError: if the step has no readable manifest.
        CorruptFileError: if the manifest does not have its digest.
    """
    item: Any = None
    why = "it is not what `sharedtree.orbax.save` writes"
    try:
        item = manager.restore(step, args=ocp.args.Composite(**{_MANIFEST: ocp.args.JsonRestore()}))[_MANIFEST]
    # With a damaged checkpoint, Orbax may raise any error.
    except Exception as error:  # noqa: BLE001
        if isinstance(error, FileNotFoundError):
            # Another program may have removed the step.
            manager.reload()
            if step not in manager.all_steps():
                raise _missing(manager, step) from None
        why = _error_text(error)
    text = item.get(_TEXT) if type(item) is dict and item.keys() == {_TEXT, _CRC} else None
    if type(text) is not str or not is_unicode(text):
        folder = _folder_of(manager, step)
        label = label if folder is None else printable(str(folder))
        fact = f"`{label}` has no manifest that can be read: {why}\nIt was not saved by sharedtree, or it is damaged. "
        items = _items_in(folder)
        if _MANIFEST in items:
            raise not_restored_error(fact)
        raise FormatError(
            f"{fact}What Orbax saved alone, Orbax restores:\n    manager.restore(step, args={_arguments_for(items)})"
        )
    if item[_CRC] != _crc(text):
        fact = "is not what was written: it does not have the digest that was saved with it. "
        raise not_restored_error(f"The manifest of `{label}` {fact}", CorruptFileError)
    return parse_manifest(text)


def _folder_of(manager: Any, step: int) -> Any:
    """Returns the folder of a step; None if it cannot be found.

    A manager may put a prefix and zeros before the number.
    """
    # The folder may be on any file system, which may raise anything.
    with contextlib.suppress(Exception):
        folders = [path for path in manager.directory.iterdir() if re.fullmatch(rf"(.*\D)?0*{step}", path.name)]
        if len(folders) > 1:
            folders = [path for path in folders if path.name == str(step)]
        return folders[0] if folders else None
    return None


def _items_in(folder: Any) -> dict[str, bool]:
    """Returns the items of a step on the disk: name → True if it is a JSON value. Empty if they cannot be listed."""
    items: dict[str, bool] = {}
    # The file system may raise anything, and there may be no folder.
    with contextlib.suppress(Exception):
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                # A JSON value is one file of this name.
                items[path.name] = (path / "metadata").exists()
    return items


def _arguments_for(items: Mapping[str, bool]) -> str:
    """Returns the code of Orbax's arguments for restoring these items. An unnamed item is called `default`."""
    if items.keys() <= {"default"}:
        return f"{_ARGS}.JsonRestore()" if items.get("default") else f"{_ARGS}.StandardRestore(template)"
    arguments: list[str] = []
    for name, is_json in list(items.items())[:_MAX_ITEMS]:
        template = "template" if len(items) == 1 else f"templates[{name!r}]"
        value = f"{_ARGS}.JsonRestore()" if is_json else f"{_ARGS}.StandardRestore({template})"
        is_keyword = name.isidentifier() and not keyword.iskeyword(name)
        arguments.append(f"{name}={value}" if is_keyword else f"**{{{name!r}: {value}}}")
    return f"{_ARGS}.Composite({', '.join(arguments)})"


def _read_arrays(ocp: Any, manager: Any, step: int, label: str, plan: Plan, saved: Sequence[ArrayEntry]) -> list[Any]:
    """Reads the arrays a plan wants, and puts them where they go. Shapes, dtypes and sizes are compared first.

    Args:
        ocp: `orbax.checkpoint`.
        manager: the manager.
        step: number of the step.
        label: name of the step, for errors.
        plan: the wanted arrays and their placements.
        saved: entries of all arrays in the manifest.
    """
    placements = placements_of(plan.wanted, plan.place)
    pairs = zip(plan.wanted, placements, strict=True)
    stored = [(entry, placement) for entry, placement in pairs if is_in_checkpoint(entry)]
    wanted = {key_of(entry): _restore_args(ocp, entry, placement) for entry, placement in stored}
    every = {key_of(entry): ocp.PLACEHOLDER for entry in saved if is_in_checkpoint(entry)}

    def restored(item: dict[str, Any], **options: Any) -> Any:
        args = ocp.args.PyTreeRestore(item=item, **options)
        return manager.restore(step, args=ocp.args.Composite(**{_ARRAYS: args}))[_ARRAYS]

    read: Any = {}
    if wanted:
        with _errors_of_orbax(label):
            # A manager can read the metadata of an item only after it has restored the item. So it restores a
            # placeholder for each array first, which reads none of them.
            restored(every)
            metadata = manager.item_metadata(step)[_ARRAYS]
        require_sound(metadata, stored, label)
        with _errors_of_orbax(label):
            read = restored(dict.fromkeys(wanted, 0), restore_args=wanted, partial_restore=len(wanted) < len(every))
    arrays = [from_orbax_form(entry, read.pop(key_of(entry), None)) for entry in plan.wanted]
    return place_arrays(plan.wanted, placements, arrays)


def _restore_args(ocp: Any, entry: ArrayEntry, placement: Placement) -> Any:
    """Returns Orbax's arguments for restoring one array. Raises JAX's error if it does not fit its sharding."""
    # The sharding of PRNG keys is not that of their data, so they are placed once they are made.
    if placement is None or entry.key is not None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    if isinstance(placement, jax.Device):
        placement = jax.sharding.SingleDeviceSharding(placement)
    # These raise JAX's own errors: for too many axes, and for a size that is no multiple.
    jax.ShapeDtypeStruct(entry.shape, np.uint8, sharding=placement)
    placement.shard_shape(entry.shape)
    return ocp.ArrayRestoreArgs(sharding=placement)


@contextlib.contextmanager
def _errors_of_orbax(label: str) -> Iterator[None]:
    """Turns whatever the parsers of a damaged checkpoint raise into a `CorruptFileError` or a `FormatError`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        text = _error_text(error)
        # TensorStore's words for damaged and missing data.
        if any(word in text for word in ("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION")):
            fact = f"The arrays of `{label}` are not what was written. Orbax says:\n{text}\n"
            raise not_restored_error(fact, CorruptFileError) from None
        fact = "are not those of its manifest, or Orbax cannot read them. It says"
        raise not_restored_error(f"The arrays of `{label}` {fact}:\n{text}\n") from None


def _error_text(error: BaseException) -> str:
    """Returns the escaped text of another library's error.

    The error itself may quote the checkpoint, so it is dropped.
    """
    return printable(f"{type(error).__name__}: {str(error)[:1000]}")


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
