"""One round on real devices: ask, choose, collect, aggregate, learn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.flower import messages as wire
from fedglimpse.flower.clients import Federation
from fedglimpse.flower.requests import Desk, Upload
from fedglimpse.flower.round_log import Sheet
from fedglimpse.simulation.lane import check_choice
from fedglimpse.simulation.merge import stepped
from fedglimpse.simulation.trained_clients import TrainedClients
from fedglimpse.types import Choice, Outcome, Update, View


class Round:
    """Plays one round of a federation."""

    def __init__(self, fed: Federation, sheet: Sheet) -> None:
        """Play with the visible clients of `sheet`."""
        self.fed, self.sheet, self.desk = fed, sheet, Desk(fed, sheet)
        self.num, self.seed = sheet.round_num, fed.seed

    def play(self) -> Mapping[str, float]:
        """Run the round; returns what the selector's feedback said."""
        fed = self.fed
        view, ready = self._observe(self.sheet.visible)
        if view is None:
            return {}
        k = fed.method.budget(fed.config.selection.k, view.num_visible)
        choice = fed.method.selector.select(view, k)
        check_choice(choice, view, k, fed.method.selector)
        self.sheet.chose, self.sheet.info = True, choice.info
        found = self._collect(view, choice, ready)
        if not self._enough(len(found), len(choice.slots)):
            found = []
        return fed.method.selector.feedback(self._aggregate(choice, found))

    def _enough(self, answered: int, asked: int) -> bool:
        return answered >= max(1, math.ceil(self.fed.terms.quorum * asked))

    def _observe(self, asked: list[int]) -> tuple[View | None, dict[int, Upload]]:
        """Ask every visible client, if the method wants to know something before it chooses.

        Returns:
            What the method may see, None where too few answered, and the updates of those that
            have sent them already.
        """
        plan, ready = self.fed.plan, {}
        reports: Mapping[int, Mapping[str, Tensor]] = {c: {} for c in asked}
        if plan.uploads_all:
            ready = self.desk.ask_updates(asked, plan.now | plan.after)
            reports = {c: up.reports for c, up in ready.items()}
        elif plan.asks_all:
            kind = wire.SKETCH if plan.trains_all else wire.PROBE
            reports = self.desk.ask_reports(kind, asked)
        self.fed.visits += len(asked) if plan.trains_all else 0
        ids = [c for c in asked if c in reports]
        if not self._enough(len(ids), len(asked)):
            return None, {}
        rows = {n: torch.stack([reports[c][n] for c in ids]) for n in sorted(plan.now)}
        needs = self.fed.method.selector.needs
        if plan.uploads_all:
            rows |= self._read_off(plan.ours & needs, ids, [ready[c] for c in ids])
        at = torch.tensor(ids)
        view = View(
            round_num=self.num,
            ids=at,
            sizes=self.fed.sizes[at],
            reports=rows,
            server=self.fed.reporter.server(needs, self.fed.state, self.fed.server_data),
            rng=rng.generator(self.seed, "select", self.num),
        )
        return view, ready

    def _collect(
        self, view: View, choice: Choice, ready: Mapping[int, Upload]
    ) -> list[tuple[int, int, Upload]]:
        """Get the updates of the chosen.

        Returns:
            (place in the choice, client, update). A client that has trained but could not upload
            is replaced, in its place, by the next best of those that have trained.
        """
        plan = self.fed.plan
        places = dict(enumerate(view.ids[choice.slots].tolist()))  # place -> client
        if not plan.trains_all:
            ready = self._train(list(places.values()))
        if not plan.trains_all or plan.uploads_all:
            return [(place, c, ready[c]) for place, c in places.items() if c in ready]
        found: dict[int, tuple[int, Upload]] = {}
        tried: set[int] = set()
        while places:
            got = self.desk.fetch(list(places.values()))
            tried |= set(places.values())
            found |= {place: (c, got[c]) for place, c in places.items() if c in got}
            empty = [place for place, c in places.items() if c not in got]
            places = dict(zip(empty, self._next_best(view, tried, len(empty)), strict=False))
        return [(place, *found[place]) for place in sorted(found)]

    def _train(self, ids: list[int]) -> dict[int, Upload]:
        """Let the chosen train and upload, together or each from the result of the last."""
        fed, after = self.fed, self.fed.plan.after
        uploads: dict[int, Upload] = {}
        if fed.method.schedule == "parallel":
            uploads = self.desk.ask_updates(ids, after)
        else:
            head = fed.state
            for place, client in enumerate(ids):
                one = self.desk.ask_updates([client], after, head, place)
                uploads |= one
                head = one[client].state if one else head
        fed.visits += len(ids)
        return uploads

    def _next_best(self, view: View, tried: set[int], count: int) -> list[int]:
        """Return whom the method would choose among those that were not tried yet."""
        rest = [slot for slot, c in enumerate(view.ids.tolist()) if c not in tried]
        if not rest or not count:
            return []
        at = torch.tensor(rest)
        smaller = replace(
            view,
            ids=view.ids[at],
            sizes=view.sizes[at],
            reports={n: v[at] for n, v in view.reports.items()},
            rng=rng.generator(self.seed, "select", self.num),
        )
        slots = self.fed.twin().select(smaller, count).slots
        return [int(c) for c in smaller.ids[slots]]

    def _aggregate(self, choice: Choice, found: Sequence[tuple[int, int, Upload]]) -> Outcome:
        """Take the step, evaluate it, and say what came of it."""
        fed, method = self.fed, self.fed.method
        places, clients = [place for place, *_ in found], [client for _, client, _ in found]
        uploads = [upload for *_, upload in found]
        ids = torch.tensor(clients, dtype=torch.long)  # [K]
        sizes = fed.sizes[ids]
        given = choice.weights_at(places)
        weights = sizes.double() / sizes.sum() if given is None else given
        reports = self._reports_after(ids, uploads)
        if found:
            starts = torch.stack([up.start for up in uploads])  # [K, d]
            update = Update(
                round_num=self.num,
                ids=ids,
                sizes=sizes,
                starts=starts,
                deltas=torch.stack([up.state for up in uploads]) - starts,
                weights=weights.float(),
                num_params=fed.layout.num_params,
                reports={n: reports[n] for n in method.aggregator.needs if n in reports},
            )
            fed.state = stepped(method.aggregator, fed.state.clone(), update)
            if method.aggregator.applied is not None:
                weights = method.aggregator.applied.double()
        self.sheet.selected, self.sheet.weights = clients, weights.tolist()
        scores = fed.evaluator.score(fed.state, *fed.problem.proxy)
        reward, per_class = fed.reward.update(scores)
        return Outcome(
            round_num=self.num,
            selected=ids,
            reward=reward,
            score=fed.reward.score(scores),
            per_class=scores.per_class_f1,
            reward_per_class=per_class,
            weights=weights.float(),
            reports={n: reports[n] for n in method.selector.learns_from if n in reports},
        )

    def _reports_after(self, ids: Tensor, uploads: Sequence[Upload]) -> dict[str, Tensor]:
        """Return what is known about the uploaded models: said by clients, or read off."""
        fed, plan = self.fed, self.fed.plan
        later = fed.method.selector.learns_from | fed.method.aggregator.needs
        said = {
            n: torch.stack([up.reports[n] for up in uploads]) if uploads else torch.zeros(0)
            for n in sorted(plan.after)
        }
        ours = self._read_off(plan.ours & later, ids.tolist(), uploads)
        return said | ours | fed.reporter.server(later, fed.state, fed.server_data)

    def _read_off(
        self, names: frozenset[str], ids: Sequence[int], uploads: Sequence[Upload]
    ) -> dict[str, Tensor]:
        """Compute reports from whole updates, on the server."""
        fed, count = self.fed, len(uploads)
        empty = fed.state.new_zeros(0, len(fed.state))
        clients = TrainedClients(
            ids=torch.tensor(ids, dtype=torch.long),
            starts=torch.stack([up.start for up in uploads]) if count else empty,
            states=torch.stack([up.state for up in uploads]) if count else empty,
            loss=torch.zeros(count),
            squared_loss=torch.zeros(count),
        )
        return fed.reporter.trained(names, clients, fed.server_data)
