# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 13 · Running the splits
#
# **49 minutes** · before it: 08 to 12, the five passes · after it: 14, pipeline parallelism; 19, moving only the used experts
#
# The passes leave a list: these nodes on this device, and before them these copies. Now somebody has to carry it out. That is the *runtime*
# (`ggml_backend_sched_compute_splits`), some 150 lines in ggml: no plan, no choice, only copies, waits and computes, in an order.
#
# Afterwards you can write that order down for any splits, say what each wait is for and what happens without it, look at results on
# the way, and say when it pays to move an op to a GPU though its weights lie on the host. Each section needs only the cell below.

# %% tags=["setup"]
import numpy as np

from workbench import lessons, views, widgets
from workbench.scheduler.waits import differences, outcome, run_of, waits
from workbench.scheduler.whatif import Change

lesson = lessons.open_lesson("13")
state = lesson.state
abc = state.cases["A B C | D | E F"]          # of lesson 12: the GPU has no softmax, so D is the CPU's

# %% [markdown]
# ## 1 · From splits to calls · 6 min
#
# Six steps in a row. A to C and E, F run on the GPU, D on the CPU: three splits. Each lists its *inputs*, tensors of other
# devices that must be copied before it runs. Everything here is simulated: the devices compute for real, in memory of their own, on a
# clock of their own. That makes times the same on every machine.

# %%
splits, _, _ = state.script(abc)
rows = [(i, s.device, " ".join(s.nodes), ", ".join(name for name, _, _ in s.inputs))
        for i, s in enumerate(splits)]
views.table(["split", "device", "nodes", "inputs"], rows, "Three splits, each with one input to fetch.")

# %% tags=["predict"]
lesson.predict("order")

# %% [markdown]
# Now run it and write down every call that the host makes. Step through them with → and ←. Solid is done; pale was asked for and is not done
# yet; the line is where the host is. *s* goes to the next split, *k* to the next call of the same kind.

# %%
ran = state.run(abc)
assert state.valid(ran, state.on_host(abc))       # the same bits as everything on the host
widgets.step_run(ran.trace, "A B C | D | E F", "Each crossing costs a wait and a copy.", k=4)

# %% tags=["reveal"]
calls = state.calls(state.run(abc).trace)
start, end = calls.index("compute A B C on GPU") + 1, calls.index("compute D on CPU") + 1
done = ", ".join(call.split()[0] for call in calls[start:end])
lesson.reveal("order", done, calls="; ".join(calls[start:end]))

# %% [markdown]
# ## 2 · When is it done? · 5 min
#
# `compute_async` returns at once: the work stands in the GPU's *stream*, a queue that the GPU works off by itself. The CPU
# backend has no stream. What has happened when a call returns?

# %% tags=["predict"]
lesson.predict("async")

# %%
rows = [(nodes, f"{call:,}", done, f"{begin:,}", f"{end:,}")
        for nodes, call, done, begin, end in state.launches(state.run(abc).trace)]
views.table(["nodes", "the call, ns", "done then", "they begin, ns", "they end, ns"], rows,
            "What was asked for happens later, in the order of the stream.")

# %% tags=["reveal"]
_, call, done, _, end = state.launches(state.run(abc).trace)[0]
lesson.reveal("async", done, ns=end - call)

# %% [markdown]
# So the host runs ahead, and prepares the next split while the GPU computes. The price: whoever touches a result must know that it is there.
#
# ## 3 · The whole rule · 8 min
#
# For each split:
#
# 1. It has no inputs, and the split before ran elsewhere: wait for that device.
# 2. For each input: wait until this device is done with the *old* contents of the copy. An input of the user is then copied at once, while
#    the host stands by. Anything else is asked of the device; if it refuses, wait for the source, too, and copy yourself.
# 3. Ask for the nodes. (Record an event, where there are events: lesson 14.)
#
# At the end, wait for all. Waiting for a device without a stream is no call. The rule as code, beside what was recorded, here and in ggml:

# %%
splits, predicted, recorded = state.script(abc)
ggml = [call.replace("GPU0", "GPU") for call in state.ggml["abc_d_ef"]]
rows = [(i, *line, "yes" if len(set(line)) == 1 else "no")
        for i, line in enumerate(zip(predicted, recorded, ggml), 1)]
assert predicted == recorded == ggml
views.table(["", "predicted", "recorded here", "recorded in ggml", "same"], rows,
            "Twelve calls, three times the same. The graph has six nodes.")

# %% [markdown]
# Why is the GPU asked to fetch D at all, if it refuses? Because the runtime does not know what a device can do; it asks, and falls back. A CUDA
# device copies from another CUDA device by itself, never from the CPU's memory.
#
# Now a real model: one token through the tiny Mixtral. Its experts stay on the host, everything else is on the GPU.

# %% tags=["predict"]
lesson.predict("calls")

# %%
rows = []
for name in ("MLP, half on the host", "forty inputs", "two GPUs", "a copy used twice"):
    splits, predicted, recorded = state.script(state.cases[name])
    rows.append((name, len(splits), len(predicted), len(recorded), predicted == recorded))
n_splits, predicted, recorded = state.one_token()
rows.append(("tiny Mixtral, one token", n_splits, len(predicted), len(recorded), predicted == recorded))
assert all(same for *_, same in rows)
views.table(["run", "splits", "calls predicted", "calls recorded", "the same, one by one"], rows,
            "The order follows from the splits alone, for six nodes and for three hundred.")

# %% tags=["reveal"]
n_splits, _, recorded = state.one_token()
lesson.reveal("calls", len(recorded), splits=n_splits, waits=sum(c.startswith("wait") for c in recorded))

# %% [markdown]
# ## 4 · Inputs of the user · 4 min
#
# You write x, ask for a run, and do not wait: at once you write the next x into the same tensor. Nothing of the first run has
# been computed yet (section 2).

# %% tags=["predict"]
lesson.predict("overwrite")

# %%
results = {}
for overwrite in (False, True):
    scheduler, graph = abc.scheduler_and_graph()
    scheduler.alloc(graph)
    abc.write_inputs(graph)
    scheduler.compute_async(graph)
    if overwrite:
        graph.find("x").set(np.zeros(graph.find("x").shape, np.float32))
    scheduler.synchronize()
    results[overwrite] = graph.find("F").numpy().copy()
same = np.array_equal(results[False], results[True])
print("x overwritten right after the call; the result has", "the same bits" if same else "other bits")

# %% tags=["reveal"]
lesson.reveal("overwrite", "first" if same else "second")

# %% [markdown]
# This is why a tensor is *flagged* as an input (`ggml_set_input`). The flag says that the user may write to it at any time. It has a price: the
# host stands by for each such copy, for the start of a transfer, 10 µs here, however few the bytes.

# %%
ran = outcome(state.decode(1, devices=2))
inputs = state.input_copies(ran.trace)              # nanoseconds of each
spent = sum(inputs) / 1000
print(f"one token, two GPUs: {len(inputs)} copies of inputs, {spent:.0f} µs of the host's time")

# %% [markdown]
# ## 5 · One wait less · 8 min
#
# The run of A B C | D | E F has six waits. One of them stands before the copy of C to the host. Leave exactly that one out.

# %% tags=["predict"]
lesson.predict("missing")

# %%
widgets.leave_out_wait(run_of(abc), "Move the slider: in this run, most waits could be missing.", 3)

# %% tags=["reveal"]
whole, cut = outcome(run_of(abc)), outcome(run_of(abc), 3)
wrong, slower = differences(whole, cut), state.took(cut) > state.took(whole)
ended = "error" if cut.error else "slower" if slower else "wrong" if wrong else "same"
early = views.hazards(cut.trace)[0].tensor
lesson.reveal("missing", ended, numbers=wrong[0].differing, of=wrong[0].of, early=early)

# %% [markdown]
# Why are the others there, if nothing changes without them? Because *this* run is lucky: the device was idle, or the copy takes longer than
# what is missing. A wait is there for the slowest case.
#
# On the shipped model one of them is even less forgiving. Its experts lie on the host, and before the host can copy those that are used, it must read
# which ones the router chose (lesson 19):

# %%
make = state.decode(34)
whole = outcome(make)
kinds = [e.kind for e in whole.trace.events]
behind = whole.trace.events[kinds.index("get_async"):]
wait = waits(whole.trace).index(next(e for e in behind if e.kind == "sync")) + 1
cut = outcome(make, wait)
early = views.hazards(cut.trace)[0]
print(f"without wait {wait}: {early.kind}: {early.tensor}")
print(cut.error.splitlines()[0])

# %% [markdown]
# That one stops at once, and you know where. The dangerous ones are those of the slider: right shape, right time, wrong numbers, on some machines, sometimes.
#
# ## 6 · Looking inside · 5 min
#
# How does a tool see results in the middle of a run, which the next node may overwrite? With an *eval callback*
# (`ggml_backend_sched_set_eval_callback`; llama.cpp's imatrix uses it). Before computing, the runtime asks it about each node: do you want
# this one? It then computes up to a wanted node, waits, and shows it.

# %% tags=["predict"]
lesson.predict("callback")

# %%
rows = []
for what, wanted in {"nothing": None, "the output of each layer": "l_out", "each node": ""}.items():
    look = None if wanted is None else lambda node, ask, w=wanted: node.name.startswith(w)
    ran = outcome(state.decode(1, "rtx3090-pcie4,cpu", callback=look))
    calls = state.calls(ran.trace)
    shown = sum(c.startswith("callback is shown") for c in calls)
    computes, waiting = (sum(c.startswith(w) for c in calls) for w in ("compute", "wait"))
    rows.append((what, shown, computes, waiting, f"{state.took(ran) / 1000:.0f}"))
views.table(["wanted", "nodes shown", "compute calls", "waits", "virtual µs"], rows,
            "The same token, the same numbers. Looking at everything takes the streams apart.")

# %% tags=["reveal"]
seen = outcome(state.decode(1, callback=lambda node, ask: True))
plain = outcome(state.decode(1))
assert not differences(plain, seen)
computes = [sum(c.startswith("compute") for c in state.calls(r.trace)) for r in (plain, seen)]
lesson.reveal("callback", round(computes[1] / computes[0]), before=computes[0], after=computes[1])

# %% [markdown]
# And if the callback answers *stop*? Then ggml leaves out the rest of *that split*, and goes on with the next one, on old bytes. Recorded from ggml,
# with a callback that stops at a:

# %%
print("\n".join(state.ggml["eval_callback_stop"][:9]))

# %% [markdown]
# The graph has s and t behind a: they are never computed, and t is copied all the same.
#
# ## 7 · Op offload · 8 min
#
# A weight lies on the host, so pass 1 gives its product to the CPU. Unless `op_offload` is on (it is) and the first GPU says that the batch is
# worth it. CUDA's rule is one number: 32 rows or more (`GGML_OP_OFFLOAD_MIN_BATCH`). An MLP whose weights and biases all lie on the host:

# %% tags=["predict"]
lesson.predict("offload")

# %%
rows = []
for batch in (1, 31, 32):
    case = state.cases["MLP on the host"].changed(Change.batch(batch))
    ran = state.run(case)
    assert state.valid(ran, state.on_host(case))
    found = case.outcome()
    on_gpu = [n.name for n in found.nodes if n.backend == "GPU"]
    rows.append((batch, len(found.splits), ", ".join(on_gpu) or "none", found.copied))
views.table(["batch", "splits", "nodes on the GPU", "bytes copied in one run"], rows,
            "From 32 on the weights are copied in for the run, and forgotten after it.")

# %% tags=["reveal"]
found = state.cases["MLP on the host"].changed(Change.batch(32)).outcome()
on_gpu = [n.name for n in found.nodes if n.backend == "GPU"]
how = {6: "all", 2: "products", 0: "none"}.get(len(on_gpu), "some")
lesson.reveal("offload", how, names=", ".join(on_gpu))

# %% [markdown]
# Does it pay? One product, 1,024 × 1,024 numbers of 4 bytes, on a card like a 3090 (PCIe 4) and its host. On the host it takes as long as the
# arithmetic, 2·1,024²·batch operations. Offloaded: as long as carrying 4 MiB, and the rows there and back, and four waits.

# %% tags=["predict"]
lesson.predict("pays")

# %%
(card, host), n, rows = state.speeds(), 1024, []
for batch in (1, 32, 64, 128, 256):
    kept = host.compute_ns(state.node(batch)) + card.sync_ns                  # and a wait at the end
    weight, numbers = card.transfer_ns(4 * n * n), 2 * card.transfer_ns(4 * n * batch)
    moved = weight + numbers + card.compute_ns(state.node(batch)) + 4 * card.sync_ns
    moved = moved if batch >= 32 else kept
    ran = [state.took(state.run(state.product(batch, on))) for on in (False, True)]
    times = [f"{ns / 1000:.0f}" for ns in (kept, ran[0], moved, ran[1])]
    rows.append((batch, *times, f"{ran[0] / ran[1]:.2f}"))
columns = ["batch", "host: formula, µs", "host: run", "op_offload: formula", "op_offload: run", "gain"]
views.table(columns, rows, "At 32 the rule moves it, and that is slower: the weight alone takes 176 µs.")

# %% tags=["reveal"]
faster = [b for b in (32, 40, 48, 56, 64, 96, 128)
          if state.took(state.run(state.product(b))) < state.took(state.run(state.product(b, False)))]
lesson.reveal("pays", faster[0])

# %% [markdown]
# Turn the knobs: batch, and which machine. The simulated "GPU" stands for a card beside a slow host.

# %%
batches, machines = [1, 16, 31, 32, 48, 64, 128, 256], ["rtx3090-pcie4,cpu", "laptop,cpu", 1]

def what_if(b, m):
    ran = {on: state.run(state.product(batches[b], on, machines[m])) for on in (False, True)}
    kept, moved = (state.took(ran[on]) / 1000 for on in (False, True))
    assert not differences(ran[False], ran[True])
    return views.table(["", "kept on the host", "op_offload"], [
        ("virtual µs", kept, moved), ("calls", *(len(state.calls(ran[on].trace)) for on in ran))],
        f"{batches[b]} rows on {machines[m]}: op offload makes it {kept / moved:.2f} times as fast.")

knobs = [["batch", 0, 7, [str(b) for b in batches]], ["machine", 0, 2, [*map(str, machines)]]]
widgets.Knobs(knobs=knobs, values=[5, 0]).drive(what_if)

# %% [markdown]
# Both sides have been published: prompts of 5,480 and 75,130 tokens, where offloading is worth a lot, and one of 34 tokens, just above the
# threshold, where it cost dearly. (The fork in the second line asks for 32 rows *per expert*, and so kept them on the host.)

# %%
rows = [(what, *speeds.values(), f"{speeds['offloaded'] / [*speeds.values()][0]:.2f}")
        for what, speeds in state.shares.items()]
views.table(["tokens per second", "kept on the host", "offloaded", "ratio"], rows,
            "One threshold for all machines and models cannot be right for all of them.")

# %% [markdown]
# ## 8 · Your turn · 4 min
#
# **Tier 1.** How many of the copies in a run are of the user's inputs? A split has `.device`, `.nodes` and `.inputs`, a tuple of (name, the device where it
# lies, is it an input of the user?).

# %% tags=["exercise", "tier-1"]
def user_copies(splits):
    """How many copies of the user's inputs a run of these splits makes."""
    raise NotImplementedError

# %% tags=["solution"]
def user_copies(splits):
    """How many copies of the user's inputs a run of these splits makes."""
    return sum(user for split in splits for _, _, user in split.inputs)

# %% tags=["wrong"]
def user_copies(splits):
    return sum(len(split.inputs) for split in splits)

# %% tags=["wrong"]
def user_copies(splits):
    return len({name for split in splits for name, _, user in split.inputs if user})

# %% tags=["check"]
names = ["A B C | D | E F", "forty inputs", "two GPUs", "MLP, batch 32", "x twice"]
cases = [state.cases[n] if n in state.cases else state.read_twice for n in names]
on = [(state.script(case)[0],) for case in cases]
expected = [state.user_copies(case) for case in cases]
lesson.check("user-copies", user_copies, expected, on, names)

# %% [markdown]
# **Tier 2.** How many compute calls does a run make, with a callback that wants some nodes?

# %% tags=["exercise", "tier-2"]
def compute_calls(splits, wanted):
    """splits: the nodes of each split, by name; wanted: the names that the callback wants."""
    raise NotImplementedError

# %% tags=["solution"]
def compute_calls(splits, wanted):
    """splits: the nodes of each split, by name; wanted: the names that the callback wants."""
    return sum(sum(n in wanted for n in nodes) + (nodes[-1] not in wanted) for nodes in splits)

# %% tags=["wrong"]
def compute_calls(splits, wanted):
    return sum(sum(n in wanted for n in nodes) + 1 for nodes in splits)

# %% tags=["wrong"]
def compute_calls(splits, wanted):
    return len(splits) + len(wanted)

# %% tags=["check"]
nodes = [s.nodes for s in state.script(abc)[0]]
on = [(nodes, set(wanted)) for wanted in ("", "B", "C", "D", "ABCDEF", "BF", "AE")]
expected = [state.computes_with(abc, wanted) for _, wanted in on]
steps = [f"wants {''.join(sorted(w)) or 'nothing'}" for _, w in on]
lesson.check("compute-calls", compute_calls, expected, on, steps)

# %% [markdown]
# **Tier 3.** Write the runtime's rule for one GPU and the CPU. Only the GPU has a stream; copies between the two are always blocking. Leave out
# the refused questions, and the wait at the end.

# %% tags=["exercise", "tier-3"]
def order(splits):
    """The calls: "wait for GPU", "copy X", "compute A B C", in order."""
    raise NotImplementedError

# %% tags=["solution"]
def order(splits):
    """The calls: "wait for GPU", "copy X", "compute A B C", in order."""
    calls, before = [], ""
    for split in splits:
        if not split.inputs and before == "GPU" != split.device:
            calls.append("wait for GPU")
        for name, _, user in split.inputs:
            calls += ["wait for GPU"] * (split.device == "GPU")     # nobody reads the old contents
            calls += ["wait for GPU"] * (not user)                  # source or target is the GPU
            calls.append(f"copy {name}")
        calls.append("compute " + " ".join(split.nodes))
        before = split.device
    return calls

# %% tags=["wrong"]
def order(splits):
    calls = []
    for split in splits:
        calls += [f"copy {name}" for name, _, _ in split.inputs] + ["compute " + " ".join(split.nodes)]
    return calls

# %% tags=["wrong"]
def order(splits):
    calls = []
    for split in splits:
        for name, _, user in split.inputs:
            calls += ["wait for GPU"] * (not user or split.device == "GPU") + [f"copy {name}"]
        calls.append("compute " + " ".join(split.nodes))
    return calls

# %% tags=["check"]
names = ["A B C | D | E F", "layers, one on the host", "MLP, half on the host", "a copy used twice"]
on = [(state.script(state.cases[n])[0],) for n in names]
expected = [state.short_calls(state.cases[n]) for n in names]
lesson.check("order", order, expected, on, names)

# %% [markdown]
# ## 9 · What is what, and what comes next · 1 min
#
# | here | in ggml, llama.cpp | left out here |
# |---|---|---|
# | `scheduler.compute`, `compute_async` | `ggml_backend_sched_graph_compute(_async)` | – |
# | `Runtime.run` | `ggml_backend_sched_compute_splits` | – |
# | a stream, `SimulatedDevice` | a CUDA stream of the backend | several streams in one backend |
# | `Machine.without_wait` | nothing: ggml's waits are all there | – |
# | `eval_callback` | `ggml_backend_sched_set_eval_callback` | – |
# | `op_offload`, `offload_min_batch` | `-nopo`, `GGML_OP_OFFLOAD_MIN_BATCH` | other backends' rules: Metal and Vulkan have the same 32 |
# | a trace, `widgets.step_run` | `GGML_SCHED_DEBUG`, a profiler | – |
#
# **Next, 14:** here a GPU idles while another works. With several batches on their way, both can be busy, if inputs and copies exist more than once.
