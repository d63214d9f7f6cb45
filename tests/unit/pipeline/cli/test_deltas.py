"""`headrace deltas`: what it prints of a store and of a run folder, its exit codes, and the exported checkpoint."""

import json
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from headrace.connectors.adapters import SCALING
from headrace.connectors.stores.local import LocalStore
from headrace.pipeline.cli.main import main
from headrace.pipeline.delta_prune import prune
from headrace.schemas.delta_layout import Layout
from headrace.trainers.step_to_delta import DeltaPublisher

BITS = {"w": np.arange(40, dtype=np.uint16).reshape(8, 5), "b": np.linspace(0, 1, 6, dtype=np.float32)}
DTYPES = {"w": "bfloat16", "b": "float32"}


def published(
    root: Path, run: str = "first", policy: str = "main", versions: int = 3, full_every: int = 20
) -> LocalStore:
    store = LocalStore(root)
    publisher = DeltaPublisher(store, run, policy, Layout.of(BITS, DTYPES), full_every=full_every)
    head = None
    for version in range(versions):
        weights = {name: array + array.dtype.type(version) for name, array in BITS.items()}
        head = publisher.publish(weights, version=version, lineage=0, batch=version, parent=head)
    return store


def headrace(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["deltas", *words])
    return int(stopped.value.code or 0)


def test_list_names_every_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published(tmp_path)
    assert headrace("list", str(tmp_path), "--format", "json") == 0
    versions = json.loads(capsys.readouterr().out)
    assert [v["version"] for v in versions] == [0, 1, 2]
    assert [v["kind"] for v in versions] == ["full", "delta", "delta"]
    assert headrace("list", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[-1].split()[:4] == ["2", "0", "2", "delta"]


def test_show_tells_what_changed_in_each_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published(tmp_path)
    assert headrace("show", str(tmp_path), "1", "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {t["tensor"]: t["share"] for t in shown["tensors"]} == {"w": 1.0, "b": 1.0}
    assert shown["objects"]["delta"][0]["key"].startswith("runs/first/main/delta/1/")
    assert headrace("show", str(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "manifest/000000000002.json" in text
    assert "100.000%" in text


def test_verify_ends_with_1_and_names_a_damaged_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = published(tmp_path)
    assert headrace("verify", str(tmp_path)) == 0
    assert "3 versions, 0 with a problem" in capsys.readouterr().out
    (info,) = store.list("runs/first/main/delta/2/")
    store.put(info.key, store.get(info.key)[:-1])
    assert headrace("verify", str(tmp_path), "--format", "json") == 1
    checked = json.loads(capsys.readouterr().out)
    assert [bool(one["problem"]) for one in checked] == [False, False, True]
    assert info.key in checked[2]["problem"]


def test_unclear_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("list", str(tmp_path / "none")) == 78
    assert not (tmp_path / "none").exists()
    (tmp_path / "store").mkdir()
    assert headrace("list", str(tmp_path / "store")) == 78
    published(tmp_path / "store")
    published(tmp_path / "store", policy="judge")
    capsys.readouterr()
    assert headrace("list", str(tmp_path / "store")) == 78
    assert "--run first --policy judge, --run first --policy main" in capsys.readouterr().err
    assert headrace("list", str(tmp_path / "store"), "--policy", "judge") == 0


def test_a_run_folder_names_its_own_store_and_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (model / name).write_text("{}")
    run = tmp_path / "runs" / "first"
    published(run / "store")
    config = {
        "run": {"id": "first", "folder": str(tmp_path / "runs")},
        "policies": {"main": {"model": str(model)}},
        "streams": {"s": {"dataset": "train.jsonl", "reward": "exact_match"}},
    }
    (run / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    assert headrace("export", str(run), str(out)) == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert "version 2 of first/main" in capsys.readouterr().out
    assert headrace("export", str(run), str(out)) == 78
    assert "not an empty folder" in capsys.readouterr().err


def test_an_exported_checkpoint_holds_the_published_bits(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    published(tmp_path / "store")
    assert headrace("export", str(tmp_path / "store"), str(tmp_path / "out"), "--version", "1") == 0
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.metadata()["version"] == "1"
        assert np.array_equal(file.get_tensor("b"), BITS["b"] + np.float32(1))
        assert file.get_slice("w").get_dtype() == "BF16"
        assert file.get_slice("w").get_shape() == [8, 5]
    torch = pytest.importorskip("torch")
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        bits = file.get_tensor("w").view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bits, BITS["w"] + 1)


@pytest.mark.parametrize("version", [0, 2, -1])
def test_any_version_is_loaded_by_transformers(tmp_path: Path, version: int) -> None:
    """A model with tied embeddings; the version lies in a full, behind a chain of deltas, or at the head."""
    torch = pytest.importorskip("torch")
    from trainer_feed import make_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_model(tmp_path / "model")
    named = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).named_parameters()
    bits = {name: p.detach().view(torch.int16).numpy().view(np.uint16).copy() for name, p in named}
    store = LocalStore(tmp_path / "store")
    publisher = DeltaPublisher(store, "first", "main", Layout.of(bits, dict.fromkeys(bits, "bfloat16")))
    head, truth = None, []
    for number in range(4):
        bits = {name: array ^ np.uint16(number) for name, array in bits.items()}
        truth.append(bits)
        head = publisher.publish(bits, version=number, lineage=0, batch=number, parent=head)
    out = tmp_path / "out"
    words = (str(tmp_path / "store"), str(out), "--version", str(version), "--model", str(model))
    assert headrace("export", *words) == 0
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        assert np.array_equal(parameter.detach().view(torch.int16).numpy().view(np.uint16), truth[version][name]), name
    assert loaded.get_output_embeddings().weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
    assert AutoTokenizer.from_pretrained(out).encode("12") == AutoTokenizer.from_pretrained(model).encode("12")


def test_a_version_that_never_was_is_said_with_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published(tmp_path / "store")
    for words in (("show", "3"), ("show", "--", "-2"), ("export", str(tmp_path / "out"), "--version", "3")):
        assert headrace(words[0], str(tmp_path / "store"), *words[1:]) == 78
        assert "first/main has no version" in (said := capsys.readouterr().err)
        assert "2 is the newest" in said
    assert not (tmp_path / "out").exists()


def test_an_export_that_does_not_fit_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(tmp_path / "store")
    weights = {"w": np.arange(2 << 20, dtype=np.uint32)}
    publisher = DeltaPublisher(store, "first", "main", Layout.of(weights, {"w": "float32"}))
    publisher.publish(weights, version=0, lineage=0, batch=0, parent=None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        assert headrace("export", str(tmp_path / "store"), str(tmp_path / "out")) == 78
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert f"{tmp_path / 'out'} cannot be written: File too large" in capsys.readouterr().err
    assert headrace("export", str(tmp_path / "store"), str(tmp_path / "out")) == 0


def test_adapters_alone_are_no_model_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {SCALING: np.ones(1, np.uint16), "base_model.model.w.lora_A.weight": np.ones((2, 4), np.uint16)}
    publisher = DeltaPublisher(
        LocalStore(tmp_path / "store"), "first", "main", Layout.of(weights, dict.fromkeys(weights, "bfloat16"))
    )
    publisher.publish(weights, version=0, lineage=0, batch=0, parent=None)
    assert headrace("export", str(tmp_path / "store"), str(tmp_path / "out")) == 78
    assert "holds adapters alone: name the run's folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapters_of_a_run_are_exported_added_to_their_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from trainer_feed import make_model
    from transformers import AutoModelForCausalLM

    model = make_model(tmp_path / "model")
    module = "model.layers.0.self_attn.q_proj"
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).get_submodule(module).weight.clone()
    rows, columns = before.shape
    one = np.uint16(0x3F80)  # 1.0 as bfloat16
    weights = {
        SCALING: np.full(1, one), f"base_model.model.{module}.lora_A.weight": np.full((2, columns), one),
        f"base_model.model.{module}.lora_B.weight": np.full((rows, 2), one),
    }  # fmt: skip
    run = tmp_path / "runs" / "first"
    publisher = DeltaPublisher(
        LocalStore(run / "store"), "first", "main", Layout.of(weights, dict.fromkeys(weights, "bfloat16"))
    )
    publisher.publish(weights, version=0, lineage=0, batch=0, parent=None)
    config = {
        "run": {"id": "first", "folder": str(tmp_path / "runs")},
        "policies": {"main": {"model": str(model)}},
        "streams": {"s": {"dataset": "train.jsonl", "reward": "exact_match"}},
    }
    (run / "config.json").write_text(json.dumps(config))
    assert headrace("export", str(run), str(tmp_path / "out")) == 0
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").get_submodule(module).weight
    assert torch.equal(after, (before.float() + 2).bfloat16())
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").is_file()


def test_a_spared_version_is_listed_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = published(tmp_path, versions=14, full_every=4)
    prune(store, "first", "main", single=[5], grace_seconds=0, orphan_seconds=0)
    assert headrace("list", str(tmp_path), "--format", "json") == 0
    assert [v["version"] for v in json.loads(capsys.readouterr().out) if not v["pruned"]] == [4, 5, *range(8, 14)]
    assert headrace("list", str(tmp_path)) == 0
    kinds = [line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert kinds[:9] == ["pruned"] * 4 + ["delta+full", "delta"] + ["pruned"] * 2 + ["delta+full"]
    assert headrace("verify", str(tmp_path), "--format", "json") == 0
    checked = {one["version"]: one["ways"] for one in json.loads(capsys.readouterr().out)}
    assert (checked[4], checked[5]) == (["full"], ["delta"])
    (info,) = store.list("runs/first/main/full/4/")
    store.delete(info.key)
    assert headrace("verify", str(tmp_path)) == 1


def test_merge_and_prune_say_what_they_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published(tmp_path, versions=6)
    assert headrace("merge", str(tmp_path)) == 0
    assert capsys.readouterr().out == "1 merged: 0 to 4\n"
    assert headrace("merge", str(tmp_path)) == 0
    assert "nothing was due" in capsys.readouterr().out
    assert headrace("verify", str(tmp_path)) == 0
    assert "delta+merged" in capsys.readouterr().out
    assert headrace("prune", str(tmp_path), "--grace", "0", "--format", "json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["floor"], done["objects"]) == (0, 0)


def test_prune_keeps_what_is_held_and_only_talks_when_dry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published(tmp_path, versions=9, full_every=2)
    assert headrace("prune", str(tmp_path), "--grace", "0", "--held", "3", "--dry-run") == 0
    assert "would go" in (said := capsys.readouterr().out)
    assert said.endswith("kept from version 2 on\n")
    assert headrace("prune", str(tmp_path), "--grace", "0") == 0
    assert capsys.readouterr().out.endswith("kept from version 6 on\n")
    assert headrace("verify", str(tmp_path)) == 0
    capsys.readouterr()
    assert headrace("list", str(tmp_path), "--format", "json") == 0
    assert [v["pruned"] for v in json.loads(capsys.readouterr().out)] == [True] * 6 + [False] * 3


def test_sparsity_by_role_and_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published(tmp_path)
    assert headrace("sparsity", str(tmp_path), "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0] == {"version": 1, "roles": {"w": 1.0, "b": 1.0}, "tensors": {"w": 1.0, "b": 1.0}}
    assert headrace("sparsity", str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["version", "all", "b", "w"]
