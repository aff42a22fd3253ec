"""Sketches: a model state of d floats as D numbers that keep inner products, by a shared seed.

A client computes its sketch and the server compares sketches; the matrix is never sent. The same
code runs on a simulated and on a real client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.federation.models import head_entries
from fedglimpse.federation.state import Layout

SHARED_SEED = 0  # of every client, server and run, so that policies can travel
TILE = 1024  # columns of P that are drawn together; changing it changes every sketch
_CHUNK = 32  # rows a count-sketch gathers at once
Scale = Literal["sqrt", "mean"]


class Sketch(Protocol):
    """A linear map from model states to sketches, the same wherever the seed is the same."""

    @property
    def size_in(self) -> int:
        """Floats of a state, d."""

    @property
    def size_out(self) -> int:
        """Floats of a sketch, D."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Return sketches `[..., D]` of float32 rows `[..., d]`, on the device of the rows."""


@dataclass(frozen=True)
class GaussianSketch:
    """The paper's random projection, RP(W) = scale * P W with standard normal P.

    P is drawn in tiles of `TILE` columns, each from its own key, and the products of the tiles are
    added in order. On the CPU one row therefore gives the same bits whatever `block`, cached or
    not; in a batch, or on a GPU, a row agrees to about 1e-5 of the sketch's norm, since the order
    of additions inside a matrix product depends on its shape.

    Attributes:
        size_in: d.
        size_out: D.
        seed: of P; clients and server must share it.
        scale: "sqrt" is 1 / sqrt(D), which keeps norms and inner products; "mean" is 1 / D, as the
            paper prints it.
        cached: keep P in memory, 4 d D bytes on each device used. For simulators.
        block: tiles in memory at a time when not cached, 4 KiB * D each.
    """

    size_in: int
    size_out: int = 128
    seed: int = 0
    scale: Scale = "sqrt"
    cached: bool = False
    block: int = 8
    _matrices: dict[torch.device, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the projections `[..., D]` of rows `[..., d]`."""
        flat = _flat_rows(rows, self.size_in)  # [J, d]
        device = flat.device
        if self.cached and device not in self._matrices:
            self._matrices[device] = self._drawn_matrix().to(device)
        if self.cached and flat.is_cuda:
            product = flat @ self._matrices[device]  # [J, D]
        else:
            product = flat.new_zeros(len(flat), self.size_out)
            pieces = torch.split(flat, TILE, 1)
            tiles: Iterable[Tensor]
            if self.cached:
                tiles = torch.split(self._matrices[device], TILE)
            else:
                tiles = self._drawn_tiles(device)
            for tile, piece in zip(tiles, pieces, strict=True):
                tile_product = piece @ tile[: piece.shape[1]]
                product += tile_product  # a separate step: addmm rounds worse
        root = math.sqrt(self.size_out)
        sketches = product / (root if self.scale == "sqrt" else root * root)
        return sketches.view(*rows.shape[:-1], self.size_out)

    def _drawn_tiles(self, device: torch.device) -> Iterator[Tensor]:
        """Draw P transposed again, and yield it tile after tile.  # [TILE, D] each."""
        num_tiles = math.ceil(self.size_in / TILE)
        block = torch.empty(min(self.block, num_tiles), TILE, self.size_out)
        for first in range(0, num_tiles, len(block)):
            indices = range(first, min(first + len(block), num_tiles))
            for tile, index in zip(block, indices, strict=False):
                self._fill(tile, index)
            yield from block[: len(indices)].to(device)

    def _drawn_matrix(self) -> Tensor:
        """Draw P transposed.  # [d, D]."""
        matrix = torch.empty(math.ceil(self.size_in / TILE) * TILE, self.size_out)
        for index, tile in enumerate(torch.split(matrix, TILE)):
            self._fill(tile, index)
        return matrix[: self.size_in]

    def _fill(self, tile: Tensor, index: int) -> None:
        tile.normal_(generator=rng.generator(self.seed, "sketch", index))


@dataclass(frozen=True)
class CountSketch:
    """Every coordinate is added, with a random sign, to one of D random buckets.

    E<S(x), S(y)> = <x, y> over seeds, like the Gaussian sketch, for d additions instead of d D.
    Coordinates are sorted by bucket once, so a sketch is a gather and a sum in a fixed order: no
    atomic additions, and on a GPU as on the CPU the same bits every time.
    """

    size_in: int
    size_out: int = 128
    seed: int = 0
    _tables: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the sketches `[..., D]` of rows `[..., d]`."""
        flat = _flat_rows(rows, self.size_in)  # [J, d]
        coordinate, sign = self._table(flat.device)  # [D, L]
        sums: list[Tensor] = []
        for chunk in torch.split(flat, _CHUNK):
            values = chunk.index_select(1, coordinate.view(-1))  # [chunk, D * L]
            buckets = values.view(len(chunk), *coordinate.shape)  # [chunk, D, L]
            sums.append((buckets * sign).sum(-1))
        return torch.cat(sums).view(*rows.shape[:-1], self.size_out)

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the coordinates of every bucket, and their signs, 0 for padding."""
        if device not in self._tables:
            coordinate, sign = self._coordinates_by_bucket()
            self._tables[device] = (coordinate.to(device), sign.to(device))
        return self._tables[device]

    def _coordinates_by_bucket(self) -> tuple[Tensor, Tensor]:
        keys = torch.tensor([rng.key(self.seed, "count-sketch")])
        bits = rng.hashed(keys, 0, self.size_in)[0]  # [d] the last for the sign, else the bucket
        bucket, order = ((bits >> 1) % self.size_out).sort(stable=True)  # [d]
        count = bucket.bincount(minlength=self.size_out)  # [D]
        first = count.cumsum(0) - count  # [D] where each bucket begins
        position = torch.arange(self.size_in) - first[bucket]  # [d]
        longest = int(count.max())
        coordinate = torch.zeros(self.size_out, longest, dtype=torch.int32)
        sign = torch.zeros(self.size_out, longest)
        coordinate[bucket, position] = order.int()
        sign[bucket, position] = (bits[order] & 1) * 2.0 - 1.0
        return coordinate, sign


def build_sketch(
    kind: str,
    size_in: int,
    size_out: int = 128,
    seed: int = 0,
    *,
    scale: Scale = "sqrt",
    cached: bool = False,
) -> Sketch:
    """Build the sketch called `kind`, "gaussian" or "count" (which ignores scale and cached)."""
    if kind == "count":
        return CountSketch(size_in, size_out, seed)
    return GaussianSketch(size_in, size_out, seed, scale, cached)


class ParameterSketch:
    """The sketch of a model's parameters, or of its head alone; simulated and real clients use it.

    The sketch is built on first use, since its matrix may be large.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        kind: str,
        size: int,
        scale: str,
        parameters: str,
        largest_cached: float = math.inf,
    ) -> None:
        """Describe the sketch; the arguments are the settings `sketch.*`.

        Args:
            layout: of the model.
            kind: "gaussian" or "count".
            size: D.
            scale: of a gaussian sketch.
            parameters: "head" or "all".
            largest_cached: floats of a matrix that stays in memory; a larger one is drawn again
                for every sketch.
        """
        entries = head_entries(layout) if parameters == "head" else layout.params
        self.kind = kind
        self.size = size
        self.scale = scale
        self.largest_cached = largest_cached
        ranges = [torch.arange(entry.start, entry.stop) for entry in entries]
        self.index = torch.cat(ranges)
        self.start = entries[0].start
        self.stop = entries[-1].stop
        self.is_contiguous = len(self.index) == self.stop - self.start

    @cached_property
    def sketch(self) -> Sketch:
        """The sketch of the selected parameters."""
        size_in = len(self.index)
        cached = size_in * self.size <= self.largest_cached
        scale = cast(Scale, self.scale)
        return build_sketch(self.kind, size_in, self.size, SHARED_SEED, scale=scale, cached=cached)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return sketches `[..., D]` of parameter rows or states `[..., n]`."""
        if self.is_contiguous:
            return self.sketch(rows[..., self.start : self.stop])
        return self.sketch(rows[..., self.index.to(rows.device)])


def _flat_rows(rows: Tensor, size_in: int) -> Tensor:
    """Return rows as `[J, d]`, float32 whatever the model is of."""
    if rows.shape[-1] != size_in:
        raise ValueError(f"rows have {rows.shape[-1]} floats, this sketch takes {size_in}")
    return rows.reshape(-1, size_in).float()
