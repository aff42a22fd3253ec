"""`fedglimpse/ClientSelection-v0`: one federation as a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import gymnasium as gym

from fedglimpse.config.schema import Config
from fedglimpse.env.arrays import Array, Observation, Shape, as_arrays, chosen_slots, info_of
from fedglimpse.env.episodes import EpisodeSeeds
from fedglimpse.env.settings import EPISODE_PARTS, settings_of
from fedglimpse.env.spaces import action_space, observation_space, reward_space
from fedglimpse.env.stepper import LaneStepper


class ClientSelection(gym.Env[Observation, Array]):
    """Choose among the clients that a server can see; one step is one communication round.

    Observation, action, reward and info are described in docs/environment.md.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as gymnasium has it

    def __init__(
        self,
        config: Config | Mapping[str, Any] | None = None,
        action: str = "scores",
        reward: str = "paper",
        reports: Collection[str] | None = None,
        target: float | None = None,
        target_on: str = "test",
        vary: Collection[str] = EPISODE_PARTS,
        render_mode: None = None,
    ) -> None:
        """Build the federation of a run's configuration; its method's selector is left out.

        Args:
            config: the same keys as for `fedglimpse.run`; `rounds` is the horizon.
            action: "scores", the best `selection.k` are taken, or "subset", adjusted to that many.
            reward: "paper", the smoothed proxy score, or "per_class", one for each class.
            reports: what visible clients report; None: the sketches that `agent.input` names.
            target: accuracy at which an episode is terminated; None: never.
            target_on: where it is measured: "test", or "proxy", the reward's own metric.
            vary: what a new seed changes; the rest stays that of the first of `seeds`.
            render_mode: only None.
        """
        settings = settings_of(
            config or {},
            reports,
            target,
            target_on,
            vary,
        )
        self.stepper = LaneStepper(settings, num_lanes=1)
        self.shape = Shape.of(self.stepper)
        self.action = action
        self.reward = reward
        self.render_mode = render_mode
        self.observation_space = observation_space(self.shape)
        self.action_space = action_space(action, self.shape)
        self.reward_space = reward_space(reward, self.shape)
        self._seeds = EpisodeSeeds(settings.config.seeds[0])

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode: with `seed`, the federation of `fedglimpse run seeds=[seed]`.

        Without a seed, the first episode is that of the first of `seeds`, and later ones follow
        from the last explicit seed. There are no options.
        """
        super().reset(seed=seed)
        episode_seed = self._seeds.next(seed)
        self.stepper.restart({0: episode_seed})
        observation = self.stepper.observe()[0]
        info = info_of(observation, None)
        return self._observation(), info

    def step(self, action: Array) -> tuple[Observation, Any, bool, bool, dict[str, Any]]:
        """Run one round."""
        observations = self.stepper.observations or self.stepper.observe()
        slots = chosen_slots(
            action,
            observations[0],
            self.stepper.k,
            subset=self.action == "subset",
        )
        step = self.stepper.step([slots])[0]
        reward: Any = step.reward
        if self.reward == "per_class":
            reward = step.reward_per_class.numpy().copy()
        info = info_of(self.stepper.observations[0], step)
        return self._observation(), reward, step.terminated, step.truncated, info

    def _observation(self) -> Observation:
        of_lanes = as_arrays(self.stepper.observations, self.shape)
        of_only_lane = {}
        for name, values in of_lanes.items():
            of_only_lane[name] = values[0]
        return of_only_lane
