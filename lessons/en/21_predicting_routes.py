# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 21 · Predicting routes
#
# **50 minutes** · before it: 16, top-k MoE, and 20, the memory wall · after it: 22, the expert cache
#
# A card that loads experts on demand stands still, because an expert is known only when it is needed. Can it be known earlier? Surprisingly well. Whether that
# helps is another question.
#
# Afterwards you can compare predictors by recall *and* precision, calibrate one to a recall target, notice when the text has changed under it,
# and say when a good forecast makes things slower. Each section needs only the cell below.

# %% tags=["setup"]
import math

import numpy as np

from workbench import lessons, views, widgets
from workbench.expertflow.calibration import calibrate, report
from workbench.expertflow.scoring import batches, coverage, curve, evaluate, mean, top

lesson = lessons.open_lesson("21")
state = lesson.state
K, E, BYTES = 2, 8, 122_880        # experts per token, experts per layer, bytes of one: the tiny Mixtral

# %% [markdown]
# ## 1 · Too late · 5 min
#
# The ExpertFlow article has a listing. Its predictor is a linear layer; in each MoE layer it reads `hidden_states`, names the k likeliest
# experts, and has them loaded. Then the router reads the same `hidden_states`. In our graph that is the tensor `ffn_norm`, and the router's
# product is `ffn_moe_logits`.

# %% tags=["predict"]
lesson.predict("listing")

# %%
names = state.node_names()
at = names.index("ffn_norm-3")
print("before:", ", ".join(names[at - 6 : at]))
print("then:  ", ", ".join(names[at : at + 4]))

# %% tags=["reveal"]
names = state.node_names()
lesson.reveal("listing", names.index("ffn_moe_logits-3") - names.index("ffn_norm-3") - 1)

# %% [markdown]
# *A note on the article.* Its text speaks of a window of two to four layers, and that is the point; the listing has look-ahead zero. It also fetches exactly k
# experts, whatever its own recall target says.
#
# The hidden state changes little from layer to layer. So the router of layer l may read the state of layer l − 1: nothing to train, nothing
# to store. How much time does each layer of look-ahead give? Mixtral-8x7B in q8_0 on the card of lesson 20:

# %%
rows = [("the listing: the router's own input", state.lead_ms(-1)),
        ("what enters the layer, before its attention", state.lead_ms(0))]
rows += [(f"the state of {n} layer{'s' * (n > 1)} below", state.lead_ms(n)) for n in (1, 2, 3, 4)]
views.table(["read", "ms before the experts are needed", "of a load of 7.44 ms"],
            [(what, ms, f"{ms * 1e6 / state.costs.load:.0%}") for what, ms in rows],
            "If nobody waits. Even four layers are not half of a load: remember this for section 8.")

# %% [markdown]
# ## 2 · Recall and precision · 5 min
#
# *Recall*: of the experts that the router takes, how many were fetched? *Precision*: of those fetched, how many did it take? Token by token,
# for layer 3, by its router on the state of layer 2. ● fetched and used, ○ fetched in vain, ✗ missed; *n* jumps to a miss.

# %%
steps = state.steps("gate-1", top(K), m=3)
first = next(i for i, step in enumerate(steps["steps"]) if step["change"])
widgets.Stepper(steps, "Two fetched for each token: an expert missed is one fetched in vain.", k=first)

# %% [markdown]
# The paper's accuracy is recall, and nothing else. So here is a predictor that beats them all: it always fetches all eight. And one that needs no
# input: the two experts that were used most often. What is *its* recall?

# %% tags=["predict"]
lesson.predict("hot")

# %%
few = {n: mean(evaluate(state.predictors["frequency"], state.report, top(n))) for n in (2, 4, 8)}
views.table(["fetched per token and layer", "recall", "precision", "KiB"],
            [(n, s.recall, s.precision, s.moved / 1024) for n, s in few.items()],
            "Eight of eight: recall 1, precision 2/8. Never read a recall without its precision.")

# %% tags=["reveal"]
hot = mean(evaluate(state.predictors["frequency"], state.report, top(K)))
lesson.reveal("hot", "quarter" if hot.recall < 0.35 else "half" if hot.recall < 0.7 else "most",
              recall=f"{hot.recall:.1%}")

# %% [markdown]
# ## 3 · Seven ways to know · 7 min
#
# All were fitted on sequences 0 to 11 of each of six domains, and are judged on 12 to 15. *Linear* and *hidden layer* read what the router
# below has computed anyway; the *network* (80,000 numbers, trained by our own gradients) reads nothing but tokens, and names all layers' experts before
# the first layer runs. That is the paper's form. Which finds most, k fetched?

# %% tags=["predict"]
lesson.predict("best")

# %%
keys = ("frequency", "previous-token", "previous-layer", "gate-1", "linear-1", "non-linear-1", "network")
found = {title: evaluate(p, state.report, top(K)) for title, p in state.titled(*keys).items()}
later = {title: mean(s for s in scores if s.layer) for title, scores in found.items()}
views.table(["predictor", "recall", "precision", "exact set", "bytes it keeps", "FLOPs per token"],
            [(t, s.recall, s.precision, s.exact, s.nbytes, s.flops) for t, s in later.items()],
            "Layers 1 to 5, 2 of 8 fetched. Precision equals recall here: as many are fetched as used.")

# %% tags=["reveal"]
best = max(later, key=lambda title: later[title].recall)
lesson.reveal("best", best, recall=later[best].recall)

# %%
shown = state.titled("frequency", "gate-1", "non-linear-1", "network", "oracle")
views.recall_picture({title: curve(p, state.report) for title, p in shown.items()}, K,
                     "More bytes, more recall, less precision: a curve, not a number.", nbytes=BYTES)

# %%
more = state.titled("gate-0", "gate-1", "gate-2", "gate-3", "gate-4", "non-linear-1", "network")
views.layer_picture({title: evaluate(p, state.report, top(K)) for title, p in more.items()},
                    "The gate fails where layers differ most: at the bottom. Training mends just that.",
                    layers=range(6))

# %% [markdown]
# Our numbers against those of the trained models in PyTorch, over all held-out text. (For Mixtral-8x7B, Eliseev and Mazur plot 80 to 90 %.)

# %%
rows = []
for title, key, name in (("gate, 1 ahead", "gate-1", "next_gate_on_prev_layer"),
                         ("gate, 2 ahead", "gate-2", "next_gate_on_layer_minus_2"),
                         ("before attention", "gate-0", "gate_on_block_input")):
    for n, column in ((K, "recall_at_k"), (2 * K, "recall_at_2k")):
        ours = mean(s for s in evaluate(state.predictors[key], state.report, top(n)) if s.layer > 1)
        rows.append((f"{title}, {n} fetched", state.published(name, column), ours.recall))
views.side_by_side(rows, ("PyTorch, all text", "ours, a quarter of it"), "Layers 2 to 5.")

# %% [markdown]
# ## 4 · What 95 % costs · 7 min
#
# The article: better fetch too many than miss one; choose the threshold so that recall is 95 %. On held-back text (a *warm-up set*) each layer gets a threshold: how far
# below the k-th best score may an expert stand and still be fetched? With 2 fetched the gate's recall is 0.73. How many does it fetch for 0.95?

# %% tags=["predict"]
lesson.predict("cost")

# %%
rows = []
for key in ("gate-1", "linear-1", "non-linear-1", "network"):
    for target in (0.8, 0.9, 0.95, 0.99):
        r = state.results(key, state.calibrated(key, target))[-1]
        rows.append((f"{key}, target {target:.2f}", f"{r.recall:.3f} ± {r.error:.3f}",
                     round(r.precision, 3), round(r.fetched, 2), f"{r.fetched / K:.1f}×"))
views.table(["", "recall on other text", "precision", "experts fetched", "bytes"], rows,
            "±: two standard errors between texts. The last points of recall cost most of the bytes.")

# %% tags=["reveal"]
gate = state.results("gate-1", state.calibrated("gate-1"))[-1]
lesson.reveal("cost", round(gate.fetched), ratio=f"{gate.fetched / K:.1f}",
              precision=f"{gate.precision:.2f}")

# %% [markdown]
# *What* is held against the threshold matters as much as the predictor. The article speaks of probabilities, a soft max, and of its temperature. All three rules
# reach the target:

# %%
rules = {"margin to the k-th place": "margin", "soft max": "probability", "temperature": "temperature"}
found = {name: state.results("gate-1", state.calibrated("gate-1", rule=r)) for name, r in rules.items()}
views.Stack(
    views.group_picture(found, "Recall: the soft max reaches 95 % as a mean; Chinese pays for it."),
    views.group_picture(found, "Fetched: the distance from the k-th place matters, not from the first.",
                        "fetched"))

# %%
targets, names = [0.8, 0.85, 0.9, 0.95, 0.97, 0.99], ["gate-1", "linear-1", "non-linear-1", "network"]
kept = {}

def what_if(key, target, rule):
    key, target, rule = names[key], targets[target], ["margin", "probability"][rule]
    r = state.results(key, state.calibrated(key, target, rule), "layer", state.warm_up)[-1]
    now = (key, f"{target:.2f}", rule, r.recall, r.precision, r.fetched, int(r.fetched * BYTES / 1024))
    before, kept["last"] = kept.get("last", now), now
    return views.table(["run", "predictor", "target", "rule", "recall", "precision", "fetched", "KiB"],
                       [("A", *before), ("B", *now)], "Calibrated and judged on the warm-up set.")

_ = what_if(0, 3, 1)
widgets.Knobs(knobs=[["predictor", 0, 3, names], ["target", 0, 5, [f"{t:.2f}" for t in targets]],
                     ["rule", 0, 1, ["margin", "soft max"]]], values=[0, 3, 0]).drive(what_if)

# %% [markdown]
# ## 5 · Whose text? · 5 min
#
# "Calibrate with data like those you will meet", says the article. Two predictors, both calibrated on Python, to 95 %: a linear layer that was fitted on Python
# alone, and the gate, which nobody fitted. Then they read Chinese. What is the linear layer's recall there?

# %% tags=["predict"]
lesson.predict("domain")

# %%
home = state.part(8, 12, domain=0)                             # Python, other texts than those of the fit
found = {name: report(p, state.report, calibrate(p, home))
         for name, p in (("linear, Python", state.on_python), ("gate", state.predictors["gate-1"]))}
views.group_picture(found, "What was fitted on one domain is lost in another. The gate hardly notices.")

# %% tags=["reveal"]
home = state.part(8, 12, domain=0)
rows = report(state.on_python, state.report, calibrate(state.on_python, home))
abroad = next(r.recall for r in rows if r.group == "chinese")
lesson.reveal("domain", "0.95" if abroad > 0.93 else "0.8" if abroad > 0.65 else "0.3", recall=abroad)

# %% [markdown]
# Two more traps. The network, calibrated on text that it was *trained* on, believes in itself too much. And the article warns of short texts: thresholds from
# them fail on long ones. Is that so here?

# %%
net, own = state.predictors["network"], state.part(8, 11)
fooled, honest = (report(net, state.report, calibrate(net, text))[-1].recall
                  for text in (own, state.warm_up))
rows = [("network, calibrated on its own text", fooled), ("network, calibrated on unseen text", honest)]
by_length = state.results("gate-1", state.calibrated("gate-1"), "length")
rows += [(f"gate, tokens {r.group}", r.recall) for r in by_length]
views.table(["target 0.95", "recall"], rows, "The first trap is real. Of the second, no trace here.")

# %% [markdown]
# ## 6 · While it runs · 7 min
#
# Without any warm-up set one can start **cold**: fetch everything, look at what the router took, lower the fetching step by step, and call it warm when recall
# is within a point of the target. The article: "at least some hundreds of batches". How many, with four texts side by side, a token of each per batch?

# %% tags=["predict"]
lesson.predict("cold")

# %%
text, rows = state.part(0, 16, domain=0), []
for size in (1, 4, 16):
    events = state.online(state.batches_of(state.predictors["gate-1"], text, size))
    warm = next(e for e in events if e[0] == "warm")
    cold = [e for e in events if e[0] == "batch" and e[2] == "cold"]
    rows.append((size, warm[1] + 1, warm[2], float(np.mean([e[4] for e in cold]))))
views.table(["texts side by side", "batches until warm", "tokens", "experts fetched meanwhile"], rows,
            "Tokens count, not batches: to tell 95 from 96 % takes some two thousand experts used.")

# %% tags=["reveal"]
ran = state.online(state.batches_of(state.predictors["gate-1"], state.part(0, 16, domain=0), 4))
took = next(e for e in ran if e[0] == "warm")[1] + 1
guess = min((6, 50, 400), key=lambda n: abs(math.log(n / took)))
lesson.reveal("cold", guess, took=took)

# %% [markdown]
# And when the text changes? Each batch shows what was missed. Two sums add up the evidence that misses have doubled, or halved; when one is high enough, that is
# **drift**: the past is forgotten, and a cold start begins. Here the layer fitted on Python reads Python, and from batch 512 on Chinese.

# %%
parts = [state.batches_of(state.on_python, state.part(8, 16, domain), 4) for domain in (0, 3)]
events = state.online([*parts[0], *parts[1]])
views.online_picture(events, "Found in a few batches; recall comes back, at the price of more experts.",
                     target=0.95, smooth=16, marks={len(parts[0]): "Chinese from here on"})

# %% tags=["predict"]
lesson.predict("alarm")

# %%
quiet, n = 0, 0
for domain in range(6):
    events = state.online(state.batches_of(state.predictors["gate-1"], state.part(8, 16, domain), 4))
    quiet, n = quiet + sum(e[0] == "drift" for e in events), n + sum(e[0] == "batch" for e in events)
there = [state.batches_of(state.predictors["gate-1"], state.part(8, 16, domain), 4) for domain in (0, 3)]
moved = [e for e in state.online([*there[0], *there[1]]) if e[0] == "drift"]
print(f"one domain at a time: {quiet} false alarms in {n:,} batches")
print(f"the gate, from Python to Chinese: {len(moved)} alarms")

# %% tags=["reveal"]
lesson.reveal("alarm", "yes" if moved else "no")

# %% [markdown]
# ## 7 · Easy in a batch · 3 min
#
# A batch needs an expert if any of its tokens does. The paper's B_acc is the recall of that union. The gate, two fetched per token, with 1 to 24 texts side by side:

# %%
rows = []
for size in (1, 2, 4, 8, 24):
    c = coverage(state.predictors["gate-1"], state.report, top(K), batches(state.report.routes, size))
    even = E * (1 - (1 - K / E) ** size)
    rows.append((size, even, c.needed, c.fetched, c.recall, c.precision, c.chance))
head = ["texts", "needed: formula", "needed", "fetched", "recall (B_acc)", "precision", "chance"]
views.table(head, rows, "The same forecast in every line. At 24 texts all is needed: chance is as good.")

# %% [markdown]
# ## 8 · Found, and faster? · 4 min
#
# Lesson 20's case on this lesson's texts: Mixtral-8x7B in q8_0, four slots per layer, LRU: 175 ms per token. Now the network looks ahead; two thirds of the hits become more than four fifths.
# What does that do to the time?

# %% tags=["predict"]
lesson.predict("faster")

# %%
keys = {"on demand": "", "gate, 1 ahead": "gate-1", "network": "network", "oracle": "oracle"}
runs = {f"{name}, {ran.hit_rate:.0%} hits": ran for name, key in keys.items() for ran in [state.run(key)]}
views.ledger_picture(runs, "The link is busy already. What it brings in vain, somebody else waits for.")

# %% tags=["reveal"]
demand, ahead = state.run(), state.run("network")
more = ahead.bytes_per_token / demand.bytes_per_token - 1
lesson.reveal("faster", "slower" if ahead.per_token > demand.per_token else "faster", ms=ahead.per_token,
              hits=f"{ahead.hit_rate:.0%}", more=f"{more:.0%}")

# %%
rows = []
for link in (1, 4, 8, 16, 32):
    times = [state.run(key, link=link).per_token for key in ("", "gate-1", "network", "oracle")]
    gain = f"{times[0] / times[2] - 1:+.0%}"
    rows.append((f"{25.2 * link:.0f} GB/s", f"{28.1 / link:.1f}", *times, gain))
head = ["link", "load / compute", "on demand, ms", "gate", "network", "oracle", "network gains"]
views.table(head, rows, "It pays in between: loads of a few computations, and a good forecast.")

# %% [markdown]
# All that with misses that wait for the link. They need not: the CPU can compute an expert where it lies (lesson 20). The same forecasts again, of one expert per layer, at the first link;
# slots hold the experts used most in other texts at the start, and the CPU is slower while the link copies out of its memory:

# %%
rows = [("hot set, no forecast", "", f"{state.beside_cpu().per_token:.1f}")]
shown = state.titled("gate-1", "non-linear-1", "oracle")
rows += [(name, *(f"{run(key).per_token:.1f}" for run in (state.run, state.beside_cpu)))
         for name, key in zip(shown, ("gate-1", "non-linear-1", "oracle"))]
views.table(["Mixtral-8x7B (q8_0)", "misses loaded, ms", "misses on the CPU, ms"], rows,
            "The same forecasts, in half of the time: what nobody waits for may be wrong.")

# %% [markdown]
# ## 9 · Your turn · 6 min
#
# **Tier 1.** Recall and precision of a forecast for some tokens.

# %% tags=["exercise", "tier-1"]
def recall_precision(fetched, used):
    """Two lists of sets of experts, one set per token. Returns (recall, precision) over all experts."""
    raise NotImplementedError

# %% tags=["solution"]
def recall_precision(fetched, used):
    """Two lists of sets of experts, one set per token. Returns (recall, precision) over all experts."""
    found = sum(len(f & u) for f, u in zip(fetched, used))
    return found / sum(map(len, used)), found / sum(map(len, fetched))

# %% tags=["wrong"]
def recall_precision(fetched, used):
    found = sum(len(f & u) for f, u in zip(fetched, used))
    return found / sum(map(len, fetched)), found / sum(map(len, used))

# %% tags=["wrong"]
def recall_precision(fetched, used):
    every = [(len(f & u) / len(u), len(f & u) / len(f)) for f, u in zip(fetched, used)]
    return tuple(float(np.mean(part)) for part in zip(*every))         # means of shares, not of experts

# %% tags=["check"]
some, p, choose = state.part(12, 13), state.predictors["gate-1"], state.calibrated("gate-1")
sets = lambda mask: [set(np.flatnonzero(row).tolist()) for row in mask]
on = [(sets(choose(p.scores(some, m), m)), sets(some.used(m))) for m in (1, 3, 5)]
expected = [(s.recall, s.precision) for s in evaluate(p, some, choose) if s.layer in (1, 3, 5)]
lesson.check("recall", recall_precision, expected, on, [f"layer {m}" for m in (1, 3, 5)])

# %% [markdown]
# **Tier 2.** Choose a threshold. For each expert that was used you have one number; it is fetched if the number is at least the threshold.

# %% tags=["exercise", "tier-2"]
def threshold(values, target):
    """The highest of the values that, as a threshold, lets at least a share `target` of them pass."""
    raise NotImplementedError

# %% tags=["solution"]
def threshold(values, target):
    """The highest of the values that, as a threshold, lets at least a share `target` of them pass."""
    wanted = math.ceil(target * len(values) - 1e-9)
    return sorted(values, reverse=True)[wanted - 1]

# %% tags=["wrong"]
def threshold(values, target):
    return sorted(values, reverse=True)[int(target * len(values)) - 1]        # a few too few

# %% tags=["wrong"]
def threshold(values, target):
    return float(np.quantile(values, 1 - target))                             # between two values

# %% tags=["check"]
p, warm = state.predictors["gate-1"], state.warm_up
scores = {m: p.scores(warm, m) for m in (1, 4)}
values = {m: (s - np.sort(s, 1)[:, -K, None])[warm.used(m)].tolist() for m, s in scores.items()}
cases = [(m, target) for m in (1, 4) for target in (0.813, 0.9501, 0.9999)]
on = [(values[m], target) for m, target in cases]
expected = [state.calibrated("gate-1", target).values[m] for m, target in cases]
lesson.check("threshold", threshold, expected, on, [f"layer {m}, target {target}" for m, target in cases])

# %% [markdown]
# **Tier 3.** Look ahead yourself: RMS norm with the weights of the layer to come, its router, the n best.

# %% tags=["exercise", "tier-3"]
def look_ahead(state_below, norm, router, eps, n):
    """state_below (D,): of the layer below; norm (D,), router (E, D): of this one. The n best ids."""
    raise NotImplementedError

# %% tags=["solution"]
def look_ahead(state_below, norm, router, eps, n):
    """state_below (D,): of the layer below; norm (D,), router (E, D): of this one. The n best ids."""
    x = state_below / np.sqrt(np.mean(state_below**2) + eps) * norm
    return np.argsort(-(router @ x), kind="stable")[:n].tolist()

# %% tags=["wrong"]
def look_ahead(state_below, norm, router, eps, n):
    return np.argsort(-(router @ state_below), kind="stable")[:n].tolist()    # without the norm's weights

# %% tags=["wrong"]
def look_ahead(state_below, norm, router, eps, n):
    x = state_below / np.sqrt(np.mean(state_below**2) + eps) * norm
    return np.argsort(router @ x, kind="stable")[:n].tolist()                 # the least likely

# %% tags=["check"]
some = state.part(12, 13, domain=1)
gates, cases = some.gates, [(layer, token, n) for layer in (2, 5) for token in (20, 77) for n in (2, 4)]
on = [(some.states[layer - 1, token], gates.norms[layer], gates.routers[layer], gates.eps, n)
      for layer, token, n in cases]
expected = [np.argsort(-state.predictors["gate-1"].scores(some, layer)[token], kind="stable")[:n].tolist()
            for layer, token, n in cases]
lesson.check("ahead", look_ahead, expected, on, [f"layer {a}, token {b}, {n} best" for a, b, n in cases])

# %% [markdown]
# ## 10 · What is what, and what comes next · 1 min
#
# | here | in the papers | left out here |
# |---|---|---|
# | `GateAhead` | speculative loading (Mixtral-offloading), gate look-ahead (HOBBIT, DAOP) | – |
# | `Network` | Routing Path Predictor (ExpertFlow): T5-like, width 32 | encoder and decoder; we use one causal block |
# | `PreviousToken`, `PreviousLayer` | TLP, SLP (ExpertFlow's baselines) | – |
# | `Shared` | the article's layer on the router's intermediate result; ProMoE's MLP per layer | – |
# | `coverage` | B_acc, which is recall alone | – |
# | `calibrate`, `recalibrate` | the article's calibration and cold start | – |
# | `timing.simulate` with a forecast | – | several requests at once |
# | misses on the CPU | Fiddler, HybriMoE | – |
#
# **Next, 22:** forecasts are one thing; which expert gives its slot up for them is the other.
