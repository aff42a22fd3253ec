"""The sketch of a device: the simulator's projection; only a small matrix is kept in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from fedglimpse.config import SketchConfig
from fedglimpse.layout import Layout
from fedglimpse.nets import head_entries
from fedglimpse.sketch import Scale, Sketch, build_sketch

SHARED_SEED = 0  # of the projection; the simulator's, so that policies can travel
KEPT = 2**24  # floats of a matrix that stays in memory: a process may serve many messages


def projection(settings: SketchConfig, layout: Layout) -> Callable[[Tensor], Tensor]:
    """Return the map from parameters `[..., num_params]` to sketches `[..., D]`.

    Args:
        settings: `sketch.*` of the run.
        layout: of the model.
    """
    entries = head_entries(layout) if settings.parameters == "head" else layout.params
    index = torch.cat([torch.arange(e.start, e.stop) for e in entries])
    sketch = _built(settings.kind, len(index), settings.size, cast(Scale, settings.scale))
    return lambda rows: sketch(rows[..., index])


@lru_cache(maxsize=1)
def _built(kind: str, size_in: int, size_out: int, scale: Scale) -> Sketch:
    cached = size_in * size_out <= KEPT
    return build_sketch(kind, size_in, size_out, SHARED_SEED, scale=scale, cached=cached)
