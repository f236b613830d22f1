# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 20 · The memory wall
#
# **50 minutes** · before it: 19, moving only the used experts · after it: 21, predicting routes
#
# "Each token uses only two of eight experts, so I need only a quarter of the memory." This lesson is about what is wrong with that sentence, and
# about the price of the obvious way out: load what is needed when it is needed.
#
# Afterwards you can tell resident, active and moved bytes apart, say whether a model fits, put a figure on a miss, and
# say what would hide it. Each section needs only the cell below.

# %% tags=["setup"]
from workbench import lessons, views, widgets
from workbench.lessons.wall_states import GIB, N

lesson = lessons.open_lesson("20")
state = lesson.state
mixtral = state.mixtral            # Mixtral-8x7B: published numbers, no weights

# %% [markdown]
# ## 1 · Three numbers · 7 min
#
# The case of this lesson: **Mixtral-8x7B**, its matrices stored as q8_0 (8.5 bits each), on a card of 24 GB (an RTX 3090 on PCIe 4.0) in a host
# with 64 GiB. Its makers print two figures, 46.7 and 12.9 billion parameters. Do the shapes alone give them?

# %%
rows = []
for m in state.published:
    rows.append((m.name, f"{m.total / 1e9:.2f}", m.published.total,
                 f"{m.active / 1e9:.2f}", m.published.active, f"{m.active / m.total:.0%}"))
views.table(["model", "all: from shapes", "printed", "used by a token: from shapes", "printed", "share"],
            rows, "In billions of parameters. The newer the model, the smaller the share.")

# %% tags=["predict"]
lesson.predict("active")

# %% [markdown]
# Three different questions, three numbers: what must *lie* somewhere fast (resident), what a token *reads* (active), and what must *travel* for it
# (moved). The last depends on where the rest lies:

# %%
experts, of_token = state.bytes_of("q8_0", "all experts"), state.bytes_of("q8_0", "experts of one token")
dense = state.bytes_of("q8_0", "dense")
k_slots = state.run(slots=2).bytes_per_token
places = [("everything on the card", dense + experts, 0),
          ("experts on the host, copied when used", dense, of_token),
          ("the same, two slots per layer kept", dense + of_token, k_slots),
          ("experts on the host, computed there", dense, mixtral.n_moe * 2 * 4 * 4096 * 2)]
rows = [(name, on_card / 1e9, (dense + of_token) / 1e9, moved / 1e9) for name, on_card, moved in places]
views.table(["where the experts are", "resident on the card, GB", "active, GB", "moved per token, GB"],
            rows, "Active is the same in every line. It says how much is read, not where it has to lie.")

# %% tags=["reveal"]
least = min(on_card for _, on_card, moved in places if moved == 0)      # where nothing ever travels
must = "all" if least == dense + experts else "active"
lesson.reveal("active", must, all=f"{(dense + experts) / 1e9:.1f}",
              active=f"{(dense + of_token) / 1e9:.1f}")

# %% [markdown]
# ## 2 · Who is used next · 5 min
#
# If the same two experts served a whole text, active *would* be resident. So look at real routes: those of our tiny Mixtral,
# which also takes 2 of 8 experts in each layer, over 96 texts of six kinds.

# %% tags=["predict"]
lesson.predict("met")

# %%
counts = (1, 2, 4, 8, 16, 32, 64, 128)
met = [state.experts_met(n) for n in counts]
even = [8 * (1 - (1 - 2 / 8) ** n) for n in counts]          # if each token drew its two at random
views.table(["tokens read", "experts of a layer used so far", "drawn at random"], zip(counts, met, even),
            "Real texts repeat themselves a little. All eight are soon needed all the same.")

# %% tags=["reveal"]
lesson.reveal("met", state.tokens_until_all(), at16=state.experts_met(16))

# %% [markdown]
# ## 3 · Does it fit? · 6 min
#
# `python -m workbench fit` reads the header of a GGUF file and keeps the account: what must be on the card in any case, what the experts take, what
# is left. Here it gets Mixtral's numbers instead of a file. First in f16, as it was published.

# %% tags=["predict"]
lesson.predict("fits")

# %%
rows = []
for kind in ("f16", "q8_0", "q4_0"):
    found = state.fit(kind)
    checks = {c.question: c for c in found.checks}
    asked = [checks[q] for q in checks if q.startswith(("everything", "all experts", "besides"))]
    rows.append((kind, *(f"{c.needed / GIB:.2f} of {c.available // GIB} GiB: {'yes' if c.holds else 'no'}"
                         for c in asked), found.fits))
head = ["stored as", "all on the card", "experts in the host", "a token's experts beside it all", "fits"]
views.table(head, rows, "q4_0 misses by 1.28 GiB. In f16 not even one token's experts have room.")

# %% tags=["reveal"]
f16 = {c.question: c for c in state.fit("f16").checks}
room = next(c for q, c in f16.items() if q.startswith("besides"))
lesson.reveal("fits", "yes" if room.holds else "no", needed=f"{room.needed / GIB:.2f}")

# %% [markdown]
# And how fast at most? Nothing can decode faster than its bytes can be read, so each way to run has a bound:

# %%
found = state.fit("q8_0")
print(found.verdict(), "\n")
rows = [(b.tokens_per_second, b.way, b.nbytes / 1e9, f"{b.over}, {b.bandwidth / 1e9:.1f} GB/s")
        for b in found.bounds]
views.table(["at most, tokens/s", "way", "GB per token", "over"], rows,
            "Mixtral-8x7B in q8_0: what has to travel decides, not what has to be computed.")

# %% [markdown]
# ## 4 · On demand · 9 min
#
# The obvious way: experts on the host, two slots per layer on the card. When a layer's router has spoken, the missing ones are loaded, then
# computed with. Routes are the recorded ones, bytes and speeds those of Mixtral-8x7B in q8_0 on the card. Which share of the time does the card compute?

# %% tags=["predict"]
lesson.predict("stall")

# %% [markdown]
# The first two layers of the first token. The small unnamed pieces are attention and router:

# %%
spans = state.spans(layers=2)
views.lane_picture(spans, ["card", "link"],
                   "The card has its answer in a moment, and waits for the next expert.",
                   "Card and link in two layers: the link always copies, the card hardly computes.",
                   "ms, Mixtral-8x7B (q8_0) on rtx3090-pcie4")

# %%
ran = state.run(slots=2)
misses = 2 * (1 - ran.hit_rate)
views.side_by_side([
    ("nothing kept: formula → at these misses", state.formula(), state.formula(misses=misses)),
    ("at these misses: formula → simulated", state.formula(misses=misses), ran.per_token),
    ("all on the card, if it had room → on demand", state.resident(), ran.per_token)],
    ("first, ms", "second, ms"),
    f"{N} tokens. A little overlaps: while one expert computes, the other one still comes.")

# %% tags=["reveal"]
share = 1 - state.run(slots=2).stalled
c = state.costs()
lesson.reveal("stall", "a tenth" if share < 0.1 else "half" if share < 0.6 else "most",
              share=f"{share:.1%}", load=f"{c.load / 1e6:.2f}", compute=f"{c.expert(1) / 1e6:.2f}")

# %% [markdown]
# The same with real bytes: the tiny Mixtral, whose 72 MiB are no wall at all, but whose experts really move, on a simulated card. Step
# through one token; the numbers are those of the nine steps in the ExpertFlow article.

# %%
widgets.Stepper(state.way(), "Router, ids to the host, loads, experts: one after the other.")

# %%
counters, logits, routes = state.executed(slots=2)
replayed = sum(state.loads(layer, 2) for layer in routes.experts)
assert (logits == state.undisturbed()).all()                  # moving weights never changes a result
views.side_by_side([("loads: replayed → executed", replayed, counters.loads),
                    ("bytes: loads × 122,880 → executed", replayed * 122_880, counters.demand_bytes)],
                   ("first", "second"), "All logits are the same, bit for bit, as when nothing moves.")

# %% [markdown]
# ## 5 · What would hide a load · 6 min
#
# The card is idle while it waits. So give it more to do: more tokens per expert. The article has a rule of thumb, B · T_compute > T_load, "so B often
# has to be some dozens, or above a hundred". A load takes as long as computing one token 28 times:

# %%
c = state.costs()
ratio = c.load / c.expert(1)
print(f"load {c.load / 1e6:.2f} ms, one token {c.expert(1) / 1e6:.3f} ms: {ratio:.1f} times")

# %% tags=["predict"]
lesson.predict("hide")

# %%
rows = [(n, c.expert(n) / 1e6, n * c.expert(1) / 1e6, f"{c.expert(n) / c.load:.0%}")
        for n in (1, 8, 25, 28, 100, 400, 748)]
views.table(["tokens", "time of an expert, ms", "tokens × time of one, ms", "of a load"], rows,
            "Up to some 25 tokens an expert takes the time of reading it; then 0.01 ms for each.")

# %% tags=["reveal"]
found = state.tokens_to_hide("q8_0", "rtx3090-pcie4")
lesson.reveal("hide", found, batch=found * 8 // 2)

# %% [markdown]
# *A note on the article.* Its rule is the condition for **hiding** a load behind another computation, not for a gain; and T_compute is no constant.
# With few tokens an expert is bound by reading its weights, so the tokens come nearly free, and hide nothing.
#
# There is another way not to wait: let the host compute where the weights are. One token there, against one load:

# %%
rows = []
for kind in ("f16", "q8_0", "q4_0"):
    k = state.costs(kind)
    wins = next(n for n in range(1, 10_000) if k.on_host(n) > k.load + k.expert(n))
    rows.append((kind, k.load / 1e6, k.expert(1) / 1e6, k.on_host(1) / 1e6, wins))
views.table(["stored as", "load, ms", "card, ms", "host, ms", "loading wins from … tokens on"], rows,
            "For one token the host is twice as fast as the link: what moving experts has to beat.")

# %% [markdown]
# ## 6 · More slots · 7 min
#
# 21 GiB of the card are free for experts: of the eight in each layer, three have room; with smaller files, four or more. Slots keep the experts
# used last. With **half** of all experts in slots, how much slower is it than with all on the card?

# %% tags=["predict"]
lesson.predict("half")

# %%
runs = {f"{slots} slots": state.run(slots) for slots in range(2, 9)}
views.ledger_picture(runs, "Each further slot helps. First loads (compulsory) remain in so short a text.")

# %% tags=["reveal"]
half, everything = state.run(slots=4).per_token, state.resident()
lesson.reveal("half", round(half / everything), half=half, all=everything, host=state.on_host(),
              hits=f"{state.run(slots=4).hit_rate:.0%}")

# %% [markdown]
# Three knobs: how experts are stored, slots, and the card. Look for a setting that beats the host.

# %%
kinds, cards, kept = ["f16", "q8_0", "q4_0"], ["rtx3090-pcie3", "rtx3090-pcie4", "a100"], {}

def what_if(kind, slots, card):
    ran = state.run(slots, kinds[kind], cards[card])
    held = slots * mixtral.n_moe * state.costs(kinds[kind]).expert_bytes / GIB
    now = (kinds[kind], slots, cards[card], f"{held:.1f}", f"{ran.hit_rate:.0%}", ran.per_token,
           state.on_host(kinds[kind]))
    before, kept["last"] = kept.get("last", now), now
    head = ["run", "stored as", "slots", "card", "GiB in slots", "hits", "ms per token", "host computes"]
    return views.table(head, [("A", *before), ("B", *now)],
                       "Mixtral-8x7B on the tiny Mixtral's routes. A is the run before.")

_ = what_if(1, 2, 1)
widgets.Knobs(knobs=[["stored as", 0, 2, kinds], ["slots per layer", 2, 8, []], ["card", 0, 2, cards]],
              values=[1, 3, 1]).drive(what_if)

# %% [markdown]
# **What others measured.** Mixtral-8x7B with 2-bit experts, one token at a time (Eliseev and Mazur, 2023): *naive* copies whole layers, the next
# line only used experts, the next keeps the last ones. Beside it one cost model, its two constants taken from the lines marked "fitted":

# %%
rows = [(r.what.removeprefix("2-bit, "), r.published, r.ours, f"{r.error:+.0%}", r.note)
        for r in state.mixtral_offloading if r.what.startswith(("2-bit, A100", "2-bit, T4"))]
views.table(["card, what", "published, tokens/s", "model", "error", "note"], rows,
            "Good on the card that it was fitted on; for the T4 it is a third to a half too fast.")

# %% [markdown]
# ## 7 · Your turn · 8 min
#
# **Tier 1.** The three numbers, from a configuration. Judged by the shapes of four published models.

# %% tags=["exercise", "tier-1"]
def three_numbers(total, expert, layers, n_expert, k, bits):
    """total: all parameters; expert: of one. Returns bytes: resident, active, moved if none is kept."""
    raise NotImplementedError

# %% tags=["solution"]
def three_numbers(total, expert, layers, n_expert, k, bits):
    """total: all parameters; expert: of one. Returns bytes: resident, active, moved if none is kept."""
    moved = layers * k * expert
    active = total - layers * (n_expert - k) * expert
    return total * bits / 8, active * bits / 8, moved * bits / 8

# %% tags=["wrong"]
def three_numbers(total, expert, layers, n_expert, k, bits):
    active = total * k / n_expert                 # but attention and embedding are not divided
    return total * bits / 8, active * bits / 8, active * bits / 8

# %% tags=["wrong"]
def three_numbers(total, expert, layers, n_expert, k, bits):
    active = total - layers * (n_expert - k) * expert
    return active * bits / 8, active * bits / 8, layers * k * expert * bits / 8

# %% tags=["check"]
on = [(m.total, m.expert, m.n_moe, m.router.n_expert, m.router.n_used, 8.5) for m in state.published]
expected = [(m.params() * 8.5 / 8, m.params(m.router.n_used) * 8.5 / 8,
             (m.params(m.router.n_used) - m.params(0)) * 8.5 / 8) for m in state.published]
lesson.check("three-numbers", three_numbers, expected, on, [m.name for m in state.published])

# %% [markdown]
# **Tier 2.** How many loads? One layer, `slots` slots; the expert used longest ago gives way, of a token's own ones that with the lowest number.
# Judged by the replay.

# %% tags=["exercise", "tier-2"]
def loads(experts, slots):
    """experts: of one token after another, a token's needed at once. Returns the number of loads."""
    raise NotImplementedError

# %% tags=["solution"]
def loads(experts, slots):
    """experts: of one token after another, a token's needed at once. Returns the number of loads."""
    held, n = [], 0                               # longest unused first
    for token in experts:
        for e in token:
            if e in held:
                held.remove(e)
            else:
                n += 1
        held = (held + sorted(token))[-slots:]    # used at the same time: the lowest number goes first
    return n

# %% tags=["wrong"]
def loads(experts, slots):
    held, n = [], 0
    for token in experts:
        for e in token:
            if e not in held:                     # first in, first out: a use does not count
                held, n = (held + [e])[-slots:], n + 1
    return n

# %% tags=["wrong"]
def loads(experts, slots):
    return len({e for token in experts for e in token})

# %% tags=["check"]
on = [(layer.tolist(), slots) for layer in state.text.experts[::2] for slots in (2, 3, 5)]
names = [f"layer {layer}, {slots} slots" for layer in (0, 2, 4) for slots in (2, 3, 5)]
lesson.check("loads", loads, [state.loads(*case) for case in on], on, names)

# %% [markdown]
# **Tier 3.** From how many tokens on does an expert compute as long as the next one is loaded? Judged by asking the cost model.

# %% tags=["exercise", "tier-3"]
def tokens_to_hide(load_ns, start_ns, nbytes, bytes_per_ns, flops_per_token, flops_per_ns):
    """An expert: its start, then the slower of reading and arithmetic. Returns whole tokens."""
    raise NotImplementedError

# %% tags=["solution"]
def tokens_to_hide(load_ns, start_ns, nbytes, bytes_per_ns, flops_per_token, flops_per_ns):
    """An expert: its start, then the slower of reading and arithmetic. Returns whole tokens."""
    if start_ns + nbytes / bytes_per_ns >= load_ns:
        return 1
    return int(-(-(load_ns - start_ns) * flops_per_ns // flops_per_token))

# %% tags=["wrong"]
def tokens_to_hide(load_ns, start_ns, nbytes, bytes_per_ns, flops_per_token, flops_per_ns):
    one = start_ns + max(nbytes / bytes_per_ns, flops_per_token / flops_per_ns)
    return int(-(-load_ns // one))                # B · T_compute, with the T_compute of one token

# %% tags=["wrong"]
def tokens_to_hide(load_ns, start_ns, nbytes, bytes_per_ns, flops_per_token, flops_per_ns):
    one = start_ns + nbytes / bytes_per_ns + flops_per_token / flops_per_ns
    return int(-(-load_ns // one))

# %% tags=["check"]
cards = ("rtx3090-pcie3", "rtx3090-pcie4", "a100")
cases = [(kind, card) for kind in ("f16", "q8_0", "q4_0") for card in cards]
on = []
for kind, card in cases:
    c = state.costs(kind, card)
    rate = c.device.flops_of.get(kind, c.device.flops)
    on.append((c.load, 3 * c.device.launch_ns, c.expert_bytes, c.device.memory, 2 * mixtral.expert, rate))
expected = [state.tokens_to_hide(*case) for case in cases]
lesson.check("hide", tokens_to_hide, expected, on, [f"{kind} on {card}" for kind, card in cases])

# %% [markdown]
# ## 8 · What is what, and what comes next · 2 min
#
# | here | in llama.cpp and the papers | left out here |
# |---|---|---|
# | `fit`, `DescribedFile` | `llama-fit-params`; no file needed here | disk, when the host has too little memory |
# | experts on the host, computed there | `--cpu-moe`, `-ot exps=CPU` | several NUMA nodes |
# | experts copied when used, nothing kept | `ggml_backend_sched`: `MUL_MAT_ID` with host weights, batches from 32 on | – |
# | slots that keep what was used last | LRU of Mixtral-offloading; Cache-MoE in the ExpertFlow paper | quantisation of 2 bits |
# | `timing.simulate`, the ledger | – | a second copy engine |
# | routes of the tiny Mixtral | stand for Mixtral's, with its bytes and operations | another model has other repeats |
#
# **Next, 21:** the card waits because the router speaks so late. Can one know earlier what it will say?
