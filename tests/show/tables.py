"""Tables of saved models."""

import sharedtree as st
from sharedtree.serialise.load import open_checkpoint
from sharedtree.show._outline import Outline
from sharedtree.show._saved_models import description_of_file


def table_of_file(data, depth=None):
    """Returns the summary of a file, given as bytes."""
    with open_checkpoint(data) as file:
        return st.show.Summary(Outline(description_of_file(file.manifest)), depth, 1_000)
