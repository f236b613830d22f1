# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 08 · Pass 1: memory, inputs, weights
#
# **50 minutes** · before it: 03, the graph; 07, backends and buffers · after it: 09, pass 2
#
# Lesson 07 ended with a graph that ran on two devices. Who decided which step runs where? ggml's scheduler, in five passes over the graph, and
# every decision has a *cause* with a short name. This lesson is about the first pass, the only one that looks at memory.
#
# Afterwards you can say for any graph what pass 1 decides, by which of five causes, and what it leaves open. Everything you see is decided by
# the real passes while the cell runs.

# %% tags=["setup"]
import workbench as wb
from workbench import lessons, views, widgets
from workbench.scheduler.whatif import Change
from workbench.tensors import Flag

lesson = lessons.open_lesson("08")
state = lesson.state

# %% [markdown]
# ## 1 · Six steps, two devices · 5 min
#
# An article on ggml explains the scheduler with six steps, A to F: "A, B, C on CUDA, D only on the CPU, E and F on CUDA again; then there are three
# splits." Here they are. The column *reads* says in brackets who works on the memory of a weight, *cannot* who lacks the op.

# %%
chain = state.case("A B C | D | E F")
state.sheet(chain)

# %% [markdown]
# Nobody has said yet where A, B or F runs. The scheduler finds out in five passes:
#
# | pass | looks at | and decides |
# |---|---|---|
# | 1 | the memory of tensors | who is tied to a place |
# | 2 | neighbours in the order of nodes | who joins them (lesson 09) |
# | 3 | sources; same kinds of memory | who is left, and who may move up (10) |
# | 4 | views and leafs | the rest (11) |
# | 5 | borders | splits, copies, rewrites (12) |

# %% tags=["predict"]
lesson.predict("six")

# %%
views.table(["tensor", "backend", "cause"], state.decided(chain, "pass1"),
            "All decisions of pass 1, in its order: leafs first, then nodes.")

# %% tags=["reveal"]
placed = [name for name in state.names(state.case("A B C | D | E F"), "pass1") if name != "?"]
lesson.reveal("six", len(placed))

# %% [markdown]
# Each decision is a line of four: the stage, the tensor, the backend, the cause. Passes are *generators* here: running the scheduler drains
# them, and this table drained the very same one.
#
# ## 2 · Rule 1: memory stays · 5 min
#
# Cause **`1.dst`**, the *destination*: a tensor that has memory already belongs to the first backend, by priority, that works on this memory and
# supports the tensor's op. (You wrote that function in lesson 07.) A leaf has no op, so only its memory counts.

# %%
mlp = state.case("MLP, half on the host")
rows = [(name, b, cause) for name, b, cause in state.decided(mlp, "pass1") if cause == "1.dst"]
views.table(["tensor", "backend", "cause"], rows,
            "Two layers with biases: the first on the GPU, the second on the host.")

# %% [markdown]
# Nodes rarely have memory before a run. One that does: a result that the caller placed. Suppose the result of D was put into the GPU's memory,
# and the GPU cannot compute D. Its memory ties D to a device that is not able to do the work:

# %%
scheduler, graph = state.stuck()
try:
    scheduler.split(graph)
except wb.errors.UnsupportedOp as error:
    print(error)

# %% [markdown]
# ggml calls `GGML_ABORT` here: the process ends. Ours says so and goes on. In lesson 11 such ties come back, as views into a cache.
#
# ## 3 · Rule 2: inputs are the host's · 5 min
#
# Cause **`1.inp`**: a tensor flagged as an input of the user gets the *last* backend, the CPU. The reason is simple: the user's program writes
# inputs, before every run, and it can only write to host memory.
#
# Now a graph without any weight: an input x, then two steps. A GPU is there and could do both.

# %%
bare = state.case("no_weights_input_only")
state.sheet(bare)

# %% tags=["predict"]
lesson.predict("input")

# %%
state.sheet(bare, "pass1", "pass2_rest_up", "pass3",
            caption="Pass 1 and all of pass 2 decide nothing here.")

# %% tags=["reveal"]
after = state.after(state.case("no_weights_input_only"), "pass4")
lesson.reveal("input", after["s"][1], backend=after["s"][0])

# %% [markdown]
# This case, and four more of this lesson and the next, were recorded from real ggml: which backend each tensor had after each stage. We ask
# our passes the same.

# %%
rows = [(f"{name}: decisions after pass 1", n, same) for name, n, same in state.beside_ggml("pass1")]
assert all(n == same for _, n, same in rows)
views.side_by_side(rows, ("real ggml", "agree with ours"), "Recorded from llama.cpp of August 2026.")

# %% [markdown]
# ## 4 · Rule 3: the first weight · 10 min
#
# Moving weights is dear, so an op goes to its weights, not the other way round. Pass 1 walks over the sources of a node; the first one that is
# a *weight* decides. The cause is **`1.wgt`** with the number of that source.

# %%
mlp = state.case("MLP, half on the host")
state.sheet(mlp)

# %% tags=["predict"]
lesson.predict("cause")

# %%
state.sheet(mlp, "pass1")

# %% tags=["reveal"]
after = state.after(state.case("MLP, half on the host"), "pass1")
lesson.reveal("cause", " ".join(after["down_b"]))

# %% [markdown]
# What is a weight? Not everything with memory, and not for every op. Six ops, whose memory all lies on the GPU:

# %%
state.sheet(state.sources, "pass1", caption="A cache is no weight, nor is a view of one; "
            "and rope's factors are too small to follow.")

# %% [markdown]
# *cache* lies in a buffer of another usage than `weights`, as llama.cpp's KV cache does. So attention over the cache is nobody's by pass 1, and
# must be found by its neighbours.
#
# **Who has two weights?** `k` joins two of them: the first lies on the GPU, the second on the host. The GPU has no kernel for joining.

# %%
join = state.case("first_weight_decides")
state.sheet(join)

# %% tags=["predict"]
lesson.predict("first")

# %%
views.table(["tensor", "backend", "cause"], state.decided(join, "pass1"),
            "k has a cause and no backend: a decision that came to nothing.")

# %% tags=["reveal"]
after = state.after(state.case("first_weight_decides"), "pass1")
lesson.reveal("first", after["k"][0], cause=after["k"][1])

# %% [markdown]
# The same happens where a weight lies with a device that cannot do the op. Then the *weight* has to travel, at every run. How much does that
# cost, and what if it lay on the host from the start?

# %%
owner = state.case("weight_op_unsupported_by_owner")
moved = owner.changed(Change.move("w0", "CPU"))
formula = 4 * (64 * 64 + 64 * 4), 4 * 64 * 4                # w0 and a cross; then only a
rows = []
for name, case, predicted in (("as it is", owner, formula[0]), ("w0 on the host", moved, formula[1])):
    copied = sum(n for _, _, n in state.executed(case))
    assert copied == case.outcome().copied
    rows.append((f"bytes copied per run, {name}", predicted, copied))
views.side_by_side(rows, ("predicted", "executed"),
                   "A weight in the wrong place is paid for at each token.")

# %% [markdown]
# **In a real model.** One decode step of the tiny Mixtral, its experts on the host. How many nodes should pass 1 place? Those that read a
# weight, and those that write into the KV cache, since their result lies in memory that is there already.

# %%
case = state.model_case()
work = state.computing(case)
reading = sum(t.storage is None and any(map(state.is_weight, t.src)) for t in work)
writing = sum(t.storage is not None for t in work)
names, causes = {*state.nodes(case)}, {}
for name, _, cause in state.decided(case, "pass1"):
    if name in names:
        causes[cause[:5]] = causes.get(cause[:5], 0) + 1
views.side_by_side([("nodes that read a weight: 1.wgt", reading, causes["1.wgt"]),
                    ("nodes that write into the cache: 1.dst", writing, causes["1.dst"])],
                   ("predicted from the graph", "pass 1"),
                   f"{sum(causes.values())} of {len(work)} nodes that compute: about two in five.")

# %% [markdown]
# ## 5 · Rule 4: an offer · 7 min
#
# A weight on the host would tie its op to the CPU. But for large batches a card may offer to fetch the weight and to compute (`offload_op`, from 32
# tokens on). Then the cause is **`1.off`**. 
#
# Nobody asks for an offer before the first-weight rule has answered with the *last* backend: the first that works on the weight's memory **and**
# supports the op is the CPU, and that memory is the host's. (BLAS, which multiplies, keeps its products; a bias it cannot add goes to the card.)
# Then the others are asked in the order of the list; the first that supports the op and offers gets it.

# %%
large = state.case("MLP, batch 32")
state.sheet(large)

# %% tags=["predict"]
lesson.predict("offered")

# %%
rows = [(t, *(" ".join(state.after(state.case(name), "pass1")[t]) for name in
              ("MLP, half on the host", "MLP, batch 32", "MLP, batch 32, no op_offload")))
        for t in state.nodes(large)]
views.table(["node", "4 tokens", "32 tokens", "32 tokens, op_offload off"], rows,
            "One number changes the place of two nodes; one switch takes it back "
            "(llama.cpp: --no-op-offload).")

# %% tags=["reveal"]
decided = state.decided(state.case("MLP, batch 32"), "pass1")
offered = [name for name, _, cause in decided if cause == "1.off"]
lesson.reveal("offered", " ".join(offered), nodes=" and ".join(offered))

# %% [markdown]
# Now the weights cross the link. Let us predict the bytes of one run: the input x, the weight W2 and the bias b2, each whole.

# %%
run = state.executed(state.case("MLP, batch 32"))
sizes = {"x": 4 * 64 * 32, "W2": 4 * 128 * 64, "b2": 4 * 64}
rows = [(f"{name}, bytes", sizes[name], n) for name, _, n in run]
rows.append(("all, as the splits say", sum(sizes.values()), state.case("MLP, batch 32").outcome().copied))
views.side_by_side(rows, ("predicted", "executed"),
                   "For 32 tokens in a 64 × 128 matrix, that is mostly weights.")

# %% [markdown]
# **What if?** Move the batch and watch where the decisions tip over. Run A is the one before.

# %%
def what_if(batch):
    case = state.case("MLP, half on the host").changed(Change.batch(batch))
    causes = [cause for *_, cause in state.decided(case, "pass1")]
    out = case.outcome()
    stay = sum(cause.startswith("1.wgt") for cause in causes)
    return {"tokens": batch, "1.wgt": stay, "1.off": causes.count("1.off"), "splits": len(out.splits),
            "bytes copied per run": out.copied, "bytes per token": round(out.copied / batch)}

widgets.Range(value=32, min=1, max=64, label="tokens in a batch").compare(
    what_if, "At 32 the CPU gets nothing more; instead of activations, weights are copied.", first=31)

# %% [markdown]
# ## 6 · Rule 0: by hand · 4 min
#
# Before all passes the caller may assign nodes himself, `scheduler.set_backend(node, backend)`; cause **`usr`**. Here *down*, whose weight lies
# on the host, is assigned to the GPU, for a batch of 4.

# %% tags=["predict"]
lesson.predict("hand")

# %%
mine = state.case("MLP, half on the host").changed(Change.assign("down", "GPU"))
print("inputs of the splits:", [(cut.backend, *cut.inputs) for cut in mine.outcome().splits])
state.sheet(mine, "pass1", caption="Pass 1 does not overwrite what you assigned.")

# %% tags=["reveal"]
mine = state.case("MLP, half on the host").changed(Change.assign("down", "GPU"))
copied = [name for cut in mine.outcome().splits for name, _ in cut.inputs]
kept = state.after(mine, "pass4")["down"] == ("GPU", "usr")
lesson.reveal("hand", "kept" if kept and "W2" in copied else "moved")

# %% [markdown]
# ggml checks nothing here: assign a view, or an op that the device lacks, and you get garbage. We refuse, unless the scheduler is made with
# `quirks="ggml"`. llama.cpp itself uses this door: with `--no-kv-offload` it assigns the last node of attention to the CPU, and lesson 09 shows why
# that one node is enough.

# %%
for node, device in (("packed", "GPU"), ("left", "CPU")):
    try:
        state.case("views").changed(Change.assign(node, device)).outcome()
        print(f"{node} on {device}: accepted\n")
    except wb.errors.WorkbenchError as error:
        print(f"{node} on {device}: {error}\n")

# %% [markdown]
# ## 7 · Step through it · 4 min
#
# Step with → and ←, or jump with *n* and *p*. Run A has 4 tokens; in run B there are 32. *d* jumps to the next difference.

# %%
small, large = state.case("MLP, half on the host"), state.case("MLP, batch 32")
state.stepper(small, "pass1", other=large, title="Pass 1",
              caption="Every decision with its cause; the runs differ where a card makes an offer.")

# %% [markdown]
# Now you first. The sheet shows a graph that was drawn from a seed; in the stepper below it the scheduler asks *you* before it decides: which
# backend, and why? It keeps the score. Take other seeds, the same in both cells, until you make no more mistakes.

# %%
seed = 1                        # any whole number from 0 on: another graph
state.sheet(state.practice(seed))

# %%
seed = 1
state.stepper(state.practice(seed), "pass1", predict=True, title=f"Practice {seed}",
              caption="A graph drawn from a seed; the real pass is the judge.")

# %% [markdown]
# ## 8 · Your turn · 9 min
#
# **Tier 1.** Three graphs that you have not seen. Write the backend of each node after pass 1, in order, `?` where nothing is decided; views
# (VIEW) are left out. For example `"GPU ? CPU"`.

# %%
views.Stack(*(state.sheet(state.case(name)) for name in state.unseen))

# %% tags=["exercise", "tier-1"]
first = ...        # h a b c e
second = ...       # both packed gate act product
third = ...        # up up_b act down down_b sum

# %% tags=["solution"]
first = "CPU GPU ? ? GPU"
second = "GPU ? CPU ? ?"
third = "GPU GPU ? BLAS GPU ?"

# %% tags=["wrong"]
first = "CPU GPU CPU CPU GPU"
second = "GPU ? CPU ? ?"
third = "GPU GPU ? BLAS GPU ?"

# %% tags=["wrong"]
first = "CPU GPU ? ? GPU"
second = "GPU ? CPU ? ?"
third = "GPU GPU ? BLAS BLAS ?"

# %% tags=["check"]
cases = [state.case(name) for name in state.unseen]
expected = [name for case in cases for name in state.names(case, "pass1")]
steps = [f"{case.name}: {name}" for case in cases for name in state.nodes(case)]
lesson.check("by-hand", state.typed(first, second, third), expected, steps=steps)

# %% [markdown]
# **Tier 2.** Be pass 1, without offers and without assignments by hand. Your function sees one tensor at a time. `ask.reader(owner, t)` gives the number
# of the first backend that works on the memory of `owner` and supports `t`, or -1; `ask.is_weight(s)` whether a source is a weight; `ask.cpu`
# the number of the CPU. (rope does not occur.)

# %% tags=["exercise", "tier-2"]
def decide(t, ask):
    """(backend, cause), or "open". Look at t.storage (None: no memory), t.flags & Flag.INPUT, t.src."""
    raise NotImplementedError

# %% tags=["solution"]
def decide(t, ask):
    """(backend, cause), or "open". Look at t.storage (None: no memory), t.flags & Flag.INPUT, t.src."""
    if t.storage is not None:
        return ask.reader(t, t), "1.dst"
    if t.flags & Flag.INPUT:
        return ask.cpu, "1.inp"
    for j, source in enumerate(t.src):
        if ask.is_weight(source):
            return ask.reader(source, t), f"1.wgt{j}"
    return "open"

# %% tags=["wrong"]
def decide(t, ask):
    if t.storage is not None:
        return ask.reader(t, t), "1.dst"
    if t.flags & Flag.INPUT:
        return ask.cpu, "1.inp"
    for j, source in enumerate(t.src):
        if ask.is_weight(source) and ask.reader(source, t) != -1:
            return ask.reader(source, t), f"1.wgt{j}"
    return "open"

# %% tags=["wrong"]
def decide(t, ask):
    if t.storage is not None:
        return ask.reader(t, t), "1.dst"
    if t.flags & Flag.INPUT:
        return ask.cpu, "1.inp"
    for j, source in enumerate(t.src):
        if source is not None and source.storage is not None:
            return ask.reader(source, t), f"1.wgt{j}"
    return "open"

# %% tags=["check"]
names = ("A B C | D | E F", "MLP, half on the host", "first_weight_decides", "two GPUs")
q = state.rules(*map(state.case, names), state.without_rope, *(state.quiet(seed) for seed in range(4)))
lesson.check("decide", decide, q.expected, q.on, q.steps)

# %% [markdown]
# **Tier 3.** All of pass 1. `ask.given` holds what was assigned by hand, by tensor. `ask.offers(t)` gives the first backend before the CPU
# that supports `t` and offers to compute it, or -1. It does not ask where the weight lies: that is up to you.

# %% tags=["exercise", "tier-3"]
def pass1(t, ask):
    """As decide(t, ask), with the causes "usr" and "1.off". A storage says whether it is_host."""
    raise NotImplementedError

# %% tags=["solution"]
def pass1(t, ask):
    if t in ask.given:
        return ask.given[t], "usr"
    if t.storage is not None:
        return ask.reader(t, t), "1.dst"
    if t.flags & Flag.INPUT:
        return ask.cpu, "1.inp"
    for j, w in enumerate(t.src):
        if ask.is_weight(w):
            home = ask.reader(w, t)
            better = ask.offers(t) if home == ask.cpu and w.storage.is_host else -1
            return (home, f"1.wgt{j}") if better == -1 else (better, "1.off")
    return "open"

# %% tags=["wrong"]
def pass1(t, ask):
    if t in ask.given:
        return ask.given[t], "usr"
    if t.storage is not None:
        return ask.reader(t, t), "1.dst"
    if t.flags & Flag.INPUT:
        return ask.cpu, "1.inp"
    for j, w in enumerate(t.src):
        if ask.is_weight(w):
            better = ask.offers(t) if w.storage.is_host else -1
            return (ask.reader(w, t), f"1.wgt{j}") if better == -1 else (better, "1.off")
    return "open"

# %% tags=["wrong"]
def pass1(t, ask):
    if t.storage is not None:
        return ask.reader(t, t), "1.dst"
    if t.flags & Flag.INPUT:
        return ask.cpu, "1.inp"
    for j, w in enumerate(t.src):
        if ask.is_weight(w):
            home = ask.reader(w, t)
            better = ask.offers(t) if home == ask.cpu else -1
            return (home, f"1.wgt{j}") if better == -1 else (better, "1.off")
    return "open"

# %% tags=["check"]
names = ("MLP, batch 32", "MLP, batch 32, no op_offload", "MLP with BLAS", "layers with BLAS",
         "first_weight_decides")
mine = state.case("layers, batch 32").changed(Change.assign("up1", "CPU"), Change.assign("act0", "CPU"))
q = state.rules(mine, *map(state.case, names), *(state.practice(seed) for seed in range(6)))
lesson.check("pass1", pass1, q.expected, q.on, q.steps)

# %% [markdown]
# ## 9 · What is what, and what comes next · 1 min
#
# | here | in ggml | left out here |
# |---|---|---|
# | `passes.assign_by_memory` | pass 1 of `ggml_backend_sched_split_graph` | – |
# | `passes.home` | `ggml_backend_sched_backend_id_from_cur` | its cause `1.vsrc`, which never occurs: `1.dst` sees through views |
# | `Assignment.by_memory` | `ggml_backend_sched_backend_from_buffer` | – |
# | causes `1.dst`, `1.inp`, `1.wgt0` … | `SET_CAUSE`, printed with `GGML_SCHED_DEBUG=2` | – |
# | `scheduler.set_backend` | `ggml_backend_sched_set_tensor_backend` | ggml does not check |
# | `Scheduler(…, op_offload=False)` | `op_offload`, in llama.cpp `--no-op-offload` | – |
# | backend -1, shown as `?` | `-1` in `hv_tensor_backend_ids` | – |
#
# **Next, 09:** three nodes in five are still open. Pass 2 lets those that are placed spread to their neighbours, in four sweeps, and tells
# when the CPU gets anything at all.
