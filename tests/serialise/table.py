"""The table of kinds of node, as what makes and changes files at random wants it: by its operands alone."""

from sharedtree.serialise.values._all_kinds_of_nodes import KINDS

NODE_KINDS = {name: tuple([operand.type for operand in kind.operands]) for name, kind in KINDS.items()}

PAIRS = {name: kind.first_of_pair for name, kind in KINDS.items()}
SAME_LENGTH = {name: (place, place + 1) for name, place in PAIRS.items() if place is not None}
