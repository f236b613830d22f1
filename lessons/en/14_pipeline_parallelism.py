# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 14 · Pipeline parallelism
#
# **50 minutes** · before it: 13, running the splits · after it: 15, dense MoE; 26, several devices
#
# Two cards, and a model that is divided between them by layers. Does that make it faster? It depends on how many batches are on their way.
#
# Afterwards you can say what four *slots* buy and cost, why exactly these waits are there, and when llama.cpp pipelines at
# all. Each section needs only the cell below.

# %% tags=["setup"]
import numpy as np

from workbench import lessons, views, widgets
from workbench.scheduler.waits import outcome

lesson = lessons.open_lesson("14")
state = lesson.state

# %% [markdown]
# ## 1 · One prompt, two cards · 5 min
#
# The tiny Mixtral, layers 0 to 2 on GPU0, layers 3 to 5 and the output on GPU1. Both are simulated, and equally fast. A prompt of 32 tokens goes through
# them, in one batch.

# %% tags=["predict"]
lesson.predict("busy")

# %%
one = state.prompt(n_batches=1)
assert not views.hazards(one.trace)
views.timeline(one.trace, caption="One batch: GPU1 begins where GPU0 ends.")

# %% tags=["reveal"]
busy = state.busy(state.prompt(n_batches=1))
both = [min(range(0, 101, 50), key=lambda p, b=b: abs(p - 100 * b)) for b in busy.values()]
lesson.reveal("busy", max(both), shares=", ".join(f"{d} {b:.0%}" for d, b in busy.items()))

# %% [markdown]
# A second card did not make this prompt faster. It made room: each holds half of the weights. That is why people divide by layers at all, and it is llama.cpp's
# default (`-sm layer`).
#
# ## 2 · Cut the prompt · 9 min
#
# A prompt of 128 tokens as four batches of 32 (llama.cpp: `-ub`). Batch 1 needs what batch 0 left in the KV cache, layer by layer, and nothing
# else. So GPU0 can begin with batch 1 as soon as it has handed batch 0 over.

# %% tags=["predict"]
lesson.predict("time")

# %%
four = state.prompt(n_batches=4)
assert not views.hazards(four.trace)
views.timeline(four.trace, caption="Four batches on their way: the cards work at the same time.")

# %% [markdown]
# If a card needs *a* and the other *b* nanoseconds for a batch: one after another, n batches take n·(a + b). As in a laundry with a
# washer and a dryer, they could take (n − 1)·max(a, b) + a + b. Simulated, once with a wait after each batch, once without:

# %%
rows, logits = [], []
for n in (1, 2, 4, 8):
    apart, piped = state.prompt(n, slots=1, wait=True), state.prompt(n)
    a, b = state.stages(piped).values()
    logits.append(np.array_equal(apart.logits, piped.logits))
    ideal = [n * (a + b), (n - 1) * max(a, b) + a + b]
    rows.append((n, *(f"{x / 1e6:.2f}" for x in (ideal[0], apart.ns, ideal[1], piped.ns)),
                 f"{apart.ns / piped.ns:.2f}"))
assert all(logits)                                            # the same bits, in either order
columns = ["batches", "n(a+b), ms", "waiting, ms", "laundry, ms", "pipelined, ms", "gain"]
views.table(columns, rows, "The formulas leave out copies and waits: a tenth where one waits, else 2 %.")

# %% tags=["reveal"]
apart, piped = state.prompt(4, slots=1, wait=True), state.prompt(4)
gains = {1: "same", 1.6: "1.6", 2: "2", 4: "4"}
nearest = min(gains, key=lambda g: abs(g - apart.ns / piped.ns))
lesson.reveal("time", gains[nearest], gain=f"{apart.ns / piped.ns:.2f}")

# %% [markdown]
# The published figures are of two unequal cards, a 3090 Ti and a 3080, with micro-batches of 256 tokens. For equal ones the laundry promises 2n/(n + 1):

# %%
rows = []
for tokens, (before, after) in state.published.items():
    n = tokens // 256
    rows.append((f"{tokens} tokens, {n} batches", 2 * n / (n + 1), after / before))
views.side_by_side(rows, ("promised", "published"), "llama.cpp PR 4918, Llama 7B Q4_0: the same shape, "
                   "less than promised. Its longer prompts gain most, too.")

# %% [markdown]
# ## 3 · Slots · 8 min
#
# What keeps batch 1 from overwriting what GPU1 still reads of batch 0? In lesson 13 a wait did. But a host that waits for GPU1 cannot ask GPU0 for
# the next batch. So everything that is handed over exists several times: in *slots*. Batch 0 uses slot 0, batch 1 slot 1, and so on, round and
# round. Four slots are built into ggml (`GGML_SCHED_MAX_COPIES`, the scheduler's `n_copies`).

# %% tags=["predict"]
lesson.predict("copies")

# %%
copies = state.copies(state.prompt(n_batches=1))
rows = [(name, device, len(names), ", ".join(names)) for (name, device), names in copies.items()
        if name in ("embd", "l_out-2", "inp_pos")]
views.table(["tensor", "for", "copies", "their names: device#tensor#slot"], rows,
            "One copy for each slot, on each device that reads the tensor and does not own it.")

# %% tags=["reveal"]
copies = state.copies(state.prompt(n_batches=1))
where = {device: len(names) for (name, device), names in copies.items() if name == "l_out-2"}
lesson.reveal("copies", sum(where.values()), where=" and ".join(where))

# %% [markdown]
# *A note on the seed.* It explains `n_copies` as "copies of each tensor, the original and those for the backends". They are not: slots of a
# pipeline, whatever the number of backends. With one backend more there is another *set* of copies, of four each.
#
# An input of the user, `inp_pos`, is special: it has slots on its own device, too, and the original serves as the slot in use. So it gets another place in
# memory with each batch, and you may write the next one while the last one is being read. With each slot of each device goes an **event**: a mark in
# a stream, which others can wait for.

# %%
ran = state.prompt(n_batches=5, n_tokens=16)
steps = views.run_steps(ran.trace)["steps"]
fifth = next(i for i, s in enumerate(steps) if s["sentence"].startswith("Run 5"))
again = next(i for i in range(fifth, len(steps)) if steps[i]["sentence"].startswith("GPU1 is to wait"))
widgets.step_run(ran.trace, "Five batches, four slots", "▲ sets a mark, ▼ waits for one.", k=again)

# %% [markdown]
# *GPU1 is to wait for event GPU1.0*: the fifth batch is the second one to use slot 0. This is a wait of the device, not of the host: GPU1
# lets nobody write into its slot before it is done with the first batch. The host goes on at once, to the next call.
#
# ## 4 · One event less · 6 min
#
# A smaller pipeline, to see what an event is good for: two cards, one product each. GPU0 needs 10 µs for a batch, GPU1 30 µs. Two slots. Four
# batches; GPU1 keeps the result of each in a memory of its own.

# %% tags=["predict"]
lesson.predict("event")

# %%
make = state.chain(4, [10_000, 30_000], slots=2)
whole = outcome(make)
assert not views.hazards(whole.trace)
cuts = [outcome(make, n) for n in range(1, 13)]
views.waits_table(whole, cuts, "Each run leaves out one wait. The first round of slots needs none.")

# %% tags=["reveal"]
make = state.chain(4, [10_000, 30_000], slots=2)
cut = outcome(make, 10)
early = views.hazards(cut.trace)[0]
wrong = [n for n, r in cut.results.items() if not np.array_equal(r, outcome(make).results[n])]
lesson.reveal("event", wrong[0], kind=early.kind, tensor=early.tensor, other=early.other)

# %%
widgets.leave_out_wait(state.chain(4, [10_000, 30_000], slots=2), value=10)

# %% [markdown]
# ## 5 · How many slots? · 6 min
#
# Slots let the host run ahead: with s of them, by s batches. How far ahead must it be? Eight batches of 16 tokens, over *three* cards:

# %% tags=["predict"]
lesson.predict("slots")

# %%
rows = []
for slots in (1, 2, 3, 4):
    ran = state.prompt(8, slots, cards=3, shares=[2, 2, 3], n_tokens=16)
    rows.append((slots, f"{ran.ns / 1e6:.2f}", *(f"{b:.0%}" for b in state.busy(ran).values())))
views.table(["slots", "ms", "GPU0 works", "GPU1 works", "GPU2 works"], rows,
            "The first step brings nearly all. A slot that nobody waits for only costs memory.")

# %% tags=["reveal"]
ms = [state.prompt(8, s, cards=3, shares=[2, 2, 3], n_tokens=16).ns for s in (1, 2, 3, 4)]
gains = [a / b for a, b in zip(ms, ms[1:])]
lesson.reveal("slots", f"{gains.index(max(gains)) + 1} to {gains.index(max(gains)) + 2}",
              gain=f"{max(gains):.2f}", last=f"{gains[-1]:.2f}")

# %% [markdown]
# Turn the knobs of the small pipeline: batches, how much of the work the first of two cards does, slots, and what a copy takes. Everything runs again.

# %%
def what_if(batches, tenths, slots, copy_us):
    work = [10_000 * tenths, 10_000 * (10 - tenths)]
    ran = outcome(state.chain(batches, work, slots, 1000 * copy_us))
    took, ideal = state.took(ran.trace), (batches - 1) * max(work) + sum(work)
    assert not views.hazards(ran.trace)
    return views.side_by_side([("µs: laundry → run", ideal / 1000, took / 1000),
                               ("µs: one after another → run", batches * sum(work) / 1000, took / 1000)],
                              ("formula", "run"), f"{took / ideal:.2f} times the ideal.")

knobs = [["batches", 1, 12, []], ["tenths of the work on GPU0", 1, 9, []], ["slots", 1, 4, []],
         ["µs per copy", 0, 40, []]]
widgets.Knobs(knobs=knobs, values=[4, 5, 4, 10]).drive(what_if)

# %% [markdown]
# An uneven division cannot be made up for by any number of slots: the slower card is always busy, and the other one waits.
#
# ## 6 · What it costs · 6 min
#
# Each slot holds a copy of all that is handed over, for as long as the scheduler lives: nothing else may use its place.

# %% tags=["predict"]
lesson.predict("memory")

# %%
memory = {slots: state.prompt(1, slots).memory for slots in (1, 2, 3, 4)}
rows = [(device, *(memory[s][device] for s in memory), f"{memory[4][device] / memory[1][device]:.2f}")
        for device in memory[1]]
views.table(["compute memory of", "1 slot", "2 slots", "3 slots", "4 slots", "4 to 1"], rows,
            "32 tokens through the Mixtral. From the second slot on, each costs the same.")

# %% tags=["reveal"]
memory = {slots: sum(state.prompt(1, slots).memory.values()) for slots in (1, 4)}
ratio = memory[4] / memory[1]
nearest = min((1, 2, 4), key=lambda g: abs(g - ratio))
lesson.reveal("memory", {1: "same", 2: "twice", 4: "four times"}[nearest], ratio=f"{ratio:.2f}")

# %% [markdown]
# What a slot costs can be written down beforehand: the bytes of each copied tensor, rounded up. Below, this sum for the Mixtral beside what four slots
# take more than three.

# %%
per_slot = state.bytes_per_slot(state.prompt(1))
more = {d: state.prompt(1, 4).memory[d] - state.prompt(1, 3).memory[d] for d in per_slot}
assert per_slot == more
rows = [(f"bytes per slot, {d}", per_slot[d], more[d]) for d in per_slot]
views.side_by_side(rows, ("sum", "measured"),
                   "The mask of attention is half of it: tokens × visible cells × 4 bytes.")

# %% [markdown]
# For Llama 3 8B, batches of 512 and 4,096 cells that is 8 MiB for the mask and 8 MiB for each tensor handed over: with four slots on each of two
# cards about 160 MiB, for a second card that is no longer idle. llama.cpp says of it: *increases memory usage, so it is only done when
# necessary*; and where memory does not suffice, it tries again without.
#
# ## 7 · When llama.cpp pipelines at all · 6 min
#
# Since slots cost memory, llama.cpp makes them only where they can help. First your guess, for a setting that many people use:

# %% tags=["predict"]
lesson.predict("override")

# %%
options = {"two cards": {}, "one layer left on the host (-ngl 6)": {"n_gpu_layers": 6},
           "experts on the host (-ot exps=CPU)": {"overrides": {"_exps": "CPU"}}, "one card": {}}
rows = []
for what, more in options.items():
    plan = state.plan("rtx3090-pcie4" if what == "one card" else "two-rtx3090", **more)
    rows.append((what, plan.pipelined, sum(d.compute for d in plan.devices)))
views.table(["the tiny Mixtral, 64 tokens", "pipelined", "compute memory, bytes"], rows,
            "From the planner, which follows llama.cpp here.")

# %% tags=["reveal"]
lesson.reveal("override", "yes" if state.plan(overrides={"_exps": "CPU"}).pipelined else "no")

# %% [markdown]
# All of these must hold (`llama_context`, August 2026):
#
# 1. more than one GPU;
# 2. *all* layers on GPUs, the output included (`-ngl` above the number of layers);
# 3. divided by layers, not by rows or tensors (`-sm layer`);
# 4. the KV cache on the GPUs (no `-nkvo`);
# 5. no overrides of where tensors go (`-ot`, `--n-cpu-moe`);
# 6. every device, but the CPU, has asynchronous copies *and* events.
#
# And when it pipelines: what is it good for while you wait for an answer, token by token?

# %% tags=["predict"]
lesson.predict("decode")

# %%
rows = []
for what, slots, wait in (("one slot", 1, True), ("four slots", 4, True)):
    ran = state.prompt(6, slots, n_tokens=1, wait=wait)
    rows.append((what, f"{ran.ns / 1e6:.2f}", *(f"{b:.0%}" for b in state.busy(ran).values())))
views.table(["six tokens, one after another", "ms", "GPU0 works", "GPU1 works"], rows,
            "A token cannot begin before the one before it is known: nothing overlaps.")

# %% tags=["reveal"]
a, b = (state.prompt(6, slots, n_tokens=1, wait=True).ns for slots in (1, 4))
lesson.reveal("decode", "same" if 0.9 < b / a < 1.1 else "faster", share=f"{1 - b / a:.0%}")

# %% [markdown]
# ## 8 · Your turn · 3 min
#
# **Tier 1.** How long does the laundry take? Copies take no time here, and there are slots enough.

# %% tags=["exercise", "tier-1"]
def pipeline_time(n_batches, work):
    """work: what each card needs for one batch. Returns when the last batch is through."""
    raise NotImplementedError

# %% tags=["solution"]
def pipeline_time(n_batches, work):
    """work: what each card needs for one batch. Returns when the last batch is through."""
    return (n_batches - 1) * max(work) + sum(work)

# %% tags=["wrong"]
def pipeline_time(n_batches, work):
    return n_batches * max(work)

# %% tags=["wrong"]
def pipeline_time(n_batches, work):
    return (n_batches - 1) * work[0] + sum(work)

# %% tags=["check"]
on = [(1, [100, 100]), (4, [100, 100]), (5, [100, 300]), (6, [50, 50, 50]), (3, [20, 300, 40])]
expected = [state.took(outcome(state.chain(*case)).trace) for case in on]
lesson.check("pipeline-time", pipeline_time, expected, on, [f"{n} batches, {work}" for n, work in on])

# %% [markdown]
# **Tier 2.** Does llama.cpp pipeline? Judged by the planner.

# %% tags=["exercise", "tier-2"]
def pipelines(cards, n_gpu_layers, n_layer, overrides):
    """Whether llama.cpp pipelines; overrides: patterns of -ot, perhaps none."""
    raise NotImplementedError

# %% tags=["solution"]
def pipelines(cards, n_gpu_layers, n_layer, overrides):
    """Whether llama.cpp pipelines; overrides: patterns of -ot, perhaps none."""
    return cards > 1 and n_gpu_layers > n_layer and not overrides

# %% tags=["wrong"]
def pipelines(cards, n_gpu_layers, n_layer, overrides):
    return cards > 1 and n_gpu_layers >= n_layer and not overrides

# %% tags=["wrong"]
def pipelines(cards, n_gpu_layers, n_layer, overrides):
    return cards > 1 and n_gpu_layers > n_layer

# %% tags=["check"]
on = [(2, 7, 6, []), (2, 6, 6, []), (1, 7, 6, []), (2, 7, 6, ["_exps"]), (2, 0, 6, [])]
expected = [state.planned(*case) for case in on]
lesson.check("pipelines", pipelines, expected, on)

# %% [markdown]
# **Tier 3.** When does each card begin with each batch? Again without the time of copies.

# %% tags=["exercise", "tier-3"]
def starts(n_batches, work):
    """A list for each card: when it begins with batch 0, 1, 2 …"""
    raise NotImplementedError

# %% tags=["solution"]
def starts(n_batches, work):
    """A list for each card: when it begins with batch 0, 1, 2 …"""
    begin, ready = [[] for _ in work], [0] * n_batches       # ready: when a batch leaves the card before
    for card, ns in enumerate(work):
        free = 0
        for batch in range(n_batches):
            begin[card].append(max(free, ready[batch]))
            free = ready[batch] = begin[card][-1] + ns
    return begin

# %% tags=["wrong"]
def starts(n_batches, work):
    return [[sum(work[:card]) + batch * ns for batch in range(n_batches)] for card, ns in enumerate(work)]

# %% tags=["wrong"]
def starts(n_batches, work):
    return [[sum(work[:card]) + batch * sum(work) for batch in range(n_batches)]
            for card in range(len(work))]

# %% tags=["check"]
on = [(4, [100, 100]), (4, [100, 300]), (4, [300, 100]), (3, [20, 300, 40]), (3, [60, 50, 70])]
expected = [state.starts(outcome(state.chain(*case)).trace) for case in on]
lesson.check("starts", starts, expected, on, [f"{n} batches, {work}" for n, work in on])

# %% [markdown]
# ## 9 · What is what, and what comes next · 1 min
#
# | here | in ggml, llama.cpp | left out here |
# |---|---|---|
# | `Scheduler(…, parallel=True)`, or a number of slots | `ggml_backend_sched_new(…, parallel)` | the number is fixed when ggml is built |
# | `scheduler.slot`, `n_copies` | `cur_copy`, `n_copies`, `GGML_SCHED_MAX_COPIES` | – |
# | an event, `Backend.new_event` | `ggml_backend_event`, a CUDA event | – |
# | batches of a prompt | micro-batches (`-ub`) of a batch (`-b`) | – |
# | `plan.pipelined` | "pipeline parallelism enabled" in llama.cpp's log | conditions 3, 4 and 6 |
#
# **Next, 15:** so far, every weight was used for every token. From here on, that is over: experts.
