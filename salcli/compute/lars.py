"""LARS: SGD whose steps are as long as each layer can bear (You et al., 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from salcli.compute.sgd import Sgd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TRUST = 0.001
TINY = 1e-8  # a gradient may vanish


class Lars(Sgd):
    """Each gradient (with weight decay) is scaled by trust · ‖w‖ / (‖g‖ + decay · ‖w‖) before SGD with momentum.

    Weights that are zero, or have no gradient, are left to plain SGD: they would never move.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        self._decay = weight_decay  # not SGD's own, which would come after the scaling

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Scale the gradients where they are, then step."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._scale(weight, weight.grad)
        return super().step(closure)

    def _scale(self, weight: Tensor, gradient: Tensor) -> None:
        weight_norm, gradient_norm = weight.norm(), gradient.norm()
        local = TRUST * weight_norm / (gradient_norm + self._decay * weight_norm + TINY)
        # both stay on the device: asking for their values here would make a GPU wait
        factor = torch.where((weight_norm > 0) & (gradient_norm > 0), local, torch.ones_like(local))
        gradient.add_(weight, alpha=self._decay).mul_(factor)
