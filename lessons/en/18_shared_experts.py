# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 18 · Shared experts
#
# **50 minutes** · before it: 16, top-k MoE, and 17, load balancing · after it: 19, moving only the used experts
#
# Some of what a layer does, every token needs. DeepSeek's layers give it to *shared experts* that no router chooses, and split the rest into many small
# experts. This lesson takes such a layer apart: the tiny DeepSeek, with 16 experts of which 4 are used, and one shared.
#
# The article that this course started from names three advantages: less redundancy, general patterns in one place, and a safety net for wrong routes. We
# measure each. Each section needs only the cell below.

# %% tags=["setup"]
import numpy as np

from workbench import lessons, moe, views, widgets

lesson = lessons.open_lesson("18")
state = lesson.state

# %% [markdown]
# ## 1 · DeepSeek's form · 6 min
#
# Layer 4 of the tiny DeepSeek over 64 tokens of English. How does the router take part in using the shared expert?

# %% tags=["predict"]
lesson.predict("chosen")

# %%
run = state.form(layer=4)
rows = [(t.name.removesuffix("-4"), t.desc, " × ".join(map(str, t.ne[:3])),
         ", ".join(s.name.removesuffix("-4") for s in t.src if s is not None))
        for t in run.graph.nodes if t.desc not in ("VIEW", "RESHAPE")]
views.table(["node", "op", "ne", "sources"], rows, "The layer as llama.cpp builds it, views left out.")

# %% tags=["reveal"]
nodes = {t.name: t for t in run.graph.nodes}

def needs(t):
    return {t.name}.union(*(needs(s) for s in t.src if s is not None))

routed_too = "ffn_moe_logits-4" in needs(nodes["ffn_shexp-4"])
products = [t.desc for t in run.graph.nodes].count("MUL_MAT_ID")
lesson.reveal("chosen", "router" if routed_too else "not", products=products)

# %% [markdown]
# So it is the plain network of lesson 04, beside a routed layer, and one addition. Three checks, computed: the parts add up; the shared part is that of the
# network alone; and with the routed part times zero, only it is left.

# %%
run, alone, none = state.form(layer=4), state.shared_alone(4), state.form(layer=4, routed=0.0)
pairs = (run.routed + run.shared, run.out), (alone, run.shared), (none.out, alone)
differ = [np.abs(a - b).max() for a, b in pairs]
assert max(differ) < 1e-5
views.table(["claim", "largest difference"], [
    ("out = routed + shared", f"{differ[0]:g}"), ("shared = the plain network alone", f"{differ[1]:g}"),
    ("routed · 0 + shared = the plain network", f"{differ[2]:g}")], "The same numbers, bit for bit.")

# %% [markdown]
# Several shared experts are one wider network: their hidden units side by side. A file holds one matrix for all of them. That is why a config says
# `n_shared_experts: 2`, and the graph has one `ffn_shexp`.
#
# ## 2 · What it costs, what it weighs · 5 min
#
# How much of the layer's answer comes from the shared expert? And what do the routed weights sum to?

# %%
runs, rows = {layer: state.form(layer) for layer in (1, 2, 3, 4)}, []
for layer, r in runs.items():
    sizes = [np.linalg.norm(part, axis=1).mean() for part in (r.routed, r.shared)]
    sums = r.weights.sum(1)
    rows.append((layer, f"{sizes[0]:.1f}", f"{sizes[1]:.1f}", f"{sums.min():.2f} to {sums.max():.2f}"))
views.table(["layer", "mean length of routed part", "of shared part", "routed weights sum to"], rows,
            "One always-on expert of the same size as four chosen ones: the smaller part of the answer.")

# %% [markdown]
# > **Erratum.** The article writes the routed part "as in the standard sparse layer", with soft max over the chosen, so weights that sum to one. DeepSeek
# > never did that. V1 and V2 take probabilities as they are, times 16 in V2; V3 divides by the sum and multiplies by 2.5.

# %%
rows = []
for name in ("DeepSeekMoE-16B", "DeepSeek-V2", "DeepSeek-V3"):
    m = moe.configs.model(name)
    said = "depends on the token" if m.router.weight_sum is None else f"{m.router.weight_sum:g}"
    rows.append((name, m.f_shared // m.f, f"{m.router.n_used} of {m.router.n_expert}",
                 f"{m.router.scale:g}", said, f"{m.total / 1e9:.1f}", f"{m.active / 1e9:.1f}"))
views.table(["model", "shared", "routed", "scale", "weights sum to", "total, B", "active, B"], rows,
            "Shared experts are few; they are always active, so always resident where the token is.")

# %% [markdown]
# Qwen puts a *gate* on the shared expert: one more row of weights g, and the shared part counts sigmoid(g · x). llama.cpp builds the sigmoid as silu(z) /
# z, which is the same number. Take g small, and the gate is near one half. What if g · x is exactly 0?

# %% tags=["predict"]
lesson.predict("gate")

# %%
rows, three, full = [], [2, 5, 8], np.linalg.norm(state.form(4).shared, axis=1)
gates = {"no gate": None, "g = 0.3 at one place": 0.3 * np.eye(128)[7], "g tiny": np.full(128, 1e-4),
         "g = 0": np.zeros(128)}
for name, g in gates.items():
    with np.errstate(all="ignore"):
        part = np.linalg.norm(state.form(4, gate=g).shared, axis=1) / full
    rows.append((name, *(f"{v:.2f}" for v in part[three])))
words = state.words(state.text())
views.table(["gate", *(repr(words[t]) for t in three)], rows,
            "How much the shared expert counts, for three tokens.")

# %% tags=["reveal"]
share = float(part[2])
lesson.reveal("gate", "nan" if np.isnan(share) else "half" if share == 0.5 else "zero")

# %% [markdown]
# ## 3 · Groups · 8 min
#
# With 256 experts on many machines, a token whose eight experts lie on eight machines costs eight messages. So experts stand in groups, a machine each,
# and a token may use only a few groups. V2 values a group by its best expert, V3 by its two best together. Four groups of four, two of them allowed. Token
# ‘ 14’ of our text:

# %%
t, run = 2, state.form(4)
p = run.scores[t]
rows = [(g, ", ".join(f"{v:.3f}" for v in q), f"{q.max():.3f}", f"{np.sort(q)[-2:].sum():.3f}")
        for g, q in enumerate(p.reshape(4, 4))]
views.table(["group", "probabilities of its experts", "best", "two best together"], rows,
            "Which two groups stay depends on how a group is valued.")

# %% [markdown]
# For how many of the 64 tokens do V2's and V3's way pick different experts?

# %% tags=["predict"]
lesson.predict("groups")

# %%
ways = {"no groups": {}, "V2: best expert": dict(n_groups=4, n_groups_used=2, group_best=1),
        "V3: two best": dict(n_groups=4, n_groups_used=2, group_best=2)}
routers = {name: moe.Router(16, 4, normalise=False, **kw) for name, kw in ways.items()}
runs = {name: state.form(4, router) for name, router in routers.items()}
sets = {name: [frozenset(row) for row in r.experts.tolist()] for name, r in runs.items()}
assert all(len({e // 4 for e in row}) <= 2 for name in list(ways)[1:] for row in sets[name])
changed = {name: sum(a != b for a, b in zip(s, sets["no groups"])) for name, s in sets.items()}
rows = [(name, ", ".join(map(str, sorted(sets[name][2]))), changed[name],
         f"{np.mean([len({e // 4 for e in row}) for row in sets[name]]):.1f}",
         f"{r.weights.sum(1).mean():.2f}") for name, r in runs.items()]
heads = ["experts of ‘ 14’", "tokens changed by groups", "groups per token", "mean sum of weights"]
views.table(["way", *heads], rows,
            "This model was trained without groups, so most tokens lose an expert by them.")

# %% tags=["reveal"]
differ = sum(a != b for a, b in zip(sets["V2: best expert"], sets["V3: two best"]))
lesson.reveal("groups", differ, changed=changed["V2: best expert"])

# %% [markdown]
# Step through the choice for ‘ 14’, first V3's way; then set `group_best` to 1.

# %%
group_best, p = 2, state.form(4).scores[2]
router = moe.Router(16, 4, normalise=False, n_groups=4, n_groups_used=2, group_best=group_best)
steps = views.group_steps(p, 4, 2, group_best, 4, title="‘ 14’: groups, then experts")
assert [e for e, _, _ in steps["steps"][-2]["marks"]] == state.form(4, router).experts[2].tolist()
widgets.Stepper(steps, "First groups, then experts: a good expert in a weak group has no chance.")

# %% [markdown]
# Masking has a pitfall. The scores of other groups must become −∞, not 0: with a selection bias (next section) scores may be negative, and an expert with 0
# in a group that is *out* would win. Both forms exist in published code; ours and llama.cpp's use −∞.
#
# ## 4 · Sigmoid and bias · 6 min
#
# DeepSeek-V3's router, in one line each: s = sigmoid(z), each expert for itself; choose by s + b, in groups; weights = 2.5 · s / Σ s of the chosen. The
# bias b is that of lesson 17. We give expert 9 a bias of 0.3. What happens to the *sum* of the weights of a token that now gets expert 9?

# %% tags=["predict"]
lesson.predict("sum")

# %%
v3, bias = moe.presets.deepseek_v3(16, 4, 4, 2), 0.3 * np.eye(16)[9]
before, after = state.form(4, v3), state.form(4, v3, bias=bias)
use = [(r.experts == 9).any(1) for r in (before, after)]
new = np.flatnonzero(use[1] & ~use[0])
for r in (before, after):
    assert np.allclose(r.weights.sum(1), v3.weight_sum, rtol=1e-5)
words = state.words(state.text())
rows = [(repr(words[t]), *(", ".join(map(str, r.experts[t])) for r in (before, after)),
         f"{after.scores[t, 9]:.3f}", f"{after.weights[t][after.experts[t] == 9][0]:.3f}") for t in new]
views.table(["token", "experts before", "with the bias", "s of expert 9", "its weight"], rows,
            f"Tokens with expert 9: {use[0].sum()} of 64 before, {use[1].sum()} with the bias.")

# %% tags=["reveal"]
sums = after.weights[new].sum(1)
lesson.reveal("sum", "same" if np.allclose(sums, 2.5, rtol=1e-5) else "more", said=f"{sums.mean():.1f}")

# %% [markdown]
# Why a sigmoid? In a soft max the scores of 256 experts share one unit: raising one lowers all. A sigmoid scores each expert alone, and so a bias of a fixed
# size means the same for every token. The price: the scores say nothing about each other, so they have to be divided by their sum.
#
# ## 5 · Are experts redundant? · 8 min
#
# The first claim: without shared experts, the routed ones learn the same common things several times over. Compare two experts by their weights first. What is the
# cosine between the weights of two experts of one layer of the tiny Mixtral, which has no shared expert?

# %% tags=["predict"]
lesson.predict("weights")

# %%
models = {"tiny Mixtral, none shared": state.mixtral, "tiny DeepSeek, one shared": state}
rows, flats, answers = [], [], {}
for name, m in models.items():
    for layer in m.model.hparams.moe_layers:
        experts = m.model.experts(layer)
        units = state.units(experts)
        answers[name, layer] = state.similarity(state.answers(m.hidden[layer], experts))
        flat = state.similarity(units.reshape(len(units), -1))
        flats.append(flat)
        rows.append((name, layer, f"{flat:.3f}", f"{state.matched(units):.2f}",
                     f"{state.by_chance(units[:4]):.2f}", f"{answers[name, layer]:.2f}"))
views.table(["model", "layer", "weights", "units, matched", "by chance", "answers"], rows,
            "Mean cosine between two experts of a layer, by weights and by what they answer.")

# %% tags=["reveal"]
largest = max(flats)
lesson.reveal("weights", "none" if largest < 0.05 else "much", largest=f"{largest:.3f}",
              answers=f"{max(answers.values()):.2f}")

# %% [markdown]
# *Matched* pairs each hidden unit with its most similar one in the other expert; *answers* compares results for the same 64 tokens. By these, the
# experts of both models have little in common. The models differ in more than the shared expert (16 small experts of 96 units, 8 of 160), so this is
# no test of the claim. For that, train the same layer twice: eight experts, one used, on clusters whose maps are to 90% the same.

# %%
trained = {name: state.trained(shared) for name, shared in (("none shared", False), ("one shared", True))}
tokens = trained["none shared"].task.batch(np.random.default_rng(5), 512)[0]
rows = [(name, f"{state.similarity(state.answers(tokens, m.experts)):.2f}", f"{m.test()['loss']:.2f}",
         int(m.flops_per_token())) for name, m in trained.items()]
views.table(["trained just now", "similarity of answers", "loss", "operations per token"], rows,
            "One seed: less alike, and a lower loss, for nearly twice the operations.")

# %% [markdown]
# And five seeds of each, recorded (`models/tools/measure_redundancy.py`), for tasks with nothing, half and 90% in common:

# %%
rows = [(f"{r['common']:.0%}", r["network"], f"{np.median(r['similarity']):.3f}",
         f"{min(r['similarity']):.2f} to {max(r['similarity']):.2f}", f"{np.median(r['chosen']):.2f}")
        for r in state.redundancy]
views.table(["in common", "network", "similarity, median", "range", "loss"], rows,
            "More in common makes experts more alike; what a shared expert changes about it is small.")

# %% [markdown]
# Read it strictly. Up to 50% in common a shared expert changes nothing that five seeds could show. At 90% the median of top-2 experts falls by a third, that
# of top-1 experts hardly, and the ranges overlap in both. And at equal operations "2 of 8" has a lower loss than "1 of 8 and a shared one". The claim has the
# right direction here where nearly everything is common, and a small effect.
#
# ## 6 · Wrong routes · 6 min
#
# The third claim: even if the router errs, shared experts keep a basic ability. Replace all chosen experts by random ones, with the weights of the chosen. Which
# way is worst for the tiny DeepSeek?

# %% tags=["predict"]
lesson.predict("random")

# %%
kinds = ["chosen", "random", "none"]
models = {"tiny Mixtral": state.mixtral.model, "tiny DeepSeek": state.model}
found = {name: [state.loss_with_routes(m, kind) for kind in kinds] for name, m in models.items()}
rows = [(name, *(f"{v:.2f}" for v in nats), f"{nats[1] - nats[0]:+.1f}") for name, nats in found.items()]
views.table(["192 tokens of English", "chosen", "random", "no routed experts", "random − chosen"], rows,
            "Loss in nats per token. A model that knows nothing has ln 2048 = 7.62.")

# %%
one, other = (state.random_routes[f"tiny-{name}-f16"] for name in ("mixtral", "deepseek"))
rows = [(kind, *(f"{np.mean(d[kind]['random']) - d[kind]['chosen']:+.1f}" for d in (one, other)),
         f"{other[kind]['none'] - other[kind]['chosen']:+.1f}") for kind in one]
views.table(["text", "tiny Mixtral, random", "tiny DeepSeek, random", "tiny DeepSeek, none routed"], rows,
            "Recorded, 256 tokens of each kind, three draws: nats per token more than with the chosen.")

# %% tags=["reveal"]
ds = found["tiny DeepSeek"]
mixtral = f"{found['tiny Mixtral'][1]:.2f}"
worst, random, none = kinds[int(np.argmax(ds))], f"{ds[1]:.2f}", f"{ds[2]:.2f}"
lesson.reveal("random", worst, random=random, none=none, mixtral=mixtral)

# %% [markdown]
# Is that the shared expert's doing? The DeepSeek also has a dense first layer, and weights below one, so wrong experts do less harm. The small
# layers of section 5 differ in nothing but the shared expert. Loss with the right and with random experts; 1 is what answering zero gives:

# %%
rows = [(f"{r['common']:.0%}", r["network"], f"{np.median(r['chosen']):.2f}",
         f"{np.median(r['random']):.1f}", "yes" if np.median(r["random"]) < 1 else "no")
        for r in state.redundancy]
views.table(["in common", "network", "chosen", "random", "better than answering zero?"], rows,
            "Medians of five seeds: a shared expert softens wrong routes, and is no safety net.")

# %% [markdown]
# So the claim is half true. In each pair wrong routes cost less with a shared expert. In the language model much is left, for more than one reason; in the
# small layers it is worse than to answer nothing. Routed experts are trained as a correction *to the shared one, for their tokens*: for other tokens they
# add noise on top of it.
#
# ## 7 · How many shared? · 3 min
#
# Move the sliders; each move runs layer 4. One shared expert is as trained. With more, the routed experts most used by this text are
# *promoted*: always on, with the mean weight they had.

# %%
truth = state.form(4)

def what_if(n_shared, k):
    run = state.form(4, moe.Router(16, k, normalise=False), shared=state.promoted(n_shared))
    away = np.linalg.norm(run.out - truth.out) / np.linalg.norm(truth.out)
    distinct = len(set(run.experts.ravel().tolist()))
    flops = sum(t.spec.flops(t) for t in run.graph.nodes if t.op in ("MUL_MAT", "MUL_MAT_ID")) / 64
    return views.table(["", "value"], [
        ("always on and chosen experts per token", n_shared + k), ("operations per token", int(flops)),
        ("experts that the 64 tokens read", n_shared + distinct),
        ("of these, known before the router ran", n_shared),
        ("distance of the result from the trained layer's", f"{away:.0%}")], "The layer, run again.")

knobs = [["shared experts", 0, 5, []], ["chosen experts per token, k", 1, 8, []]]
widgets.Knobs(knobs=knobs, values=[1, 4]).drive(what_if)

# %% [markdown]
# Promoting a popular expert is no way to get a shared one: it was trained for its tokens. But see the fourth line: what is always on can be loaded before any
# router ran, and never misses a cache. Lessons 20 to 22 live on that.
#
# ## 8 · Your turn · 7 min
#
# **Tier 1.** Which parameters of such a layer does one token use? Count matrices of experts and the router.

# %% tags=["exercise", "tier-1"]
def active(d, f, n_expert, k, n_shared):
    """Width d, experts of width f, three matrices each. Returns the parameters that one token uses."""
    raise NotImplementedError

# %% tags=["solution"]
def active(d, f, n_expert, k, n_shared):
    """Width d, experts of width f, three matrices each. Returns the parameters that one token uses."""
    return 3 * d * f * (k + n_shared) + d * n_expert

# %% tags=["wrong"]
def active(d, f, n_expert, k, n_shared):
    return 3 * d * f * k + d * n_expert

# %% tags=["wrong"]
def active(d, f, n_expert, k, n_shared):
    return 3 * d * f * (k + n_shared) + d * k

# %% tags=["check"]
on = [(128, 96, 16, 4, 1), (128, 160, 8, 2, 0), (5120, 1536, 160, 6, 2), (7168, 2048, 256, 8, 1)]
lesson.check("active", active, [state.active_parameters(*case) for case in on], on)

# %% [markdown]
# **Tier 2.** Choose in groups. Your answer is judged by the graph.

# %% tags=["exercise", "tier-2"]
def choose(p, n_groups, n_used, group_best, k):
    """p (E,). Returns the k chosen experts, best first; a group is worth its group_best best together."""
    raise NotImplementedError

# %% tags=["solution"]
def choose(p, n_groups, n_used, group_best, k):
    """p (E,). Returns the k chosen experts, best first; a group is worth its group_best best together."""
    groups = p.reshape(n_groups, -1)
    value = np.sort(groups, axis=1)[:, -group_best:].sum(1)
    masked = np.full(groups.shape, -np.inf)
    stay = np.argsort(-value)[:n_used]
    masked[stay] = groups[stay]
    return np.argsort(-masked.ravel())[:k].tolist()

# %% tags=["wrong"]
def choose(p, n_groups, n_used, group_best, k):
    groups = p.reshape(n_groups, -1)
    masked = np.full(groups.shape, -np.inf)
    stay = np.argsort(-groups.max(1))[:n_used]
    masked[stay] = groups[stay]
    return np.argsort(-masked.ravel())[:k].tolist()

# %% tags=["wrong"]
def choose(p, n_groups, n_used, group_best, k):
    return np.argsort(-p)[:k].tolist()

# %% tags=["check"]
on, expected, names = [], [], []
for best in (1, 2):
    run = state.form(4, moe.Router(16, 4, normalise=False, n_groups=4, n_groups_used=2, group_best=best))
    for t in (2, 5, 15):
        on.append((run.scores[t].astype(float), 4, 2, best, 4))
        expected.append(run.experts[t].tolist())
        names.append(f"token {t}, a group's best {best}")
lesson.check("choose", choose, expected, on, names)

# %% [markdown]
# **Tier 3.** DeepSeek-V3's weights, from the logits of a token, for chosen experts that are given.

# %% tags=["exercise", "tier-3"]
def weigh(z, bias, k, scale):
    """z, bias (E,). Returns (experts, weights): chosen by s + bias, weights summing to scale."""
    raise NotImplementedError

# %% tags=["solution"]
def weigh(z, bias, k, scale):
    """z, bias (E,). Returns (experts, weights): chosen by s + bias, weights summing to scale."""
    s = 1 / (1 + np.exp(-z))
    chosen = np.argsort(-(s + bias))[:k]
    return chosen, scale * s[chosen] / s[chosen].sum()

# %% tags=["wrong"]
def weigh(z, bias, k, scale):
    s = 1 / (1 + np.exp(-z)) + bias
    chosen = np.argsort(-s)[:k]
    return chosen, scale * s[chosen] / s[chosen].sum()

# %% tags=["wrong"]
def weigh(z, bias, k, scale):
    s = 1 / (1 + np.exp(-z))
    chosen = np.argsort(-(s + bias))[:k]
    return chosen, scale * s[chosen]

# %% tags=["check"]
on, expected, answer = [], [], lambda *case: np.concatenate(weigh(*case))
for seed, scale in ((0, 2.5), (1, 1.0), (2, 2.5)):
    z, b = np.random.default_rng([18, seed]).standard_normal((2, 16))
    on.append((z, 0.3 * b, 4, scale))
    router = moe.Router(16, 4, "sigmoid", True, scale)
    expected.append(np.concatenate(moe.reference.weigh(z, router, 0.3 * b)))
lesson.check("weigh", answer, expected, on, [f"case {i}: experts, then weights" for i in range(3)])

# %% [markdown]
# ## 9 · Names · 1 min
#
# | here | elsewhere | left out |
# |---|---|---|
# | `ExpertWeights.shared`, `build_shared` | `ffn_*_shexp`, `build_ffn` in llama.cpp; `shared_experts` | several shared networks side by side: one wide one |
# | `shared_gate` | `ffn_gate_inp_shexp`; `shared_expert_gate` (Qwen2-MoE) | |
# | `n_groups`, `n_groups_used`, `group_best` | `n_expert_groups`, `n_group_used`; `n_group`, `topk_group`; "device-limited" in V2's paper | machines: groups are only numbers here |
# | `selection_bias` | `exp_probs_b`; `e_score_correction_bias` | |
# | `scale` | `expert_weights_scale`; `routed_scaling_factor` | |
# | `losses_with_routes` | | a router that errs a little: ours errs always |
#
# **Next**: 19 goes back to the scheduler. Which experts are used is known only after the router ran, and only those bytes have to move.
