"""Trees in Orbax checkpoints, for many machines: `sharedtree.orbax.save` and `sharedtree.orbax.restore`.

Orbax writes and reads the arrays: asynchronously, from many processes, with retention, to any file system that it
knows. For the rest of the tree, the manifest is saved beside the arrays. A *step* is one checkpoint of a manager, with
a number. An *item* is a part of a step with a name. A step of ours has two:

    arrays      each distinct array once
    manifest    the manifest's text with its digest. `docs/format.md` describes both

Orbax is imported when one of the functions is called.
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
# Errors of `load` offer calls that begin like the first text. In errors of `restore`, the second takes its place.
_LOAD, _RESTORE = "sharedtree.load(path", "sharedtree.orbax.restore(manager, step"
# The module of Orbax's arguments, in code that errors print.
_ARGS = "orbax.checkpoint.args"
# How many items of a step an error lists.
_MAX_ITEMS = 20


def __dir__() -> list[str]:
    """Returns the public names only. This file is the public module `sharedtree.orbax`, so users complete its names."""
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
        manager: an `orbax.checkpoint.CheckpointManager`. If it was made with `item_names`, they have to include
            `"arrays"`, `"manifest"` and the names in `items`.
        step: the number of the step.
        tree: as for `sharedtree.save`, but arrays may be sharded over the devices of many processes.
        leave_out: as for `sharedtree.save`.
        items: further items to save in the same step, such as the state of a data loader: name → Orbax's arguments for
            it.
        **options: options of `CheckpointManager.save`: `metrics`, `force`, `custom_metadata`.

    Returns:
        True if the step was saved. False if the manager skips it.

    Raises:
        UnserialisableError: if the tree holds something that cannot be saved. All such values are listed. Nothing was
            written.
        CycleError: if an object contains itself.
        TypeError: if `manager` is not a `CheckpointManager`.
        ValueError: if `items` has one of our own names, or the tree has nothing at an entry of `leave_out`; or from
            Orbax, if the step exists.
        ImportError: if Orbax is not installed.

    Cost: if the manager does not skip the step, one walk over the nodes, and the cost of Orbax. Orbax gets most arrays
    as they are. PRNG keys, and dtypes that TensorStore lacks, are copied.

    Limitations: of an array that each process holds for itself, as a NumPy array or on its own devices, the first
    process writes its own. So it must be the same in all. Orbax keeps no digests of arrays of more than 1 KiB,
    so a flipped bit in them goes unnoticed; `sharedtree.save` has digests. A manager of Orbax's reads an item with the
    kind of arguments that it has used first. To read `arrays` by hand, use `PyTreeRestore`, or another manager.

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
    ocp = _import_orbax()
    _require_manager(manager, "should_save")
    reserved_names = sorted({_ARRAYS, _MANIFEST} & set(items or ()))
    if reserved_names:
        name = reserved_names[0]
        raise ValueError(
            f"`items` has the name `{name}`, under which the tree itself is saved. Give the item another name:\n"
            f'    sharedtree.orbax.save(manager, step, tree, items={{"my_{name}": items["{name}"]}})'
        )
    # 2. Ask the manager if it wants the step, before the tree is walked.
    if not options.get("force") and not manager.should_save(step):
        return False
    # 3. Encode the tree: a manifest, and the distinct arrays.
    encoded = encode(tree, leave_out)
    text = json.dumps(encoded.manifest, separators=(",", ":"), check_circular=False)
    arrays: dict[str, Any] = {}
    for fields, array in zip(encoded.manifest["arrays"], encoded.arrays, strict=True):
        # In the manifest, an entry is a dictionary, and its shape a list.
        entry = ArrayEntry(**{**fields, "shape": tuple(fields["shape"])})
        if is_in_checkpoint(entry):
            arrays[key_of(entry)] = to_orbax_form(entry, array)
    # 4. Pass both to Orbax, and the user's items.
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
    """Restores a tree that `sharedtree.orbax.save` has saved. It needs no template, and not as many devices as before.

    Names are judged and looked up as by `sharedtree.load`, before any array is read.

    Args:
        manager: an `orbax.checkpoint.CheckpointManager` for the folder.
        step: the number of the step; None for the latest.
        trusted: classes and functions, as for `sharedtree.load`.
        like: a template, as for `sharedtree.load`.
        select: the part to restore, as for `sharedtree.load`.
        sharding: where JAX arrays go, as for `sharedtree.load`. Each process reads its own shards. If neither this nor
            the template says where an array goes, the whole array goes to the default device.
        strict: as for `sharedtree.load`: False to get the template and a report instead of an error for differences.
        renames: new names for old ones, as for `sharedtree.load`.

    Returns:
        The tree; with `strict=False` and a template, a pair (tree, report).

    Raises:
        UntrustedTypeError: as `sharedtree.load`, before any array is read.
        StructureMismatchError: as `sharedtree.load`, for an array that cannot be sharded as asked, for example; and if
            there is no memory for the arrays.
        FormatError: if the step has no manifest, or one that is malformed or of a newer version; if it has other arrays
            than its manifest says; or if Orbax fails for another reason. Shapes, dtypes and sizes are compared before
            any array is read.
        CorruptFileError: if the manifest was changed, or Orbax finds that arrays are damaged or missing.
        MissingStepError: if the step does not exist, or there is no step at all.
        TypeError: if `manager` is not a `CheckpointManager`, or `select` or `sharding` has a type that it may not have.
        ImportError: if Orbax is not installed.

    Cost: one walk over the nodes. Orbax reads the metadata of all arrays (about 0.5 ms each), then the arrays. Without
    a sharding, the whole array passes through the memory of the host.

    Limitations: since Orbax compresses, a forged step is refused only if its arrays have more than 65,536 times as many
    bytes as its files. With `select`, the metadata of all arrays is read nevertheless.

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
    ocp = _import_orbax()
    _require_manager(manager, "directory")
    trust = Trust(trusted, names_in(like) if like is not None else None)
    step = manager.latest_step() if step is None else step
    if step is None:
        raise _missing_step_error(manager, step)
    label = printable(f"{manager.directory}/{step}")
    with _errors_offer_restore(manager, step):
        # 2. Read the manifest.
        manifest = _read_manifest(ocp, manager, step, label)
        # 3. Plan: every name is judged before any array is read.
        plan = Plan(manifest, label, trust, like=like, select=select, sharding=sharding, strict=strict, renames=renames)
        # 4. Read the arrays. 5. Build the tree.
        return plan.build_tree(_read_arrays(ocp, manager, step, label, plan, manifest.arrays))


@contextlib.contextmanager
def _errors_offer_restore(manager: Any, step: int) -> Iterator[None]:
    """Changes the texts of errors in the `with` block, which are written for `load` or know no steps.

    Calls of `load` become calls of `restore`, and the advice to restore another step becomes a call with its number.
    """
    try:
        yield
    except SharedTreeError as error:
        advice = ANOTHER_STEP
        if any(type(arg) is str and ANOTHER_STEP in arg for arg in error.args):
            # If the manager cannot list the steps, whatever it raises, the advice stays as it is.
            with contextlib.suppress(Exception):
                other_steps = [other_step for other_step in sorted(manager.all_steps()) if other_step != step]
                advice = "There is no other step."
                if other_steps:
                    advice = f"Restore another step:\n    sharedtree.orbax.restore(manager, {other_steps[-1]})"
        texts = [arg.replace(ANOTHER_STEP, advice) if type(arg) is str else arg for arg in error.args]
        error.args = tuple([text.replace(_LOAD, _RESTORE) if type(text) is str else text for text in texts])
        raise


def _require_manager(manager: Any, attribute: str) -> None:
    """Raises `TypeError` unless an object has an attribute of managers. A path or a `Checkpointer` does not have it.

    Args:
        manager: the object that the user has passed.
        attribute: name of the attribute.
    """
    if not hasattr(manager, attribute):
        is_path = isinstance(manager, str | os.PathLike)
        folder = repr(os.path.abspath(os.fsdecode(manager))) if is_path else "folder"
        raise TypeError(
            f"A `{type(manager).__qualname__}` is no `CheckpointManager` of Orbax's. Make one:\n"
            f"    manager = orbax.checkpoint.CheckpointManager({folder})"
        )


def _missing_step_error(manager: Any, step: int | None) -> MissingStepError:
    """Returns the error for a step that does not exist. It lists those that do. None stands for the latest step."""
    folder, steps = printable(str(manager.directory)), sorted(manager.all_steps())
    if not steps:
        return MissingStepError(f"`{folder}` has no checkpoint yet.")
    listed = ", ".join(map(str, [*steps[:20], *(["..."] if len(steps) > 20 else [])]))
    return MissingStepError(
        f"`{folder}` has no step {step}. It has {listed}. Restore one of these:\n"
        f"    sharedtree.orbax.restore(manager, {steps[-1]})"
    )


def _import_orbax() -> Any:
    """Returns the module `orbax.checkpoint`. Raises `ImportError`, with the command to install it, if it is missing."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "`sharedtree.orbax` needs Orbax. Install it:\n    pip install orbax-checkpoint", name=error.name
        ) from error
    return orbax.checkpoint


def _read_manifest(ocp: Any, manager: Any, step: int, label: str) -> Manifest:
    """Reads the manifest of a step, checks its digest, and parses it.

    Args:
        ocp: the module `orbax.checkpoint`.
        manager: the manager.
        step: number of the step.
        label: name of the step, for errors.

    Raises:
        MissingStepError: if the step does not exist.
        FormatError: if the step has no readable manifest, or it is malformed or of a newer version.
        CorruptFileError: if the manifest does not match its digest.
    """
    item: Any = None
    # The reason in the error, unless Orbax raises one with a better reason.
    why = "it is not what `sharedtree.orbax.save` writes"
    try:
        item = manager.restore(step, args=ocp.args.Composite(**{_MANIFEST: ocp.args.JsonRestore()}))[_MANIFEST]
    # With a damaged checkpoint, Orbax may raise any error.
    except Exception as error:  # noqa: BLE001
        if isinstance(error, FileNotFoundError):
            # The manager remembers the steps that it saw. Another program may have removed this one since.
            manager.reload()
            if step not in manager.all_steps():
                raise _missing_step_error(manager, step) from None
        why = _error_text(error)
    text = item.get(_TEXT) if type(item) is dict and item.keys() == {_TEXT, _CRC} else None
    if type(text) is not str or not is_unicode(text):
        folder = _folder_of(manager, step)
        label = label if folder is None else printable(str(folder))
        items = _items_in(folder)
        if _MANIFEST in items:
            fact = f"`{label}` has no readable manifest, the entry in which `sharedtree.orbax.save` describes the tree"
            raise not_restored_error(f"{fact}: {why}\nIt is damaged, or another program wrote it. ")
        # It is a step of another program.
        raise FormatError(
            f"`{label}` was written by Orbax alone, not by `sharedtree.orbax.save`, or it is damaged: it has no "
            "readable manifest, the entry that describes the tree.\n"
            "If Orbax alone wrote it, restore it with Orbax:\n"
            f"    manager.restore(step, args={_arguments_for(items)})\n"
            f"Orbax says: {why}"
        )
    if item[_CRC] != _crc(text):
        fact = "is not what was written: it does not have the digest that was saved with it. "
        raise not_restored_error(f"The manifest of `{label}` {fact}", CorruptFileError)
    return parse_manifest(text)


def _folder_of(manager: Any, step: int) -> Any:
    """Returns the folder of a step; None if it cannot be found, or if several folders may be meant.

    Its name is the number of the step. A manager may put a prefix and zeros before it: `model_007`.
    """
    # Orbax supports many file systems, which may raise anything.
    with contextlib.suppress(Exception):
        folders = [path for path in manager.directory.iterdir() if re.fullmatch(rf"(.*\D)?0*{step}", path.name)]
        # Several folders may end like that: `7`, and `old_7`.
        if len(folders) > 1:
            folders = [path for path in folders if path.name == str(step)]
        return folders[0] if folders else None
    return None


def _items_in(folder: Any) -> dict[str, bool]:
    """Returns the items of a step on the disk: name → True if the item is a JSON value.

    The result is empty if they cannot be listed.

    Args:
        folder: folder of the step, one of Orbax's path objects; None if it is not known.
    """
    items: dict[str, bool] = {}
    # The file system may raise anything. If there is no folder, this raises `AttributeError`.
    with contextlib.suppress(Exception):
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                # Orbax writes a JSON value into one file of this name.
                items[path.name] = (path / "metadata").exists()
    return items


def _arguments_for(items: Mapping[str, bool]) -> str:
    """Returns the code of Orbax's arguments with which to restore some items.

    Args:
        items: name → True if the item is a JSON value. Orbax calls an item without a name `default`.
    """
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
    """Reads the arrays that a plan wants, and puts them where they go.

    Before any is read, shapes, dtypes and sizes in Orbax's metadata are compared with the manifest.

    Args:
        ocp: the module `orbax.checkpoint`.
        manager: the manager.
        step: number of the step.
        label: name of the step, for errors.
        plan: the plan, which has the entries of the wanted arrays, and their placements.
        saved: entries of all arrays in the manifest.

    Returns:
        The arrays in the order of `plan.wanted`.
    """
    # Arrays without bytes are in the manifest alone. `wanted` and `every` have the others: key → Orbax's argument.
    placements = placements_of(plan.wanted, plan.place)
    pairs = zip(plan.wanted, placements, strict=True)
    stored = [(entry, placement) for entry, placement in pairs if is_in_checkpoint(entry)]
    wanted = {key_of(entry): _restore_args(ocp, entry, placement) for entry, placement in stored}
    every = {key_of(entry): ocp.PLACEHOLDER for entry in saved if is_in_checkpoint(entry)}

    def restore_item(item: dict[str, Any], **options: Any) -> Any:
        """Returns the arrays that Orbax restores for the keys of `item`."""
        args = ocp.args.PyTreeRestore(item=item, **options)
        return manager.restore(step, args=ocp.args.Composite(**{_ARRAYS: args}))[_ARRAYS]

    read: Any = {}
    if wanted:
        with _errors_of_orbax(label):
            # A manager can read the metadata of an item only after it has restored the item. So it restores a
            # placeholder for each array first, which reads none of them.
            restore_item(every)
            metadata = manager.item_metadata(step)[_ARRAYS]
        require_sound(metadata, stored, label)
        with _errors_of_orbax(label):
            # The values of the item may be anything but placeholders, since `restore_args` say what to restore.
            is_partial = len(wanted) < len(every)
            read = restore_item(dict.fromkeys(wanted, 0), restore_args=wanted, partial_restore=is_partial)
    # `pop` lets go of each array of Orbax's as soon as it is converted.
    arrays = [from_orbax_form(entry, read.pop(key_of(entry), None)) for entry in plan.wanted]
    return place_arrays(plan.wanted, placements, arrays)


def _restore_args(ocp: Any, entry: ArrayEntry, placement: Placement) -> Any:
    """Returns Orbax's arguments for restoring one array. Without a sharding, it is restored as a NumPy array."""
    # A sharding of PRNG keys does not fit their raw data. So the data is read as NumPy's, and the keys are placed
    # later.
    if placement is None or entry.key is not None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    if isinstance(placement, jax.Device):
        placement = jax.sharding.SingleDeviceSharding(placement)
    return ocp.ArrayRestoreArgs(sharding=placement)


@contextlib.contextmanager
def _errors_of_orbax(label: str) -> Iterator[None]:
    """Replaces any error that Orbax raises for a damaged checkpoint by a `CorruptFileError` or a `FormatError`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        text = _error_text(error)
        # TensorStore's texts for damaged and missing data have these words.
        if any(word in text for word in ("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION")):
            fact = f"The arrays of `{label}` are not what was written. Orbax says:\n{text}\n"
            raise not_restored_error(fact, CorruptFileError) from None
        fact = "are not those of its manifest, or Orbax cannot read them. It says"
        raise not_restored_error(f"The arrays of `{label}` {fact}:\n{text}\n") from None


def _error_text(error: BaseException) -> str:
    """Returns the class and the text of another library's error, cut off and with control characters escaped.

    The text may quote the checkpoint, so the error itself is not shown to the user.
    """
    return printable(f"{type(error).__name__}: {str(error)[:1000]}")


def _crc(text: str) -> str:
    """Returns the digest of a manifest: its CRC-32, as eight hexadecimal digits."""
    return f"{zlib.crc32(text.encode()):08x}"
