"""What work costs on a simulated device, in virtual nanoseconds, and the presets that say so of real machines.

A device works through one stream, as a backend of ggml does: kernels and the copies that are asked of it come one after the
other, so a copy does not overlap with computing on the same device (`ggml_backend_cuda` copies on its compute stream). What does overlap
is the work of different devices, and the host's. A copy between two cards runs on the stream of the source. `prefetch`, which ggml's
scheduler never asks for, has a copy stream of its own: copies there run beside what the device computes, at the full speed of both.

A kernel takes a start-up time and then as long as the slower of arithmetic and memory (a roofline). A copy takes a
latency and its bytes over the link. Out of pageable memory, such as a mapped file, the driver copies through a pinned
buffer of its own: slower, and the host has to stand by until it is done. Pinned memory is what the simulated host hands
out itself, as llama.cpp does for compute buffers (`CUDA_Host`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import FileFormatError, ParameterError, shown, shown_path
from workbench.tensors.tensor import Tensor


@dataclass(frozen=True)
class Speed:
    """A device by its rates: operations and bytes per nanosecond (GFLOP/s, GB/s).

    launch_ns: what each kernel takes beside its work; starts: the same by op ("SOFT_MAX") or op and type of its first source ("MUL_MAT
    f16"), where it differs; expert_ns: and once more for each expert inside of MUL_MAT_ID. flops: of products;
    flops_of: the same by the type of the weights, where it differs. vector: operations of everything else (None: as products).
    memory: bytes.
    link: bytes to and from the host, pageable: out of or into host memory that is not pinned (None: the same); link_ns: what each
    transfer costs beside its bytes. sync_ns: what it costs the host to wait for the device.
    unpacked: products read weights as f32, decoded once and kept, as our CPU does.
    """

    launch_ns: int = 5_000
    flops: float = 10_000.0
    memory: float = 400.0
    link: float = 12.0
    link_ns: int = 10_000
    flops_of: Mapping[str, float] = field(default_factory=dict, hash=False)
    vector: float | None = None
    expert_ns: int = 0
    pageable: float | None = None
    sync_ns: int = 0
    starts: Mapping[str, int] = field(default_factory=dict, hash=False)
    unpacked: bool = False

    def parts(self, node: Tensor) -> dict[str, int]:
        """What one node would take for starting it, for its arithmetic and for its memory alone."""
        spec = node.spec
        if spec is None:
            return {"starting kernels": 0, "arithmetic": 0, "memory": 0}
        rate, first = self.vector or self.flops, next(node.sources(), node)
        start = (
            self.starts.get(f"{node.desc} {first.dtype.name}", self.starts.get(node.desc, self.launch_ns))
            if self.starts
            else self.launch_ns
        )
        moved = spec.moved(node)
        weights = node.src[0] if node.op in PRODUCTS else None
        if weights is not None:
            rate = self.flops_of.get(weights.dtype.name, self.flops)
            ids = node.src[2] if node.op == "MUL_MAT_ID" else None
            experts = min(weights.ne[2], ids.n_elements) if ids is not None else 0
            start += self.expert_ns * experts
            if self.unpacked:
                moved += (
                    (4 * weights.n_elements - weights.nbytes) * experts // weights.ne[2]
                    if ids is not None
                    else 4 * weights.n_elements - weights.nbytes
                )
        return {
            "starting kernels": start,
            "arithmetic": int(spec.flops(node) / rate),
            "memory": int(moved / self.memory),
        }

    def compute_ns(self, node: Tensor) -> int:
        """Time of one node: its start, and arithmetic or memory, whichever takes longer (a roofline)."""
        start, arithmetic, memory = self.parts(node).values()
        return start + max(arithmetic, memory)

    def transfer_ns(self, nbytes: int, pinned: bool = True) -> int:
        """Time of one transfer over the link."""
        rate = self.link if pinned or self.pageable is None else self.pageable
        return self.link_ns + int(nbytes / rate)


GPU = Speed()
"""A round-numbered card on a PCIe link."""
CPU = Speed(launch_ns=200, flops=100.0, memory=20.0, link=10.0, link_ns=200)
"""A round-numbered host; its link is memory to memory."""


PRODUCTS = ("MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "MUL_MAT_ID_BACK", "OUT_PROD_ID")
"""Ops whose arithmetic runs at the rate of products, not at that of vectors."""


@dataclass(frozen=True)
class Disk:
    """Where weights lie that the host's memory does not hold. rate: bytes per nanosecond (GB/s) of one long read; latency_ns: its start."""

    rate: float
    latency_ns: int

    def read_ns(self, nbytes: int) -> int:
        """Time of one read."""
        return self.latency_ns + int(nbytes / self.rate)


DISKS = {"nvme-pcie4": Disk(7.0, 100_000), "nvme-pcie3": Disk(3.5, 100_000), "sata": Disk(0.56, 100_000)}
"""By name. Sequential reads as the makers print them: Samsung 980 Pro (PCIe 4.0 x4) up to 7 GB/s, 970 Pro (PCIe 3.0 x4) up to 3.5 GB/s
(pugetsystems.com, pages of the parts); SATA drives about 0.56 GB/s, and latencies of about 100 microseconds: from memory, unverified.
A mapped file that is read page by page is slower."""


# ---- presets

PRESETS_FILE = Path(__file__).with_name("presets.toml")
RATES = {"link", "pageable", "memory", "flops", "vector", "f32", "f16", "quantised"}
NUMBERS = {"launch_ns", "expert_ns", "link_ns", "sync_ns", "capacity"}
KINDS = ("GPU", "BLAS", "CPU")
"""As devices stand in a scheduler: cards, accelerators, the host last."""
MOST = 1e15
"""Larger figures are mistakes: of bytes, a petabyte."""


@dataclass(frozen=True)
class Preset:
    """A device with the source of each of its figures.

    kind: "GPU", "CPU", "BLAS" (an accelerator that works on host memory) or "cards", which only names others; capacity: bytes of its
    memory, 0 for unknown. sources:
    where each figure comes from; reached: shares of peak figures that real programs see, by figure.
    """

    name: str
    title: str
    kind: str
    capacity: int
    speed: Speed
    figures: Mapping[str, float]
    sources: Mapping[str, str]
    reached: Mapping[str, float]
    cards: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, str, str, str]]:
        """A line per figure: name, value and unit, share that is reached, source."""
        out = []
        for key, value in self.figures.items():
            unit = (
                "bytes"
                if key == "capacity"
                else "ns"
                if key.endswith("_ns")
                else "GB/s"
                if key in ("link", "pageable", "memory")
                else "GFLOP/s"
            )
            share = self.reached.get(key, 1.0)
            out.append(
                (
                    key,
                    f"{value:,.4g} {unit}" if unit != "bytes" else f"{int(value):,} bytes",
                    f"{share:.0%}",
                    self.sources[key],
                )
            )
        return out


def presets(path: Path = PRESETS_FILE) -> dict[str, Preset]:
    """All presets of a file by name; by default those that come with the workbench. Raises FileFormatError."""
    return dict(_presets(Path(path)))


@functools.lru_cache(maxsize=8)
def _presets(path: Path) -> Mapping[str, Preset]:
    import tomllib

    try:
        data = tomllib.loads(path.read_text("utf-8"))
        return {name: _preset(name, table) for name, table in data.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as e:
        raise FileFormatError(
            f"{shown_path(path)} holds no presets: {type(e).__name__}: {e}", "tables like those of presets.toml"
        ) from None


def _preset(name: str, table: dict[str, Any]) -> Preset:
    if table["kind"] == "cards":
        if not isinstance(table["cards"], list) or not table["cards"]:
            raise ValueError(f"preset {name} names no cards")
        return Preset(name, str(table["title"]), "cards", 0, GPU, {}, {}, {}, tuple(map(str, table["cards"])))
    if table["kind"] not in KINDS:
        raise ValueError(f"preset {name} is of kind {table['kind']!r}: one of {', '.join(KINDS)} or cards")
    figures = {k: float(v[0]) for k, v in table.items() if k in RATES | NUMBERS}
    sources = {k: str(table[k][1]) for k in figures}
    reached = {k: float(v) for k, v in table.get("reached", {}).items()}
    unknown = table.keys() - figures.keys() - {"title", "kind", "reached", "starts", "unpacked"}
    if unknown or not reached.keys() <= figures.keys():
        raise ValueError(
            f"preset {name} has unknown figures {', '.join(sorted(unknown | reached.keys() - figures.keys()))}"
        )
    for k, v in figures.items():
        if not (0 if k in NUMBERS else 1e-6) <= v <= MOST or not 0 < reached.get(k, 1.0) <= 1:
            raise ValueError(f"preset {name}: {k} = {v:g}, of which {reached.get(k, 1.0):.0%} are reached")
    real = {k: v * reached.get(k, 1.0) for k, v in figures.items()}
    types = {t: real["f16"] for t in ("f16", "bf16") if "f16" in real}
    if "quantised" in real:
        types |= {t: real["quantised"] for t in _quantised()}
    numbers = {k: int(real[k]) for k in NUMBERS & real.keys() - {"capacity"}}
    rates = {k: real[k] for k in ("memory", "link", "pageable", "vector") if k in real}
    starts = {str(k): int(v) for k, v in table.get("starts", {}).items()}
    if not all(0 <= v <= MOST for v in starts.values()):
        raise ValueError(f"preset {name}: starts of 0 to {MOST:g} ns")
    given: dict[str, Any] = {str(k): v for k, v in (*rates.items(), *numbers.items())}
    speed = Speed(flops=real["f32"], flops_of=types, starts=starts, unpacked=bool(table.get("unpacked")), **given)
    return Preset(
        name, str(table["title"]), str(table["kind"]), int(real.get("capacity", 0)), speed, figures, sources, reached
    )


def _quantised() -> list[str]:
    from workbench.tensors.dtype import DTYPES

    return [t.name for t in DTYPES.values() if t.block > 1]


def preset(name: str) -> Preset:
    """A preset by its name, or by the path of a file that calibration wrote. Raises ParameterError for an unknown one."""
    if name.endswith(".toml"):
        found = presets(Path(name))
        if len(found) != 1:
            raise FileFormatError(
                f"{shown(name)} holds {len(found)} presets", "one", "a file that `doctor --calibrate` wrote"
            )
        return next(iter(found.values()))
    known = presets()
    if name not in known:
        raise ParameterError(f"device {shown(name)!r}", f"one of {', '.join(known)}, or a .toml file",
                             "`python -m workbench schedule --devices` shows them; `doctor --calibrate` measures this machine")  # fmt: skip
    return known[name]


def devices_of(name: str) -> list[Preset]:
    """The devices behind the name of a preset: itself, or those of a machine or of a file with several."""
    if name.endswith(".toml") and len(several := list(presets(Path(name)).values())) > 1:
        found = several
    else:
        one = preset(name)
        found = [preset(card) for card in one.cards] or [one]
    if any(p.cards for p in found):
        raise FileFormatError(f"{shown(name)} names machines among others", "devices, or one machine and its cards")
    return found
