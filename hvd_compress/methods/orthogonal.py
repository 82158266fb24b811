"""The nearest orthogonal matrix, by which Muon moves the weights (Jordan et al., Muon, 2024,
https://kellerjordan.github.io/posts/muon/)."""

import torch
from torch import Tensor

#: The coefficients of Muon's iteration, a polynomial of degree 5 that is fast instead of exact: large singular values
#: end between 0.7 and 1.2, small ones (below a hundredth of the largest) lower.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalize(grad: Tensor, scale: float) -> None:
    """Replaces a gradient of two or more dimensions, in place, by the nearest matrix with orthonormal rows or columns
    (Newton-Schulz iteration in float32), times a factor that makes its root mean square about ``scale`` at full rank.

    Further dimensions count as columns. 0 stays 0, and everything becomes NaN if an entry is not finite. The last bits
    may differ between kinds of processors, and between numbers of threads.
    """
    matrix = grad.reshape(grad.shape[0], -1).float()
    wide = matrix.shape[0] <= matrix.shape[1]
    x: Tensor = matrix if wide else matrix.T
    tiny = torch.finfo(torch.float32).tiny
    x = x / x.abs().amax().clamp(min=tiny)  # so that no square overflows
    x = x / torch.linalg.vector_norm(x).clamp(min=tiny)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    x = x * (scale * max(x.shape) ** 0.5)
    grad.copy_((x if wide else x.T).reshape(grad.shape))
