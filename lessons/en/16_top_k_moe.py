# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 16 · Top-k MoE
#
# **50 minutes** · before it: 15, dense MoE · after it: 17, load balancing, and 19, moving only the used experts
#
# The dense layer of lesson 15 pays for every expert. Models since 2017 keep the gate and use only its best *k*. That one change brings three
# questions that a dense layer does not have: what the weights sum to, which rows meet which expert, and what happens when too many want
# the same one.
#
# Afterwards you can read the routing nodes of any llama.cpp graph, say what a model's weights sum to, predict how many experts a batch needs,
# and check a published parameter count. Each section needs only the cell below.

# %% tags=["setup"]
import inspect

import numpy as np

from workbench import lessons, moe, views, widgets

lesson = lessons.open_lesson("16")
state = lesson.state
mixtral = moe.presets.mixtral(8, 2)      # softmax over 8, the best 2, divided by their sum

# %% [markdown]
# ## 1 · From all to some · 6 min
#
# Both forms over the same weights: layer 5 of the tiny Mixtral, 64 tokens of English. All eight experts, and the best two.

# %%
dense, top2 = state.layer(5), state.layer(5, mixtral)
names = [[t.desc for t in run.graph.nodes] for run in (dense, top2)]
ops = ["MUL_MAT", "SOFT_MAX", "ARGSORT", "GET_ROWS", "SUM_ROWS", "DIV", "MUL_MAT_ID", "SWIGLU", "ADD"]
rows = [(op, *(found.count(op) for found in names)) for op in ops]
work = [state.flops(run.graph) for run in (dense, top2)]
views.table(["", "dense", "top 2 of 8"],
            [*rows, ("FLOPs of the products", *work), ("ratio", "", f"{work[1] / work[0]:.3f}")],
            "A sort, a look-up and a division more; a quarter of the work.")

# %% [markdown]
# The new nodes by their numbers, for the token ‘ me’. `ffn_moe_topk` is a *view* of the sorted ids: its first two. `GET_ROWS` fetches the
# probabilities that belong to them, and `SUM_ROWS` with `DIV` makes them sum to one.

# %%
t, plain = 8, state.layer(5, moe.Router(8, 2, normalise=False))
top2, probs = state.layer(5, mixtral), plain.probs[8]
ids, p, w = top2.experts[t], plain.weights[t], top2.weights[t]
assert (plain.experts == top2.experts).all() and np.allclose(p, probs[ids])
views.table(["node", "value"], [
    ("ffn_moe_probs", "  ".join(f"{v:.3f}" for v in probs)), ("ffn_moe_topk", f"{ids[0]}, {ids[1]}"),
    ("ffn_moe_weights", f"{p[0]:.3f}, {p[1]:.3f}"), ("ffn_moe_weights_sum", f"{p.sum():.3f}"),
    ("ffn_moe_weights_norm", f"{w[0]:.3f}, {w[1]:.3f}")],
    "From eight probabilities to two ids and two weights.")

# %% [markdown]
# The ids are a result like any other: computed on whichever device runs the router, and read by each `MUL_MAT_ID`. Of equal scores the
# lower number wins.
#
# ## 2 · A text, routed · 6 min
#
# The same layer and text. Each token stands on the colour of its best expert; the number is below it.

# %%
words = state.words(state.text())
views.token_picture(words, state.layer(5, mixtral).experts[:, 0],
                    "Expert 2 has most words of this text, 6 most of the rest.", "Best expert in layer 5")

# %% [markdown]
# Two of eight for everybody would be 16 tokens for each expert. Is the router badly trained? Count over 24,576 tokens of six kinds of text
# instead, in all layers:

# %%
views.load_picture(state.trace.counts(), state.trace.layers,
                   "Over many texts every expert of every layer gets about its share, 78% to 124%.")

# %%
rows = []
for layer in state.trace.layers.tolist():
    one = np.bincount(state.layer(layer, mixtral).experts.ravel(), minlength=8)
    many = state.trace.counts()[layer]
    busiest = [f"{c.max() / c.mean():.1f}" for c in (one, many)]
    rows.append((layer, *busiest, int((one < 4).sum())))
views.table(["layer", "busiest expert: this text", "all texts", "under a quarter share, this text"], rows,
            "Even on average, uneven in one text; in layers 4 and 5 some are all but idle.")

# %% [markdown]
# Both come from training: it was rewarded for even loads over large mixed batches (lesson 17), and within that it learned that words of
# a kind go to the same expert.
#
# ## 3 · Before or after · 9 min
#
# All routers of this course, as a definition in plain NumPy: `gating` names the function over the logits z of all experts.

# %%
print(inspect.getsource(moe.reference.weigh))

# %% [markdown]
# Mixtral takes soft max over all eight experts, then the best two, and divides by their sum. gpt-oss takes the best two logits, then soft
# max over these. Same ids; what about the weights?

# %% tags=["predict"]
lesson.predict("order")

# %%
before, after = state.layer(5, mixtral), state.layer(5, moe.presets.gpt_oss(8, 2))
assert (before.experts == after.experts).all()
apart = float(np.abs(before.weights - after.weights).max())     # over all 64 tokens
rows = [(repr(words), *(f"{v:.4f}" for v in (*a, *b))) for words, a, b in
        zip(state.words(state.text())[3:9], before.weights[3:9], after.weights[3:9])]
views.table(["token", "before: first", "second", "after: first", "second"], rows,
            "Six of the 64 tokens, and both ways to weigh their experts.")

# %% tags=["reveal"]
lesson.reveal("order", "same" if apart < 1e-5 else "differ")

# %% [markdown]
# Now seven routers over the same gate. In how many of them do the weights of *every* token sum to one?

# %% tags=["predict"]
lesson.predict("sums")

# %%
P = moe.presets
routers = {"dense": P.dense(8), "Switch": P.switch(8, None), "Mixtral": mixtral, "OLMoE": P.olmoe(8, 2),
           "gpt-oss": P.gpt_oss(8, 2), "DeepSeek-V2": P.deepseek_v2(8, 2, 4, 2),
           "DeepSeek-V3": P.deepseek_v3(8, 2, 4, 2)}
sums, rows = {name: state.layer(5, r).weights.sum(-1) for name, r in routers.items()}, []
for name, r in routers.items():
    declared = r.weight_sum
    assert declared is None or np.allclose(sums[name], declared, rtol=1e-5)
    said = "depends on the token" if declared is None else f"{declared:g}"
    rows.append((name, r.n_used, f"{sums[name].min():.2f}", f"{sums[name].max():.2f}", said))
views.table(["router", "k", "smallest sum", "largest sum", "declared"], rows,
            "What the weights sum to is a property of the router: declared, and checked after each run.")

# %% tags=["reveal"]
always = sum(np.allclose(s, 1, rtol=1e-4) for s in sums.values())
lesson.reveal("sums", always, v3=routers["DeepSeek-V3"].weight_sum)

# %% [markdown]
# > **Erratum.** The article takes soft max *after* top-k for all, so that "the weights sum to one", and names Switch (k = 1) among its models. Soft
# > max over one number is 1 whatever the number, and no gradient could reach the gate. Switch takes the probability before.
#
# Which sum is right for a model is not a matter of taste: it was trained with it. The loss of this one, each way:

# %%
ones = state.layer(5, moe.presets.gpt_oss(8, 1)).weights
losses = [state.loss(2, normalise=n) for n in (True, False)]
views.table(["", "value"], [
    ("soft max after top-1: smallest and largest weight", f"{ones.min():g} and {ones.max():g}"),
    ("loss of the tiny Mixtral, weights divided by their sum", f"{losses[0]:.2f}"),
    ("the same, weights as they are", f"{losses[1]:.2f}")],
    "The wrong sum costs, although ids and experts are the same.")

# %% [markdown]
# ## 4 · Rows by expert · 9 min
#
# 64 tokens with two experts each are 128 rows. `MUL_MAT_ID` has eight matrices for them. How many matrix products does it make?

# %% tags=["predict"]
lesson.predict("groups")

# %% [markdown]
# Step through the first 12 tokens. Each choice puts a row into the queue of its expert: first choices first.

# %%
run, words = state.layer(5, mixtral, rows=state.hidden[5][:12]), state.words(state.text(12))
steps = views.queue_steps(words, run.experts, run.kept, 8, title="Rows of 12 tokens, by expert")
widgets.Stepper(steps, "Whoever wants the same expert stands in one queue, and is multiplied at once.")

# %%
ids = state.layer(5, mixtral).experts
queues = state.rows_by_expert(ids)             # what MUL_MAT_ID does first
rows = [(e, len(q), ", ".join(map(str, q[:9] // 2)) + ", …" * int(len(q) > 9))
        for e, q in enumerate(queues)]
views.table(["expert", "rows", "of the tokens"], rows,
            "Sorted by expert, in one pass over the ids: work grows with tokens · k + experts.")

# %% tags=["reveal"]
sizes = [len(q) for q in queues if len(q)]
lesson.reveal("groups", len(sizes), rows=ids.size, largest=max(sizes))

# %% [markdown]
# So what a batch costs in *weights read* is the number of different experts. If each token drew its k of E at random, n tokens would need
# E · (1 − (1 − k/E)ⁿ) of them. Kimi K3 has 896 experts, of which each token uses 16; 16 tokens would need 224. What was measured, with
# an English paragraph?

# %% tags=["predict"]
lesson.predict("union")

# %%
chance = moe.configs.expected_distinct
rows = [("tiny Mixtral, 2 of 8", n, chance(8, 2, n), state.trace.distinct(n).mean())
        for n in (1, 2, 4, 8, 16, 64)]
rows += [("Kimi K3, 16 of 896, published", n, chance(896, 16, n), measured)
         for n, measured, _ in state.kimi if n in (8, 16, 64, 128)]
assert all(abs(chance(896, 16, n) - theirs) < 1 for n, _, theirs in state.kimi)
views.table(["model", "tokens", "by chance", "measured", "ratio"],
            [(m, n, f"{c:.1f}", f"{v:.1f}", f"{v / c:.2f}") for m, n, c, v in rows],
            "Tokens of one text share experts; and yet more tokens need more of them.")

# %% tags=["reveal"]
measured = next(m for n, m, _ in state.kimi if n == 16)
lesson.reveal("union", measured, chance=round(chance(896, 16, 16)))

# %% [markdown]
# What that is worth: a layer of Mixtral's size (4096 × 14336) on a simulated card, by the number of tokens that come together.

# %%
layers = {n: state.described(8, 2, 4096, 14336, n) for n in (1, 2, 4, 8, 32, 128)}
layer_ms = {n: state.simulated_us(graph) / 1000 for n, graph in layers.items()}
views.table(["tokens", "experts needed, at most", "ms for the layer, simulated", "ms per token"],
            [(n, min(8, 2 * n), f"{ms:.2f}", f"{ms / n:.3f}") for n, ms in layer_ms.items()],
            "Up to a few tokens each brings its own experts; then all share the same reading of them.")

# %% [markdown]
# ## 5 · Who is dropped · 7 min
#
# Where experts sit on different machines, each has a buffer of fixed size. Switch gives it a *capacity*: factor · k · tokens / experts, rounded up.
# Who comes later is dropped. With a factor of 1 there are exactly as many places as choices: 8 experts with 8 places for 64 tokens, k = 1. Layer 5, our
# text: who is dropped?

# %% tags=["predict"]
lesson.predict("capacity")

# %%
switch = moe.presets.switch(8, capacity_factor=1.0)
run, words = state.layer(5, switch), state.words(state.text())
lost = ~run.kept[:, 0]
assert (np.bincount(run.experts[run.kept], minlength=8) <= switch.capacity(64)).all()
assert (run.out[lost] == 0).all()             # nothing from any expert: the residual sum passes them on
title = "64 tokens, 8 places for each expert"
steps = views.queue_steps(words, run.experts, run.kept, 8, switch.capacity(64), title)
widgets.Stepper(steps, "Queues fill unevenly: while 2 and 6 turn tokens away, others stay empty.")

# %% tags=["reveal"]
share = float(lost.mean())
said = "none" if share == 0 else "few" if share < 0.1 else "many"
empty = int((np.bincount(run.experts[:, 0], minlength=8) == 0).sum())
lesson.reveal("capacity", said, lost=int(lost.sum()), of=len(lost), empty=empty)

# %% [markdown]
# A dropped token is not lost: the layer adds nothing to it, and the residual sum carries it to the next layer as it was. Turn the knobs; each
# move runs the layer. One knob changes the weights, but neither who is chosen nor who is dropped: which?
# (llama.cpp knows no capacity: dropping is for training.)

# %%
factors, heats, runs = [None, 0.5, 1.0, 1.25, 2.0, 4.0], [0.5, 1.0, 2.0, 8.0], {}

def what_if(k, f, h):
    router = moe.Router(8, k, normalise=False, capacity_factor=factors[f])
    run, capacity = state.layer(5, router, temperature=heats[h]), router.capacity(64)
    taken, all_of = (np.bincount(e, minlength=8) for e in (run.experts[run.kept], run.experts.ravel()))
    runs["A"], runs["B"] = runs.get("B", taken), taken
    text = f"{(~run.kept).mean():.0%} of {run.kept.size} choices dropped; places: {capacity or 'any'}. "
    weight = f"A token's weights sum to {run.weights.sum(-1).mean():.2f} on average."
    return views.load_table(taken, all_of - taken, capacity, text + weight, before=runs["A"])

names = [str(x or "no limit") for x in factors], [f"{x:g}" for x in heats]
knobs = [["experts per token, k", 1, 4, []], ["capacity factor", 0, 5, names[0]],
         ["temperature", 0, 3, names[1]]]
widgets.Knobs(knobs=knobs, values=[1, 2, 1]).drive(what_if)

# %% [markdown]
# ## 6 · Parameters and FLOPs · 6 min
#
# The name says 8x7B. How many parameters, in billions, has Mixtral-8x7B?

# %% tags=["predict"]
lesson.predict("params")

# %%
known = [m for m in moe.configs.MODELS if not m.from_memory]
rows = [(m.name, f"{m.router.n_used}/{m.router.n_expert}", f"{m.total / 1e9:.2f}", m.published.total,
         f"{m.active / 1e9:.2f}", m.published.active, f"{m.bytes_per_expert('bf16') / 2**20:.4g}",
         f"{m.flops_per_token() / 1e9:.2f}") for m in known]
heads = ["k/E", "total, B", "printed", "active, B", "printed", "expert, MiB in bf16", "GFLOPs per token"]
views.table(["model", *heads], rows,
            "Computed from shapes alone. FLOPs follow what is active; memory follows the total.")

# %% tags=["reveal"]
m = moe.configs.model("Mixtral-8x7B")
billions = [round(n / 1e9, 1) for n in (m.total, m.active)]
lesson.reveal("params", billions[0], active=billions[1], expert=round(m.expert / 1e6, 1))

# %% [markdown]
# Who counts what is a rule of the makers: OpenAI and DeepSeek leave the input embedding out of "active", since it is only looked up. Under these rules all
# figures agree as printed, but for these:

# %%
for (name, what), why in moe.configs.EXCEPTIONS.items():
    print(f"{name}, {what}: {why}")

# %% [markdown]
# ## 7 · Your turn · 6 min
#
# **Tier 1.** How many different experts do n tokens need, if each draws k of E at random?

# %% tags=["exercise", "tier-1"]
def distinct(n_expert, k, n_tokens):
    """Expected number of different experts."""
    raise NotImplementedError

# %% tags=["solution"]
def distinct(n_expert, k, n_tokens):
    """Expected number of different experts."""
    return n_expert * (1 - (1 - k / n_expert) ** n_tokens)

# %% tags=["wrong"]
def distinct(n_expert, k, n_tokens):
    return min(n_expert, k * n_tokens)

# %% tags=["wrong"]
def distinct(n_expert, k, n_tokens):
    return n_expert * (1 - (1 - 1 / n_expert) ** (k * n_tokens))

# %% tags=["check"]
on = [(8, 2, 1), (8, 2, 4), (60, 4, 25), (896, 16, 64), (256, 8, 512)]
lesson.check("distinct", distinct, [moe.configs.expected_distinct(*case) for case in on], on)

# %% [markdown]
# **Tier 2.** Be the first half of `MUL_MAT_ID`: for each expert, the tokens that chose it.

# %% tags=["exercise", "tier-2"]
def group(ids, n_expert):
    """ids (T, k). Returns a list with one list for each expert: the tokens that chose it, ascending."""
    raise NotImplementedError

# %% tags=["solution"]
def group(ids, n_expert):
    """ids (T, k). Returns a list with one list for each expert: the tokens that chose it, ascending."""
    queues = [[] for _ in range(n_expert)]
    for t, chosen in enumerate(ids):
        for e in chosen:
            queues[e].append(t)
    return queues

# %% tags=["wrong"]
def group(ids, n_expert):
    return [np.flatnonzero(ids[:, 0] == e).tolist() for e in range(n_expert)]

# %% tags=["wrong"]
def group(ids, n_expert):
    return [np.flatnonzero(ids.ravel() == e).tolist() for e in range(n_expert)]

# %% tags=["check"]
on, expected = [], []
for layer in (0, 3, 5):
    ids = state.layer(layer, mixtral).experts[:20]
    on.append((ids, 8))
    expected.append([(queue // 2).tolist() for queue in state.rows_by_expert(ids)])
lesson.check("group", group, expected, on, [f"20 tokens in layer {n}" for n in (0, 3, 5)])

# %% [markdown]
# **Tier 3.** Who finds a place? First choices of all tokens go first, then the second ones. Your answer is judged by the graph.

# %% tags=["exercise", "tier-3"]
def kept(ids, n_expert, capacity):
    """ids (T, k). Returns (T, k): 1 where the choice found room, else 0."""
    raise NotImplementedError

# %% tags=["solution"]
def kept(ids, n_expert, capacity):
    """ids (T, k). Returns (T, k): 1 where the choice found room, else 0."""
    taken, out = [0] * n_expert, np.zeros(ids.shape, int)
    for rank in range(ids.shape[1]):
        for t, e in enumerate(ids[:, rank]):
            out[t, rank] = taken[e] < capacity
            taken[e] += 1
    return out

# %% tags=["wrong"]
def kept(ids, n_expert, capacity):
    taken, out = [0] * n_expert, np.zeros(ids.shape, int)
    for t, chosen in enumerate(ids):
        for rank, e in enumerate(chosen):
            out[t, rank] = taken[e] < capacity
            taken[e] += 1
    return out

# %% tags=["wrong"]
def kept(ids, n_expert, capacity):
    taken, out = [0] * n_expert, np.zeros(ids.shape, int)
    for rank in range(ids.shape[1]):
        for t, e in enumerate(ids[:, rank]):
            out[t, rank] = taken[e] <= capacity
            taken[e] += 1
    return out

# %% tags=["check"]
on, expected = [], []
for layer, k, factor in ((5, 2, 1.0), (0, 2, 0.5), (3, 3, 0.75)):
    router = moe.Router(8, k, capacity_factor=factor)
    run = state.layer(layer, router)
    on.append((run.experts, 8, router.capacity(64)))
    expected.append(run.kept.astype(int))
lesson.check("kept", kept, expected, on, ["layer 5, k = 2", "layer 0, k = 2", "layer 3, k = 3"])

# %% [markdown]
# ## 8 · Names · 1 min
#
# | here | elsewhere | left out |
# |---|---|---|
# | `moe.Router`, `build_router` | arguments and first half of `build_moe_ffn` in llama.cpp | noise, GShard's random second expert |
# | `normalise`, `scale`, `weight_sum` | `norm_w`, `w_scale`; `norm_topk_prob`, `routed_scaling_factor` | |
# | `moe.presets` | classes like `MixtralTopKRouter` in transformers | SparseMixer (Phi), Llama 4's weighted inputs |
# | `by_expert` | `ggml_compute_forward_mul_mat_id`: counts and row lists per expert | |
# | `capacity_factor`, `kept` | expert capacity (Switch, GShard) | not in llama.cpp; ours computes dropped rows, times 0 |
# | `moe.configs` | `config.json` and model cards | vision encoders |
#
# **Next**: 17 asks how a load becomes even, 18 adds experts that everybody uses. Lesson 19 goes back to the scheduler: if a batch needs only some of the
# experts, only some of the bytes have to move.
