"""A product whose inner dimension tensor parallelism cuts: partial results are summed, the bias is added once."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from meshwright.run.lane import Lane


class Row(nn.Linear):
    """Rows of the weight stay whole, each member has some of its columns."""

    def forward(self, x: Tensor, lane: Lane) -> Tensor:
        found = lane.leave(functional.linear(x, self.weight))
        return found if self.bias is None else found + self.bias
