"""The table of kinds of node, as what makes and changes files at random wants it: by its operands alone."""

from sharedtree.serialise.values._kinds import KINDS

NODE_KINDS = {name: tuple([operand.type for operand in kind.operands]) for name, kind in KINDS.items()}

SAME_LENGTH = {
    name: (place, place + 1)
    for name, kind in KINDS.items()
    if (place := kind.paired or (kind.keyed if kind.keyed != len(kind.operands) else None)) is not None
}
