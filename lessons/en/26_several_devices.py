# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 26 · Several devices
#
# **50 minutes** · before it: 22, the expert cache, and 17, load balancing · after it: 27, your own model
#
# A second card doubles the room for experts, and brings two new questions: which expert lives where, and what tokens pay for going there. The answers
# come from loads, which somebody has to count, and from links, which are slower than anything on a card.
#
# Afterwards you can place experts by hand and check a published placement, say what a replica buys, count the tokens that cross a link,
# and tell when the link is the limit. Each section needs only the cell below.

# %% tags=["setup"]
import numpy as np

from workbench import lessons, views, widgets
from workbench.errors import ParameterError
from workbench.expertflow.placement import pack, place, replicate

lesson = lessons.open_lesson("26")
state = lesson.state

# %% [markdown]
# ## 1 · Every card its own pool · 6 min
#
# The simplest division is by layers: each card computes some layers, and has slots, a cache and a link of its own for their experts. The tiny
# Mixtral, 16 tokens of English, slots for half of all experts in total. From one card to two: what happens to the number of loads?

# %% tags=["predict"]
lesson.predict("pools")

# %%
found = {n: state.across(n) for n in (1, 2, 3)}
assert all(c.equal for c in found.values())              # the bits of a model that is all there
rows = [(n, card, *numbers) for n, c in found.items() for card, numbers in enumerate(c.rows)]
views.table(["cards", "card", "layers", "slots", "hits", "loads", "bytes"], rows,
            "Run on simulated cards: all logits equal, bit for bit, however the layers are divided.")

# %%
total = {n: sum(row[3] for row in c.rows) for n, c in found.items()}
worst = {n: max(row[4] for row in c.rows) for n, c in found.items()}
rows = [(n, total[n], f"{worst[n]:,}", f"{worst[n] / worst[1]:.2f}") for n in found]
views.table(["cards", "loads in all", "bytes over the busiest link", "against one card"], rows,
            "Nearly the same loads; what changes is how many links share them.")

# %% tags=["reveal"]
more = total[2] / total[1]
said = "same" if 0.8 < more < 1.25 else "half" if more < 0.8 else "double"
lesson.reveal("pools", said, one=total[1], two=total[2], three=total[3])

# %% [markdown]
# The busiest link has more than its share: the first card's layers miss more. And one conversation keeps only one card busy at a time (lesson 14). To have all cards at
# work on *one* layer, its experts must be spread over them. That is expert parallelism, and the rest of this lesson.
#
# ## 2 · Packing · 6 min
#
# Loads of twelve experts, out of the example that DeepSeek published with its balancer EPLB. Four devices with three experts each. Everybody
# waits for the busiest device, so what counts is its load over the mean: the *imbalance*. By number, experts 0 to 2 on device 0 and so on, it
# is:

# %%
loads = state.EPLB["loads"][1:]
by_number = state.in_order(loads, 4)
print("loads:", loads[0].tolist())
print("by number:", by_number.device_loads()[0].tolist(), f"imbalance {by_number.imbalance():.2f}")

# %% [markdown]
# Now heaviest first, each onto the lightest device that has room. What will the imbalance be?

# %% tags=["predict"]
lesson.predict("packing")

# %%
steps = state.packing_steps(loads[0], 4)
widgets.Stepper(steps, "The heavy ones decide while there is room to choose; the light ones fill up.")

# %%
packed = place(loads, 4)
assert sorted(packed.holds[0].tolist()) == list(range(12))
rows = [(d, str(items), int(loads[0][items].sum())) for d, items in enumerate(pack(loads[0], 4))]
views.table(["device", "experts", "load"], rows, "One pass over the sorted loads.")

# %% tags=["reveal"]
after = packed.imbalance()
said = "close" if after < 1.1 else "tenths" if after < 1.5 else "much"
lesson.reveal("packing", said, imbalance=f"{after:.2f}", before=f"{by_number.imbalance():.2f}")

# %% [markdown]
# ## 3 · Replicas · 7 min
#
# What if one expert alone is heavier than a device's share? No packing helps: half an expert cannot move. A *replica* can take half of its tokens. EPLB
# gives every free place to the expert whose copies carry most each. Its published example: 12 experts, 8 GPUs in 2 nodes, 16 places, groups of
# experts that stay within a node.

# %%
e = state.EPLB
found = place(e["loads"], 8, 16, n_groups=4, n_nodes=2)
rows = [(layer, name, " ".join(map(str, row))) for layer in (0, 1)
        for name, row in (("ours", found.holds[layer].tolist()), ("published", e["published"][layer]))]
assert found.holds.tolist() == e["published"]
views.table(["layer", "", "expert in each of 16 places"], rows,
            f"The same placement. Source: {e['source']}.")

# %% [markdown]
# How much is a replica worth? Twelve devices with one expert each, then with two places each: as many replicas as experts. Imbalance without is 2.09. And
# with?

# %% tags=["predict"]
lesson.predict("replicas")

# %%
rows = []
for places in (12, 24, 36):
    p = place(e["loads"], 12, places)
    assert (p.copies >= 1).all() and np.allclose(p.device_loads().sum(1), e["loads"].sum(1))
    rows.append((places, f"{p.imbalance():.2f}", int(p.copies.max()), f"{places / 12:.0f}x"))
views.table(["places", "imbalance", "most copies of one expert", "memory"], rows,
            "Replicas buy what packing cannot, and pay with memory.")

# %% tags=["reveal"]
without, twice = (place(state.EPLB["loads"], 12, n).imbalance() for n in (12, 24))
said = "near" if twice < 1.2 else "half" if twice < 1.6 else "none"
lesson.reveal("replicas", said, twice=f"{twice:.2f}", without=f"{without:.2f}")

# %% [markdown]
# Numbers must divide. More devices than experts is an error, unless there are replicas to fill them:

# %%
for devices, places in ((8, 12), (16, 12), (16, 16)):
    try:
        p = place(e["loads"], devices, places)
        print(f"{devices} devices, {places} places: imbalance {p.imbalance():.2f}")
    except ParameterError as error:
        print(f"{devices} devices, {places} places: {error}")

# %% [markdown]
# ## 4 · Whose loads? · 6 min
#
# Loads are counted over some texts, and then other texts come. The tiny Mixtral's routes over six kinds of text, four devices. Placed by the
# loads of *all* texts together; served is one kind at a time. Against placing experts by number, the imbalance is then…

# %% tags=["predict"]
lesson.predict("whose")

# %%
names, of, rows = state.trace().domain_names, state.loads, {}
ways = {"by number": lambda d: state.in_order(of(d), 4), "by all texts": lambda d: place(of(), 4),
        "by its own loads": lambda d: place(of(d), 4),
        "all texts, 4 replicas": lambda d: place(of(), 4, 12),
        "own, 4 replicas": lambda d: place(of(d), 4, 12),
        "own, 8 replicas": lambda d: place(of(d), 4, 16)}
uneven = {how: [made(d).imbalance(of(d)) for d in names] for how, made in ways.items()}
alt = "; ".join(f"{how}: {np.mean(row):.2f} on average" for how, row in uneven.items())
said = "Averaged loads do not help one kind of text; its own loads do, and replicas do more."
axis = "load of the busiest device over the mean"
views.heat_picture(uneven, said, alt, axis, 2.0, columns=names, form=".2f")

# %% tags=["reveal"]
a, b, own = (np.mean(uneven[how]) for how in ("by number", "by all texts", "by its own loads"))
said = "same" if abs(b / a - 1) < 0.08 else "better"
lesson.reveal("whose", said, number=f"{a:.2f}", all=f"{b:.2f}", own=f"{own:.2f}")

# %% [markdown]
# So servers count loads while they run, and place anew from time to time: an expert that moves is a load, too.
#
# ## 5 · Tokens that cross · 7 min
#
# A token sits on one device: its attention and its cache are there. Its experts may be elsewhere; then its row travels there, and the result
# back. Four devices with two of eight experts each; a token uses two. How many other devices does it visit per layer?

# %% tags=["predict"]
lesson.predict("cross")

# %% [markdown]
# By chance: each of three other devices holds two of eight experts, and is missed by both choices with 6/8 · 5/7. Beside what was recorded:

# %%
chance = 3 * (1 - 6 / 8 * 5 / 7)
domains = state.trace().domain_names
rows = [(d, chance, state.crossings(place(state.loads(d), 4), d)) for d in domains]
views.side_by_side(rows, ("by chance", "recorded"),
                   "Visits per token and layer: placement by load does not keep tokens at home.")

# %%
rows = []
for d in state.trace().domain_names:
    of = state.loads(d)
    ways = state.in_order(of, 4), place(of, 4), place(of, 4, 12), place(of, 4, 16)
    rows.append((d, *(f"{state.crossings(p, d):.2f}" for p in ways)))
views.table(["text", "by number", "by load", "4 replicas", "8 replicas"], rows,
            "A copy at home saves the journey: with all experts twice, half of the visits are gone.")

# %% tags=["reveal"]
english = state.loads("english")
measured, twice = (state.crossings(place(english, 4, places), "english") for places in (8, 16))
lesson.reveal("cross", round(2 * measured) / 2, exact=f"{measured:.2f}", twice=f"{twice:.2f}")

# %% [markdown]
# ## 6 · The link as the new limit · 7 min
#
# A row there and one back, in 16 bits: 16 KiB for Mixtral-8x7B. An expert over the same link is 336 MiB, 21,504 times as much. So it is tokens that
# travel, not experts. Is the link free then? **Four A100, each behind PCIe 4**; two models whose rows are equally long, 4,096 numbers,
# with experts of 176 and 8 million parameters. A batch of 4,096 tokens. Where does a layer spend more time on the link than computing?

# %% tags=["predict"]
lesson.predict("limit")

# %%
rows, longer_by = [], {}
for name, trace in (("Mixtral-8x7B", "tiny-mixtral"), ("LLaMA-MoE-v1-3.5B", "tiny-deepseek")):
    placed, c = place(state.loads(name=trace), 4), state.costs(name, "a100")
    visits = state.crossings(placed, name=trace)
    for n in (4, 64, 1024, 4096):
        compute, link = state.layer_ns(c, n, 4, visits, placed.imbalance())
        longer_by[name] = link / compute
        rows.append((name, n, f"{visits:.2f}", f"{compute / 1e6:.3f}", f"{link / 1e6:.3f}",
                     f"{link / compute:.2f}"))
heads = ["model", "tokens", "visits per token", "computing, ms", "link, ms", "link / computing"]
views.table(heads, rows,
            "Four A100 behind PCIe 4, f16, all experts resident. Bytes do not shrink with the experts.")

# %% tags=["reveal"]
over = [name for name, r in longer_by.items() if r > 1]
said = "both" if len(over) == 2 else "none" if not over else "small" if "LLaMA" in over[0] else "large"
large, small = (f"{r:.2f}" for r in longer_by.values())
lesson.reveal("limit", said, large=large, small=small)

# %% [markdown]
# The rows of a token are as long however small its experts; models with many small experts send each token to more places for less work. That is
# why DeepSeek-V3 limits a token to four nodes: *groups* (lesson 18) are a promise about links. Turn the knobs:

# %%
cards, models = ["a100", "rtx3090-pcie4", "rtx3090-pcie3"], ["Mixtral-8x7B", "LLaMA-MoE-v1-3.5B"]
domains, kept = ["", *state.trace().domain_names], {}

def what_if(model, card, devices, copies, batch, domain):
    trace, c = ["tiny-mixtral", "tiny-deepseek"][model], state.costs(models[model], cards[card])
    of, d = state.loads(domains[domain], trace), 2**devices
    placed = place(of, d, of.shape[1] * copies)
    visits = state.crossings(placed, domains[domain], trace)
    compute, link = state.layer_ns(c, 4**batch, d, visits, placed.imbalance())
    now = [f"{placed.imbalance():.2f}", f"{visits:.2f}", f"{compute / 1e6:.3f}", f"{link / 1e6:.3f}"]
    kept["A"], kept["B"] = kept.get("B", now), now
    facts = ["imbalance", "visits per token", "computing, ms", "link, ms"]
    longer = "the link" if link > compute else "computing"
    return views.table(["", "A: last run", "B: this run"], zip(facts, kept["A"], kept["B"]),
                       f"{models[model]} on {d} × {cards[card]}: {longer} takes longer.")

# %%
powers = [[str(b**n) for n in range(7)] for b in (2, 4)]
knobs = [["model", 0, 1, models], ["card", 0, 2, cards], ["devices", 0, 3, powers[0][:4]],
         ["every expert", 1, 2, ["once", "twice"]], ["tokens", 0, 6, powers[1]],
         ["text", 0, 6, ["all", *domains[1:]]]]
widgets.Knobs(knobs=knobs, values=[0, 0, 2, 1, 5, 0]).drive(what_if)

# %% [markdown]
# A forecast of routes is a forecast of journeys. The gate of the next layer, asked one layer ahead (lesson 21), names experts; a row can be on its way before its
# router has spoken. Is it easier to say *where* a token goes than *to whom*?

# %%
rows = [(n, *(f"{share:.0%}" for share in shares)) for n, shares in state.announced.items()]
views.table(["experts taken", "recall of experts", "recall of visits", "precision of visits"], rows,
            "Easier: a wrong expert on the right device is still the right journey.")

# %% [markdown]
# ## 7 · Run it · 4 min
#
# A formula leaves things out; a run cannot. Now the experts of *one* layer really are on several cards, each with its own pool. The layer's
# card reads its router's ids and sends each other card the rows that want its experts, no others. A row comes back for each choice: adding up
# stays at home, in the router's order, for another order has other bits. The tiny Mixtral, 24 tokens of English, slots for half of all experts:

# %%
rows = []
for n in (1, 2, 4):
    s = state.spread(n)
    assert s.equal and s.rows == s.said                  # the bits of a model that is all there
    rows.append((n, *s.rows, *s.said, s.loads))
heads = ["cards", "rows there", "rows back", "there, by routes", "back, by routes", "loads in all"]
views.table(heads, rows, "Run on simulated cards: what crosses is what the routes say, row by row.")

# %% [markdown]
# Now time, which needs a real size: one layer of **LLaMA-MoE-v1-3.5B**, f16, on A100 behind PCIe 4, all experts resident. 1,024 tokens, all of
# them on *one* card, as here; section 6 had them spread over all. From one card to four, the layer takes…

# %% tags=["predict"]
lesson.predict("run")

# %%
rows, took, out = [], {}, {}
for name, trace in (("Mixtral-8x7B", "tiny-mixtral"), ("LLaMA-MoE-v1-3.5B", "tiny-deepseek")):
    for n in (1, 2, 4):
        r, c = state.run_layer(name, n, 1024, trace), state.costs(name, "a100")
        compute, link = state.layer_ns(c, 1024, n, r.visits, r.imbalance)
        home = state.one_home_ns(c, 1024, r.visits, r.away)
        assert np.array_equal(out.setdefault(name, r.out), r.out)   # the same bits on any number of cards
        assert abs(r.ns / (compute + home) - 1) < 0.25              # and the formula counts what matters
        took[name, n] = r.ns
        rows.append((name, n, *(f"{ns / 1e6:.2f}" for ns in (r.ns, compute, link, home))))
heads = ["model", "cards", "run, ms", "computing", "link, tokens spread", "link, tokens on one card"]
views.table(heads, rows, "One layer in f16 on A100, ms: the run, and what formulas say of its parts.")

# %% tags=["reveal"]
ratio = took["LLaMA-MoE-v1-3.5B", 4] / took["LLaMA-MoE-v1-3.5B", 1]
said = "quarter" if ratio < 0.4 else "half" if ratio < 0.8 else "same" if ratio < 1.25 else "longer"
large = took["Mixtral-8x7B", 1] / took["Mixtral-8x7B", 4]
lesson.reveal("run", said, times=f"{ratio:.1f}", large=f"{large:.1f}")

# %% [markdown]
# The link of the one card carries everything, and at least twice as many bytes as in section 6: rows in 32 bits, and one back for each choice.
# So servers keep tokens on all cards, add up before the way back, and send fewer bits. And they ask who will travel. The same 24 tokens with a forecast by the next layer's
# gate; each card loads what is announced to it:

# %%
rows = [("nobody", "-", state.spread(4).loads, 0)]
for n in (2, 3, 4):
    s = state.spread(4, fetch=n)
    assert s.equal
    rows.append((f"{n} experts per token", f"{s.recall:.0%}", s.loads, s.ahead))
views.table(["announced", "of all journeys", "loads waited for", "loads ahead"], rows,
            "Four cards: loads start early where journeys are announced; a wrong name is a load too.")

# %% [markdown]
# ## 8 · Your turn · 6 min
#
# **Tier 1.** How uneven is a placement?

# %% tags=["exercise", "tier-1"]
def imbalance(loads, holds, n_devices):
    """holds: the expert in each place, device by device. Load of the busiest device over the mean."""
    raise NotImplementedError

# %% tags=["solution"]
def imbalance(loads, holds, n_devices):
    """holds: the expert in each place, device by device. Load of the busiest device over the mean."""
    share = [loads[e] / holds.count(e) for e in holds]
    size = len(holds) // n_devices
    devices = [sum(share[d * size : (d + 1) * size]) for d in range(n_devices)]
    return max(devices) / (sum(devices) / n_devices)

# %% tags=["wrong"]
def imbalance(loads, holds, n_devices):
    size = len(holds) // n_devices
    devices = [sum(loads[e] for e in holds[d * size : (d + 1) * size]) for d in range(n_devices)]
    return max(devices) / (sum(devices) / n_devices)

# %% tags=["wrong"]
def imbalance(loads, holds, n_devices):
    share = [loads[e] / holds.count(e) for e in holds]
    return max(share) / (sum(share) / len(share))

# %% tags=["check"]
first, second = state.EPLB["loads"][:1], state.EPLB["loads"][1:]
made = [place(first, 4, 16), place(state.loads("python")[:1], 4, 12), place(second, 4)]
on = [(p.loads[0].tolist(), p.holds[0].tolist(), 4) for p in made]
expected = [p.imbalance() for p in made]
lesson.check("imbalance", imbalance, expected, on, ["16 places", "python", "no replicas"])

# %% [markdown]
# **Tier 2.** Who gets the replicas?

# %% tags=["exercise", "tier-2"]
def copies(loads, n_places):
    """How often each expert exists: once; each further place goes to whose copies carry most each."""
    raise NotImplementedError

# %% tags=["solution"]
def copies(loads, n_places):
    """How often each expert exists: once; each further place goes to whose copies carry most each."""
    out = [1] * len(loads)
    for _ in range(n_places - len(loads)):
        each = [load / n for load, n in zip(loads, out)]
        out[each.index(max(each))] += 1
    return out

# %% tags=["wrong"]
def copies(loads, n_places):
    best = sorted(range(len(loads)), key=lambda e: -loads[e])[: n_places - len(loads)]
    return [1 + (e in best) for e in range(len(loads))]

# %% tags=["wrong"]
def copies(loads, n_places):
    out = [1] * len(loads)
    out[loads.index(max(loads))] += n_places - len(loads)
    return out

# %% tags=["check"]
on = [([90, 30, 20], 6), (state.EPLB["loads"][0].tolist(), 24), (state.loads("numeric")[0].tolist(), 16)]
expected = [np.bincount(replicate(*case)).tolist() for case in on]
lesson.check("copies", copies, expected, on, ["one very busy", "the published loads", "numeric"])

# %% [markdown]
# **Tier 3.** Count the journeys.

# %% tags=["exercise", "tier-3"]
def visits(experts, where, home):
    """experts, home: of each token; where: expert -> device. Other devices that each token visits."""
    raise NotImplementedError

# %% tags=["solution"]
def visits(experts, where, home):
    """experts, home: of each token; where: expert -> device. Other devices that each token visits."""
    return [len({where[e] for e in some} - {h}) for some, h in zip(experts, home)]

# %% tags=["wrong"]
def visits(experts, where, home):
    return [sum(where[e] != h for e in some) for some, h in zip(experts, home)]

# %% tags=["wrong"]
def visits(experts, where, home):
    return [len({where[e] for e in some}) for some, h in zip(experts, home)]

# %% tags=["check"]
on, expected = [], []
for name, devices in (("tiny-mixtral", 4), ("tiny-mixtral", 2), ("tiny-deepseek", 4)):
    placed, home = place(state.loads(name=name), devices), state.homes(200, devices)
    chosen = state.trace(name).experts[:, :200].astype(int)
    where = dict(zip(placed.holds[0].tolist(), placed.device_of_place().tolist()))
    on.append((chosen[0].tolist(), where, home.tolist()))
    expected.append(placed.crossings(chosen, home)[0].tolist())
lesson.check("visits", visits, expected, on, ["4 devices", "2 devices", "4 of 16 experts"])

# %% [markdown]
# ## 9 · Names · 1 min
#
# | here | elsewhere | left out |
# |---|---|---|
# | `place`, `pack`, `replicate` | `rebalance_experts`, `balanced_packing`, `replicate_experts` of EPLB | moving experts while serving |
# | `Placement.crossings` | dispatch and combine of an all-to-all (DeepEP) | shorter numbers on the way (fp8) |
# | `offload_across` | llama.cpp's split by layer (`-sm layer`), with a pool for each card | two layers at work at once |
# | `offload_across(placement=…)`, `CardEngine` | expert parallelism in vLLM, SGLang | tokens on all cards; adding up before the way back |
# | `layer_ns` | - | overlap of link and computing, NVLink, switches |
#
# **Next**: lesson 27 opens a model of yours and asks all these questions of it.
