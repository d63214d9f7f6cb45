"""The environment ``shop``: find and buy what is asked for on pages, by ``search[words]`` and ``click[text]``.

Goes in: a seed and one command a turn; comes out: pages, and after ``click[buy]`` a reward from 0 to 1: the share of
what was asked for (kind, colour, material, size, price) that the thing bought has. Shop and wish follow from the seed;
something that fits is always there.
"""

import random
import re
from dataclasses import dataclass

from pydantic import Field

from headrace.pipeline.environments.actions import command_of
from headrace.pipeline.environments.environment import EnvironmentOptions, Observation
from headrace.pipeline.environments.ranking import Document, Index
from headrace.schemas.records import Prompt

__all__ = ("Product", "Shop", "ShopOptions", "make_shop")

_KINDS = ("shirt", "jacket", "scarf", "bag", "hat", "blanket")
_COLOURS = ("red", "blue", "green", "black", "white", "yellow")
_MATERIALS = ("cotton", "wool", "linen", "leather", "nylon")
_SIZES = ("small", "medium", "large")
_COMMAND = re.compile(r"(search|click)\[")


class ShopOptions(EnvironmentOptions):
    """Options of ``shop``."""

    products: int = Field(60, ge=1, le=500)
    """Things on sale."""
    page: int = Field(5, ge=1)
    """Things on a page of results."""


@dataclass(frozen=True, slots=True)
class Product:
    """A thing on sale; its size is chosen on its page."""

    code: str
    kind: str
    colour: str
    material: str
    price: int

    @property
    def title(self) -> str:
        """What a list of results says of it."""
        return f"{self.colour} {self.material} {self.kind}"


@dataclass(frozen=True, slots=True)
class _Wish:
    product: Product
    size: str
    most: int


def make_shop(seed: int, options: ShopOptions) -> tuple[list[Product], _Wish]:
    """The products of a seed and the wish, which one of them fulfils."""
    source = random.Random(seed)
    products = [
        Product(f"B{number:03d}", source.choice(_KINDS), source.choice(_COLOURS), source.choice(_MATERIALS),
                source.randint(5, 99))
        for number in range(options.products)
    ]  # fmt: skip
    wanted = source.choice(products)
    return products, _Wish(wanted, source.choice(_SIZES), wanted.price + source.randint(0, 10))


class Shop:
    """See the module."""

    Options = ShopOptions
    isolation = "inline"

    def __init__(self, options: ShopOptions | None = None) -> None:
        self._options = options or ShopOptions()
        self._products: dict[str, Product] = {}
        self._wish: _Wish | None = None
        self._index = Index([])
        self._found: list[Product] = []
        self._at = 0
        self._open: Product | None = None
        self._size = ""

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        """The wish, and the first page."""
        products, self._wish = make_shop(seed, self._options)
        self._products = {p.code: p for p in products}
        self._index = Index([Document(p.code, p.title) for p in products])
        self._found, self._at, self._open, self._size = [], 0, None, ""
        wish = self._wish
        asked = (
            f"Buy a {wish.product.title}, size {wish.size}, for at most {wish.most}. "
            "Act by search[words] or click[text]; what can be clicked stands in brackets."
        )
        return Observation(f"{prompt.prompt}\n{asked}" if prompt.prompt else asked)

    def step(self, action: str) -> Observation:
        """Search or click. Raises ValueError after the end."""
        if self._wish is None:
            raise ValueError("the episode has ended: call reset first")
        said = command_of(action)
        found = _COMMAND.search(said, 0, max(0, said.rfind("]")))
        if found is None:
            return Observation("Write search[words] or click[text].", details={"verdict": "no command"})
        verb, what = found[1], said[found.end() : said.rfind("]")].strip()
        if verb == "search":
            self._found = [self._products[d.title] for d in self._index.search(what, len(self._products))]
            self._at, self._open = 0, None
            return Observation(self._page())
        return self._click(what)

    def close(self) -> None:
        """End the episode."""
        self._wish = None

    def _click(self, what: str) -> Observation:
        if self._open is not None:
            if what == "buy":
                return self._bought(self._open)
            if what in _SIZES:
                self._size = what
                return Observation(self._product(self._open))
        page = self._found[self._at : self._at + self._options.page]
        if what == "back":
            self._open = None
        elif what == "next" and self._open is None and self._at + self._options.page < len(self._found):
            self._at += self._options.page
        elif self._open is None and what in {p.code for p in page}:
            self._open, self._size = self._products[what], ""
            return Observation(self._product(self._open))
        else:
            return Observation(f"{what[:40]!r} cannot be clicked here.", details={"verdict": "no such button"})
        return Observation(self._page())

    def _bought(self, product: Product) -> Observation:
        assert self._wish is not None
        wish, wanted = self._wish, self._wish.product
        right = [
            product.kind == wanted.kind, product.colour == wanted.colour, product.material == wanted.material,
            self._size == wish.size, product.price <= wish.most,
        ]  # fmt: skip
        self._wish = None
        # another kind of thing is not what was asked for, however well the rest fits
        value = sum(right) / len(right) if right[0] else 0.0
        said = f"bought {product.title}, size {self._size or 'none'}, for {product.price}"
        return Observation("", value, done=True, details={"verdict": said})

    def _page(self) -> str:
        if not self._found:
            return "Nothing was found. [back]"
        here = self._found[self._at : self._at + self._options.page]
        lines = [f"[{p.code}] {p.title}, {p.price}" for p in here]
        more = " [next]" if self._at + self._options.page < len(self._found) else ""
        return "\n".join([f"{len(self._found)} things:", *lines, f"[back]{more}"])

    def _product(self, product: Product) -> str:
        sizes = " ".join(f"[{size}]" for size in _SIZES)
        return f"{product.title}, {product.price}. Size: {self._size or 'not chosen'}. {sizes} [buy] [back]"
