# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 11 · Pass 4: views and sources
#
# **50 minutes** · before it: 10, pass 3 · after it: 12, pass 5
#
# All nodes that compute something have a backend now. Pass 4 walks over the nodes one last time and settles what is left. It is the simplest pass,
# and the one with ggml's hazards: two graphs that look harmless end in garbage and in an abort.
#
# Afterwards you can say where each view and each leaf is, and why; what a copy of a view costs; and which two mistakes ggml does not forgive.

# %% tags=["setup"]
import numpy as np

from workbench import lessons, views, widgets
from workbench.errors import WorkbenchError
from workbench.scheduler.whatif import Change

lesson = lessons.open_lesson("11")
state = lesson.state

# %% [markdown]
# ## 1 · What is open · 5 min
#
# One step of the tiny Mixtral, experts on the host, three passes done. 318 nodes, and 81 leafs: weights, caches, inputs.

# %% tags=["predict"]
lesson.predict("open")

# %%
case = state.model_case()
open_now = state.open(case)
views.table(["still open", "tensors"], open_now.items(),
            f"For example {', '.join(state.left(case)[:3])}.")

# %% tags=["reveal"]
kinds = [kind for kind, n in state.open(state.model_case()).items() if n]
lesson.reveal("open", " and ".join(kinds), n=len(state.left(state.model_case())))

# %% [markdown]
# Leafs are left only where the user forgot something, as we shall see. At each node, in order, pass 4 does three things:
#
# 1. the node itself, if it is an open *view*: it gets what its memory has (**`4.vsrc`**);
# 2. each of its sources that is open: a view as in 1, anything else what the *node* has (**`4.cur`**);
# 3. the node itself, if it is open even now: the first backend in the list that supports it (`2.sup`).
#
# ## 2 · A view is where its memory is · 11 min
#
# A product `both` on the GPU is looked at in two halves. `left` is a view; its only reader is `product`, at the very end, on the CPU.

# %%
halves = state.case("views")
state.sheet(halves, "pass3")

# %% tags=["predict"]
lesson.predict("left")

# %%
state.sheet(halves, "pass3", "pass4", caption="Both views are with the tensor whose bytes they show.")

# %% tags=["reveal"]
lesson.reveal("left", state.after(state.case("views"), "pass4")["left"][0])

# %% [markdown]
# A view describes bytes that are somewhere already. Calling it the CPU's would not bring them there. And so `product` has a source that its
# backend cannot read: the *view* will be copied, not the whole of `both`. How many bytes is that? `both` has 128 numbers in a row, 4 rows; `left` shows
# the first 64 of each.

# %% tags=["predict"]
lesson.predict("span")

# %%
left = next(t for t in state.asked(halves).nodes if t.name == "left")
print("ne:", left.ne[:2], " nb:", left.nb[:2])
span = (left.ne[1] - 1) * left.nb[1] + left.ne[0] * 4             # from its first byte to its last
executed = {name: n for name, _, n in state.executed(halves)}["left"]
views.side_by_side([("its numbers → copied, bytes", left.n_elements * 4, executed),
                    ("first to last byte → copied, bytes", span, executed)], ("by formula", "executed"),
                   "A copy moves one piece of memory, gaps included; only the last one is cut off.")

# %% tags=["reveal"]
lesson.reveal("span", {name: n for name, _, n in state.executed(state.case("views"))}["left"])

# %% [markdown]
# So a view at a border is cheap where it is a piece of its memory, and not where it has gaps. The recorded case `views_at_border` has every
# kind of view on both sides of a border. Its copies, with what copying the whole memory would be:

# %%
border = state.case("views_at_border")
tensors = {t.name: t for ask in [state.asked(border)] for n in ask.nodes for t in (n, *n.sources())}
rows = []
for name, _, n in state.executed(border):
    t = tensors[name]
    whole = t.root()
    rows.append((name, t.desc if t.op != "NONE" else "input", whole.name, whole.nbytes, t.nbytes, n))
assert state.is_settled(border)
views.table(["copied", "is a", "memory of", "whole, bytes", "predicted", "executed"], rows,
            "v takes 576 of 768 bytes; t, p and the rest are as large as what they show.")

# %% [markdown]
# The other side: to the scheduler, a view and its memory are *two* tensors. Where both are needed on the other side, both are copied. In lesson 10 a
# GPU without softmax made the router's probabilities on the CPU:

# %%
copies = [cut.inputs for cut in state.model_without("SOFT_MAX").outcome().splits]
views.table(["copied in for one split", "bytes"],
            [i for inputs in copies for i in inputs if "probs-0" in i[0]],
            "The same 32 bytes twice: as they are, and reshaped.")

# %% [markdown]
# ## 3 · Sources go to their reader · 8 min
#
# Now leafs. `x` is written by the user before each run, but he forgot to mark it as an input (`ggml_set_input`). It has no memory yet, so pass 1 found
# nothing. `a` and `ax` read it on the GPU, and later `y` on the CPU.

# %%
forgotten = state.case("unflagged_leaf")
state.sheet(forgotten, "pass3")

# %% tags=["predict"]
lesson.predict("leaf")

# %%
rows = []
for name in ("unflagged_leaf", "flagged_leaf"):
    case = state.case(name)
    assert state.is_settled(case)
    copied = [n for cut in case.outcome().splits for n, _ in cut.inputs]
    rows.append((name, *state.after(case, "pass4")["x"], ", ".join(copied), case.outcome().copied,
                 sum(n for *_, n in state.executed(case))))
views.table(["", "x is on", "cause", "copied", "simulated", "executed"], rows,
            "The flag decides who has the original; here the bytes are the same.")

# %% tags=["reveal"]
lesson.reveal("leaf", state.after(state.case("unflagged_leaf"), "pass4")["x"][0])

# %% [markdown]
# The *first* reader in the order of nodes, that is. What if the first product ran on the host and the second on the card? The weights are moved, the graph
# is the same:

# %%
turned = forgotten.changed(Change.move("w0", "CPU"), Change.move("w1", "GPU"))
after = {"as it was": state.after(forgotten, "pass4"), "weights moved": state.after(turned, "pass4")}
rows = [(name, at["a"][0], at["d"][0], *at["x"]) for name, at in after.items()]
views.table(["", "a", "d", "x", "cause"], rows, "x goes with a, which reads it first.")

# %% [markdown]
# ## 4 · The first hazard: nobody knows · 7 min
#
# Another forgotten flag. This time `x` is read through a view only: `v` shows its first half, and `a` multiplies that on the GPU. Here is pass 4 as ggml
# does it (`quirks="ggml"`), at the very first node, `v`. The view asks for the backend of its memory, x. Then x, an open source, asks for that of its
# reader.

# %%
under = state.quirky(state.case("unflagged_leaf_under_view"))
state.sheet(under, "pass3")

# %% tags=["predict"]
lesson.predict("under")

# %%
views.table(["tensor", "backend", "cause"], state.decided(under, "pass4"),
            "v asks x, x asks v, and nobody knows; then v takes the first that supports it.")

# %% tags=["reveal"]
under = state.quirky(state.case("unflagged_leaf_under_view"))
lesson.reveal("under", state.after(under, "pass4")["x"][0])

# %% [markdown]
# Nothing complains yet. The allocator does: in ggml a `GGML_ASSERT` ends the process, far away from the cause. Ours says what is missing:

# %%
try:
    state.results(under)
except WorkbenchError as error:
    print(error)

# %% [markdown]
# Without the quirk, pass 4 lets the owner follow its view in the end. The result is that of the same graph with the flag:

# %%
mended = state.mended(under)
flagged = state.results(state.case("flagged_leaf_under_view"))
same = np.array_equal(state.results(mended)["a"], flagged["a"])
assert same and state.is_settled(mended) and not state.is_settled(under)
views.table(["tensor", "backend", "cause"], state.decided(mended, "pass4"),
            f"One more decision, the last. Equal to the last bit with a flagged leaf: {same}.")

# %% [markdown]
# ## 5 · The second hazard: a view by hand · 6 min
#
# `v` is another shape of `a`, a product on the GPU. `y` reads it on the GPU, `z` on the CPU. Somebody means well and assigns `v` to the CPU by hand,
# close to `z`. ggml does not check that.

# %%
by_hand = state.quirky(state.case("user_assign_view"))
state.sheet(by_hand, "pass4")

# %% tags=["predict"]
lesson.predict("by-hand")

# %%
wrong, right = state.results(by_hand), state.results(state.case("a view, not by hand"))
cuts = by_hand.outcome().splits
rows = [(name, right[name].size, int(np.isnan(x).sum()), int((x != right[name]).sum()))
        for name, x in wrong.items()]
print("split 0 runs on", cuts[0].backend, "and first copies in:", [name for name, _ in cuts[0].inputs])
views.table(["result", "numbers", "not a number", "wrong"], rows, "y is lost, without an error.")

# %% tags=["reveal"]
wrong = state.results(state.quirky(state.case("user_assign_view")))
lost = [name for name in ("y", "z") if np.isnan(wrong[name]).any()]
lesson.reveal("by-hand", " ".join(lost))

# %% [markdown]
# On real devices you would not see NaN, but whatever lay there: perhaps the right numbers, from the run before. (Fresh memory of our simulated devices is
# filled with 0xFF, so that nobody can mistake it.) Ours refuses the assignment:

# %%
try:
    state.mended(by_hand).outcome()
except WorkbenchError as error:
    print(error)

# %% [markdown]
# ## 6 · Who writes into whose memory? · 5 min
#
# Some ops write into a tensor that is there: `CPY`, `SET_ROWS`. To ggml their result is a view of it, but they compute. Here two rows of `table`, a product
# on the GPU, are replaced. The GPU has no kernel for that, so pass 3 gave `filled` to the CPU. Its memory is the GPU's.

# %%
writes = state.case("the host writes")
state.sheet(writes, "pass3")

# %% tags=["predict"]
lesson.predict("writer")

# %%
rows = []
allowed = writes.changed(Change.allow("SET_ROWS", "GPU"))
for name, c in (("as ggml decides", state.quirky(writes)), ("with our repair", writes),
                ("GPU with SET_ROWS", allowed)):
    after = state.after(c, "pass4")
    where = [" ".join(after[t]) for t in ("table", "filled")]
    rows.append((name, *where, state.is_settled(c), c.outcome().copied))
views.table(["", "table", "filled", "all in reach", "bytes per run"], rows,
            "The repair is right and dear: the weight of table travels at each run.")

# %% tags=["reveal"]
lesson.reveal("writer", " ".join(state.after(state.case("the host writes"), "pass4")["table"]))

# %% [markdown]
# In llama.cpp this stays a thought. What is written there, the KV cache, has memory of its own, so its writers are tied by `1.dst` (lesson 08), and a
# backend that cannot do it ends in an error. Ours repairs what is left over: cause **`4.own`**, and **`4.rest`** for a leaf that nobody reads.
#
# The recorded cases again, after pass 4. Those with a hazard are run with the quirk:

# %%
rows = [(f"{name}: tensors after pass 4", n, same) for name, n, same in state.beside_ggml("pass4")]
assert all(n == same for _, n, same in rows)
views.side_by_side(rows, ("real ggml", "agree with ours"), "Hazards included.")

# %% [markdown]
# ## 7 · Step through it · 3 min
#
# Run A is ggml's pass 4 over a graph drawn from a seed, run B ours. *d* jumps to the first difference, *x* steps through the other run.

# %%
drawn = state.case("drawn 2")
state.stepper(state.quirky(drawn), "pass4", other=drawn, title="as ggml", other_title="with repairs",
              caption="A leaf read through a view only is open in A, and with its view in B.")

# %% [markdown]
# What if? And then you first; another seed is another graph.

# %%
widgets.WhatIf(state.case("views"))

# %%
seed = 0                        # any whole number from 0 on
views.Stack(state.sheet(state.practice(seed), "pass3"))

# %%
seed = 0
state.stepper(state.practice(seed), "pass4", predict=True, title=f"Practice {seed}",
              caption="A graph drawn from a seed; the real pass is the judge.")

# %% [markdown]
# ## 8 · Your turn · 4 min
#
# **Tier 1.** Three graphs after pass 3. Write the backend of each tensor that is still open after (our) pass 4, in the order given.

# %%
views.Stack(*(state.sheet(state.case(name), "pass3") for name in state.PAPER))

# %%
for name in state.PAPER:
    print(f"{name}: {', '.join(state.left(state.case(name)))}")

# %% tags=["exercise", "tier-1"]
first = ...        # left, right
second = ...       # cB, cC, row of cC, as E, as G
third = ...        # cF, as B, as C, as E, as H, as I

# %% tags=["solution"]
first = "GPU GPU"
second = "CPU GPU GPU CPU BLAS"
third = "GPU1 GPU1 GPU0 GPU1 GPU1 GPU0"

# %% tags=["wrong"]
first = "CPU GPU"
second = "CPU GPU GPU CPU BLAS"
third = "GPU1 GPU1 GPU0 GPU1 GPU1 GPU0"

# %% tags=["wrong"]
first = "GPU GPU"
second = "CPU CPU CPU CPU BLAS"
third = "GPU1 GPU1 GPU0 GPU1 GPU1 GPU0"

# %% tags=["check"]
cases = [state.case(name) for name in state.PAPER]
expected = [state.after(c, "pass4")[name][0] for c in cases for name in state.left(c)]
steps = [f"{c.name}: {name}" for c in cases for name in state.left(c)]
lesson.check("by-hand", state.typed(first, second, third), expected, steps=steps)

# %% [markdown]
# **Tier 2.** One decision. Pass 4 stands at `node`; `t` is the node itself or one of its sources, and it is open. `of(s)` gives the number of a tensor's
# backend, -1 for none.

# %% tags=["exercise", "tier-2"]
def settle(t, node, of):
    """(backend, cause): "4.vsrc" or "4.cur"; the backend may be -1."""
    raise NotImplementedError

# %% tags=["solution"]
def settle(t, node, of):
    """(backend, cause): "4.vsrc" or "4.cur"; the backend may be -1."""
    if t.view_src is not None:
        return of(t.view_src), "4.vsrc"
    return of(node), "4.cur"

# %% tags=["wrong"]
def settle(t, node, of):
    if t.view_src is not None:
        return of(node), "4.vsrc"
    return of(node), "4.cur"

# %% tags=["wrong"]
def settle(t, node, of):
    if t.view_src is not None and of(t.view_src) != -1:
        return of(t.view_src), "4.vsrc"
    return of(node), "4.cur"

# %% tags=["check"]
q = state.one_by_one(*map(state.case, ("views", "attention", "unflagged_leaf")), *state.drawn(12, 3))
lesson.check("settle", settle, q.expected, q.on, q.steps)

# %% [markdown]
# **Tier 3.** All of pass 4, as ggml does it: without repairs. `ask.nodes` are all nodes in order; `ask.backend(t)` is -1 for an open one;
# `ask.supports(b, t)`; write to `ask.of[t]` what you decide. Return every decision as [name, backend, cause], those with -1 too.

# %% tags=["exercise", "tier-3"]
def pass4(ask):
    """[[ask.name[t], backend, cause], …] in order."""
    raise NotImplementedError

# %% tags=["solution"]
def pass4(ask):
    made = []
    for node in ask.nodes:
        for t in (node if node.view_src is not None else None, *node.src):
            if t is not None and ask.backend(t) == -1:
                cause = "4.vsrc" if t.view_src is not None else "4.cur"
                ask.of[t] = ask.backend(t.view_src if cause == "4.vsrc" else node)
                made.append([ask.name[t], ask.of[t], cause])
        if ask.backend(node) == -1:
            ask.of[node] = next(b for b in range(ask.n) if ask.supports(b, node))
            made.append([ask.name[node], ask.of[node], "2.sup"])
    return made

# %% tags=["wrong"]
def pass4(ask):
    made = []
    for node in ask.nodes:
        for t in (node if node.view_src is not None else None, *node.src):
            if t is not None and ask.backend(t) == -1:
                cause = "4.vsrc" if t.view_src is not None else "4.cur"
                b = ask.backend(t.view_src if cause == "4.vsrc" else node)
                if b != -1:
                    ask.of[t] = b
                    made.append([ask.name[t], b, cause])
    return made

# %% tags=["wrong"]
def pass4(ask):
    made = []
    for node in ask.nodes:
        for t in (*node.src, node if node.view_src is not None else None):
            if t is not None and ask.backend(t) == -1:
                cause = "4.vsrc" if t.view_src is not None else "4.cur"
                ask.of[t] = ask.backend(t.view_src if cause == "4.vsrc" else node)
                made.append([ask.name[t], ask.of[t], cause])
        if ask.backend(node) == -1:
            ask.of[node] = next(b for b in range(ask.n) if ask.supports(b, node))
            made.append([ask.name[node], ask.of[node], "2.sup"])
    return made

# %% tags=["check"]
names = ("views", "attention", "unflagged_leaf", "unflagged_leaf_under_view", "trailing_views")
q = state.pass4(*map(state.case, names), *state.drawn(12, 3))
lesson.check("pass4", pass4, q.expected, q.on, q.steps)

# %% [markdown]
# ## 9 · What is what, and what comes next · 1 min
#
# | here | in ggml | left out here |
# |---|---|---|
# | `passes.assign_rest` | pass 4 of `ggml_backend_sched_split_graph` | – |
# | causes `4.vsrc`, `4.cur` | the same names in `SET_CAUSE` | – |
# | "the first that supports it" | `ggml_backend_sched_set_if_supported` in a loop, cause `2.sup` | where none does: ggml aborts, ours raises UnsupportedOp |
# | `passes.settle`, causes `4.own`, `4.rest` | – | ours alone; `quirks="ggml"` leaves it out |
# | `require_assignable` | – | ours alone: a view is not assigned by hand |
# | `quirks="ggml"` | ggml as it is | its third hazard is the allocator's: old places for a graph of the same size |
# | `Flag.INPUT` | `GGML_TENSOR_FLAG_INPUT`, `ggml_set_input` | – |
#
# **Next, 12:** every tensor has its backend. Pass 5 cuts the graph where it changes, and makes the copies that this lesson has counted.
