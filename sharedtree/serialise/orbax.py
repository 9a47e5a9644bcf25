"""The same trees through Orbax, for many machines: `sharedtree.orbax.save` and `sharedtree.orbax.restore`.

Orbax writes and reads the arrays: asynchronously, from many processes, with retention, onto any file system that it
knows. What Orbax lacks is the rest of the tree, so its manifest is saved beside them. A step has two items:

- `arrays`: a flat dictionary, in which each distinct array is once, under the name that `sharedtree.save` gives its
  tensor (percent-encoded where that is not plain ASCII; without the arrays that have no elements).
- `manifest`: JSON, `{"sharedtree": text, "sharedtree.crc32": digits}`: the manifest of the file format, which
  `docs/format.md` describes, as a text, and eight hexadecimal digits, the CRC-32 of that text.

Orbax itself is imported when one of the functions is called.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._errors import CorruptFileError, FormatError, SharedTreeError
from .._printable import printable
from .arrays._orbax_arrays import from_stored, is_stored, key_of, to_hand_over, without_elements
from .arrays._orbax_metadata import names_of, require_sound
from .arrays._placing import require_dtypes_of_jax, settled
from .container._header import is_unicode
from .trust._trust import Trust, Trusted
from .values._encoding import encode, names_in
from .values._evolution import Renames
from .values._manifest import ArrayEntry, Manifest, parse_manifest
from .values._plan import Plan, Select, Shardings

_ARRAYS, _MANIFEST = "arrays", "manifest"
_TEXT, _CRC = "sharedtree", "sharedtree.crc32"


def save(manager: Any, step: int, tree: Any, *, items: Mapping[str, Any] | None = None, **options: Any) -> bool:
    """Saves a tree as a step of an Orbax `CheckpointManager`, each shared array once.

    When, how and for how long it is kept are the manager's affairs: intervals, retention, asynchronous writing. As soon
    as this function returns, the arrays may be donated and changed. Every process calls it with the same tree; each
    writes its own shards.

    Args:
        manager: an `orbax.checkpoint.CheckpointManager`, made without `item_names`, or with `"arrays"`, `"manifest"`
            and those of `items`.
        step: the number of the step.
        tree: as for `sharedtree.save`, but arrays may be sharded over the devices of many processes.
        items: more to save in the same step, such as the state of a data loader: Orbax's arguments, by name.
        **options: of `CheckpointManager.save`: `metrics`, `force`, `custom_metadata`.

    Returns:
        Whether the step was saved. The manager may have been told to skip it.

    Raises:
        UnserialisableError: if the tree holds what cannot be saved. All of it is listed; nothing was written.
        CycleError: if an object contains itself.
        ValueError: if `items` has a name that is taken; or from Orbax, if the step exists.
        ImportError: if Orbax is not installed.

    Cost: one walk over the nodes, if the step is to be saved at all; and what Orbax takes. Arrays are handed to Orbax
    as they are, but for PRNG keys and dtypes that TensorStore lacks, which are copied.

    Limitations: what each process holds for itself, such as a NumPy array or a JAX array on its own devices, must be
    the same in all: the first process writes it. Orbax keeps no digests of the data of arrays of more than 1 KiB, so a
    flipped bit in them goes unnoticed; `sharedtree.save` has digests. In one manager, Orbax reads the items of a step
    with the kind of arguments that it saw first: to read `arrays` by hand, use `PyTreeRestore`, or another manager.

    Example:
        >>> import tempfile, jax.numpy as jnp, orbax.checkpoint as ocp, sharedtree as st
        >>> w = jnp.ones(3)
        >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     saved = st.orbax.save(manager, 7, {"embed": w, "head": w, "name": "tied"})
        ...     model = st.orbax.restore(manager)
        >>> saved, model["embed"] is model["head"], model["name"]
        (True, True, 'tied')
    """
    ocp = _orbax()
    taken = sorted({_ARRAYS, _MANIFEST} & set(items or ()))
    if taken:
        raise ValueError(
            f"`items` has the name `{taken[0]}`, under which the tree itself is saved. Give the item another name:\n"
            f'    sharedtree.orbax.save(manager, step, tree, items={{"my_{taken[0]}": items["{taken[0]}"]}})'
        )
    if not options.get("force") and not manager.should_save(step):
        return False
    encoded = encode(tree)
    text = json.dumps(encoded.manifest, separators=(",", ":"), check_circular=False)
    entries = [ArrayEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in encoded.manifest["arrays"]]
    arrays = {
        key_of(entry.tensor): to_hand_over(entry, array)
        for entry, array in zip(entries, encoded.arrays, strict=True)
        if is_stored(entry)
    }
    args = {**(items or {}), _MANIFEST: ocp.args.JsonSave({_TEXT: text, _CRC: _crc(text)})}
    if arrays:  # Orbax refuses an empty item
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
    """Restores a tree that `sharedtree.orbax.save` saved. No template is needed, and any number of devices will do.

    Names are looked up as `sharedtree.load` does, and before any array is read.

    Args:
        manager: an `orbax.checkpoint.CheckpointManager` for the folder.
        step: the number of the step. Default: the latest.
        trusted: classes, functions, names or packages that the checkpoint may name, as for `sharedtree.load`.
        like: a template, as for `sharedtree.load`.
        select: a part to restore, as for `sharedtree.load`.
        sharding: as for `sharedtree.load`: a device or a sharding for all JAX arrays, or a function from name and
            `jax.ShapeDtypeStruct` to one or None. Each process reads its own shards. Default: where the template has
            them, else as for new arrays: all of each on the default device.
        strict: whether a difference to the template is an error, as for `sharedtree.load`.
        renames: what was renamed since, as for `sharedtree.load`.

    Returns:
        The tree. What was one object is one object. With `strict=False` and a template, (tree, report).

    Raises:
        UntrustedTypeError: if the checkpoint names what it may not. No array was read.
        StructureMismatchError: if a class or the template does not fit, a name leads nowhere, a selected part is not
            there, arrays have 64-bit numbers and JAX has them switched off, or there is no memory for them.
        FormatError: if the step has no manifest, a malformed one, or one of a newer version, or other arrays, or if
            Orbax fails in any other way. Shapes, dtypes and sizes were compared before any array was read.
        CorruptFileError: if the manifest was changed, or Orbax finds the arrays damaged or gone.
        FileNotFoundError: if there is no such step, or none at all.
        ImportError: if Orbax is not installed.

    Cost: one walk over the nodes, and what Orbax takes to read the metadata of all arrays (about 0.5 ms each), then the
    arrays. Where no sharding is given, all of an array
    passes through the memory of the host.

    Limitations: what lies on the disk may make up to 65,536 times as many bytes of arrays, for Orbax compresses. With
    `select`, the metadata of all arrays is read all the same.

    Example:
        >>> import tempfile, equinox as eqx, jax, orbax.checkpoint as ocp, sharedtree as st
        >>> model = eqx.nn.MLP(2, 2, 8, depth=2, key=jax.random.key(0))
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> everywhere = jax.NamedSharding(mesh, jax.P())
        >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     saved = st.orbax.save(manager, 0, model)
        ...     again = st.orbax.restore(manager, 0, sharding=everywhere)
        >>> bool(eqx.tree_equal(model, again)), again.layers[0].weight.sharding == everywhere
        (True, True)
    """
    ocp = _orbax()
    trust = Trust(trusted, names_in(like) if like is not None else None)
    if step is None:
        step = manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"`{manager.directory}` has no checkpoint yet.")
    label = printable(f"{manager.directory}/{step}")
    manifest = _read_manifest(ocp, manager, step, label)
    plan = Plan(manifest, label, trust, like=like, select=select, sharding=sharding, strict=strict, renames=renames)
    return plan.tree(_read_arrays(ocp, manager, step, label, plan, manifest.arrays))


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "`sharedtree.orbax` needs Orbax. Install it:\n    pip install orbax-checkpoint", name=error.name
        ) from error
    return orbax.checkpoint


def _read_manifest(ocp: Any, manager: Any, step: int, label: str) -> Manifest:
    try:
        item = manager.restore(step, args=ocp.args.Composite(**{_MANIFEST: ocp.args.JsonRestore()}))[_MANIFEST]
    except Exception as error:
        if isinstance(error, FileNotFoundError) and step not in manager.all_steps(read=True):
            raise
        raise _no_manifest(label, _said(error)) from None
    text = item.get(_TEXT) if type(item) is dict and item.keys() == {_TEXT, _CRC} else None
    if type(text) is not str or not is_unicode(text):
        raise _no_manifest(label, "it is not what `sharedtree.orbax.save` writes")
    if item[_CRC] != _crc(text):
        raise CorruptFileError(
            f"The manifest of `{label}` is not what was written: it does not have the digest that was saved with it. "
            "Nothing was restored. Restore another step:\n    sharedtree.orbax.restore(manager, step)"
        )
    return parse_manifest(text)


def _read_arrays(ocp: Any, manager: Any, step: int, label: str, plan: Plan, saved: Sequence[ArrayEntry]) -> list[Any]:
    entries = plan.wanted
    require_dtypes_of_jax(entries)
    placements = [plan.place(entry) if entry.kind == "jax" else None for entry in entries]
    wanted: dict[str, Any] = {}
    for entry, placement in zip(entries, placements, strict=True):
        if not is_stored(entry):
            continue
        wanted[key_of(entry.tensor)] = ocp.RestoreArgs(restore_type=np.ndarray)
        if placement is not None and entry.key is None:  # the sharding of keys is not that of their data
            if isinstance(placement, jax.Device):
                placement = jax.sharding.SingleDeviceSharding(placement)
            jax.ShapeDtypeStruct(entry.shape, np.uint8, sharding=placement)  # JAX's own errors if it does not fit: too
            placement.shard_shape(entry.shape)  # many axes, or a size that is no multiple
            wanted[key_of(entry.tensor)] = ocp.ArrayRestoreArgs(sharding=placement)
    read: Any = {}
    if wanted:
        stored = names_of(saved)
        found = _metadata(ocp, manager, step, label, stored)
        both = [(entry, place) for entry, place in zip(entries, placements, strict=True) if is_stored(entry)]
        require_sound(found, [entry for entry, _ in both], [place for _, place in both], label)
        read = _restored(ocp, manager, step, label, wanted, partial_restore=len(wanted) < len(stored))
    arrays: list[Any] = []
    for entry in entries:
        array = read.pop(key_of(entry.tensor), None) if is_stored(entry) else without_elements(entry)
        arrays.append(from_stored(entry, array) if is_stored(entry) else array)
    return settled(entries, placements, arrays)


def _metadata(ocp: Any, manager: Any, step: int, label: str, stored: list[str]) -> Any:
    """What the checkpoint says of its arrays. A manager knows how to read an item once it has restored it.

    So it is asked to restore all that the manifest has, with a placeholder for each array, of which it then reads none.
    """
    _restored(ocp, manager, step, label, dict.fromkeys(stored, ocp.PLACEHOLDER))
    try:
        return manager.item_metadata(step)[_ARRAYS]
    except Exception as error:  # noqa: BLE001 -- whatever the parsers of a damaged file raise
        raise _unreadable(label, _said(error)) from None


def _restored(ocp: Any, manager: Any, step: int, label: str, wanted: dict[str, Any], **options: Any) -> Any:
    """The arrays of an item, by what is wanted of each: a placeholder for none of it."""
    if ocp.PLACEHOLDER not in wanted.values():
        options["restore_args"] = wanted
        wanted = dict.fromkeys(wanted, 0)
    args = ocp.args.PyTreeRestore(item=wanted, **options)
    try:
        return manager.restore(step, args=ocp.args.Composite(**{_ARRAYS: args}))[_ARRAYS]
    except Exception as error:  # noqa: BLE001 -- likewise
        raise _unreadable(label, _said(error)) from None


# How TensorStore calls what is damaged or gone.
_DAMAGE = ("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION")


def _unreadable(label: str, said: str) -> SharedTreeError:
    if any(word in said for word in _DAMAGE):
        return CorruptFileError(
            f"The arrays of `{label}` are not what was written. Orbax says:\n{said}\n"
            "Nothing was restored. Restore another step:\n    sharedtree.orbax.restore(manager, step)"
        )
    return FormatError(
        f"The arrays of `{label}` are not those of its manifest, or Orbax cannot read them. It says:\n{said}\n"
        "Nothing was restored. Restore another step:\n    sharedtree.orbax.restore(manager, step)"
    )


def _said(error: BaseException) -> str:
    """An error of another library. It may quote what the checkpoint has, so the error itself is not passed on."""
    return printable(f"{type(error).__name__}: {str(error)[:1000]}")


def _no_manifest(label: str, why: str) -> FormatError:
    return FormatError(
        f"`{label}` has no manifest that can be read: {why}\n"
        "It was not saved by sharedtree, or it is damaged. What Orbax saved alone, Orbax restores:\n"
        "    manager.restore(step, args=orbax.checkpoint.args.StandardRestore(template))"
    )


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
