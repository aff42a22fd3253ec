"""Oracle balance: reads private label counts and pools the K clients that are most even together.

Not a method one could deploy: no server may know its clients' labels. It is an upper reference for
what selection can gain, refused unless `options.allow_oracle=true`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting, Stateless
from fedglimpse.methods.subsets import SubsetSearch, Value
from fedglimpse.types import Choice, Method, View


@dataclass(frozen=True)
class Options:
    """`options.*` of oracle-balance, as of every method that reads private reports."""

    allow_oracle: bool = option(
        False, "true: you know that its results are not to be had in practice"
    )


def evenness(counts: Tensor) -> Value:
    """Return the value of a subset: minus the squared distance of its class shares to equal ones.

    Args:
        counts: local examples of each class.  # [V, C]
    """
    counts = counts.double()

    def value(subsets: Tensor) -> Tensor:
        pooled = counts[subsets].sum(1)  # [B, C]
        share = pooled / pooled.sum(1, keepdim=True)
        return -(share - 1 / counts.shape[1]).square().sum(1)

    return value


class OracleBalance(Stateless):
    """Chooses the most even subset."""

    needs = frozenset({"label_histogram"})

    def select(self, view: View, k: int) -> Choice:
        """Search for the most even pool."""
        value = evenness(view.reports["label_histogram"])
        search = SubsetSearch(value, view.num_visible, view.rng)
        return Choice(search.best(k))


def build(setting: Setting) -> Method:
    """Return the oracle; `build_method` refuses what it needs unless it is allowed."""
    setting.options(Options)
    return Method(OracleBalance(), WeightedDelta())


INFO = MethodInfo(
    name="oracle-balance",
    summary="ORACLE: the K clients whose pooled labels are most even, an upper reference",
    source="control",
    build=build,
    example_options={"allow_oracle": True},
)
