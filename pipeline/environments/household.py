"""The environment ``household``: craft a thing from what lies in the rooms of a house, alone or through sub-agents.

Goes in: a seed and one command a turn; comes out: what is seen, reward 1 when the goal is in the bag. ``delegate GOAL``
gives a sub-agent a context of its own in the same house, and it may delegate in turn; ``report TEXT`` ends it. Rooms,
things and recipes follow from the seed, and every goal can be made.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from pydantic import Field

from headrace.pipeline.environments.actions import command_of
from headrace.pipeline.environments.environment import EnvironmentOptions, Observation
from headrace.schemas.records import Prompt

__all__ = ("House", "Household", "HouseholdOptions", "make_house")

_ROOMS = ("kitchen", "cellar", "garden", "attic", "workshop", "pantry", "barn", "study")
_RAW = ("log", "clay", "flax", "ore", "sand", "wool", "reed", "flint", "resin", "bone")
_MADE = (
    "plank", "brick", "thread", "ingot", "glass", "cloth", "rope", "blade", "glue", "needle", "shelf", "oven", "sail",
    "axe", "lamp", "coat", "ladder", "knife", "box", "bell",
)  # fmt: skip
_HELP = "Commands: look, go ROOM, take THING, recipe THING, craft THING, delegate GOAL, report TEXT"


class HouseholdOptions(EnvironmentOptions):
    """Options of ``household``."""

    rooms: int = Field(4, ge=1, le=len(_ROOMS))
    """Rooms of the house."""
    levels: int = Field(2, ge=1, le=4)
    """Steps of crafting between raw things and the goal."""
    breadth: int = Field(4, ge=1, le=5)
    """Things of each level."""
    depth: int = Field(3, ge=0)
    """Sub-agents of sub-agents."""


@dataclass(frozen=True, slots=True)
class House:
    """What a seed decides. rooms: raw things that lie in each; recipes: what a thing is made of; goal: what to make."""

    rooms: dict[str, tuple[str, ...]]
    recipes: dict[str, dict[str, int]]
    goal: str


@dataclass(slots=True)
class _State:
    room: str
    bag: Counter[str] = field(default_factory=Counter)
    agents: int = 0
    over: bool = False


def make_house(seed: int, options: HouseholdOptions) -> House:
    """The house of a seed: things of a level are made of one or two of the level below, raw ones lie in rooms."""
    source = random.Random(seed)
    names = source.sample(_ROOMS, options.rooms)
    raw = source.sample(_RAW, min(options.breadth, len(_RAW)))
    rooms: dict[str, list[str]] = {name: [] for name in names}
    for thing in raw:
        rooms[source.choice(names)].append(thing)
    made, below = source.sample(_MADE, min(len(_MADE), options.levels * options.breadth)), raw
    recipes: dict[str, dict[str, int]] = {}
    for level in range(options.levels):
        here = made[level * options.breadth : (level + 1) * options.breadth]
        for thing in here:
            parts = source.sample(below, min(len(below), source.randint(1, 2)))
            recipes[thing] = {part: source.randint(1, 2) for part in parts}
        below = here
    return House({name: tuple(things) for name, things in rooms.items()}, recipes, source.choice(below))


class Household:
    """See the module."""

    Options = HouseholdOptions
    isolation = "inline"

    def __init__(self, options: HouseholdOptions | None = None) -> None:
        self._options = options or HouseholdOptions()
        self._house: House | None = None
        self._state = _State("", over=True)

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        """The house of this seed; text of the prompt stands before what is seen."""
        self._house = make_house(seed, self._options)
        self._state = _State(next(iter(self._house.rooms)))
        goal = f"Make: {self._house.goal}. {_HELP}\n{self._look()}"
        return Observation(f"{prompt.prompt}\n{goal}" if prompt.prompt else goal)

    def step(self, action: str) -> Observation:
        """Do a command; one that cannot be done says why. Raises ValueError after the end."""
        if self._house is None or self._state.over:
            raise ValueError("the episode has ended: call reset first")
        verb, _, rest = command_of(action).partition(" ")
        what = rest.strip()
        if verb == "delegate":
            return self._delegate(what)
        if verb == "report":
            return self._report(what)
        said = {"look": self._look, "go": self._go, "take": self._take, "recipe": self._recipe, "craft": self._craft}
        if verb not in said:
            return Observation(f"There is no command {verb[:40]!r}. {_HELP}", details={"verdict": "no command"})
        text = said[verb]() if verb == "look" else said[verb](what)  # type: ignore[operator]
        if self._state.bag[self._house.goal]:
            self._state.over = True
            return Observation(text, 1.0, done=True, details={"verdict": "made"})
        return Observation(text)

    def close(self) -> None:
        """End the episode."""
        self._state.over = True

    def _delegate(self, goal: str) -> Observation:
        if not goal:
            return Observation("Delegate what?")
        if self._state.agents >= self._options.depth:
            return Observation("There is nobody left to delegate to: do it yourself.")
        self._state.agents += 1
        return Observation(
            f"You help. Your task: {goal}. When it is done or cannot be, report. {_HELP}\n{self._look()}", agent="begin"
        )

    def _report(self, text: str) -> Observation:
        if not self._state.agents:
            self._state.over = True
            return Observation("", 0.0, done=True, details={"verdict": f"given up: {text[:200]}"})
        self._state.agents -= 1
        return Observation(f"Report: {text}\n{self._look()}", agent="end")

    def _look(self) -> str:
        assert self._house is not None
        state = self._state
        here = ", ".join(self._house.rooms[state.room]) or "nothing"
        others = ", ".join(name for name in self._house.rooms if name != state.room) or "nowhere"
        bag = ", ".join(f"{n} {thing}" for thing, n in sorted(state.bag.items()) if n) or "nothing"
        return f"You are in the {state.room}. Here: {here}. Doors to: {others}. Bag: {bag}."

    def _go(self, room: str) -> str:
        assert self._house is not None
        if room not in self._house.rooms:
            return f"There is no room {room[:40]!r}."
        self._state.room = room
        return self._look()

    def _take(self, thing: str) -> str:
        assert self._house is not None
        if thing not in self._house.rooms[self._state.room]:
            return f"There is no {thing[:40]!r} here."
        self._state.bag[thing] += 1
        return f"Bag: {self._state.bag[thing]} {thing}."

    def _recipe(self, thing: str) -> str:
        assert self._house is not None
        recipe = self._house.recipes.get(thing)
        if recipe is None:
            return f"Nobody knows how to make {thing[:40]!r}."
        return f"{thing}: {', '.join(f'{n} {part}' for part, n in recipe.items())}."

    def _craft(self, thing: str) -> str:
        assert self._house is not None
        recipe = self._house.recipes.get(thing)
        if recipe is None:
            return f"Nobody knows how to make {thing[:40]!r}."
        missing = Counter(recipe) - self._state.bag
        if missing:
            return f"You lack {', '.join(f'{n} {part}' for part, n in missing.items())}."
        self._state.bag -= Counter(recipe)
        self._state.bag[thing] += 1
        return f"You made {thing}."
