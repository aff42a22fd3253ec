"""The networks of R agents as rows of one matrix, and the optimizer that moves all rows at once.

`Stack` moves the parameters of networks into one tensor `[R, P]` and leaves views of it behind, so
that each network still is its own. `StackedLearner` does the same to the memories of the agents'
optimizers; its steps are those of `torch.optim`, row by row (`agent/learner.py` is the readable
twin).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from fedglimpse.agent.learner import DoubleDQN

_BETAS, _EPS = (0.9, 0.999), 1e-8  # torch.optim.Adam's defaults
_CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_


class Stack:
    """Parameters of networks of the same shape, side by side."""

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        """Move the parameters of `nets` into one matrix."""
        each = [[p.data.reshape(-1) for p in net.parameters()] for net in nets]
        self.rows = torch.stack([torch.cat(parts) for parts in each])  # [R, P]
        self.tensors: dict[str, Tensor] = {}  # name -> [R, *shape], views of `rows`
        at = 0
        for name, parameter in nets[0].named_parameters():
            part = self.rows[:, at : at + parameter.numel()]
            self.tensors[name] = part.view(len(nets), *parameter.shape)
            at += parameter.numel()
        for r, net in enumerate(nets):
            for name, parameter in net.named_parameters():
                parameter.data = self.tensors[name][r]

    def of(self, lanes: Sequence[int]) -> dict[str, Tensor]:
        """Return the parameters of some networks, in order `[R', *shape]`."""
        if len(lanes) == len(self.rows):
            return self.tensors
        return {name: tensor[list(lanes)] for name, tensor in self.tensors.items()}


class StackedLearner:
    """R double-DQN learners that step together."""

    def __init__(self, learners: Sequence[DoubleDQN[Any]]) -> None:
        """Take over the networks and optimizer memories of `learners`, leaving views behind."""
        first = learners[0]
        self.learners, self.adam = list(learners), isinstance(first.optimizer, torch.optim.Adam)
        self.online = Stack([one.online for one in learners])
        self.target = Stack([one.target for one in learners])
        for tensor in self.online.tensors.values():
            tensor.requires_grad_()
        self.tau, self.grad_clip = first.tau, first.grad_clip
        groups = first.optimizer.param_groups
        self.lr: float = groups[0]["lr"]
        decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        sizes = [(p.numel(), float(decay[id(p)])) for p in first.online.parameters()]
        self.decay = torch.cat([self.online.rows.new_full((n,), rate) for n, rate in sizes])  # [P]
        self._evenly = _runs(sizes)
        self.mean, self.square = torch.zeros(2, *self.online.rows.shape, device=self.decay.device)
        self.steps = torch.zeros(len(learners), 1, device=self.decay.device)
        if self.adam:
            self._take_memories()
        self._firsts = [_firsts(one) for one in learners]
        self._marks = [self._marks_of(r) for r in range(len(learners))]

    def holds(self, learners: Sequence[DoubleDQN[Any]]) -> bool:
        """True while these learners still are what is stacked here.

        Loading copies parameters in place; what gets new tensors is a table that grows, and the
        memory of an optimizer that is loaded.
        """
        return len(learners) == len(self.learners) and all(
            one is other and self._marks[r] == self._marks_of(r)
            for r, (one, other) in enumerate(zip(learners, self.learners, strict=True))
        )

    def _marks_of(self, r: int) -> list[int]:
        """Return where the tensors of a learner lie that may be replaced."""
        online, target = self._firsts[r]
        memory = self.learners[r].optimizer.state.get(online, {})
        return [
            online.data_ptr(),
            target.data_ptr(),
            memory["exp_avg"].data_ptr() if "exp_avg" in memory else 0,
        ]

    @property
    def changed(self) -> list[Tensor]:
        """Every tensor that a step writes to."""
        return [self.online.rows, self.target.rows, self.mean, self.square, self.steps]

    def step(self, loss: Tensor, active: Tensor) -> None:
        """Move the active agents down the gradient of the summed loss; targets follow.

        Args:
            loss: sum of the agents' own losses.
            active: 1 for agents that learn, 0 for those that wait.  # [R, 1]
        """
        wanted = list(self.online.tensors.values())
        gradients = torch.autograd.grad(loss, wanted, materialize_grads=True)
        with torch.no_grad():
            gradient = torch.cat([g.flatten(1) for g in gradients], dim=1)  # [R, P]
            if self.grad_clip > 0:
                norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
                gradient *= (self.grad_clip / (norm + _CLIP_EPS)).clamp(max=1.0)
            if self.adam and gradient.device.type == "cpu":
                self._fused_adam(gradient, active)
            elif self.adam:
                self._adam(gradient, active)
            else:
                gradient = torch.addcmul(gradient, self.online.rows, self.decay)
                self.online.rows.addcmul_(gradient, active, value=-self.lr)
            self.target.rows.lerp_(self.online.rows, self.tau * active)

    def _adam(self, gradient: Tensor, active: Tensor) -> None:
        """Step all rows at once, without a look at who is active: a CUDA graph records this."""
        fast, slow = _BETAS
        gradient = torch.addcmul(gradient, self.online.rows, self.decay)
        self.steps += active
        self.mean.lerp_(gradient, (1 - fast) * active)
        self.square.lerp_(gradient.square(), (1 - slow) * active)
        later = self.steps.clamp(min=1)
        size = active * (self.lr / (1 - fast**later))  # [R, 1]
        deviation = (self.square * (1 / (1 - slow**later))).sqrt_().add_(_EPS)
        self.online.rows.addcmul_(self.mean / deviation, size, value=-1.0)

    def _fused_adam(self, gradient: Tensor, active: Tensor) -> None:
        """Step the active rows by the kernel of `torch.optim.Adam(fused=True)`."""
        self.steps += active
        rows = [r for r, (flag,) in enumerate(active.tolist()) if flag]
        steps = [self.steps[r, 0] for r in rows]
        for part, decay in self._evenly:
            weights, gradients, means, squares = (
                [matrix[r, part] for r in rows]
                for matrix in (self.online.rows, gradient, self.mean, self.square)
            )
            torch._fused_adam_(
                weights, gradients, means, squares, [], steps, lr=self.lr, beta1=_BETAS[0],
                beta2=_BETAS[1], weight_decay=decay, eps=_EPS, amsgrad=False, maximize=False,
            )  # fmt: skip

    def _take_memories(self) -> None:
        """Copy the optimizers' memories and let them see these from now on."""
        for r, learner in enumerate(self.learners):
            at = 0
            for parameter in learner.online.parameters():
                part = slice(at, at + parameter.numel())
                at += parameter.numel()
                memory = learner.optimizer.state[parameter]
                for name, rows in (("exp_avg", self.mean), ("exp_avg_sq", self.square)):
                    if name in memory:
                        rows[r, part] = memory[name].reshape(-1)
                    memory[name] = rows[r, part].view(parameter.shape)
                if "step" in memory:
                    self.steps[r] = memory["step"]
                memory["step"] = self.steps[r, 0]


def _runs(sizes: Sequence[tuple[int, float]]) -> list[tuple[slice, float]]:
    """Join neighbours of the same weight decay, given as (numbers, decay)."""
    runs: list[tuple[slice, float]] = []
    at = 0
    for decay, group in groupby(sizes, key=lambda pair: pair[1]):
        end = at + sum(size for size, _ in group)
        runs.append((slice(at, end), decay))
        at = end
    return runs


def _firsts(learner: DoubleDQN[Any]) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the first parameters, the identity tables where there are some: only these grow."""
    return next(learner.online.parameters()), next(learner.target.parameters())
