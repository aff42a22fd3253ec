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
from fedglimpse.simulation.cuda.captured import (
    CapturedStep,
    StepProgram,
    loss_function,
    padded_shape,
)
from fedglimpse.simulation.cuda.channels_last import Layers
from fedglimpse.simulation.cuda.dense_step import self_stepping_layers
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
        self.batched = BatchedTrainer(model, examples, recipe, precision, max_jobs)
        self.layout = Layout.of(model)
        self.recipe = recipe
        layers = chain(model)
        is_bf16 = precision == "bf16"
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        self.program = StepProgram(
            layout=self.layout,
            examples=_with_padded_features(examples, layers),
            recipe=recipe,
            precision=precision,
            batch_losses=loss_function(layers, dtype, compiled),
            self_stepping=self_stepping_layers(layers, recipe, dtype),
            compiled=compiled,
        )
        self.max_jobs = max_jobs
        model_device = next(model.parameters()).device
        example = as_input(examples.x[:1]).to(model_device)
        bytes_per_number = 2 if is_bf16 else 4
        self.bytes_per_job = bytes_per_job(model, example, recipe.batch_size, bytes_per_number)
        self.steps: dict[tuple[int, bool, bool], CapturedStep] = {}
        self.width = 0  # rows of a client that captured steps have memory for

    def train(self, start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        """Train every job; results are in the order of `jobs`."""
        if jobs.summary.any_special:
            return self.batched.train(start, jobs)
        if self.max_jobs is None:
            self.max_jobs = fitting_jobs(self.bytes_per_job, start.device, MAX_JOBS)

        def attempt(max_jobs: int) -> TrainingResults:
            self.max_jobs = max_jobs
            return self._train(start, jobs, max_jobs)

        return smaller_until_it_fits(attempt, self.max_jobs, self._free_steps)

    def _free_steps(self) -> None:
        """Free the memory of all captured steps."""
        self.steps.clear()
        gc.collect()

    def _train(self, start: Tensor, jobs: TrainingJobs, max_jobs: int) -> TrainingResults:
        """Train in waves of at most `max_jobs` jobs."""
        named_start = self.layout.unpack(start)
        if len(jobs) <= max_jobs:
            states, sums = self._train_wave(named_start, jobs, max_jobs)
            return sums.results(states)
        states = start.new_empty(len(jobs), self.layout.size)
        sums = LossSums(len(jobs), start.device)
        waves = -(-len(jobs) // max_jobs)  # of equal size: a small one takes as long as a large one
        for index in torch.arange(len(jobs), device=start.device).tensor_split(waves):
            wave = jobs.pick(index)
            states[index], wave_sums = self._train_wave(named_start, wave, max_jobs)
            sums.put(index, wave_sums)
        return sums.results(states)

    def _train_wave(
        self, named_start: dict[str, Tensor], wave: TrainingJobs, max_jobs: int
    ) -> tuple[Tensor, LossSums]:
        """Train some jobs at once; returns their states `[J, d]` and losses."""
        step = self._step_for(wave, max_jobs)
        step.load(named_start, wave)
        batches = -(-wave.summary.most_rows // self.recipe.batch_size)
        for epoch in range(self.recipe.epochs):
            step.shuffle(epoch)
            for _ in range(batches):
                step.run()
        return step.trained(len(wave)), step.sums.first(len(wave))

    def _step_for(self, wave: TrainingJobs, max_jobs: int) -> CapturedStep:
        """Return the captured step that has memory for these jobs."""
        jobs = rounded_jobs(len(wave), max_jobs)
        width = wave.rows.shape[1]
        summary = wave.summary
        kind = (jobs, summary.any_proximal, summary.all_squared)
        if kind not in self.steps or self.steps[kind].width < width:
            width = rounded_width(width, self.recipe.batch_size)
            self.width = max(self.width, width)
            self.steps[kind] = CapturedStep(
                self.program, jobs, self.width, summary.any_proximal, summary.all_squared
            )
        return self.steps[kind]


def rounded_jobs(jobs: int, limit: int) -> int:
    """Round a number of jobs up, so that few different steps are captured."""
    if jobs <= 8:
        unit = 1
    elif jobs <= 32:
        unit = 4
    else:
        unit = 8
    rounded_up = -(-jobs // unit) * unit
    return min(rounded_up, max(limit, jobs))


def rounded_width(rows: int, batch: int) -> int:
    """Round rows up to 1, 2, 4, 8, ... batches: larger clients come along later."""
    batches = -(-rows // batch)
    return batch * 2 ** (batches - 1).bit_length()


def _with_padded_features(examples: Examples, layers: Layers) -> Examples:
    """Pad flat inputs as the weights of a dense first layer are padded."""
    x = examples.x
    if x.dim() != 2 or not x.is_floating_point():
        return examples
    first_layer = next((layer for _, layer in layers if not isinstance(layer, nn.Flatten)), None)
    if not isinstance(first_layer, nn.Linear):
        return examples
    _, padded_columns = padded_shape(tuple(x.shape))
    padding = padded_columns - x.shape[1]
    return replace(examples, x=F.pad(x, (0, padding)))
