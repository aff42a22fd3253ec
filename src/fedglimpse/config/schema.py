"""Everything a run depends on, in one frozen tree: `Config`.

The defaults are preset `tuned-1`. `config/loading.py` fills the tree from presets, files and words.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedglimpse.agent.config import AgentConfig


@dataclass(frozen=True)
class DataConfig:
    """`data.*`: which examples, and who holds them."""

    name: str = "digits"  # digits, synthetic, cifar10, fashion, har, hapt, or "pkg.mod:factory"
    partition: str = "dirichlet"  # how training rows are split among clients, see docs/data.md
    clients: int = 100  # N, clients in all; 0 with partition=subject: one for each subject
    classes_per_client: int = 2  # of label_skew: classes that each client holds
    exact_classes: bool = True  # label_skew: exactly so many classes; false: random shards
    alpha: float = 0.1  # concentration of dirichlet: the smaller, the fewer classes at a client
    equal_size: bool = True  # dirichlet: all clients the same size, as in the paper
    min_size: int = 10  # dirichlet with unequal sizes: the smallest client allowed
    samples: int = 0  # rows every client draws from a shared pool when seen; 0: rows are dealt out
    proxy: int = -1  # examples of the server's proxy set; -1: 1,000, fewer for small data
    proxy_source: str = "heldout"  # heldout from clients; leaky_train: shared, as in the release


@dataclass(frozen=True)
class ModelConfig:
    """`model.*`: what every client trains."""

    name: str = ""  # empty: the dataset's own; the name of another's, or "pkg.mod:factory"
    norm: str = "batch"  # normalisation layers: BatchNorm or GroupNorm; own models have their own


@dataclass(frozen=True)
class VisibilityConfig:
    """`visibility.*`: who can be seen in a round."""

    kind: str = "mobile"  # the pattern of who is visible when, see docs/data.md
    cluster_size: int = 10  # of mobile, cyclic and overlapping: clients at one place
    overlap: int = 2  # of overlapping: clients that neighbouring clusters share
    p: float = 0.1  # of random: probability of a client to be visible in a round
    p_on: float = 0.05  # of markov: probability that a sleeping client wakes up in a round
    p_off: float = 0.45  # of markov: probability that a client awake falls asleep in a round
    trace: str = ""  # of trace: csv of device,ready_start_s,ready_end_s
    trace_devices: str = ""  # of trace: csv of device,trace_start_s,trace_end_s, if there is one
    round_seconds: float = 600.0  # of trace: seconds of a round
    min_visible: int = 1  # rounds with fewer visible clients pass without training


@dataclass(frozen=True)
class SelectionConfig:
    """`selection.*`."""

    k: int = 5  # K, clients chosen in a round


@dataclass(frozen=True)
class LocalConfig:
    """`local.*`: how a client trains."""

    optimizer: str = "sgd"  # of local training; it starts anew in every round
    lr: float = 0.03  # learning rate of local training
    momentum: float = 0.0  # of sgd
    weight_decay: float = 0.0  # L2 penalty in local training
    batch_size: int = 64  # examples in a local mini-batch; a last batch of one is skipped
    epochs: int = 3  # passes over a client's examples in one round
    proximal_mu: float = 0.01  # weight of FedProx's pull; only methods that use it read it
    proximal_squared: bool = True  # false: the release's unsquared norms
    augment: bool = False  # random crop and flip of images


@dataclass(frozen=True)
class AggregateConfig:
    """`aggregate.*`: temporal averaging, for the methods that use it."""

    window: int = 6  # global models averaged over time; 1: none
    source: str = "raw"  # raw (last aggregates) or smoothed (last global models, the paper's)
    everywhere: bool = False  # also for methods that merge plainly: then only choices differ


@dataclass(frozen=True)
class SketchConfig:
    """`sketch.*`: the random projection of model parameters that clients send."""

    kind: str = "gaussian"  # gaussian, or count: about 50 times cheaper on a device
    size: int = 128  # D, floats that a client sends
    parameters: str = "head"  # head (dense layers after the last convolution) or all
    scale: str = "sqrt"  # gaussian: 1/sqrt(D), or mean: 1/D as the paper prints it


@dataclass(frozen=True)
class RewardConfig:
    """`reward.*`: the proxy score a method may learn from."""

    metric: str = "f1"  # score on the proxy set: macro F1 or accuracy
    smoothing: float = 0.95  # weight of the new score, lambda of Eq. (reward)


@dataclass(frozen=True)
class LearnerConfig(AgentConfig):
    """`agent.*`: how `glimpse` sees, scores and learns; see `agent/config.py`."""

    save: str = ""  # write the trained policy there at the end; one file for each seed
    load: str = ""  # start from that policy; with agent.frozen=true use it as it is


@dataclass(frozen=True)
class EngineConfig:
    """`engine.*`: where and how it is computed; results depend on it by rounding alone."""

    device: str = "auto"  # auto (a GPU if there is one), cpu, cuda, cuda:1
    precision: str = "fp32"  # of matrix products; tf32 and bf16 only on a GPU
    trainer: str = "auto"  # auto: the fastest that fits; graphed only on a GPU
    max_jobs: int | str = "auto"  # clients in memory at a time, 1 or more; auto: what fits


@dataclass(frozen=True)
class EvaluateConfig:
    """`evaluate.*`."""

    every: int = 1  # rounds between scores on the test set; the last round always counts


@dataclass(frozen=True)
class CheckpointConfig:
    """`checkpoint.*`."""

    every: int = 10  # rounds between checkpoints; the last round is always kept
    keep_models: int = 0  # keep the global models of every n-th round in models/; 0: none


@dataclass(frozen=True)
class LogConfig:
    """`log.*`: trackers that follow a run while it goes on; see `runs/trackers.py`."""

    tensorboard: bool = False  # event files in the run folder
    own: str = ""  # any other tracker: "pkg.mod:name", as in examples/log_to_wandb.py


@dataclass(frozen=True)
class Config:
    """A complete description of a run."""

    preset: str = "tuned-1"  # a set of values for many keys, see docs/presets.md
    method: str = "fedavg"  # a name of `fedglimpse methods`, or "pkg.mod:build"
    seeds: tuple[int, ...] = (0,)  # one run for each, side by side
    rounds: int = 100  # communication rounds
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    visibility: VisibilityConfig = field(default_factory=VisibilityConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    aggregate: AggregateConfig = field(default_factory=AggregateConfig)
    sketch: SketchConfig = field(default_factory=SketchConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    agent: LearnerConfig = field(default_factory=LearnerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    options: Mapping[str, Any] = field(default_factory=dict)  # the method's own; it checks them

    def flat(self) -> dict[str, Any]:
        """Return every dotted key with its value."""
        return flatten(dataclasses.asdict(self))

    def to_toml(self) -> str:
        """Return the resolved configuration as TOML, enough to repeat the run."""
        top = {k: v for k, v in dataclasses.asdict(self).items() if not isinstance(v, dict)}
        tables = {k: v for k, v in dataclasses.asdict(self).items() if isinstance(v, dict)}
        lines = [f"{k} = {_toml(v)}" for k, v in top.items()]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in table.items())]
        return "\n".join(lines) + "\n"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested tables into dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
