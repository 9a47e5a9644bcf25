"""The files of others: Equinox's leaves and flax's msgpack, to trees with ties and back."""

from ._converting import Conversion as Conversion, convert as convert
