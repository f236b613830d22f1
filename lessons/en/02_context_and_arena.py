# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 02 · Context and arena
#
# **45 minutes** · before it: 01, tensors · after it: 03, the graph
#
# Lesson 01 ended with a transpose that cost 368 bytes. They came from an *arena*: one piece of memory, filled from front to back,
# given back all at once. ggml calls it a context. Afterwards you can say how large an arena must be before you make it, describe a
# model without holding it (`no_alloc`), and name the two classic accidents, the tensor that outlives its arena and the run
# that only seems to succeed.
#
# The network below is our guinea pig: two layers, five leafs, five results. `w @ x` is ggml's `mul_mat`; `wb.build(out)` collects
# what `out` depends on into a graph, `wb.compute(graph)` runs it (lesson 03 opens both). Sections can be run in any order after
# this cell.

# %% tags=["setup"]
import numpy as np

import workbench as wb
from workbench import lessons, ops, views, widgets

lesson = lessons.open_lesson("02")
state = lesson.state

def mlp(ctx, hidden=32):
    """out = w2 @ silu(w1 @ x + b1) + b2, every tensor in `ctx`."""
    x, w1 = ctx.new_tensor("f32", 8, 1, name="x"), ctx.new_tensor("f32", 8, hidden, name="w1")
    b1, w2 = ctx.new_tensor("f32", hidden, 1, name="b1"), ctx.new_tensor("f32", hidden, 8, name="w2")
    b2 = ctx.new_tensor("f32", 8, 1, name="b2")
    return (w2 @ ops.silu(w1 @ x + b1) + b2).named("out")

# %% [markdown]
# ## 1 · What a tensor costs · 4 min
#
# Make one tensor of eight f32 numbers, 32 bytes of data, in an arena of its own, and ask the arena how much of it is in use.

# %% tags=["predict"]
lesson.predict("cost")

# %%
ctx = wb.Context(mem_size=4096, name="first")
x = ctx.new_tensor("f32", 8, name="x")
parts = [("header of the object", 32), ("description: type, ne, nb, op, src, name, …", 336),
         ("data: 8 × 4", 32)]
assert sum(size for _, size in parts) == ctx.used_mem
views.table(["part", "bytes"], [*parts, ("in use", ctx.used_mem)],
            "A small tensor is nearly all description.")

# %% tags=["reveal"]
ctx = wb.Context(mem_size=4096)
x = ctx.new_tensor("f32", 8)
lesson.reveal("cost", ctx.used_mem, data=x.nbytes, overhead=ctx.used_mem - x.nbytes)

# %% [markdown]
# Taking memory from an arena is one addition: remember how far it is filled, move on. No search, no list of free pieces, no fragments.
# The price: single objects cannot be given back.
#
# ## 2 · Watch it fill · 6 min
#
# A cell is 16 bytes. H is the header of an object, T its description, D its data; a small d shares its cell with padding. Step with → ←
# Home End and watch which objects have a D.

# %%
ctx = wb.Context(mem_size=3072, name="small")
x = ctx.new_tensor("f32", 8, 1, name="x")
w = ctx.new_tensor("f32", 8, 4, name="w")
s = ctx.new_tensor("f32", 1, name="scale")
halves = x.reshape(4, 2).named("halves")
y = (w @ x).named("y")
graph = wb.CGraph(ctx, size=8, name="graph")
trace = views.arena_steps(ctx)
assert all(b.offset == a.offset + a.size + 32 for a, b in zip(ctx.objects, ctx.objects[1:]))   # no gaps
widgets.Stepper(trace, "One behind the other, in the order of making: pale is overhead, strong is data. "
                "The view halves has no data of its own.")

# %% [markdown]
# Two things may surprise. `y` already has its 16 bytes although nothing was computed: calling an operation lays out its result. And the
# graph lives in the same arena as its tensors.
#
# ## 3 · How large must it be? · 8 min
#
# Each object: 32 for the header, then its content, rounded up to a multiple of 16. For a tensor that is 368 + the padded
# data; in Python, `-(-n // 16) * 16` rounds n up. The formula, this package, and what `ggml_used_mem` said in real ggml, where the same
# steps were recorded:

# %%
rows, used = [], 0
ctx = wb.Context(name="as in ggml")
for what, data, recorded in state.replay(ctx):
    used += 32 + -(-(336 + data) // 16) * 16
    assert used == ctx.used_mem == recorded
    rows.append((what, data, used, ctx.used_mem, recorded))
views.table(["after", "data", "formula", "here", "ggml"], rows, "Eleven objects, equal to the byte.")

# %% [markdown]
# So a size can be known beforehand. The article that many learn ggml from gives a network like ours 16 MiB. What does it need, with its
# graph? And what do 63 weights of a real model cost, whose data lie in a file?

# %%
ctx = wb.Context(name="guinea pig")
out = mlp(ctx)
graph = wb.CGraph(ctx).build_forward_expand(out)
data = sum(4 * n for n in (8, 8 * 32, 32, 32 * 8, 8, 32, 32, 32, 8, 8))
lists = 82_608                               # ggml_graph_overhead: a graph for up to 2,048 nodes
weights = state.model.context
rows = [("network, 10 tensors: 10 × 368 + data, used_mem", 10 * 368 + data, ctx.used_mem - lists),
        ("network and graph, used_mem", 10 * 368 + data + lists, ctx.used_mem),
        ("63 weights of tiny-mixtral: 63 × 368, used_mem", 63 * 368, weights.used_mem)]
assert all(a == b for _, a, b in rows)
views.side_by_side(
    rows, ("formula", "used_mem"), f"16 MiB would be {2**24 // ctx.used_mem} times what is needed. "
    f"{weights.used_mem:,} bytes describe {state.model.nbytes:,} bytes of weights.")

# %% [markdown]
# And if it is too small?

# %% tags=["predict"]
lesson.predict("full")

# %%
failed = ""
ctx = wb.Context(mem_size=4096, name="too small")
try:
    failed = "making a tensor"
    out = mlp(ctx)
    failed = "building the graph"
    graph = wb.build(out)
    failed = "computing"
    wb.compute(graph)
except wb.errors.ContextFull as error:
    print(f"while {failed}: {error}")

# %% tags=["reveal"]
lesson.reveal("full", failed, used=ctx.used_mem, room=ctx.mem_size, objects=len(ctx.objects))

# %% [markdown]
# The message names a size that would do for *this* object; the next one will ask for more. Better than trying again and again is a dry
# run: the same code in an arena that stores descriptions only, and then the formula.

# %%
dry = wb.Context(no_alloc=True, name="dry run")
mlp(dry)
size = sum(368 + -(-t.nbytes // 16) * 16 * (not t.is_view) for t in dry.tensors)
exact = wb.Context(mem_size=size, name="exact")
mlp(exact)
assert exact.used_mem == exact.mem_size == size
try:
    exact.new_tensor("i8", 1, name="last straw")
except wb.errors.ContextFull as error:
    print(exact, "\n", error)

# %% [markdown]
# ## 4 · `no_alloc`: descriptions without data · 8 min
#
# That dry run was no trick. llama.cpp makes nearly all of its contexts with `no_alloc=True`: weights lie in the file or on a GPU,
# results are placed by a planner (lesson 04). But such a context is full of promises.

# %%
kept = {}

def what_if(i):
    hidden = widths[i]
    full, bare = wb.Context(2**26, name="data"), wb.Context(2**26, no_alloc=True, name="no data")
    for ctx in (full, bare):
        mlp(ctx, hidden)
    now = (hidden, full.used_mem, bare.used_mem, f"{bare.used_mem / full.used_mem:.2%}")
    last, kept["last"] = kept.get("last", now), now
    return views.table(
        ["", "hidden width", "used with data", "used with no_alloc", "share of descriptions"],
        [("A", *last), ("B", *now)], "Descriptions cost the same for any width. The run before is A.")

widths = [8, 32, 128, 512, 2048, 8192]
_ = what_if(1)
widgets.Range(value=4, max=5, label="hidden width", names=[f"{w:,}" for w in widths]).drive(what_if)

# %% [markdown]
# Now the trap. Make the network in a `no_alloc` context and go on as if nothing were different. Which line is the first to fail?

# %% tags=["predict"]
lesson.predict("no_alloc")

# %%
ctx, first = wb.Context(no_alloc=True, name="promises"), "nothing"
try:
    step = "making the tensors"
    out = mlp(ctx)
    step = "building the graph"
    graph = wb.build(out)
    step = "printing the graph"
    print(graph.table())
    step = "computing"
    wb.compute(graph)
except wb.errors.NoDataError as error:
    first = step
    print(f"\n{step}: {error}")

# %% tags=["reveal"]
lesson.reveal("no_alloc", first, leaf=graph.leafs[0].name)

# %% [markdown]
# In C there is no such message: `data` is a null pointer, and the run either ends the process or, worse, goes on and gives numbers. The
# article calls it *false success* and describes its sign: the same prediction for every input.
#
# A close relative can be shown here too: memory that was given, but never written. In the next cell two different inputs come in, and
# somebody forgot to copy them into the tensor `x`.

# %%
leftover = bytearray(8192)                       # memory with a past
np.frombuffer(leftover, np.float32)[:] = 0.7
ctx = wb.Context(memory=leftover, name="second-hand")
out = mlp(ctx)
for values in (np.zeros(8), np.ones(8)):
    wb.compute(wb.build(out))                    # x.set(values) is missing
    print("input", values[:3], "… prediction", f"{out.numpy().ravel()[0]:.2f}")

# %% [markdown]
# Plausible, equal, and wrong. The mend, in this order: give memory, *write* it, run. Where the runner itself gives memory to an input, it
# fills it with NaN, so that what was forgotten shows.

# %%
ctx = wb.Context(no_alloc=True, name="promises kept")
out = mlp(ctx)
graph, runner = wb.build(out), wb.GraphRunner()
runner.prepare(graph)                            # 1: memory for every tensor
runner.run(graph)
print("memory, but never written:", out.numpy().ravel()[:3])
rng = np.random.default_rng(1)
for leaf in graph.leafs:
    leaf.set(rng.normal(size=leaf.shape))        # 2: written
runner.run(graph)                                # 3: run
assert np.isfinite(out.numpy()).all()
print("written:", [f"{v:.3f}" for v in out.numpy().ravel()[:3]])

# %% [markdown]
# ## 5 · Whose life ends when · 8 min
#
# Closing a context ends every tensor and graph in it. Nobody counts references: that is what makes it cheap.

# %%
with wb.Context(name="short-lived") as ctx:
    t = ctx.from_numpy([1.0, 2.0], name="t")
    print("inside:", t.numpy().tolist())
try:
    t.numpy()
except wb.errors.ContextClosed as error:
    print("outside:", error)

# %% [markdown]
# Python still holds the description `t`; its bytes are gone. In C the pointer would still point there: to the old numbers, to somebody
# else's, or to memory that is no longer the program's. This is *use after free*.
#
# From such accidents the article draws a rule: everything in one graph must come from one context. Is it ggml's rule?

# %% tags=["predict"]
lesson.predict("contexts")

# %%
def three_contexts():
    weights, inputs, compute = (wb.Context(name=name) for name in ("weights", "inputs", "compute"))
    w = weights.from_numpy(np.eye(4, dtype=np.float32), name="w")
    x = inputs.from_numpy(np.arange(4, dtype=np.float32), name="x")
    with compute.active():                       # new results go here, and it stays open afterwards
        y = ops.mul_mat(w, x).named("y")
    return weights, y, wb.build(y)

weights, y, graph = three_contexts()
wb.compute(graph)
rows = [(t.name, t.context.name, t.context.used_mem) for t in (*graph.leafs, *graph.nodes)]
views.table(["tensor", "context", "its bytes in use"], rows,
            f"One graph over three contexts gives {y.numpy().tolist()}.")

# %% tags=["reveal"]
weights, y, graph = three_contexts()
try:
    wb.compute(graph)
    outcome = "computes"
except wb.errors.WorkbenchError:
    outcome = "refused"
lesson.reveal("contexts", outcome, contexts=len({t.context for t in (*graph.leafs, *graph.nodes)}))

# %% tags=["predict"]
lesson.predict("closed")

# %% tags=["reveal"]
weights, y, graph = three_contexts()
weights.close()
try:
    wb.compute(graph)
    outcome = "computes"
except wb.errors.ContextClosed as error:
    outcome = "error"
    print(error)
lesson.reveal("closed", outcome)

# %% [markdown]
# So the article's rule is safe but too strict. The exact one: *every context that a graph touches must outlive its runs.* llama.cpp
# relies on it, with weights, KV cache and results in contexts of their own, because they live differently long:

# %%
graph, groups = state.step.graph, {}
for t in (*graph.leafs, *graph.nodes):
    groups.setdefault(t.context.name, []).append(t)
rows = [(name, len(ts), sum(not t.is_view for t in ts), ts[0].name) for name, ts in groups.items()]
views.table(["context", "tensors of one decode graph", "not views", "for example"], rows,
            f"{len(graph.leafs)} leafs and {len(graph.nodes)} nodes, from {len(rows)} contexts.")

# %% [markdown]
# ## 6 · Reset, and memory from outside · 4 min
#
# A context can also be emptied and used again. The memory stays, the filling starts at 0, and all earlier tensors are dead. A program
# that builds a small graph for every token needs either this or an arena without end.

# %%
growing, reused = wb.Context(name="growing"), wb.Context(name="reused")
rows = []
for token in range(4):
    reused.reset()
    for ctx in (growing, reused):
        out = mlp(ctx)
    rows.append((token, growing.used_mem, reused.used_mem))
old = reused.tensors[0]
reused.reset()
try:
    old.numpy()
except wb.errors.ContextClosed as error:
    print(error)
views.table(["token", "without reset", "with reset"], rows, "One arena grows with every token.")

# %% [markdown]
# And the memory can be yours: a bytearray, an mmap, a NumPy array. The arena takes no other, and what it writes is there.

# %%
mine = bytearray(1024)
ctx = wb.Context(memory=mine, name="mine")
t = ctx.from_numpy([1.5, 2.5, 3.5], name="t")
seen = np.frombuffer(mine, np.float32, count=3, offset=t.offset)
assert seen.tolist() == t.numpy().tolist()
print(f"byte {t.offset} of my own memory: {seen.tolist()}, arena of {ctx.mem_size:,} bytes")
for memory in (bytes(1024), bytearray(100)):
    try:
        wb.Context(memory=memory, name="unsuitable").new_tensor("f32", 1, name="t")
    except wb.errors.ContextError as error:
        print(type(error).__name__, "·", error)

# %% [markdown]
# ## 7 · Your turn · 5 min
#
# **Tier 1.** Size an arena: you are given the bytes of data of each tensor (0 for a view).

# %% tags=["exercise", "tier-1"]
def arena_bytes(data):
    """Bytes an arena needs for tensors with these bytes of data, in this order."""
    raise NotImplementedError

# %% tags=["solution"]
def arena_bytes(data):
    """Bytes an arena needs for tensors with these bytes of data, in this order."""
    return sum(368 + -(-n // 16) * 16 for n in data)

# %% tags=["wrong"]
def arena_bytes(data):
    return sum(368 + n for n in data)

# %% tags=["wrong"]
def arena_bytes(data):
    return sum(data)

# %% tags=["check"]
on, expected = [], []
for sizes in ([32], [4], [4, 0, 100], [8192, 1, 17, 0, 0, 333]):
    ctx = wb.Context()
    for n in sizes:
        ctx.tensors[0].reshape(ctx.tensors[0].n_elements) if n == 0 else ctx.new_tensor("i8", n)
    on.append((sizes,))
    expected.append(ctx.used_mem)
lesson.check("arena-bytes", arena_bytes, expected, on, [f"data {s}" for s, in on])

# %% [markdown]
# **Tier 2.** Be the arena: where does the data of each tensor begin, and what happens to one for which there is no room? (It is refused,
# and the arena stays as it was.)

# %% tags=["exercise", "tier-2"]
def offsets(mem_size, data):
    """For each tensor the byte where its data begins, or -1 if it found no room."""
    raise NotImplementedError

# %% tags=["solution"]
def offsets(mem_size, data):
    """For each tensor the byte where its data begins, or -1 if it found no room."""
    used, found = 0, []
    for n in data:
        size = 368 + -(-n // 16) * 16
        fits = used + size <= mem_size
        found.append(used + 368 if fits else -1)
        used += size * fits
    return found

# %% tags=["wrong"]
def offsets(mem_size, data):
    used, found = 0, []
    for n in data:
        size = 368 + -(-n // 16) * 16
        found.append(used + 368 if used + size <= mem_size else -1)
        used += size
    return found

# %% tags=["wrong"]
def offsets(mem_size, data):
    return [368 * (i + 1) + sum(data[:i]) for i in range(len(data))]

# %% tags=["check"]
on, expected = [(2048, [32, 32, 4, 64]), (1024, [16, 1000, 8, 8]), (1168, [400, 32, 16])], []
for mem_size, sizes in on:
    ctx, found = wb.Context(mem_size), []
    for n in sizes:
        try:
            found.append(ctx.new_tensor("i8", n).offset)
        except wb.errors.ContextFull:
            found.append(-1)
    expected.append(found)
lesson.check("offsets", offsets, expected, on, [f"arena of {m:,}, data {s}" for m, s in on])

# %% [markdown]
# **Tier 3.** Find the use after free. A program is a list of steps: `("make", tensor, context)`, `("view", tensor, of)`,
# `("use", tensor)`, `("reset", context)`, `("close", context)`. Views are made in the context of what they look at. These five will be
# asked:

# %%
rows = [(i, " · ".join(" ".join(step) for step in p)) for i, p in enumerate(state.programs)]
views.table(["", "program"], rows, "Capitals are contexts. Counting starts at 0, for steps too.")

# %% tags=["exercise", "tier-3"]
def first_fault(program):
    """Index of the first step that uses (or looks at) a dead tensor; -1 if there is none."""
    raise NotImplementedError

# %% tags=["solution"]
def first_fault(program):
    """Index of the first step that uses (or looks at) a dead tensor; -1 if there is none."""
    home = {}
    for i, (what, name, *more) in enumerate(program):
        if what == "make":
            home[name] = more[0]
        elif what in ("reset", "close"):
            home = {t: c for t, c in home.items() if c != name}
        elif (more[0] if what == "view" else name) not in home:
            return i
        elif what == "view":
            home[name] = home[more[0]]
    return -1

# %% tags=["wrong"]
def first_fault(program):
    closed, home = set(), {}
    for i, (what, name, *more) in enumerate(program):
        if what == "close":
            closed.add(name)
        elif what in ("make", "view"):
            home[name] = more[0] if what == "make" else home[more[0]]
        elif what == "use" and home[name] in closed:
            return i
    return -1

# %% tags=["check"]
on = [(p,) for p in state.programs]
expected = [state.run_program(p) for p in state.programs]
lesson.check("first-fault", first_fault, expected, on, [f"program {i}" for i in range(len(on))])

# %% [markdown]
# ## 8 · What is what, and what comes next · 2 min
#
# | here | in ggml | left out here |
# |---|---|---|
# | `Context` | `ggml_context`, made by `ggml_init` | `ggml_get_first_tensor` and its kin: see `ctx.tensors` |
# | `ctx.used_mem`, `ctx.mem_size` | `ggml_used_mem`, `ggml_get_mem_size` | nothing |
# | `ctx.objects` | `ggml_object`, a linked list inside the arena | links: ours is a Python list |
# | `ctx.reset()`, `ctx.close()` | `ggml_reset`, `ggml_free` | nothing; theirs leaves pointers dangling |
# | `memory=` | `mem_buffer` | nothing |
# | `TENSOR_OVERHEAD`, 368 | `ggml_tensor_overhead()` | the number is the same, our Python objects need more |
# | `ContextFull`, `ContextClosed`, `NoDataError` | a failed assertion, a crash, or nothing | |
# | `ctx.active()`, `with ctx:` | the `ctx` argument of every `ggml_*` call | |
#
# **Next, 03:** `wb.build(out)` was called often here and never opened. How does it find ten tensors from one, and in which order?
