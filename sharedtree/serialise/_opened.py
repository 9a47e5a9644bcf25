"""An open file: its container and its manifest, each checked, and checked to be about the same tensors."""

from types import TracebackType

from .._errors import FormatError
from .._printable import printable
from .arrays._dtypes import dtype_named, stored
from .container._reading import Container, read_header
from .container._sources import Readable
from .values._manifest import Manifest, parse_manifest


class Opened:
    """A file that can be loaded from. Use it in a `with` statement.

    Args:
        where: a path, the bytes of a file, or a binary file object that stands at its beginning.

    Attributes:
        container: the tensors.
        manifest: the tree.

    Raises:
        FormatError: if it is no sharedtree file, or malformed.
        CorruptFileError: if it was cut short, or its header was changed.
        OSError: if it cannot be read.
    """

    def __init__(self, where: Readable) -> None:
        self.container: Container = read_header(where)
        try:
            self.manifest: Manifest = parse_manifest(self.container.manifest)
            _require_same_tensors(self.container, self.manifest)
        except BaseException:
            self.container.close()
            raise

    def __enter__(self) -> "Opened":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.container.close()


def _require_same_tensors(container: Container, manifest: Manifest) -> None:
    tensors = container.tensors
    for entry in manifest.arrays:
        tensor = tensors.get(entry.tensor)
        if tensor is None:
            raise _disagree(container, f"the manifest names a tensor `{printable(entry.tensor)}`, which is not there")
        expected = stored(dtype_named(entry.dtype), entry.shape)
        if (tensor.dtype, tensor.shape) != expected:
            raise _disagree(
                container,
                f"the tensor `{printable(entry.tensor)}` is {tensor.dtype}{list(tensor.shape)}, and to the manifest it "
                f"is {expected[0]}{list(expected[1])}",
            )
    extra = tensors.keys() - {entry.tensor for entry in manifest.arrays}
    if extra:
        raise _disagree(container, f"the manifest does not name the tensor `{printable(min(extra))}`")


def _disagree(container: Container, fact: str) -> FormatError:
    return FormatError(
        f"`{container.label}` is not a valid sharedtree file: {fact}.\n"
        "Nothing was loaded. Restore the file from a copy, or save the model again."
    )
