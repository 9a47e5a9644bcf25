"""The demo from beginning to end."""

import importlib
import os
import sys
import tempfile
import time
from typing import Any

import jax

import sharedtree as st

from ._help_texts import python_help, unigram_loss
from ._model import LanguageModel, Sizes
from ._on_disk import FileSizes, differences, reload
from ._report import Report, announcement
from ._training import Checkpoint, continuation, make_optimizer, mean_loss, steps_after_checkpoint, train

STEPS = 900
"""Enough for words; about a minute on two cores."""

QUICK_STEPS = 30
"""Enough to see the loss fall."""

DEFAULT_SIZES = Sizes()


class MissingLibraryError(ImportError):
    """A library that only the demo needs is not installed."""


def run(
    *,
    steps: int,
    seed: int = 0,
    quick: bool = False,
    sizes: Sizes = DEFAULT_SIZES,
    save: str | os.PathLike[str] | None = None,
) -> Report:
    """Trains a language model with tied weights on the help texts of Python, and reports what came of it.

    Says first, on standard error, what there will be to see.
    Before the last steps it saves a checkpoint and loads it, and then takes those steps twice: as if nothing had been,
    and from what was loaded. Both are compared bit for bit.

    Args:
        steps: how many train steps, at least 1.
        seed: decides the first weights, which parts of the text are seen, and what is written in the end.
        quick: write less, and let the loss be compared with that of the first step instead of the unigram baseline.
        sizes: of the model.
        save: where to keep the checkpoint. Default: it is deleted in the end.

    Returns:
        A report; `failures` says whether it is a good one.

    Raises:
        MissingLibraryError: if optax or tqdm is not installed.
        OSError: if the checkpoint cannot be written.
    """
    _require_libraries()
    sys.stderr.write(announcement(steps, steps_after_checkpoint(steps), quick))
    start = time.perf_counter()
    text = python_help()
    model = LanguageModel(sizes, key=jax.random.key(seed))
    twin = st.untie(model)
    optimizer_bytes_untied = _nbytes(make_optimizer(steps).init(twin))
    parameters, parameters_untied = st.count_parameters(model), st.count_parameters(twin)
    ties_before = st.ties(model)

    measured: list[FileSizes] = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.safetensors") if save is None else save

        def to_disk_and_back(checkpoint: Checkpoint) -> Checkpoint:
            reloaded, file_sizes = reload(checkpoint, path)
            measured.append(file_sizes)
            return reloaded

        trained = train(model, text.train, sizes, steps=steps, seed=seed, reload=to_disk_and_back)
    assert trained.again is not None

    prompt = text.validation[: sizes.context]
    written = continuation(trained.model, prompt, 100 if quick else 400, key=trained.end.key)
    validation_loss = mean_loss(trained.model, text.validation, sizes)
    return Report(
        steps=steps,
        quick=quick,
        first_loss=trained.first_loss,
        validation_loss=validation_loss,
        unigram_loss=unigram_loss(text),
        prompt=prompt.tobytes().decode(errors="replace"),
        sample=written.decode(errors="replace"),
        ties_before=ties_before,
        ties_after=st.ties(trained.model),
        parameters=parameters,
        parameters_untied=parameters_untied,
        optimizer_bytes=_nbytes(trained.optimizer_state),
        optimizer_bytes_untied=optimizer_bytes_untied,
        traces=trained.traces,
        bytes_per_second=trained.bytes_per_second,
        seconds=time.perf_counter() - start,
        file_bytes=measured[0],
        resumed_steps=len(trained.again.losses),
        resumed_differences=differences(trained.last, trained.again),
    )


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in st.tree.leaves(tree))


def _require_libraries() -> None:
    for name in ("optax", "tqdm"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingLibraryError(
                f"The demo needs `{name}`, which cannot be imported ({error}). Install what it needs:\n"
                "    pip install optax tqdm\n"
                "They are also what the extra of sharedtree brings: `sharedtree[demo]`.",
                name=name,
            ) from None
