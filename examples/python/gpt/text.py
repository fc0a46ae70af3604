"""A text as windows of characters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import Dataset


class Text:
    """The characters of a file as numbers, in the order of the alphabet that occurs in it."""

    def __init__(self, file: str) -> None:
        text = Path(file).read_text(encoding="utf-8")
        self.alphabet = sorted(set(text))
        self._numbers = {character: number for number, character in enumerate(self.alphabet)}
        self.characters = torch.tensor(self.numbers(text))

    def numbers(self, text: str) -> list[int]:
        return [self._numbers[character] for character in text]

    def text(self, numbers: list[int]) -> str:
        return "".join(self.alphabet[number] for number in numbers)

    def windows(self, places: int) -> tuple[Windows, Windows]:
        """For training, and the last twentieth for validation."""
        border = len(self.characters) * 19 // 20
        return Windows(self.characters[:border], places), Windows(self.characters[border:], places)


class Windows(Dataset[torch.Tensor]):
    """Pieces of ``places + 1`` characters: each place is to tell the next."""

    def __init__(self, characters: torch.Tensor, places: int) -> None:
        self._characters, self._places = characters, places

    def __len__(self) -> int:
        return (len(self._characters) - 1) // self._places

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._places
        return self._characters[start : start + self._places + 1]
