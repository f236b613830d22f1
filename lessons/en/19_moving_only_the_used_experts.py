# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 19 · Moving only the used experts
#
# **48 minutes** · before it: 13, running the splits; 16, top-k MoE · after it: 20, the memory wall
#
# A model's experts are most of its bytes, and a batch needs some of them. They lie on the host, the card computes. In lesson 13 a weight was copied whole, or not at
# all. Here is the one place in ggml's scheduler that looks *into* a weight.
#
# Afterwards you can predict, for any ids, the copies and their bytes; say under which condition it happens at all; and when it stops
# helping. Each section needs only the cell below.

# %% tags=["setup"]
import numpy as np

from workbench import lessons, views, widgets
from workbench.lessons.expert_states import TEXTS, WINDOWS
from workbench.scheduler.transfer import expert_copies
from workbench.scheduler.waits import differences

lesson = lessons.open_lesson("19")
state = lesson.state

# %% [markdown]
# ## 1 · Which bytes travel · 7 min
#
# A weight with 8 experts lies in host memory, 4,096 bytes each. The card computes `mul_mat_id`: each token with the expert that its
# *id* names. Five tokens come, with the ids

# %%
ids = [1, 1, 4, 6, 6]
bits = sum(1 << e for e in set(ids))
print(f"used: {sorted(set(ids))}; as a bitset, expert 0 on the right: {bits:08b}")

# %% tags=["predict"]
lesson.predict("three")

# %%
ran = state.once(ids)
assert not views.hazards(ran.trace)
copies = state.copies(ran.trace)
views.table(["weight", "first", "last", "bytes", "of these padding"], copies,
            f"{len(copies)} copies, {sum(c.bytes for c in copies):,} bytes of 32,768.")

# %% tags=["reveal"]
lesson.reveal("three", len(state.copies(state.once([1, 1, 4, 6, 6]).trace)))

# %%
views.expert_picture({"1 1 4 6 6": ([1, 1, 4, 6, 6], 8, 4096)},
                     "Behind each of them come up to 512 bytes of padding.")

# %% [markdown]
# Neighbours are one **run**, and one copy. So with the ids 4, 5, 6 there is one. How many bytes does it carry?

# %% tags=["predict"]
lesson.predict("bytes")

# %%
rows = []
for ids in ([1, 1, 4, 6, 6], [4, 5, 6], [7], [0, 7], [0, 1, 2, 3, 4, 5, 6, 7]):
    parts = list(expert_copies(sorted(set(ids)), 8, 4096))                # the rule
    found = state.copies(state.once(ids).trace)                           # a run
    assert [(p.first, p.last, p.size) for p in parts] == [(c.first, c.last, c.bytes) for c in found]
    rows.append((" ".join(map(str, ids)), len(parts), len(found), sum(p.size for p in parts),
                 sum(c.bytes for c in found)))
views.table(["ids", "copies: rule", "run", "bytes: rule", "run"], rows,
            "8 × 4,096 are 32,768: all of them, in one copy.")

# %% tags=["reveal"]
lesson.reveal("bytes", state.copies(state.once([4, 5, 6]).trace)[0].bytes)

# %%
views.expert_picture({"1 1 4 6 6": ([1, 1, 4, 6, 6], 8, 4096), "4 5 6": ([4, 5, 6], 8, 4096)},
                     "Neighbours share one copy and one padding: less to carry, and fewer calls.")

# %% [markdown]
# The same in real ggml, recorded: experts of 512 bytes, ids 1, 5, 2. Two copies, 1 to 2 and 5 alone, each with min(512, 512) bytes more.

# %%
print("\n".join(state.ggml["moe_used_experts_only"][3:9]))

# %% [markdown]
# **Why padding?** Some kernels work in tiles and read a little past the last row of an expert. What they read there does not count, but it is multiplied by
# zero, and 0 × NaN is NaN. Fresh memory may hold anything. So a few bytes of the next expert are brought along. Behind the last expert there is no next one.
#
# ## 2 · Who chooses · 5 min
#
# Three of eight experts are moved. Who decided that it is these?

# %% tags=["predict"]
lesson.predict("who")

# %%
rows = []
for ids in ([1, 1, 4, 6, 6], [0, 2, 4, 2, 0]):
    ran = state.once(ids)
    moved = sorted(e for c in state.copies(ran.trace) for e in range(c.first, c.last + 1))
    splits = state.splits(ids)
    where = "; ".join(f"{device}: {' '.join(nodes)}" for device, nodes in splits)
    rows.append((" ".join(map(str, ids)), where, str(moved)))
views.table(["ids", "splits", "experts moved"], rows, "Other ids, the same splits: the passes see no id.")

# %% tags=["reveal"]
a, b = [1, 1, 4, 6, 6], [0, 2, 4, 2, 0]
same = state.splits(a) == state.splits(b)
other = state.copies(state.once(a).trace) != state.copies(state.once(b).trace)
lesson.reveal("who", "ids" if same and other else "passes")

# %% [markdown]
# In a model the ids come out of the *router*, a few nodes before: a product, a softmax, the best k (lesson 16). So they exist only when the
# run has got there, in the card's memory. The runtime must wait for the card, and fetch them:

# %%
ran = state.experts_of(34)
calls = state.calls(ran.trace)
start = next(i for i, c in enumerate(calls) if "to send" in c)
for call in calls[start - 1 : start + 8]:
    print(call if len(call) < 90 else call[:70] + " … " + call[-7:])

# %% [markdown]
# This is the price: in each layer the host stands still until the router has spoken, and the card stands still until the experts have come.
#
# ## 3 · Step through it · 6 min
#
# 34 tokens of Python code through the tiny Mixtral, experts on the host. Jump with the list to the next *used experts*: below the
# clock you see the weight, which experts are copied so far, and their padding. *k* goes on to the next such call, *s* to the next split.

# %%
ran = state.experts_of(34)
steps = views.run_steps(ran.trace)["steps"]
several = next(i for i, s in enumerate(steps) if s["cause"] == "used experts" and s["event"][6][3] > 0)
widgets.step_run(ran.trace, "34 tokens", "Runs of experts, each with its padding.", k=several)

# %% tags=["predict"]
lesson.predict("runs")

# %%
rows = []
for layer in range(5):
    used = state.used("tiny-mixtral", "python", 34, layer)
    parts = list(expert_copies(used, 8, 40960))
    found = [c for c in state.copies(ran.trace) if c.weight == f"blk.{layer}.ffn_up_exps.weight"]
    assert [(p.first, p.last, p.size) for p in parts] == [(c.first, c.last, c.bytes) for c in found]
    rows.append((layer, " ".join(map(str, used)), len(parts), len(found), sum(p.size for p in parts),
                 sum(c.bytes for c in found)))
views.table(["layer", "used", "copies: rule", "run", "bytes: rule", "run"], rows,
            "ffn_up of each layer. The last layer is missing: it computes one row, on the host.")

# %% tags=["reveal"]
lesson.reveal("runs", len(list(expert_copies(state.used("tiny-mixtral", "python", 34, 3), 8, 40960))))

# %% [markdown]
# Moving a part changes nothing in the result: what is not used is not read. The same prompt with every weight moved whole:

# %%
whole = state.experts_of(34, everything=True)
part = state.experts_of(34)
assert not differences(whole, part)
sums = [sum(c.bytes for c in state.copies(r.trace)) for r in (whole, part)]
print(f"the same logits, bit for bit; {sums[0]:,} bytes whole, {sums[1]:,} in part")

# %% [markdown]
# ## 4 · One node more · 6 min
#
# So far the product was alone in its split, or stood first. Now another node stands before it, in the same split, and everything else is as it was:

# %% tags=["predict"]
lesson.predict("second")

# %%
rows = []
for before in (False, True):
    ran = state.once([1, 1, 4, 6, 6], before=before)
    last = state.splits([1, 1, 4, 6, 6], before=before)[-1][1]
    copies = state.copies(ran.trace)
    rows.append((" ".join(last), len(copies), sum(c.bytes for c in copies)))
views.table(["last split", "copies", "bytes"], rows, "One node more, and all is moved.")

# %% tags=["reveal"]
copies = state.copies(state.once([1, 1, 4, 6, 6], before=True).trace)
lesson.reveal("second", "whole" if copies[0].bytes == 8 * 4096 else "part", bytes=copies[0].bytes)

# %% [markdown]
# So the rule has a condition: the product must be the *first node of its split*. Real ggml does the same (case `moe_not_first_in_split`: the whole
# 2,048 bytes). In llama.cpp's graphs it holds nearly always, thanks to pass 5: it begins a new split at each weight that must be copied in. So gate, up
# and down each stand first:

# %%
scheduler, run = state.decode(34)()
run()
found = [s for s in scheduler.splits if any(n.op == "MUL_MAT_ID" for n in s.nodes) and s.backend == 0][:3]
rows = [(s.nodes[0].name, s.nodes[0].op, len(s.nodes), ", ".join(t.name for t in s.inputs))
        for s in found]
views.table(["first node", "its op", "nodes", "inputs"], rows, "Three splits for one expert layer.")

# %% [markdown]
# ## 5 · Reading the ids · 5 min
#
# Each of the five layers has three products with experts, with the same ids. Reading them stops host and card. How often does it happen?

# %% tags=["predict"]
lesson.predict("reads")

# %%
ran = state.experts_of(34)
weights = {c.weight for c in state.copies(ran.trace)}
reads = state.reads_of_ids(ran.trace)
rows = [("products with experts on the card", len(weights)), ("reads of ids", reads)]
views.table(["in one prompt", ""], rows, "The runtime remembers the last ids tensor, and what it held.")

# %% tags=["reveal"]
lesson.reveal("reads", state.reads_of_ids(state.experts_of(34).trace))

# %% [markdown]
# It compares tensors by *identity*: is this the very same one? Not by content. Two tensors with equal ids are read twice, and a tensor is read
# again if another one came between. Recorded from ggml, with ids1, ids2 and ids1 again:

# %%
print("\n".join(c for c in state.ggml["moe_two_id_sets"] if "ids" in c and ("from" in c or "send" in c)))

# %% [markdown]
# ## 6 · And a bias? · 5 min
#
# gpt-oss has a bias per expert: `add_id` adds row `id` of a matrix. Should the runtime look into that, too? In gpt-oss-120b one matrix of
# an expert has 4.4 MB, its bias 11,520 bytes; there are 128 experts. Say a batch uses 95 of them, as in layer 0 of the published run.

# %% tags=["predict"]
lesson.predict("bias")

# %%
(n, matrix, bias), card = state.gpt_oss(), state.card()
used = sorted(np.random.default_rng(1).choice(n, 95, replace=False).tolist())
rows = []
for what, size in (("matrix", matrix), ("bias", bias)):
    parts, whole = (state.carried(experts, n, size, card) for experts in (used, range(n)))
    rows.append((what, whole[1], parts[1], parts[0], f"{whole[2] / 1000:,.0f}", f"{parts[2] / 1000:,.0f}",
                 f"{whole[2] / parts[2]:.2f}"))
columns = ["of 128 experts", "bytes", "bytes used", "copies", "whole, µs", "parts, µs", "gain"]
views.table(columns, rows, "A 3090 with PCIe 4: 10 µs for each copy, and 25 GB/s.")

# %% tags=["reveal"]
(n, _, bias), card = state.gpt_oss(), state.card()
used = sorted(np.random.default_rng(1).choice(n, 95, replace=False).tolist())
parts, whole = (state.carried(experts, n, bias, card) for experts in (used, range(n)))
faster, times = "whole" if whole[2] < parts[2] else "parts", f"{parts[2] / whole[2]:.1f}"
lesson.reveal("bias", faster, times=times, copies=parts[0])

# %%
ran = state.once([1, 1, 4, 6, 6], bias=True)
rows = [(c.weight, "all" if c.last < 0 else f"expert {c.first}", c.bytes)
        for c in state.copies(ran.trace)]
views.table(["weight", "what", "bytes"], rows,
            "A run: experts in parts, the bias at once, in a split of its own.")

# %% [markdown]
# ## 7 · When it stops helping · 9 min
#
# One token uses k of E experts. More tokens use more of them. If each token drew its experts at random, n tokens would use
# E·(1 − (1 − k/E)ⁿ) different ones. The tiny Mixtral (8 experts, 2 per token) at 32 tokens, from where on a card takes the products over:

# %% tags=["predict"]
lesson.predict("distinct")

# %%
curves, rows = {}, []
for name, n, k in (("tiny-mixtral", 8, 2), ("tiny-deepseek", 16, 4)):
    real = [state.distinct(name, w) for w in WINDOWS]
    drawn = [state.expected(n, k, w) for w in WINDOWS]
    curves[name] = {"drawn at random": (WINDOWS, drawn), "real texts": (WINDOWS, real)}
    rows += [(name, w, d, r) for w, d, r in zip(WINDOWS, drawn, real) if w in (1, 8, 32, 256)]
views.Stack(
    views.line_picture(curves, "Neighbouring tokens share experts. In the end nearly all are used.",
                       "Two panels: tokens against different experts; real ones stay below random ones.",
                       "neighbouring tokens", "different experts used", (1, 4, 16, 64, 256)),
    views.table(["model", "tokens", "formula", "counted"], rows, "Means over layers, texts, windows."))

# %% tags=["reveal"]
real, drawn = state.distinct("tiny-mixtral", 32), state.expected(8, 2, 32)
lesson.reveal("distinct", round(real), exact=f"{real:.2f}", drawn=f"{drawn:.2f}")

# %% [markdown]
# So with 8 experts there is little left to save at 32 tokens, and below 32 the CPU computes anyway. With many experts it is different. Published counts;
# those of Kimi K3 are means over several texts, while the 126 in lesson 16 is of one paragraph:

# %%
rows = [(f"Kimi K3, 16 of 896, {n} tokens", state.expected(896, 16, n), float(used))
        for n, used in state.kimi.items()]
used = state.pr15346["used of 128 at 512 tokens, layers 0 to 7"]
rows.append(("gpt-oss, 4 of 128, 512 tokens", state.expected(128, 4, 512), sum(used) / len(used)))
views.side_by_side(rows, ("formula", "published"), "A random router would use all 128.")

# %% [markdown]
# And what it brought, in tokens per second, when it came into llama.cpp: a prompt of 2,048 tokens through gpt-oss, experts on the host.

# %%
rows = [(f"micro-batch of {n}", *speeds) for n, speeds in state.pr15346["tokens per second"].items()]
views.side_by_side(rows, ("all experts", "used experts"),
                   "llama.cpp PR 15346. Large micro-batches use more experts, and gain less.")

# %% [markdown]
# Turn the knobs: how many tokens, of which text. Bytes and times of the three weights of layer 3, by the runtime's own rule, with the real routes.

# %%
def what_if(window, text):
    n, card = WINDOWS[window], state.card()
    used = state.used("tiny-mixtral", TEXTS[text], n, layer=3)
    some, full = (state.carried(e, 8, 40960, card) for e in (used, range(8)))
    strip = {f"{n} tokens": (used, 8, 40960)}
    rows = [(what, 3 * a, 3 * b) for what, a, b in zip(("copies", "bytes", "ns"), full, some)]
    return views.Stack(views.expert_picture(strip, f"{TEXTS[text]}: {len(used)} of 8 experts."),
                       views.side_by_side(rows, ("all", "used"), "The three weights of layer 3."))

knobs = [["tokens", 0, 8, [str(n) for n in WINDOWS]], ["text", 0, 5, list(TEXTS)]]
widgets.Knobs(knobs=knobs, values=[3, 0]).drive(what_if)

# %% [markdown]
# Note what is *not* here. Nothing is kept: the next batch moves its experts again, even the same ones. And nothing is moved ahead of time: the router has
# to speak first. Lessons 20 to 22 begin there.
#
# ## 8 · Your turn · 4 min
#
# **Tier 1.** Which runs do these ids make?

# %% tags=["exercise", "tier-1"]
def expert_runs(ids):
    """(first, last) of each run of neighbours, in order."""
    raise NotImplementedError

# %% tags=["solution"]
def expert_runs(ids):
    """(first, last) of each run of neighbours, in order."""
    used = sorted(set(ids))
    first = [e for e in used if e - 1 not in used]
    last = [e for e in used if e + 1 not in used]
    return list(zip(first, last))

# %% tags=["wrong"]
def expert_runs(ids):
    return [(e, e) for e in sorted(set(ids))]

# %% tags=["wrong"]
def expert_runs(ids):
    runs = []
    for e in ids:
        if runs and e == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], e)
        else:
            runs.append((e, e))
    return runs

# %% tags=["check"]
on = [([1, 1, 4, 6, 6],), ([4, 5, 6],), ([6, 4, 5],), ([7, 0],), ([3, 3, 3],), ([0, 1, 3, 4, 7, 6],)]
expected = [[(c.first, c.last) for c in state.copies(state.once(*ids).trace)] for ids in on]
lesson.check("expert-runs", expert_runs, expected, on, [str(ids) for ids, in on])

# %% [markdown]
# **Tier 2.** How many bytes are copied, padding included?

# %% tags=["exercise", "tier-2"]
def bytes_copied(ids, n_expert, size):
    """All bytes that are copied of a weight with n_expert experts of `size` bytes."""
    raise NotImplementedError

# %% tags=["solution"]
def bytes_copied(ids, n_expert, size):
    """All bytes that are copied of a weight with n_expert experts of `size` bytes."""
    used = set(ids)
    ends = [e for e in used if e + 1 not in used and e + 1 < n_expert]
    return len(used) * size + len(ends) * min(size, 512)

# %% tags=["wrong"]
def bytes_copied(ids, n_expert, size):
    return len(set(ids)) * (size + min(size, 512))

# %% tags=["wrong"]
def bytes_copied(ids, n_expert, size):
    used = set(ids)
    return len(used) * size + sum(e + 1 not in used for e in used) * 512

# %% tags=["check"]
cases = [([1, 1, 4, 6, 6], 8, 32), ([4, 5, 6], 8, 32), ([7], 8, 32), ([2, 7], 8, 8), ([5], 16, 16)]
on = [(ids, n, 4 * width * width) for ids, n, width in cases]
runs = [state.once(ids, n_expert=n, width=width) for ids, n, width in cases]
expected = [sum(c.bytes for c in state.copies(r.trace)) for r in runs]
lesson.check("bytes-copied", bytes_copied, expected, on)

# %% [markdown]
# **Tier 3.** Parts or whole? Find the order of copies that takes least time: you may also fill a gap between two runs and copy the unused experts in it. `copy_ns`
# for each copy and `byte_ns` for each byte; no padding here.

# %% tags=["exercise", "tier-3"]
def cheapest(used, size, copy_ns, byte_ns):
    """used: the experts, sorted. Returns the least nanoseconds."""
    raise NotImplementedError

# %% tags=["solution"]
def cheapest(used, size, copy_ns, byte_ns):
    """used: the experts, sorted. Returns the least nanoseconds."""
    total = copy_ns + size * byte_ns
    for a, b in zip(used, used[1:]):
        total += min(copy_ns + size * byte_ns, (b - a) * size * byte_ns)    # a new copy, or on and on
    return total

# %% tags=["wrong"]
def cheapest(used, size, copy_ns, byte_ns):
    runs = sum(e - 1 not in used for e in used)
    return runs * copy_ns + len(used) * size * byte_ns

# %% tags=["wrong"]
def cheapest(used, size, copy_ns, byte_ns):
    runs, span = sum(e - 1 not in used for e in used), used[-1] - used[0] + 1
    return min(runs * copy_ns + len(used) * size * byte_ns, copy_ns + span * size * byte_ns)

# %% tags=["check"]
ways = ([1, 4, 6], [0, 1, 2], [0, 7], [0, 2, 3, 9, 11])
on = [(used, size, 10_000, 0.04) for used in ways for size in (4_096, 1_000_000)]
on.append(([0, 2, 40], 100_000, 10_000, 0.04))
expected = [state.tried(*case) for case in on]
lesson.check("cheapest", cheapest, expected, on)

# %% [markdown]
# ## 9 · What is what, and what comes next · 1 min
#
# | here | in ggml, llama.cpp | left out here |
# |---|---|---|
# | `transfer.UsedExperts` | the MUL_MAT_ID branch of `ggml_backend_sched_compute_splits` | – |
# | `used_experts(ids, …)` | `used_ids`, a `ggml_bitset_t` | we sort, ggml sets bits |
# | `expert_copies`, `PADDING` | `copy_experts`, `min(expert_size, 512)` | – |
# | the remembered ids tensor | `prev_ids_tensor` | – |
# | `WholeTensor` | what ggml did before PR 15346 | – |
# | experts on the host | `-ot exps=CPU`, `--cpu-moe`, `--n-cpu-moe` | – |
#
# **Next, 20:** what stays on the card, what is used, what is moved: three numbers that are often taken for one.
