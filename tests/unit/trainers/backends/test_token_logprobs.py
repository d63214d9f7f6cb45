"""Log-probs in slices of the vocabulary are those of the whole logits, with the same gradients and less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.trainers.backends.token_logprobs import HeadShape, token_logprobs

TOKENS, WORDS, HIDDEN = 37, 1000, 24


def naive(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Whole logits, log-softmax, gather."""
    z = torch.nn.functional.linear(hidden, weight, bias).float() * scale
    z = cap * torch.tanh(z / cap) if cap else z
    every = (z / temperature[:, None]).log_softmax(-1)
    entropy = -torch.where(every == float("-inf"), 0.0, every.exp() * every).sum(-1)
    return every.gather(1, targets[:, None])[:, 0], entropy


def problem(seed: int = 0, tokens: int = TOKENS, words: int = WORDS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(tokens, HIDDEN, generator=generator).requires_grad_(),
        "weight": torch.randn(words, HIDDEN, generator=generator).requires_grad_(),
        "targets": torch.randint(0, words, (tokens,), generator=generator),
        "temperature": 0.5 + torch.rand(tokens, generator=generator),
    }


def shape(keep: int = 0, slices: int = 4, cap: float = 0.0) -> HeadShape:
    """A shape that cuts the vocabulary of ``problem`` into slices of 256 words."""
    return HeadShape(softcap=cap, keep_bytes=keep, slice_bytes=4 * TOKENS * (WORDS // slices + 6))


@pytest.mark.parametrize("cap", [0.0, 5.0], ids=["plain", "capped"])
@pytest.mark.parametrize("keep", [0, 2 * 256 * 4 * TOKENS, 1 << 30], ids=["none kept", "some kept", "all kept"])
@pytest.mark.parametrize("both", [False, True], ids=["log-prob", "log-prob and entropy"])
def test_values_and_gradients_are_those_of_whole_logits(cap: float, keep: int, both: bool) -> None:
    given = problem()
    bias = torch.randn(WORDS, generator=torch.Generator().manual_seed(1)).requires_grad_()
    factors = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(2))
    found = token_logprobs(**given, bias=bias, scale=0.7, shape=shape(keep, cap=cap))
    wanted = naive(**given, bias=bias, scale=0.7, cap=cap)
    leaves = (given["hidden"], given["weight"], bias)
    gradients = []
    for logprobs, entropy in (found, wanted):
        loss = (logprobs * factors[0]).sum() + (entropy * factors[1]).sum() * both
        gradients.append(torch.autograd.grad(loss, leaves))
    for mine, other in zip(found, wanted, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-5)
    for mine, other in zip(*gradients, strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=3e-5)


def test_entropy_alone_can_be_trained() -> None:
    given = problem()
    mine, other = (
        torch.autograd.grad(f[1].sum(), (given["hidden"], given["weight"]))
        for f in (token_logprobs(**given, shape=shape()), naive(**given))
    )
    for a, b in zip(mine, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=2e-5)


def test_a_tied_embedding_gets_both_gradients() -> None:
    words = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
    given = problem()
    gradients = []
    for way in (lambda **k: token_logprobs(**k, shape=shape()), naive):
        hidden = torch.tanh(words[given["targets"].flip(0)])
        chosen, _ = way(**{**given, "hidden": hidden, "weight": words})
        gradients.append(torch.autograd.grad(chosen.sum(), words)[0])
    assert torch.allclose(*gradients, rtol=1e-4, atol=2e-5)


def test_a_frozen_head_passes_on_the_gradient_of_hidden_states() -> None:
    given = problem()
    given["weight"] = given["weight"].detach()
    mine, other = (
        torch.autograd.grad(f[0].sum(), given["hidden"])[0]
        for f in (token_logprobs(**given, shape=shape()), naive(**given))
    )
    assert torch.allclose(mine, other, rtol=1e-4, atol=2e-5)


def test_half_precision_stays_as_near_as_whole_logits() -> None:
    given = problem()
    exact, _ = naive(**given)
    halves = {**given, **{name: given[name].detach().bfloat16().requires_grad_() for name in ("hidden", "weight")}}
    mine, other = token_logprobs(**halves, shape=shape())[0], naive(**halves)[0]
    assert mine.dtype == torch.float32
    assert (mine - exact).abs().mean() <= 1.1 * (other - exact).abs().mean()
    wanted = torch.autograd.grad(exact.sum(), given["hidden"])[0]
    (found,) = torch.autograd.grad(mine.sum(), halves["hidden"])
    assert found.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(found.float().flatten(), wanted.flatten(), 0) > 0.999


def test_words_that_cannot_be_are_left_out() -> None:
    """A bias of -inf bars a word; log-probs of the others, entropies and gradients stay finite."""
    given = problem()
    bias = torch.zeros(WORDS)
    bias[:300] = float("-inf")  # a whole first slice
    given["targets"] = given["targets"].clamp(min=300)
    found, wanted = token_logprobs(**given, bias=bias, shape=shape()), naive(**given, bias=bias)
    for mine, other in zip(found, wanted, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(found[0].sum() + found[1].sum(), (given["hidden"], given["weight"]))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)


def test_huge_logits_do_not_overflow() -> None:
    given = problem()
    found = token_logprobs(**{**given, "hidden": given["hidden"] * 1e4}, shape=shape())
    wanted = naive(**{**given, "hidden": given["hidden"] * 1e4})
    assert torch.isfinite(found[0]).all()
    assert torch.allclose(found[0], wanted[0], rtol=1e-5)
    assert torch.allclose(found[1], wanted[1], atol=1e-5)


def test_no_token_is_fine_and_reaches_backward() -> None:
    given = problem(tokens=0)
    found, entropy = token_logprobs(**given, shape=shape())
    assert found.shape == entropy.shape == (0,)
    gradients = torch.autograd.grad(found.sum(), (given["hidden"], given["weight"]))
    assert gradients[0].shape == (0, HIDDEN)
    assert not gradients[1].any()


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_the_full_logits_are_never_made() -> None:
    words = 8 * WORDS
    given = problem(words=words)
    with Largest() as seen:
        found, _ = token_logprobs(**given, shape=shape())
        found.sum().backward()  # type: ignore[no-untyped-call]
    assert seen.elements == words * HIDDEN, "the gradient of the weight is the largest"
    with Largest() as seen:
        naive(**given)
    assert seen.elements == words * TOKENS, "and this is how the full logits would show"


def test_no_more_is_kept_than_allowed_and_nothing_without_gradient() -> None:
    given = problem()
    each = 256 * 4 * TOKENS
    found, _ = token_logprobs(**given, shape=shape(keep=2 * each))
    kept = [z for z, _ in found.grad_fn.kept]  # type: ignore[union-attr]
    assert sum(z.nbytes for z in kept) <= 2 * each
    assert len(kept) == 2
    found.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    first = given["weight"].grad.clone()
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(given["weight"].grad, 2 * first, rtol=1e-5, atol=1e-5), "what was let go is made again"
    with torch.no_grad():
        assert token_logprobs(**given, shape=shape(keep=1 << 30))[0].grad_fn is None


def test_second_derivatives_are_refused() -> None:
    given = problem()
    squares = token_logprobs(**given, shape=shape())[0].square().sum()
    (first,) = torch.autograd.grad(squares, given["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()  # type: ignore[no-untyped-call]
