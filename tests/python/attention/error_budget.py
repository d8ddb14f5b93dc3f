# SPDX-License-Identifier: MIT
"""How far a result of attention may be from that of float64 loops.

Element by element |x - golden| <= c · u · S + t: S is the same formula on
absolute values, u the unit of the dtype widened by the size of the scores.
"""

import dataclasses

import numpy as np
import reference
import torch


@dataclasses.dataclass(frozen=True)
class Budget:
    unit: float  # of the dtype's own rounding, float32's aside
    factor: float
    tiny: float
    compute: float  # unit of the arithmetic

    def allowed(self, scale, largest):
        """Of results with this condition scale."""
        u = self.unit + self.compute * (4 + largest)
        return self.factor * u * scale + self.tiny

    def of_out(self, r: reference.Result) -> np.ndarray:
        return self.allowed(r.out_scale, r.largest)

    def of_logsumexp(self, r: reference.Result) -> np.ndarray:
        if self.compute == 2.0**-53:
            with np.errstate(invalid="ignore"):
                return 1e-13 * (1 + np.abs(r.logsumexp) + r.largest)
        return np.full_like(r.logsumexp, 4 * 2.0**-24 * (4 + r.largest))


BUDGETS = {
    torch.float32: Budget(0, 8, 1e-37, 2.0**-24),
    torch.float64: Budget(0, 8, 1e-37, 2.0**-53),
    torch.bfloat16: Budget(2.0**-9, 6, 2.0**-133, 2.0**-24),
    torch.float16: Budget(2.0**-12, 6, 2.0**-24, 2.0**-24),
}
