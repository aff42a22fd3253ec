"""Local training on a GPU: one compiled step of all clients, captured once and replayed.

A captured step reads its place in the epoch from the device, so that a round is a handful of
launches: no tensor comes back to the host until the round is over.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.data.dataset import as_input
from fedglimpse.layout import Layout
from fedglimpse.sim.batched import BatchedTrainer
from fedglimpse.sim.gpu.compiled import Named, any_number, losses_of
from fedglimpse.sim.gpu.descent import descend, descending
from fedglimpse.sim.jobs import Examples, Jobs, Recipe, Tally, Trained
from fedglimpse.sim.memory import bytes_per_job, fitting_jobs, smaller_until_it_fits
from fedglimpse.sim.precision import Precision, numerics
from fedglimpse.sim.stacked import chain
from fedglimpse.sim.stacked_optim import StackedOptimizer

MAX_JOBS = 256  # clients in one captured step
_WARM_UP = 3  # steps before capture, so that every lazy set-up is done


class GraphedTrainer:
    """Trains all jobs of all lanes by replaying one captured step; agrees with `SerialTrainer`.

    Jobs that distil or train single blocks go to the `BatchedTrainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        recipe: Recipe,
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
        self.layers, self.layout = chain(model), Layout.of(model)
        self.examples, self.recipe = _with_room(examples, self.layers), recipe
        self.precision: Precision = precision
        self.max_jobs, self.compiled = max_jobs, compiled
        dtype, width = (torch.bfloat16, 2) if precision == "bf16" else (torch.float32, 4)
        self.losses = losses_of(self.layers, dtype, compiled)
        self.descending = descending(self.layers, recipe, dtype)
        example = as_input(examples.x[:1]).to(next(model.parameters()).device)
        self.bytes_per_job = bytes_per_job(model, example, recipe.batch_size, width)
        self.steps: dict[tuple[int, bool, bool], _Step] = {}

    def train(self, start: Tensor, jobs: Jobs) -> Trained:
        """Train every job; the answer is in the order of `jobs`."""
        if jobs.outline.special:
            return self.plain.train(start, jobs)
        if self.max_jobs is None:
            self.max_jobs = fitting_jobs(self.bytes_per_job, start.device, MAX_JOBS)

        def attempt(most: int) -> Trained:
            self.max_jobs = most
            return self._train(start, jobs, most)

        return smaller_until_it_fits(attempt, self.max_jobs, self._release)

    def _release(self) -> None:
        """Let go of the memory of all captured steps."""
        self.steps.clear()
        gc.collect()

    def _train(self, start: Tensor, jobs: Jobs, most: int) -> Trained:
        """Train in waves of at most so many jobs."""
        named = self.layout.unpack(start)
        if len(jobs) <= most:
            states, tally = self._wave(named, jobs, most)
            return tally.over(states)
        states = start.new_empty(len(jobs), self.layout.size)
        tally = Tally(len(jobs), start.device)
        waves = -(-len(jobs) // most)  # of equal size: a small one takes as long as a large one
        for index in torch.arange(len(jobs), device=start.device).tensor_split(waves):
            states[index], some = self._wave(named, jobs.pick(index), most)
            tally.put(index, some)
        return tally.over(states)

    def _wave(self, named: dict[str, Tensor], wave: Jobs, most: int) -> tuple[Tensor, Tally]:
        """Train some jobs at once; returns their states `[J, d]` and losses."""
        step = self._step(wave, most)
        step.load(named, wave)
        batches = -(-wave.outline.longest // self.recipe.batch_size)
        for epoch in range(self.recipe.epochs):
            step.shuffle(epoch)
            for _ in range(batches):
                step.run()
        return step.trained(len(wave)), step.tally.first(len(wave))

    def _step(self, wave: Jobs, most: int) -> _Step:
        """Return the captured step that has room for these jobs."""
        jobs, width, outline = bucket(len(wave), most), wave.rows.shape[1], wave.outline
        kind = (jobs, outline.pulled, outline.squared)
        if kind not in self.steps or self.steps[kind].width < width:
            self.steps[kind] = _Step(self, jobs, width, outline.pulled, outline.squared)
        return self.steps[kind]


def bucket(jobs: int, limit: int) -> int:
    """Round a number of jobs up, so that few different steps are captured."""
    unit = 1 if jobs <= 8 else 4 if jobs <= 32 else 8
    return min(-(-jobs // unit) * unit, max(limit, jobs))


def roomy(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with which a value is kept: rows of a matrix begin at multiples of 32 bytes.

    The matrix units take no others. The room beside a row stays zero: so are the inputs there.
    """
    return (shape[0], -(-shape[1] // 8) * 8) if len(shape) == 2 else shape


def _with_room(examples: Examples, layers: list[tuple[str, nn.Module]]) -> Examples:
    """Give flat inputs the room that the weights of a dense first layer have beside their rows."""
    first = next((layer for _, layer in layers if not isinstance(layer, nn.Flatten)), None)
    x = examples.x
    if x.dim() != 2 or not x.is_floating_point() or not isinstance(first, nn.Linear):
        return examples
    return replace(examples, x=F.pad(x, (0, roomy(tuple(x.shape))[1] - x.shape[1])))


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


class _Step:
    """One optimizer step of J clients, with its memory and its CUDA graph."""

    def __init__(
        self, trainer: GraphedTrainer, jobs: int, width: int, pulled: bool, squared: bool
    ) -> None:
        batch, device = trainer.recipe.batch_size, trainer.examples.y.device
        self.trainer, self.batch = trainer, batch
        self.width = -(-width // batch) * batch  # room for whole batches
        self.state = {
            e.name: torch.zeros(jobs, *roomy(e.shape), device=device)
            for e in trainer.layout.entries
        }
        self.slopes = {  # FedProx pulls at weights: then the optimizer needs their gradients
            name: torch.zeros(jobs, batch, outputs, device=device, requires_grad=True)
            for name, outputs in ({} if pulled else trainer.descending).items()
        }
        alone = {f"{name}.weight" for name in self.slopes}
        self.leaves = [e.name for e in trainer.layout.params if e.name not in alone]
        zeros = torch.zeros(jobs, device=device)
        self.jobs = Jobs(
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
        self.optimizer = StackedOptimizer(params, trainer.recipe, self.jobs)
        self.tally = Tally(jobs, device)
        work = trainer.examples
        self.gather, self.update = work.batch, self.optimizer.step
        if trainer.compiled:
            kept = [*params, *self.optimizer.memory(), *(self.optimizer.anchors or [])]
            any_number(*kept, *self.jobs.tensors().values())
            self.gather, self.update = torch.compile(work.batch), torch.compile(self.optimizer.step)
        self.epoch = torch.zeros_like(self.place)
        self.ordering: torch.cuda.CUDAGraph | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def load(self, named: dict[str, Tensor], wave: Jobs) -> None:
        """Put a wave's clients into this step's memory; the rest of it stays idle."""
        count = len(wave)
        for name, value in self._real().items():
            value[:count] = named[name][wave.start]
        for name in ("keys", "mu", "squared"):
            getattr(self.jobs, name)[:count] = getattr(wave, name)
        self.jobs.sizes.zero_()
        self.jobs.sizes[:count] = wave.sizes
        self.jobs.rows[:count, : wave.rows.shape[1]] = wave.rows
        self.optimizer.reset()
        for value in vars(self.tally).values():
            value.zero_()

    def trained(self, count: int) -> Tensor:
        """Return the first clients' models `[count, d]` as they are now."""
        return self.trainer.layout.pack(self._real())[:count]

    def _real(self) -> dict[str, Tensor]:
        """Return views of the values alone, without the room beside them."""
        matrices = {e.name: e.shape[1] for e in self.trainer.layout.entries if len(e.shape) == 2}
        return {n: v[..., : matrices[n]] if n in matrices else v for n, v in self.state.items()}

    def shuffle(self, epoch: int) -> None:
        """Draw the order of an epoch and go to its beginning; the first call captures it."""
        self.epoch.fill_(epoch)
        if self.ordering is None:
            self.ordering = _recorded(self._order)
        self.ordering.replay()

    def _order(self) -> None:
        rows, draws = self.trainer.examples.order(self.jobs, self.epoch)
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
        memory += vars(self.tally).values()
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
        draws = self.draws.gather(1, columns) if self.trainer.examples.augment else None
        rows = self.rows.gather(1, columns)
        any_number(rows, *([] if draws is None else [draws]))
        x, y = self.gather(rows, draws)
        flags: Precision = "fp32" if self.trainer.precision == "fp32" else "tf32"
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
        total, each, buffers, inputs = self.trainer.losses(x, y, state, counts, self.slopes)
        asked = [*leaves.values(), *self.slopes.values()]
        grads = torch.autograd.grad(total, asked)
        active = counts > 0
        any_number(active, *grads)
        self.update(list(grads[: len(leaves)]), active)
        with torch.no_grad():
            for (name, x), grad in zip(inputs.items(), grads[len(leaves) :], strict=True):
                descend(self.state[f"{name}.weight"], x, grad, self.trainer.recipe.lr)
        return each, buffers
