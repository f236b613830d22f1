# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 22 · The expert cache
#
# **50 minutes** · before it: 21, predicting routes · after it: 23, token scheduling
#
# A card has room for half of a model's experts. When a token needs one that is not there, it is loaded, and another must go. Which one?
#
# Afterwards you can say who goes under four policies, read a hit-rate curve beside the best one possible, bring each policy down with a
# workload it does not like, and say what a hit has cost. Each section needs only the cell below.

# %% tags=["setup"]
import random

from workbench import lessons, views, widgets
from workbench.expertflow.replay import replay
from workbench.expertflow.sweep import jobs, sweep

lesson = lessons.open_lesson("22")
state = lesson.state

def percent(rate):
    return f"{rate:.1%}"

# %% [markdown]
# ## 1 · Slots · 6 min
#
# The tiny Mixtral has 8 experts in each of 6 layers, and a token uses 2 per layer. Suppose a layer has 4 *slots*, each for one whole expert.
# An expert that is needed and in a slot is a *hit*. Any other is loaded first, and the token waits. What the same token
# needs never goes.
#
# The oldest policy is LRU: the *least recently used* goes. Here is layer 4, reading Python, just before token 17. It needs experts 4 and 2.

# %%
words, layer4 = state.words, state.layer(4)
events = state.events(layer4, "lru", slots=4)
before = [e for e in events if e[0] < 17]
table = views.cache_steps(before, [4], 8, tokens=words)["steps"][-1]["table"]
rows = [row[:3] for row in sorted(table)]
views.table(["in a slot", "last use, seen from token 16", "so far"], rows,
            "Four slots, four experts; one more is needed.")

# %% tags=["predict"]
lesson.predict("goes")

# %% [markdown]
# Step through it: a lane is filled while its expert is in a slot. *n* jumps to the next eviction.

# %%
reading = views.cache_steps(events, [4], 8, tokens=words, most=64, title="Layer 4, LRU, 4 slots")
when = [s["event"][:2] for s in reading["steps"]]
at_17 = when.index(["evict", 17])
widgets.Stepper(reading, "After the first tokens every load costs somebody's slot.", k=at_17)

# %% tags=["reveal"]
answer = reading["steps"][at_17]
lesson.reveal("goes", answer["event"][3], said=answer["sentence"])

# %% [markdown]
# All layers over 50 tokens. Deep layers of this model keep to few experts; the first ones change all the time.

# %%
part = state.trace.select(slice(100))
views.residency_picture(
    state.events(part, "lru", 4), part.layers, 8,
    "The same four slots per layer serve layer 5 far better than layer 0.", first=20, count=50)

# %% [markdown]
# ## 2 · Recency or counts · 6 min
#
# LFU keeps what is used *often*: the least frequently used goes, however recent its last use. Counts go on while an expert is away.
# Both read the same 1,536 tokens, of six kinds of text, with 4 slots per layer.

# %% tags=["predict"]
lesson.predict("better")

# %%
def row(name, traces, *how):
    rates = [sum(replay(t, p, *how).hit_rate for t in traces) / len(traces) for p in ("lru", "lfu")]
    again = sum(map(state.used_again, traces)) / len(traces)
    return (name, *map(percent, (again, traces[0].k / traces[0].n_expert, *rates)))

texts = [state.trace.select(state.trace.domains == d) for d in range(6)]
rows = [row("six texts, one after another", [state.trace], 4),
        row("each text alone, mean of six", texts, 4),
        row("Switch-base-8, a pool of 12", [state.switch], 12, "global")]
views.table(["", "used again by the next token", "by chance", "LRU", "LFU"], rows,
            "No policy is the best one. It depends on what comes again, and for how long it does.")

# %% tags=["reveal"]
lru, lfu = (replay(state.trace, policy, 4).hit_rate for policy in ("lru", "lfu"))
better = "lru" if lru > lfu + 0.02 else "lfu" if lfu > lru + 0.02 else "same"
lesson.reveal("better", better, lru=percent(lru), lfu=percent(lfu))

# %% [markdown]
# The Switch trace is a recording of `google/switch-base-8`; its makers published what their own simulator counted. Numbers meet:

# %%
found = {p: replay(state.switch, p, 12, "global") for p in ("lru", "lfu", "belady")}
assert all(sum(r.hits) + r.demand == sum(r.accesses) == 1290 for r in found.values())
rows = [(p.upper(), state.published[p], found[p].hit_rate) for p in ("lru", "lfu")]
rows.append(("used again at once", state.published["reuse"], state.used_again(state.switch)))
views.side_by_side(rows, ("published", "replayed"),
                   "Hit for hit the same: 354 and 460 of 1,290 experts were there.")

# %% [markdown]
# ## 3 · The best there is · 6 min
#
# Belady's rule (1966): let that one go whose next use is *farthest away*. Nobody can run it, since it reads the future. But a recorded trace
# has its future in it, so we can replay it: no policy that loads only on demand can do better. How good is LRU, then?

# %% tags=["predict"]
lesson.predict("avoidable")

# %%
policies = ["lru", "lfu", "belady"]
results = sweep(state.trace, jobs(policy=policies, slots=[2, 3, 4, 5, 6, 7]))
by = {(r.policy, r.slots): r for r in results}
assert all(r.hit_rate <= by["belady", r.slots].hit_rate for r in results)
views.hit_rate_picture(
    results, "LRU is closer to the optimum than LFU, at every size between 2 and 8.", chance=8,
    title="tiny Mixtral, six kinds of text")

# %% [markdown]
# At 2 slots all are equal: both must hold the present token's experts, and nobody has a choice. With 8 nothing would ever go.

# %%
loads = {p: by[p, 4].demand for p in ("lru", "lfu", "belady")}
rows = [(f"loads under {p}", n, loads["belady"]) for p, n in loads.items()]
views.side_by_side(rows, ("its own", "Belady's"),
                   "The ratio says which share of its loads a policy could not have avoided.")

# %% tags=["reveal"]
share = loads["belady"] / loads["lru"]
word = "two thirds" if 0.6 < share < 0.75 else "all" if share > 0.95 else "few"
lesson.reveal("avoidable", word, share=f"{share:.0%}")

# %% [markdown]
# ## 4 · A scan that is too long · 5 min
#
# One after another, experts 0, 1, 2, … 7, and again from 0. There are 6 slots for these 8 experts.

# %% tags=["predict"]
lesson.predict("scan")

# %%
events = state.events(state.scan, "lru", 6)
steps = views.cache_steps(events, [0], 8, most=40, title="0 to 7 in turn, 6 slots, LRU")
widgets.Stepper(steps, "Each expert goes just before its turn comes again.", k=12)

# %% tags=["reveal"]
counts = state.scan.counts()
rates = {p: replay(state.scan, p, 6, hot=counts).hit_rate for p in ("lru", "static", "belady")}
lesson.reveal("scan", rates["lru"], static=f"{rates['static']:.0%}", belady=f"{rates['belady']:.0%}")

# %% [markdown]
# Who scans like that? A batch. When 24 requests are decoded side by side, a layer is asked for *all* their experts in each step, and computes
# with one after the other, in ascending order. The tiny DeepSeek has 16 experts per layer; 8 slots. "static" keeps the 8 most used ones
# for ever, and lets the others pass through a buffer of its own.

# %%
rows, how = [], {"slots": 8, "residency": "one_by_one", "hot": state.requests.counts()}
for batch in (1, 2, 4, 8, 12, 24):
    found = [replay(state.requests, p, batch=batch, **how)
             for p in ("lru", "lfu", "static", "belady")]
    per_step = found[0].accesses[0] * batch / state.requests.n_tokens
    rows.append((batch, f"{per_step:.1f}", *(percent(r.hit_rate) for r in found)))
views.table(["requests", "experts per step", "LRU", "LFU", "static", "Belady"], rows,
            "With every request more, LRU falls; from 8 on it hits nothing. A fixed list does not care.")

# %% [markdown]
# The ExpertFlow paper prints the same fall for LRU on Switch-32 (16 experts in the cache): 76.6 % with 4 requests, 58.4 % with 16; and 91.9 %
# and 85.9 % for its own policy, which section 6 builds. *A note on the paper:* it gives that drop as 6.05 points, though
# 91.90 − 85.91 is 5.99.

# %% [markdown]
# ## 5 · Favourites that change · 5 min
#
# So keep the favourites, and be done? Two synthetic traces have the statistics that were published for a model of 896 experts: equally many
# are used, equally unevenly. In the first, favourites stay. In the second an expert is often used again at once, and favourites change
# slowly. Tokens 0 to 299 make the hot list: the 128 most used of each layer. Then come 900 tokens more.

# %% tags=["predict"]
lesson.predict("hot")

# %%
rows = []
for kind, trace in state.drawn.items():
    late, hot = trace.select(slice(300, None)), trace.select(slice(300)).counts()
    late_rates = [replay(late, p, 128, residency="one_by_one", hot=hot).hit_rate
                  for p in ("static", "lfu", "lru", "belady")]
    rows.append((kind, *map(percent, late_rates)))
views.table(["", "static hot list", "LFU", "LRU", "Belady"], rows,
            "What wins on one trace loses on the other.")

# %% tags=["reveal"]
hot_list, _, recent, _ = late_rates
word = "worse" if hot_list < 0.9 * recent else "better" if hot_list > 1.1 * recent else "same"
lesson.reveal("hot", word, static=f"{hot_list:.0%}", lru=f"{recent:.0%}")

# %% [markdown]
# ## 6 · Slots across layers · 7 min
#
# Slots need not belong to a layer. Take one pool of 8 for all 6 layers; and, for once, a predictor that is always right: as soon as a token
# is there, its path through all layers is known. While an expert is computed with, the idle link *prefetches*: soonest needed first. If every
# slot is in use, or holds what is needed sooner, a prefetch is dropped, not waited for.
#
# With a link that brings one expert in the time another is computed with, 83.3 % are hits: all but the first layer's.

# %% tags=["predict"]
lesson.predict("faster")

# %%
trace, path = state.path()
how = {"policy": "predicted", "slots": 8, "scope": "global", "forecast": path}
first_come = {link: replay(trace, **how, link=link) for link in (0.5, 1, 2)}
rows = [(link, percent(r.hit_rate), *(f"{h / a:.0%}" for h, a in zip(r.hits, r.accesses)), r.dropped)
        for link, r in first_come.items()]
views.table(["link", "hits", *(f"layer {i}" for i in range(6)), "dropped"], rows,
            "A fast link fills the pool for the first layers; the last ones come too early.")

# %% tags=["reveal"]
slow, fast = first_come[1].hit_rate, first_come[2].hit_rate
word = "falls" if fast < slow - 0.02 else "rises" if fast > slow + 0.02 else "same"
lesson.reveal("faster", word, fast=percent(fast))

# %%
layers = len(first_come[1].hits)
views.side_by_side([("hit rate, link 1", (layers - 1) / layers, first_come[1].hit_rate)],
                   ("formula: all layers but one", "replayed"),
                   "Only the first layer of a token can never be fetched ahead: its path was not known.")

# %% [markdown]
# The paper's remedy (PLEC): before anything is fetched, *allot* the slots to the layers ahead by what they are predicted to need; and whenever an
# expert was computed with, give its slot to the next in the plan. Nothing is dropped, it only waits for its turn. Its example: 2 layers,
# 4 slots; predicted are experts 2, 3, 4 in layer 1 and experts 2, 3 in layer 2.

# %% tags=["predict"]
lesson.predict("allotment")

# %% [markdown]
# Then the router speaks: layer 2 wants 2 and **4**. Expert 3 came for nothing, 4 is missing. Watch the correction at the end.

# %%
cache, decisions = state.example()
steps = views.cache_steps(decisions, [1, 2], 5, title="The paper's example")
widgets.Stepper(steps, "What is not wanted goes first, what is missing is loaded first.", k=7)

# %% tags=["reveal"]
fetched = [e for e in decisions[:4] if e[4] == "predicted"]
given = [sum(layer == of for _, _, of, _, _ in fetched) for layer in (0, 1)]
lesson.reveal("allotment", f"{given[0]}:{given[1]}")

# %% [markdown]
# And the table from above again, with both policies:

# %%
trace, path = state.path()
rows = []
for link in (0.5, 1, 2):
    both = [replay(trace, p, 8, "global", forecast=path, link=link) for p in ("predicted", "plec")]
    rows.append((link, *(percent(r.hit_rate) for r in both), *(sum(r.loads) for r in both)))
views.table(["link", "first come: hits", "allotted: hits", "first come: loads", "allotted: loads"], rows,
            "Allotting mends the fast link. On the slow one it gives up later layers' experts too early.")

# %% [markdown]
# ## 7 · What a hit has cost · 6 min
#
# Now a real predictor: the next layer's router on the present hidden state (lesson 21), on text it was not fitted on. A pool of 24 slots, a
# link that brings an expert in the time of two. The policy is the seed's: what is *not* predicted goes first. Hits rise from 69 % to
# 83 %. And the bytes over the link?

# %% tags=["predict"]
lesson.predict("bytes")

# %%
cases = {"LRU": ("lru", None), "next gate, 2 fetched": ("predicted", ("gate-1", 2)),
         "next gate, 4 fetched": ("predicted", ("gate-1", 4)),
         "most frequent, 2 fetched": ("predicted", ("frequency", 2)),
         "Belady, nothing ahead": ("belady", None), "oracle": ("oracle", None)}
paid = {name: state.pool_of_24(policy, *which or ()) for name, (policy, which) in cases.items()}
assert all(r.hit_rate <= paid["oracle"].hit_rate for r in paid.values())
assert all(sum(r.loads) == r.demand + r.speculative for r in paid.values())
rows = [(name, percent(r.hit_rate), r.demand, r.speculative, r.wasted, sum(r.loads))
        for name, r in paid.items()]
views.table(["", "hit rate", "waited for", "ahead", "of these unused", "loads in all"], rows,
            "Each guess that is wrong is a load, and throws somebody out.")

# %% tags=["reveal"]
plain, ahead = paid["LRU"], paid["next gate, 2 fetched"]
ratio = sum(ahead.loads) / sum(plain.loads)
word = "more" if ratio > 1.1 else "fewer" if ratio < 0.9 else "same"
lesson.reveal("bytes", word, ratio=f"{ratio:.2f}", waited=ahead.demand, before=plain.demand)

# %% [markdown]
# Two lines deserve a second look. Fetching the most *frequent* experts is a forecast, too, and with it the hit rate **falls** below LRU's while the
# link carries two and a half times as much. And without any link at all, for eviction alone, forecasts of one layer hardly matter:

# %%
lru, alone = (state.pool_of_24(p, "gate-1", link=0).hit_rate for p in ("lru", "predicted"))
views.side_by_side([("hit rate, nothing fetched ahead", lru, alone)], ("LRU", "with forecasts"),
                   "Knowing one layer of the future changes little about who should go.")

# %% [markdown]
# All of this holds for misses that wait for the link. Where the host computes them instead, nobody waits behind a wrong guess, which still takes a
# slot and the host's memory time. Which forecasts are worth that, lesson 27 measures (section 8).
#
# ## 8 · Replayed and run · 2 min
#
# A replay moves no weights. The engine does: here it runs the model on a simulated card with room for half of the experts, token by token, and
# asks the same policy object. Its routes are recorded, and replayed.

# %%
rows = []
for policy in ("lru", "lfu"):
    ran, routes, nbytes = state.run(policy)
    told = replay(routes, policy, 24, "global", sizes=[state.expert_bytes] * 6)
    assert (ran.hits, ran.loads) == (sum(told.hits), told.demand)
    rows += [(f"{policy}: hits", sum(told.hits), ran.hits), (f"{policy}: loads", told.demand, ran.loads),
             (f"{policy}: bytes over the link", told.bytes_loaded, nbytes)]
views.side_by_side(rows, ("replayed", "executed"), "To the last expert: one policy, two readers.")

# %% [markdown]
# ## 9 · What if? · 2 min
#
# Turn the knob: each move replays 96 tokens. Run A is the one before.

# %%
text, gate = state.part(state.forecast("gate-1"))
whats = {"LRU, 4 per layer": ("lru", 4, "layer", 0), "LRU, a pool of 24": ("lru", 24, "global", 0),
         "LFU, a pool of 24": ("lfu", 24, "global", 0), "LRU, a pool of 12": ("lru", 12, "global", 0),
         "forecasts, 24, slow link": ("predicted", 24, "global", 0.5),
         "forecasts, 24, fast link": ("predicted", 24, "global", 2),
         "allotted, 12, fast link": ("plec", 12, "global", 2),
         "Belady, a pool of 24": ("belady", 24, "global", 0)}

# %%
def what_if(i):
    policy, slots, scope, link = list(whats.values())[i]
    r = replay(text, policy, slots, scope, forecast=gate, link=link)
    layers = sorted(h / a for h, a in zip(r.hits, r.accesses))
    return {"case": list(whats)[i], "hit rate": percent(r.hit_rate), "waited for": r.demand,
            "ahead": r.speculative, "unused": r.wasted, "best layer": f"{layers[-1]:.0%}",
            "worst layer": f"{layers[0]:.0%}"}

widgets.Range(value=1, max=7, label="the cache", names=list(whats)).compare(
    what_if, "A pool helps who plans; under LRU it is every layer against all others.", first=0)

# %% [markdown]
# ## 10 · Your turn · 4 min
#
# **Tier 1.** Be LRU. You know when each expert in a slot was used last, and which are in use by the present token.

# %% tags=["exercise", "tier-1"]
def who_goes(last, in_use):
    """last: expert -> token of its last use; in_use: who must stay. Returns the expert that goes."""
    raise NotImplementedError

# %% tags=["solution"]
def who_goes(last, in_use):
    """last: expert -> token of its last use; in_use: who must stay. Returns the expert that goes."""
    return min((e for e in sorted(last) if e not in in_use), key=last.get)

# %% tags=["wrong"]
def who_goes(last, in_use):
    return min(sorted(last), key=last.get)

# %% tags=["wrong"]
def who_goes(last, in_use):
    return max((e for e in sorted(last) if e not in in_use), key=last.get)

# %% tags=["check"]
cases = list(state.evictions("lru", which=3, n_tokens=120))[:20]
expected = [gone for _, _, gone in cases]
lesson.check("who-goes", who_goes, expected, [(last, in_use) for last, in_use, _ in cases])

# %% [markdown]
# **Tier 2.** Count the hits of LRU. Experts come one by one, and the cache is empty at first.

# %% tags=["exercise", "tier-2"]
def lru_hits(needed, slots):
    """needed: expert after expert. Returns how many were in a slot when they were needed."""
    raise NotImplementedError

# %% tags=["solution"]
def lru_hits(needed, slots):
    """needed: expert after expert. Returns how many were in a slot when they were needed."""
    held, hits = [], 0                               # the least recently used first
    for expert in needed:
        if expert in held:
            hits += 1
            held.remove(expert)
        elif len(held) == slots:
            held.pop(0)
        held.append(expert)
    return hits

# %% tags=["wrong"]
def lru_hits(needed, slots):
    held, hits = [], 0
    for expert in needed:
        if expert in held:
            hits += 1
        else:
            held = [*held[-(slots - 1):], expert] if slots > 1 else [expert]
    return hits

# %% tags=["wrong"]
def lru_hits(needed, slots):
    return sum(expert in needed[max(0, i - slots):i] for i, expert in enumerate(needed))

# %% tags=["check"]
draw = random.Random(22)
on = [([draw.randrange(8) for _ in range(60)], slots) for slots in (1, 3, 5)]
on.append((list(range(8)) * 4, 6))
expected = [state.hits("lru", *case) for case in on]
labels = [f"{len(needed)} experts, {slots} slots" for needed, slots in on]
lesson.check("lru-hits", lru_hits, expected, on, labels)

# %% [markdown]
# **Tier 3.** Now the best there is: Belady's hits on the same lists.

# %% tags=["exercise", "tier-3"]
def best_hits(needed, slots):
    """needed: expert after expert. Returns the most hits that loading on demand can have."""
    raise NotImplementedError

# %% tags=["solution"]
def best_hits(needed, slots):
    """needed: expert after expert. Returns the most hits that loading on demand can have."""
    held, hits = set(), 0
    for i, expert in enumerate(needed):
        rest = needed[i + 1:]
        if expert in held:
            hits += 1
        elif len(held) == slots:
            later = {e: rest.index(e) if e in rest else len(rest) for e in sorted(held)}
            held.remove(max(later, key=later.get))
        held.add(expert)
    return hits

# %% tags=["wrong"]
def best_hits(needed, slots):
    held, hits = set(), 0
    for i, expert in enumerate(needed):
        if expert in held:
            hits += 1
        elif len(held) == slots:
            held.remove(min(sorted(held), key=needed[i + 1:].count))
        held.add(expert)
    return hits

# %% tags=["wrong"]
def best_hits(needed, slots):
    held, hits = set(), 0
    for i, expert in enumerate(needed):
        rest = needed[i + 1:]
        if expert in held:
            hits += 1
        elif len(held) == slots:
            later = {e: rest.index(e) if e in rest else -1 for e in sorted(held)}
            held.remove(max(later, key=later.get))
        held.add(expert)
    return hits

# %% tags=["check"]
draw = random.Random(23)
on = [([draw.randrange(8) for _ in range(60)], slots) for slots in (2, 3, 5)]
on.append((list(range(8)) * 4, 6))
expected = [state.hits("belady", *case) for case in on]
labels = [f"{len(needed)} experts, {slots} slots" for needed, slots in on]
lesson.check("best-hits", best_hits, expected, on, labels)

# %% [markdown]
# ## 11 · What is what, and what comes next · 1 min
#
# | here | elsewhere | left out here |
# |---|---|---|
# | `policies.Recency`, `Frequency` | LRU of Mixtral-offloading; LFU of libcachesim is our `lfu_in_cache` | CLOCK, LIRS, learned policies |
# | `policies.Belady` | MIN, the offline optimum | what a *learned* policy could reach |
# | `policies.HotSet` | `-ot`, `--n-cpu-moe` in llama.cpp; Fiddler's popular experts | computing the others on the host |
# | `policies.Planned` | the seed's prediction-aware eviction | its "some time" after which experts go |
# | `policies.Allotted`, `allot` | PLEC, and real-time correction, in the Expert Cache Engine of the paper | the paper's own slot formula is not printed |
# | `ExpertCache` | – (ggml remembers nothing between two graphs: lesson 19) | |
# | `replay`, `python -m workbench replay` | stratamoe-lab's replay, route_sim.py | time: a replay counts, it does not wait |
#
# **Next, 23:** so far every token has its own step. What if tokens waited for each other, so that one load serves many?
