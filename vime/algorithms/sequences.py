"""Which token belongs to which sample: reductions over a sample's tokens, with an order that does not vary between runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The samples of flattened tokens: `lengths` of each; `sample`, `position` [tokens]: a token's sample and place in it.

    Sums go through a padded table with one token a cell, so that neither value nor gradient adds up in a varying order.
    """

    lengths: tuple[int, ...]
    sample: Tensor
    position: Tensor

    @property
    def count(self) -> int:
        """Samples."""
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Tokens of the longest sample."""
        return max(self.lengths, default=0)

    @property
    def last(self) -> Tensor:
        """[tokens] bool: no token of its sample comes after it."""
        return self.position + 1 == torch.tensor(self.lengths, dtype=torch.long, device=self.sample.device)[self.sample]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | None = None) -> Sequences:
        """`lengths`: tokens of each sample, in order."""
        sizes = torch.tensor(lengths, dtype=torch.long)
        sample = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        starts = sizes.cumsum(0) - sizes
        position = torch.arange(len(sample)) - starts[sample]
        return cls(tuple(lengths), sample.to(device), position.to(device))

    def table(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """values [tokens] -> [samples, width], `fill` where a sample has no token."""
        cells = values.new_full((self.count, self.width), fill)
        return cells.index_put((self.sample, self.position), values)

    def sum(self, values: Tensor) -> Tensor:
        """values [tokens] -> [samples]."""
        return self.table(values).sum(dim=1)

    def max(self, values: Tensor) -> Tensor:
        """values [tokens] >= 0 -> [samples]; 0 for a sample without tokens."""
        return self.table(values).amax(dim=1) if self.width else values.new_zeros(self.count)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over the tokens where `mask` [tokens] holds -> [samples]; 0 for a sample without such tokens.

        What is masked is selected away, so that it reaches neither value nor gradient.
        """
        total = self.sum(torch.where(mask, values, torch.zeros_like(values)))
        return total / self.sum(mask.to(values.dtype)).clamp(min=1.0)

    def split(self, values: Tensor) -> list[Tensor]:
        """values [tokens] -> one tensor a sample."""
        return list(values.split(list(self.lengths)))

    def spread(self, values: Tensor) -> Tensor:
        """values [samples] -> [tokens]: each token gets that of its sample."""
        return values[:, None].expand(self.count, self.width)[self.sample, self.position]
