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

import numpy as np

import workbench as wb
from workbench import lessons, models, views, widgets
from workbench.lessons import graph_states as code

lesson = lessons.open_lesson("04")
state = lesson.state
ACTIVATION = 64 * 256 * 4          # bytes of one result: 64 tokens, 256 f32 numbers each

# %% [markdown]
# ## 1 · The same network, twice · 6 min
#
# A stack of residual blocks, once call by call, once as a graph. Both functions are short, and almost the same:

# %%
print(inspect.getsource(code.eager))
print(inspect.getsource(code.described))

# %% tags=["predict"]
lesson.predict("arrays")

# %% [markdown]
# Arrays are counted as NumPy makes them. The planned graph gets its memory in `prepare`, before the first run; then `run` is watched by
# Python's own `tracemalloc`, just as the eager function is.

# %%
stack = state.stack(n_blocks=4)
made = state.arrays_made(code.eager, stack.values, stack.arrays)
runner = wb.GraphRunner()
plan = runner.prepare(stack.graph)
stack.x.set(stack.values)
plan.run()
assert np.allclose(stack.out.numpy(), code.eager(stack.values, stack.arrays), atol=1e-4)   # outputs equal
peaks = state.peak(code.eager, stack.values, stack.arrays), state.peak(plan.run)
views.table(["in one run of 4 blocks", "call by call", "planned"], [
    ("new arrays", len(made), 0), ("… their bytes, in results of 64 KiB", sum(made) // ACTIVATION, 0),
    ("most held at once, in whole results", peaks[0] // ACTIVATION, peaks[1] // ACTIVATION),
    ("taken once, before the first run", 0, runner.allocator.buffer_size() // ACTIVATION)],
    "Same result, other housekeeping: the planned run takes no array at all.")

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
    times = state.milliseconds(lambda: code.eager(stack.values, stack.arrays)), state.milliseconds(plan.run)
    rows.append((tokens, *(f"{t:.3f}" for t in times), f"{times[1] / times[0]:.2f}"))
views.table(["tokens", "eager, ms", "planned, ms", "ratio"], rows, "Planning pays in memory, and in what can be known; not in the arithmetic.")

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
experts = {t for part in step.segments if part.kind == "experts" for t in nodes[part.first:part.last]}
crossing = [(s, t in experts) for t in nodes for s in t.sources() if s in depth and (s in experts) != (t in experts)]
views.table(["bottleneck", "in numbers", "call by call", "planned"], [
    ("memory", "bytes for all results", results, state.measure(step.graph)),
    ("parallel work", "longest chain of nodes", "unknown", f"{max(depth.values())} of {len(nodes)}"),
    ("devices", "copies, if experts run elsewhere", len(crossing), len(set(crossing))),
    ("debugging", "results known before the run", 0, len(nodes))],
    "Four questions, answered by looking at the graph. None of the 318 nodes was computed for this table.")

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
stack = state.stack(n_blocks=2)
widgets.Stepper(views.memory_steps(stack.graph, title="Packing two blocks"), "Three places are enough, however many blocks follow.")

# %%
stack = state.stack(n_blocks=4)
lives = state.lifetimes(stack.graph)
alive = max(sum(size for a, b, size in lives if a <= i <= b) for i in range(len(stack.graph.nodes)))
planned = state.measure(stack.graph)
runner = wb.GraphRunner()
runner.prepare(stack.graph)
executed = runner.allocator.buffer_size()
total = sum(size for _, _, size in lives)
views.side_by_side([("a place for each result, planned", total, planned), ("most alive at once, planned", alive, planned), ("planned, really taken", planned, executed)],
                   ("one", "other"), "Seven times less than a place for each, and no plan can do with less than what is alive at once.")

# %% tags=["reveal"]
lesson.reveal("places", planned // ACTIVATION, all=total // ACTIVATION)

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
print("valid:", state.disjoint(state.stack().graph), "for the stack,", state.disjoint(state.step().graph), "for the Mixtral")

# %% [markdown]
# ## 4 · In place · 4 min
#
# An op that works number by number may write over its source, when this is the last use and the layouts agree. "In place" sounds like a
# matter of speed.

# %% tags=["predict"]
lesson.predict("in-place")

# %%
graph = state.step(n_tokens=64).graph
decisions = state.decisions(graph)
refused = {}
for kind, t, *rest in decisions:
    if kind == "refuse":
        refused[rest[1]] = refused.get(rest[1], 0) + 1
with_it, without = state.measure(graph), state.measure(state.without_in_place(state.step(n_tokens=64).graph))
assert state.disjoint(graph)
rows = [("results in place", sum(d[0] == "reuse" for d in decisions)), *((f"refused: {why}", n) for why, n in sorted(refused.items())),
        ("bytes planned", with_it), ("bytes planned without in-place", without)]
views.table(["64 tokens through the Mixtral", ""], rows, f"In place or not: {without / with_it:.2f} times the memory, not one operation more or less.")

# %% tags=["reveal"]
lesson.reveal("in-place", f"{'memory' if without > 1.2 * with_it else 'nothing'}", ratio=round(without / with_it, 2))

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
results = {n: round(sum(t.nbytes for t in s.graph.nodes if not t.is_view) / 2**20) for n, s in steps.items()}
formula = 512 * (code.LLAMA_3_8B.n_vocab + code.LLAMA_3_8B.n_embd) * 4 / 2**20
views.side_by_side([("32 layers: a place for each result, planned", results[32], mib[32]), ("64 layers: a place for each result, planned", results[64], mib[64]),
                    ("formula (logits + their source), planned", formula, mib[32]), ("planned, llama.cpp's log", mib[32], state.recorded["log_8b"]["compute_mib_512"])],
                   ("MiB", "MiB "), "The peak is at the very end, where logits are made. llama.cpp prints the same 258.50 MiB.")

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
kept = {}

def what_if(i):
    graph = cases[list(cases)[i]]()
    assert state.disjoint(graph)
    planned, total = state.measure(graph), sum(t.nbytes for t in graph.nodes if not t.is_view)
    now = {"case": list(cases)[i], "nodes": len(graph.nodes), "all results, bytes": total, "planned, bytes": planned, "times less": f"{total / planned:.1f}"}
    a, kept["last"] = kept.get("last", now), now
    return views.table(["", "A: last run", "B: this run"], [(k, a[k], now[k]) for k in now], "Layers cost nothing; what you keep costs its size.")

_ = what_if(1)
widgets.Range(value=3, max=len(cases) - 1, label="the Mixtral with", names=list(cases)).drive(what_if)

# %% [markdown]
# ## 7 · Inputs are in the plan too · 3 min
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
same = [bool((o == outputs[0]).all()) for o in outputs]
views.table(["run", "input", "result"], [(i, "set" if i != 2 else "not set", "as the first" if s else "differs") for i, s in enumerate(same, 1)],
            "An input's place is given away after its last use, like any other. Write inputs before every run.")

# %% tags=["reveal"]
lesson.reveal("again", "same" if same[1] else "differs")

# %% [markdown]
# ## 8 · Build once, run many · 8 min
#
# The article gives two pieces of advice. "Build a new graph for each run; building costs next to nothing." And: "Never build in the hot
# loop; build when the model is loaded." They cannot both be right. First, what does our session do? A prompt of 12 tokens, then 300 new ones,
# one by one, in a context of 512:

# %% tags=["predict"]
lesson.predict("every")

# %%
run = state.long_run
rows = [(r["tokens"], r["n_kv"], r["builds"], r["reuses"], r["plans"]) for r in run if r["tokens"] in (12, 13, 14, 256, 257, 258, 312)]
views.table(["tokens", "visible cells n_kv", "graphs built", "reused", "plans"], rows,
            "One graph was built to reserve memory, one for the prompt, one for the first token, and one at token 257.")

# %% tags=["reveal"]
lesson.reveal("every", run[-1]["builds"] - run[0]["builds"], reused=run[-1]["reuses"])

# %% [markdown]
# Why at token 257? Attention reads the cells of the cache, more with every token, so the shapes change and the graph is *not* quite static.
# The trick is padding: the graph always looks at a multiple of 256 cells, and a mask hides those that hold nothing yet.

# %% tags=["predict"]
lesson.predict("shape")

# %%
expected = len({-(-n // 256) * 256 for n in range(13, 313)})
views.side_by_side([("graphs for 300 tokens: multiples of 256 met, built", expected, run[-1]["builds"] - run[0]["builds"]),
                    ("without padding: numbers of cells met, tokens", len(range(13, 313)), 300)], ("predicted", "counted"),
                   "Padding turns 300 shapes into 2.")

# %% tags=["reveal"]
lesson.reveal("shape", "another" if run[-1]["builds"] > run[100]["builds"] else "same")

# %% [markdown]
# Now settle it: what would a token cost if everything were built again? Times of your machine, for the small model, and for the shapes of
# Llama 3 8B, whose run is *estimated* as reading 16 GB at 20 GB per second.

# %% tags=["device", "nbval-ignore-output"]
small, large = state.shares(), state.shares_8b(bytes_per_second=20e9)
rows = [(what, *(f"{t[what]:.1f}" for t in (small, large))) for what in ("build", "place", "plan", "run")]
rows.append(("share of building and planning", *(f"{1 - t['run'] / sum(t.values()):.0%}" for t in (small, large))))
views.table(["ms per token", "tiny Mixtral", "Llama 3 8B"], rows, "Both are right, about different models: most of a small model's token, a fraction of a large one's.")

# %% [markdown]
# Building costs by the node; running costs by the byte. A model a thousand times larger has four times as many nodes. So for a large model and
# long batches rebuilding hardly shows; for small models and short requests it is most of the time. llama.cpp once rebuilt at every token. Today
# it asks `can_reuse`, and prints at the end how many graphs it reused.

# %%
reused = run[-1]["reuses"] / 300
print(f"graphs reused here: {run[-1]['reuses']} of 300, {reused:.1%}")

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
graphs = {"the stack": state.stack().graph, "one token of the Mixtral": state.step().graph, "64 tokens": state.step(n_tokens=64).graph}
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
on = [(10, 5), (250, 10), (255, 1), (256, 1), (500, 20)]
expected = [state.steps_built(*case) for case in on]
lesson.check("n-graphs", n_graphs, expected, on, [f"{a} tokens of prompt, {b} new" for a, b in on])

# %% [markdown]
# **Tier 3.** Be the planner. Requests come in order: `("take", block, bytes)` and `("free", block, bytes)`. A hole is free space below a
# block that is in use. Take the smallest hole that is large enough, of equal ones the highest; without any, the space above all blocks in use.

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
graphs = {"the stack": state.stack().graph, "one token of the Mixtral": state.step().graph, "64 tokens": state.step(n_tokens=64).graph}
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
