"""What every engine promises, the same for all: scripted, transformers (keys kept and recomputed) and vLLM on CPU."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.engine_truth import Bits, drain, folder_bits, mislabelled, requests, soak, telling_bits
from lent_engine import worker_around
from rollout_rig import Rig
from runtime_servers import LocalBroker
from transformers import AutoModelForCausalLM

from headrace.connectors.engines.engine import Engine, Generation, PromptTooLong, Request, WeightsRefused, generate
from headrace.connectors.engines.scripted import ScriptedEngine
from headrace.connectors.engines.transformers import TransformersEngine
from headrace.schemas.parts import Sampling

STOP, CONTEXT, SLOTS = 2, 128, 16
PROMPT = np.array([5, 6, 7], np.int32)
pytestmark = pytest.mark.timeout(900)


@dataclass
class Subject:
    """An engine under test; ``real``: it computes with the model, and with the weights that it was given."""

    kind: str
    engine: Engine
    folder: Path
    version: int = -1

    @property
    def real(self) -> bool:
        return self.kind != "scripted"

    def load(self, bits: Bits | None = None) -> int:
        """Put weights (the folder's) in force under the next version."""
        self.version += 1
        self.engine.load_weights(folder_bits(self.folder) if bits is None else bits, self.version)
        return self.version


def _vllm(folder: Path, **options: Any) -> Engine:
    pytest.importorskip("vllm", reason="needs vLLM (extra rollout-cpu)")
    from headrace.connectors.engines.vllm import VllmEngine

    given = {"dtype": "float32", "kv_cache_bytes": 64 << 20, "verify": "always", **options}
    return VllmEngine(folder, slots=SLOTS, max_prompt_tokens=64, options=given)


MAKERS: dict[str, Callable[[Path], Engine]] = {
    "scripted": lambda folder: ScriptedEngine(
        slots=SLOTS, max_prompt_tokens=64, options={"mean_length": 45, "sigma": 0.8, "context": CONTEXT}
    ),
    "transformers": lambda folder: TransformersEngine(folder, slots=SLOTS, max_prompt_tokens=64),
    "recomputing": lambda folder: TransformersEngine(
        folder, slots=SLOTS, max_prompt_tokens=64, options={"recompute": True, "prefill_tokens": 40}
    ),
    "vllm": _vllm,
}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a generation_config that would spoil everything if it were applied."""
    made = tmp_path_factory.mktemp("trapped") / "m"
    shutil.copytree(tiny_model, made)
    trap = {"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 5.0, "max_length": 9}
    (made / "generation_config.json").write_text(json.dumps({**trap, "eos_token_id": STOP}))
    return made


@pytest.fixture(scope="module", params=MAKERS)
def module_subject(request: pytest.FixtureRequest, folder: Path) -> Iterator[Subject]:
    engine = MAKERS[request.param](folder)
    yield Subject(request.param, engine, folder)
    engine.close()


@pytest.fixture
def subject(module_subject: Subject) -> Subject:
    """The engine, empty, with the folder's weights in force."""
    module_subject.engine.abort_all()
    module_subject.load()
    return module_subject


def forward(folder: Path, bits: Bits, prompt: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
    """Logits before each of ``tokens``, by one forward of transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(bits[name].view(np.int16)).view(torch.bfloat16))
        ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
        return model(ids).logits[0, prompt.size - 1 : -1]


def of_tokens(logp: torch.Tensor, tokens: np.ndarray) -> np.ndarray:
    return logp.gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None])[:, 0].numpy()


# ---- generate -----------------------------------------------------------------------------------------------------


def test_a_completion_has_as_many_tokens_as_asked_for_unless_it_stops(subject: Subject) -> None:
    asked = requests(40, seed=5)
    ends = set()
    for request, done in zip(asked, generate(subject.engine, asked), strict=True):
        ends.add(done.end_reason)
        assert done.key == request.key
        assert done.tokens.dtype == np.int32
        assert done.logprobs.dtype == np.float32
        assert done.tokens.size == done.logprobs.size == done.versions.size >= 1
        assert set(done.versions.tolist()) == {subject.version}
        assert STOP not in done.tokens[:-1]
        assert (done.tokens[-1] == STOP) == (done.end_reason == "stop")
        assert done.end_reason == "stop" or done.tokens.size == request.sampling.max_new_tokens
        assert done.known
    assert ends == {"stop", "length"}
    assert subject.engine.active == 0


def test_equal_seeds_sample_equal_tokens_in_any_company(subject: Subject) -> None:
    asked = requests(12, seed=6)
    together = generate(subject.engine, asked)
    for request, one in zip(asked, together, strict=True):
        assert generate(subject.engine, [request])[0].tokens.tolist() == one.tokens.tolist()
    others = [replace(request, sampling=replace(request.sampling, seed=77 + request.key)) for request in asked]
    assert [g.tokens.tolist() for g in generate(subject.engine, others)] != [g.tokens.tolist() for g in together]


def test_more_requests_than_slots_wait_inside(subject: Subject) -> None:
    assert subject.engine.capacity == SLOTS
    asked = [Request(key, PROMPT, Sampling(max_new_tokens=3, seed=key)) for key in range(3 * SLOTS)]
    for request in asked:
        subject.engine.add(request)
    assert subject.engine.active == 3 * SLOTS
    assert sorted(drain(subject.engine)) == list(range(3 * SLOTS))


def test_prompts_too_long_or_empty_are_refused_and_nothing_is_taken(subject: Subject) -> None:
    with pytest.raises(PromptTooLong, match=r"65 tokens, at most 64.*rollout\.max_prompt_tokens"):
        subject.engine.add(Request(0, np.full(65, 5, np.int32), Sampling()))
    with pytest.raises(ValueError, match="no token"):
        subject.engine.add(Request(0, np.empty(0, np.int32), Sampling()))
    with pytest.raises(PromptTooLong):  # what was made before counts towards the context, not towards the prompt
        subject.engine.add(Request(0, np.full(CONTEXT, 5, np.int32), Sampling(max_new_tokens=500), made=CONTEXT - 3))
    assert subject.engine.active == 0
    subject.engine.add(Request(0, np.full(100, 5, np.int32), Sampling(max_new_tokens=95, seed=1), made=90))
    assert drain(subject.engine)[0].tokens.size <= 5


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_k": 10**12}, "top_k is 1000000000000"),
        ({"top_k": -1}, "top_k is -1"),
        ({"prompt": [5, -3]}, "token id -3"),
        ({"prompt": [5, 2**31 - 1]}, "token id 2147483647"),
    ],
)
def test_what_a_step_would_fail_at_is_refused_when_it_comes(subject: Subject, over: dict[str, Any], says: str) -> None:
    if subject.kind == "scripted" and "2147483647" in says:
        pytest.skip("the scripted engine has no vocabulary: it looks at no id of a prompt")
    given = {**over}
    prompt = np.array(given.pop("prompt", PROMPT), np.int32)
    request = Request(1, prompt, Sampling(max_new_tokens=3, seed=1, **given))
    with pytest.raises(ValueError, match=says):
        subject.engine.add(request)
    assert subject.engine.active == 0
    assert generate(subject.engine, [Request(2, PROMPT, Sampling(max_new_tokens=3, seed=1))])[0].tokens.size


def test_a_full_context_ends_a_completion_by_that_name(subject: Subject) -> None:
    asked = [Request(key, np.full(60, 5, np.int32), Sampling(max_new_tokens=500, seed=key)) for key in range(16)]
    if subject.real:  # the stop token is made unlikely
        bits = folder_bits(subject.folder)
        bits["model.embed_tokens.weight"][STOP] = 0
        subject.load(bits)
    ends = [done.end_reason for done in generate(subject.engine, asked)]
    for request, done in zip(asked, generate(subject.engine, asked), strict=True):
        if done.end_reason == "context_full":
            assert request.prompt.size + done.tokens.size == CONTEXT
        else:
            assert done.end_reason == "stop"
    assert "context_full" in ends


# ---- abort and resume ---------------------------------------------------------------------------------------------


def test_an_abort_gives_what_was_sampled_and_frees_the_place(subject: Subject) -> None:
    asked = [Request(key, PROMPT, Sampling(max_new_tokens=100, seed=40 + key)) for key in range(6)]
    whole = generate(subject.engine, asked)
    for request in asked:
        subject.engine.add(request)
    ended: dict[int, Generation] = {}
    for _ in range(4):
        ended.update({one.key: one for one in subject.engine.step()})
    for key in range(0, 6, 2):
        if key not in ended:
            partial = subject.engine.abort(key)
            assert partial is not None
            ended[key] = partial
        assert subject.engine.abort(key) is None
    ended.update(drain(subject.engine))
    for key, done in enumerate(whole):
        assert ended[key].tokens.tolist() == done.tokens.tolist()[: ended[key].tokens.size]
        np.testing.assert_allclose(ended[key].logprobs, done.logprobs[: ended[key].tokens.size], atol=1e-4)
        assert ended[key].end_reason in (done.end_reason, "abort")
    assert {ended[key].end_reason for key in (1, 3, 5)} <= {"stop", "length"}, "the others went on undisturbed"
    assert subject.engine.abort(99) is None


def test_all_are_dropped_at_once_those_that_wait_too(subject: Subject) -> None:
    for key in range(2 * SLOTS):
        subject.engine.add(Request(key, PROMPT, Sampling(max_new_tokens=100, seed=key)))
    ended = {one.key for one in subject.engine.step()}
    left = subject.engine.abort_all()
    assert sorted(ended | {one.key for one in left}) == list(range(2 * SLOTS))
    assert all(one.end_reason in ("abort", "stop") for one in left)
    assert subject.engine.active == 0
    assert subject.engine.abort_all() == []
    assert len(generate(subject.engine, requests(3))) == 3


def test_a_broken_off_completion_goes_on_from_its_prefix(subject: Subject) -> None:
    """The rest follows the prefix as if nothing had happened; no random number is used twice."""
    bits = folder_bits(subject.folder)
    sampling = Sampling(max_new_tokens=40)
    wholes = generate(subject.engine, [Request(k, PROMPT, replace(sampling, seed=k)) for k in range(30)])
    whole = next(w for w in wholes if w.tokens.size >= 20)
    for made in (1, 7, 19):
        prompt = np.concatenate([PROMPT, whole.tokens[:made]]).astype(np.int32)
        request = Request(0, prompt, replace(sampling, seed=whole.key), made=made)
        rest = generate(subject.engine, [request])[0]
        assert rest.tokens.size <= 40 - made
        assert rest.end_reason == "stop" or rest.tokens.size == 40 - made
        if subject.kind != "vllm":  # whose random numbers cannot be taken up in the middle
            assert rest.tokens.tolist() == whole.tokens[made:].tolist()
        if subject.real:
            logp = forward(subject.folder, bits, prompt, rest.tokens).log_softmax(-1)
            np.testing.assert_allclose(rest.logprobs, of_tokens(logp, rest.tokens), atol=1e-4)
    resumed = [Request(k, np.append(PROMPT, 9).astype(np.int32), replace(sampling, seed=k), made=1) for k in range(64)]
    fresh = [Request(k, np.append(PROMPT, 9).astype(np.int32), replace(sampling, seed=k)) for k in range(64)]
    firsts = [[int(g.tokens[0]) for g in generate(subject.engine, some)] for some in (resumed, fresh)]
    assert sum(a == b for a, b in zip(*firsts, strict=True)) < 48, "the first token's random number chose the second"


# ---- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_every_token_is_labelled_with_the_weights_that_sampled_it(subject: Subject, seed: int) -> None:
    """Requests, aborts and updates at random; the weights tell by each log-prob which of them sampled the token."""
    first, bits = subject.version + 1, folder_bits(subject.folder)
    loaded = []

    def load(version: int) -> None:
        subject.version = version
        subject.engine.load_weights(telling_bits(bits, version), version)
        loaded.append(version)

    load(first)
    asked, done = soak(subject.engine, load, 25, first=first + 1, seed=seed)
    labels = {version for made in done.values() for version in made.versions.tolist()}
    assert labels <= set(loaded)
    assert len(labels) > 5
    assert any(len(set(made.versions.tolist())) > 1 for made in done.values()), "none was overtaken by an update"
    for made in done.values():
        assert (np.diff(made.versions) >= 0).all()
    if subject.real:
        assert mislabelled(bits, asked, done) == []
    assert subject.engine.active == 0


def test_a_whole_worker_around_it_takes_tasks_and_weights_and_gives_true_versions(
    subject: Subject, tmp_path: Path
) -> None:
    """Tasks and weights as a run sends them, over a broker and a store; updates overtake what is being sampled."""
    if subject.kind != "vllm":
        pytest.skip("tests/contract/test_rollout_worker.py has the worker with the others")
    server, bits = LocalBroker(tmp_path / "broker"), folder_bits(subject.folder)
    server.start()
    try:
        rig = Rig(server.bootstrap, tmp_path / "run", subject.folder, 1, engine="lent_engine:lent", max_new_tokens=60)
        rig.write("run", rig.manifest, 0, key=b"manifest")
        rig.publish_bits(0, telling_bits(bits, 0))
        with worker_around(subject.engine, rig):
            demand, groups = rig.demand(), itertools.count()
            overtaken = False
            for version in range(1, 30):
                mine = [next(groups) for _ in range(8)]
                for group in mine:
                    rig.to_worker(rig.task(demand, group, sampling=Sampling(max_new_tokens=60)))
                rig.publish_bits(version, telling_bits(bits, version))
                rig.demand(lambda d, version=version: d.policies[0].version == version and not d.held)  # type: ignore[misc]
                made = [rig.trajectory(group).sequences[0] for group in mine]
                overtaken = overtaken or any(one.oldest_version < one.newest_version for one in made)
                if overtaken and version > 3:
                    break
            late = next(groups)
            rig.to_worker(rig.task(demand, late, min_version=version + 5))
            rig.publish_bits(version + 5, telling_bits(bits, version + 5))
            last = rig.trajectory(late).sequences[0]
        assert overtaken, "no completion was overtaken by an update"
        assert set(last.versions[last.prompt_length :].tolist()) == {version + 5}, "sampled by nothing older"
        found = [t.sequences[0] for t in rig.decoded("trajectories")]
        assert {t.status for t in rig.decoded("trajectories")} == {"train"}
        asked = [Request(key, s.tokens[: s.prompt_length], s.sampling) for key, s in enumerate(found)]
        done = {
            key: Generation(key, "stop", s.tokens[n:], s.logprobs[n:], s.versions[n:])
            for key, s in enumerate(found)
            for n in (s.prompt_length,)
        }
        assert mislabelled(bits, asked, done) == []
        rig.reader.close()
    finally:
        server.kill()


def test_equal_prompts_after_an_update_find_nothing_of_the_version_before(subject: Subject) -> None:
    """Prefix caches: a prompt that was computed under the old weights is computed again."""
    prompt = np.array([5, 6, 7, 8] * 16, np.int32)
    sampling = Sampling(max_new_tokens=8, temperature=0)
    for number in range(3):
        if not subject.real:
            continue
        bits = folder_bits(subject.folder, 1.0 + 0.1 * number)
        running = [Request(100 + k, prompt, Sampling(max_new_tokens=60, seed=k)) for k in range(3)]
        for request in running:
            subject.engine.add(request)
        subject.engine.step()
        subject.load(bits)
        late = [Request(key, prompt, sampling) for key in range(2)]
        for request in late:
            subject.engine.add(request)
        done = drain(subject.engine)
        for request in late:
            logp = forward(subject.folder, bits, prompt, done[request.key].tokens).log_softmax(-1)
            np.testing.assert_allclose(done[request.key].logprobs, of_tokens(logp, done[request.key].tokens), atol=1e-4)


def test_recomputed_keys_are_those_of_the_new_weights(subject: Subject) -> None:
    if subject.kind not in ("transformers", "recomputing"):
        pytest.skip("an engine keeps or recomputes by its options")
    new = folder_bits(subject.folder, 1.3)
    asked = [Request(k, np.arange(4, 10 + k, dtype=np.int32), Sampling(max_new_tokens=30, seed=k)) for k in range(12)]
    for request in asked:
        subject.engine.add(request)
    early = {one.key for _ in range(5) for one in subject.engine.step()}
    version = subject.load(new)
    worst = []
    for key, made in drain(subject.engine).items():
        if key in early:
            continue
        mine = made.versions == version
        logp = of_tokens(forward(subject.folder, new, asked[key].prompt, made.tokens).log_softmax(-1), made.tokens)
        worst.append(np.abs(logp - made.logprobs)[mine].max(initial=0))
    assert len(worst) > 3
    assert (max(worst) < 1e-4) == (subject.kind == "recomputing"), "kept keys are those of the old weights"


def test_weights_that_do_not_fit_are_refused_and_the_others_stay(subject: Subject) -> None:
    if not subject.real:
        pytest.skip("the scripted engine looks at no weights")
    bits = folder_bits(subject.folder)
    name = "model.layers.0.mlp.up_proj.weight"
    before = subject.engine.version
    refused = {
        "up_proj": {k: v for k, v in bits.items() if k != name},
        "shapes": {**bits, name: bits[name][:3]},
        "unknown": {**bits, "model.layers.9.mlp.up_proj.weight": bits[name]},
    }
    for says, wrong in refused.items():
        with pytest.raises(WeightsRefused, match=says):
            subject.engine.load_weights(wrong, before + 1)
    assert subject.engine.version == before
    (done,) = generate(subject.engine, [Request(0, PROMPT, Sampling(max_new_tokens=20, seed=3))])
    logp = forward(subject.folder, bits, PROMPT, done.tokens).log_softmax(-1)
    np.testing.assert_allclose(done.logprobs, of_tokens(logp, done.tokens), atol=1e-4)


def test_nothing_is_sampled_while_it_is_paused(subject: Subject) -> None:
    for key in range(4):
        subject.engine.add(Request(key, PROMPT, Sampling(max_new_tokens=60, seed=key)))
    ended = {one.key: one for one in subject.engine.step()}
    subject.engine.pause()
    subject.engine.pause()
    ended.update({one.key: one for one in subject.engine.step()})  # what had ended before
    subject.engine.add(Request(9, PROMPT, Sampling(max_new_tokens=5, seed=1)))
    version = subject.load()
    for _ in range(20):
        assert subject.engine.step() == []
    assert subject.engine.active == 5 - len(ended)
    subject.engine.resume()
    done = drain(subject.engine)
    assert set(done[9].versions.tolist()) == {version}
    for one in (*ended.values(), *done.values()):
        labels = one.versions.tolist()
        assert labels == sorted(labels)
        assert set(labels) <= {version - 1, version}


# ---- honest log-probs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_log_probs_are_those_of_the_sampled_distribution(subject: Subject, temperature: float) -> None:
    if not subject.real:
        pytest.skip("no model")
    bits = folder_bits(subject.folder)
    asked = requests(20, seed=8, temperature=temperature)
    for request, done in zip(asked, generate(subject.engine, asked), strict=True):
        logp = (forward(subject.folder, bits, request.prompt, done.tokens) / temperature).log_softmax(-1)
        np.testing.assert_allclose(done.logprobs, of_tokens(logp, done.tokens), atol=1e-4)


@pytest.mark.parametrize("how", [{"top_k": 3}, {"top_p": 0.6}, {"temperature": 0.0}], ids=["top_k", "top_p", "greedy"])
def test_restricted_sampling_gives_the_restricted_distribution(subject: Subject, how: dict[str, Any]) -> None:
    if not subject.real:
        pytest.skip("no model")
    bits = folder_bits(subject.folder)
    asked = [Request(k, PROMPT, Sampling(max_new_tokens=12, seed=k, **how)) for k in range(10)]
    for done in generate(subject.engine, asked):
        logits = forward(subject.folder, bits, PROMPT, done.tokens)
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        if "top_k" in how:
            keep[:, 3:] = False
        elif "top_p" in how:
            keep = ordered.cumsum(-1) - ordered < 0.6
        if "temperature" in how:
            assert done.tokens.tolist() == logits.argmax(-1).tolist()
            wanted = logits.log_softmax(-1)
        else:
            allowed = torch.zeros_like(keep).scatter(1, order, keep)
            wanted = logits.masked_fill(~allowed, float("-inf")).log_softmax(-1)
        np.testing.assert_allclose(done.logprobs, of_tokens(wanted, done.tokens), atol=1e-4)


def test_samples_follow_the_policy_and_no_setting_of_its_folder(subject: Subject) -> None:
    if not subject.real:
        pytest.skip("no model")
    n = 3000
    asked = [Request(key, PROMPT, Sampling(max_new_tokens=1, seed=key)) for key in range(n)]
    counts = np.bincount([int(d.tokens[0]) for d in generate(subject.engine, asked)], minlength=41) / n
    logits = forward(subject.folder, folder_bits(subject.folder), PROMPT, np.array([0]))[0]
    # total variation of 3,000 draws over 41 tokens is about .05 when the distributions are equal
    assert 0.5 * np.abs(counts - logits.softmax(-1).numpy()).sum() < 0.1


def test_what_an_engine_cannot_apply_is_refused_by_name(subject: Subject) -> None:
    extra = json.dumps({"beam_width": 4})
    with pytest.raises(ValueError, match=r"cannot apply .*beam_width"):
        subject.engine.add(Request(0, PROMPT, Sampling(extra=extra)))
    assert subject.engine.active == 0
