"""The configuration: composition, overrides, refusals with the nearest key, secrets stay out."""

import json

import pytest

from headrace.schemas import config
from headrace.schemas.errors import ConfigurationError

BASE = """
[run]
id = "first"
[trainer]
lr = 2e-4
[policies.main]
model = "m"
[streams.main]
dataset = "d.jsonl"
"""


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(BASE)
    return path


def test_later_files_and_overrides_win(base, tmp_path):
    over = tmp_path / "over.toml"
    over.write_text("[trainer]\nbackend = 'torch'\n[policies.main]\ndepth = 0\n")
    loaded = config.load_config([base, over], ["trainer.batch_groups=4", "rollout.engine=scripted"])
    assert (loaded.trainer.lr, loaded.trainer.backend, loaded.trainer.batch_groups) == (2e-4, "torch", 4)
    assert loaded.rollout.engine == "scripted"
    assert loaded.policies["main"].staleness_bound() == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.backnd=torch", "unknown key trainer.backnd; did you mean trainer.backend"),
        ("policies.main.dept=1", "unknown key policies.main.dept; did you mean policies.main.depth"),
        ("--trainer.lr=1", "not of the form key=value"),
        ("trainer.lr", "not of the form key=value"),
        ("trainer.lr=-1", "trainer.lr"),
        ("run.id=Bad Run", "run id 'Bad Run' is not usable"),
        ("policies.main.max_staleness=0", "needs at least 1"),
        ("trainer.ranks=3", "run.lanes is 8, which the 3 ranks of policy main cannot share"),
        ("streams.main.policies=['x']", "names 'x'"),
        ("registry.url=http://a:1,https://me:hidden@b:2/x", "registry.url holds a login"),
        ("store.endpoint_url=https://me:hidden@b:2", "store.endpoint_url holds a login"),
    ],
)
def test_refusals_say_what_and_what_to_do(base, override, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        config.load_config([base], [override])
    assert "hidden" not in str(refused.value)


def test_a_folder_with_an_at_sign_is_no_login(base):
    for url in ("us@home/store", "file:///data/us@home", "s3://bucket/us@home"):
        assert config.load_config([base], [f"store.url={url}"]).store.url == url


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read"):
        config.load_config([tmp_path / "none.toml"])
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        config.load_config([broken])


def test_dump_and_read_back(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_KAFKA_PASSWORD", "hunter2")
    loaded = config.load_config([base], ["kafka.security_protocol=SASL_SSL"])
    config.dump_config(loaded, tmp_path / "config.json")
    assert "hunter2" not in (tmp_path / "config.json").read_text()
    assert config.read_config(tmp_path / "config.json") == loaded
    assert json.loads((tmp_path / "config.json").read_text())["policies"]["main"]["model"] == "m"


def test_policy_overrides_of_the_trainer(base):
    loaded = config.load_config([base], ["policies.main.trainer.lr=1e-5"])
    assert loaded.trainer_of("main").lr == 1e-5
    with pytest.raises(ConfigurationError, match="nonsense"):
        config.load_config([base], ["policies.main.trainer.nonsense=1"])


def test_deadlines_and_indices(base):
    loaded = config.load_config([base], ["policies.other.model=o", "streams.main.policies=['other']"])
    assert loaded.policy_names() == ["main", "other"]
    assert loaded.stream_policies("main") == [1]
    assert loaded.group_deadline_ms() == 190_000


def test_a_stream_trains_something(base):
    told = "streams.main trains nothing: all of its policies are frozen"
    with pytest.raises(ConfigurationError, match=told):
        config.load_config([base], ["policies.main.frozen=true"])
    two = config.load_config([base], ["policies.main.frozen=true", "policies.b.model=m"])
    assert [p.frozen for p in two.policies.values()] == [True, False] and two.stream_policies("main") == [0, 1]
    overrides = ["policies.main.frozen=true", "policies.b.model=m", 'streams.main.policies=["main"]']
    with pytest.raises(ConfigurationError, match=told):
        config.load_config([base], overrides)
