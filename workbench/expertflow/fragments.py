"""Why a pool: experts of several sizes come and go, and a general allocator runs out of room while memory is free.

The general allocator is ggml's own for compute memory (`execution.BlockAllocator`: best fit, neighbours merged), with an end. A pool
of fixed slots places each expert in a slot of its size, so whether one fits is a matter of counting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from workbench.errors import AllocationError, ParameterError
from workbench.execution.allocator import BlockAllocator


class Arena:
    """`capacity` bytes under a best-fit allocator. places: where each thing lies, (offset, bytes)."""

    def __init__(self, capacity: int, alignment: int = 256) -> None:
        if capacity < alignment:
            raise ParameterError(f"an arena of {capacity} bytes", f"{alignment} or more")
        self.capacity = capacity // alignment * alignment
        self._blocks = BlockAllocator(alignment, self.capacity)
        self.places: dict[object, tuple[int, int]] = {}
        self._blocks.alloc(self.capacity)
        self._blocks.free(0, 0, self.capacity)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Free pieces, (offset, bytes), in order."""
        chunk = self._blocks.chunks[0]
        return [(start, min(size, self.capacity - start)) for start, size in zip(chunk.starts, chunk.sizes) if start < self.capacity]

    @property
    def free(self) -> int:
        """Free bytes in all."""
        return sum(size for _, size in self.holes)

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that the largest request could not have: 0 for one hole, near 1 for crumbs."""
        largest = max((size for _, size in self.holes), default=0)
        return 1 - largest / self.free if self.free else 0.0

    def fits(self, nbytes: int) -> bool:
        """Whether some hole is large enough."""
        return any(size >= self._blocks.padded(nbytes) for _, size in self.holes)

    def place(self, what: object, nbytes: int) -> int:
        """Give `what` its bytes; the offset. Raises AllocationError where no hole is large enough, however much is free."""
        if not self.fits(nbytes):
            largest = max((size for _, size in self.holes), default=0)
            raise AllocationError(f"{nbytes:,} bytes in an arena with {self.free:,} free", f"at most {largest:,}, the largest hole",
                                  "a pool of fixed slots has no holes of other sizes")  # fmt: skip
        _, offset = self._blocks.alloc(nbytes)
        self.places[what] = (offset, nbytes)
        return offset

    def release(self, what: object) -> None:
        """Take its bytes back."""
        offset, nbytes = self.places.pop(what)
        self._blocks.free(0, offset, nbytes)


@dataclass(frozen=True)
class Failure:
    """A load that found no hole: bytes wanted and free, the largest hole, and how many experts had to go besides."""

    access: int
    wanted: int
    free: int
    largest: int
    evicted: int


def churn(keys: Iterable[int], sizes: Mapping[int, int], capacity: int) -> Iterator[tuple[int, Arena, Failure | None]]:
    """Experts come and go by LRU in a general allocator, as long as bytes suffice; after each access (key, arena, failure).

    Evicted is until the *bytes* suffice, as a cache counts. Where they suffice and still no hole is large enough, that is a
    failure; then more experts go until one is.
    """
    arena, order = Arena(capacity), OrderedDict[int, None]()
    for access, key in enumerate(keys):
        failure = None
        if key in order:
            order.move_to_end(key)
        else:
            size = sizes[key]
            if size > arena.capacity:
                raise ParameterError(f"an expert of {size:,} bytes", f"at most {arena.capacity:,}, the capacity")
            while arena.free < size:
                arena.release(order.popitem(last=False)[0])
            if not arena.fits(size):
                free, largest, n = arena.free, max(s for _, s in arena.holes), 0
                while not arena.fits(size):
                    arena.release(order.popitem(last=False)[0])
                    n += 1
                failure = Failure(access, size, free, largest, n)
            arena.place(key, size)
            order[key] = None
        yield key, arena, failure


def blocks(expert_bytes: int, block_bytes: int) -> tuple[int, float]:
    """Blocks that an expert takes in a pool of fixed blocks, and the share of their bytes that is wasted."""
    if expert_bytes < 1 or block_bytes < 1:
        raise ParameterError(f"an expert of {expert_bytes} bytes in blocks of {block_bytes}", "1 byte or more each")
    n = -(-expert_bytes // block_bytes)
    return n, 1 - expert_bytes / (n * block_bytes)
