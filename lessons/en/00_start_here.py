# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 00 · Start here
#
# **50 minutes** · before it: nothing but a little Python · after it: 01, tensors
#
# You will run a really trained mixture-of-experts model, through a compute graph that you can read node by node, to the
# numbers that llama.cpp gets. Then you will look at the part that gives such models their name: the experts.
#
# A question wants your guess *before* you run the cell below it. Guess boldly: a wrong guess is kept, compared with what
# the code does, and teaches most. Sections can be run in any order; each needs only the cell below.

# %% tags=["setup"]
import numpy as np

from workbench import lessons, models, views, widgets

lesson = lessons.open_lesson("00")
state = lesson.state
model = state.model

# %% [markdown]
# ## 1 · This machine · 2 min
#
# All lessons run on the CPU alone. Where a GPU is found, later ones use it too. This table is about *your* machine, so it
# is the one output of this page that may differ from the printed one. `python -m workbench doctor` in a terminal says more.

# %% tags=["device", "nbval-ignore-output"]
from workbench.cli.doctor import examine

parts = ("CPU", "memory", "BLAS", "GPU")
found = [(f.what, f.found) for f in examine() if f.what in parts]
views.table(["", "found"], found, "What this machine has. A missing GPU is no problem.")

# %% [markdown]
# ## 2 · A real model speaks · 3 min
#
# The model is small, not fake: 3.8 million parameters, trained for half an hour on Python, English, C, Chinese, mathematics
# and numbers. It imitates the surface of its texts and knows nothing. The file has the format of llama.cpp, which runs it too.

# %%
sampler = models.Sampler(temperature=0.7, seed=1)
text = models.generate(model, state.prompt, 48, sampler).run()
print(model)
print(state.prompt + "|" + text)

# %% [markdown]
# Everything behind the bar was made up, token by token, by the code of this package: no PyTorch, no llama.cpp. But is it
# the same model, or only something that sounds like it?
#
# ## 3 · The same numbers as llama.cpp · 4 min
#
# Before a token is chosen, the model gives each of its 2,048 tokens a score, the *logit*. llama.cpp's logits for one prompt were
# recorded once, on another machine, with the same weights.

# %% tags=["predict"]
lesson.predict("agreement")

# %%
recorded = state.llama_cpp
theirs = np.array(recorded["logits"], np.float32)
with models.Session(model) as session:
    ours = session.decode(recorded["tokens"])

best = np.argsort(-theirs)[:5]
words = [repr(model.tokenizer.decode([token])) for token in best.tolist()]
rows = zip(words, (f"{x:.3f}" for x in ours[best]), (f"{x:.3f}" for x in theirs[best]))
views.table(["next token", "here", "llama.cpp"], rows,
            "The five likeliest tokens after “… and his men compassed David”.")

# %% tags=["reveal"]
worst = float(np.abs(ours - theirs).max())
distance = "equal" if worst == 0 else "close" if worst < 1e-4 else "far"
lesson.reveal("agreement", distance, largest=round(float(theirs.max()), 2))

# %% [markdown]
# ## 4 · The graph of one token · 8 min
#
# A *compute graph* is a list of tensors. Each says which operation makes it, and from which other tensors. The list is in an
# order in which it can be computed. Here are the first ten nodes of the graph for one token.

# %%
graph = state.step.graph
first = [(i, t.name, t.desc, "×".join(map(str, t.ne[:t.n_dims])))
         for i, t in enumerate(graph.nodes[:10])]
views.table(["node", "name", "operation", "shape"], first,
            "A token becomes a row of 128 numbers, then queries, keys and values.")

# %% tags=["predict"]
lesson.predict("nodes")

# %% tags=["reveal"]
graph = state.step.graph
sizes = {}                                 # nodes of each layer; -1 is what stands around the layers
for part in state.step.segments:
    sizes[part.layer] = sizes.get(part.layer, 0) + part.last - part.first
lesson.reveal("nodes", len(graph.nodes), layer=sizes[2], last=sizes[5], around=sizes[-1],
              theirs=state.llama_cpp["n_nodes_decode"])

# %% [markdown]
# A graph is legal when each node stands behind everything it reads. Every lesson checks such a rule after every run. Then look at
# the part of layer 2 that this course is about, its *experts*: eight small networks of which each token uses two. `MUL_MAT` is a
# matrix product; `MUL_MAT_ID` holds eight matrices and multiplies with those whose numbers, the *ids*, it is given.

# %%
graph = state.step.graph
place = {t: i for i, t in enumerate(graph.nodes)}
assert all(place[s] < i for t, i in place.items() for s in t.sources() if s in place)

layer = [t for t in graph.nodes if t.name.endswith("-2") and ("moe" in t.name or "l_out" in t.name)]
views.graph_picture(
    layer, "Three MUL_MAT_ID nodes read the experts' weights, and each of them needs to be told which: "
    "one of its sources is ffn_moe_topk, the ids. Where do these come from? Follow the lines upwards.",
    "Graph of the expert part of layer 2, top to bottom: router scores, softmax, sort, top 2; then "
    "the gate, up and down products of the chosen experts, weighted and added.")

# %% [markdown]
# Here all of this runs on the CPU. That CPU has more than one core, though.

# %% tags=["predict"]
lesson.predict("threads")

# %% tags=["reveal"]
plan = state.plan
cut = sum(plan.n_tasks(i) > 1 for i in range(len(state.step.graph.nodes)))
lesson.reveal("threads", cut)

# %% [markdown]
# ## 5 · The same graph over two devices · 5 min
#
# The usual way to run such a model on a card that is too small: everything goes to the card except the experts, which stay in the host's memory
# and are computed there (`--cpu-moe` in llama.cpp). Then the graph is cut into *splits*. A split is a run of nodes, one after the other, that one
# device computes; before it begins, the results that it needs from the other device are copied over. A simulated card will do for this.

# %% tags=["predict"]
lesson.predict("splits")

# %%
out = state.two_devices.outcome()
rows = [(i, s.backend, out.nodes[s.first].name, s.last - s.first, ", ".join(name for name, _ in s.inputs))
        for i, s in enumerate(out.splits[:5])]
views.table(["split", "device", "first node", "nodes", "copied in before"], rows,
            "The first five splits: the embedding, attention and router, experts, and so on.")

# %%
views.schedule_picture(*state.two_devices.scheduler_and_graph(), title="One token of the tiny Mixtral",
                       caption="All 318 nodes in order: six times to the host for the experts, and back.")

# %% tags=["reveal"]
out = state.two_devices.outcome()
lesson.reveal("splits", len(out.splits), layers=model.hparams.n_layer, copied=out.copied)

# %% [markdown]
# Who decides all this, by which rules, and what a border costs: lessons 08 to 13.
#
# ## 6 · Who picks the experts? · 8 min
#
# Type a prompt and press *Generate*. Each token stands on the colour, and carries the number, of its first expert in the chosen layer.
# Try a line of Python, then a verse, and compare layer 0 with layer 5. Tokens on a double line are your prompt.

# %%
source = state.token_source(models.Sampler(temperature=0.7, seed=1))
widgets.PromptPlayer(source, model.hparams.moe_layers, state.prompt, n_tokens=32, layer=5)

# %% tags=["predict"]
lesson.predict("chooser")

# %% tags=["reveal"]
routing = state.step.routings[2]
chooser = routing.experts.root()           # the node whose first two numbers are the ids
weight = routing.logits.src[0].name
lesson.reveal("chooser", chooser.desc, node=chooser.name, weight=weight)

# %% [markdown]
# If the choice comes from the token's own numbers, another token must lead to other experts. Move the slider: each move runs the
# whole model again. Run A stays beside run B until the next move.

# %%
words, kept = [" Moses", " the", " me", " return", " 12"], {}

def what_if(i):
    routes = state.routes(model.tokenizer.encode("And God said unto" + words[i]))
    routes.require_weight_sum(model.hparams.router)    # the weights of a token sum to one
    now = (words[i], [sorted(layer[-1].tolist()) for layer in routes.experts])
    a, kept["last"] = kept.get("last", now), now
    rows = [(n, *(f"{e[0]} and {e[1]}" for e in (x, y)), "" if x == y else "differs")
            for n, (x, y) in enumerate(zip(a[1], now[1]))]
    return views.table(["layer", f"A: “{a[0]}”", f"B: “{now[0]}”", ""], rows,
                       "Experts of the last word of “And God said unto …”.")

_ = what_if(0)
widgets.Range(value=1, max=4, label="last word", names=words).drive(what_if)

# %% [markdown]
# ## 7 · Active, resident, moved · 7 min
#
# Three numbers are often mixed up: the weights a token *uses*, the weights that must be *at hand*, and the bytes that *move*.
# First, predicted numbers meet counted ones.

# %%
hp = model.hparams
expert = 3 * hp.n_embd * hp.n_ff_exp
attention = 2 * hp.n_embd * hp.n_embd + 2 * hp.n_embd * hp.n_embd_kv
outside = 2 * hp.n_vocab * hp.n_embd + hp.n_embd
per_layer = attention + 2 * hp.n_embd + hp.n_expert * hp.n_embd
total = outside + hp.n_layer * (per_layer + hp.n_expert * expert)
read = sum(t.src[2].ne[0] * t.src[0].nb[2] for t in state.step.graph.nodes if t.op == "MUL_MAT_ID")
all_experts = 2 * hp.n_layer * hp.n_expert * expert
views.side_by_side([
    ("parameters: formula, tensors of the file", total, model.n_params),
    ("parameters: formula, model card", total, 3_776_128),
    ("bytes: 2 per parameter, the file", 2 * total, model.path.stat().st_size),
    ("expert bytes of one token: 2/8 of all, the graph", all_experts // 4, read)],
    ("predicted", "found"), "The file is 1% larger: f32 norms and routers, and the vocabulary is in it.")

# %% tags=["predict"]
lesson.predict("resident")

# %%
seen, growth = set(), []
for token in state.run:
    seen |= {(n, e) for n, ids in enumerate(token["experts"]) for e in ids}
    growth.append(len(seen))

figure = views.new_figure(7.2, 2.6)
axes = figure.add_subplot(xlabel="tokens", ylabel="experts needed so far", ylim=(0, 52))
axes.step(range(1, len(growth) + 1), growth, where="post", color=views.OKABE_ITO[4], lw=2)
axes.axhline(12, color=views.OKABE_ITO[5], ls="--")
axes.text(len(growth), 14, "12 for any one token", ha="right", color=views.OKABE_ITO[5])
views.picture(
    figure, f"Different experts used so far: 12 at the first token, {growth[-1]} of 48 at the last.",
    f"After {growth.index(growth[-1]) + 1} tokens {growth[-1]} of the 48 experts have been used.")

# %% tags=["reveal"]
needed = {(n, e) for token in state.run for n, ids in enumerate(token["experts"]) for e in ids}
lesson.reveal("resident", len(needed), tokens=len(state.run), all=hp.n_layer * hp.n_expert)

# %% tags=["predict"]
lesson.predict("hit")

# %% tags=["reveal"]
experts = model.experts(2)
matrices = (experts.gate, experts.up, experts.down)
flops = sum(2 * w.ne[0] * w.ne[1] for w in matrices)
lesson.reveal("hit", sum(w.nb[2] for w in matrices), flops=flops)

# %% [markdown]
# ## 8 · Step through a text · 5 min
#
# The same text, one token at a time, in layer 5. Use the buttons, or click into the row of buttons and press ← → Home End; *n* and *p*
# jump to the next and the previous change. The sentence names the cause.

# %%
trace = views.route_steps(state.run, layer=5, n_expert=8)
assert all(abs(sum(mark[2] for mark in step["marks"]) - 1) < 1e-3 for step in trace["steps"])
widgets.Stepper(trace, "Neighbouring tokens often share an expert in layer 5. A cache can use that.")

# %% [markdown]
# Do experts have subjects? Nobody told them to. Count which ones 192 tokens of each kind of text used.

# %%
shares = {name: routes.counts()[5] / routes.n_tokens / model.hparams.n_expert_used
          for name, routes in state.domains.items()}
top = max(shares, key=lambda name: shares[name].max())
views.heat_picture(
    shares, f"Equal use would be 12.5% everywhere; one expert takes {max(shares[top]):.0%} of {top}.",
    "Heat map: share of each expert of layer 5 in the choices of six kinds of text.",
    "expert of layer 5", top=0.5)

# %% [markdown]
# ## 9 · Your turn · 6 min
#
# Three exercises, each a little harder. The cell below each of them compares yours with what the program says, and shows the first
# difference. Solutions are in the folder `solutions`.
#
# **Tier 1.** How many bytes does one expert take? Your formula is held against the tensors of three models.

# %% tags=["exercise", "tier-1"]
def expert_bytes(d, f, bytes_per_number):
    """Bytes of one expert with input width d and hidden width f."""
    raise NotImplementedError

# %% tags=["solution"]
def expert_bytes(d, f, bytes_per_number):
    """Bytes of one expert with input width d and hidden width f."""
    return 3 * d * f * bytes_per_number

# %% tags=["wrong"]
def expert_bytes(d, f, bytes_per_number):
    return 2 * d * f * bytes_per_number

# %% tags=["wrong"]
def expert_bytes(d, f, bytes_per_number):
    return 3 * d * f

# %% tags=["check"]
on, expected = [], []
for name in ("tiny-mixtral-f16", "tiny-mixtral-q4_0", "tiny-deepseek-f16"):
    with models.load(name) as other:
        gate, up, down = (other.weight(f"ffn_{part}_exps", 1) for part in ("gate", "up", "down"))
        on.append((gate.ne[0], gate.ne[1], gate.dtype.block_bytes / gate.dtype.block))
        expected.append(gate.nb[2] + up.nb[2] + down.nb[2])
lesson.check("expert-bytes", expert_bytes, expected, on)

# %% [markdown]
# **Tier 2.** Be the router: from the scores of eight experts to two ids and two weights.

# %% tags=["exercise", "tier-2"]
def route(scores, k):
    """The ids of the k best experts, best first, and their weights, which sum to one."""
    raise NotImplementedError

# %% tags=["solution"]
def route(scores, k):
    """The ids of the k best experts, best first, and their weights, which sum to one."""
    ids = np.argsort(-scores)[:k]
    return ids, scores[ids] / scores[ids].sum()

# %% tags=["wrong"]
def route(scores, k):
    ids = np.argsort(-scores)[:k]
    return ids, scores[ids]

# %% tags=["wrong"]
def route(scores, k):
    ids = np.argsort(scores)[:k]
    return ids, scores[ids] / scores[ids].sum()

# %% tags=["check"]
tokens = model.tokenizer.encode(state.prompt)
routes = state.routes(tokens)
on = [(row, 2) for row in state.scores(tokens, layer=2)]
expected = list(zip(routes.experts[2], routes.weights[2]))
steps = [f"token {i}, {model.tokenizer.decode([t])!r}" for i, t in enumerate(tokens)]
lesson.check("route", route, expected, on, steps, tolerance=1e-4)

# %% [markdown]
# **Tier 3.** Suppose memory holds only the experts of the token just before. How many must be loaded for each token?

# %% tags=["exercise", "tier-3"]
def loads(experts):
    """experts: a list of ids per token. Returns, per token, how many the one before did not use."""
    raise NotImplementedError

# %% tags=["solution"]
def loads(experts):
    """experts: a list of ids per token. Returns, per token, how many the one before did not use."""
    before, counts = set(), []
    for ids in experts:
        counts.append(len(set(ids) - before))
        before = set(ids)
    return counts

# %% tags=["wrong"]
def loads(experts):
    seen, counts = set(), []
    for ids in experts:
        counts.append(len(set(ids) - seen))
        seen |= set(ids)
    return counts

# %% tags=["check"]
trace = views.route_steps(state.run, layer=5, n_expert=8)
experts = [token["experts"][5] for token in state.run]
expected = [step["new"] for step in trace["steps"]]
lesson.check("loads", lambda: loads(experts), [expected], [()], [f"all {len(experts)} tokens"])

# %% [markdown]
# ## 10 · What is what, and what comes next · 2 min
#
# | here | in ggml, llama.cpp | left out here |
# |---|---|---|
# | `Tensor` | `ggml_tensor` | `extra`, the private pointer of a back end |
# | `CGraph` | `ggml_cgraph` | gradients, until lesson 06 |
# | `Plan` | `ggml_cplan` | abort callback, thread priorities |
# | `Scheduler`, its splits | `ggml_backend_sched` | nothing: lessons 08 to 14 |
# | `Session` | `llama_context` | encoder models, adapters, embeddings |
# | `models.load` | `llama_model_load_from_file` | architectures other than `llama` and `deepseek` |
# | the router, `moe.build_router` | `build_moe_ffn` | sigmoid gating and expert groups, until lesson 18 |
# | `models.Sampler` | `llama_sampler` | penalties, grammars |
#
# **Next, 01:** the word *tensor* is opened: shape, strides, views without copies, and why a number of four bits takes a little more than four bits.
#
# | you want to know | lessons |
# |---|---|
# | what tensors, contexts and graphs are | **01**, 02, **03** |
# | where memory and time go on a CPU | **04**, 05 |
# | how a graph is trained | 06 |
# | why llama.cpp split my graph like this | **07**, **08 to 12**, 13, 14 |
# | how expert layers work, and what they cost | 15, **16**, 17, 18 |
# | how experts move between memories | **19**, 20, **21**, **22** |
# | how to run a model that does not fit | 23 to 26 |
# | all of this with a GGUF file of my own | 27 |
#
# The bold ones are the core, a day's path. They are added one by one: those in this folder can be run.
