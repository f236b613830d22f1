"""What work costs on a simulated device, in virtual nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.tensors.tensor import Tensor


@dataclass(frozen=True)
class Speed:
    """A device by its rates. launch_ns: from the call to the start of a kernel; flops and memory: per nanosecond (GFLOP/s,
    GB/s); link: bytes per nanosecond to and from the host; link_ns: what each transfer costs beside its bytes."""

    launch_ns: int = 5_000
    flops: float = 10_000.0
    memory: float = 400.0
    link: float = 12.0
    link_ns: int = 10_000

    def compute_ns(self, node: Tensor) -> int:
        """Time of one node: bound by arithmetic or by memory, whichever takes longer (a roofline)."""
        if node.spec is None:
            return 0
        return self.launch_ns + int(max(node.spec.flops(node) / self.flops, node.spec.moved(node) / self.memory))

    def transfer_ns(self, nbytes: int) -> int:
        """Time of one transfer over the link."""
        return self.link_ns + int(nbytes / self.link)


GPU = Speed()
"""A round-numbered card on a PCIe link."""
CPU = Speed(launch_ns=200, flops=100.0, memory=20.0, link=10.0, link_ns=200)
"""A round-numbered host; its link is memory to memory."""
