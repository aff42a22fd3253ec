"""Everything a run depends on, in one frozen tree: `Config`.

Values come from, in rising order: the defaults below (preset `tuned`), what suits the dataset, the
preset, a TOML file, `key=value` words. An unknown key is an error that names the nearest one.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fedglimpse.errors import UserError, nearest
from fedglimpse.presets import DATASET_DEFAULTS, PRESETS


@dataclass(frozen=True)
class DataConfig:
    """`data.*`: which examples, and who holds them."""

    name: str = "digits"  # digits, synthetic, cifar10, fashion, har, hapt
    partition: str = "dirichlet"  # dirichlet, label_skew, iid, subject
    clients: int = 100  # N; 0 with partition=subject: one for each subject
    classes_per_client: int = 2  # of label_skew
    exact_classes: bool = True  # label_skew: exactly so many classes; False: random shards
    alpha: float = 0.1  # concentration of dirichlet
    equal_size: bool = True  # dirichlet: all clients the same size, as in the paper
    min_size: int = 10  # dirichlet with unequal sizes: the smallest client allowed
    proxy: int = -1  # examples of the server's proxy set; -1: 1,000, fewer for small data
    proxy_source: str = "heldout"  # heldout, or leaky_train as in the authors' release


@dataclass(frozen=True)
class ModelConfig:
    """`model.*`: what every client trains."""

    name: str = ""  # empty: the dataset's own; or "pkg.mod:factory"
    norm: str = "batch"  # batch, group


@dataclass(frozen=True)
class VisibilityConfig:
    """`visibility.*`: who can be seen in a round."""

    kind: str = "mobile"  # mobile, cyclic, overlapping, random, markov, trace, full
    cluster_size: int = 10  # of mobile, cyclic and overlapping
    overlap: int = 2  # clients that neighbouring clusters share
    p: float = 0.1  # of random: probability of being visible
    p_on: float = 0.05  # of markov: probability of waking up
    p_off: float = 0.45  # of markov: probability of falling asleep
    trace: str = ""  # of trace: csv of device,ready_start_s,ready_end_s
    trace_devices: str = ""  # of trace: csv of device,trace_start_s,trace_end_s, if there is one
    round_seconds: float = 600.0  # of trace: length of a round
    min_visible: int = 1  # rounds with fewer pass without training


@dataclass(frozen=True)
class SelectionConfig:
    """`selection.*`."""

    k: int = 5  # K, clients chosen in a round


@dataclass(frozen=True)
class LocalConfig:
    """`local.*`: how a client trains."""

    optimizer: str = "sgd"  # sgd, adam
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 64
    epochs: int = 3
    proximal_mu: float = 0.01  # weight of FedProx's pull; only methods that use it read it
    proximal_squared: bool = True  # False: the release's unsquared norms
    augment: bool = False  # random crop and flip of images


@dataclass(frozen=True)
class AggregateConfig:
    """`aggregate.*`: temporal averaging, for the methods that use it."""

    window: int = 6  # models averaged; 1: none
    source: str = "raw"  # raw (last aggregates) or smoothed (last global models, the paper's)


@dataclass(frozen=True)
class SketchConfig:
    """`sketch.*`: the random projection of model parameters that clients send."""

    kind: str = "gaussian"  # gaussian, or count: about 50 times cheaper on a device
    size: int = 128  # D, floats sent
    parameters: str = "head"  # head (dense layers after the last convolution) or all
    scale: str = "sqrt"  # gaussian: 1/sqrt(D), or mean: 1/D as the paper prints it


@dataclass(frozen=True)
class RewardConfig:
    """`reward.*`: the proxy score a method may learn from."""

    metric: str = "f1"  # f1, accuracy
    smoothing: float = 0.95  # lambda of the paper's Eq. (reward)


@dataclass(frozen=True)
class EngineConfig:
    """`engine.*`: where and how it is computed; results do not depend on it."""

    device: str = "auto"  # auto, cpu, cuda, cuda:1
    precision: str = "fp32"  # fp32; tf32 and bf16 on a GPU
    trainer: str = "auto"  # auto, serial, batched


@dataclass(frozen=True)
class EvaluateConfig:
    """`evaluate.*`."""

    every: int = 1  # rounds between scores on the test set; the last round always counts


@dataclass(frozen=True)
class CheckpointConfig:
    """`checkpoint.*`."""

    every: int = 10  # rounds between checkpoints; the last round is always kept


@dataclass(frozen=True)
class Config:
    """A complete description of a run."""

    preset: str = "tuned"  # tuned, paper, released
    method: str = "fedavg"  # a name of `fedglimpse methods`, or "pkg.mod:build"
    seeds: tuple[int, ...] = (0,)
    rounds: int = 100
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    visibility: VisibilityConfig = field(default_factory=VisibilityConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    aggregate: AggregateConfig = field(default_factory=AggregateConfig)
    sketch: SketchConfig = field(default_factory=SketchConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    options: Mapping[str, Any] = field(default_factory=dict)  # the method's own; it checks them

    def flat(self) -> dict[str, Any]:
        """Return every dotted key with its value."""
        return flatten(dataclasses.asdict(self))

    def with_values(self, **values: Any) -> Config:
        """Return a copy with some dotted keys changed, written with `__` for the dot."""
        changes = {k.replace("__", "."): v for k, v in values.items()}
        return build({**self.flat(), **changes})

    def to_toml(self) -> str:
        """Return the resolved configuration as TOML, enough to repeat the run."""
        top = {k: v for k, v in dataclasses.asdict(self).items() if not isinstance(v, dict)}
        tables = {k: v for k, v in dataclasses.asdict(self).items() if isinstance(v, dict)}
        lines = [f"{k} = {_toml(v)}" for k, v in top.items()]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in table.items())]
        return "\n".join(lines) + "\n"


def load(file: Path | None = None, words: Iterable[str] = ()) -> Config:
    """Build a configuration from a TOML file and `key=value` words, both optional."""
    values = read_toml(file) if file is not None else {}
    return resolve({**values, **parse_words(words)})


def resolve(values: Mapping[str, Any]) -> Config:
    """Build a configuration from dotted keys, filling in dataset and preset values."""
    _check_names(values)
    preset = str(values.get("preset", "tuned"))
    if preset not in PRESETS:
        raise UserError(
            f"Unknown preset '{preset}'.{nearest(preset, PRESETS)} Known: {', '.join(PRESETS)}."
        )
    suited = DATASET_DEFAULTS.get(str(values.get("data.name", "digits")), {})
    return build({**suited, **PRESETS[preset], **values})


def build(values: Mapping[str, Any]) -> Config:
    """Build a configuration from dotted keys over the plain defaults, checking types."""
    _check_names(values)
    return _fill(Config, values, "")


def parse_words(words: Iterable[str]) -> dict[str, Any]:
    """Read `key=value` words; a value is TOML where it parses as such, else a plain string."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise UserError(f"'{word}' is not of the form key=value, such as rounds=30.")
        try:
            values[name.strip()] = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            values[name.strip()] = text
    return values


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file into dotted keys."""
    try:
        return flatten(tomllib.loads(file.read_text()))
    except FileNotFoundError:
        raise UserError(f"There is no file {file}: give the path of a TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}.") from None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested tables into dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def options_of(cls: type[Any], config: Config, preset: Mapping[str, Any] | None = None) -> Any:
    """Read `options.*` into a method's own dataclass, checking names and types.

    Args:
        cls: the method's options, a dataclass of plain fields with defaults.
        config: the run's configuration.
        preset: what the configured preset says instead of the defaults.
    """
    values = {**(preset or {}), **config.options}
    known = [item.name for item in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            hint = nearest(name, known) or f" It has: {', '.join(known) or 'none'}."
            raise UserError(f"method={config.method} has no option 'options.{name}'.{hint}")
    return _fill(cls, {f"options.{name}": value for name, value in values.items()}, "options.")


def _check_names(values: Mapping[str, Any]) -> None:
    known = Config().flat()
    for name in values:
        if name not in known and not name.startswith("options."):
            raise UserError(f"Unknown key '{name}'.{nearest(name, known)}")


def _fill(cls: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    hints = get_type_hints(cls)
    arguments = {}
    for item in dataclasses.fields(cls):
        name = f"{prefix}{item.name}"
        if name == "options":
            own = {k: v for k, v in values.items() if k.startswith("options.")}
            arguments[item.name] = {k.removeprefix("options."): v for k, v in own.items()}
        elif dataclasses.is_dataclass(hints[item.name]):
            arguments[item.name] = _fill(hints[item.name], values, f"{name}.")
        elif name in values:
            arguments[item.name] = _typed(name, values[name], hints[item.name])
    return cls(**arguments)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the type of the field, or raise UserError."""
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        if isinstance(value, list | tuple):
            return tuple(_typed(name, v, inner) for v in value)
        raise UserError(f"{name}={value!r} must be a list, such as {name}=[0,1].")
    if get_origin(hint) in (Union, UnionType):
        hint = next(h for h in get_args(hint) if h is not type(None))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is hint:
        return value
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    raise UserError(f"{name}={value!r} must be {wanted[hint]}.")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value)
    return repr(value)
