"""One training step of all clients, compiled, captured as a CUDA graph and replayed.

The step reads its position in the epoch from the device, so that a replay needs nothing from the
host. Its tensors stay where they are from capture to capture: a round's clients are copied into
them (`CapturedStep.load`), and the trained models are copied out (`CapturedStep.trained`).

Compiling takes half a minute, and a program that runs many federations makes many trainers. So the
compiled losses outlive them: models of the same layers share one, whatever their values and
whatever the number of clients (`loss_function`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.cuda.channels_last import Layers, forward
from fedglimpse.simulation.cuda.dense_step import step_weight
from fedglimpse.simulation.trainers.jobs import Examples, LossSums, TrainingJobs, TrainingRecipe
from fedglimpse.simulation.trainers.optimizers import StackedOptimizer

_WARM_UP_STEPS = 3  # before capture, so that every lazy set-up is done

NamedTensors = Mapping[str, Tensor]


class BatchLosses(NamedTuple):
    """Losses of one batch of J clients, and what a step needs besides."""

    total: Tensor  # sum of the clients' mean losses; gradients come from it alone
    losses: Tensor  # of every example, 0 for padding  # [J, B]
    buffers: NamedTensors  # new running statistics
    dense_inputs: NamedTensors  # of the layers with an offset  # [J, B, F]


# inputs [J, B, ...], labels [J, B], state, counts [J], offsets of dense layers
LossFunction = Callable[[Tensor, Tensor, NamedTensors, Tensor, NamedTensors], BatchLosses]

_compiled_losses: dict[tuple[Any, ...], LossFunction] = {}  # by structure of model


def loss_function(layers: Layers, dtype: torch.dtype, compiled: bool) -> LossFunction:
    """Return the function of a batch and the clients' state that training minimises.

    Args:
        layers: of `trainers.stacked.chain`; their values are not used.
        dtype: of the activations.
        compiled: fuse elementwise work with torch.compile.
    """

    def batch_losses(
        x: Tensor, y: Tensor, state: NamedTensors, counts: Tensor, offsets: NamedTensors
    ) -> BatchLosses:
        if x.dim() == 5:
            x = x.permute(0, 1, 3, 4, 2)
        result = forward(layers, state, x, counts, dtype, offsets=offsets)
        logits = result.logits.float().flatten(0, 1)
        losses = F.cross_entropy(logits, y.flatten(), reduction="none").view(y.shape)
        positions = torch.arange(y.shape[1], device=y.device)
        is_real = positions < counts[:, None]
        losses = losses * is_real
        client_losses = losses.sum(1) / counts.clamp(min=1)
        total = client_losses.sum()
        dense_inputs = {name: value.detach() for name, value in result.dense_inputs.items()}
        return BatchLosses(total, losses.detach(), result.buffers, dense_inputs)

    if not compiled:
        return batch_losses
    descriptions = [(name, type(layer), repr(layer)) for name, layer in layers]
    structure = (dtype, *descriptions)
    if structure not in _compiled_losses:
        _compiled_losses[structure] = torch.compile(batch_losses)
    return _compiled_losses[structure]


def allow_any_number(*tensors: Tensor) -> None:
    """Let what is compiled for these tensors hold for any number of clients, their first size.

    Their other sizes stay fixed: kernels are made for them.
    """
    for tensor in tensors:
        other_dims = list(range(1, tensor.dim()))
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
        torch._dynamo.mark_static(tensor, other_dims)


@dataclass(frozen=True)
class StepProgram:
    """What all captured steps of a trainer have in common."""

    layout: Layout
    examples: Examples
    recipe: TrainingRecipe
    precision: Precision
    batch_losses: LossFunction
    self_stepping: Mapping[str, int]  # of `dense_step.self_stepping_layers`
    compiled: bool  # fuse elementwise work with torch.compile


def padded_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which a value is stored: rows of a matrix begin at multiples of 32 bytes.

    The matrix units take no others. The padding of a row stays zero: so are the inputs there.
    """
    if len(shape) != 2:
        return shape
    rows, columns = shape
    return rows, -(-columns // 8) * 8


def _recorded(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Warm some work up, then record it as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_STEPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()  # an old graph that is freed during capture would spoil it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


class CapturedStep:
    """One optimizer step of J clients, with its memory and its CUDA graphs."""

    def __init__(
        self, program: StepProgram, jobs: int, width: int, proximal: bool, all_squared: bool
    ) -> None:
        """Allocate memory for a number of clients; nothing is captured yet.

        Args:
            program: what to do.
            jobs: J, clients at a time.
            width: rows of the largest client, a multiple of the batch size.
            proximal: FedProx pulls at some of them.
            all_squared: by its squared penalty, all of them.
        """
        self.program = program
        self.batch = program.recipe.batch_size
        self.width = width
        device = program.examples.y.device
        self.state: dict[str, Tensor] = {}
        for entry in program.layout.entries:
            shape = padded_shape(entry.shape)
            self.state[entry.name] = torch.zeros(jobs, *shape, device=device)
        self.offsets: dict[str, Tensor] = {}
        if not proximal:  # FedProx pulls at weights: then the optimizer needs their gradients
            for name, outputs in program.self_stepping.items():
                offset = torch.zeros(jobs, self.batch, outputs, device=device)
                self.offsets[name] = offset.requires_grad_()
        self_stepping = {f"{name}.weight" for name in self.offsets}
        self.leaves = [e.name for e in program.layout.params if e.name not in self_stepping]
        self.jobs = _empty_jobs(jobs, width, proximal, all_squared, device)

        # The current epoch's order of examples and augmentation draws [J, width], and the position
        # in it: the first example of the next batch.
        self.rows = torch.zeros_like(self.jobs.rows)
        self.draws = torch.zeros_like(self.jobs.rows)
        self.position = torch.zeros((), device=device, dtype=torch.long)
        self.epoch = torch.zeros_like(self.position)

        params = [self.state[name] for name in self.leaves]
        self.optimizer = StackedOptimizer(params, program.recipe, self.jobs)
        self.sums = LossSums(jobs, device)
        self.load_batch = program.examples.batch
        self.update = self.optimizer.step
        if program.compiled:
            optimizer_memory = [*self.optimizer.memory(), *(self.optimizer.anchors or [])]
            allow_any_number(*params, *optimizer_memory, *self.jobs.tensors().values())
            self.load_batch = torch.compile(self.load_batch)
            self.update = torch.compile(self.update)
        self.epoch_graph: torch.cuda.CUDAGraph | None = None
        self.step_graph: torch.cuda.CUDAGraph | None = None

    def load(self, start: NamedTensors, wave: TrainingJobs) -> None:
        """Put a wave's clients into this step's memory; the rest of it stays idle.

        Args:
            start: name -> states to train from, stacked.  # [S, *shape]
            wave: clients, at most J.
        """
        count = len(wave)
        for name, value in self._unpadded_state().items():
            torch.index_select(start[name], 0, wave.start, out=value[:count])
        self.jobs.keys[:count] = wave.keys
        self.jobs.mu[:count] = wave.mu
        self.jobs.squared[:count] = wave.squared
        self.jobs.sizes.zero_()
        self.jobs.sizes[:count] = wave.sizes
        self.jobs.rows[:count, : wave.rows.shape[1]] = wave.rows
        self.optimizer.reset()
        for value in self.sums.tensors():
            value.zero_()

    def trained(self, count: int) -> Tensor:
        """Return the first clients' models `[count, d]` as they are now."""
        return self.program.layout.pack(self._unpadded_state())[:count]

    def _unpadded_state(self) -> dict[str, Tensor]:
        """Return views of the values alone, without the padding of their rows."""
        views = dict(self.state)
        for entry in self.program.layout.entries:
            if len(entry.shape) == 2:
                columns = entry.shape[1]
                views[entry.name] = views[entry.name][..., :columns]
        return views

    def shuffle(self, epoch: int) -> None:
        """Draw the order of an epoch and go to its beginning; the first call captures it."""
        self.epoch.fill_(epoch)
        if self.epoch_graph is None:
            self.epoch_graph = _recorded(self._begin_epoch)
        self.epoch_graph.replay()

    def _begin_epoch(self) -> None:
        rows, draws = self.program.examples.order(self.jobs, self.epoch)
        self.rows.copy_(rows)
        if draws is not None:
            self.draws.copy_(draws)
        self.position.zero_()

    def run(self) -> None:
        """Take one step; the first call captures it."""
        if self.step_graph is None:
            self.step_graph = self._captured()
        self.step_graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Record one step, and undo what its warm-up changed."""
        changing = [
            *self.state.values(),
            self.position,
            *self.optimizer.memory(),
            *self.sums.tensors(),
        ]
        values_before = [tensor.clone() for tensor in changing]
        graph = _recorded(self._step)
        for tensor, value in zip(changing, values_before, strict=True):
            tensor.copy_(value)
        return graph

    def _step(self) -> None:
        """One step of every client, on the device alone."""
        columns = self.position + torch.arange(self.batch, device=self.position.device)
        columns = columns.clamp(max=self.width - 1)
        columns = columns.expand(len(self.rows), -1)  # [J, B]
        counts = (self.jobs.sizes - self.position).clamp(0, self.batch)
        counts = counts.masked_fill(counts == 1, 0)  # as `Examples.batches`
        draws = self.draws.gather(1, columns) if self.program.examples.augment else None
        rows = self.rows.gather(1, columns)
        allow_any_number(rows)
        if draws is not None:
            allow_any_number(draws)
        x, y = self.load_batch(rows, draws)
        flags: Precision = "fp32" if self.program.precision == "fp32" else "tf32"
        with numerics(x.device, flags):  # bf16 is written into the forward pass itself
            losses, buffers = self._descend(x, y, counts)
        with torch.no_grad():
            for name, value in buffers.items():
                self.state[name].copy_(value)
            self.sums.add(slice(None), losses, counts)
            self.position += self.batch

    def _descend(self, x: Tensor, y: Tensor, counts: Tensor) -> tuple[Tensor, NamedTensors]:
        """Step downhill; returns the loss of every example `[J, B]` and new buffers."""
        leaves = {name: self.state[name].detach().requires_grad_() for name in self.leaves}
        state = {**self.state, **leaves}
        allow_any_number(x, y, counts, *state.values(), *self.offsets.values())
        result = self.program.batch_losses(x, y, state, counts, self.offsets)
        inputs = [*leaves.values(), *self.offsets.values()]
        grads = torch.autograd.grad(result.total, inputs)
        is_active = counts > 0
        allow_any_number(is_active, *grads)
        leaf_grads = list(grads[: len(leaves)])
        offset_grads = dict(zip(self.offsets, grads[len(leaves) :], strict=True))
        self.update(leaf_grads, is_active)
        with torch.no_grad():
            for name, dense_input in result.dense_inputs.items():
                weight = self.state[f"{name}.weight"]
                step_weight(weight, dense_input, offset_grads[name], self.program.recipe.lr)
        return result.losses, result.buffers


def _empty_jobs(
    jobs: int, width: int, proximal: bool, all_squared: bool, device: torch.device
) -> TrainingJobs:
    """Return jobs to be overwritten, of a kind that decides what the optimizer computes."""
    zeros = torch.zeros(jobs, device=device)
    return TrainingJobs(
        start=zeros.long(),
        keys=zeros.long(),
        rows=torch.zeros(jobs, width, device=device, dtype=torch.long),
        sizes=zeros.long(),
        mu=zeros + proximal,
        squared=torch.full((jobs,), all_squared, device=device),
        distill=zeros,
        temperature=zeros,
        visit=zeros.long() - 1,
    )
