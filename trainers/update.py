"""One batch into updates of the weights: advantages, micro-batches, loss, optimizer steps, metrics.

The result does not depend on how rows are packed or spread over ranks: losses are summed over global counts that are
fixed before anything is rejected, figures of a whole update are found before its backward pass, and all ranks run the
same count of micro-batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.connectors.plugins import load
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.records import Item, Manifest
from headrace.trainers.advantages.advantage import Advantage, BatchAdvantage
from headrace.trainers.backends.backend import Backend, Scores
from headrace.trainers.batching import MicroBatch, Row, bare_rows, count_rows, dummy, pack, split_updates
from headrace.trainers.critic import Critic, state_of
from headrace.trainers.losses.aggregation import Denominators, aggregate, mode_named
from headrace.trainers.losses.kl import kl_per_token
from headrace.trainers.losses.loss import Loss, Streams, Surveying, configured
from headrace.trainers.losses.prox import approximate_prox
from headrace.trainers.ranks import Ranks
from headrace.trainers.reference import Reference
from headrace.trainers.scoring import by_row, needs_of, scored_rows
from headrace.trainers.tally import Tally, batch_metrics
from headrace.trainers.vocabulary import Vocabulary

__all__ = ("Learned", "Learner", "check_data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What training on a batch gave: loss per update averaged, updates applied, metrics of the whole batch."""

    loss: float
    updates: int
    metrics: dict[str, float]


@dataclass(slots=True, kw_only=True)
class _Part:
    """One update's share of a batch: micro-batches, global counts, and prox of each micro-batch where it is fixed."""

    micros: list[MicroBatch]
    counts: Denominators
    prox: list[Tensor] | None = None


class Learner:
    """Trains one policy's weights in a backend.

    Raises ConfigurationError for an unknown loss or advantage, options that they do not know, asynchronous data
    without a correction, or sampling that truncates the distribution.
    """

    def __init__(self, config: RunConfig, policy: str, backend: Backend, ranks: Ranks) -> None:
        self._config = config.trainer_of(policy)
        self._backend, self._ranks = backend, ranks
        trainer = self._config
        self._loss: Loss = configured(
            load("headrace.losses", trainer.loss), trainer.loss_options, "trainer.loss_options"
        )
        self._advantage: Advantage | BatchAdvantage = configured(
            load("headrace.advantages", trainer.advantage), trainer.advantage_options, "trainer.advantage_options"
        )
        self._mode = mode_named(trainer.aggregation)
        self._by_trajectory = trainer.aggregation_unit == "trajectory"
        self._constant = float(config.rollout.max_new_tokens)
        if not config.policies[policy].frozen:
            check_data(config, policy, self._loss)
        needs = needs_of(self._advantage)
        model = config.policies[policy].model
        self._vocabulary = Vocabulary.of(model)
        self._kl = needs.kl
        self._reference: Reference | None = None
        if self._loss.needs_reference or needs.kl:
            self._reference = Reference(model, ranks.device)
        self._critic = Critic(trainer, model, ranks) if needs.values else None

    @property
    def state(self) -> Backend:
        """What a checkpoint saves and takes up: the backend, and the critic's where there is one."""
        return state_of(self._backend, self._critic)

    def train(self, items: Sequence[Item], manifest: Manifest, version: int) -> Learned:
        """Train on this rank's items of a batch; ``version`` is that of the weights before. Collective."""
        config, tally = self._config, Tally()
        parts = self._parts(items, manifest, tally)
        lr = config.lr * min(1.0, manifest.batch / config.warmup_steps) if config.warmup_steps else config.lr
        norms, applied, losses = [], 0, []
        figures: dict[str, float] = {"optim/lr": lr}
        alone = self._critic is not None and manifest.batch <= config.critic.alone
        for epoch in range(config.epochs):
            for at, part in enumerate(parts):
                if not part.counts.tokens:
                    continue
                if self._critic is not None:
                    figures |= self._teach(self._critic, part, tally, manifest.batch)
                before, first = len(tally.loss), not epoch and not at
                self._forward_backward(part, tally, version, first=first, learns=not alone)
                if alone:
                    continue
                update = self._backend.step(lr)
                norms.append(update.grad_norm)
                applied += update.applied
                losses.append(sum(float(x) for x in tally.loss[before:]))
        figures["optim/grad_norm"] = norms[-1] if norms and math.isfinite(norms[-1]) else 0.0
        figures["optim/skipped"] = float(len(norms) - applied)
        metrics = batch_metrics(tally, items, manifest, self._ranks) | figures
        total = self._ranks.add_up({"loss": sum(losses)}).get("loss", 0.0)
        loss = total / max(1, len(losses))
        return Learned(loss=loss if math.isfinite(loss) else 0.0, updates=applied, metrics=metrics)

    # before the first update

    def _parts(self, items: Sequence[Item], manifest: Manifest, tally: Tally) -> list[_Part]:
        """The batch split into updates by whole groups, with advantages, and prox where there are several updates."""
        config = self._config
        rows = self._scored(items, tally)
        split = split_updates(rows, config.updates_per_batch, ((m.group, m.use) for m in manifest.members))
        parts = [_Part(micros=self._packed(part), counts=self._counts(part)) for part in split]
        if config.updates_per_batch * config.epochs > 1 and config.prox == "forward":
            for part in parts:
                part.prox = [self._backend.logprobs(micro, gradient=False) for micro in part.micros]
        return parts

    def _scored(self, items: Sequence[Item], tally: Tally) -> list[Row]:
        """Rows with advantages; values and KL estimates are those of the weights before the batch."""
        every = bare_rows(items, by_trajectory=self._by_trajectory)
        rows = self._vocabulary.known(every, items)
        tally.counts["left_out"] = float(len(every) - len(rows))
        values, kl = [], []
        if self._critic is not None or self._kl:
            micros = self._packed(rows)
            if self._critic is not None:
                values = by_row(micros, [self._critic.values(micro) for micro in micros], rows)
            if self._kl:
                kl = by_row(micros, [self._reference_kl(micro) for micro in micros], rows)
        return scored_rows(items, rows, self._advantage, self._ranks.add_up, values=values, kl=kl)

    def _reference_kl(self, micro: MicroBatch) -> Tensor:
        """The estimated KL of behave to the reference on every trained token."""
        assert self._reference is not None and self._kl is not None
        micro = micro.to(self._ranks.device)
        return kl_per_token(micro.behave, self._reference.logprobs(micro), micro.mask, self._kl)

    def _packed(self, rows: Sequence[Row]) -> list[MicroBatch]:
        """Micro-batches of an update; ranks with fewer than the others add dummies."""
        micros = pack(rows, self._config.micro_batch_tokens)
        most = int(self._ranks.largest({"micros": len(micros)})["micros"])
        return micros + [dummy() for _ in range(most - len(micros))]

    def _counts(self, rows: Sequence[Row]) -> Denominators:
        """Global counts of an update, over everything that is trained, before any rejection."""
        here = self._ranks.add_up(count_rows(rows, by_trajectory=self._by_trajectory))
        return Denominators(tokens=int(here["tokens"]), sequences=int(here["units"]), constant=self._constant)

    # an update

    def _forward_backward(self, part: _Part, tally: Tally, version: int, *, first: bool, learns: bool) -> None:
        """Every micro-batch of an update forward and, if it ``learns``, backward."""
        loss, ready = self._fitted(part, version, first=first, learns=learns)
        for number, host in enumerate(part.micros):
            tally.count(host)
            micro = host.to(self._ranks.device)
            new, entropy = ready or self._new(micro, gradient=learns)
            streams = self._streams(micro, new, part, number, version)
            terms = loss(streams)
            micro = micro.to(new.device)
            share = aggregate(terms.loss, micro.mask, self._mode, part.counts, micro.unit_tokens)
            if learns:
                self._backend.backward(share, last=number == len(part.micros) - 1)
            tally.add(share, terms, micro, entropy)
            if first:
                tally.compare(new.detach(), micro, version)

    def _fitted(
        self, part: _Part, version: int, *, first: bool, learns: bool
    ) -> tuple[Loss, tuple[Tensor, Tensor | None] | None]:
        """The loss with its figures of this update; what the only micro-batch's forward pass gave, if it was made.

        With several micro-batches this takes a forward pass without gradient; before the first update that of prox.
        """
        loss = self._loss
        if not (isinstance(loss, Surveying) and loss.surveys):
            return loss, None
        ready = self._new(part.micros[0], gradient=learns) if len(part.micros) == 1 else None
        found: dict[str, list[Tensor]] = {}
        for number, micro in enumerate(part.micros):
            if ready is not None:
                new = ready[0].detach()
            elif first and part.prox is not None:
                new = part.prox[number]
            else:
                new = self._backend.logprobs(micro, gradient=False)
            for name, values in loss.survey(self._streams(micro, new, part, number, version, penalty=False)).items():
                found.setdefault(name, []).append(values.cpu())
        here = {name: torch.cat(values) for name, values in found.items()}
        there = self._ranks.gather(here)[:: self._ranks.sharing]
        return loss.fitted({name: torch.cat([rank[name] for rank in there]) for name in here}), ready

    def _new(self, micro: MicroBatch, *, gradient: bool) -> tuple[Tensor, Tensor | None]:
        """New log-probs, and entropies where the backend gives them."""
        if isinstance(self._backend, Scores):
            new, entropy = self._backend.scores(micro, gradient=gradient)
            return new, entropy.detach()
        return self._backend.logprobs(micro, gradient=gradient), None

    def _streams(
        self, micro: MicroBatch, new: Tensor, part: _Part, number: int, version: int, *, penalty: bool = True
    ) -> Streams:
        """The inputs of the loss; prox is the detached new where a batch makes one update."""
        micro = micro.to(new.device)
        prox = new.detach() if part.prox is None else part.prox[number]
        method = self._config.prox
        if method != "forward" and self._config.updates_per_batch * self._config.epochs > 1:
            prox = approximate_prox(
                method, micro.behave, new, micro.versions, micro.mask, prox=version, now=version + 1
            )
        return Streams(
            new=new,
            prox=prox,
            behave=micro.behave,
            advantages=micro.advantages,
            mask=micro.mask,
            ref=self._reference.logprobs(micro) if penalty and self._loss.needs_reference and self._reference else None,
            rewards=micro.rewards,
        )

    def _teach(self, critic: Critic, part: _Part, tally: Tally, batch: int) -> dict[str, float]:
        """One update of the critic."""
        for number, micro in enumerate(part.micros):
            tally.sum_up(critic.learn(micro, part.counts, last=number == len(part.micros) - 1))
        return {name: x for name, x in critic.step(batch).items() if math.isfinite(x)}


def check_data(config: RunConfig, policy: str, loss: Loss) -> None:
    """Refuse what no loss can make right. Raises ConfigurationError."""
    asynchrony, name = config.policies[policy], config.trainer_of(policy).loss
    oldest = asynchrony.staleness_bound()
    if oldest > 0 and not loss.corrects_staleness:
        raise ConfigurationError(
            f"policies.{policy} has depth {asynchrony.depth:g} and lag {asynchrony.lag}, so data may be {oldest} "
            f"versions old, but loss {name} as configured does not correct for that; take decoupled_ppo, switch its "
            "correction on, or set depth and lag to 0"
        )
    if config.rollout.temperature <= 0:
        raise ConfigurationError(
            "rollout.temperature is 0, which samples from no distribution that could be trained; set it above 0"
        )
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        raise ConfigurationError(
            "rollout.top_p and rollout.top_k cut the distribution that log-probs are taken from, so that importance "
            "ratios are wrong; train with top_p = 1 and top_k = 0"
        )
