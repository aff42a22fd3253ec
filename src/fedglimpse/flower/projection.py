"""The sketch of a device: the simulator's projection, without keeping its matrix in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from fedglimpse.config import SketchConfig
from fedglimpse.layout import Layout
from fedglimpse.nets import head_entries
from fedglimpse.sketch import Scale, build_sketch

SHARED_SEED = 0  # of the projection; the simulator's, so that policies can travel


def projection(settings: SketchConfig, layout: Layout) -> Callable[[Tensor], Tensor]:
    """Return the map from parameters `[..., num_params]` to sketches `[..., D]`.

    Args:
        settings: `sketch.*` of the run.
        layout: of the model.
    """
    entries = head_entries(layout) if settings.parameters == "head" else layout.params
    index = torch.cat([torch.arange(e.start, e.stop) for e in entries])
    scale = cast(Scale, settings.scale)
    sketch = build_sketch(settings.kind, len(index), settings.size, SHARED_SEED, scale=scale)
    return lambda rows: sketch(rows[..., index])
