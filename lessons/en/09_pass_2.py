# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 09 · Pass 2: four sweeps
#
# **50 minutes** · before it: 08, pass 1 · after it: 10, pass 3
#
# Pass 1 tied a few nodes to places, by memory and weights. All others have neighbours. Pass 2 lets backends *spread* from the nodes that have one
# to those beside them, in four walks over the graph.
#
# Afterwards you can carry out each walk by hand, say which node takes which backend from whom, and answer the question of this lesson: when does
# the CPU get any work at all?

# %% tags=["setup"]
import inspect

from workbench import lessons, views, widgets
from workbench.scheduler.passes import expand
from workbench.scheduler.whatif import Change

lesson = lessons.open_lesson("09")
state = lesson.state

# %% [markdown]
# ## 1 · A sweep · 7 min
#
# All four walks are one function, which is short enough to read. It carries a backend along, `current`, and offers it to each open node that it
# meets. In the first two sweeps the CPU, the last backend, is not carried (`skip_last`).

# %%
print(inspect.getsource(expand))

# %% [markdown]
# The six steps of lesson 08. Pass 1 has placed A on the GPU; the GPU cannot do D. Now the first sweep walks down, from A to F.

# %%
chain = state.case("A B C | D | E F")
state.sheet(chain, "pass1")

# %% tags=["predict"]
lesson.predict("down")

# %%
views.table(["node", "backend", "cause"], state.decided(chain, "pass2_gpu_down"),
            "2.sup: a neighbour runs there, and the backend supports the op.")

# %% tags=["reveal"]
got = [name for name, *_ in state.decided(state.case("A B C | D | E F"), "pass2_gpu_down")]
lesson.reveal("down", " ".join(got))

# %% [markdown]
# D keeps its question mark: the GPU is the only backend that comes by in this sweep. And does a neighbour have to be a source? No: what counts is the
# *order of nodes*, a line, not the arrows of the graph.
#
# ## 2 · Upwards · 6 min
#
# The second sweep walks from the last node to the first. Three layers, each a norm, a product and a residual sum; the middle layer's weights are
# on the host. The table shows passes 1 and the first sweep.

# %%
layers = state.case("layers, one on the host")
state.sheet(layers, "pass1", "pass2_gpu_down")

# %% tags=["predict"]
lesson.predict("up")

# %%
views.table(["node", "backend", "cause"], state.decided(layers, "pass2_gpu_up"),
            "In the order of the walk: from the end to the beginning, up to a node of the CPU.")

# %% tags=["reveal"]
up = state.decided(state.case("layers, one on the host"), "pass2_gpu_up")
lesson.reveal("up", dict((name, b) for name, b, _ in up).get("act1", "?"))

# %% [markdown]
# Between a node of the CPU and one of the GPU, the GPU takes everything, from whichever side it comes. Step through both sweeps. In each step one
# node is decided; the sentence says from whom it takes its backend.

# %%
state.stepper(layers, "pass2_gpu_down", "pass2_gpu_up", title="Two sweeps",
              caption="Downwards, then upwards: the GPU spreads until it meets a node of the CPU.")

# %% [markdown]
# ## 3 · When the CPU gets work · 10 min
#
# Sweeps three and four are the same walks once more, and now the CPU is carried as well. What is left for it? ggml's source comments: *"cpu will
# never be used unless weights are on cpu, or there are no gpu ops between cpu ops"*. First a real case: one step of the tiny Mixtral, six layers,
# all experts on the host, everything else on the GPU. In each layer there are three products with experts: gate, up, down.

# %% tags=["predict"]
lesson.predict("cpu")

# %%
case = state.model_case()
rows = [(stage, *by.values()) for stage, by in state.by_stage(case).items()]
rest = [name for name, b, _ in state.decided(case, "pass2") if b == "CPU"]
print("the CPU's in pass 2:", *rest, sep="\n  ")
views.table(["nodes decided by", "GPU", "CPU"], rows,
            f"{len(state.nodes(case))} nodes compute something. "
            "Pass 1 gave the CPU its experts and the embedding.")

# %% tags=["reveal"]
spread = [b for _, b, _ in state.decided(state.model_case(), "pass2")]
lesson.reveal("cpu", spread.count("CPU"), gpu=spread.count("GPU"))

# %% [markdown]
# So here is a rule, for one GPU. Take an open node and look along the line of nodes, up and down, for the *nearest that pass 1 has placed*. If one of
# the two is the GPU's, and the GPU can do the op, the GPU gets it. Only if not, the CPU may. Let us test it on graphs drawn at random:

# %%
def predicted(i, names):
    near = [next((n for n in side if n != "?"), "") for side in (names[:i][::-1], names[i + 1:])]
    return "GPU" if "GPU" in near else "CPU" if "CPU" in near else "?"

said, did = dict.fromkeys(["GPU", "CPU", "?"], 0), dict.fromkeys(["GPU", "CPU", "?"], 0)
for case in state.random_cases(60):
    before, after = state.names(case, "pass1"), state.names(case, "pass2_rest_up")
    for i, able in enumerate(state.supported(case, "GPU")):
        if before[i] == "?" and able:
            assert after[i] == predicted(i, before)
            said[predicted(i, before)] += 1
            did[after[i]] += 1
words = {"GPU": "go to the GPU", "CPU": "go to the CPU", "?": "stay open"}
views.side_by_side([(f"open nodes that {words[b]}", said[b], did[b]) for b in said],
                   ("by the rule", "by the sweeps"), "Sixty graphs, and the rule never fails.")

# %% [markdown]
# And where the GPU *cannot* do the op? Then it is passed by twice, and the sweeps of the CPU come: if the CPU is the nearest on one side by then, it
# takes the node; if the GPU stands on both sides, nobody does, as with D. What stays open is pass 3's.
#
# llama.cpp makes use of the rule. With `--no-kv-offload` the cache is the host's, so the nodes that write into it are the CPU's by pass 1. It assigns just one
# more, the last of attention: then all of attention stands between nodes of the CPU, and no GPU gets in.

# %%
case = state.model_case(experts="", host_cache=True)
mine = case.changed(*(Change.assign(f"kqv_out-{i}", "CPU") for i in range(6)))
before, after = (state.after(c, "pass2_rest_up") for c in (case, mine))
names = ("Kcur-2", "kq-2", "kq_soft_max-2", "kqv-2", "kqv_out-2", "attn_out-2")
views.table(["node of layer 2", "left to the passes", "kqv_out assigned to the CPU"],
            [(name, " ".join(before[name]), " ".join(after[name])) for name in names],
            "One assignment by hand, and pass 2 takes three more nodes along.")

# %% [markdown]
#
# **What if?** Move weights, take ops away, change the batch. The real passes run again at each move; the run before stays as A.

# %%
widgets.WhatIf(state.case("layers, one on the host"))

# %% [markdown]
# With a large batch the picture changes at the root: the card takes the experts' products in pass 1, by offer, and nothing of the CPU is left in
# between.

# %%
rows = []
for n_tokens in (1, 64):
    found = state.by_stage(state.model_case(n_tokens))
    cpu = {stage: by["CPU"] for stage, by in found.items()}
    rows.append((n_tokens, cpu["pass1"], sum(n for stage, n in cpu.items() if stage.startswith("pass2")),
                 sum(by["GPU"] for by in found.values())))
views.table(["tokens", "CPU by pass 1", "CPU by pass 2", "GPU in all"], rows,
            "In the last layer only the wanted row is computed: a batch of 1, so its experts stay.")

# %% [markdown]
# ## 4 · Views · 4 min
#
# A view computes nothing: it is another description of memory that somebody else has written. Attention is full of them. What do the sweeps do
# where they meet one?

# %%
attention = state.case("attention")
state.sheet(attention, "pass1")

# %% tags=["predict"]
lesson.predict("views")

# %%
state.sheet(attention, "pass1", "pass2_rest_up", "pass4",
            caption="Views are open until pass 4, which puts them where the memory is that they show.")

# %% tags=["reveal"]
after = state.after(state.case("attention"), "pass2_rest_up")
lesson.reveal("views", f"{after['v (heads)'][0]} {after['v_cont'][0]}")

# %% [markdown]
# ## 5 · BLAS in the sweeps · 5 min
#
# "GPU" in the names of the sweeps means: any backend but the last. BLAS, which only multiplies, is one. No graphics card here; the weight w0 lies in
# host memory, on which both BLAS and the CPU work. (BLAS stands first in the list.) `z` is a product of hs with itself, without a weight.

# %%
blas = state.case("blas_weights_direct")
state.sheet(blas, "pass1")

# %% tags=["predict"]
lesson.predict("blas")

# %%
state.sheet(blas, "pass1", "pass2_rest_up", "pass3",
            caption="BLAS is carried past hs, which it cannot do, and takes z. "
            "Pass 3 gives the rest to the CPU.")

# %% tags=["reveal"]
after = state.after(state.case("blas_weights_direct"), "pass2_rest_up")
lesson.reveal("blas", f"{after['hs'][0]} {after['z'][0]}")

# %% [markdown]
# Five recorded cases once more, after each sweep: what real ggml decided, and what our passes do.

# %%
rows = [(f"{name}: after 4 sweeps", n, same) for name, n, same in state.beside_ggml(*state.SWEEPS)]
assert all(n == same for _, n, same in rows)
views.side_by_side(rows, ("real ggml", "agree with ours"),
                   "Each tensor after each sweep, as llama.cpp had it.")

# %% [markdown]
# ## 6 · Two cards · 6 min
#
# A product on GPU0, a product on GPU1, and three steps between them. GPU0 lacks SILU; GPU1 can do everything.

# %%
two = state.case("sweep_unsupported_skipped")
state.sheet(two, "pass1")

# %% tags=["predict"]
lesson.predict("two")

# %%
state.sheet(two, "pass1", "pass2_gpu_down", "pass2_gpu_up", "pass2_rest_up",
            caption="First come, first served: the sweep down has s2 before the sweep up can offer.")

# %% tags=["reveal"]
lesson.reveal("two", " ".join(state.names(state.case("sweep_unsupported_skipped"), "pass2_rest_up")[1:4]))

# %% [markdown]
# Once pass 3 has settled s1, these five nodes make four splits. Pass 2 counts no copies; it is a rule of thumb for the usual case, in which neighbours
# belong together. Where it errs in practice: the tiny Mixtral over two GPUs, layers 0 to 3 on the first, 4 and 5 on the second. The norm with
# which layer 4 begins has no weight (its scale is a node of its own). So the first card takes it, on the way down:

# %%
case = state.model_case(gpus=2, experts="")
mine = case.changed(Change.assign("norm-4", "GPU1"))
rows = []
for name, c in (("left to the passes", case), ("norm-4 assigned to GPU1", mine)):
    border = [t for t, _ in c.outcome().splits[-1].inputs if t.startswith(("norm", "l_out"))]
    rows.append((name, *state.after(c, "pass2_rest_up")["norm-4"], ", ".join(border), c.outcome().copied))
views.table(["", "norm-4 on", "cause", "copied from card to card", "bytes per run"], rows,
            "The norm and what it is made of both cross the border, where one would do.")

# %% [markdown]
# llama.cpp knows this. Its builder assigns each layer's norm by hand to the layer's own device, for small batches or where every layer is on a card,
# with the comment that the scheduler should be fixed instead.
#
# ## 7 · Practice · 4 min
#
# Pass 1 is done; the sweeps come, and ask you before each decision. First the sheet, then the stepper, which keeps the score. Take other seeds,
# and two cards (`devices=2`), until you make no more mistakes.

# %%
seed, devices = 0, 1
state.sheet(state.practice(seed, devices), "pass1")

# %%
seed, devices = 0, 1
state.stepper(state.practice(seed, devices), "pass2", predict=True, title=f"Practice {seed}",
              caption="A graph drawn from a seed; the real sweeps are the judge.")

# %% [markdown]
# ## 8 · Your turn · 7 min
#
# **Tier 1.** Three graphs. Write the backend of each node that computes something after pass 2, `?` where it is still open.

# %%
views.Stack(*(state.sheet(state.case(name)) for name in state.unseen))

# %% tags=["exercise", "tier-1"]
first = ...        # h a b c e
second = ...       # both packed gate act product
third = ...        # up up_b act down down_b sum

# %% tags=["solution"]
first = "CPU GPU ? GPU GPU"
second = "GPU GPU CPU CPU CPU"
third = "GPU GPU GPU BLAS GPU GPU"

# %% tags=["wrong"]
first = "CPU GPU CPU GPU GPU"
second = "GPU GPU CPU CPU CPU"
third = "GPU GPU GPU BLAS GPU GPU"

# %% tags=["wrong"]
first = "CPU GPU ? GPU GPU"
second = "GPU GPU CPU ? ?"
third = "GPU GPU GPU BLAS GPU GPU"

# %% tags=["check"]
cases = [state.case(name) for name in state.unseen]
expected = [name for case in cases for name in state.names(case, "pass2_rest_up")]
steps = [f"{case.name}: {name}" for case in cases for name in state.nodes(case)]
lesson.check("by-hand", state.typed(first, second, third), expected, steps=steps)

# %% [markdown]
# **Tier 2.** Write one sweep. `nodes` are names in the order of the walk; `of[name]` is a number, -1 for open; `supports(b, name)` asks backend `b`;
# `skip` is the number of the backend that must not spread, or None. Return the decisions, in order.

# %% tags=["exercise", "tier-2"]
def sweep(nodes, of, supports, skip):
    """[(name, backend), …]"""
    raise NotImplementedError

# %% tags=["solution"]
def sweep(nodes, of, supports, skip):
    """[(name, backend), …]"""
    current, made = -1, []
    for name in nodes:
        if of[name] != -1:
            current = -1 if of[name] == skip else of[name]
        elif current != -1 and supports(current, name):
            made.append((name, current))
    return made

# %% tags=["wrong"]
def sweep(nodes, of, supports, skip):
    current, made = -1, []
    for name in nodes:
        if of[name] != -1:
            current = -1 if of[name] == skip else of[name]
        elif current != -1 and supports(current, name):
            made.append((name, current))
        else:
            current = -1
    return made

# %% tags=["wrong"]
def sweep(nodes, of, supports, skip):
    current, made = -1, []
    for name in nodes:
        if of[name] != -1 and of[name] != skip:
            current = of[name]
        elif of[name] == -1 and current != -1 and supports(current, name):
            made.append((name, current))
    return made

# %% tags=["check"]
names = ("A B C | D | E F", "layers, one on the host", "sweep_unsupported_skipped",
         "blas_weights_direct", "views")
mine, q = state.sweeps(sweep, *map(state.case, names), *(state.practice(i, 2) for i in range(4)))
lesson.check("sweep", mine, q.expected, q.on, q.steps)

# %% [markdown]
# **Tier 3.** All of pass 2: two sweeps without the CPU, two with it, down and up each time. `nodes` are in the order of the graph; return the numbers
# of all nodes afterwards, in that order.

# %% tags=["exercise", "tier-3"]
def pass2(nodes, of, supports, cpu):
    """The backend of each node; of is a dictionary, which you may change."""
    raise NotImplementedError

# %% tags=["solution"]
def pass2(nodes, of, supports, cpu):
    """The backend of each node; of is a dictionary, which you may change."""
    for skip in (cpu, None):
        for walk in (nodes, nodes[::-1]):
            current = -1
            for name in walk:
                if of[name] != -1:
                    current = -1 if of[name] == skip else of[name]
                elif current != -1 and supports(current, name):
                    of[name] = current
    return [of[name] for name in nodes]

# %% tags=["wrong"]
def pass2(nodes, of, supports, cpu):
    for walk in (nodes, nodes[::-1]):
        for skip in (cpu, None):
            current = -1
            for name in walk:
                if of[name] != -1:
                    current = -1 if of[name] == skip else of[name]
                elif current != -1 and supports(current, name):
                    of[name] = current
    return [of[name] for name in nodes]

# %% tags=["wrong"]
def pass2(nodes, of, supports, cpu):
    for name in nodes:
        if of[name] == -1:
            of[name] = next(b for b in range(cpu + 1) if supports(b, name))
    return [of[name] for name in nodes]

# %% tags=["check"]
names = ("layers, one on the host", "attention", "MLP on the host", "no weights")
drawn = [state.practice(i, devices, chain)
         for i in range(5) for devices in (1, 2) for chain in (True, False)]
q = state.pass2(*map(state.case, names), *drawn)
lesson.check("pass2", pass2, q.expected, q.on, q.steps)

# %% [markdown]
# ## 9 · What is what, and what comes next · 1 min
#
# | here | in ggml | left out here |
# |---|---|---|
# | `passes.expand`, four times | pass 2 of `ggml_backend_sched_split_graph`: expand gpu down, gpu up, rest down, rest up | – |
# | cause `2.sup` | `ggml_backend_sched_set_if_supported` | – |
# | `passes.computed` | `ggml_is_view_op`: VIEW, RESHAPE, PERMUTE, TRANSPOSE, NONE | a parameter counts as computed here |
# | `supports`, asked once for each node and backend | asked at every visit | – |
# | "GPU" sweeps | `*node_backend_id == sched->n_backends - 1` is skipped | – |
# | `scheduler.set_backend(norm, …)` | `llama_context::graph_get_cb`, norm and `l_last` | our models leave it to the passes |
#
# **Next, 10:** D and hs are still open. Pass 3 finds their backends, and moves other nodes up in the list of priorities.
