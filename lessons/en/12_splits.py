# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 12 · Pass 5: splits, inputs, rewrites
#
# **50 minutes** · before it: 11, pass 4 · after it: 13, running the splits
#
# After four passes every node has a backend. The fifth walks over the nodes once more and cuts them into *splits*, each a run of nodes for one
# backend. What a split needs from elsewhere becomes one of its *inputs*, and is copied in before it runs.
#
# Afterwards you can predict the splits of a graph that you have never seen, say why each one begins and what it costs, and ask for the smallest
# change that would do without a border.

# %% tags=["setup"]
import inspect

from workbench import lessons, views, widgets
from workbench.scheduler import Scheduler, Splitter
from workbench.scheduler.whatif import Change, why_not

lesson = lessons.open_lesson("12")
state = lesson.state

# %% [markdown]
# ## 1 · A B C | D | E F · 7 min
#
# The article's case once more. "A, B and C are on CUDA, D only on the CPU, E and F can go back to CUDA. Then the splits usually become: A B C, D,
# E F." The first four passes have decided as it says:

# %%
chain = state.case("A B C | D | E F")
state.assigned(chain)

# %% [markdown]
# So the borders are no secret. What the article does not say: which tensors have to be copied from one memory to another in each run?

# %% tags=["predict"]
lesson.predict("copied")

# %%
views.outcome_table(chain)

# %% tags=["reveal"]
lesson.reveal("copied", " ".join(state.copied(chain)), bytes=chain.outcome().copied)

# %% [markdown]
# Step through pass 5. Five kinds of steps: a split begins, a copy is made, it becomes an input of the split, a source is rewritten to it; and a
# stage begins. Views are passed over, as by pass 2: a view neither begins a split nor ends one, wherever it is, and lies in the split in which it
# stands. It may well be an *input*, as lesson 11 has shown.

# %%
state.stepper(chain, "pass5", title="Pass 5",
              caption="Three splits, and into each of them one tensor is copied.")

# %% [markdown]
# *Rewritten* means: D's source is another tensor now. In ggml it stays so, which is one reason why a graph has to be built again, or reset, before
# anything else is done with it. Here sources are only changed while memory is planned and while splits run:

# %%
scheduler, graph = chain.scheduler_and_graph()
scheduler.split(graph)
d, names = graph.find("D"), []
names.append(d.src[0].name)
with scheduler.splitter.rewritten():
    names.append(d.src[0].name)
names.append(d.src[0].name)
print("D reads, before, while and after the splits run:", ", ".join(names))

# %% [markdown]
# The name says: a copy of C for the CPU, in pipeline slot 0. You meet such names in llama.cpp's output under `GGML_SCHED_DEBUG=2`. The bytes, by
# formula, by pass 5, and copied by a real run:

# %%
formula = 3 * 64 * chain.batch * 4          # x, C and D: 64 numbers for each of 4 tokens, in f32
inputs, (traced, _) = chain.outcome().copied, state.traced(chain)
assert inputs == traced
views.side_by_side([("formula → inputs of splits", formula, inputs),
                    ("inputs of splits → copied in a run", inputs, traced)],
                   ("first", "second"), "What a split lists is what the runtime copies.")

# %% [markdown]
# ## 2 · Weights that must be copied · 6 min
#
# Two layers with biases. The first layer's weights are on the card, the second layer's on the host; the batch of 32 is large enough for op offload,
# so pass 1 gave everything to the card.

# %%
mlp = state.case("MLP, batch 32")
state.assigned(mlp)

# %% tags=["predict"]
lesson.predict("weights")

# %%
views.outcome_table(mlp)

# %% tags=["reveal"]
lesson.reveal("weights", len(mlp.outcome().splits))

# %% [markdown]
# Here is the rule, as it runs. It is asked for each node whose backend is that of the open split:

# %%
print(inspect.getsource(Splitter._why_cut))

# %% [markdown]
# Copies of inputs live in compute memory, which is planned by lifetimes (lesson 04). All inputs of a split get their place *before* it begins.
# What would follow from one single split? A stack of layers, all of whose weights are on the host, for a batch of 32. With 4 layers the card needs
# this much compute memory:

# %%
print(f"4 layers: {state.memory(state.deep(4))[0]:,} bytes on the card")

# %% tags=["predict"]
lesson.predict("deep")

# %%
rows = []
for n in (4, 8, 16):
    deep = state.deep(n)
    rows.append((n, len(deep.outcome().splits), n * 64 * 64 * 4, state.memory(deep)[0]))
views.table(["layers", "splits", "bytes of weights", "compute memory of the card"], rows,
            "One weight at a time: each is copied to where the one before it lay.")

# %% tags=["reveal"]
small, large = (state.memory(state.deep(n))[0] for n in (4, 16))
lesson.reveal("deep", large / small, weights=16 * 64 * 64 * 4)

# %% [markdown]
# The same rule for experts. Eight of them, merged into one tensor per product, on the host; each token is sent to two.

# %% tags=["predict"]
lesson.predict("experts")

# %%
experts = state.case("experts on the host, batch 32")
splits = experts.outcome().splits
rows = [(i, name, size) for i, s in enumerate(splits) for name, size in s.inputs]
views.table(["split", "inputs", "bytes"], rows, "65,536 bytes are eight experts: the tensor as a whole.")

# %% tags=["reveal"]
listed = dict(i for s in experts.outcome().splits for i in s.inputs)
scheduler, graph = experts.scheduler_and_graph()
lesson.reveal("experts", "whole" if listed["gate_exps"] == graph.find("gate_exps").nbytes else "chosen")

# %% [markdown]
# ## 3 · A full list · 4 min
#
# The card holds w0; x and in0, in1, … in39 are inputs of the user, which lie on the host. `a` is w0 times x, s0 is a + in0, s1 is s0 + in1, and so on up to
# s39. All nodes are the card's. A split lists 30 inputs (`GGML_SCHED_MAX_SPLIT_INPUTS`) before its list is full.

# %% tags=["predict"]
lesson.predict("thirty")

# %%
def lists(case):
    out = case.outcome()
    return [(case.name, i, out.nodes[s.first].name, len(s.inputs), s.cause)
            for i, s in enumerate(out.splits)]

many, grow = state.case("many_inputs"), state.case("many_inputs_grow")
views.table(["case", "split", "first node", "inputs", "begins because"], lists(many),
            "x counts, too: it is the first input of split 0.")

# %% tags=["reveal"]
lesson.reveal("thirty", state.begins(state.case("many_inputs"))[1].split()[1])

# %% [markdown]
# Now twenty times a product of *two* inputs, p0 × q0, p1 × q1, …, each added to the sum:

# %%
views.table(["case", "split", "first node", "inputs", "begins because"], lists(grow),
            "41 inputs in one split: the list grew.")

# %% [markdown]
# Look at the rule above: `len(split.inputs) == capacity`. It is asked before a node, and a list that goes from 29 to 31 is never *equal* to 30. It doubles
# its capacity instead. *A note on the article:* its listing is older; there the array had 30 places and no more, and an assertion behind it. The
# recorded ggml of 2026 does what you see.
#
# ## 4 · Who has a copy already · 4 min
#
# Two cards. `t` is computed on the host. `a` and `e` read it on GPU0, `d` reads it on GPU1. Splits: t (CPU), a (GPU0), d (GPU1), e and the rest (GPU0).

# %%
reuse = state.case("copy_reuse")
state.assigned(reuse)

# %% tags=["predict"]
lesson.predict("copies")

# %%
views.outcome_table(reuse)

# %% tags=["reveal"]
lesson.reveal("copies", state.copied(state.case("copy_reuse")).count("t"))

# %% [markdown]
# Copies are kept by (tensor, backend). By *backend*, not by memory: here the softmax `s` runs on the CPU and the product `r` on BLAS. Both read `a`, a result of
# the card, and both work on the host's memory.

# %%
mixed = state.case("pass3_mixed_blas_gpu")
assert state.copied(mixed).count("a") == 2
views.outcome_table(mixed, "a is copied into host memory twice: once for the CPU, once for BLAS.")

# %% [markdown]
# And a *weight* of the host that two products of the card read? It is copied once, like anything else. But the rule of section 2 asks where the
# weight lies, not whether its copy is there: so the second product begins a split as well.

# %%
tied = state.case("a weight used twice")
assert state.copied(tied).count("W") == 1
views.outcome_table(tied, "Split 1 begins for W, and then copies only W2.")

# %% [markdown]
# These cases are not invented here. Real ggml was recorded on them, and its splits are ours, backend by backend, node by node, input by input:

# %%
rows = state.beside_ggml_splits()
assert all(theirs == ours == same for _, theirs, ours, same in rows)
views.table(["recorded case", "splits of ggml", "ours", "the same"], rows,
            "Six recordings of llama.cpp's scheduler, August 2026.")

# %% [markdown]
# ## 5 · The plan of memory · 6 min
#
# The allocator does not see your graph. It sees a *graph copy*: before each split, for each input, a view that keeps the original alive and the copy
# itself. With it goes an array, the backend of each position (`node_backend_ids`). The array of the graph before is kept as well
# (`prev_node_backend_ids`), and the two are compared before the old plan is used again.
#
# A card, BLAS and the CPU; the two last share the host's memory. The graph is placed, reset, and placed a second time: as it was; with `down` moved by hand
# from BLAS to the CPU; with `act` moved from the card to the CPU.

# %%
blas = state.case("MLP with BLAS")
views.table(["split", "nodes"], enumerate(state.splits(blas)), "The first time.")

# %% tags=["predict"]
lesson.predict("again")

# %%
views.Stack(state.arrays(blas, down="CPU"), state.arrays(blas, act="CPU"))

# %% tags=["reveal"]
blas = state.case("MLP with BLAS")
anew = {name: state.again(blas, **hand)[2] for name, hand in
        {"none": {}, "down": {"down": "CPU"}, "act": {"act": "CPU"}}.items()}
lesson.reveal("again", " ".join(name for name, n in anew.items() if n))

# %% [markdown]
# This is the whole comparison. A new plan costs more than its own time: all devices must come to rest first, since places move.

# %%
print(inspect.getsource(Scheduler.moved))

# %% [markdown]
# It compares positions, not tensors. One more copy shifts everything behind it. So where B of our chain is moved, this is what counts as changed:

# %%
state.arrays(state.case("A B C | D | E F"), B="CPU",
             caption="C moved to the CPU, but where it stands now a copy for the CPU stood before.")

# %% [markdown]
# llama.cpp reserves for its largest batch at the start, and then hopes that no step makes this comparison fail. `GGML_SCHED_DEBUG_REALLOC` stops the
# program when one does.
#
# ## 6 · Three hazards · 3 min
#
# ggml checks less than one would think. `quirks="ggml"` does as ggml does; without it our scheduler refuses or mends. One example: a graph of three
# products and a join is run; then another one of as many tensors, of the same sizes, in which the *first* product is joined at the end.

# %% tags=["predict"]
lesson.predict("hazard")

# %%
names = ["another graph, old plan", "a view assigned by hand", "a leaf without flag under a view"]
rows = [(name, state.hazard(name, "ggml"), state.hazard(name, "")) for name in names]
views.table(["hazard", 'quirks="ggml"', "default"], rows,
            "Held against a run on a plain CPU. Where ours stops with quirks, ggml ends the process.")

# %% tags=["reveal"]
got = state.hazard("another graph, old plan", "ggml")
lesson.reveal("hazard", "wrong" if got.startswith("wrong") else "right")

# %% [markdown]
# ## 7 · Why not? · 5 min
#
# A border costs a copy, a wait, and a start. What is the *smallest single change* that does without it: one node assigned by hand, one op that a
# backend learns, one weight moved? Nobody has to reason about it. There are few such changes, so all of them are tried, by the real passes.
#
# "Smallest" means: it moves the fewest nodes to another backend. Among equals an assignment is smaller than a kernel, and a kernel smaller than a
# weight moved. The border must not just turn up elsewhere: there have to be fewer splits. What comes first for the border C | D?

# %% tags=["predict"]
lesson.predict("why-not")

# %%
chain = state.case("A B C | D | E F")
answer = why_not(chain, "D")
views.why_not_view(answer)

# %% tags=["reveal"]
best = why_not(state.case("A B C | D | E F"), "D").best.change
lesson.reveal("why-not", str(best))

# %% [markdown]
# Apply it, and see both runs. And some borders stand firm: in the two-layer network for 4 tokens, two weights hold the host's part in place.

# %%
views.Stack(views.compare_table(chain, chain.changed(answer.best.change)),
            views.why_not_view(why_not(state.case("MLP, half on the host"), "down")))

# %% [markdown]
# **What if?** Three layers, the middle one's weights on the host, 32 tokens. Ask why there is a border, try what it says; the run before stays as A.
# Then set the batch to 4, and ask again.

# %%
widgets.WhatIf(state.case("layers, batch 32"))

# %% [markdown]
# ## 8 · How good are the passes? · 5 min
#
# No pass counts bytes. Small graphs can be solved exactly: choose a backend for each node, among those that support it, so that the fewest bytes are copied
# (by the rules of this lesson; weights and inputs stay where they are). On a chain, dynamic programming does it; for two devices and any graph, a
# minimum cut. Twenty graphs drawn at random, eight steps each:

# %% tags=["predict"]
lesson.predict("fewest")

# %%
cases = state.random_cases(20)
views.optimum_table(cases)

# %% tags=["reveal"]
best = [case.outcome().copied == state.fewest(case) for case in state.random_cases(20)]
lesson.reveal("fewest", sum(best))

# %% [markdown]
# A minimum cut also takes a real graph, here a step of the tiny Mixtral with its experts on the host. (Expert weights are counted whole.)

# %%
views.optimum_table([state.model_case(1), state.model_case(64)],
                    "For 64 tokens the best placement leaves the experts on the host and moves rows.")

# %% [markdown]
# Even the article's chain could do with less. Node by node, and executed: the best placement is assigned by hand, and a run is traced.

# %%
chain = state.case("A B C | D | E F")
views.placement_table(chain)

# %%
rows = []
for name in ("A B C | D | E F", "MLP, batch 32", "attention, no softmax on the GPU"):
    case = state.case(name)
    rows.append((name, state.fewest(case), state.traced(case, best=True)[0],
                 case.outcome().copied, state.traced(case)[0]))
assert all(a == b and c == d for _, a, b, c, d in rows)
views.table(["case", "fewest: computed", "executed", "passes: inputs", "executed"], rows,
            "Computed and copied agree to the byte.")

# %% [markdown]
# So is the optimum better? It counts bytes and nothing else. The chain for more and more tokens, both placements, in virtual time:

# %%
rows = []
for batch in (4, 64, 1024):
    case = chain.changed(Change.batch(batch))
    (a, t), (b, u) = state.traced(case), state.traced(case, best=True)
    rows.append((batch, a, b, f"{t / 1000:.0f}", f"{u / 1000:.0f}"))
views.table(["tokens", "passes, bytes", "fewest, bytes", "passes, µs", "fewest, µs"], rows,
            "With 1,024 tokens, 48 times fewer bytes take half as long again: the CPU does the work.")

# %% [markdown]
# That is why pass 2 asks who stands nearby and not what it costs: it keeps work on the devices that come first. Where it really errs: single
# nodes between two of another backend, and small weights on the host in large batches, such as biases.
#
# ## 9 · Your turn · 9 min
#
# **Tier 1.** Where does each split begin? First with backends given, and by their change alone. Mind the views.

# %% tags=["exercise", "tier-1"]
def starts(nodes):
    """nodes: (name, backend, is it a view?) in order. The names of the first nodes of all splits."""
    raise NotImplementedError

# %% tags=["solution"]
def starts(nodes):
    """nodes: (name, backend, is it a view?) in order. The names of the first nodes of all splits."""
    work = [(name, backend) for name, backend, view in nodes if not view]
    return [name for i, (name, b) in enumerate(work) if i == 0 or work[i - 1][1] != b]

# %% tags=["wrong"]
def starts(nodes):
    return [name for i, (name, b, _) in enumerate(nodes) if i == 0 or nodes[i - 1][1] != b]

# %% tags=["wrong"]
def starts(nodes):
    seen, out = set(), []
    for name, b, view in nodes:
        if not view and b not in seen:
            out.append(name)
            seen.add(b)
    return out

# %% tags=["check"]
names = ("A B C | D | E F", "attention, no softmax on the GPU", "copy_reuse", "pass3_mixed_blas_gpu")
q = state.starts(*map(state.case, names), state.viewed)
lesson.check("starts", starts, q.expected, q.on, q.steps)

# %% [markdown]
# **Tier 2.** Three graphs that nobody prepared. Write their splits as `"GPU A, CPU C, GPU D"`: the backend and the first node of each. You need all
# five passes. Other seeds give other graphs; the check asks the scheduler.

# %%
seeds = 0, 1, 3
views.Stack(*(state.sheet(state.unknown(seed)) for seed in seeds))

# %% tags=["exercise", "tier-2"]
seeds = 0, 1, 3
first = ...
second = ...
third = ...

# %% tags=["solution"]
seeds = 0, 1, 3
first = "GPU A, CPU C, GPU D"
second = "CPU A, GPU E, CPU H"
third = "GPU B, GPU C, GPU A, GPU G, GPU H"

# %% tags=["wrong"]
seeds = 0, 1, 3
first = "GPU A, CPU C, GPU D"
second = "CPU A, GPU E, CPU H"
third = "GPU B"

# %% tags=["wrong"]
seeds = 0, 1, 3
first = "GPU A, CPU C"
second = "CPU A, GPU E, CPU H"
third = "GPU B, GPU C, GPU A, GPU G, GPU H"

# %% tags=["check"]
q = state.drawn(*seeds)
lesson.check("unknown", state.parts(first, second, third), q.expected, steps=q.steps)

# %% [markdown]
# **Tier 3.** All of pass 5, but for the full list. `nodes` are the tensors that compute something, `of[t]` is the backend of each tensor; `reads(b, t)`: can
# backend b read t where it is; `is_weight(t)`. For each split: its backend, the name of its first node, the names of its inputs.

# %% tags=["exercise", "tier-3"]
def cut(nodes, of, reads, is_weight):
    """[[backend, first node, [inputs]], …]"""
    raise NotImplementedError

# %% tags=["solution"]
def cut(nodes, of, reads, is_weight):
    """[[backend, first node, [inputs]], …]"""
    splits, copies = [], set()
    for node in nodes:
        b = of[node]
        far = [s for s in node.src if s is not None and of[s] != b and not reads(b, s)]
        weight = any(is_weight(s) for s in far)
        if not splits or splits[-1][0] != b or splits[-1][2] and weight:
            splits.append([b, node.name, []])
        for s in far:
            if (s, b) not in copies:
                copies.add((s, b))
                splits[-1][2].append(s.name)
    return splits

# %% tags=["wrong"]
def cut(nodes, of, reads, is_weight):
    splits = []
    for node in nodes:
        b = of[node]
        far = [s for s in node.src if s is not None and of[s] != b and not reads(b, s)]
        weight = any(is_weight(s) for s in far)
        if not splits or splits[-1][0] != b or splits[-1][2] and weight:
            splits.append([b, node.name, []])
        splits[-1][2] += [s.name for s in far if s.name not in splits[-1][2]]
    return splits

# %% tags=["wrong"]
def cut(nodes, of, reads, is_weight):
    splits, copies = [], set()
    for node in nodes:
        b = of[node]
        if not splits or splits[-1][0] != b:
            splits.append([b, node.name, []])
        for s in node.src:
            if s is not None and of[s] != b and not reads(b, s) and (s, b) not in copies:
                copies.add((s, b))
                splits[-1][2].append(s.name)
    return splits

# %% tags=["check"]
names = ("A B C | D | E F", "MLP, batch 32", "copy_reuse", "pass3_mixed_blas_gpu", "attention",
         "split_on_incompatible_weight", "experts on the host, batch 32")
q = state.cuts(*map(state.case, names), *(state.unknown(seed) for seed in range(6)))
lesson.check("cut", cut, q.expected, q.on, q.steps)

# %% [markdown]
# ## 10 · What is what, and what comes next · 1 min
#
# | here | in ggml | left out here |
# |---|---|---|
# | `Splitter.split` | pass 5 of `ggml_backend_sched_split_graph` | – |
# | `Split`, its `inputs` | `ggml_backend_sched_split` | – |
# | `splitter.copies[tensor, backend]` | `tensor_id_copy`, `hv_tensor_copies` | – |
# | `rewritten()` | sources stay rewritten | – |
# | `scheduler.graph_copy`, `backend_ids` | `sched->graph`, `node_backend_ids`, `prev_node_backend_ids` | – |
# | `scheduler.moved()` | the comparison in `ggml_backend_sched_alloc_splits` | `GGML_SCHED_DEBUG_REALLOC` |
# | `quirks="ggml"` | always so | – |
# | `why_not`, `fewest_bytes` | nothing like it | time: bytes alone are counted |
#
# **Next, 13:** the splits run. In which order are inputs copied, who waits for whom, and how does the runtime copy fewer experts than a split
# lists?
