"""What the demo learns from: the help texts that every Python carries, as bytes, in two parts that do not overlap."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

NUM_BYTES = 256


class Text(NamedTuple):
    """A text in two parts, as arrays of uint8.

    Attributes:
        train: what a model may learn from.
        validation: what it is measured on.
    """

    train: np.ndarray
    validation: np.ndarray


def python_help() -> Text:
    """The texts behind `help("topics")`: about half a million bytes of English with some Python in it."""
    from pydoc_data.topics import topics

    return split(topics)


def split(topics: Mapping[str, str], validation_share: float = 0.1) -> Text:
    r"""Joins texts and splits them in two.

    The help topics repeat one another. Each paragraph is kept once, or the model would be measured on what it has
    learnt by heart.

    Args:
        topics: the texts by name; taken in the order of the names, which differs less between versions of Python.
        validation_share: which part of the bytes to keep for validation, from the end.

    Example:
        >>> text = split({"a": "one\n\ntwo", "b": "two\n\nsix"}, validation_share=0.25)
        >>> text.train.tobytes(), text.validation.tobytes()
        (b'one\n\ntwo\n\n', b'six')
    """
    found = (paragraph.strip("\n") for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    data = np.frombuffer("\n\n".join(dict.fromkeys(filter(None, found))).encode(), np.uint8)
    num_train = round(len(data) * (1 - validation_share))
    return Text(data[:num_train], data[num_train:])


def unigram_loss(text: Text) -> float:
    """The loss in nats per byte, on the validation part, of the best model that knows no context.

    That model gives each byte the frequency that it has in the train part, with one added to each count so that no
    byte is impossible.

    Example:
        >>> text = Text(np.frombuffer(b"ab", np.uint8), np.frombuffer(b"ba", np.uint8))
        >>> round(unigram_loss(text), 4)  # log((2 + 256) / (1 + 1))
        4.8598
    """
    counts = np.bincount(text.train, minlength=NUM_BYTES) + 1
    log_frequencies = np.log(counts / counts.sum())
    return float(-log_frequencies[text.validation].mean())


def random_windows(data: np.ndarray, number: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Windows of a text that begin at random places.

    Args:
        data: bytes, of shape (anything,).
        number: how many windows.
        length: of each of them.
        generator: where randomness comes from; it is advanced.

    Returns:
        An int32 array of shape (number, length).
    """
    starts = generator.integers(0, len(data) - length, number, endpoint=True)
    return data[starts[:, None] + np.arange(length)].astype(np.int32)


def consecutive_windows(data: np.ndarray, length: int) -> np.ndarray:
    """Windows that cover a text, each beginning with the last byte of the one before.

    So every byte but the first is predicted once. A rest that fills no window is left out.

    Args:
        data: bytes, of shape (anything,).
        length: of each window.

    Returns:
        An int32 array of shape (anything, length).

    Example:
        >>> consecutive_windows(np.arange(8, dtype=np.uint8), 3)
        array([[0, 1, 2],
               [2, 3, 4],
               [4, 5, 6]], dtype=int32)
    """
    starts = np.arange(0, len(data) - length + 1, length - 1)
    return data[starts[:, None] + np.arange(length)].astype(np.int32)
