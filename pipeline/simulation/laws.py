"""Laws of lengths and latencies: what a workload draws from.

A law is written as a number, as ``lognormal(900, 0.8, cap=8000)``, or as a table with these keys. All draws are >= 0.
"""

import re
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ("Law",)

_WRITTEN = re.compile(r"\s*([a-z]+)\s*\(([^()]*)\)\s*")

Floats = npt.NDArray[np.float64]


class Law(BaseModel):
    """A distribution of numbers >= 0."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    law: Literal["constant", "normal", "lognormal", "exponential", "measured"] = "constant"
    """``normal`` is cut at 0, ``lognormal`` has ``mean`` before ``cap``, ``measured`` draws from ``values``."""
    mean: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Mean, before ``cap`` and before a normal law is cut at 0."""
    sigma: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Standard deviation of a normal law; of the logarithm for a lognormal one."""
    cap: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Largest value; 0: none."""
    values: list[float] = Field(default_factory=list)
    """What was measured, such as the completion lengths of an earlier run."""

    @model_validator(mode="before")
    @classmethod
    def _written(cls, data: Any) -> Any:
        """A number, or the words of the module's first lines."""
        if isinstance(data, int | float) and not isinstance(data, bool):
            return {"law": "constant", "mean": data}
        if not isinstance(data, str):
            return data
        found = _WRITTEN.fullmatch(data)
        if found is None:
            raise ValueError(f"{data!r} is no law: write a number, or such as lognormal(900, 0.8, cap=8000)")
        given: dict[str, Any] = {"law": found[1]}
        places = iter(("mean", "sigma", "cap"))
        for word in filter(None, (part.strip() for part in found[2].split(","))):
            name, equals, value = word.partition("=")
            place = name.strip() if equals else next(places, "")
            given[place] = float(value if equals else word)
        return given

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.law == "measured" and (not self.values or min(self.values) < 0):
            raise ValueError("a measured law needs values, none of them below 0")
        if self.law != "measured" and self.values:
            raise ValueError(f"values belong to law = 'measured', this one is {self.law!r}")
        return self

    def draw(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> Floats:
        """Independent draws of a shape, float64."""
        if self.law == "constant":
            drawn = np.full(shape, self.mean)
        elif self.law == "normal":
            drawn = np.maximum(0.0, rng.normal(self.mean, self.sigma, shape))
        elif self.law == "lognormal":
            drawn = self.mean * np.exp(rng.normal(-(self.sigma**2) / 2, self.sigma, shape))
        elif self.law == "exponential":
            drawn = rng.exponential(self.mean, shape)
        else:
            drawn = rng.choice(np.asarray(self.values, np.float64), shape)
        return np.minimum(drawn, self.cap) if self.cap else drawn

    def largest(self) -> float:
        """The cap, or what one draw in a million passes; for deadlines."""
        if self.cap:
            return self.cap
        if self.law == "measured":
            return max(self.values)
        spread = {"constant": 0.0, "normal": 5 * self.sigma, "exponential": 13 * self.mean}.get(self.law)
        return self.mean * float(np.exp(5 * self.sigma)) if spread is None else self.mean + spread
