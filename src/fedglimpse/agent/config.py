"""Every choice of the agent in one place, and the presets that differ in them.

The defaults are preset `tuned-1`, the agent of the study; `tuned` is what came out of that. `paper`
follows the paper's text wherever it speaks, `released` the authors' program (its bugs stay fixed).
The window of temporal averaging is not here: it belongs to the aggregator, so that history, n-step
horizon and window can be set apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fedglimpse.errors import require
from fedglimpse.fields import check_fields, setting

SKETCHES: dict[str, str] = {"grad": "delta_sketch", "abs": "sketch"}
NUMBERS: dict[str, tuple[str, ...]] = {  # besides the size, which every view carries
    "scalar": ("update_norm", "train_loss"),
    "probed": ("update_norm", "train_loss", "loss"),  # and how the global model does there
}
CLIENT_REPORTS: dict[str, tuple[str, ...]] = {
    **{name: (report,) for name, report in SKETCHES.items()},
    **NUMBERS,
}


@dataclass(frozen=True)
class AgentConfig:
    """Settings of the attention Q-network agent, `agent.*` in a user's configuration."""

    # What the agent sees.
    input: str = setting(
        "grad",
        "sketch of the update (grad) or weights (abs); numbers (scalar, probed)",
        choices=tuple(CLIENT_REPORTS),
    )
    standardise: bool = setting(True, "z-score client features within the visible set")
    normalise_history: bool = setting(True, "running standardisation of the global sketches")
    history: int = setting(5, "H: global sketches before the current one", at_least=1)

    # The Q-network.
    d_token: int = setting(64, "width of a token", at_least=2)  # one float cannot be normalised
    heads: int = setting(1, "attention heads; must divide d_token", at_least=1)
    spatial_attention: bool = setting(True, "false: clients do not look at each other")
    temporal_attention: bool = setting(True, "false: the history branch is cut off")
    identity: str = setting(
        "table",
        "client memory, Eq. (idemb): a vector for each client, or none",
        choices=("table", "none"),
    )
    identity_dim: int = setting(32, "d_emb, floats of a client's memory", at_least=1)
    identity_decay: bool = setting(
        False, "weight decay on identities; it erases clients seldom seen"
    )
    advantage_context: bool = setting(True, "the advantage head also reads the pooled visible set")
    q_output: str = setting(
        "scalar",
        "scalar: one Q per client; per_class: one per client and class",
        choices=("scalar", "per_class"),
    )
    per_class_score: str = setting(
        "mean", "how per-class Qs rank clients: by their mean or smallest", choices=("mean", "min")
    )

    # Learning.
    reward: str = setting(
        "level",
        "learn from the score itself, or from its change: see `docs/methods/glimpse.md`",
        choices=("level", "change"),
    )
    n_step: int = setting(5, "rewards in a target before bootstrapping", at_least=1)
    gamma: float = setting(0.9, "discount of later rewards", at_least=0, below=1)
    tau: float = setting(
        0.005, "soft update of the target network, after every mini-batch", above=0, at_most=1
    )
    buffer: int = setting(600, "rounds the replay store holds")
    batch_size: int = setting(32, "transitions in a mini-batch", at_least=1)
    updates_per_round: int = setting(5, "b: mini-batches after every round", at_least=0)
    targets_once: bool = setting(
        True, "targets of all b mini-batches from the networks before the first"
    )
    learn_start: int = setting(
        32, "first update once so many transitions can be sampled", at_least=1
    )
    optimizer: str = setting("adam", "of the Q-network", choices=("adam", "sgd"))
    lr: float = setting(1e-3, "learning rate of the Q-network", above=0)
    weight_decay: float = setting(
        1e-4, "of the Q-network; on identities only with identity_decay", at_least=0
    )
    grad_clip: float = setting(1.0, "largest gradient norm; 0 switches clipping off", at_least=0)
    loss: str = setting("smooth_l1", "between Q and its target", choices=("smooth_l1", "mse"))
    aux_weight: float = setting(
        0.0, "weight of predicting the global model's proxy class histogram", at_least=0
    )
    frozen: bool = setting(False, "act greedily and never learn")

    # Exploration.
    exploration: str = setting(
        "all",
        "what is random: all of a set, or partial_random picks of it",
        choices=("all", "partial"),
    )
    epsilon_decay: float = setting(
        0.005, "e in max(epsilon_min, 1 - e t), exploring in round t", at_least=0
    )
    epsilon_min: float = setting(
        0.1, "least probability of exploring in a round", at_least=0, at_most=1
    )
    partial_random: int = setting(2, "m: random picks of the partial rule", at_least=1)

    def __post_init__(self) -> None:
        check_fields(self, "agent.")
        require(
            self.d_token % self.heads == 0,
            f"agent.heads={self.heads} does not divide agent.d_token={self.d_token}: choose one "
            "that does.",
            key="agent.heads",
        )
        shortest = self.n_step + self.history
        require(
            self.buffer > shortest,
            f"agent.buffer={self.buffer} is too small, nothing could be sampled: it must exceed "
            f"agent.n_step + agent.history = {shortest}.",
            key="agent.buffer",
        )

    @property
    def reads_sketches(self) -> bool:
        """True where a client is seen by a sketch, not by a few numbers."""
        return self.input in SKETCHES

    @property
    def needs(self) -> frozenset[str]:
        """What the selector must be shown, see `fedglimpse.federation.reports`."""
        extra = {"proxy_histogram"} if self.aux_weight > 0 else set()
        return frozenset({*CLIENT_REPORTS[self.input], "global_sketch", "reward", *extra})


class AgentSizes(NamedTuple):
    """AgentSizes of networks and memories that the configuration of an agent does not say."""

    sketch_dim: int  # D, floats of a client's and of the global sketch
    num_classes: int  # C
    num_clients: int  # N

    def features(self, config: AgentConfig) -> int:
        """Return F, the features of a client."""
        return self.sketch_dim if config.reads_sketches else 1 + len(NUMBERS[config.input])

    def outputs(self, config: AgentConfig) -> int:
        """Return the Q-values per client, 1 or C."""
        return self.num_classes if config.q_output == "per_class" else 1


ARCHITECTURE: tuple[str, ...] = (  # a policy fits only an agent that agrees on all of these
    "input",
    "standardise",
    "normalise_history",
    "history",
    "d_token",
    "heads",
    "spatial_attention",
    "temporal_attention",
    "identity",
    "identity_dim",
    "advantage_context",
    "q_output",
)

PRESETS: dict[str, dict[str, Any]] = {
    "tuned": {  # sees what means the same in every federation: `fedglimpse teach` can teach it
        "input": "probed",
        "identity": "none",
        "reward": "change",
        "n_step": 1,
        "gamma": 0.5,
        "batch_size": 64,
    },
    "tuned-1": {},
    "paper": {
        "input": "abs",
        "standardise": False,
        "normalise_history": False,
        "advantage_context": False,
        "loss": "mse",
        "optimizer": "sgd",
        "d_token": 128,
        "targets_once": False,
    },
    "released": {
        "input": "scalar",
        "q_output": "per_class",
        "gamma": 0.97,
        "tau": 0.0075,
        "buffer": 640,
        "aux_weight": 0.15,
        "exploration": "partial",
        "learn_start": 39,
        "d_token": 128,
        "heads": 2,
        "targets_once": False,
        "identity_decay": True,
    },
}
