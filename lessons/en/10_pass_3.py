# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 10 · Pass 3: best and upgrade
#
# **50 minutes** · before it: 09, pass 2 · after it: 11, pass 4
#
# After two passes some nodes are still open, D of the six steps among them: every backend that came by could not compute them. And others have a
# backend, but not the best one. Pass 3 walks over the nodes once and settles both.
#
# Afterwards you can say which backend an open node gets, and by how many votes; who may move up, on four conditions; and why one of these is
# stricter than it would have to be.

# %% tags=["setup"]
from workbench import lessons, views, widgets
from workbench.scheduler.whatif import Change

lesson = lessons.open_lesson("10")
state = lesson.state

# %% [markdown]
# ## 1 · Who is left · 5 min
#
# A to F once more. Pass 1 gave A to the GPU, pass 2 gave it B, C, E and F. The GPU has no softmax, so D is open.

# %%
chain = state.case("A B C | D | E F")
views.schedule_picture(*chain.scheduler_and_graph(), stage="pass2",
                       caption="The GPU passed by D twice, downwards and upwards.")

# %% [markdown]
# Pass 3 finds the first open node, D, and asks each backend in the order of the list: do you support the op? If so, how many of its sources can you
# *read* where they are now? The most votes win; the cause is **`3.best`**.

# %% tags=["predict"]
lesson.predict("votes")

# %%
rows = state.counted(chain, "D")
views.table(["backend", "supports D", "sources it can read", "bytes of them"], rows,
            f"D goes to {state.after(chain, 'pass3')['D'][0]}, the only one that can do it.")

# %% tags=["reveal"]
votes = {b: n for b, _, n, _ in state.counted(state.case("A B C | D | E F"), "D")}
lesson.reveal("votes", votes["CPU"])

# %% [markdown]
# So the copies come later, and from here: what a backend cannot read, pass 5 will have to copy. Pass 3 counts sources in order to need few copies.
#
# ## 2 · Counting · 10 min
#
# Now there is a choice. Two cards and the CPU; GPU0 has no softmax, GPU1 does. The softmax `s` stands between two products of GPU0 and reads a
# result of it, `a`, and a mask, which the user writes.

# %%
masked = state.case("pass3_best")
state.sheet(masked, "pass2_rest_up")

# %% tags=["predict"]
lesson.predict("mask")

# %%
views.table(["backend", "supports s", "sources it can read", "bytes of them"], state.counted(masked, "s"),
            "An input of the user is the CPU's since pass 1, and that is a vote.")

# %% tags=["reveal"]
lesson.reveal("mask", state.after(state.case("pass3_best"), "pass3")["s"][0])

# %% [markdown]
# Without the mask, nobody who can do `s` can read its only source.

# %% tags=["predict"]
lesson.predict("tie")

# %%
bare = state.case("pass3_best, no mask")
views.table(["backend", "supports s", "sources it can read", "bytes of them"], state.counted(bare, "s"),
            f"Nought against nought: {state.after(bare, 'pass3')['s'][0]}.")

# %% tags=["reveal"]
lesson.reveal("tie", state.after(state.case("pass3_best, no mask"), "pass3")["s"][0])

# %% [markdown]
# And what counts as a vote: a source, or a byte? In the next graph `turned` (rope) is open, since GPU0, its neighbour, has no rope. It reads a large
# result of GPU1 (through a view, which counts as the memory that it shows), a list of positions, and a few factors on the host.

# %%
mixed = state.case("small and large sources")
state.sheet(mixed, "pass2_rest_up")

# %% tags=["predict"]
lesson.predict("bytes")

# %%
views.table(["backend", "supports turned", "sources it can read", "bytes of them"],
            state.counted(mixed, "turned"), "Two against one, 144 bytes against 8,192.")

# %% tags=["reveal"]
got = state.after(state.case("small and large sources"), "pass3")["turned"][0]
large = max(n for *_, n in state.counted(state.case("small and large sources"), "turned"))
lesson.reveal("bytes", got, large=large)

# %% [markdown]
# What does it cost? `turned` is as large as its large source, and the next product needs it on GPU0 in any case. By hand we send it to GPU1, and
# run both.

# %%
sources = {"CPU": 8 * 64 * 4 * 4, "GPU1": 4 * 4 + 32 * 4}         # what must come in for `turned`
others = 2 * (64 * 4 * 4) + 8 * 64 * 4 * 4                        # x, x2, and `turned` itself
rows = []
for device in ("CPU", "GPU1"):
    case = mixed.changed(Change.assign("turned", device))
    copied = sum(n for *_, n in state.executed(case))
    assert copied == case.outcome().copied
    rows.append((f"turned on {device}: bytes per run", sources[device] + others, copied))
views.side_by_side(rows, ("predicted", "executed"),
                   "Counting sources is a rule of thumb, and here it errs.")

# %% [markdown]
# ## 3 · In a model · 5 min
#
# How many nodes of the tiny Mixtral are left to pass 3, if all of it lies on one GPU? None: the GPU can do everything. The pass is for exceptions. So
# let a GPU lack softmax. Twelve nodes need it, in each of six layers one in attention and one in the router.

# %%
whole, lacking = state.model_case(experts=""), state.model_without("SOFT_MAX")
decided = state.decided(lacking, "pass3")
print("decided by pass 3, GPU complete:", len(state.decided(whole, "pass3")))
print("decided by pass 3, no softmax:  ", len(decided), "such as", decided[0])
print("splits, GPU complete:", len(whole.outcome().splits), "- the embedding on the CPU, the rest")

# %% tags=["predict"]
lesson.predict("model")

# %%
nodes = {t.name: t for t in state.computing(lacking)}
open_nodes = [nodes[name] for name, *_ in decided]
more = sum(t.src[0].nbytes + t.nbytes for t in open_nodes)        # there and back
twice = sum(t.nbytes for t in open_nodes if "probs" in t.name)    # its view is copied, too: lesson 11
less = nodes["kq_soft_max-0"].src[1].nbytes                       # the mask stays on the host now
a, b = whole.outcome(), lacking.outcome()
views.side_by_side([("splits", len(a.splits) + 2 * len(open_nodes), len(b.splits)),
                    ("bytes copied per token", a.copied + more + twice - less, b.copied)],
                   ("predicted", "simulated"),
                   "Each open node between nodes of the GPU costs two borders.")

# %% tags=["reveal"]
lesson.reveal("model", len(state.model_without("SOFT_MAX").outcome().splits))

# %% [markdown]
# This is what you see in llama.cpp when a card lacks one op of a model: the log counts splits by the dozen. The cure is a kernel, not another rule.
#
# ## 4 · Moving up · 10 min
#
# The other half of pass 3 is for nodes that *have* a backend. No card now: BLAS, first in the list, and the CPU. Both work on host memory. `h` adds a
# bias, `z` multiplies h by itself, `y` is an activation. BLAS does products only.

# %%
blas = state.case("pass3_upgrade_blas")
state.sheet(blas, "pass1", "pass2_rest_up")

# %% [markdown]
# Why did BLAS not take `z` in pass 2, as in lesson 09? There a product with a *weight* had brought it in. Here no node is BLAS's, so nobody carries
# it. `z` is computed on the CPU, with slow loops, while BLAS stands idle.

# %% tags=["predict"]
lesson.predict("idle")

# %%
views.table(["node", "backend", "cause"], state.decided(blas, "pass3"),
            "3.upg: a backend of higher priority has the very same kind of memory.")

# %% tags=["reveal"]
moved = state.decided(state.case("pass3_upgrade_blas"), "pass3")
lesson.reveal("idle", " ".join(name for name, *_ in moved))

# %% [markdown]
# A node may move from its backend to one further ahead in the list if four things hold:
#
# 1. that one comes before its own in the list;
# 2. the results of both lie in memory of the **very same** type;
# 3. that one supports the op;
# 4. it can read **all** sources of the node.
#
# What does the move cost in copies, and in splits?

# %%
rows = []
without = blas.changed(Change.deny("MUL_MAT", "BLAS"))
for name, case in (("with the upgrade", blas), ("BLAS without products", without)):
    out = case.outcome()
    rows.append((name, len(out.splits), out.copied, sum(n for *_, n in state.executed(case))))
views.table(["", "splits", "bytes, simulated", "bytes, executed"], rows,
            "More splits, and nothing to copy: both read and write the same memory.")

# %% [markdown]
# Now a card besides. Two products, `p` and `q`, both given to the CPU by pass 2; the card cannot multiply.

# %%
both = state.case("pass3_upgrade_blas_gpu")
state.sheet(both, "pass2_rest_up")

# %% tags=["predict"]
lesson.predict("all-sources")

# %%
state.sheet(both, "pass2_rest_up", "pass3", caption="q reads ga, which lies in the card's memory.")

# %% tags=["reveal"]
moved = state.decided(state.case("pass3_upgrade_blas_gpu"), "pass3")
lesson.reveal("all-sources", " ".join(name for name, *_ in moved))

# %% [markdown]
# Real ggml, asked the same (the cases that were recorded for lessons 10 and 11):

# %%
rows = [(f"{name}: tensors after pass 3", n, same) for name, n, same in state.beside_ggml("pass3")]
assert all(n == same for _, n, same in rows)
views.side_by_side(rows, ("real ggml", "agree with ours"), "Recorded from llama.cpp of August 2026.")

# %% [markdown]
# ## 5 · Why the very same memory? · 7 min
#
# The fourth condition looks at *sources*, and asks whether they can be read. Why does the second not ask the same about *users*: can everyone who
# reads this result read the other memory, too? That would be enough. ggml's source says so itself, and why it is not done: it is *slow to verify*. A graph
# keeps no list of who reads a result. One would have to look at all nodes that follow, for each node:

# %%
nodes = state.computing(state.model_case())
types = looks = 0
for i, node in enumerate(nodes):
    types += 1                                                  # compare two types of memory
    for later in nodes[i + 1:]:
        looks += 1                                              # does this one read it?
        reader = node in later.src
n = len(nodes)
views.side_by_side([("comparing types", n, types), ("looking for users", n * (n - 1) // 2, looks)],
                   ("by formula", "counted"),
                   "One step of a small model. Twice the nodes, four times the looks.")

# %% [markdown]
# With the *same* type nothing needs to be asked: whoever could read the result before can read it afterwards. The price is that some good moves are
# missed. Here is a GPU that shares its memory with the CPU, as in many laptops: each reads what the other writes, but the types are two. The
# GPU cannot multiply these weights; the activations behind the products went to the CPU.

# %%
shared = state.unified()
state.sheet(shared, "pass2_rest_up",
            caption="In brackets: who works on the memory of a weight. Here both do.")

# %% tags=["predict"]
lesson.predict("shared")

# %%
ask = state.asked(shared)
for node in ask.work:
    users = [u for u in ask.work if node in u.src]
    reads_all = all(ask.reads(0, s) for s in node.src if s is not None)
    read_by_all = all(ask.reads_results(ask.of[u], 0) for u in users)
    print(f"{node.name:9} GPU: supports {ask.supports(0, node)!s:5}  reads all sources {reads_all}  "
          f"all users read it {read_by_all}  same type {ask.same_memory(0, ask.of[node])}")

# %% tags=["reveal"]
moved = state.decided(state.unified(), "pass3")
lesson.reveal("shared", len(moved))

# %% [markdown]
# Did it cost anything? We move the three by hand.

# %%
ours = shared.changed(*(Change.assign(f"act{i}", "GPU") for i in range(3)))
a, b = shared.outcome(), ours.outcome()
views.table(["", "splits", "bytes copied"],
            [("left to pass 3", len(a.splits), a.copied), ("moved by hand", len(b.splits), b.copied)],
            "No copies either way; five more borders, each with a wait.")

# %% [markdown]
# ## 6 · By hand · 2 min
#
# In lesson 08 an assignment by hand was respected by pass 1. Here z is assigned to the CPU.

# %% tags=["predict"]
lesson.predict("hand")

# %%
mine = state.case("pass3_upgrade_blas").changed(Change.assign("z", "CPU"))
state.sheet(mine, "pass1", "pass3", caption="usr, and then 3.upg.")

# %% tags=["reveal"]
mine = state.case("pass3_upgrade_blas").changed(Change.assign("z", "CPU"))
lesson.reveal("hand", state.after(mine, "pass4")["z"][0])

# %% [markdown]
# ## 7 · Step through it · 4 min
#
# All in one: a card without softmax, BLAS, the CPU. Step from pass 2 into pass 3 (*Page Down*), and look at the two votes on `qr`.

# %%
everyone = state.case("pass3_mixed_blas_gpu")
state.stepper(everyone, "pass2", "pass3", title="Passes 2 and 3",
              caption="s and qr are left to pass 3; p went to BLAS in a sweep.")

# %% [markdown]
# What if? Take ops away, move weights, and watch who is left to pass 3.

# %%
widgets.WhatIf(state.case("pass3_best"))

# %% [markdown]
# And now you first: which backend, and why? With odd seeds somebody moves up.

# %%
seed = 1                        # any whole number from 0 on: another graph
state.sheet(state.practice(seed), "pass2_rest_up")

# %%
seed = 1
state.stepper(state.practice(seed), "pass3", predict=True, title=f"Practice {seed}",
              caption="A graph drawn from a seed; the real pass is the judge.")

# %% [markdown]
# ## 8 · Your turn · 6 min
#
# **Tier 1.** Three graphs after pass 2. Write the backend of each node that computes something after pass 3.

# %%
views.Stack(*(state.sheet(state.case(name), "pass2_rest_up") for name in state.PAPER))

# %% tags=["exercise", "tier-1"]
first = ...        # h a b c e
second = ...       # A B C D E F G H I
third = ...        # A B C D E F G H I

# %% tags=["solution"]
first = "CPU GPU CPU GPU GPU"
second = "BLAS CPU BLAS CPU CPU CPU GPU GPU CPU"
third = "GPU GPU GPU CPU GPU GPU CPU BLAS CPU"

# %% tags=["wrong"]
first = "CPU GPU CPU GPU GPU"
second = "CPU CPU CPU CPU CPU CPU GPU GPU CPU"
third = "GPU GPU GPU CPU GPU GPU CPU CPU CPU"

# %% tags=["wrong"]
first = "CPU GPU GPU GPU GPU"
second = "BLAS CPU BLAS CPU CPU CPU GPU GPU CPU"
third = "GPU GPU GPU CPU GPU GPU CPU BLAS CPU"

# %% tags=["check"]
cases = [state.case(name) for name in state.PAPER]
expected = [name for case in cases for name in state.names(case, "pass3")]
steps = [f"{case.name}: {name}" for case in cases for name in state.nodes(case)]
lesson.check("by-hand", state.typed(first, second, third), expected, steps=steps)

# %% [markdown]
# **Tier 2.** Count the votes. `ask.n` is the number of backends, `ask.supports(b, node)` asks for a kernel, `ask.reads(b, s)` whether b can read the
# tensor s where it is (False as long as that is open). Sources are in `node.src`; an entry may be None.

# %% tags=["exercise", "tier-2"]
def best(node, ask):
    """The number of the backend that an open node gets."""
    raise NotImplementedError

# %% tags=["solution"]
def best(node, ask):
    """The number of the backend that an open node gets."""
    able = [b for b in range(ask.n) if ask.supports(b, node)]
    votes = {b: sum(ask.reads(b, s) for s in node.src if s is not None) for b in able}
    return max(able, key=votes.get)                 # of several, max takes the first

# %% tags=["wrong"]
def best(node, ask):
    able = [b for b in range(ask.n) if ask.supports(b, node)]
    return max(able, key=lambda b: sum(s.nbytes * ask.reads(b, s) for s in node.src if s is not None))

# %% tags=["wrong"]
def best(node, ask):
    able = [b for b in range(ask.n) if ask.supports(b, node)]
    votes = {b: sum(ask.reads(b, s) for s in node.src if s is not None) for b in able}
    return max(reversed(able), key=votes.get)

# %% tags=["check"]
names = ("A B C | D | E F", "pass3_best", "pass3_best, no mask", "small and large sources")
q = state.best(*map(state.case, names), *state.drawn(12))
lesson.check("best", best, q.expected, q.on, q.steps)

# %% [markdown]
# **Tier 3.** All of pass 3. `ask.work` holds the nodes in order; `ask.backend(t)` is -1 for an open one; write what you decide to `ask.of[node]`, for
# later nodes count it. `ask.same_memory(a, b)` compares the types of two backends.

# %% tags=["exercise", "tier-3"]
def pass3(ask):
    """The backend of each node of ask.work, in order."""
    raise NotImplementedError

# %% tags=["solution"]
def pass3(ask):
    for node in ask.work:
        now, sources = ask.backend(node), [s for s in node.src if s is not None]
        if now == -1:
            able = [b for b in range(ask.n) if ask.supports(b, node)]
            ask.of[node] = max(able, key=lambda b: sum(ask.reads(b, s) for s in sources))
            continue
        for better in range(now):
            if (ask.same_memory(better, now) and ask.supports(better, node)
                    and all(ask.reads(better, s) for s in sources)):
                ask.of[node] = better
                break
    return [ask.backend(node) for node in ask.work]

# %% tags=["wrong"]
def pass3(ask):
    for node in ask.work:
        now, sources = ask.backend(node), [s for s in node.src if s is not None]
        if now == -1:
            able = [b for b in range(ask.n) if ask.supports(b, node)]
            ask.of[node] = max(able, key=lambda b: sum(ask.reads(b, s) for s in sources))
    return [ask.backend(node) for node in ask.work]

# %% tags=["wrong"]
def pass3(ask):
    for node in ask.work:
        now, sources = ask.backend(node), [s for s in node.src if s is not None]
        able = [b for b in range(ask.n) if ask.supports(b, node)]
        votes = {b: sum(ask.reads(b, s) for s in sources) for b in able}
        if now == -1 or ask.same_memory(max(able, key=votes.get), now):
            ask.of[node] = max(able, key=votes.get)
    return [ask.backend(node) for node in ask.work]

# %% tags=["check"]
names = ("pass3_best", "pass3_upgrade_blas", "pass3_upgrade_blas_gpu", "pass3_mixed_blas_gpu")
q = state.pass3(*map(state.case, names), *(state.practice(i) for i in range(10)), state.unified())
lesson.check("pass3", pass3, q.expected, q.on, q.steps)

# %% [markdown]
# ## 9 · What is what, and what comes next · 1 min
#
# | here | in ggml | left out here |
# |---|---|---|
# | `passes.upgrade` | pass 3 of `ggml_backend_sched_split_graph` | – |
# | cause `3.best` | the backend with the most supported inputs | ggml writes it once, at the end; here each better one is a step |
# | cause `3.upg` | upgrade to a backend of higher priority | – |
# | `Assignment.reads` | `ggml_backend_sched_buffer_supported` | – |
# | "the very same memory" | `sched->bufts[b] == sched->bufts[*node_backend_id]` | – |
# | BLAS, an accelerator | `ggml_backend_blas`, device type ACCEL | its rule for sizes is ggml's: 32 at least |
#
# **Next, 11:** every node that computes has its backend now. Views and some leafs have none. Pass 4 settles them, and there ggml has
# its two hazards.
