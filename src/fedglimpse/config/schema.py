"""Everything a run depends on, in one frozen tree: `Config`; and its JSON Schema, for editors.

Each field is declared by `fedglimpse.fields.setting`: its default, its meaning and the values it
may have. Rules between settings are in `checks.py`. The defaults are preset `tuned-1`; `loading.py`
fills the tree from presets, files and overrides. `agent.*` and `data.*` are declared in their own
rooms.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fedglimpse.agent.config import AgentConfig
from fedglimpse.config.presets import PRESETS
from fedglimpse.config.retired import KEYS, Retired
from fedglimpse.data.config import DATASETS, DataConfig
from fedglimpse.federation.visibility import VisibilityConfig
from fedglimpse.fields import Allowed, allowed_of, setting

Schema = dict[str, Any]  # a JSON Schema, or a part of one

TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string"}  # in JSON Schema
PLUGIN_PATTERN = "^[^:]+:[^:]+$"  # package.module:name


@dataclass(frozen=True)
class ModelConfig:
    """`model.*`: what every client trains."""

    name: str = setting(
        "",
        "empty: the dataset's own; the name of another's, or \"pkg.mod:factory\"",
        choices=("", *DATASETS),
        plugin=True,
    )
    norm: str = setting(
        "batch",
        "normalisation layers: BatchNorm or GroupNorm; own models have their own",
        choices=("batch", "group"),
    )


@dataclass(frozen=True)
class SelectionConfig:
    """`selection.*`."""

    k: int = setting(5, "K, clients chosen in a round", at_least=1)


@dataclass(frozen=True)
class LocalConfig:
    """`local.*`: how a client trains."""

    optimizer: str = setting(
        "sgd", "of local training; it starts afresh in every round", choices=("sgd", "adam")
    )
    lr: float = setting(0.03, "learning rate of local training", above=0)
    momentum: float = setting(0.0, "of sgd", at_least=0, below=1)
    weight_decay: float = setting(0.0, "L2 penalty in local training", at_least=0)
    batch_size: int = setting(
        64, "examples in a local mini-batch; a last batch of one is skipped", at_least=2
    )
    epochs: int = setting(3, "passes over a client's examples in one round", at_least=1)
    proximal_mu: float = setting(
        0.01, "weight of FedProx's pull; only methods that use it read it", at_least=0
    )
    proximal_squared: bool = setting(True, "false: the release's unsquared norms")
    augment: bool = setting(False, "random crop and flip of images")


@dataclass(frozen=True)
class AggregateConfig:
    """`aggregate.*`: temporal averaging, for the methods that use it."""

    window: int = setting(6, "global models averaged over time; 1: none", at_least=1)
    source: str = setting(
        "raw",
        "raw (last aggregates) or smoothed (last global models, the paper's)",
        choices=("raw", "smoothed"),
    )
    everywhere: bool = setting(
        False, "also for methods that merge plainly: then only choices differ"
    )


@dataclass(frozen=True)
class SketchConfig:
    """`sketch.*`: the random projection of model parameters that clients send."""

    kind: str = setting(
        "gaussian",
        "gaussian, or count: about 50 times cheaper on a device",
        choices=("gaussian", "count"),
    )
    size: int = setting(128, "D, floats that a client sends", at_least=1)
    parameters: str = setting(
        "head", "head (dense layers after the last convolution) or all", choices=("head", "all")
    )
    scale: str = setting(
        "sqrt", "gaussian: 1/sqrt(D), or mean: 1/D as the paper prints it", choices=("sqrt", "mean")
    )


@dataclass(frozen=True)
class RewardConfig:
    """`reward.*`: the proxy score a method may learn from."""

    metric: str = setting(
        "f1", "score on the proxy set: macro F1 or accuracy", choices=("f1", "accuracy")
    )
    smoothing: float = setting(
        0.95, "weight of the new score, lambda of Eq. (reward)", above=0, at_most=1
    )


@dataclass(frozen=True)
class LearnerConfig(AgentConfig):
    """`agent.*`: how `glimpse` sees, scores and learns; see `agent/config.py`."""

    save: str = setting("", "write the trained policy there at the end; one file for each seed")
    load: str = setting("", "start from that policy; with agent.frozen=true use it as it is")


@dataclass(frozen=True)
class EngineConfig:
    """`engine.*`: where and how it is computed; results depend on it by rounding alone."""

    device: str = setting("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1")
    precision: str = setting(
        "fp32", "of matrix products; tf32 and bf16 only on a GPU", choices=("fp32", "tf32", "bf16")
    )
    trainer: str = setting(
        "auto",
        "auto: the fastest that fits; graphed only on a GPU",
        choices=("auto", "serial", "batched", "graphed"),
    )
    max_jobs: int | str = setting(
        "auto",
        "clients in memory at a time, 1 or more; auto: what fits",
        choices=("auto",),
        at_least=1,
    )
    threads: int | str = setting(
        "auto",
        "of a CPU, 1 or more; auto: what the model gains from, see docs/simulator.md",
        choices=("auto",),
        at_least=1,
    )


@dataclass(frozen=True)
class EvaluateConfig:
    """`evaluate.*`."""

    every: int = setting(
        1, "rounds between scores on the test set; the last round always counts", at_least=1
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """`checkpoint.*`."""

    every: int = setting(
        10, "rounds between checkpoints; the last round is always kept", at_least=1
    )
    keep_models: int = setting(
        0, "keep the global models of every n-th round in models/; 0: none", at_least=0
    )


@dataclass(frozen=True)
class LogConfig:
    """`log.*`: trackers that follow a run while it goes on; see `runs/trackers.py`."""

    tensorboard: bool = setting(False, "event files in the run folder")
    own: str = setting("", 'any other tracker: "pkg.mod:name", as in examples/log_to_wandb.py')


@dataclass(frozen=True)
class Config:
    """A complete description of a run."""

    preset: str = setting(
        "tuned-1", "a set of values for many keys, see docs/presets.md", choices=tuple(PRESETS)
    )
    method: str = setting("fedavg", 'a name of `fedglimpse methods`, or "pkg.mod:build"')
    seeds: tuple[int, ...] = setting((0,), "one run for each, side by side")
    rounds: int = setting(100, "communication rounds", at_least=1)
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
        flat: dict[str, Any] = {}
        for group in dataclasses.fields(self):
            value = getattr(self, group.name)
            if dataclasses.is_dataclass(value):
                for item in dataclasses.fields(value):
                    flat[f"{group.name}.{item.name}"] = getattr(value, item.name)
            elif group.name == "options":
                flat |= flatten(copy.deepcopy(dict(value)), "options.")  # may hold lists
            else:
                flat[group.name] = value
        return flat

    def to_toml(self) -> str:
        """Return the resolved configuration as TOML, enough to repeat the run."""
        lines: list[str] = []
        tables: list[str] = []
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, dict):
                tables += ["", f"[{name}]"]
                tables += [f"{key} = {toml_value(entry)}" for key, entry in value.items()]
            else:
                lines.append(f"{name} = {toml_value(value)}")
        return "\n".join([*lines, *tables]) + "\n"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested tables into dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def toml_value(value: Any) -> str:
    """Write a setting's value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def config_schema() -> Schema:
    """Return the JSON Schema (draft 7) of a file that `fedglimpse run FILE.toml` takes."""
    schema = _table(Config)
    schema["properties"]["options"] = _options()
    for key, entry in KEYS.items():
        _add_retired(schema, key, entry)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of a fedglimpse run",
        **schema,
    }


def _table(config_class: type[Any]) -> Schema:
    """Return the schema of a dataclass: an object with a property for each field."""
    types = get_type_hints(config_class)
    properties: Schema = {}
    for item in dataclasses.fields(config_class):
        allowed = allowed_of(item)
        if dataclasses.is_dataclass(types[item.name]):
            properties[item.name] = _table(types[item.name])
        elif allowed is not None:
            value = _value(types[item.name], allowed)
            properties[item.name] = {**value, "description": allowed.meaning}
    summary = (inspect.getdoc(config_class) or "").partition("\n")[0]
    return {
        "type": "object",
        "description": summary,
        "properties": properties,
        "additionalProperties": False,
    }


def _value(kind: Any, allowed: Allowed) -> Schema:
    """Return the schema of one setting."""
    if get_origin(kind) is UnionType:
        return {"anyOf": [_value(member, allowed) for member in get_args(kind)]}
    if get_origin(kind) is tuple:
        element = get_args(kind)[0]
        return {"type": "array", "items": {"type": TYPE_NAMES[element]}}
    if kind is str:
        return _text(allowed.choices, allowed.plugin)
    schema: Schema = {"type": TYPE_NAMES[kind]}
    limits = {
        "minimum": allowed.at_least,
        "maximum": allowed.at_most,
        "exclusiveMinimum": allowed.above,
        "exclusiveMaximum": allowed.below,
    }
    for name, limit in limits.items():
        if limit is not None:
            schema[name] = limit
    return schema


def _text(choices: Collection[str], plugin: bool) -> Schema:
    if not choices:
        return {"type": "string"}
    one_of_ours: Schema = {"enum": list(choices)}
    if not plugin:
        return one_of_ours
    return {"anyOf": [one_of_ours, {"type": "string", "pattern": PLUGIN_PATTERN}]}


def _options() -> Schema:
    """Return the schema of `options.*`, which depend on the method."""
    return {
        "type": "object",
        "description": "options of the method; see its page in docs/methods",
        "additionalProperties": {"type": ["number", "string", "boolean", "array"]},
    }


def _add_retired(schema: Schema, key: str, entry: Retired) -> None:
    """Allow a retired setting at the value that the code still has."""
    *groups, name = key.split(".")
    table = schema
    for group in groups:
        table = table["properties"].setdefault(group, {"type": "object", "properties": {}})
    table["properties"][name] = {"const": entry.default, "description": f"retired: {entry.lesson}"}
