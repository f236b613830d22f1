# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 24 · Memory pressure
#
# **49 minutes** · before it: 20, the memory wall, and 22, the expert cache · after it: 25, the tuning case
#
# Experts come and go thousands of times a minute, other things grow and shrink beside them, and the card has one size. This lesson is about the
# ways in which memory runs out although the sum says that it should not, and about what gives way when it really does.
#
# Afterwards you can say why expert slots never fragment, why each needs a tag, how often to look at memory, and which part should shrink
# first. Each section needs only the cell below.

# %% tags=["setup"]
import numpy as np

from workbench import lessons, views, widgets
from workbench.expertflow.fragments import blocks

lesson = lessons.open_lesson("24")
state = lesson.state
MIB = 2**20

# %% [markdown]
# ## 1 · Free, and yet no room · 6 min
#
# Quantised models often mix types: some layers in many bits, some in few. Here experts of layers 0, 2 and 4 are f16, the others q8_0, with the
# sizes of our files. They come and go by LRU in one *arena* under ggml's own best-fit allocator. A cache counts bytes: it evicts
# until enough are free, and then loads.

# %%
views.table(["storage", "bytes of an expert"], state.kinds.items(),
            "The first two are used below; neither is a multiple of the other.")

# %% tags=["predict"]
lesson.predict("room")

# %% [markdown]
# Step through it. A cell is 3,840 bytes, two rows are one f16 expert; the number is the expert's, the colour its layer's. What is outlined
# has just changed. *n* jumps to the next load that found no hole; then the table also says what was free before more were evicted.

# %%
steps = state.hole_steps()
failed = next(i for i, step in enumerate(steps["steps"]) if step["change"])
widgets.Stepper(steps, "Neighbours of different size leave at different times: holes remain.", k=failed)

# %% tags=["reveal"]
step = next(step for step in state.hole_steps()["steps"] if step["cause"] == "failure")
accesses, hits, failures = state.churned(8)
first = failures[0]
said = "no" if first.largest < first.wanted <= first.free else "yes"
lesson.reveal("room", said, sentence=step["sentence"])

# %% [markdown]
# It is not bad luck. Larger arenas, 128 tokens of a recorded text:

# %%
rows = []
for slots in (12, 16, 24, 32):
    accesses, hits, failures = state.churned(slots, 128)
    same = state.churned(slots, 128, mixed=False)[2]
    evicted = sum(f.evicted for f in failures)
    assert all(f.largest < f.wanted <= f.free for f in failures)
    rows.append((f"{slots * state.kinds['f16'] / MIB:.2f}", accesses, len(failures), evicted, len(same)))
heads = ["arena, MiB", "accesses", "no hole, though free", "evicted besides", "no hole, one size only"]
views.table(heads, rows,
            "Two sizes: it happens at every load factor. One size: never.")

# %% [markdown]
# ## 2 · Slots · 6 min
#
# A pool takes the memory once, as *slots*. An expert goes into any free slot of its size; whether one fits is a matter of counting. For two
# sizes there are two kinds of slots. That has a price, too: a free slot of one kind is of no use to the other. Which of the two loses less?

# %% tags=["predict"]
lesson.predict("slots")

# %%
rows = []
for slots in (12, 16, 24, 32):
    accesses, hits, failures = state.churned(slots, 128)
    _, in_slots, nbytes = state.slotted(slots, 128)
    assert nbytes <= slots * state.kinds["f16"]
    rows.append((f"{slots * state.kinds['f16'] / MIB:.2f}", f"{nbytes / MIB:.2f}",
                 f"{hits / accesses:.1%}", f"{in_slots / accesses:.1%}"))
views.table(["arena, MiB", "slots, MiB", "hits in the arena", "hits in the slots"], rows,
            "Slots hit as often or more often, with less memory.")

# %% tags=["reveal"]
(n, arena, _), (_, slots, _) = state.churned(16, 128), state.slotted(16, 128)
said = "slots" if slots > arena else "arena" if arena > slots else "same"
lesson.reveal("slots", said, arena=f"{arena / n:.1%}", slots=f"{slots / n:.1%}")

# %% [markdown]
# Others cut memory into equal *blocks* smaller than an expert, so that one pool serves all sizes. An expert of Mixtral-8x7B is 336 MiB in
# 16 bits. Which block wastes least?

# %% tags=["predict"]
lesson.predict("blocks")

# %%
rows = []
for size in (512, 336, 256, 168, 128, 112, 96, 64):
    n, waste = blocks(336 * MIB, size * MIB)
    rows.append((size, n, n * size, f"{waste:.1%}"))
views.table(["block, MiB", "blocks", "MiB taken", "wasted"], rows,
            "What counts is the remainder: 256 wastes a third, 128 an eighth, 112 nothing.")

# %% tags=["reveal"]
waste = {size: blocks(336 * MIB, size * MIB)[1] for size in (256, 128, 112, 64)}
lesson.reveal("blocks", min(waste, key=waste.get), big=f"{waste[256]:.0%}", middle=f"{waste[128]:.1%}",
              small=f"{waste[64]:.1%}")

# %% [markdown]
# ## 3 · Who lives here now? · 5 min
#
# A slot is never given back to the device, only handed to the next expert. So an address stays valid for ever, and what lies there changes.
# Somebody noted "expert 3 is at this address", expert 3 was evicted, and expert 5 was loaded into the slot. What does a product read that
# trusts the note?

# %% tags=["predict"]
lesson.predict("stale")

# %%
rows = state.tenants()
views.table(["moment", "the slot's tag", "bytes at the address", "our product, with the old note"], rows,
            "The address never fails. The tag does: layer, expert, and number of the load.")

# %% tags=["reveal"]
_, _, there, told = state.tenants()[2]
lesson.reveal("stale", there.removeprefix("those of "), told=told)

# %% [markdown]
# The second line is the treacherous one: after an eviction the old bytes are still there, so a forgotten note works, until it does not. Tests
# therefore *scrub*: eviction writes 0xFF over the slot, and the mistake shows at once.

# %%
views.table(["moment", "the slot's tag", "bytes at the address", "our product, with the old note"],
            state.tenants(scrub=True),
            "0xFFFF is NaN in f16: what reads it is seen in every number after it.")

# %% [markdown]
# The last line is strict on purpose: the right expert, and still refused, for it came by another load. A note from before cannot know
# what happened in between.
#
# ## 4 · The account · 4 min
#
# An expert budget is not all that a card holds. A card of 9 MiB, the tiny Mixtral, three quarters of its experts in slots. Which part is the
# largest, besides the slots?

# %% tags=["predict"]
lesson.predict("parts")

# %%
parts = state.parts(0.75)
rows = [(part, predicted, found) for part, (predicted, found) in parts.items() if part != "activations"]
views.side_by_side(rows, ("by formula", "on the card"), "Each of these parts follows from shapes.")

# %%
used = sum(found for _, found in parts.values())
rows = [(part, found, f"{found / state.limit:.0%}") for part, (_, found) in parts.items()]
views.table(["part", "bytes", "of 9 MiB"], [*rows, ("in all", used, f"{used / state.limit:.0%}")],
            "Activations are what the graph allocator measured when it planned the run.")

# %% tags=["reveal"]
found = {part: n for part, (_, n) in state.parts(0.75).items() if part != "cache"}
lesson.reveal("parts", max(found, key=found.get), kv=found["kv"], weights=found["weights"])

# %% [markdown]
# ## 5 · A card that fills up · 7 min
#
# Now others come. Our text runs for 72 tokens; at tokens 7, 15, 23, 31, 39 and 47 another conversation opens a cache for 256 cells of its own on
# the same card, and at token 50 they all end. First with nothing that gives way:

# %%
without = state.crowd(False)
print(len(without.logits), "tokens, then:", without.error)

# %% [markdown]
# Then with a controller, after every token: *account* all parts; *read* where a reading is due; above 0.9 of the memory the part most
# above its share shrinks by a quarter, and where none is, what is first in the order queues, slots, window. Below 0.7, three readings in a
# row, what shrank last grows again. Slots shrink by evicting and giving their memory back. What happens to the logits of our text?

# %% tags=["predict"]
lesson.predict("exact")

# %%
run = state.crowd()
assert max(r.ratio for r in run.readings) <= 1 and min(run.slots) >= 2
views.parts_picture(run.readings, state.limit,
                    "Slots give way to conversations and come back (tiny Mixtral, card of 9 MiB).")

# %%
rows = [(f"{a.reading.time / 1e6:.0f}", f"{a.reading.ratio:.2f}", f"{a.part} {a.does}", a.setting,
         a.nbytes) for a in run.answers]
views.table(["ms", "reading", "answer", "slots then", "bytes"], rows,
            "Each shrink evicts experts and gives their slots back to the card.")

# %% tags=["reveal"]
run, whole = state.crowd(), state.resident_logits
lesson.reveal("exact", "same" if np.array_equal(run.logits, whole) else "other", n=run.logits.size,
              least=min(run.slots), most=max(run.slots))

# %% [markdown]
# Between 0.7 and 0.9 nothing happens, and growing waits for three calm readings. Without that gap, *hysteresis*, each shrink would end below
# the mark and be taken back at once. Try it in section 6: set "widen below" close to "shrink above", and one calm reading.
#
# ## 6 · How often to look · 6 min
#
# A reading is a question to the driver and costs time: say 0.05 ms. (An assumption; the milliseconds are those of the tiny Mixtral on the
# simulated card.) Fewer readings cost less, and see later. What is the longest period, of 1 to 32 ms, up to which memory never goes over?

# %% tags=["predict"]
lesson.predict("period")

# %%
seen = {ms: state.watched(ms * 1_000_000) for ms in range(1, 33)}
total = state.crowd().demand[-1][0]
over = [100 * w.overshoot / state.limit for w in seen.values()]
cost = [100 * w.spent / total for w in seen.values()]
panels = {"above the memory, %": {"overshoot": [over]}, "time of readings, %": {"cost": [cost]}}
views.curves_picture(panels,
                     "Rare readings are free and blind; frequent ones see everything and cost percents.",
                     f"Overshoot from 0% at 1 ms to {over[-1]:.0f}% at 32 ms; "
                     f"cost from {cost[0]:.1f}% to {cost[-1]:.1f}%.",
                     xlabel="period, ms", ylabel="%", log=False)

# %% tags=["reveal"]
safe = [ms for ms in range(1, 33) if state.watched(ms * 1_000_000).overshoot == 0]
first = min(set(range(1, 33)) - set(safe))
worst = state.watched(32_000_000).overshoot / state.limit
said = "under 8" if first <= 8 else "8 to 15" if first <= 16 else "16 or more"
lesson.reveal("period", said, safe=first - 1, worst=f"{worst:.0%}")

# %% [markdown]
# On a real card there is no overshoot: the allocation fails. So the high mark must leave room for what can arrive between two readings. Here that
# is 8% for each conversation; 0.9 leaves 10%. Turn the knobs; every move replays the same demand.

# %%
periods, highs, lows, calms = [1, 2, 4, 8, 16, 32], [0.8, 0.85, 0.9, 0.95], [0.5, 0.7, 0.79], [1, 3]
facts, runs = ["overshoot", "time of readings", "shrinks", "widens", "slots on average"], {}

def what_if(p, h, low, c):
    w = state.watched(periods[p] * 1_000_000, highs[h], lows[low], calms[c])
    said = [what for _, what, _ in w.answers]
    now = [f"{w.overshoot / state.limit:.1%}", f"{w.spent / 1e6:.2f} ms", said.count("shrinks"),
           said.count("widens"), f"{w.slots:.1f}"]
    runs["A"], runs["B"] = runs.get("B", now), now
    rows = list(zip(facts, runs["A"], runs["B"]))
    return views.table(["", "A: last run", "B: this run"], rows,
                       "More slots on average are more hits; an overshoot is a crash.")

# %%
names = [[f"{n} ms" for n in periods], *([f"{n:g}" for n in some] for some in (highs, lows, calms))]
labels = ["period", "shrink above", "widen below", "calm readings"]
knobs = [[label, 0, len(some) - 1, some] for label, some in zip(labels, names)]
widgets.Knobs(knobs=knobs, values=[1, 2, 1, 1]).drive(what_if)

# %% [markdown]
# ## 7 · What `reserved` does not say · 4 min
#
# The article reads `torch.cuda.memory_reserved()`: above 0.9 of the card it shrinks buffers, below 0.7 it widens them. *Reserved* is what PyTorch's
# caching allocator holds; what is freed stays with it, to be used again. Run the same demand with that reading. How often does it widen?

# %% tags=["predict"]
lesson.predict("reserved")

# %%
kinds = {"bytes in use": state.watched(2_000_000), "reserved": state.watched(2_000_000, reserved=True)}
rows = []
for name, w in kinds.items():
    said = [what for _, what, _ in w.answers]
    rows.append((name, f"{max(r.ratio for r in w.readings):.2f}", f"{w.readings[-1].ratio:.2f}",
                 said.count("shrinks"), said.count("widens"), w.answers[-1][2]))
views.table(["what is read", "highest", "at the end", "shrinks", "widens", "slots at the end"], rows,
            "A reading that cannot fall turns one alarm into all of them.")

# %% tags=["reveal"]
lost = state.watched(2_000_000, reserved=True).answers
lesson.reveal("reserved", sum(what == "widens" for _, what, _ in lost), slots=lost[-1][2])

# %% [markdown]
# > **Erratum.** `reserved` does not shrink by itself, so the branch below 0.7 may never run, and the one above 0.9 runs again and again. Read what is
# > in use, or give memory back (`empty_cache`) after shrinking. Our pool's slots are pieces of memory of their own, so shrinking it really does:

# %%
rows = state.given_back(12)
assert rows[0][1] - rows[1][1] == 12 * state.kinds["f16"]
views.table(["moment", "in use on the card", "a caching allocator would report"], rows,
            "Twelve slots are 1,474,560 bytes that somebody else can have.")

# %% [markdown]
# ## 8 · Fewer bits · 4 min
#
# The other way to make room: smaller experts. q8_0 halves them, q4_0 leaves 28%. The error of each layer's experts alone is known from
# rounding. Six layers follow each other: how large has the error of the hidden state become at the last one, against the first?

# %% tags=["predict"]
lesson.predict("bits")

# %%
errors = {kind: state.errors(kind) for kind in ("q8_0", "q4_0")}
shown = {"q8_0": "{:.1%}", "q4_0": "{:.0%}"}
rows = [(kind, e.layer, shown[kind].format(e.alone), shown[kind].format(e.accumulated),
         f"{e.other_routes:.0%}", f"{e.nbytes / e.reference_nbytes:.0%}")
        for kind, found in errors.items() for e in found]
views.table(["storage", "layer", "experts alone", "accumulated", "other experts", "bytes"], rows,
            "Errors add like noise, not like steps: what the experts add is rounded, the sum flows on.")

# %% tags=["reveal"]
found = state.errors("q4_0")
growth = found[-1].accumulated / found[1].accumulated      # layer 0 has seen no experts yet
said = "same" if growth < 1.5 else "three" if growth < 4.5 else "six"
lesson.reveal("bits", said, growth=f"{growth:.1f}",
              other=f"{max(e.other_routes for e in found):.0%}")

# %% [markdown]
# ## 9 · Your turn · 6 min
#
# **Tier 1.** What share of its blocks does an expert waste?

# %% tags=["exercise", "tier-1"]
def wasted(expert, block):
    """Share of the bytes of all its blocks that an expert does not use."""
    raise NotImplementedError

# %% tags=["solution"]
def wasted(expert, block):
    """Share of the bytes of all its blocks that an expert does not use."""
    n = -(-expert // block)
    return 1 - expert / (n * block)

# %% tags=["wrong"]
def wasted(expert, block):
    return (-expert % block) / block

# %% tags=["wrong"]
def wasted(expert, block):
    return (-expert % block) / expert

# %% tags=["check"]
on = [(336, 256), (336, 128), (336, 112), (100, 64), (7, 512)]
lesson.check("wasted", wasted, [blocks(*case)[1] for case in on], on)

# %% [markdown]
# **Tier 2.** Does it fit? `places` are the pieces in use, as (offset, bytes), in any order.

# %% tags=["exercise", "tier-2"]
def fits(capacity, places, wanted):
    """Whether some hole of the arena has `wanted` bytes."""
    raise NotImplementedError

# %% tags=["solution"]
def fits(capacity, places, wanted):
    """Whether some hole of the arena has `wanted` bytes."""
    end = 0
    for offset, size in sorted(places):
        if offset - end >= wanted:
            return True
        end = offset + size
    return capacity - end >= wanted

# %% tags=["wrong"]
def fits(capacity, places, wanted):
    return capacity - sum(size for _, size in places) >= wanted

# %% tags=["wrong"]
def fits(capacity, places, wanted):
    return capacity - max((o + n for o, n in places), default=0) >= wanted

# %% tags=["check"]
layouts = [[(0, 30), (60, 30)], [(70, 30), (20, 10)], [(40, 20)], [(10, 80)], [(0, 50), (50, 50)],
           [(90, 10), (0, 10)]]
on = [(100, places, wanted) for places in layouts for wanted in (10, 25, 45)]
expected = [state.arena(100, places).fits(wanted) for _, places, wanted in on]
lesson.check("fits", fits, expected, on)

# %% [markdown]
# **Tier 3.** Be the controller of one part that has room to shrink and was never shrunk before: what do you say after each reading?

# %% tags=["exercise", "tier-3"]
def answers(ratios, high, low, calm):
    """"shrinks", "widens" or "" for each reading; widens after `calm` readings below low in a row."""
    raise NotImplementedError

# %% tags=["solution"]
def answers(ratios, high, low, calm):
    """"shrinks", "widens" or "" for each reading; widens after `calm` readings below low in a row."""
    out, quiet, shrunk = [], 0, 0
    for ratio in ratios:
        quiet = quiet + 1 if ratio < low else 0
        said = "shrinks" if ratio > high else "widens" if quiet >= calm and shrunk else ""
        shrunk += (said == "shrinks") - (said == "widens")
        quiet = 0 if said else quiet
        out.append(said)
    return out

# %% tags=["wrong"]
def answers(ratios, high, low, calm):
    return ["shrinks" if ratio > high else "widens" if ratio < low else "" for ratio in ratios]

# %% tags=["wrong"]
def answers(ratios, high, low, calm):
    out, quiet = [], 0
    for ratio in ratios:
        quiet = quiet + 1 if ratio < low else 0
        out.append("shrinks" if ratio > high else "widens" if quiet >= calm else "")
    return out

# %% tags=["check"]
series = [[0.95, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6], [0.6, 0.6, 0.6, 0.6],
          [0.95, 0.95, 0.6, 0.8, 0.6, 0.6, 0.6, 0.5, 0.5, 0.5],
          [0.91, 0.89, 0.71, 0.69, 0.69, 0.75, 0.69, 0.92]]
on = [(ratios, 0.9, 0.7, calm) for ratios in series for calm in (2, 3)]
names = [f"series {i // 2 + 1}, calm {2 + i % 2}" for i in range(8)]
lesson.check("answers", answers, [state.said(*case) for case in on], on, names)

# %% [markdown]
# ## 10 · Names · 1 min
#
# | here | elsewhere | left out |
# |---|---|---|
# | `fragments.Arena`, `churn` | `ggml_dyn_tallocr`, best fit with merging | cudaMalloc's virtual memory, which can join pieces |
# | `ExpertPool`, `Slot` | ExpertFlow's pool; the buffers of Mixtral-offloading's `ExpertCache` | pinning, sub-allocation in one large buffer |
# | `Slot.tag`, `scrub`, `verify` | none: others trust their tables | |
# | `Monitor` | `torch.cuda.memory_allocated`, `cudaMemGetInfo` | memory of other processes |
# | `Pressure`, `control.Controller` | the article's "adjust buffers" | llama.cpp has none: sizes are fixed at the start |
# | `storage_errors` | perplexity tables of quantised models | calibration (imatrix) |
#
# **Next, 25**: slots, window, queues, period: every knob of the last five lessons at once, from 120 to 55 ms per token.
