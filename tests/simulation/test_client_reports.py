"""Every report against a computation written out here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_world as small
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.federation.reports import CATALOGUE
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.client_reports import cosines, gradient_distance
from fedglimpse.simulation.evaluation import GRADIENT_BATCH, Evaluator
from fedglimpse.simulation.lane import TrainedClients
from fedglimpse.types import Method

TRAINED = frozenset(n for n, need in CATALOGUE.items() if need.phase == "trained")
PROBES = frozenset(n for n, need in CATALOGUE.items() if need.phase == "probe")
SERVER = frozenset(n for n, need in CATALOGUE.items() if need.phase == "server")


def at(state: Tensor) -> nn.Module:
    net = small.model()
    Layout.of(net).write(state, net)
    return net.eval()


def seen_by_a_selector() -> tuple[small.World, small.Fixed, TrainedClients]:
    """Let a selector ask for everything; returns what its clients really are as well."""
    selector = small.Fixed([0, 1], needs=TRAINED | PROBES | SERVER)
    world = small.world([small.lane(Method(selector, small.Watching()))])
    before = world.states.clone()
    selector.select(small.views(world)[0], 3)
    clients = world.rounds[0].candidates
    assert clients is not None
    assert torch.equal(world.states, before)
    return world, selector, clients


def test_everything_in_the_catalogue_is_reported() -> None:
    _, selector, _ = seen_by_a_selector()
    view = selector.views[0]
    assert set(view.reports) == TRAINED | PROBES
    assert set(view.server) == SERVER - {"reward"}
    for value in [*view.reports.values(), *view.server.values()]:
        assert value.dtype == torch.float32
        assert value.device.type == "cpu"
        assert value.isfinite().all()
    wide = small.PROXY * small.CLASSES
    shapes = {n: tuple(v.shape) for n, v in view.reports.items()}
    assert shapes["proxy_logits"] == shapes["proxy_predictions"] == (5, wide)
    assert shapes["delta_similarity"] == (5, 5)
    assert shapes["sketch"] == shapes["delta_sketch"] == (5, small.SKETCH)
    assert shapes["label_histogram"] == (5, small.CLASSES)


def test_reports_about_trained_models() -> None:
    world, selector, clients = seen_by_a_selector()
    reports, cut = selector.views[0].reports, world.reporter.num_params
    people = world.lanes[0].population
    data, proxy = people.dataset, people.dataset.x_train[people.proxy]
    deltas = clients.states - world.states
    assert torch.equal(reports["sketch"], small.sketch(clients.states[:, :cut]))
    assert torch.equal(reports["delta_sketch"], small.sketch(deltas[:, :cut]))
    torch.testing.assert_close(reports["update_norm"], deltas[:, :cut].square().sum(1).sqrt())
    for i in range(5):
        x, y = data.x_train[people.rows[i]], data.y_train[people.rows[i]]
        net = at(clients.states[i])
        torch.testing.assert_close(reports["loss_after"][i], F.cross_entropy(net(x), y))
        logits = net(proxy).detach()
        torch.testing.assert_close(reports["proxy_logits"][i].view(-1, 3), logits)
        torch.testing.assert_close(reports["proxy_predictions"][i].view(-1, 3), logits.softmax(1))
        for j in range(5):
            cosine = F.cosine_similarity(deltas[i, :cut], deltas[j, :cut], dim=0)
            torch.testing.assert_close(reports["delta_similarity"][i, j], cosine)
    assert (reports["rms_loss"] >= reports["train_loss"] - 0.2).all()  # batches weigh unequally


def test_lanes_that_report_together_say_what_each_says_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def views() -> list[dict[str, Tensor]]:
        selectors = [small.Fixed([0], needs=TRAINED | SERVER) for _ in range(3)]
        some = [
            small.lane(Method(one, small.Watching()), seed=seed, visible=range(3 + seed))
            for seed, one in enumerate(selectors)
        ]
        shown = small.views(small.world(some))
        return [{**view.reports, **view.server} for view in shown if view is not None]

    apart = views()
    monkeypatch.setattr("fedglimpse.federation.devices.SEPARATE_LANES", ())
    together = views()
    assert len(apart) == len(together) == 3
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rms_loss_is_over_examples_not_batches() -> None:
    """With a rate of almost 0 the model stays, and both losses follow from it."""
    selector = small.Fixed([0], needs=frozenset({"rms_loss", "train_loss"}))
    people = small.population()
    still = small.TrainingRecipe("sgd", lr=1e-12, batch_size=8, epochs=2)
    world = small.world([small.lane(Method(selector, small.Watching()))], still)
    selector.select(small.views(world)[0], 3)
    # client 2 has 20 examples: batches of 8, 8 and 4 in each epoch
    net = at(world.states[0]).train()
    job_rows = people.rows[2]
    key = torch.tensor([small.rng.key(0, "train", 0, 2)])
    means, squares = [], []
    for epoch in range(2):
        order = small.rng.permutations(key, epoch, torch.tensor([20]), 20)[0]
        for rows in job_rows[order].split(8):
            x, y = people.dataset.x_train[rows], people.dataset.y_train[rows]
            each = F.cross_entropy(net(x), y, reduction="none")
            means.append(each.mean())
            squares.append(each.square())
    reports = selector.views[0].reports
    torch.testing.assert_close(reports["train_loss"][2], torch.stack(means).mean())
    torch.testing.assert_close(reports["rms_loss"][2], torch.cat(squares).mean().sqrt())


def test_probes_are_taken_at_the_global_model() -> None:
    world, selector, _ = seen_by_a_selector()
    reports, people = selector.views[0].reports, world.lanes[0].population
    data = people.dataset

    def gradients(rows: Tensor) -> list[Tensor]:
        net = at(world.states[0])
        F.cross_entropy(net(data.x_train[rows]), data.y_train[rows]).backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    server = gradients(people.proxy)
    for i in range(5):
        rows = people.rows[i]
        net = at(world.states[0])
        loss = F.cross_entropy(net(data.x_train[rows]), data.y_train[rows])
        torch.testing.assert_close(reports["loss"][i], loss.detach())
        away = [a - b for a, b in zip(gradients(rows), server, strict=True)]
        per_tensor = torch.stack([v.norm() for v in away]).sum()
        whole = torch.cat([v.flatten() for v in away]).norm()
        torch.testing.assert_close(reports["gradient_distance"][i], per_tensor)
        torch.testing.assert_close(reports["gradient_distance_l2"][i], whole)
        counts = data.y_train[rows].bincount(minlength=3)
        assert reports["label_histogram"][i].tolist() == counts.tolist()


def test_server_reports() -> None:
    world, selector, _ = seen_by_a_selector()
    server, people = selector.views[0].server, world.lanes[0].population
    guess = at(world.states[0])(people.dataset.x_train[people.proxy]).argmax(1)
    torch.testing.assert_close(server["proxy_histogram"], guess.bincount(minlength=3) / 9)
    cut = world.reporter.num_params
    assert torch.equal(server["global_sketch"], small.sketch(world.states[0, :cut]))


def test_gradients_over_several_batches_weigh_by_size() -> None:
    people = small.population((GRADIENT_BATCH + 50,))
    data, evaluator = people.dataset, Evaluator(small.model(), small.CLASSES)
    state = small.layout().read(small.model())
    x, y = data.x_train[people.rows[0]], data.y_train[people.rows[0]]
    found = evaluator.mean_gradient(state, x, y)
    net = at(state)
    F.cross_entropy(net(x), y).backward()
    wanted = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    torch.testing.assert_close(found, wanted)
    kept = dict(evaluator.model.named_buffers())
    assert torch.equal(kept["2.running_mean"], net.get_buffer("2.running_mean"))
    assert torch.equal(kept["2.running_var"], net.get_buffer("2.running_var"))


def test_distances_of_the_specification() -> None:
    """Two tensors of 2 and 1 numbers; A, B, C, D against the proxy gradient."""
    place = Layout.of(nn.Linear(2, 1))
    proxy = torch.tensor([1.0, 0, 2])
    clients = torch.tensor([[1.0, 1, 2], [4, 4, 2], [1, 0, 4.5], [1.9, 1.2, 3.5]])
    per_tensor = torch.stack([gradient_distance(place, c, proxy, True) for c in clients])
    whole = torch.stack([gradient_distance(place, c, proxy, False) for c in clients])
    torch.testing.assert_close(per_tensor, torch.tensor([1.0, 5, 2.5, 3]))
    torch.testing.assert_close(whole, torch.tensor([1.0, 5, 2.5, 4.5**0.5]))


def test_cosines_of_zero_rows_are_zero() -> None:
    rows = torch.tensor([[3.0, 4], [0, 0], [-6, -8], [4, -3]])
    wanted = [[1, 0, -1, 0], [0, 0, 0, 0], [-1, 0, 1, 0], [0, 0, 0, 1]]
    torch.testing.assert_close(cosines(rows), torch.tensor(wanted).float())


@pytest.mark.parametrize("early", [True, False])
def test_the_chosen_report_to_aggregator_and_selector(early: bool) -> None:
    asked = frozenset({"proxy_logits", "loss", "loss_after", "train_loss", "delta_similarity"})
    needs = frozenset({"update_norm"} if early else ())
    learns = frozenset({"rms_loss", "loss", "gradient_distance", "sketch"})
    selector = small.Fixed([3, 1], needs=needs, learns_from=learns)
    aggregator = small.Watching(asked)
    world = small.world([small.lane(Method(selector, aggregator))])
    before, people = world.states[0].clone(), world.lanes[0].population
    small.run_round(world)
    update, outcome = aggregator.updates[0], selector.outcomes[0]
    assert update.ids.tolist() == outcome.selected.tolist() == [3, 1]
    assert set(update.reports) == asked
    assert set(outcome.reports) == learns
    assert update.reports["delta_similarity"].shape == (2, 2)
    data = people.dataset
    for i, client in enumerate([3, 1]):
        x, y = data.x_train[people.rows[client]], data.y_train[people.rows[client]]
        received, own = at(before), at(update.starts[i] + update.deltas[i])
        loss = F.cross_entropy(received(x), y).detach()
        torch.testing.assert_close(update.reports["loss"][i], loss)
        torch.testing.assert_close(outcome.reports["loss"][i], loss)
        after = F.cross_entropy(own(x), y).detach()
        torch.testing.assert_close(update.reports["loss_after"][i], after, rtol=1e-4, atol=1e-5)
    for value in [*update.reports.values(), *outcome.reports.values()]:
        assert value.dtype == torch.float32
        assert len(value) == 2


def test_lanes_report_together_as_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does: one pass for lanes with proxy sets of one size, whoever they see."""

    people = small.population()
    fewer = replace(people, proxy=people.proxy[:4])
    asked = (TRAINED | PROBES) - {"delta_similarity"}

    def reported() -> list[dict[str, Tensor]]:
        lanes = [
            small.lane(Method(small.Fixed([0], needs=asked), small.Watching()), i, 1, **who)
            for i, who in enumerate([
                {"visible": [0, 1, 2], "population": people},
                {"visible": [3, 1], "population": people},
                {"visible": [2, 4], "population": fewer},
                {"visible": [0, 4], "population": people},
            ])
        ]  # fmt: skip
        return [dict(view.reports) for view in small.views(small.world(lanes)) if view is not None]

    alone = reported()
    monkeypatch.setattr("fedglimpse.federation.devices.SEPARATE_LANES", ())
    for one, other in zip(alone, reported(), strict=True):
        assert set(one) == set(other)
        for name in one:
            torch.testing.assert_close(one[name], other[name])
