"""A small GPT: a transformer that says which character is next."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention to what came before, and a layer on each place by itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layer = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.layer = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, places, width]`` both."""
        batch, places, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x))
        # [3, batch, heads, places, width of a head]
        parts = parts.view(batch, places, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).reshape(batch, places, width))
        return x + self.layer(self.before_layer(x))


class Gpt(nn.Module):
    """``[batch, places]`` characters to ``[batch, places, characters]`` scores of the next ones."""

    def __init__(
        self, characters: int, places: int, layers: int = 3, width: int = 96, heads: int = 4
    ) -> None:
        super().__init__()
        self.places = places
        self.character = nn.Embedding(characters, width)
        self.place = nn.Embedding(places, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        return self.scores(self.blocks(self.character(characters) + self.place(places)))

    @torch.no_grad()
    def continued(self, characters: list[int], count: int, seed: int) -> list[int]:
        """The characters with ``count`` more, drawn by their scores."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            scores = self(torch.tensor([characters[-self.places :]]))[0, -1]
            drawn = torch.multinomial(scores.div(0.8).softmax(0), 1, generator=generator)
            characters = [*characters, int(drawn)]
        return characters
