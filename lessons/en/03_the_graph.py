# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 03 · The graph
#
# **50 minutes** · before it: 02, context and arena · after it: 04, static or eager
#
# In NumPy, `w @ x` computes. Here it only writes down a sentence: *this tensor is the product of those two*. A **graph** is
# what you get when you ask one result for every sentence it rests on, in an order in which they can be carried out.
#
# Afterwards you can expand a graph by hand: say which tensors are nodes and which are leafs, in what order they stand, and how
# many there will be. Guess before you run the cell below a question. Each section needs only the cell below.

# %% tags=["setup"]
import json
import math
from collections import Counter

import workbench as wb
from workbench import cgraph, lessons, ops, views, widgets
from workbench.errors import WorkbenchError
from workbench.tensors import Context

lesson = lessons.open_lesson("03")
state = lesson.state

# %% [markdown]
# ## 1 · Find the fault · 4 min
#
# An article on ggml prints this network of two layers, 8 numbers in, 8 numbers out (silu bends the numbers in between):
#
# ```c
# x  = ggml_new_tensor_2d(ctx, GGML_TYPE_F32,  8,  1);  // input
# w1 = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 32,  8);  // weights
# b1 = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 32,  1);  // bias
# w2 = ggml_new_tensor_2d(ctx, GGML_TYPE_F32,  8, 32);
# b2 = ggml_new_tensor_2d(ctx, GGML_TYPE_F32,  8,  1);
# h1  = ggml_silu(ctx, ggml_add(ctx, ggml_mul_mat(ctx, w1, x), b1));
# out = ggml_add(ctx, ggml_mul_mat(ctx, w2, h1), b2);
# ```
#
# The first number of a shape is `ne[0]`, the length of a row.

# %% tags=["predict"]
lesson.predict("fault")

# %%
def attempt(*ne):
    """What the product of a w1 of this shape with x comes to."""
    with Context(name="attempt") as ctx:
        x = ctx.new_tensor("f32", 8, 1, name="x")
        w1 = ctx.new_tensor("f32", *ne, name="w1")
        try:
            return f"fine: {ops.mul_mat(w1, x).ne[0]} numbers"
        except WorkbenchError as error:
            return f"refused\n{error}"

for ne in (32, 8), (8, 32):
    print(f"w1 of {ne}:", attempt(*ne))

# %% tags=["reveal"]
lesson.reveal("fault", attempt(32, 8).split()[0])

# %% [markdown]
# ## 2 · One call, one tensor · 3 min
#
# With (8, 32) and (32, 8) the network can be written down. Every call returns at once with a new tensor that remembers its op and its
# sources. Nothing is computed, and the graph is still empty.

# %%
ctx = Context(name="mlp")
shapes = {"x": (8, 1), "w1": (8, 32), "b1": (32, 1), "w2": (32, 8), "b2": (8, 1)}
x, w1, b1, w2, b2 = (ctx.new_tensor("f32", *ne, name=name) for name, ne in shapes.items())
with ctx.active():
    hidden = ops.silu(ops.add(ops.mul_mat(w1, x), b1))
    out = ops.add(ops.mul_mat(w2, hidden), b2)
network = wb.CGraph(ctx)
print(len(ctx.tensors), "tensors;", network)

# %% tags=["predict"]
lesson.predict("count")

# %%
network.build_forward_expand(out)
views.side_by_side([
    ("calls of an op → nodes", 5, len(network.nodes)),
    ("tensors made by hand → leafs", 5, len(network.leafs)),
    ("tensors of the context → of the graph", len(ctx.tensors), len(network.visited))],
    ("expected", "counted"), "Every call of an op became a node, everything else a leaf.")

# %% tags=["reveal"]
lesson.reveal("count", len(network.nodes))

# %% [markdown]
# ## 3 · Expanding, step by step · 7 min
#
# `build_forward_expand(out)` walks from the result backwards. To *enter* a tensor means: was it met before? Then there is nothing to
# do. Else enter its sources, one after another; when all are done, **record** the tensor itself: without an op as a leaf, else as a node.
#
# So everything is recorded after all its sources. That is the whole secret of the order. Below, `state.mlp()` is the network of section 2 once
# more, its results named.

# %% tags=["predict"]
lesson.predict("first-leaf")

# %%
mlp = state.mlp()
steps = views.expand_steps(mlp.out)
widgets.Stepper(steps, "A tensor is recorded on the way back, when its sources are there.")

# %% tags=["reveal"]
lesson.reveal("first-leaf", wb.build(state.mlp().out).leafs[0].name)

# %% [markdown]
# The article lists the leafs as x, w1, b1, w2, b2. Is that wrong, or do *we* differ from ggml? Real ggml was asked to print the same
# network, and its answer stored. (`wb.build(out)` makes a new graph and expands `out` into it.)

# %%
graph = wb.build(state.mlp().out)
ours, ggml = [t.name for t in graph.leafs], state.recorded["mlp"]["leafs"]
assert ours == ggml and [t.op for t in graph.nodes] == state.recorded["mlp"]["nodes"]
rows = zip(range(5), ["x", "w1", "b1", "w2", "b2"], ours, ggml)
views.table(["leaf", "article", "here", "ggml 0.25.3"], rows,
            "The article lists the leafs as they were made, ggml as they were met.")

# %% [markdown]
# The whole graph as text, as `ggml_graph_print` gives it. The last columns are sources: `n0 l3` means node 0 and leaf 3. Reading it takes
# seconds, and answers the first question to ask of any graph: does it have as many nodes as I expect? (A node that nobody named is called
# `node_` and its index.)

# %%
print(cgraph.table(wb.build(state.mlp().out)))

# %% [markdown]
# A graph is **legal** when every node stands behind all of its sources. This lesson asserts it for every graph that it builds.

# %%
graph = wb.build(state.mlp().out)
place = {t: i for i, t in enumerate(graph.nodes)}
assert all(place[s] < i for t, i in place.items() for s in t.sources() if s in place)
assert state.legal(graph)          # the same two lines, kept for later
widgets.GraphView(graph, "Two-layer network", "Lines only lead down, to what was recorded later.")

# %% [markdown]
# ## 4 · In what order? · 5 min
#
# Two branches: `a = silu(x)`, then `b = sqr(x)`, then `y = add(b, a)`.

# %% tags=["predict"]
lesson.predict("order")

# %%
with Context(name="two branches") as ctx:
    x = ctx.new_tensor("f32", 4, name="x")
    a = ops.silu(x).named("a")
    b = ops.sqr(x).named("b")
    y = ops.add(b, a).named("y")
    plain = wb.build(y)
    forced = wb.CGraph().build_forward_expand(a).build_forward_expand(y)
    assert state.legal(plain) and state.legal(forced)
orders = {"y": plain.nodes, "a, then y": forced.nodes}
rows = [(what, " ".join(t.name for t in nodes)) for what, nodes in orders.items()]
views.table(["expanded", "nodes, in the order of the graph"], rows,
            "Both orders are legal. Expanding a first is how one asks for the other.")

# %% tags=["reveal"]
lesson.reveal("order", " ".join(t.name for t in orders["y"]))

# %% [markdown]
# Real models use this. Attention looks back at a key and a value of every token, kept in a cache; so a decode step also writes those of the
# new token there, with the op SET_ROWS. The whole graph of our Mixtral has 318 nodes. Suppose we expand nothing but its logits:

# %% tags=["predict"]
lesson.predict("lost")

# %%
step = state.step()
from_logits = wb.build(step.logits)
assert state.legal(step.graph) and state.legal(from_logits)
found = set(from_logits.nodes)
lost = [t for t in step.graph.nodes if t not in found]
first = {t.desc: t.name for t in reversed(lost)}
rows = [(op, n, first[op]) for op, n in Counter(t.desc for t in lost).most_common()]
views.table(["lost", "nodes", "for example"], rows,
            "llama.cpp expands the writes by hand, before it goes on to read the cache.")

# %% tags=["reveal"]
lesson.reveal("lost", len(lost), writes=sum(t.op == "SET_ROWS" for t in lost))

# %% [markdown]
# ## 5 · Used twice · 5 min
#
# A residual connection uses a tensor twice: `h = silu(mul_mat(w, x))`, then `y = add(mul_mat(v, h), h)`.

# %% tags=["predict"]
lesson.predict("twice")

# %%
y, h = state.residual()
residual = wb.build(y)
assert state.legal(residual)
runs = state.executions(residual)
rows = [(i, t.name, t.desc, residual.use_count(t), runs[t]) for i, t in enumerate(residual.nodes)]
views.table(["node", "name", "op", "uses", "executed"], rows, "h is used twice and computed once.")

# %% tags=["reveal"]
lesson.reveal("twice", len(residual.nodes), uses=residual.use_count(h), runs=runs[h])

# %% [markdown]
# Here the set of visited tensors earns its keep. Does it matter? Double a number again and again: `x = add(x, x)`. Move the slider; the walk without a visited set is really walked.

# %%
def calls(t):
    """How many additions a walk makes that remembers nothing."""
    return (t.op == "ADD") + sum(calls(s) for s in t.sources())

def doubling(n):
    y = state.doublings(n)
    graph = wb.build(y)
    return {"doublings": n, "nodes in the graph": len(graph.nodes),
            "nodes executed": sum(state.executions(graph).values()),
            "additions without a visited set": calls(y)}

widgets.Range(value=10, min=1, max=14, label="doublings").compare(
    doubling, "n with a visited set, 2ⁿ − 1 without.", first=4)

# %% [markdown]
# ## 6 · Weights that learn · 2 min
#
# For training, weights are marked as *parameters*. Mark w1, b1, w2 and b2, and expand again:

# %% tags=["predict"]
lesson.predict("params")

# %%
trained = wb.build(state.mlp(train=True).out)
assert state.legal(trained)
ours = [t.name if t.op == "NONE" else t.op for t in trained.nodes]
ggml = state.recorded["mlp_with_params"]["nodes"]
assert ours == ggml
views.table(["node", "here", "ggml 0.25.3"], zip(range(9), ours, ggml),
            "The one exception to “no op, so a leaf”: gradients will flow to parameters (lesson 06).")

# %% tags=["reveal"]
lesson.reveal("params", len(trained.nodes))

# %% [markdown]
# ## 7 · How many nodes will it have? · 5 min
#
# Count one layer of each kind, and a whole model follows: 1 node fetches the embedding, 2 fetch the rows that logits are wanted for, 3
# make the logits.

# %%
mixtral, deepseek = state.step(), state.step("tiny-deepseek-f16")
per_layer = {"Mixtral, with experts": state.layer_size(mixtral, 1),
             "DeepSeek, with experts": state.layer_size(deepseek, 1),
             "DeepSeek, first layer, dense": state.layer_size(deepseek, 0)}
views.table(["one layer", "nodes"], per_layer.items(),
            "A dense layer takes 36 nodes; routing adds 16 to 20 more.")

# %% [markdown]
# Now a model that you do not have. Llama 3 8B is dense and has 32 layers, as 7B models do.

# %% tags=["predict"]
lesson.predict("large")

# %%
graphs = [state.step().graph, state.step("tiny-deepseek-f16").graph, state.dense_step(32).graph]
assert all(map(state.legal, graphs))
mixtral, deepseek, large = (len(graph.nodes) for graph in graphs)
views.side_by_side([
    ("tiny-mixtral: 1 + 6·52 + 5", 1 + 6 * 52 + 5, mixtral),
    ("tiny-deepseek: 1 + 36 + 4·56 + 5", 1 + 36 + 4 * 56 + 5, deepseek),
    ("Llama 3 8B, from shapes alone: 1 + 32·36 + 5", 1 + 32 * 36 + 5, large),
    ("Llama 3 8B: here → in llama.cpp's log", large, state.recorded["log_8b"]["n_nodes"])],
    ("predicted", "counted"), "Exact, also for a model of 16 GB: a graph needs no weights.")

# %% tags=["reveal"]
lesson.reveal("large", len(state.dense_step(32).graph.nodes))

# %% [markdown]
# A graph made with `ggml_new_graph` has room for 2,048 nodes. Up to which depth is that enough? (llama.cpp asks for a larger one: 8
# nodes per tensor of the model.)

# %%
def deep(n):
    graph = state.dense_step(n).graph
    return {"layers": n, "nodes": len(graph.nodes), "leafs": len(graph.leafs),
            "fits 2,048": len(graph.nodes) <= cgraph.graph.DEFAULT_SIZE}

widgets.Range(value=60, min=1, max=60, label="dense layers").compare(
    deep, "Really built, from shapes alone. 56 layers fit, 57 do not.", first=32)

# %% [markdown]
# ## 8 · A graph only grows · 4 min
#
# Some programs overflow with a small model. They expand each run's ops into the *same* graph, which never forgets. Our network has 5
# nodes. In which run does a graph of the default size refuse?

# %% tags=["predict"]
lesson.predict("full")

# %%
for n_runs in (409, 410):
    try:
        graph, _ = state.grow("none", n_runs)
        print(f"{n_runs} runs: {len(graph.nodes):,} nodes")
    except WorkbenchError as error:
        print(f"{n_runs} runs: {error}")

# %% tags=["reveal"]
refused = next(n for n in range(400, 420) if not state.fits(n))
lesson.reveal("full", refused, before=5 * (refused - 1))

# %% [markdown]
# The message names three remedies besides a larger graph. They are not equally good: look at the arena of lesson 02, which pays for the
# tensors.

# %%
rows = []
remedies = {"none": "none", "clear() before each run": "clear", "a new graph for each run": "new",
            "keep the graph, write new x": "keep"}
for name, remedy in remedies.items():
    graph, arena = state.grow(remedy, 100)
    assert state.legal(graph)
    rows.append((name, len(graph.nodes), arena.used_mem))
views.table(["remedy", "nodes after 100 runs", "bytes of the arena"], rows,
            "Clearing empties the graph, not the arena. Only building once stops both from growing.")

# %% [markdown]
# ## 9 · Print, draw, count · 6 min
#
# One decode step of the Mixtral: search for `topk`, fold and open layers, click a box, or walk with the arrow keys. The sentence says why a tensor stands
# where it does.

# %%
step = state.step()
assert state.legal(step.graph)
view = widgets.GraphView(step, "One token through the Mixtral",
                         "Layer 0 is open. The view of the two best ids feeds three expert products.")
view.choose("ffn_moe_topk-0")

# %% [markdown]
# As text there are two forms: DOT, which Graphviz draws, and JSON, which programs read.
#
# *Erratum.* The article exports JSON with `ggml_graph_export`. That function wrote a binary format, and left ggml in 2025;
# `ggml_graph_dump_dot` is still there. Our JSON is a format of our own: descriptions only, and reading it runs nothing from the file.

# %%
graph = wb.build(state.mlp().out)
dot = cgraph.to_dot(graph).splitlines()
print(*dot[3:6], "…", *dot[-4:-1], sep="\n")
text = graph.to_json()
again = wb.CGraph.from_json(text)
assert again.to_json() == text and state.legal(again)
print(f"{len(text):,} characters of JSON, the first tensor:")
print(json.loads(text)["tensors"][0])

# %% [markdown]
# With JSON, the article's three questions take a few lines each. How many products are there? Where is the work? What is used more than
# once?

# %%
graph = state.step().graph
data = json.loads(graph.to_json())
nodes = [data["tensors"][i] for i in data["nodes"]]
products = [t for t in nodes if t["op"].startswith("MUL_MAT")]
row = lambda t: data["tensors"][t["src"][0]]["ne"][0]         # the length of a row of weights
flops = {id(t): 2 * row(t) * math.prod(t["ne"]) for t in products}
counts, known = Counter(t["op"] for t in nodes), wb.statistics(graph)
views.side_by_side([
    ("MUL_MAT nodes", counts["MUL_MAT"], known.ops["MUL_MAT"].count),
    ("MUL_MAT_ID nodes", counts["MUL_MAT_ID"], known.ops["MUL_MAT_ID"].count),
    ("operations of the 61 products → of all nodes", sum(flops.values()), known.total.flops)],
    ("from JSON", "statistics"), "61 of 318 nodes do 98% of the arithmetic: optimise those.")

# %%
work = {n: Counter() for n in (*range(6), "output")}
for t in products:
    layer = t["name"].rpartition("-")[2]
    work[int(layer) if layer.isdecimal() else "output"][t["op"]] += flops[id(t)]
figure, bottom = views.new_figure(7.2, 2.5), [0] * 7
axes = figure.add_subplot(xlabel="layer", ylabel="thousand operations", ylim=(0, 700))
for op, look, hatch in (("MUL_MAT", 1, ""), ("MUL_MAT_ID", 0, "//")):
    heights = [work[n][op] / 1000 for n in work]
    axes.bar([str(n) for n in work], heights, bottom=bottom, label=op, hatch=hatch,
             color=views.OKABE_ITO[look], ec="#333333")
    bottom = [a + b for a, b in zip(bottom, heights)]
axes.legend(frameon=False, loc="upper center", ncols=2)
views.picture(figure, "Bars: six layers of equal work, half of it in experts; the output as much.",
              "Layers cost the same, half of it in experts; the logits cost as much as a layer.")

# %%
users = {}
for t in nodes:
    for s in set(t["src"]) - {None}:
        users.setdefault(s, []).append(t["name"])
often = sorted((s for s in users if len(users[s]) > 1), key=lambda s: -len(users[s]))
names = {s: data["tensors"][s]["name"] for s in often}
picked = often[:4] + [s for s in often if names[s] in ("ffn_moe_topk-0", "l_out-0", "ffn_norm-0")]
rows = [(names[s], data["tensors"][s]["op"], len(users[s]), ", ".join(users[s][:2])) for s in picked]
views.table(["tensor", "op", "users", "the first two"], rows,
            f"{len(often)} tensors have several users: inputs, then chosen ids and residual streams.")

# %% [markdown]
# ## 10 · Your turn · 7 min
#
# **Tier 1.** Say how many nodes a model's decode step will have, without building it.

# %% tags=["exercise", "tier-1"]
def n_nodes(n_layer, per_layer):
    """Nodes of a decode step: an embedding, n_layer layers, two row fetches, the logits."""
    raise NotImplementedError

# %% tags=["solution"]
def n_nodes(n_layer, per_layer):
    """Nodes of a decode step: an embedding, n_layer layers, two row fetches, the logits."""
    return 1 + n_layer * per_layer + 2 + 3

# %% tags=["wrong"]
def n_nodes(n_layer, per_layer):
    return n_layer * per_layer

# %% tags=["wrong"]
def n_nodes(n_layer, per_layer):
    return 1 + n_layer * per_layer + 3

# %% tags=["check"]
on = [(6, 52), (32, 36), (60, 36)]
steps = [state.step(), state.dense_step(32), state.dense_step(60)]
expected = [len(step.graph.nodes) for step in steps]
lesson.check("n-nodes", n_nodes, expected, on, ["the Mixtral", "32 dense layers", "60 dense layers"])

# %% [markdown]
# **Tier 2.** Expand by hand. The calls were
#
# ```python
# q = mul_mat(wq, x)
# k = mul_mat(wk, x)
# s = mul_mat(k, q)
# p = soft_max(s)
# y = add(p, s)
# ```
#
# Write the names of the three leafs in order, then those of the five nodes in order.

# %% tags=["exercise", "tier-2"]
order = ...            # for example: "l l l n n n n n".split()

# %% tags=["solution"]
order = "wk x wq k q s p y".split()

# %% tags=["wrong"]
order = "wq x wk q k s p y".split()

# %% tags=["wrong"]
order = "wk wq x y p s k q".split()

# %% tags=["check"]
graph = wb.build(state.scores())
expected = [t.name for t in (*graph.leafs, *graph.nodes)]
steps = [f"leaf {i}" for i in range(3)] + [f"node {i}" for i in range(5)]
lesson.check("by-hand", order, expected, steps=steps)

# %% [markdown]
# **Tier 3.** Write the expansion yourself. You will need `t.sources()`, `t.op` (`"NONE"` where there is none) and
# `state.is_parameter(t)`. `nodes` and `leafs` are lists, `seen` is a set. It is judged on the network, on the residual connection, with
# parameters, and on the logits of the real model.

# %% tags=["exercise", "tier-3"]
def expand(t, nodes, leafs, seen):
    """Append t and all it needs to the lists, each once."""
    raise NotImplementedError

# %% tags=["solution"]
def expand(t, nodes, leafs, seen):
    """Append t and all it needs to the lists, each once."""
    if t in seen:
        return
    seen.add(t)
    for s in t.sources():
        expand(s, nodes, leafs, seen)
    (leafs if t.op == "NONE" and not state.is_parameter(t) else nodes).append(t)

# %% tags=["wrong"]
def expand(t, nodes, leafs, seen):
    for s in t.sources():
        expand(s, nodes, leafs, seen)
    (leafs if t.op == "NONE" and not state.is_parameter(t) else nodes).append(t)

# %% tags=["wrong"]
def expand(t, nodes, leafs, seen):
    if t in seen:
        return
    seen.add(t)
    (leafs if t.op == "NONE" and not state.is_parameter(t) else nodes).append(t)
    for s in t.sources():
        expand(s, nodes, leafs, seen)

# %% tags=["wrong"]
def expand(t, nodes, leafs, seen):
    if t in seen:
        return
    seen.add(t)
    for s in t.sources():
        expand(s, nodes, leafs, seen)
    (leafs if t.op == "NONE" else nodes).append(t)

# %% tags=["check"]
def yours(root):
    nodes, leafs = [], []
    expand(root, nodes, leafs, set())
    return [t.name for t in (*leafs, *nodes)]

roots = [state.mlp().out, state.residual()[0], state.mlp(train=True).out, state.step().logits]
graphs = [wb.build(root) for root in roots]
expected = [[t.name for t in (*g.leafs, *g.nodes)] for g in graphs]
steps = ["the network", "the residual connection", "with parameters", "the logits of the Mixtral"]
lesson.check("expand", yours, expected, [(root,) for root in roots], steps)

# %% [markdown]
# ## 11 · What is what, and what comes next · 2 min
#
# | here | in ggml, llama.cpp | left out here |
# |---|---|---|
# | `CGraph`, `wb.build` | `ggml_cgraph`, `ggml_new_graph_custom` | the array of gradients, until lesson 06 |
# | `build_forward_expand` | `ggml_build_forward_expand` | – |
# | `visited` | `visited_hash_set`, an open hash table | its collisions: a Python dictionary has its own |
# | `use_count` | `use_counts`, `ggml_node_get_use_count` | – |
# | `cgraph.table` | `ggml_graph_print` | – |
# | `cgraph.to_dot` | `ggml_graph_dump_dot` | subgraphs, a second graph in the same picture |
# | `to_json`, `from_json` | none; `ggml_graph_export` is gone | data |
# | `GraphFull` | `GGML_ASSERT`, which ends the process | – |
# | `cgraph.statistics` | none | – |
#
# **Next, 04:** the graph is known before anything runs. What is that good for? Memory planned in advance, a graph built once and run
# many times, and four bottlenecks that a call-by-call program cannot avoid.
