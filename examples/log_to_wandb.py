"""Follow a run in Weights & Biases; with WANDB_MODE=offline everything stays on this machine.

Needs: pip install wandb
Run, in this folder: fedglimpse run method=glimpse log.own=log_to_wandb:WandbSink --out runs/a
"""

from collections.abc import Mapping
from uuid import uuid4

import wandb

from fedglimpse.runs.trackers import Source


class WandbSink:
    """One run of W&B for each seed; resuming a run of fedglimpse resumes them."""

    def __init__(self, source: Source) -> None:
        self.run = wandb.init(
            project="fedglimpse",
            name=source.name,
            id=source.tracker_id("wandb", lambda: uuid4().hex),
            resume="allow",
            reinit="create_new",  # the seeds of one run are open at the same time
            config={**source.config.flat(), "seed": source.seed},
            dir=source.path,
        )

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=round_num)

    def close(self, finished: bool) -> None:
        self.run.finish()
