"""Explores a world: each state that any order of steps and faults reaches, or some orders at random."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Hashable

from tests.model.canonical import key
from tests.model.promises import check_end, check_now
from tests.model.world import Step, World

#: Longest way of a walk, in steps.
ENOUGH = 2000

Path = tuple[Step, ...]
Check = Callable[[World], None]


class Explored:
    """The states of a world, by numbers in the order in which they were found, and how they follow each other.

    Arguments:
        first: the state at the beginning.
        check: what raises `AssertionError` in a state that must not be.
        key: of a state; those with equal keys are taken for the same.
    """

    def __init__(self, first: World, check: Check, key: Callable[[World], Hashable] = key) -> None:
        self.seen = {key(first): 0}
        self._check, self._key = check, key
        self._before = array("i", [-1])  # the state from which a state was found
        self._paths: list[Path] = [()]  # and how
        self._next = array("i")  # the states that follow without a fault
        self._first_next = array("i")  # where those of a state begin
        frontier = deque([first])
        while frontier:
            frontier.extend(self._explore(len(self._first_next), frontier.popleft()))
        self._first_next.append(len(self._next))
        assert len(self.seen) + 1 == len(self._first_next)  # nothing is left to be explored

    def _explore(self, number: int, world: World) -> list[World]:
        """Return the new states that follow a state."""
        self._first_next.append(len(self._next))
        found: list[World] = []
        steps = world.steps()
        for step in (*steps, *world.faults()):
            for following, path in world.outcomes(step):
                known, state = len(self.seen), self.seen.setdefault(self._key(following), len(self.seen))
                if state == known:
                    self._before.append(number)
                    self._paths.append(path)
                    self._look_at(following, state)
                    found.append(following)
            if step in steps:
                self._next.append(state)  # the outcome without a death
        return found

    def _look_at(self, world: World, state: int) -> None:
        try:
            self._check(world)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.history(state)}") from error

    def history(self, state: int) -> list[Path]:
        """Return a shortest way to a state."""
        paths = []
        while state:
            paths.append(self._paths[state])
            state = self._before[state]
        return paths[::-1]

    def check_that_all_ends(self) -> None:
        """Check that no order of steps without further faults goes on for ever, from any state: that it has no cycle."""
        unknown, on_the_way, ends = 0, 1, 2
        states = bytearray(len(self.seen))
        for start in range(len(states)):
            if states[start] != unknown:
                continue
            states[start] = on_the_way
            way = [(start, self._first_next[start])]
            while way:
                state, place = way.pop()
                if place == self._first_next[state + 1]:
                    states[state] = ends
                    continue
                way.append((state, place + 1))
                following = self._next[place]
                assert states[following] != on_the_way, f"goes on for ever: {self.history(following)}"
                if states[following] == unknown:
                    states[following] = on_the_way
                    way.append((following, self._first_next[following]))


def walk(world: World, generator: random.Random) -> None:
    """Take steps and faults at random until nothing is left to be done, and check what the world promises."""
    history: Path = ()
    try:
        for _ in range(ENOUGH):
            check_now(world)
            if world.is_over():
                check_end(world)
                return
            step = generator.choice(world.choices())
            history = (*history, step)
            world.do(step)
        raise AssertionError("goes on for ever")
    except AssertionError as error:
        raise AssertionError(f"{error}: {history}") from error
