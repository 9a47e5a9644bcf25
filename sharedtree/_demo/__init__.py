"""The demo behind `python -m sharedtree demo`: a language model whose embedding is its output layer, trained on a CPU.

`_model` is the part to read first: the model, and the one line that ties it. `_training` has the train step and nothing
else that `sharedtree` needs, `_on_disk` saves and loads. `_help_texts` is what the model learns from, `_report` what
the demo shows and what makes it fail.
"""

from ._model import (
    Attention as Attention,
    Block as Block,
    Embedding as Embedding,
    LanguageModel as LanguageModel,
    Sizes as Sizes,
)
from ._on_disk import FileSizes as FileSizes
from ._report import Report as Report, failures as failures
from ._run import QUICK_STEPS as QUICK_STEPS, STEPS as STEPS, MissingLibraryError as MissingLibraryError, run as run
from ._training import Checkpoint as Checkpoint
