"""One training step of all clients, compiled, captured as a CUDA graph and replayed.

It reads its place in the epoch from the device, so that a replay needs nothing from the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.cuda.compiled import Losses, Named, any_number
from fedglimpse.simulation.cuda.descent import descend
from fedglimpse.simulation.trainers.jobs import Examples, LossSums, TrainingJobs, TrainingRecipe
from fedglimpse.simulation.trainers.optimizers import StackedOptimizer

_WARM_UP = 3  # steps before capture, so that every lazy set-up is done


@dataclass(frozen=True)
class Program:
    """What all captured steps of a trainer have in common."""

    layout: Layout
    examples: Examples
    recipe: TrainingRecipe
    precision: Precision
    losses: Losses
    descending: Mapping[str, int]  # of `descent.descending`
    compiled: bool  # fuse elementwise work with torch.compile


def roomy(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with which a value is kept: rows of a matrix begin at multiples of 32 bytes.

    The matrix units take no others. The room beside a row stays zero: so are the inputs there.
    """
    return (shape[0], -(-shape[1] // 8) * 8) if len(shape) == 2 else shape


def _recorded(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Warm some work up, then record it as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()  # an old graph that is freed during capture would spoil it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


class CapturedStep:
    """One optimizer step of J clients, with its memory and its CUDA graph."""

    def __init__(
        self, program: Program, jobs: int, width: int, pulled: bool, squared: bool
    ) -> None:
        """Make room for a number of clients.

        Args:
            program: what to do.
            jobs: J, clients at a time.
            width: rows of the largest client, a multiple of the batch size.
            pulled: FedProx pulls at some of them.
            squared: by its squared penalty, all of them.
        """
        batch, device = program.recipe.batch_size, program.examples.y.device
        self.program, self.batch = program, batch
        self.width = width
        self.state = {
            e.name: torch.zeros(jobs, *roomy(e.shape), device=device)
            for e in program.layout.entries
        }
        self.slopes = {  # FedProx pulls at weights: then the optimizer needs their gradients
            name: torch.zeros(jobs, batch, outputs, device=device, requires_grad=True)
            for name, outputs in ({} if pulled else program.descending).items()
        }
        alone = {f"{name}.weight" for name in self.slopes}
        self.leaves = [e.name for e in program.layout.params if e.name not in alone]
        zeros = torch.zeros(jobs, device=device)
        self.jobs = TrainingJobs(
            start=zeros.long(),
            keys=zeros.long(),
            rows=torch.zeros(jobs, self.width, device=device, dtype=torch.long),
            sizes=zeros.long(),
            mu=zeros + pulled,
            squared=torch.full((jobs,), squared, device=device),
            distill=zeros,
            temperature=zeros,
            visit=zeros.long() - 1,
        )
        self.rows, self.draws = torch.zeros_like(self.jobs.rows), torch.zeros_like(self.jobs.rows)
        self.place = torch.zeros((), device=device, dtype=torch.long)  # first example of the batch
        params = [self.state[n] for n in self.leaves]
        self.optimizer = StackedOptimizer(params, program.recipe, self.jobs)
        self.tally = LossSums(jobs, device)
        work = program.examples
        self.gather, self.update = work.batch, self.optimizer.step
        if program.compiled:
            kept = [*params, *self.optimizer.memory(), *(self.optimizer.anchors or [])]
            any_number(*kept, *self.jobs.tensors().values())
            self.gather, self.update = torch.compile(work.batch), torch.compile(self.optimizer.step)
        self.epoch = torch.zeros_like(self.place)
        self.ordering: torch.cuda.CUDAGraph | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def load(self, named: dict[str, Tensor], wave: TrainingJobs) -> None:
        """Put a wave's clients into this step's memory; the rest of it stays idle."""
        count = len(wave)
        for name, value in self._real().items():
            torch.index_select(named[name], 0, wave.start, out=value[:count])
        for name in ("keys", "mu", "squared"):
            getattr(self.jobs, name)[:count] = getattr(wave, name)
        self.jobs.sizes.zero_()
        self.jobs.sizes[:count] = wave.sizes
        self.jobs.rows[:count, : wave.rows.shape[1]] = wave.rows
        self.optimizer.reset()
        for value in self.tally.tensors():
            value.zero_()

    def trained(self, count: int) -> Tensor:
        """Return the first clients' models `[count, d]` as they are now."""
        return self.program.layout.pack(self._real())[:count]

    def _real(self) -> dict[str, Tensor]:
        """Return views of the values alone, without the room beside them."""
        matrices = {e.name: e.shape[1] for e in self.program.layout.entries if len(e.shape) == 2}
        return {n: v[..., : matrices[n]] if n in matrices else v for n, v in self.state.items()}

    def shuffle(self, epoch: int) -> None:
        """Draw the order of an epoch and go to its beginning; the first call captures it."""
        self.epoch.fill_(epoch)
        if self.ordering is None:
            self.ordering = _recorded(self._order)
        self.ordering.replay()

    def _order(self) -> None:
        rows, draws = self.program.examples.order(self.jobs, self.epoch)
        self.rows.copy_(rows)
        if draws is not None:
            self.draws.copy_(draws)
        self.place.zero_()

    def run(self) -> None:
        """Take one step; the first call captures it."""
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()

    def _capture(self) -> None:
        """Warm up on a copy of the memory, then record one step."""
        memory = [*self.state.values(), self.place, *self.optimizer.memory()]
        memory += self.tally.tensors()
        kept = [m.clone() for m in memory]
        self.graph = _recorded(self._once)
        for m, value in zip(memory, kept, strict=True):
            m.copy_(value)

    def _once(self) -> None:
        """One step of every client, on the device alone."""
        columns = self.place + torch.arange(self.batch, device=self.place.device)
        columns = columns.clamp(max=self.width - 1).expand(len(self.rows), -1)  # [J, B]
        counts = (self.jobs.sizes - self.place).clamp(0, self.batch)
        counts = counts.masked_fill(counts == 1, 0)
        draws = self.draws.gather(1, columns) if self.program.examples.augment else None
        rows = self.rows.gather(1, columns)
        any_number(rows, *([] if draws is None else [draws]))
        x, y = self.gather(rows, draws)
        flags: Precision = "fp32" if self.program.precision == "fp32" else "tf32"
        with numerics(x.device, flags):  # bf16 is written into the forward pass itself
            each, buffers = self._learn(x, y, counts)
        with torch.no_grad():
            for name, value in buffers.items():
                self.state[name].copy_(value)
            self.tally.add(slice(None), each, counts)
            self.place += self.batch

    def _learn(self, x: Tensor, y: Tensor, counts: Tensor) -> tuple[Tensor, Named]:
        """Step downhill; returns the loss of every example `[J, B]` and new buffers."""
        leaves = {n: self.state[n].detach().requires_grad_() for n in self.leaves}
        state = {**self.state, **leaves}
        any_number(x, y, counts, *state.values(), *self.slopes.values())
        total, each, buffers, inputs = self.program.losses(x, y, state, counts, self.slopes)
        asked = [*leaves.values(), *self.slopes.values()]
        grads = torch.autograd.grad(total, asked)
        active = counts > 0
        any_number(active, *grads)
        self.update(list(grads[: len(leaves)]), active)
        with torch.no_grad():
            for (name, x), grad in zip(inputs.items(), grads[len(leaves) :], strict=True):
                descend(self.state[f"{name}.weight"], x, grad, self.program.recipe.lr)
        return each, buffers
