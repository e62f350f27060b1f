"""Lower bounds of kernels' times on a CUDA device: bytes over bandwidth, operations over peak."""

from korch.candidate.candidate import Candidate
from korch.cuda.target import CudaTarget


def bound_ns(candidate: Candidate, target: CudaTarget) -> int:
    """Return a lower bound of the time of any kernel for a candidate.

    Data that fit into the L2 cache may still be there from an earlier kernel.
    """
    read, write = candidate.read_bytes, candidate.write_bytes
    is_cached = read + write <= target.l2_bytes
    rate = target.l2_bytes_per_s if is_cached else target.copy_bytes_per_s
    flop = max(candidate.linear_flop, candidate.offer.work_flop)
    seconds = max((read + write) / rate, flop / _peak(candidate, target))
    return max(1, int(target.launch_ns + 1e9 * seconds))


def _peak(candidate: Candidate, target: CudaTarget) -> float:
    """Return the best rate among the candidate's matrix products; without any, the rate of float32 arithmetic."""
    body = candidate.group.body
    linear = body.linear
    rates = [
        target.flop_per_s(product)
        for p in linear
        for product in target.products(body.types[p.output].dtype, is_exact=p.op == "winograd")
    ]
    return max(rates, default=target.f32_flop_per_s)
