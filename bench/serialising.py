"""Models saved and loaded: many bytes, many arrays of middle size, many small ones, and a part of a file.

When the clock stops, what was saved is on the disk, whoever wrote it: the files of libraries that do not force them
there are forced by the harness. Only of 2000 small arrays each library is measured as it is, since there are few bytes
to force. Files are new, none is overwritten. Nothing is dropped from the cache of the operating system, so what is
loaded comes from memory, and ends as JAX arrays that are ready.
"""

import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import safetensors

import sharedtree as st

from ._checkpoints import Checkpoint, Lazy, arrays_by_path, checksums, make_large, make_middle, make_small, make_tied
from ._libraries import (
    EQUINOX,
    FILE_OBJECT,
    JAXON,
    LIBRARIES,
    MAPPED,
    ORBAX,
    RAW,
    SHAREDTREE,
    SHAREDTREE_ORBAX,
    TRUSTED,
    UNCHECKED,
    Library,
    files_of,
    force_to_disk,
    raw_bytes,
    sharedtree,
    sharedtree_file_object,
)
from ._measuring import TIME, Case, Effort, Subject

SIZE = "file size"
"""Of all files that a library wrote."""

TIED, SMALL, MIDDLE, LARGE, HUGE = "tied", "small arrays", "arrays of 1 MiB", "large arrays", "2 GiB"
"""Kinds of models."""

SAVE_TIED = "save the demo's model"
SAVE_SMALL = "save 2,000 arrays of 32 bytes"
LOAD_SMALL = "load 2,000 arrays of 32 bytes"

WHOLE = "sharedtree, all of it"
PART = "sharedtree, select="
PART_OF_SAFETENSORS = "safetensors.safe_open"

_SLOW = (ORBAX, SHAREDTREE_ORBAX, JAXON)  # with 2000 arrays: they would leave the others no time for rounds

_LAYERS_OF_HUGE = 100
_CHOSEN = "[50]"
_OF_WHOLE = slice(100, 102)  # its weight and its bias, among all of them


def save_name(mebibytes: int) -> str:
    """The name of a case."""
    return f"save {mebibytes} MiB"


def load_name(mebibytes: int) -> str:
    """The name of a case."""
    return f"load {mebibytes} MiB"


def load_middle_name(number: int) -> str:
    """The name of a case."""
    return f"load {number} arrays of 1 MiB"


def map_name(mebibytes: int) -> str:
    """The name of a case."""
    return f"map {mebibytes} MiB"


PART_NAME = "load 1% of 2 GiB"

Use = Callable[[Checkpoint], Library]

_unchecked: Use = functools.partial(sharedtree, verify=False)
_mapped: Use = functools.partial(sharedtree, mmap=True, verify=False)


def cases(effort: Effort) -> list[Case]:
    """All of them; the quick ones are of 16 MiB, and without the file of 2 GiB."""
    size, layers, columns, number = (16, 16, 128, 16) if effort.quick else (512, 32, 2048, 256)
    few, many = (2, 3) if effort.quick else (3, 9)
    large = Lazy(functools.partial(make_large, layers, columns))
    middle = Lazy(functools.partial(make_middle, number))
    small = Lazy(make_small)
    peers = {name: use for name, use in LIBRARIES.items() if name != RAW}
    beside_raw = {**_of(RAW, SHAREDTREE), UNCHECKED: _unchecked}
    swift = {name: use for name, use in LIBRARIES.items() if name not in _SLOW}
    found = [
        _case(SAVE_TIED, "save", TIED, Lazy(make_tied), LIBRARIES, RAW, many, effort),
        _case(save_name(size), "save", LARGE, large, _of(RAW, SHAREDTREE), RAW, many, effort),
        _case(f"{save_name(size)}, libraries", "save", LARGE, large, peers, SHAREDTREE, few, effort),
        _case(SAVE_SMALL, "save", SMALL, small, {**swift, FILE_OBJECT: sharedtree_file_object}, EQUINOX, many, effort),
        _case(load_name(size), "load", LARGE, large, beside_raw, RAW, many, effort),
        _case(load_middle_name(number), "load", MIDDLE, middle, beside_raw, RAW, many, effort),
        _case(f"{load_name(size)}, libraries", "load", LARGE, large, peers, SHAREDTREE, few, effort),
        _case(map_name(size), "map", LARGE, large, {RAW: _mapped_bytes, MAPPED: _mapped}, RAW, many, effort),
        _case(LOAD_SMALL, "load", SMALL, small, swift, EQUINOX, many, effort),
    ]
    if effort.quick:
        return found
    slow = _of(SHAREDTREE, *_SLOW)
    return [
        *found,
        _case(f"{SAVE_SMALL}, slow libraries", "save", SMALL, small, slow, SHAREDTREE, few, effort),
        _case(f"{LOAD_SMALL}, slow libraries", "load", SMALL, small, slow, SHAREDTREE, few, effort),
        _of_huge(few, effort),
    ]


def _of(*names: str) -> dict[str, Use]:
    return {name: LIBRARIES[name] for name in names}


def _case(
    name: str,
    work: str,
    model: str,
    shared: Lazy,
    uses: Mapping[str, Any],
    reference: str,
    rounds: int,
    effort: Effort,
) -> Case:
    set_up = {"save": functools.partial(_saver, force=model != SMALL), "part": _part_loader}.get(work, _loader)
    return Case(
        name=name,
        group="serialising",
        parameters={"work": work, "model": model, "reference": reference},
        implementations={each: functools.partial(set_up, shared, each, use) for each, use in uses.items()},
        reference=reference,
        effort=effort._replace(rounds=rounds),
        units={TIME: "s", SIZE: "B"} if work == "save" else {TIME: "s"},
        warm_up=0,  # setting up is the first run: a library that cannot do it says so there
    )


def _saver(shared: Lazy, name: str, use: Use, *, force: bool) -> Subject:
    checkpoint = shared()
    library = use(checkpoint)

    def run() -> dict[str, float]:
        path = checkpoint.path(name)
        _remove(path)
        start = time.perf_counter()
        library.save(path)
        if force:
            force_to_disk(path)
        seconds = time.perf_counter() - start
        return {TIME: seconds, SIZE: float(sum(file.stat().st_size for file in files_of(path)))}

    run()
    return Subject(run, lambda: checksums(library.load(checkpoint.path(name))), measures=True)


def _loader(shared: Lazy, name: str, use: Use) -> Subject:
    checkpoint = shared()
    library = use(checkpoint)
    library.save(checkpoint.path(name))
    force_to_disk(checkpoint.path(name))  # or the operating system would write it while others are measured
    return _timed(lambda: library.load(checkpoint.path(name)))


def _timed(load: Callable[[], list[Any]], part: slice = slice(None)) -> Subject:
    """Times loading. What was loaded is let go of after the clock has stopped.

    Args:
        load: returns arrays.
        part: of the list; what is compared with the others.
    """

    def run() -> dict[str, float]:
        start = time.perf_counter()
        loaded = jax.block_until_ready(load())
        seconds = time.perf_counter() - start
        del loaded
        return {TIME: seconds}

    run()
    return Subject(run, lambda: checksums(load()[part]), measures=True)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _mapped_bytes(checkpoint: Checkpoint) -> Library:
    """The limit for mapping: one map of the bytes, taken apart."""
    arrays = checkpoint.unique
    assert len(arrays) == len(checkpoint.by_path), "no ties"
    assert all(array.nbytes % 64 == 0 for array in arrays), "aligned"

    def load(path: pathlib.Path) -> list[jax.Array]:
        data, at, views = np.memmap(path, np.uint8, "r"), 0, []
        for array in arrays:
            views.append(np.asarray(data[at : at + array.nbytes]).view(array.dtype).reshape(array.shape))
            at += array.nbytes
        return jax.device_put(views)

    return raw_bytes(checkpoint)._replace(load=load)


def _of_huge(rounds: int, effort: Effort) -> Case:
    """One of a hundred layers, out of the middle of a file."""
    shared = Lazy(functools.partial(make_large, _LAYERS_OF_HUGE, 2621))  # 20.5 MiB each
    ways = {WHOLE: (_whole, _OF_WHOLE), PART: (_selected, slice(None)), PART_OF_SAFETENSORS: (_opened, slice(None))}
    return _case(PART_NAME, "part", HUGE, shared, ways, WHOLE, rounds, effort)


def _part_loader(shared: Lazy, _: str, way: tuple[Callable[[Checkpoint], list[Any]], slice]) -> Subject:
    checkpoint, (load, part) = shared(), way
    if not _huge(checkpoint).exists():
        st.save(_huge(checkpoint), checkpoint.model)
    return _timed(functools.partial(load, checkpoint), part)


def _huge(checkpoint: Checkpoint) -> pathlib.Path:
    return checkpoint.path("huge")


def _whole(checkpoint: Checkpoint) -> list[Any]:
    return list(arrays_by_path(st.load(_huge(checkpoint), trusted=TRUSTED)).values())


def _selected(checkpoint: Checkpoint) -> list[Any]:
    return list(arrays_by_path(st.load(_huge(checkpoint), trusted=TRUSTED, select=_CHOSEN)).values())


def _opened(checkpoint: Checkpoint) -> list[Any]:
    with safetensors.safe_open(_huge(checkpoint), "numpy") as file:
        return jax.device_put([file.get_tensor(f"{_CHOSEN}.{name}") for name in ("weight", "bias")])
