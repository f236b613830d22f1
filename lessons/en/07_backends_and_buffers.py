# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 07 · Backends and buffers
#
# **50 minutes** · before it: 03, the graph; 04 helps · after it: 08, pass 1
#
# So far there was one memory and one worker. From here on a graph is spread over several: a CPU, a graphics card, perhaps a second one.
# Each has memory of its own, and whatever lies in the wrong one has to be copied.
#
# Afterwards you can say what a backend, a buffer type and a buffer are; predict what a copy costs; say which waits a correct program
# needs; and know the three questions by which ggml's scheduler finds out who can do what. You need no graphics card: ours are *simulated*.
# They compute with the real kernels, in memory that only they can reach, and in a time of their own that is the same on every machine.

# %% tags=["setup"]
import itertools

import numpy as np

import workbench as wb
from workbench import devices, lessons, views, widgets
from workbench.devices.backend import HOST_HANDED_IN, batch_size
from workbench.trace import Trace

lesson = lessons.open_lesson("07")
state = lesson.state

# %% [markdown]
# ## 1 · Whose memory is it? · 6 min
#
# A **backend** computes. A **buffer type** is a kind of memory; a **buffer** is one piece of it. A tensor, as before, is a description,
# which now points to a place in some buffer.

# %%
card, cpu = state.machine("rtx3090-pcie4")
rows = [(b.name, b.device_type.value, b.buffer_type.name, b.buffer_type.alignment, b.buffer_type.is_host,
         f"{b.speed.memory:.0f}", f"{b.speed.flops:,.0f}") for b in (card, cpu)]
views.table(["backend", "kind", "its buffer type", "tensors start at multiples of", "host sees it",
             "memory, GB/s", "products, GFLOP/s"], rows,
            "A simulated RTX 3090 and its host. The card's memory is 13 times as fast, "
            "and out of the host's sight.")

# %% [markdown]
# Does *this* machine have a real card? Then the same code drives it, through CuPy; where there is none, you read why, and nothing is lost.

# %% tags=["device", "nbval-ignore-output"]
why = devices.cuda.why_not()
print(f"SKIPPED, no real card: {why}" if why else f"here is one: {wb.CudaBackend()}")

# %% [markdown]
# Now a tensor of four numbers gets a place in a fresh piece of the simulated card's memory. Nobody writes to it.

# %% tags=["predict"]
lesson.predict("fresh")

# %%
x = state.placed(card.buffer_type, 4)
seen = x.numpy()
print("bytes:", x.storage.read(0, 16).tobytes().hex(" "))
try:
    x.storage.host_bytes()
except wb.errors.StorageError as error:
    print(error)

# %% tags=["reveal"]
card, cpu = state.machine("rtx3090-pcie4")
seen = state.placed(card.buffer_type, 4).numpy()
lesson.reveal("fresh", "nan" if np.isnan(seen).all() else "zeros" if not seen.any() else "numbers")

# %% [markdown]
# So `x.numpy()` is not a look but a *copy*, and it took time. Whose time? The virtual clock's:

# %%
card, cpu = state.machine("rtx3090-pcie4")
there, here = state.placed(card.buffer_type, 4), state.placed(cpu.buffer_type, 4)
rows = [(t.storage.name, state.elapsed(card, t.numpy)) for t in (there, here)]
views.table(["memory", "ns until the host has the four numbers"], rows,
            "Sixteen bytes from the card cost ten microseconds; from host memory, nothing.")

# %% [markdown]
# ## 2 · Places and purposes · 5 min
#
# A buffer type also has an *alignment*: where a tensor may start. In ggml it is 128 bytes on a card; ours has 32 on the CPU. Three
# tensors in one buffer, one behind the other:

# %%
card, cpu = state.machine("rtx3090-pcie4")
rows = []
for kind in (cpu.buffer_type, card.buffer_type):
    at, sizes, starts = 0, (10, 65, 300), []
    for n in sizes:
        starts.append(at)
        at = -(-(at + 4 * n) // kind.alignment) * kind.alignment
    rows.append((kind.name, ", ".join(map(str, starts)), 4 * sum(sizes), at))
views.table(["buffer type", "tensors of 40, 260 and 1,200 bytes start at", "their bytes", "buffer"], rows,
            "Alignment costs a little memory, and a little more on a card.")

# %% [markdown]
# And each buffer says what it is for, its *usage*: `weights`, `compute` (results, given by the planner of lesson 04), or `any`. Here is
# `y = w x + b`: the weight `w` lies on the card, the bias `b` on the host, and a scheduler places the two nodes. We do it twice. The only
# difference is the usage of the buffer that holds `b`.

# %% tags=["predict"]
lesson.predict("usage")

# %%
rows, ran = [], {}
for usage in (wb.Usage.ANY, wb.Usage.WEIGHTS):
    scheduler, graph = state.bias(usage)
    scheduler.split(graph)
    where = {t.name: scheduler.backend_of(t).name for t in graph.nodes}
    ran[usage] = where["y"]
    rows.append((usage.value, where["wx"], where["y"], len(scheduler.splits)))
views.table(["usage of b's buffer", "w x runs on", "+ b runs on", "splits"], rows,
            "Same tensor, same memory, same bytes. Only the word on the buffer differs.")

# %% tags=["reveal"]
runs = [state.placement(usage)["y"] for usage in (wb.Usage.ANY, wb.Usage.WEIGHTS)]
lesson.reveal("usage", "place" if runs[0] != runs[1] else "nothing", any=runs[0], weights=runs[1])

# %% [markdown]
# ## 3 · What a copy costs · 10 min
#
# Eight MiB have to go from the host to the card, first in one piece, then as 2,048 pieces of 4 KiB, one after another.

# %% tags=["predict"]
lesson.predict("pieces")

# %%
card, cpu = state.machine("rtx3090-pcie4")
latency, rate = card.speed.link_ns, card.speed.link           # ns; bytes in a ns, which are GB in a s
print(f"a copy takes {latency:,} ns, and {rate:.1f} bytes go over in each ns")
rows = []
for pieces in (1, 16, 256, 2048):
    predicted = pieces * (latency + 2**23 / pieces / rate)
    simulated = state.copy_ns("rtx3090-pcie4", 2**23, pieces)
    rows.append((f"µs for {pieces:,} of {2**23 // pieces:,} bytes",
                 round(predicted / 1000), round(simulated / 1000)))
views.side_by_side(rows, ("latency + bytes / bandwidth", "simulated"),
                   "Two numbers describe a copy. For small pieces only the first one counts.")

# %% tags=["reveal"]
one, many = (state.copy_ns("rtx3090-pcie4", 2**23, pieces) for pieces in (1, 2048))
lesson.reveal("pieces", round(many / one), one=round(one / 1000), many=round(many / 1000))

# %% [markdown]
# Latency and bytes weigh the same at *latency × bandwidth*. Below that size it hardly matters how much you copy, above it hardly how
# often. Where is that point, on three links?

# %%
sizes, curves, points = [2**i for i in range(2, 29)], {}, []
for name in ("rtx3090-pcie4", "laptop", "cpu"):
    speed = devices.cost.preset(name).speed
    curves[name] = [n / 1000 for n in sizes], [speed.transfer_ns(n) / 1000 for n in sizes]
    points.append(f"{name} {speed.link_ns * speed.link / 1000:,.0f} KB")
bends = ", ".join(points)
views.line_picture({"": curves}, f"Flat, then a slope. The bend: {bends}.",
                   f"Time of a copy over its bytes: flat at first, then rising. Bends: {bends}.",
                   "kilobytes", "µs (simulated)")

# %% [markdown]
# **Ordinary or pinned?** A card reads host memory by itself only where the system promises not to move it: *pinned* memory. Out of ordinary
# ("pageable") memory, such as a mapped model file, the driver first copies into a pinned piece of its own, and the caller stands by.

# %%
pinned, ordinary = (state.copy_ns("rtx3090-pcie4", 2**24, pinned=p) for p in (True, False))
preset = devices.cost.preset("rtx3090-pcie4")
rows = [("GB/s, pinned: PCIe 4.0 ×16 on paper → simulated", preset.figures["link"], 2**24 / pinned),
        ("ordinary / pinned: an RTX 5090, published → simulated", 9.6 / 32.4, pinned / ordinary)]
print("published:", preset.sources["pageable"].split(" (")[0])
views.side_by_side(rows, ("published", "simulated"),
                   "Real programs reach about 80% of what the standard promises. "
                   "Ordinary memory is far slower.")

# %% [markdown]
# Does the formula hold for real memory? On *your* machine two copies are timed, latency and bandwidth computed from them, and two larger
# ones predicted. This is memory to memory, and needs no card; where there is one, its link is timed as well.

# %% tags=["device", "nbval-ignore-output"]
rows = []
for name, sizes, times in state.measured_copies():
    rate = (sizes[1] - sizes[0]) / (times[1] - times[0])        # bytes in a µs
    rows += [(f"{name}, {n:,} bytes: µs", times[0] + (n - sizes[0]) / rate, t)
             for n, t in zip(sizes, times)]
views.side_by_side(rows, ("predicted from the first two", "executed here"),
                   "Yours will differ. A ratio far above one: these bytes no longer fit a cache, "
                   "and come from slower memory. " + state.no_card())

# %% [markdown]
# **What if?** Choose the machine, how much, in how many pieces, out of which memory. Run A is the one before.

# %%
machines, kept = ["rtx3090-pcie4", "rtx3090-pcie3", "laptop", "a100"], {}

def what_if(machine, power, cuts, ordinary):
    size, pieces = 2**power, 2 ** min(cuts, power)
    ns = state.copy_ns(machines[machine], size, pieces, pinned=not ordinary)
    now = (machines[machine], f"{pieces:,} × {size // pieces:,}", round(ns / 1000, 1), f"{size / ns:.3f}")
    a, kept["last"] = kept.get("last", now), now
    return views.table(["run", "machine", "pieces × bytes", "µs", "GB/s"], [("A", *a), ("B", *now)],
                       "The bandwidth of the data sheet shows only with few, large pieces.")

_ = what_if(0, 23, 0, 0)
widgets.Knobs(knobs=[["machine", 0, 3, machines], ["bytes, as a power of 2", 2, 24, []],
                     ["pieces, as a power of 2", 0, 11, []], ["memory", 0, 1, ["pinned", "ordinary"]]],
              values=[0, 23, 11, 0]).drive(what_if)

# %% [markdown]
# ## 4 · Asked for is not done · 9 min
#
# `set_async` only *asks* for a copy: the card's **stream** does what it was asked for, in order, while the host goes on. So: the host
# fills pinned memory with ones and asks for a copy. In the next line it fills the same memory with twos. Then it waits.

# %% tags=["predict"]
lesson.predict("overwrite")

# %%
def overwritten(pinned):
    card, cpu = state.machine("rtx3090-pcie4")
    there = state.placed(card.buffer_type, 1024)
    kind = cpu.buffer_type if pinned else HOST_HANDED_IN
    here = kind.alloc_buffer(4096).host_bytes().view(np.float32)
    here[:] = 1
    asked = state.elapsed(card, lambda: card.set_async(there, here.view(np.uint8)))
    here[:] = 2
    card.synchronize()
    return asked, there.numpy()[0]

rows = [(name, *overwritten(pinned)) for name, pinned in (("pinned", True), ("ordinary", False))]
views.table(["host memory", "ns that asking took the host", "what arrived"], rows,
            "From pinned memory the card takes what is there when it gets to it.")

# %% tags=["reveal"]
lesson.reveal("overwrite", "twos" if overwritten(pinned=True)[1] == 2 else "ones")

# %% [markdown]
# That is why ggml's scheduler copies what the *user* may overwrite at once, and waits (lesson 13).
#
# What asking is good for: six layers, each of which needs a weight that lies on the host. One stream copies, computes, copies, computes. With
# a second stream for copies, the next weight comes over while this one is used. An **event** is the traffic light between two streams: *record*
# it in one, *wait* for it in the other.

# %%
shapes, lanes, spans, times = [(256, 256, 2048)] * 6, [], [], []
for name, ahead in (("one stream", False), ("two streams", True)):
    card, cpu = state.machine("laptop", trace=(trace := Trace("virtual")))
    layers = state.layers([card, cpu], shapes, n_slots=2)
    times.append(state.stream(card, layers, n_slots=2, ahead=ahead))
    assert all(state.right(layers))
    found, names = state.spans(trace, times[-1])
    spans += [(lane + len(lanes), *rest) for lane, *rest in found]
    lanes += [f"{name}: {lane}" if ahead else name for lane in names]
share = times[1] / times[0]
views.lane_picture(spans, lanes, f"Both are right. On two streams it takes {share:.0%} of the time.",
                   "Work over time: on one stream copies and layers alternate, on two they overlap.",
                   "µs (virtual)")

# %% [markdown]
# Both times can be predicted from the cost of a copy, C, and of a layer, L. Here L is longer, so copies hide behind it:

# %%
card, cpu = state.machine("laptop")
layers = state.layers([card, cpu], [(256, 256, 2048)] * 6, n_slots=2)
copies, computes = state.costs(card, layers)
assert computes[0] > copies[0]
plain, ahead = (state.stream(card, layers, 2, ahead=a) for a in (False, True))
views.side_by_side([("µs, one stream: 6 (C + L)", sum(copies + computes) / 1000, plain / 1000),
                    ("µs, two streams: C + 6 L", (copies[0] + sum(computes)) / 1000, ahead / 1000)],
                   ("predicted", "simulated"), "A hidden copy is not free: it must fit behind the work.")

# %% [markdown]
# There are two *slots* on the card, so the third weight overwrites the first. Its copy waits for an event: "layer 0 is done". Suppose that one
# wait is forgotten.

# %% tags=["predict"]
lesson.predict("forgotten")

# %%
rows = []
for wait in (True, False):
    card, cpu = state.machine("laptop")
    layers = state.layers([card, cpu], [(256, 256, 2048)] * 6, n_slots=2)
    ns = state.stream(card, layers, n_slots=2, wait=wait)
    said = ["right" if right else "WRONG" for right in state.right(layers)]
    rows.append(("yes" if wait else "no", ns / 1000, *said))
views.table(["waits for the reader", "µs", *(f"layer {i}" for i in range(6))], rows,
            "Same time, no error, most results right. Two layers computed with bytes of another weight.")

# %% tags=["reveal"]
card, cpu = state.machine("laptop")
layers = state.layers([card, cpu], [(256, 256, 2048)] * 6, n_slots=2)
state.stream(card, layers, n_slots=2, wait=False)
n_wrong = state.right(layers).count(False)
lesson.reveal("forgotten", "some" if 0 < n_wrong < 6 else "all" if n_wrong else "none", wrong=n_wrong)

# %% [markdown]
# ## 5 · Three questions · 8 min
#
# A scheduler knows nothing about hardware. It asks each backend three questions. First: **`supports_op`**, can you compute this node?
# `BLAS` is an accelerator that works on host memory and multiplies large matrices, nothing else.

# %%
backends = state.machine("rtx3090-pcie4,blas,cpu", deny_ops=["SOFT_MAX"])
nodes = state.sample_nodes(backends[-1].buffer_type)
rows = []
for name, node in nodes.items():
    reasons = filter(None, (b.why_unsupported(node) for b in backends))
    rows.append((name, *(b.supports_op(node) for b in backends), "; ".join(reasons)))
views.table(["node", *(b.name for b in backends), "why not"], rows,
            "The answer depends on op, types and shapes. This card has no softmax, for practice.")

# %% [markdown]
# Second: **`supports_buft`**, can your kernels work on memory of this type? Pinned memory is the host's, and the card reads it fast.

# %% tags=["predict"]
lesson.predict("pinned")

# %%
kinds = {"the card's": backends[0].buffer_type, "the host's, pinned": backends[-1].buffer_type,
         "a mapped file": HOST_HANDED_IN}
rows = [(name, *(b.supports_buft(kind) for b in backends)) for name, kind in kinds.items()]
views.table(["memory", *(b.name for b in backends)], rows, "Every 'no' is a copy for the scheduler.")

# %% tags=["reveal"]
card, blas, cpu = state.machine("rtx3090-pcie4,blas,cpu")
lesson.reveal("pinned", "yes" if card.supports_buft(cpu.buffer_type) else "no")

# %% [markdown]
# Third: **`offload_op`**. A weight lies on the host. The CPU can compute there; or the card fetches the weight at *every* run, and computes
# faster. The question to a card is: would you take this on? Here is a matrix of Llama 3 8B, 4,096 × 14,336 in f16, and pinned. The link brings
# 25 GB in a second, and the CPU does 512 billion operations in that time. From how many tokens on should a card say yes?

# %% tags=["predict"]
lesson.predict("offload")

# %%
card, cpu = state.machine("rtx3090-pcie4")
rows = []
for tokens in (1, 8, 16, 32, 64, 128):
    runs = [(False, True), (True, True), (True, False)]
    us = [round(state.offload_us(tokens, on_card, pinned)) for on_card, pinned in runs]
    y = state.product(devices.HOST_MEMORY, tokens, k=64, n=64).nodes[0]
    rows.append((tokens, *us, card.offload_op(y)))
head = ["tokens", "CPU, µs", "card, from pinned, µs", "card, from pageable, µs", "offload_op says"]
views.table(head, rows,
            "Simulated. Fetching costs the same for one token as for a hundred; the CPU's work grows.")

# %% [markdown]
# A formula needs no run. For each weight and token the CPU does two operations; for each weight the card fetches two bytes. So both take the
# same time at a number of tokens that is just the CPU's speed over the link's:

# %%
card, cpu = state.machine("rtx3090-pcie4")
speed = cpu.speed.flops_of["f16"]
rows = [("tokens, pinned", speed / card.speed.link, state.break_even(pinned=True)),
        ("tokens, pageable", speed / card.speed.pageable, state.break_even(pinned=False)),
        ("tokens, the rule of ggml against pinned", 32, state.break_even(pinned=True))]
views.side_by_side(rows, ("formula or rule", "simulated: pays from"),
                   "ggml's 32 lies between pinned and pageable: a rule of thumb for all machines.")

# %% tags=["reveal"]
first = state.break_even(pinned=True)
lesson.reveal("offload", "tens" if 8 < first < 64 else "few" if first <= 8 else "hundreds", first=first)

# %% [markdown]
# In ggml the number is 32 for every card and link (`GGML_OP_OFFLOAD_MIN_BATCH`), and what counts as "tokens" depends on the op:

# %%
card, cpu = state.machine("rtx3090-pcie4")
rows = [(name, "×".join(map(str, node.ne)), batch_size(node), card.offload_op(node))
        for name, node in state.sample_nodes(cpu.buffer_type).items()]
views.table(["node", "result", "counted batch", "offered"], rows,
            "Rows of a product; tokens, not experts, of mul_mat_id; zero where rows are only looked up.")

# %% [markdown]
# ## 6 · Who comes first · 3 min
#
# A scheduler's list of backends is an order of *priority*. The last one must be a CPU, which can compute everything:

# %%
card, cpu = state.machine("rtx3090-pcie4")
try:
    wb.Scheduler([cpu, card])
except wb.errors.ParameterError as error:
    print(error)

# %% [markdown]
# A weight in host memory, 64 tokens, three backends in this order: a card that would gladly offload, BLAS, the CPU.

# %% tags=["predict"]
lesson.predict("first")

# %%
rows = []
for names in ("cpu", "blas,cpu", "rtx3090-pcie4,cpu", "rtx3090-pcie4,blas,cpu"):
    backends = state.machine(names)
    rows.append((", ".join(b.name for b in backends), *(state.who(names, tokens) for tokens in (1, 64))))
views.table(["backends, by priority", "1 token: product runs on", "64 tokens"], rows,
            "First: who works on this memory and supports the op? "
            "Only where that is the CPU: who would offload?")

# %% tags=["reveal"]
lesson.reveal("first", state.who("rtx3090-pcie4,blas,cpu", 64))

# %% [markdown]
# ## 7 · A run, call by call · 3 min
#
# The running program of the next lessons: six steps, A B C | D | E F. The weight of A lies on the card; only the CPU can do D. Step through the
# calls that the host makes: →, or *n* for the next copy.

# %%
trace = state.chain_run()
widgets.step_run(trace, "A B C | D | E F, call by call", "Three copies cross the link: x, C and D.")

# %%
moved = state.chain_copies(trace)
card_ns, sync = devices.cost.GPU.transfer_ns, len([e for e in trace.of("sync") if e.end > e.start])
views.table(["what", "from", "to", "bytes", "µs by formula"],
            [(name, a, b, n, card_ns(n) / 1000) for name, a, b, n in moved],
            f"A KiB each: all latency. {sync} times the host had to wait for the card.")

# %% [markdown]
# ## 8 · Your turn · 5 min
#
# **Tier 1.** Predict a transfer: `nbytes` in equal pieces, one after another.

# %% tags=["exercise", "tier-1"]
def transfer_us(nbytes, pieces, latency_ns, rate):
    """Microseconds; rate: bytes in a nanosecond."""
    raise NotImplementedError

# %% tags=["solution"]
def transfer_us(nbytes, pieces, latency_ns, rate):
    """Microseconds; rate: bytes in a nanosecond."""
    return (pieces * latency_ns + nbytes / rate) / 1000

# %% tags=["wrong"]
def transfer_us(nbytes, pieces, latency_ns, rate):
    return (latency_ns + nbytes / rate) / 1000

# %% tags=["wrong"]
def transfer_us(nbytes, pieces, latency_ns, rate):
    return pieces * (latency_ns + nbytes / rate) / 1000

# %% tags=["check"]
cases = [(name, 2**size, 2**cuts) for name, size, cuts in
         itertools.product(("rtx3090-pcie4", "laptop"), (12, 20, 24), (0, 6))]
speeds = {name: devices.cost.preset(name).speed for name, _, _ in cases}
on = [(n, pieces, speeds[name].link_ns, speeds[name].link) for name, n, pieces in cases]
expected = [state.copy_ns(*case) / 1000 for case in cases]
steps = [f"{n:,} bytes in {p} to {name}" for name, n, p in cases]
lesson.check("transfer", transfer_us, expected, on, steps, tolerance=1e-3)

# %% [markdown]
# **Tier 2.** Who gets a node whose weight lies in memory of type `kind`? The first backend, by priority, that works on this memory and
# supports the node; -1 if there is none. This is the heart of pass 1.

# %% tags=["exercise", "tier-2"]
def by_memory(backends, kind, node):
    """The index of the backend. Ask them: b.supports_buft(kind), b.supports_op(node)."""
    raise NotImplementedError

# %% tags=["solution"]
def by_memory(backends, kind, node):
    """The index of the backend. Ask them: b.supports_buft(kind), b.supports_op(node)."""
    for i, b in enumerate(backends):
        if b.supports_buft(kind) and b.supports_op(node):
            return i
    return -1

# %% tags=["wrong"]
def by_memory(backends, kind, node):
    return next((i for i, b in enumerate(backends) if b.buffer_type is kind), -1)

# %% tags=["wrong"]
def by_memory(backends, kind, node):
    return next((i for i, b in enumerate(backends) if b.supports_op(node)), -1)

# %% tags=["check"]
on, expected, steps = state.memory_questions()
lesson.check("by-memory", by_memory, expected, on, steps)

# %% [markdown]
# **Tier 3.** Layers on two streams. Copies run one after another, and so do layers. Layer *i* waits for its copy; copy *i* waits until layer
# *i − slots* is done, whose place it takes. When does the last layer end?

# %% tags=["exercise", "tier-3"]
def last_end(copies, layers, slots):
    """copies, layers: how long each takes, in order; everything starts at 0."""
    raise NotImplementedError

# %% tags=["solution"]
def last_end(copies, layers, slots):
    """copies, layers: how long each takes, in order; everything starts at 0."""
    copied, ends = 0, []
    for i, (copy, layer) in enumerate(zip(copies, layers)):
        copied = max(copied, ends[i - slots] if i >= slots else 0) + copy
        ends.append(max(copied, ends[-1] if ends else 0) + layer)
    return ends[-1]

# %% tags=["wrong"]
def last_end(copies, layers, slots):
    return copies[0] + sum(layers)

# %% tags=["wrong"]
def last_end(copies, layers, slots):
    copied = end = 0
    for copy, layer in zip(copies, layers):
        copied += copy
        end = max(copied, end) + layer
    return end

# %% tags=["check"]
on, expected, steps = state.streams()
lesson.check("streams", last_end, expected, on, steps)

# %% [markdown]
# ## 9 · What is what, and what comes next · 1 min
#
# | here | in ggml | left out here |
# |---|---|---|
# | `Backend`, `devices.DeviceType` | `ggml_backend_t`, `ggml_backend_dev_t` | registries; a device and its backend are two objects there |
# | `BufferType`, `Buffer` | `ggml_backend_buffer_type_t`, `ggml_backend_buffer_t` | split buffers over several cards |
# | `Usage.WEIGHTS`, `COMPUTE`, `ANY` | `GGML_BACKEND_BUFFER_USAGE_*` | – |
# | `tensor.set`, `.numpy()` | `ggml_backend_tensor_set`, `_get` | – |
# | `set_async`, `copy_async`, `synchronize` | `ggml_backend_tensor_set_async`, `_copy_async`, `ggml_backend_synchronize` | – |
# | `Event` | `ggml_backend_event_t` | – |
# | `card.prefetch` | none: ggml copies on the stream that computes | ExpertFlow wants it (lesson 21) |
# | `supports_op`, `supports_buft`, `offload_op` | the same with `ggml_backend_` | – |
# | `SimulatedDevice` | none | CUDA's several streams for independent branches |
#
# **Next, 08:** the scheduler puts these questions to a whole graph. Pass 1 looks at memory, inputs and weights, and at nothing else.
