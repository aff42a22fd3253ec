"""What a world does with a choice: training order, starts, failures, costs, resuming."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import small_world as small
import torch
from torch import Tensor

from fedglimpse.errors import UserError
from fedglimpse.federation.aggregation import TemporalWindow
from fedglimpse.simulation.trainers.jobs import TrainingJobs, TrainingResults
from fedglimpse.simulation.world import World
from fedglimpse.types import Choice, LocalObjective, Method, Update

POST = frozenset({"update_norm"})


def method(slots: list[int], sequential: bool = False, **objective: Any) -> Method:
    aggregator = small.Last() if sequential else small.Watching()
    schedule = "sequential" if sequential else "parallel"
    return Method(small.Fixed(slots), aggregator, LocalObjective(**objective), schedule)


def update_of(world: World, lane: int = 0, round_num: int = 0) -> Update:
    aggregator = world.lanes[lane].method.aggregator
    assert isinstance(aggregator, small.Watching)
    return aggregator.updates[round_num]


def alone(world: World, state: Tensor, client: int, round_num: int = 0) -> Tensor:
    """Train one client from `state` as the world would `[d]`."""
    people = world.lanes[0].population
    key = torch.tensor([small.rng.key(0, "train", round_num, client)])
    jobs = TrainingJobs.plain(people.rows[client][None], key)
    return small.trainer(people).train(state[None], jobs).states[0]


class TestSequential:
    def test_each_client_starts_where_the_last_ended(self) -> None:
        world = small.world([small.lane(method([2, 0, 3], sequential=True))])
        state = world.states[0].clone()
        record = small.run_round(world)[0]
        update = update_of(world)
        assert update.ids.tolist() == record["selected"] == [2, 0, 3]
        for i, client in enumerate([2, 0, 3]):
            assert torch.equal(update.starts[i], state)
            state = alone(world, state, client)
            torch.testing.assert_close(update.starts[i] + update.deltas[i], state)
        torch.testing.assert_close(world.states[0], state, rtol=1e-5, atol=1e-6)

    def test_one_client_is_the_same_in_both_schedules(self) -> None:
        lanes = [small.lane(method([2], sequential)) for sequential in (False, True)]
        world = small.world(lanes)
        small.run_round(world)
        assert torch.equal(update_of(world, 0).deltas, update_of(world, 1).deltas)
        assert torch.equal(world.states[0], world.states[1])

    def test_lanes_of_both_schedules_run_together_as_alone(self) -> None:
        def lanes() -> list[small.Lane]:
            return [
                small.lane(method([4, 1], sequential=True), seed=0),
                small.lane(method([0, 2, 3]), seed=1),
                small.lane(method([3, 0, 1], sequential=True, distill=0.5), seed=2),
            ]

        calls = []
        together = small.world(lanes())
        train = together.trainer.train

        def counted(start: Tensor, jobs: TrainingJobs) -> TrainingResults:
            calls.append(len(jobs))
            return train(start, jobs)

        together.trainer.train = counted  # type: ignore[method-assign]
        for _ in range(2):
            small.run_round(together)
        assert calls == [5, 2, 1, 5, 2, 1]  # the first of each chain goes with the parallel ones
        for r in range(3):
            single = small.world([lanes()[r]])
            for _ in range(2):
                small.run_round(single)
            assert torch.equal(single.states[0], together.states[r])

    def test_a_failed_client_is_skipped(self) -> None:
        world = small.world([small.lane(method([2, 0, 3], sequential=True))], poison=[0])
        state = world.states[0].clone()
        record = small.run_round(world)[0]
        update = update_of(world)
        assert record["selected"] == [2, 3]
        assert record["rejected"] == [0]
        second = alone(world, state, 2)
        assert torch.equal(update.starts[0], state)
        assert torch.equal(update.starts[1], second)
        assert world.states.isfinite().all()

    def test_all_failed_keeps_the_model(self) -> None:
        lane = small.lane(method([2, 0], sequential=True))
        world = small.world([lane], poison=[0, 2])
        before = world.states.clone()
        record = small.run_round(world)[0]
        assert torch.equal(world.states, before)
        assert record["rejected"] == [2, 0]
        assert record["selected"] == []

    def test_trained_reports_before_the_choice_are_refused(self) -> None:
        odd = replace(method([0], sequential=True), selector=small.Fixed([0], needs=POST))
        with pytest.raises(UserError, match="update_norm"):
            small.world([small.lane(odd)])


class Own(small.Watching):
    """Client i starts from the global state plus i / 100."""

    def starts(self, state: Tensor, ids: Tensor) -> Tensor:
        return state + ids[:, None] / 100


class TestStarts:
    @pytest.mark.parametrize("needs", [frozenset(), POST | {"delta_sketch", "sketch"}])
    def test_clients_train_from_their_own_state(self, needs: frozenset[str]) -> None:
        selector = small.Fixed([3, 1], needs=needs)
        world = small.world([small.lane(Method(selector, Own()))])
        state, cut = world.states[0].clone(), world.reporter.num_params
        small.run_round(world)
        update = update_of(world)
        assert update.ids.tolist() == [3, 1]
        for i, client in enumerate([3, 1]):
            start = state + client / 100
            trained = alone(world, start, client)
            torch.testing.assert_close(update.starts[i], start, rtol=0, atol=1e-7)
            torch.testing.assert_close(update.deltas[i], trained - start, rtol=1e-5, atol=1e-6)
            if needs:
                reports = selector.views[0].reports
                norm = (trained - start)[:cut].norm()
                torch.testing.assert_close(reports["update_norm"][client], norm)
                sketch = small.sketch(trained[:cut])
                torch.testing.assert_close(reports["sketch"][client], sketch)

    def test_the_default_shares_one_row(self) -> None:
        world = small.world([small.lane(method([0, 1, 2]), seed=s) for s in (0, 1)])
        rows = []
        train = world.trainer.train

        def counted(start: Tensor, jobs: TrainingJobs) -> TrainingResults:
            rows.append((len(start), jobs.start.tolist()))
            return train(start, jobs)

        world.trainer.train = counted  # type: ignore[method-assign]
        small.run_round(world)
        assert rows == [(2, [0, 0, 0, 1, 1, 1])]

    def test_a_wrong_shape_is_named(self) -> None:
        class Wrong(small.Watching):
            def starts(self, state: Tensor, ids: Tensor) -> Tensor:
                return state

        world = small.world([small.lane(Method(small.Fixed([0]), Wrong()))])
        with pytest.raises(UserError, match=r"Wrong\.starts"):
            small.run_round(world)


class TestJobs:
    def test_every_lane_asks_for_what_it_asks_alone(self) -> None:
        def lanes() -> list[small.Lane]:
            return [
                small.lane(method([3, 0, 2], proximal_mu=0.5, proximal_squared=False), seed=0),
                small.lane(Method(small.Fixed([1]), Own(), LocalObjective(distill=0.5)), seed=1),
                small.lane(method([4, 3], block_cycle=True), seed=2, round_num=7, visits=21),
            ]

        def asked(some: list[small.Lane]) -> list[tuple[Any, ...]]:
            world, found = small.world(some), []
            train = world.trainer.train

            def noted(start: Tensor, jobs: TrainingJobs) -> TrainingResults:
                for i in range(len(jobs)):
                    job = jobs.pick(torch.tensor([i]))
                    begins = start[job.start].tolist()
                    fields = (v.tolist() for k, v in job.tensors().items() if k != "start")
                    found.append((begins, *fields))
                return train(start, jobs)

            world.trainer.train = noted  # type: ignore[method-assign]
            small.run_round(world)
            return found

        alone = [job for r in range(3) for job in asked([lanes()[r]])]
        assert asked(lanes()) == alone
        mu, squared, distill, temperature, visit = zip(*(job[4:] for job in alone), strict=True)
        assert mu == ([0.5],) * 3 + ([0.0],) * 3
        assert squared == ([False],) * 3 + ([True],) * 3
        assert distill == ([0.0],) * 3 + ([0.5],) + ([0.0],) * 2
        assert temperature == ([2.0],) * 6
        assert visit == ([-1],) * 4 + ([21], [22])


class Shy:
    """Nobody but client 0 in odd rounds."""

    def visible(self, seed: int, round_num: int) -> Tensor:
        return torch.arange(1 if round_num % 2 else 5)


def test_a_lane_that_sits_out_changes_nothing_for_others() -> None:
    def lanes() -> list[small.Lane]:
        some = [small.lane(method([0, 1]), seed=seed, min_visible=2) for seed in range(3)]
        for lane in some:
            lane.population = small.population((12 + lane.seed, 9, 20, 5, 16 - lane.seed))
        some[1].visibility = Shy()
        return some

    together = small.world(lanes())
    found = [small.run_round(together) for _ in range(4)]
    together.retire(together.lanes[:1])
    found.append([found[0][0], *small.run_round(together)])
    for r in range(3):
        single = small.world([lanes()[r]])
        for records in found[: 4 if r == 0 else 5]:
            expected = small.run_round(single)[0] | {"lane": records[r]["lane"]}
            assert records[r] == expected


def run_with_answer(answer: Any) -> None:
    """Run a round in which the selector answers with `answer`."""
    selector = small.Fixed([0])
    selector.select = lambda view, k: answer  # type: ignore[method-assign]
    small.run_round(small.world([small.lane(Method(selector, small.Watching()))]))


class TestFailures:
    @pytest.mark.parametrize("needs", [frozenset(), POST])
    def test_a_client_that_is_not_finite_is_left_out(self, needs: frozenset[str]) -> None:
        selector = small.Fixed([0, 1, 2], [0.5, 0.2, 0.3], needs=needs)
        world = small.world([small.lane(Method(selector, small.Watching()))], poison=[1])
        record = small.run_round(world)[0]
        assert record["rejected"] == [1]
        # trained before the choice, client 1 is not in the view and slots move up
        assert record["selected"] == ([0, 2, 3] if needs else [0, 2])
        assert record["weights"] == pytest.approx([0.5, 0.2, 0.3] if needs else [0.5, 0.3])
        assert len(selector.views[0].ids) == (4 if needs else 5)
        assert world.states.isfinite().all()

    @pytest.mark.parametrize("needs", [frozenset(), POST])
    def test_all_failed_keeps_the_model(self, needs: frozenset[str]) -> None:
        selector = small.Fixed([0, 1], needs=needs)
        world = small.world(
            [small.lane(Method(selector, small.Watching()), visible=[0, 1])], poison=[0, 1]
        )
        before = world.states.clone()
        record = small.run_round(world)[0]
        assert torch.equal(world.states, before)
        assert record["rejected"] == [0, 1]
        assert record["selected"] == record["weights"] == []
        assert record["train_loss"] is None

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("place", [0, -1])
    def test_nothing_that_is_not_finite_gets_in(self, value: float, place: int) -> None:
        world = small.world([small.lane(method([0, 1, 2]))])
        rows = [int(world.lanes[0].population.rows[1][0])]
        world.trainer = small.Poisoned(world.trainer, rows, value, place)
        record = small.run_round(world)[0]
        assert record["rejected"] == [1]
        assert record["selected"] == [0, 2]
        assert world.states.isfinite().all()

    def test_infinite_features_are_a_failure_too(self) -> None:
        people = small.population()
        people.dataset.x_train[people.rows[2]] = torch.inf
        world = small.world([small.lane(method([0, 2]), population=people)])
        record = small.run_round(world)[0]
        assert record["rejected"] == [2]
        assert record["selected"] == [0]

    @pytest.mark.parametrize(
        ("slots", "weights", "words"),
        [
            ([], None, "0 slots"),
            ([0, 1, 2, 3], None, "4 slots"),
            ([1, 1], None, "repetition"),
            ([0, 5], None, "only 0 to 4"),
            ([-1], None, "only 0 to 4"),
            ([0, 1], [1.0], "1 weights"),
            ([0, 1], [1.0, float("nan")], "not finite"),
            ([0, 1], [0.5, 1e38], "at most 1e\\+06 is allowed"),
        ],
    )
    def test_illegal_choices(self, slots: list[int], weights: Any, words: str) -> None:
        given = None if weights is None else torch.tensor(weights)
        answer = Choice(torch.tensor(slots, dtype=torch.long), given)
        with pytest.raises(UserError, match=words):
            run_with_answer(answer)

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (None, "with None: return"),
            ([0, 1], "with a list: return"),
            (Choice([0, 1]), "slots that are a list"),  # type: ignore[arg-type]
            (Choice(torch.tensor([0.0, 1.0])), "slots that are a tensor of float32"),
            (Choice(torch.tensor([True, False])), "slots that are a tensor of bool"),
            (Choice(torch.tensor([[0], [1]])), r"slots that are a tensor of int64 \[2, 1\]"),
            (Choice(torch.tensor(1)), r"slots that are a tensor of int64 \[\]"),
            (Choice(torch.tensor([0]), [1.0]), "weights that are a list"),  # type: ignore[arg-type]
            (Choice(torch.tensor([0]), torch.ones(1, 1)), "weights that are a tensor"),
            (Choice(torch.tensor([0]), torch.tensor([True])), "weights that are a tensor of bool"),
        ],
    )
    def test_answers_of_another_kind(self, answer: Any, words: str) -> None:
        with pytest.raises(UserError, match=rf"^Fixed\.select answered round 0 .*{words}"):
            run_with_answer(answer)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"needs": ["loss"]}, r"Odd\.needs is a list"),
            ({"needs": "loss"}, r"Odd\.needs is a str"),
            ({"learns_from": {"loss"}}, r"Odd\.learns_from is a set"),
            ({"select": None}, r"Odd has no method select\(\)"),
            ({"state_dict": None}, r"Odd has no method state_dict\(\)"),
        ],
    )
    def test_odd_selectors_are_refused(self, changes: dict[str, Any], words: str) -> None:
        odd = type("Odd", (small.Fixed,), {})([0])
        for name, value in changes.items():
            setattr(odd, name, value)
        with pytest.raises(UserError, match=words):
            small.world([small.lane(Method(odd, small.Watching()))])

    def test_a_selector_that_says_no_needs_is_refused(self) -> None:
        class Silent:
            learns_from: frozenset[str] = frozenset()

        silent: Any = Silent()
        with pytest.raises(UserError, match=r"Silent\.needs is missing"):
            small.world([small.lane(Method(silent, small.Watching()))])

    def test_odd_methods_are_refused(self) -> None:
        for odd, words in (
            (replace(method([0]), schedule="serial"), "schedule='serial'"),
            (method([0], distill=1.5), "distill=1.5"),
            (method([0], temperature=0.0), "temperature=0.0"),
            (Method(small.Fixed([0]), small.Watching(frozenset({"lose"}))), "lose"),
        ):
            with pytest.raises(UserError, match=words):
                small.world([small.lane(odd)])  # type: ignore[arg-type]

    def test_an_aggregator_cannot_corrupt_the_world(self) -> None:
        class Vandal(small.Watching):
            def starts(self, state: Tensor, ids: Tensor) -> Tensor:
                state.zero_()
                return super().starts(state.fill_(0.1), ids)

            def step(self, state: Tensor, update: Update) -> Tensor:
                self.updates.append(update)
                new = state.clone()
                state.fill_(torch.nan)
                update.deltas.fill_(torch.nan)
                return new

        world = small.world([small.lane(Method(small.Fixed([0, 1]), Vandal()))])
        before = world.states.clone()
        small.run_round(world)
        assert torch.equal(world.states, before)


class TestObjectives:
    def test_a_tiny_rate_changes_nothing_but_statistics(self) -> None:
        for sequential in (False, True):
            lane = small.lane(method([0, 1, 2], sequential, distill=0.5))
            world = small.world([lane], small.TrainingRecipe("sgd", lr=1e-30, batch_size=8))
            cut, before = world.reporter.num_params, world.states.clone()
            small.run_round(world)
            torch.testing.assert_close(world.states[:, :cut], before[:, :cut], rtol=0, atol=1e-7)
            assert not torch.equal(world.states[:, cut:], before[:, cut:])

    def test_blocks_take_turns_over_rounds(self) -> None:
        """Two blocks and K = 3: visits 0 1 2 | 3 4 5 train blocks 0 1 1 | 0 0 1."""
        world = small.world([small.lane(method([0, 1, 2], True, block_cycle=True))])
        layout = small.layout()
        first = torch.zeros(layout.size, dtype=torch.bool)
        for entry in layout.entries:
            first[entry.start : entry.stop] = entry.name.split(".")[0] in ("0", "2")
        trained = []
        for round_num in range(2):
            small.run_round(world)
            for delta in update_of(world, 0, round_num).deltas:
                moved = delta != 0
                assert bool(moved[first].any()) != bool(moved[~first].any())
                trained.append(0 if moved[first].any() else 1)
        assert trained == [0, 1, 1, 0, 0, 1]

    def test_weights_are_coefficients_on_deltas(self) -> None:
        selector = small.Fixed([4, 1], [0.7, 0.9])
        world = small.world([small.lane(Method(selector, small.Watching()))])
        before, cut = world.states[0].clone(), world.reporter.num_params
        small.run_round(world)
        deltas = update_of(world).deltas
        wanted = before[:cut] + 0.7 * deltas[0, :cut] + 0.9 * deltas[1, :cut]
        torch.testing.assert_close(world.states[0, :cut], wanted)
        assert selector.outcomes[0].weights.tolist() == pytest.approx([0.7, 0.9])


class TestCosts:
    def test_a_method_that_chooses_before_training(self) -> None:
        selector = small.Fixed([0, 2], needs=frozenset({"loss"}))
        world = small.world([small.lane(Method(selector, small.Watching()))])
        record, size, flops = small.run_round(world)[0], small.layout().size, world.costs.flops
        assert record["uplink_bytes"] == 4 * (2 * size + 5)  # two models and five losses
        assert record["downlink_bytes"] == 4 * 5 * size  # all five receive the model
        training = (12 + 20) * 2 * flops.train
        assert record["client_flops"] == training + sum(small.SIZES) * flops.forward
        assert record["server_flops"] == 2 * 2 * size

    def test_a_method_that_trains_before_choosing(self) -> None:
        needs = frozenset({"sketch", "global_sketch", "proxy_histogram"})
        aggregator = small.Watching(frozenset({"proxy_logits"}))
        selector = small.Fixed([0, 2], needs=needs)
        world = small.world([small.lane(Method(selector, aggregator))])
        record, size, flops = small.run_round(world)[0], small.layout().size, world.costs.flops
        assert record["uplink_bytes"] == 4 * (2 * size + 5 * small.SKETCH)
        assert record["downlink_bytes"] == 4 * 5 * size
        assert record["client_flops"] == sum(small.SIZES) * 2 * flops.train
        passes = small.PROXY * (1 + 2)  # the histogram, and two uploaded models
        assert record["server_flops"] == 2 * 2 * size + passes * flops.forward

    def test_a_sequential_round(self) -> None:
        world = small.world([small.lane(method([0, 2, 1], sequential=True))])
        record, size, flops = small.run_round(world)[0], small.layout().size, world.costs.flops
        assert record["uplink_bytes"] == record["downlink_bytes"] == 4 * 3 * size
        assert record["client_flops"] == (12 + 20 + 9) * 2 * flops.train

    def test_an_idle_round_costs_nothing(self) -> None:
        needs = frozenset({"gradient_distance", "proxy_histogram", "reward", "sketch"})
        aggregator = small.Watching(frozenset({"proxy_logits"}))
        idle = small.lane(Method(small.Fixed([0], needs=needs), aggregator), min_visible=9)
        world = small.world([idle])
        before = world.states.clone()
        record = small.run_round(world)[0]
        costs = [v for k, v in record.items() if k.endswith(("_bytes", "_flops"))]
        assert costs == [0, 0, 0, 0]
        assert torch.equal(world.states, before)
        assert world.lanes[0].round_num == 1
        assert record["selected"] == []


def test_a_resumed_world_goes_on_exactly() -> None:
    def build() -> World:
        echo = Method(small.Fixed([0, 3], needs=POST), TemporalWindow(3, "raw"))
        return small.world(
            [small.lane(echo, seed=4), small.lane(method([1, 0], True, block_cycle=True), seed=5)]
        )

    straight, first, second = build(), build(), build()
    for _ in range(4):
        small.run_round(straight)
    for _ in range(2):
        small.run_round(first)
    saved = [first.lane_state(r) for r in range(2)]
    frozen = copy.deepcopy(saved)
    small.run_round(first)
    assert torch.equal(saved[0]["state"], frozen[0]["state"])  # a snapshot does not move on
    for r in range(2):
        second.load_lane_state(r, saved[r])
    records = [small.run_round(second) for _ in range(2)]
    assert torch.equal(saved[1]["state"], frozen[1]["state"])
    assert torch.equal(second.states, straight.states)
    assert records[-1][0]["round"] == 3
    assert second.lanes[0].reward.total == straight.lanes[0].reward.total
