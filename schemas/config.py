"""The run's configuration: TOML, checked before anything starts; an unknown key is refused with the nearest valid one.

``load_config`` composes files (``base.toml overlay.toml``) and ``key=value`` overrides into a RunConfig. Secrets are
read from the environment only and never written. ``dump_config`` writes the resolved form into the run folder.
"""

import difflib
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace.schemas.errors import ConfigurationError
from headrace.schemas.ids import check_run_id
from headrace.schemas.trainer_config import CriticConfig, LoraConfig, MetricsConfig, Section, TrainerConfig

__all__ = (
    "CriticConfig",
    "EvalConfig",
    "KafkaConfig",
    "LoraConfig",
    "MetricsConfig",
    "OperatorConfig",
    "PolicyConfig",
    "RegistryConfig",
    "RolloutConfig",
    "RunConfig",
    "RunSection",
    "RuntimeConfig",
    "StoreConfig",
    "StreamConfig",
    "TrainerConfig",
    "default_kafka",
    "dump_config",
    "load_config",
    "read_config",
    "read_kafka_section",
    "read_sections",
)


class RunSection(Section):
    """``[run]``: identity, seed, and what the run's topics look like."""

    id: str = "run"
    """Run id; first part of every topic's name."""
    seed: int = 0
    """Seed of shuffling, sampling and initial weights."""
    folder: str = "runs"
    """Parent of the run folder ``<folder>/<id>``."""
    group_partitions: int = Field(8, ge=1)
    """N: partitions of everything keyed by group (32 on a cluster)."""
    inboxes: int = Field(64, ge=1)
    """I: partitions of ``tasks``."""
    lanes: int = Field(8, ge=1)
    """L: partitions of a batch topic; a multiple of the trainer's ranks."""
    max_restarts: int = Field(5, ge=0)
    """Deaths of one part within ``restart_window_seconds`` after which the launcher gives up."""
    restart_window_seconds: float = 120.0
    """Window in which deaths of a part are counted."""
    patience_seconds: float = 600.0
    """Time without any progress after which the run ends with the reason."""
    max_failed_groups: int = Field(256, ge=0)
    """Groups that fail one after the other, with none usable between, after which the run ends; 0: never."""


class KafkaConfig(Section):
    """``[kafka]``: one connection for all clients; empty ``bootstrap`` means the local broker in the run folder."""

    bootstrap: str = ""
    """``host:port`` of one or more brokers, separated by commas."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How clients connect."""
    sasl_mechanism: str = ""
    """``PLAIN``, ``SCRAM-SHA-256`` or ``SCRAM-SHA-512``, with a SASL protocol."""
    sasl_username: str = ""
    """The user; ``{role}`` stands for launcher, source, operators, rollout, trainer or inspector. Empty: see below."""
    sasl_password_file: str = ""
    """File that holds the password, ``{role}`` as above; its content is never printed or written. Empty: see below."""
    sasl_username_env: str = "HEADRACE_KAFKA_USERNAME"
    """Name of the environment variable that holds the user, where ``sasl_username`` is empty."""
    sasl_password_env: str = "HEADRACE_KAFKA_PASSWORD"
    """Name of the environment variable that holds the password, where no file is named."""
    ssl_ca_location: str = ""
    """File with the certificates to trust."""
    ssl_certificate_location: str = ""
    """File with the client's certificate."""
    ssl_key_location: str = ""
    """File with the client's key."""
    ssl_key_password_env: str = ""
    """Name of the environment variable that holds the password of the key; empty: it has none."""
    replication_factor: int = Field(1, ge=1)
    """Copies of every topic; 3 on a cluster."""
    patience_seconds: float = Field(600.0, gt=0)
    """Time that a part waits for a cluster that does not answer, saying so, before it ends."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Further librdkafka settings for every client, such as ``client.rack``."""


StageName = Literal["schedule", "assemble", "batch"]


def _only_schedule() -> list[StageName]:
    return ["schedule"]


class RuntimeConfig(Section):
    """``[runtime]``: how operator workers keep the state of their tasks, and what they do with unusable records."""

    on_disk: list[StageName] = Field(default_factory=list)
    """Sub-topologies whose state lies in SQLite files instead of memory, for pools larger than memory."""
    folder: str = ""
    """Where these files lie, on each operator's machine; empty: ``state`` in the run folder."""
    standby: list[StageName] = Field(default_factory=_only_schedule)
    """Sub-topologies of which every operator worker follows the state of tasks that others run: takeover is instant."""
    standby_bytes: int = Field(64 << 20, ge=0)
    """State that one worker follows at most; above it, it follows nothing and restores on demand."""
    max_unusable_share: float = Field(0.5, gt=0, le=1)
    """Share of unusable records among the last ``unusable_window`` of a topic above which a task stops; 1: never."""
    unusable_window: int = Field(200, ge=1)
    """Records over which this share is measured."""


class RegistryConfig(Section):
    """``[registry]``: a schema registry with Confluent's API; empty ``url`` means none."""

    url: str = ""
    """Where the registry answers, such as ``http://127.0.0.1:8081``; several by commas are tried in turn."""
    username_env: str = "HEADRACE_REGISTRY_USERNAME"
    """Name of the environment variable that holds the user; no login when it is not set."""
    password_env: str = "HEADRACE_REGISTRY_PASSWORD"
    """Name of the environment variable that holds the password."""
    ca_location: str = ""
    """File with the certificates to trust; empty: the system's."""
    timeout_seconds: float = Field(10.0, gt=0)
    """Time for one request."""


class StoreConfig(Section):
    """``[store]``: where weights and large arrays go; an empty ``url`` means the run folder's ``store``."""

    url: str = ""
    """``file:///folder`` or ``s3://bucket/prefix``."""
    endpoint_url: str = ""
    """Where an S3-compatible server answers; empty: AWS."""
    region: str = ""
    """Region of the bucket."""
    path_style: bool = True
    """``endpoint/bucket/key`` instead of ``bucket.endpoint/key``."""
    timeout_seconds: float = 30.0
    """Time for one request."""
    retries: int = 5
    """Attempts of a request."""
    patience_seconds: float = Field(300.0, ge=0)
    """Time that a trainer waits at its start for a store that does not answer, saying so, before the run ends."""
    conditional_writes: Literal["probe", "assume", "fence"] = "probe"
    """Race writers at start to learn whether create-only puts hold (``probe``), take it as given (``assume``), or do
    without: every commit is then preceded by one in Kafka, which only the trainer in force can make (``fence``)."""
    compact_seconds: float = Field(0.0, ge=0)
    """Seconds between two looks of a process that merges deltas for workers that lag; 0: no such process."""
    prune_seconds: float = Field(0.0, ge=0)
    """Seconds between two rounds of a process that deletes versions that nobody needs; 0: no such process."""
    prune_grace_seconds: float = Field(3600.0, ge=0)
    """Age below which objects of a version are never deleted: twice the longest download at least. Objects without a
    version are kept for this long too, and for an hour at least.
    """
    prune_max_lag: int = Field(512, ge=1)
    """Versions behind the head from which a worker's version is no longer kept for it; it starts from a full then."""


class RolloutConfig(Section):
    """``[rollout]``: engines, workers and the life of a task (protocol 5)."""

    engine: str = "transformers"
    """Name of the engine plug-in."""
    workers: int = Field(1, ge=0)
    """Rollout worker processes that the launcher starts; others may join by themselves."""
    slots: int = Field(64, ge=1)
    """Tasks that one worker runs at once; it announces one more."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Smallest set of tokens with this share of probability; 1: all."""
    top_k: int = Field(0, ge=0)
    """Number of likeliest tokens; 0: all."""
    max_new_tokens: int = Field(16, ge=1)
    """Tokens of a completion at most."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """A longer prompt is dropped, counted and named."""
    task_deadline_seconds: float = Field(60.0, gt=0)
    """Time for one attempt, from its issue."""
    group_deadline_seconds: float = Field(0.0, ge=0)
    """0: three task deadlines plus 10 s."""
    heartbeat_seconds: float = 2.0
    """Longest time between two Demand records of a worker."""
    lease_seconds: float = 10.0
    """Silence after which a worker's tasks go elsewhere."""
    max_episode_failures: int = Field(3, ge=1)
    """Failed attempts after which a replica has failed."""
    max_lost_leases: int = Field(5, ge=1)
    """Lost leases after which a replica has failed."""
    offload_bytes: int = 1 << 20
    """Arrays of a trajectory above this size go to the object store."""
    on_new_weights: Literal["keep", "abort_resume", "finish"] = "keep"
    """Unfinished sequences go on with the new weights, are broken off and resumed from their prefix (here or, should
    this worker die, elsewhere), or finish their episode first while the new weights wait."""
    partial_tokens: int = Field(256, ge=1)
    """Sampled tokens from which on the prefix of an unfinished trajectory is written to ``partials`` when it is broken
    off: by new weights under ``abort_resume``, or because its worker leaves."""
    poll_seconds: float = 0.5
    """How often the object store is asked for a newer version when no announcement came."""
    host_copy: bool = True
    """Keep the weights in a worker's memory beside the engine's; without, every version is read from a full on."""
    threads: int = 1
    """Threads of a worker's engine."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the engine's own."""


class EvalConfig(Section):
    """``[eval]``: evaluation tasks on a held-out set every so many versions, at the start and at the end."""

    dataset: str = ""
    """Held-out rows, read as the stream's dataset is; empty: no evaluation."""
    every: int = Field(0, ge=0)
    """Versions between two evaluations; 0: at the start and at the end only."""
    samples: int = Field(1, ge=1)
    """k: completions of each row, for avg@k and pass@k."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature of evaluation tasks."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Smallest set of tokens with this share of probability; 1: all."""
    top_k: int = Field(0, ge=0)
    """Number of likeliest tokens; 0: all."""
    max_new_tokens: int = Field(0, ge=0)
    """Tokens of a completion at most; 0: as in ``[rollout]``."""
    solved_at: float = 1.0
    """Reward from which on a sample counts as solved, for pass@k."""
    best: str = "avg"
    """Metric whose best version is kept and exported: ``avg``, or ``pass@K`` with K up to ``samples``; empty: none."""
    workers: int = Field(0, ge=0)
    """Workers that only evaluate, each version with exactly its weights; the others then only train. 0: all do both."""
    limit: int = Field(0, ge=0)
    """Rows used at most; 0: all."""
    suite: str = "heldout"
    """Name under which results are reported."""
    reward: str = ""
    """Empty: the reward of the stream, with its options."""
    reward_options: dict[str, Any] = Field(default_factory=dict)
    """Options of ``reward``."""
    priority: Literal["after", "before"] = "after"
    """Whether evaluation tasks go out after or before training tasks."""

    @model_validator(mode="after")
    def _known_metric(self) -> "EvalConfig":
        names = ["avg", *(f"pass@{k}" for k in range(1, self.samples + 1))]
        if self.best and self.best not in names:
            raise ValueError(f"best is {self.best!r}; with {self.samples} samples a row there are {', '.join(names)}")
        if self.reward_options and not self.reward:
            raise ValueError("reward_options are those of reward, which is not set; a stream's own stand in the stream")
        return self


class OperatorConfig(BaseModel):
    """One entry of ``[[operators]]``: ``type`` names the entry point, the rest is the operator's own configuration."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    stream: str = ""
    policy: str = ""


class PolicyConfig(Section):
    """``[policies.P]``: a policy: model, the two knobs of asynchrony (protocol 3, 4), overrides of its trainer."""

    model: str
    """Folder of a Hugging Face model with its tokenizer."""
    depth: float = Field(1.0, ge=0)
    """d: admission depth in batches; 0 is synchronous."""
    max_staleness: int = Field(-1, ge=-1)
    """A: hard bound in versions; -1: ceil(depth) + lag."""
    lag: int = Field(0, ge=0)
    """Versions that a worker may be behind when it starts to sample."""
    ahead: int = Field(1, ge=0)
    """Batches that may be composed ahead of the trainer; 0 at depth 0."""
    mode: Literal["wait", "drop"] = "wait"
    """Whether a batch waits for a group that would grow too old, or drops it."""
    replay: float = Field(0.0, ge=0, lt=1)
    """Share of replayed groups in a batch."""
    extra_groups: int = Field(0, ge=0)
    """Groups admitted beyond what batches need."""
    exact_refill: bool = False
    """Admit one group for each that a filter has dropped, none in expectation of drops: slower, but nothing is left
    over, so at depth 0 one seed gives one run with filters too."""
    frozen: bool = False
    """Serve the model as it is: its process publishes version 0 and ends, nothing of it is admitted or trained, and
    what it says is context for the other policies."""
    trainer: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``[trainer]`` that differ for this policy."""

    def staleness_bound(self) -> int:
        """A in force: ``lag`` at depth 0 whatever is set, else ``max_staleness`` or its default."""
        if self.depth == 0:
            return self.lag
        return math.ceil(self.depth) + self.lag if self.max_staleness < 0 else self.max_staleness

    def batches_ahead(self) -> int:
        """``ahead`` in force: 0 at depth 0."""
        return 0 if self.depth == 0 else self.ahead


class StreamConfig(Section):
    """``[streams.S]``: prompt source, workflow and group size; may train several policies."""

    dataset: str
    """File or folder with the rows."""
    format: str = "auto"
    """Name of the dataset plug-in that reads it, such as ``jsonl``; ``auto`` goes by the name of the file."""
    prompt_column: str = "prompt"
    """Column with the prompt: text or chat messages."""
    answer_column: str = "answer"
    """Column with what the reward compares with; empty: there is none."""
    id_column: str = ""
    """Column with the prompt's id; empty: a digest of the row."""
    reward_column: str = ""
    """Column that names the row's reward; empty: ``reward`` for all."""
    reward: str = "exact_match"
    """Name of the reward plug-in."""
    reward_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the reward's own."""
    group_reward: str = ""
    """A reward over all members of a group (a judge, a ranking), added to ``reward``."""
    group_reward_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the group reward's own."""
    workflow: str = "single_turn"
    """Name of the workflow plug-in."""
    workflow_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the workflow's own."""
    policies: list[str] = Field(default_factory=list)
    """Empty: all policies."""
    group_size: int = Field(8, ge=1)
    """G: completions of one prompt."""
    extra_replicas: int = Field(0, ge=0)
    """k: tasks beyond G; the group closes with the first G usable."""
    min_members: int = Field(2, ge=1)
    """Usable members with which a group closes at its deadline."""
    retries: int = Field(1, ge=0)
    """Times that a failed group is admitted again."""
    epochs: int = Field(0, ge=0)
    """0: without end."""
    shuffle: bool = True
    """Another order in every epoch, by the seed."""
    on_bad_row: Literal["fail", "dead-letter"] = "fail"
    """Refuse to start, or name the row in a dead letter and go on."""
    pacing: str = "any"
    """Which policies must have room: ``any``, ``all``, or one policy's name."""


class RunConfig(Section):
    """A whole run. ``order`` of policies is their index everywhere."""

    run: RunSection = RunSection()
    kafka: KafkaConfig = KafkaConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    registry: RegistryConfig = RegistryConfig()
    store: StoreConfig = StoreConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    policies: dict[str, PolicyConfig]
    streams: dict[str, StreamConfig]
    operators: list[OperatorConfig] = Field(default_factory=list)
    warm_start: dict[str, Any] = Field(default_factory=dict)
    """``[warm_start]``: what a recipe does before the run; read by the recipe's own code only."""

    @model_validator(mode="after")
    def _whole(self) -> "RunConfig":
        check_run_id(self.run.id)
        for name, policy in self.policies.items():
            least = math.ceil(policy.depth) + policy.lag
            if policy.depth > 0 and policy.staleness_bound() < least:
                raise ValueError(
                    f"policies.{name}.max_staleness is {policy.max_staleness}, but depth {policy.depth} with lag "
                    f"{policy.lag} needs at least {least}"
                )
            ranks = self.trainer_of(name).ranks
            if self.run.lanes % ranks:
                raise ValueError(
                    f"run.lanes is {self.run.lanes}, which the {ranks} ranks of policy {name} cannot share evenly; "
                    "take a multiple of trainer.ranks"
                )
        for name, stream in self.streams.items():
            for wanted in stream.policies:
                if wanted not in self.policies:
                    raise ValueError(
                        f"streams.{name}.policies names {wanted!r}; policies are {', '.join(self.policies)}"
                    )
            if self.policies and all(self.policies[p].frozen for p in stream.policies or self.policies):
                raise ValueError(f"streams.{name} trains nothing: all of its policies are frozen")
        if not self.policies or not self.streams:
            raise ValueError("a run needs at least one [policies.P] and one [streams.S]")
        return self

    @model_validator(mode="after")
    def _without_logins(self) -> "RunConfig":
        addresses = {
            "registry.url": (self.registry.url, "the variables that registry.username_env and password_env name"),
            "store.url": (self.store.url, "the environment or AWS's own files"),
            "store.endpoint_url": (self.store.endpoint_url, "the environment or AWS's own files"),
        }
        for key, (url, instead) in addresses.items():
            path = "://" not in url and key == "store.url"
            if not path and any("@" in part.rpartition("://")[2].partition("/")[0] for part in url.split(",")):
                raise ValueError(f"{key} holds a login, which would be written into the run folder; use {instead}")
        return self

    def trainer_of(self, policy: str) -> TrainerConfig:
        """``[trainer]`` with the overrides of ``[policies.P.trainer]``."""
        overrides = self.policies[policy].trainer
        return TrainerConfig.model_validate({**self.trainer.model_dump(), **overrides})

    def policy_names(self) -> list[str]:
        """Policies in the order of their index."""
        return list(self.policies)

    def stream_policies(self, stream: str) -> list[int]:
        """Indices of the policies that a stream's workflow plays with, frozen ones included."""
        names = self.streams[stream].policies or self.policy_names()
        return [self.policy_names().index(name) for name in names]

    def run_folder(self) -> Path:
        """``<run.folder>/<run.id>``."""
        return Path(self.run.folder) / self.run.id

    def group_deadline_ms(self) -> int:
        """Time from admission to a group's deadline: set, or three task deadlines plus 10 s (protocol 5)."""
        seconds = self.rollout.group_deadline_seconds or 3 * self.rollout.task_deadline_seconds + 10
        return int(seconds * 1000)


def load_config(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """A RunConfig from TOML files, later ones over earlier ones, and ``key=value`` overrides (dotted keys).

    A run's ``config.json`` may stand for a file. Raises ConfigurationError that names the file or key and, for an
    unknown key, the nearest valid one.
    """
    return _validated(read_sections(files, overrides), " ".join(map(str, files)))


def read_sections(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What TOML (or JSON) files and ``key=value`` overrides say, composed and not yet checked.

    Raises ConfigurationError.
    """
    data: dict[str, Any] = {}
    for file in files:
        _merge(data, _sections(file))
    for override in overrides:
        _override(data, override)
    return data


def _sections(file: str | Path) -> dict[str, Any]:
    """What a TOML file, or a JSON file of the same shape, holds."""
    kind = "JSON" if str(file).endswith(".json") else "TOML"
    try:
        text = Path(file).read_text("utf-8")
        data: Any = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file} is not {kind}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{file} holds a {type(data).__name__}, not sections with keys")
    return data


def read_config(path: str | Path) -> RunConfig:
    """The resolved configuration that ``dump_config`` wrote. Raises ConfigurationError when it is missing or broken."""
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read the run's configuration {path}: {error}") from error
    return _validated(data, str(path))


def read_kafka_section(file: str | Path) -> KafkaConfig:
    """The ``[kafka]`` section of a TOML or JSON file, whatever else it holds. Raises ConfigurationError."""
    try:
        return KafkaConfig.model_validate(_sections(file).get("kafka", {}))
    except ValidationError as error:
        details = [{**detail, "loc": ("kafka", *detail["loc"])} for detail in error.errors()]
        raise ConfigurationError("\n".join(_explain(detail, str(file)) for detail in details)) from error


def default_kafka() -> KafkaConfig:
    """What commands that name no run folder take: the ``[kafka]`` section of the file HEADRACE_KAFKA_CONFIG, if set."""
    file = os.environ.get("HEADRACE_KAFKA_CONFIG")
    return read_kafka_section(file) if file else KafkaConfig()


def dump_config(config: RunConfig, path: str | Path) -> None:
    """Write the resolved configuration as JSON, in one piece: a full disk or a kill leaves the file that was there."""
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n", "utf-8")
    unfinished.replace(path)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _override(data: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    *path, last = key.strip().split(".")
    if not equals or key.startswith("-") or not all((*path, last)):
        raise ConfigurationError(f"override {text!r} is not of the form key=value, such as trainer.backend=torch")
    here = data
    for part in path:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigurationError(f"override {text!r}: {part} is not a section")
    try:
        here[last] = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        here[last] = value


def _validated(data: Mapping[str, Any], where: str) -> RunConfig:
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_explain(detail, where) for detail in error.errors())) from error


def _explain(detail: Any, where: str) -> str:
    path = ".".join(str(p) for p in detail["loc"])
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path, _known_keys(detail["loc"]), n=1)
        return f"{where}: unknown key {path}" + (f"; did you mean {near[0]}?" if near else "")
    return f"{where}: {path or 'configuration'}: {detail['msg']}"


def _known_keys(location: Sequence[str | int]) -> list[str]:
    """The valid keys beside an unknown one, as dotted paths."""
    model: type[BaseModel] = RunConfig
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        inner = getattr(annotation, "__args__", (annotation,))[-1]
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    prefix = "".join(f"{p}." for p in location[:-1])
    return [prefix + name for name in model.model_fields]
