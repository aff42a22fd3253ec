"""Local training on a GPU: a round is a handful of launches of captured steps.

No tensor comes back to the host until the round is over.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.data.dataset import as_input
from fedglimpse.federation.devices import Precision
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.cuda.captured import CapturedStep, Program, roomy
from fedglimpse.simulation.cuda.compiled import losses_of
from fedglimpse.simulation.cuda.descent import descending
from fedglimpse.simulation.cuda.memory import bytes_per_job, fitting_jobs, smaller_until_it_fits
from fedglimpse.simulation.trainers.batched import BatchedTrainer
from fedglimpse.simulation.trainers.jobs import (
    Examples,
    LossSums,
    TrainingJobs,
    TrainingRecipe,
    TrainingResults,
)
from fedglimpse.simulation.trainers.stacked import chain

MAX_JOBS = 256  # clients in one captured step


class GraphedTrainer:
    """Trains all jobs of all lanes by replaying one captured step; agrees with `SerialTrainer`.

    Jobs that distil or train single blocks go to the `BatchedTrainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        recipe: TrainingRecipe,
        precision: Precision = "fp32",
        max_jobs: int | None = None,
        compiled: bool = True,
    ) -> None:
        """Take the structure of `model`, which must be of layers that `fits`.

        Args:
            model: its values are not used.
            examples: the training set, on a CUDA device.
            recipe: optimizer, batch size, epochs.
            precision: of forward and backward passes.
            max_jobs: clients in memory at a time, more are trained in waves; None: what fits.
            compiled: fuse elementwise work with torch.compile (half a minute, once a model).
        """
        self.plain = BatchedTrainer(model, examples, recipe, precision, max_jobs)
        layers, self.layout, self.recipe = chain(model), Layout.of(model), recipe
        dtype, width = (torch.bfloat16, 2) if precision == "bf16" else (torch.float32, 4)
        self.program = Program(
            layout=self.layout,
            examples=_with_room(examples, layers),
            recipe=recipe,
            precision=precision,
            losses=losses_of(layers, dtype, compiled),
            descending=descending(layers, recipe, dtype),
            compiled=compiled,
        )
        self.max_jobs = max_jobs
        example = as_input(examples.x[:1]).to(next(model.parameters()).device)
        self.bytes_per_job = bytes_per_job(model, example, recipe.batch_size, width)
        self.steps: dict[tuple[int, bool, bool], CapturedStep] = {}
        self.width = 0  # rows of a client that captured steps have room for

    def train(self, start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        """Train every job; the answer is in the order of `jobs`."""
        if jobs.summary.any_special:
            return self.plain.train(start, jobs)
        if self.max_jobs is None:
            self.max_jobs = fitting_jobs(self.bytes_per_job, start.device, MAX_JOBS)

        def attempt(most: int) -> TrainingResults:
            self.max_jobs = most
            return self._train(start, jobs, most)

        return smaller_until_it_fits(attempt, self.max_jobs, self._release)

    def _release(self) -> None:
        """Let go of the memory of all captured steps."""
        self.steps.clear()
        gc.collect()

    def _train(self, start: Tensor, jobs: TrainingJobs, most: int) -> TrainingResults:
        """Train in waves of at most so many jobs."""
        named = self.layout.unpack(start)
        if len(jobs) <= most:
            states, tally = self._wave(named, jobs, most)
            return tally.results(states)
        states = start.new_empty(len(jobs), self.layout.size)
        tally = LossSums(len(jobs), start.device)
        waves = -(-len(jobs) // most)  # of equal size: a small one takes as long as a large one
        for index in torch.arange(len(jobs), device=start.device).tensor_split(waves):
            states[index], some = self._wave(named, jobs.pick(index), most)
            tally.put(index, some)
        return tally.results(states)

    def _wave(
        self, named: dict[str, Tensor], wave: TrainingJobs, most: int
    ) -> tuple[Tensor, LossSums]:
        """Train some jobs at once; returns their states `[J, d]` and losses."""
        step = self._step(wave, most)
        step.load(named, wave)
        batches = -(-wave.summary.most_rows // self.recipe.batch_size)
        for epoch in range(self.recipe.epochs):
            step.shuffle(epoch)
            for _ in range(batches):
                step.run()
        return step.trained(len(wave)), step.tally.first(len(wave))

    def _step(self, wave: TrainingJobs, most: int) -> CapturedStep:
        """Return the captured step that has room for these jobs."""
        jobs, width, outline = bucket(len(wave), most), wave.rows.shape[1], wave.summary
        kind = (jobs, outline.any_proximal, outline.all_squared)
        if kind not in self.steps or self.steps[kind].width < width:
            self.width = max(self.width, roomy_width(width, self.recipe.batch_size))
            self.steps[kind] = CapturedStep(
                self.program, jobs, self.width, outline.any_proximal, outline.all_squared
            )
        return self.steps[kind]


def bucket(jobs: int, limit: int) -> int:
    """Round a number of jobs up, so that few different steps are captured."""
    unit = 1 if jobs <= 8 else 4 if jobs <= 32 else 8
    return min(-(-jobs // unit) * unit, max(limit, jobs))


def roomy_width(rows: int, batch: int) -> int:
    """Return room for so many rows in 1, 2, 4, 8, ... batches: larger clients come along later."""
    return batch * 2 ** (-(-rows // batch) - 1).bit_length()


def _with_room(examples: Examples, layers: list[tuple[str, nn.Module]]) -> Examples:
    """Give flat inputs the room that the weights of a dense first layer have beside their rows."""
    first = next((layer for _, layer in layers if not isinstance(layer, nn.Flatten)), None)
    x = examples.x
    if x.dim() != 2 or not x.is_floating_point() or not isinstance(first, nn.Linear):
        return examples
    return replace(examples, x=F.pad(x, (0, roomy(tuple(x.shape))[1] - x.shape[1])))
