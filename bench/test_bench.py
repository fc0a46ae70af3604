"""Tests of rounds and turns: python3 -m unittest discover -s bench"""

import unittest
from unittest import mock

import bench
from page import Figure
from peers import Absent
from sections import Section, Turn

NEAR, FAR = [45.0], [200.0]


def section(calls: list[str], *names: str) -> Section:
    def turn(name: str) -> Turn:
        def run() -> list[Figure]:
            calls.append(name)
            if name == "absent":
                raise Absent("not here")
            return [Figure("8 B", name, 1.0)]

        return Turn((name,), frozenset(), run)

    return Section("s", "title", "", tuple(map(turn, names)), (), ())


def turns_taken(names: list[str], hand_overs: list[list[float]], rounds: int = 1) -> tuple[list[str], bench.Results]:
    calls: list[str] = []
    with mock.patch.object(bench, "hand_over", side_effect=hand_overs):
        return calls, bench.measure(section(calls, *names), rounds, {})


class Rounds(unittest.TestCase):
    def test_turns_follow_each_other_while_cores_stay(self) -> None:
        calls, found = turns_taken(["a", "b"], [NEAR] * 5, rounds=2)
        self.assertEqual(calls, ["a", "b", "a", "b"])
        self.assertEqual(found.us[("8 B", "near", "b")], [1.0, 1.0])

    def test_a_turn_in_which_the_cores_changed_is_taken_again(self) -> None:
        calls, found = turns_taken(["a", "b"], [NEAR, FAR, FAR, NEAR, FAR, FAR])
        self.assertEqual(calls, ["a", "a", "b", "b", "b"])
        self.assertEqual(found.states("8 B"), ["far"])

    def test_a_turn_in_another_state_than_the_first_is_taken_again_some_times(self) -> None:
        calls, found = turns_taken(["a", "b"], [NEAR, NEAR, FAR, FAR, FAR])
        self.assertEqual(calls, ["a", "b", "b", "b"])
        self.assertEqual(found.us[("8 B", "far", "b")], [1.0, 1.0])

    def test_what_is_absent_is_tried_once(self) -> None:
        calls, _ = turns_taken(["absent", "a"], [NEAR] * 5, rounds=2)
        self.assertEqual(calls, ["absent", "a", "a"])


if __name__ == "__main__":
    unittest.main()
