"""Weights on several devices (`-ngl`, `--override-tensor` and `--tensor-split` in llama.cpp).

What stays on the host stays mapped from the file, or is copied into pinned memory; what goes to a device is copied into a buffer
there. Nodes follow their weights: that is the scheduler's first pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from workbench.devices import Backend, Buffer, BufferType, DeviceType
from workbench.errors import ParameterError, shown
from workbench.models.model import Model
from workbench.tensors import Context, Tensor, Usage
from workbench.tensors.context import TENSOR_OVERHEAD

_LAYER = re.compile(r"blk\.(\d+)\.")


class PlacedModel(Model):
    """A model some of whose weights lie on devices; made by `place_weights`. Closing it leaves the original open.

    layer_types: the memory of each layer, where its part of the KV cache goes as well. homes: the backend of each weight.
    """

    def __init__(self, model: Model, homes: Mapping[str, Backend], layers: Sequence[Backend], pinned: BufferType | None = None) -> None:
        self.file, self.path, self.name, self.hparams = model.file, model.path, model.name, model.hparams
        self.homes = dict(homes)
        self.layer_types = [b.buffer_type for b in layers]
        self.context = Context(TENSOR_OVERHEAD * len(homes), no_alloc=True, name=f"placed weights of {shown(model.name)}")
        self.weights: dict[str, Tensor] = dict(model.weights)
        self.buffers: list[Buffer] = []
        away: dict[BufferType, list[str]] = {}
        for name, home in homes.items():
            kind = pinned if home.buffer_type.is_host else home.buffer_type
            if kind is not None:
                away.setdefault(kind, []).append(name)
        try:
            for kind, names in away.items():
                self._move(model, kind, names)
        except BaseException:
            self.close()
            raise

    def _move(self, model: Model, kind: BufferType, names: Sequence[str]) -> None:
        """Copy weights into as few buffers of a device as its `max_size` allows."""
        pieces: list[list[tuple[Tensor, Tensor, int]]] = [[]]
        end = 0
        for name in names:
            source = model.weights.get(name) or model.output  # an output matrix that is tied to the embedding
            size = -(-kind.alloc_size(source) // kind.alignment) * kind.alignment
            if kind.max_size is not None and end and end + size > kind.max_size:
                pieces.append([])
                end = 0
            copy = self.weights[name] = self.context.new_tensor(source.dtype.name, *source.ne, name=name)
            pieces[-1].append((source, copy, end))
            end += size
        for piece in pieces:
            last, _, start = piece[-1]
            buffer = kind.alloc_buffer(start + kind.alloc_size(last), Usage.WEIGHTS)
            self.buffers.append(buffer)
            for source, copy, offset in piece:
                copy.place(buffer, offset)
                buffer.write(offset, source.require_data().read(source.offset, source.nbytes))

    def close(self) -> None:
        """Give the memory on devices back; the model that it came from stays open."""
        self.context.close()
        for buffer in self.buffers:
            buffer.close()

    def __repr__(self) -> str:
        places = {b.name: 0 for b in self.homes.values()}
        for name, b in self.homes.items():
            places[b.name] += self.weights[name].nbytes
        return f"<PlacedModel {shown(self.name)!r} on {', '.join(f'{n}: {size:,} bytes' for n, size in places.items())}>"


def place_weights(model: Model, backends: Sequence[Backend], n_gpu_layers: int | None = None,
                  overrides: Mapping[str, Backend | str] | None = None, shares: Sequence[float] | None = None,
                  pinned: BufferType | None = None) -> PlacedModel:  # fmt: skip
    """Put weights on devices as llama.cpp does.

    n_gpu_layers: how many layers go to the GPUs, counted from the end, the output as one more (default: all). shares: how
    the layers are divided among several GPUs (default: evenly). overrides: pattern of a weight's name -> backend, or its
    name; the first that is found decides: `{"_exps": "CPU"}` leaves all experts on the host. The embedding stays there, too.
    pinned: what stays on the host is copied into this memory, from which devices copy by themselves (`--no-mmap`): a CudaBackend's
    `host_buffer_type`, or that of a simulated machine's host.
    """
    hp = model.hparams
    gpus, cpu = [b for b in backends if b.device_type is DeviceType.GPU], backends[-1]
    n = hp.n_layer + 1 if n_gpu_layers is None else n_gpu_layers
    if not isinstance(n, int) or n < 0:
        raise ParameterError(f"n_gpu_layers={n_gpu_layers!r}", f"0 to {hp.n_layer + 1}: the model has {hp.n_layer} layers and the output")
    if shares is not None and (len(shares) != len(gpus) or min(shares, default=1) < 0 or not sum(shares)):
        raise ParameterError(f"shares={shares!r}", f"one number for each of {len(gpus)} GPUs, not all zero")
    by_name = {b.name: b for b in backends}
    rules: list[tuple[re.Pattern[str], Backend]] = []
    for pattern, wish in (overrides or {}).items():
        backend = by_name.get(wish) if isinstance(wish, str) else wish
        if backend is None or backend not in backends:
            raise ParameterError(f"override {pattern!r} to {wish!r}", "one of " + ", ".join(by_name))
        try:
            rules.append((re.compile(pattern), backend))
        except re.error as e:
            raise ParameterError(f"override {pattern!r}", "a regular expression", str(e)) from None
    layers = [home_of_layer(i, hp.n_layer + 1, n, gpus, cpu, shares or [1.0] * len(gpus)) for i in range(hp.n_layer + 1)]

    def home(name: str) -> Backend:
        for rule, wanted in rules:
            if rule.search(name):
                return wanted
        if found := _LAYER.match(name):
            return layers[int(found[1])]
        return layers[-1] if name.startswith("output") else cpu

    names = list(dict.fromkeys([*model.weights, "output.weight"]))
    homes = {name: home(name) for name in names}
    if "output.weight" not in model.weights and homes["output.weight"].buffer_type.is_host:
        del homes["output.weight"]  # tied to the embedding and beside it
    return PlacedModel(model, homes, layers[:-1], pinned)


def home_of_layer(i: int, n_layers: int, n_gpu: int, gpus: Sequence[Backend], cpu: Backend, shares: Sequence[float]) -> Backend:
    """Where layer `i` of `n_layers` goes, the output being the last: to the CPU, or to a GPU by its share of the layers from there on."""
    first = max(n_layers - n_gpu, 0)
    if i < first or not gpus:
        return cpu
    part, end = (i - first) / (n_layers - first), 0.0
    for gpu, share in zip(gpus, shares, strict=True):
        end += share / sum(shares)
        if part < end:
            return gpu
    return gpus[-1]
