# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 04 · Static or eager
#
# **50 minutes** · before it: 03, the graph · after it: 05, threads and the plan
#
# NumPy is *eager*: each call computes, takes memory for its result, and forgets why. A *static* graph is written down first, then planned,
# then run, often many times. Why does ggml take that trouble?
#
# Afterwards you can name the four bottlenecks of working call by call, plan memory by lifetimes and see how it packs, and say when a graph
# must be built again. Each section needs only the cell below.

# %% tags=["setup"]
import inspect
from functools import partial

import numpy as np

import workbench as wb
from workbench import lessons, views, widgets
from workbench.lessons.graph_states import LLAMA_3_8B, described, eager

lesson = lessons.open_lesson("04")
state = lesson.state
ACTIVATION = 64 * 256 * 4          # bytes of one result: 64 tokens, 256 f32 numbers each

# %% [markdown]
# ## 1 · The same network, twice · 6 min
#
# A stack of blocks, each of which adds its result to its own input: once call by call, once as a graph. Both functions are short, and almost
# the same:

# %%
print(inspect.getsource(eager))
print(inspect.getsource(described))

# %% tags=["predict"]
lesson.predict("arrays")

# %% [markdown]
# Arrays are counted as NumPy makes them. The planned graph gets its memory in `prepare`, before the first run. Then both are watched by
# Python's own `tracemalloc`: a run that never holds even one result more than before cannot have made one. (How much `prepare` takes is the
# question of section 3.)

# %%
stack = state.stack(n_blocks=4)
made = state.arrays_made(eager, stack.values, stack.arrays)
plan = wb.GraphRunner().prepare(stack.graph)
stack.x.set(stack.values)
plan.run()
assert np.allclose(stack.out.numpy(), eager(stack.values, stack.arrays), atol=1e-4)
peaks = [state.peak(eager, stack.values, stack.arrays) // ACTIVATION, state.peak(plan.run) // ACTIVATION]
views.table(["in results of 64 KiB", "call by call", "planned"], [
    ("new arrays in one run", len(made), peaks[1]), ("most held at once, beyond the input", *peaks)],
    "Same result, other housekeeping: the planned run takes nothing while it runs.")

# %% tags=["reveal"]
lesson.reveal("arrays", len(made), per_block=len(made) // 4)

# %% [markdown]
# Is it faster? Here it is a draw at best, since the products do nearly all the work and are the same. The times are of *your* machine:

# %% tags=["device", "nbval-ignore-output"]
rows = []
for tokens in (1, 16, 64):
    stack = state.stack(n_tokens=tokens)
    plan = wb.GraphRunner().prepare(stack.graph)
    stack.x.set(stack.values)
    by_call = state.milliseconds(partial(eager, stack.values, stack.arrays))
    planned = state.milliseconds(plan.run)
    rows.append((tokens, f"{by_call:.3f}", f"{planned:.3f}", f"{planned / by_call:.2f}"))
views.table(["tokens", "call by call, ms", "planned, ms", "ratio"], rows,
            "Planning pays in memory, and in what can be known; not in the arithmetic.")

# %% [markdown]
# ## 2 · Four bottlenecks · 5 min
#
# Call by call, four things stay out of reach, for one reason: nobody sees more than the present call.
#
# 1. **Memory**: when is a result used for the last time?
# 2. **Parallel work**: what does not depend on each other, and how is it best cut?
# 3. **Devices**: what has to be copied, and was it copied already?
# 4. **Debugging**: which results will there be, of which shape, used by whom?
#
# On the graph of a real decode step, each has a number *before* anything runs.

# %%
step = state.step()
nodes = step.graph.nodes
depth = {}
for t in nodes:
    depth[t] = 1 + max((depth.get(s, 0) for s in t.sources() if s is not t), default=0)
results = sum(t.nbytes for t in nodes if not t.is_view)
crossing = state.crossing(step, "experts")
views.table(["bottleneck", "in numbers", "call by call", "planned"], [
    ("memory", "bytes: a place for each, shared places", results, state.measure(step.graph)),
    ("parallel work", "longest chain of nodes", "unknown", f"{max(depth.values())} of {len(nodes)}"),
    ("devices", "copies, if experts run elsewhere", len(crossing), len(set(crossing))),
    ("debugging", "results known before the run", 0, len(nodes))],
    "Answered by looking at the graph: none of the 318 nodes was computed for this.")

# %% [markdown]
# The copies: call by call, each use that finds a tensor on the other side fetches it; from the graph one sees that three expert
# products want the same ids, and copies once. Lessons 08 to 13 do this in earnest.
#
# *A note on the article.* It counts parallel nodes among the gains of a graph, and says later that ggml runs one node after the other. That is so
# on the CPU: all threads share one node, then the next (lesson 05). CUDA can run independent branches on several streams.

# %%
wide = {}
for t in nodes:
    wide.setdefault(depth[t], []).append(t.name)
qkv = next(names for names in wide.values() if "Qcur-1" in names and "Kcur-1" in names)
print("At the same depth, so independent:", ", ".join(qkv))

# %% [markdown]
# ## 3 · Packing by lifetimes · 7 min
#
# Every result lives from its own computation to its last use, and both are known. So a place can be given away again. The planner
# (`ggml_gallocr`) walks the nodes in order: a result takes the smallest hole that is large enough, and leaves a hole after its last use.
#
# Our stack makes 20 results of 64 KiB, and there is the input.

# %% tags=["predict"]
lesson.predict("places")

# %% [markdown]
# Step through it. To the right runs time, node by node; upwards run addresses. In each step something is placed, taken over or freed.

# %%
steps = views.memory_steps(state.stack(n_blocks=2).graph, title="Packing two blocks")
widgets.Stepper(steps, "Three places are enough, however many blocks follow.")

# %%
stack = state.stack(n_blocks=4)
lives = state.lifetimes(stack.graph)
nodes = range(len(stack.graph.nodes))
alive = max(sum(size for a, b, size in lives if a <= i <= b) for i in nodes)
total, planned = sum(size for _, _, size in lives), state.measure(stack.graph)
runner = wb.GraphRunner()
runner.prepare(stack.graph)
views.side_by_side([
    ("a place for each → planned", total, planned),
    ("formula: most alive at once → planned", alive, planned),
    ("planned → really taken", planned, runner.allocator.buffer_size())],
    ("first", "second"),
    "A seventh of a place for each. Without in-place, no plan beats what is alive at once.")

# %% tags=["reveal"]
lesson.reveal("places", planned // ACTIVATION, all=total // ACTIVATION)

# %% [markdown]
# The same for 64 tokens through the Mixtral, 318 nodes. In every layer one result towers over the others: `kq`, the scores of attention, 256
# cells × 64 tokens × 4 heads. Jump from change to change with *n*.

# %%
steps = views.memory_steps(state.step(n_tokens=64), title="Packing the Mixtral, 64 tokens")
tallest = next(i for i, s in enumerate(steps["steps"]) if s["label"] == "place kq-0")
widgets.Stepper(steps, "Six layers, one pattern. The tall ones are the scores of attention.", k=tallest)

# %% [markdown]
# A packing is **valid** when no two tensors that are alive at the same time share a byte. One walk over the decisions checks it:

# %%
live = {}
for kind, t, *rest in state.decisions(state.stack().graph):
    if kind == "place":
        start, end = rest[2], rest[2] + rest[3]
        assert all(end <= a or b <= start for a, b in live.values())
        live[t] = (start, end)
    elif kind == "reuse":
        live[t] = live.pop(rest[0])
    elif kind == "free":
        del live[t]
print("valid, the stack:  ", state.disjoint(state.stack().graph))
print("valid, the Mixtral:", state.disjoint(state.step().graph))

# %% [markdown]
# ## 4 · In place · 4 min
#
# An op that works number by number may write over its source, when this is the last use and the layouts agree. What is
# that good for?

# %% tags=["predict"]
lesson.predict("in-place")

# %%
graph, other = state.step(n_tokens=64).graph, state.step(n_tokens=64).graph
state.without_in_place(other)
assert state.disjoint(graph) and state.disjoint(other)
with_it, without = state.measure(graph), state.measure(other)
work = [wb.statistics(g).total for g in (graph, other)]
reused = [sum(d[0] == "reuse" for d in state.decisions(g)) for g in (graph, other)]
views.side_by_side([
    ("results in place", *reused), ("operations", work[0].flops, work[1].flops),
    ("bytes read and written", work[0].moved, work[1].moved), ("bytes planned", with_it, without)],
    ("in place", "without"), "64 tokens through the Mixtral: the same work in less memory.")

# %% tags=["reveal"]
saves = "memory" if without > 1.2 * with_it and work[0] == work[1] else "nothing"
lesson.reveal("in-place", saves, ratio=round(without / with_it, 2), saved=without - with_it)

# %% [markdown]
# And where an op *could* work in place but may not, the planner has one of three reasons:

# %%
refused = {}
for kind, t, *rest in state.decisions(state.step(n_tokens=64).graph):
    if kind == "refuse":
        refused.setdefault(rest[1], []).append(f"{t.name} over {rest[0].name}")
rows = [(why, len(pairs), pairs[0]) for why, pairs in sorted(refused.items())]
views.table(["refused because", "times", "for example"], rows,
            "Another shape, a view, a later use: then the result gets a place of its own.")

# %% [markdown]
# ## 5 · A model of 16 GB · 4 min
#
# A plan needs shapes, no weights. So plan Llama 3 8B for a batch of 512 tokens. Here is its memory with 32 layers; what would 64 layers take?

# %%
steps = {n: state.dense_step(n, n_tokens=512) for n in (32, 64)}
mib = {n: state.measure(step.graph) / 2**20 for n, step in steps.items()}
print(f"32 layers: {mib[32]:.1f} MiB")

# %% tags=["predict"]
lesson.predict("layers")

# %%
assert all(state.disjoint(step.graph) for step in steps.values())
all_of = {n: sum(t.nbytes for t in s.graph.nodes if not t.is_view) for n, s in steps.items()}
formula = 512 * (LLAMA_3_8B.n_vocab + LLAMA_3_8B.n_embd) * 4 / 2**20
views.side_by_side([
    ("32 layers: a place for each → planned", round(all_of[32] / 2**20), mib[32]),
    ("64 layers: a place for each → planned", round(all_of[64] / 2**20), mib[64]),
    ("formula: logits and their source → planned", formula, mib[32]),
    ("planned → in llama.cpp's log", mib[32], state.recorded["log_8b"]["compute_mib_512"])],
    ("first, MiB", "second, MiB"),
    "The peak comes at the very end, with the logits. llama.cpp prints the same.")

# %% tags=["reveal"]
lesson.reveal("layers", round(mib[64] / mib[32], 3))

# %% [markdown]
# ## 6 · What if? · 4 min
#
# Turn the knob and watch the peak. Each move builds and plans the graph again. Run A is the one before.

# %%
cases = {
    "1 token": lambda: state.step().graph,
    "64 tokens": lambda: state.step(n_tokens=64).graph,
    "64, nothing in place": lambda: state.without_in_place(state.step(n_tokens=64).graph),
    "64, layer outputs kept": lambda: state.keep(state.step(n_tokens=64).graph, "l_out"),
    "64, everything kept": lambda: state.keep(state.step(n_tokens=64).graph, ""),
    "64, three layers": lambda: state.step(n_tokens=64, n_layer=3).graph}

# %%
def what_if(i):
    name = list(cases)[i]
    graph = cases[name]()
    assert state.disjoint(graph)
    planned, total = state.measure(graph), sum(t.nbytes for t in graph.nodes if not t.is_view)
    return {"case": name, "nodes": len(graph.nodes), "a place for each, bytes": total,
            "planned, bytes": planned, "times less": f"{total / planned:.1f}"}

widgets.Range(value=3, max=5, label="the Mixtral with", names=list(cases)).compare(
    what_if, "Layers cost nothing; what is kept costs its size.", first=1)

# %% [markdown]
# ## 7 · Run it again · 3 min
#
# Build once, run many. So run the stack twice, and set its input only before the first run:

# %% tags=["predict"]
lesson.predict("again")

# %%
stack = state.stack()
runner = wb.GraphRunner()
runner.prepare(stack.graph)
outputs = []
for write in (True, False, True):
    if write:
        stack.x.set(stack.values)
    runner.run(stack.graph)
    outputs.append(stack.out.numpy().copy())
said = ["as the first" if (o == outputs[0]).all() else "differs" for o in outputs]
views.table(["run", "input", "result"], zip((1, 2, 3), ("set", "not set", "set"), said),
            "An input's place is given away after its last use. Write inputs before every run.")

# %% tags=["reveal"]
lesson.reveal("again", "differs" if said[1] == "differs" else "same")

# %% [markdown]
# ## 8 · Build once, run many · 8 min
#
# The article of lesson 03 gives two pieces of advice. "Build a new graph for each run; building costs next to nothing." And: "Never build in the hot
# loop; build when the model is loaded." They cannot both be right. First, what does our session do? A prompt of 12 tokens, then 300 new ones,
# one by one, in a context of 512.
#
# One thing grows: attention reads a cell of the cache for each token so far, and a graph's shapes are fixed. The trick is *padding*: a
# graph looks at a multiple of 256 cells, and a mask hides those that hold nothing yet. Two questions, then the run:

# %% tags=["predict"]
lesson.predict("every")

# %% tags=["predict"]
lesson.predict("shape")

# %%
run = state.long_run
rows = [r.values() for r in run if r["tokens"] in (12, 13, 14, 256, 257, 258, 312)]
views.table(["tokens", "visible cells n_kv", "graphs built", "reused", "plans"], map(tuple, rows),
            "Two graphs before a new token (one only measures memory), then one at 13, one at 257.")

# %% tags=["reveal"]
lesson.reveal("every", run[-1]["builds"] - run[0]["builds"], reused=run[-1]["reuses"])

# %% [markdown]
# So the graph is *not* quite static. How many there will be follows from the lengths alone:

# %%
padded = {-(-n // 256) * 256 for n in range(13, 313)}         # the sizes that 300 tokens meet
builds, reuses = (run[-1][what] - run[0][what] for what in ("builds", "reuses"))
views.side_by_side([("graphs built", len(padded), builds), ("graphs reused", 300 - len(padded), reuses)],
                   ("predicted", "counted"), "Padding turns 300 lengths into 2 shapes.")

# %% tags=["reveal"]
lesson.reveal("shape", "another" if run[-1]["builds"] > run[100]["builds"] else "same")

# %% [markdown]
# Now settle it: what would a token cost if everything were built again? Times of your machine, for the small model, and for the shapes of
# Llama 3 8B, whose run is *estimated* as reading 16 GB at 20 GB per second.

# %% tags=["device", "nbval-ignore-output"]
small, large = state.shares(), state.shares_8b(bytes_per_second=20e9)
rows = [(what, f"{small[what]:.1f}", f"{large[what]:.1f}") for what in small]
shares = [f"{1 - times['run'] / sum(times.values()):.0%}" for times in (small, large)]
views.table(["ms per token", "tiny Mixtral", "Llama 3 8B"], [*rows, ("all but running", *shares)],
            "Most of a small model's token, a fraction of a large one's: both are right.")

# %% [markdown]
# Building costs by the node; running costs by the byte. Llama 3 8B has two thousand times as many bytes, and not four times as many nodes. So
# for large models and long batches rebuilding hardly shows; for small models and short requests it is most of the time. llama.cpp once rebuilt at every token. Today
# it asks `can_reuse`, and prints at the end how many graphs it reused.

# %%
print(f"graphs reused = {reuses} of 300")

# %% [markdown]
# ## 9 · Your turn · 7 min
#
# **Tier 1.** No plan can do with less than the most that is alive at once. How much is that?

# %% tags=["exercise", "tier-1"]
def most_alive(lives):
    """lives: (first node, last node, bytes) of each result. Returns the most bytes alive at one node."""
    raise NotImplementedError

# %% tags=["solution"]
def most_alive(lives):
    """lives: (first node, last node, bytes) of each result. Returns the most bytes alive at one node."""
    end = max(last for _, last, _ in lives)
    return max(sum(size for first, last, size in lives if first <= i <= last) for i in range(end + 1))

# %% tags=["wrong"]
def most_alive(lives):
    return sum(size for _, _, size in lives)

# %% tags=["wrong"]
def most_alive(lives):
    end = max(last for _, last, _ in lives)
    return max(sum(size for first, last, size in lives if first <= i < last) for i in range(end + 1))

# %% tags=["check"]
graphs = {"the stack": state.stack().graph, "the Mixtral, 1 token": state.step().graph,
          "the Mixtral, 64 tokens": state.step(n_tokens=64).graph}
on = [(state.lifetimes(g),) for g in graphs.values()]
expected = [state.most_alive(g) for g in graphs.values()]
lesson.check("most-alive", most_alive, expected, on, list(graphs))

# %% [markdown]
# **Tier 2.** How many graphs will a session build? The number is judged by a real session that counts.

# %% tags=["exercise", "tier-2"]
def n_graphs(n_prompt, n_new, pad=256):
    """Graphs built for n_new single tokens, after a prompt of n_prompt tokens."""
    raise NotImplementedError

# %% tags=["solution"]
def n_graphs(n_prompt, n_new, pad=256):
    """Graphs built for n_new single tokens, after a prompt of n_prompt tokens."""
    return len({-(-n // pad) for n in range(n_prompt + 1, n_prompt + n_new + 1)})

# %% tags=["wrong"]
def n_graphs(n_prompt, n_new, pad=256):
    return -(-n_new // pad)

# %% tags=["wrong"]
def n_graphs(n_prompt, n_new, pad=256):
    return len({n // pad for n in range(n_prompt + 1, n_prompt + n_new + 1)})

# %% tags=["check"]
on = [(10, 5), (250, 10), (254, 2), (256, 1), (500, 20)]
expected = [state.steps_built(*case) for case in on]
lesson.check("n-graphs", n_graphs, expected, on, [f"{a} tokens of prompt, {b} new" for a, b in on])

# %% [markdown]
# **Tier 3.** Be the planner. Requests come in order: `("take", block, bytes)` and `("free", block, bytes)`, in multiples of 32. A hole is
# free space below a block that is in use. Take the smallest hole that is large enough, of equal ones the highest; without any, the space above all blocks in use.

# %% tags=["exercise", "tier-3"]
def pack(requests):
    """The address of each block that is taken, in order."""
    raise NotImplementedError

# %% tags=["solution"]
def pack(requests):
    """The address of each block that is taken, in order."""
    live, places = {}, []
    for what, block, size in requests:
        if what == "free":
            del live[block]
            continue
        holes, end = [], 0
        for start, length in sorted(live.values()):
            holes += [(start - end, -end)] * (start - end >= size)
            end = max(end, start + length)
        live[block] = (-min(holes)[1] if holes else end, size)
        places.append(live[block][0])
    return places

# %% tags=["wrong"]
def pack(requests):
    places, end = [], 0
    for what, _, size in requests:
        if what == "take":
            places.append(end)
            end += size
    return places

# %% tags=["wrong"]
def pack(requests):
    live, places = {}, []
    for what, block, size in requests:
        if what == "free":
            del live[block]
            continue
        at = 0
        for start, length in sorted(live.values()):
            if start - at >= size:
                break
            at = max(at, start + length)
        live[block] = (at, size)
        places.append(at)
    return places

# %% tags=["check"]
graphs = {"the stack": state.stack().graph, "the Mixtral, 1 token": state.step().graph,
          "the Mixtral, 64 tokens": state.step(n_tokens=64).graph}
expected = [state.offsets(g) for g in graphs.values()]
lesson.check("pack", pack, expected, [(state.events(g),) for g in graphs.values()], list(graphs))

# %% [markdown]
# ## 10 · What is what, and what comes next · 2 min
#
# | here | in ggml, llama.cpp | left out here |
# |---|---|---|
# | `GraphAllocator` | `ggml_gallocr` | – |
# | `allocator.decisions` | none: the same choices, made silently | – |
# | in place, `OpSpec.in_place` | `ggml_op_can_inplace` | – |
# | `GraphRunner` | `ggml_gallocr` + `ggml_backend_graph_compute` | – |
# | `Plan` | `ggml_cplan` | – |
# | `KVCache.n_kv`, padded to 256 | `llama_kv_cache::get_n_kv` | – |
# | a session's kept graphs | `llm_graph_result::can_reuse` | llama.cpp keeps one graph, we keep up to 16 |
# | `n_graph_reuses` | "graphs reused" in llama.cpp's log | – |
# | a model of shapes alone, `state.dense_step` | `llama_model_params.no_alloc`, the tool `fit-params` | – |
#
# **Next, 05:** the order is fixed, the memory is planned. What is left to decide is who works: how a node is cut into tasks, what threads cost,
# and why more of them are not always faster.
