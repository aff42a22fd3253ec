"""Your own method in one file: choose the visible clients whose update is of the usual size.

Run it: fedglimpse run method=my_method:build data.name=digits rounds=30 --out runs/mine
"""

import torch

import fedglimpse


class UsualUpdate(fedglimpse.Stateless):
    """Keeps a running mean of update norms, and prefers clients that are near it."""

    needs = frozenset({"update_norm"})  # so all visible clients train, and send one float

    def __init__(self) -> None:
        self.mean = 0.0

    def select(self, view: fedglimpse.View, k: int) -> fedglimpse.Choice:
        norms = view.reports["update_norm"]  # [V]
        self.mean = 0.9 * self.mean + 0.1 * float(norms.mean())
        slots = fedglimpse.top_slots(-(norms - self.mean).abs(), k, view.rng)
        return fedglimpse.Choice(slots, info={"mean_norm": self.mean})

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean = state["mean"]


def build(setting: fedglimpse.Setting) -> fedglimpse.Method:
    """Called once for each seed, before the first round."""
    return fedglimpse.Method(UsualUpdate(), setting.temporal_window())


def quickest() -> torch.Tensor:
    """The same from Python; returns the accuracy of every round."""
    result = fedglimpse.run({"method": "my_method:build", "rounds": 5})
    return torch.tensor([record["accuracy"] for record in result.records])
