"""Where boxes and wires go: in layers from top to bottom, as Sugiyama, Tagawa and Toda do (1981).

igraph finds the order within each layer that has few crossings. It takes all boxes for points, so how far apart they
are is found here: each wants to be below what it hangs on, and as near to that as its neighbours let it. The labels of
wires are placed as boxes are, in layers of their own, so that none lies on another.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

_SWEEPS = 12

_GAP, _BETWEEN_LAYERS = 18.0, 22.0


class Point(NamedTuple):
    """A place in the drawing, in pixels."""

    x: float
    y: float


class Extent(NamedTuple):
    """How wide and high something is, in pixels."""

    width: float
    height: float


class Placed(NamedTuple):
    """What was found.

    Attributes:
        boxes: the middle of the upper edge of each box.
        floors: where the layer of each box ends; down to there a wire that leaves it is free only below the box itself.
        labels: the middle of each label, one a wire.
        bends: of each wire, the points between which it is drawn: through its label, and past the layers between.
        size: of all.
    """

    boxes: tuple[Point, ...]
    floors: tuple[float, ...]
    labels: tuple[Point, ...]
    bends: tuple[tuple[Point, ...], ...]
    size: Extent


def place(boxes: Sequence[Extent], wires: Sequence[tuple[int, int]], labels: Sequence[Extent], igraph: Any) -> Placed:
    """Places boxes and the labels of wires, so that nothing lies on anything else.

    Args:
        boxes: how large each is; the first is the root.
        wires: from box to box, without cycles.
        labels: how large that of each wire is.
        igraph: the library.

    The same input has the same outcome.
    """
    levels = _levels(len(boxes), wires)
    sizes, layer_of = list(boxes), [2 * level for level in levels]
    edges: list[tuple[int, int]] = []
    chains: list[list[int]] = []
    for (start, stop), label in zip(wires, labels, strict=True):
        chain: list[int] = []
        for layer in range(2 * levels[start] + 1, 2 * levels[stop]):
            chain.append(len(sizes))
            sizes.append(label if not chain[1:] else Extent(2.0, 0.0))
            layer_of.append(layer)
        edges += zip([start, *chain], [*chain, stop], strict=True)
        chains.append(chain)
    graph = igraph.Graph(n=len(sizes), edges=edges, directed=True)
    found = graph.layout_sugiyama(layers=layer_of)
    coordinates = found.coords
    layers: list[list[int]] = [[] for _ in range(max(layer_of) + 1)]
    for number, layer in enumerate(layer_of):
        layers[layer].append(number)
    for layer in layers:
        layer.sort(key=lambda number: (coordinates[number][0], number))
    if _is_mirrored(layers, edges):
        layers = [layer[::-1] for layer in layers]
    xs = _across(layers, [size.width for size in sizes], edges)
    tops, height = _down(layers, sizes)
    points = [Point(x, tops[layer]) for x, layer in zip(xs, layer_of, strict=True)]

    def bends(number: int) -> list[Point]:
        """A wire goes straight past the boxes of a layer, and through the middle of one of labels."""
        (x, y), high = points[number], _height(layers[layer_of[number]], sizes)
        return [Point(x, y + high / 2)] if layer_of[number] % 2 else [Point(x, y), Point(x, y + high)]

    width = max(x + size.width / 2 for x, size in zip(xs, sizes, strict=True))
    return Placed(
        tuple(points[: len(boxes)]),
        tuple([tops[layer] + _height(layers[layer], sizes) for layer in layer_of[: len(boxes)]]),
        tuple([bends(chain[0])[0] for chain in chains]),
        tuple([tuple([point for number in chain for point in bends(number)]) for chain in chains]),
        Extent(width, height),
    )


def _levels(count: int, wires: Sequence[tuple[int, int]]) -> list[int]:
    """How far down each box is: one more than the lowest that leads to it."""
    below: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for start, stop in wires:
        below[start].append(stop)
        waits[stop] += 1
    levels = [0] * count
    ready = [number for number in range(count) if waits[number] == 0]
    for number in ready:  # grows
        for other in below[number]:
            levels[other] = max(levels[other], levels[number] + 1)
            waits[other] -= 1
            if waits[other] == 0:
                ready.append(other)
    return levels


def _is_mirrored(layers: Sequence[Sequence[int]], edges: Sequence[tuple[int, int]]) -> bool:
    """Whether the fields of boxes are from right to left rather than in their order."""
    position = {number: i for layer in layers for i, number in enumerate(layer)}
    order: dict[int, list[int]] = {}
    for start, stop in edges:
        order.setdefault(start, []).append(position[stop])
    steps = [one < other for below in order.values() for one, other in itertools.pairwise(below)]
    return sum(steps) * 2 < len(steps)


def _across(layers: Sequence[Sequence[int]], widths: Sequence[float], edges: Sequence[tuple[int, int]]) -> list[float]:
    """Where the middle of each is, from left to right."""
    above: list[list[int]] = [[] for _ in widths]
    below: list[list[int]] = [[] for _ in widths]
    for start, stop in edges:
        above[stop].append(start)
        below[start].append(stop)
    xs = [0.0] * len(widths)
    for layer in layers:
        _settle(layer, [0.0] * len(layer), widths, xs)
    for sweep in range(_SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            near = above if sweep % 2 == 0 else below
            wanted = [
                sum(xs[other] for other in near[number]) / len(near[number]) if near[number] else xs[number]
                for number in layer
            ]
            _settle(layer, wanted, widths, xs)
    left = min(x - width / 2 for x, width in zip(xs, widths, strict=True))
    return [x - left for x in xs]


def _settle(layer: Sequence[int], wanted: Sequence[float], widths: Sequence[float], xs: list[float]) -> None:
    """Moves a layer as near as can be to where it is wanted, in its order and without overlaps.

    Where two would overlap they move as one, by least squares: the pool of adjacent violators (Ayer and others, 1955).
    """
    offsets, at = list[float](), 0.0
    for i, number in enumerate(layer):
        if i:
            at += (widths[layer[i - 1]] + widths[number]) / 2 + _GAP
        offsets.append(at)
    pools: list[tuple[float, int]] = []  # the mean of what its members want, without their offsets, and how many
    for target, offset in zip(wanted, offsets, strict=True):
        pools.append((target - offset, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, n), (other, m) = pools[-2:]
            pools[-2:] = [((one * n + other * m) / (n + m), n + m)]
    means = [mean for mean, count in pools for _ in range(count)]
    for number, mean, offset in zip(layer, means, offsets, strict=True):
        xs[number] = mean + offset


def _height(layer: Sequence[int], sizes: Sequence[Extent]) -> float:
    return max((sizes[number].height for number in layer), default=0.0)


def _down(layers: Sequence[Sequence[int]], sizes: Sequence[Extent]) -> tuple[list[float], float]:
    """Where each layer begins, and where all ends."""
    tops, at = list[float](), 0.0
    for layer in layers:
        tops.append(at)
        at += _height(layer, sizes) + _BETWEEN_LAYERS
    return tops, at - _BETWEEN_LAYERS
