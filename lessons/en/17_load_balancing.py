# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 17 · Load balancing
#
# **50 minutes** · before it: 16, top-k MoE · after it: 18, shared experts
#
# The router of lesson 16 had an even load over many texts. Nobody wrote that into it: it was *trained* that way. This lesson trains a small layer
# with and without what makes loads even, here and now, and asks what evenness costs.
#
# Afterwards you can read the balance measures of a training log, say what the auxiliary loss sees and what it does not, tell three remedies
# apart, and estimate what a capacity factor drops. Each section needs only the cell below.

# %% tags=["setup"]
import numpy as np

from workbench import lessons, moe, views, widgets

lesson = lessons.open_lesson("17")
state, balance = lesson.state, moe.balance

# %% [markdown]
# ## 1 · What even means · 4 min
#
# 128 choices for eight experts, in five ways. Four numbers describe a load: its *entropy* (over that of an even load), its *coefficient of variation*,
# *MaxVio* (how far the fullest expert is above the mean), and the share *dropped* if each expert has room for 1.25 times its fair share.

# %%
loads = {"even": [16] * 8, "one busy": [44] + [12] * 7, "one idle": [18] * 6 + [20, 0],
         "two of eight": [64, 64] + [0] * 6, "one of eight": [128] + [0] * 7}
measures = balance.load_entropy, balance.variation, balance.max_violation
rows = [(name, *(f"{f(c) + 0.0:.2f}" for f in measures),
         f"{balance.dropped_fraction(c, 20):.0%}") for name, c in loads.items()]
views.table(["load", "entropy", "variation", "MaxVio", "dropped at 1.25"], rows,
            "An idle expert hardly shows in MaxVio, a busy one hardly in the entropy: read both.")

# %% [markdown]
# MaxVio is what a machine feels. If each expert sits on a device of its own, the layer takes as long as the fullest one: 1 + MaxVio times
# as long as needed. Entropy tells how many experts take part at all.
#
# ## 2 · Left alone · 6 min
#
# The task: tokens come from eight clusters, and each cluster wants a linear map of its own. Eight small experts, one used per token, a router,
# AdamW. The only loss is the mean square of the error; 1 is what a layer that answers zero has. Every cluster is equally frequent.

# %% tags=["predict"]
lesson.predict("alone")

# %% [markdown]
# Now train it: 400 steps of 256 tokens, a second or two. Step through what the router did; `n` jumps to the next expert that starves.

# %%
alone = state.trained("none", seed=3)
steps = views.training_steps(alone.counts, 20, title="Load while training, no remedy")
widgets.Stepper(steps, "In percent of the choices, 20 steps to a column; 12.5% would be fair.")

# %%
load = alone.load()                                      # of the last 50 steps
assert load.sum() == 50 * 256
views.table(["measure", "value"], [
    ("choices of the fullest expert", f"{load.max() / load.sum():.0%}"),
    ("experts below a tenth of their share", int((load < load.mean() / 10).sum())),
    ("entropy", f"{balance.load_entropy(load):.2f}"), ("MaxVio", f"{balance.max_violation(load):.1f}"),
    ("loss of the task, from 1", f"{np.mean(alone.losses[-50:]):.1f}")],
    "The load after 400 steps, and the loss.")

# %% tags=["reveal"]
share, starved = load.max() / load.sum(), int((load < load.mean() / 10).sum())
lesson.reveal("alone", "one" if share > 0.9 else "starved" if starved else "even", starved=starved,
              share=f"{share:.0%}")

# %% [markdown]
# That was one seed. The same, recorded with ten (`models/tools/train_toy_moe.py`):

# %%
rows = [(i, f"{r['max violation']:.1f}", f"{r['least over mean']:.2f}", f"{r['entropy']:.2f}")
        for i, r in enumerate(state.runs["none"])]
assert all(r["max violation"] > 0.5 for r in state.runs["none"])
views.table(["seed", "MaxVio", "least loaded, of its share", "entropy"], rows,
            "Uneven in all ten. In none of them does one expert take everything.")

# %% [markdown]
# "Collapse" in papers often means that one or two experts take all. That is the far end; with a task in which experts help, strong imbalance with
# some starved experts is what one sees here. Section 7 asks what a real model does.
#
# ## 3 · What the loss sees · 7 min
#
# Switch's remedy is one more term in the loss: E · Σ fₑ · Pₑ. fₑ is expert e's share of the choices, Pₑ its mean probability. For logits drawn at
# random, with a liking for expert 1, by hand and by the graph:

# %%
logits = np.random.default_rng(17).standard_normal((64, 8)) + 0.5 * (np.arange(8) == 1)
run = state.losses_of(logits)
f, p = run.counts / run.counts.sum(), run.probs.mean(0)
views.Stack(views.table(["expert", *map(str, range(8))], [
    ("share of choices, f", *(f"{v:.2f}" for v in f)), ("mean probability, P", *(f"{v:.2f}" for v in p)),
    ("8 · f · P", *(f"{v:.2f}" for v in 8 * f * p))], "Many tokens and a high probability cost most."),
    views.side_by_side([("sum of the last row", (8 * f * p).sum(), run.balance)], ("by hand", "graph")))

# %% [markdown]
# It is 1 where all is even, 8 where one expert of eight gets everything with certainty. Now a router that is new and knows nothing: *all logits
# are 0*. Ties go to the lowest number, so expert 0 gets all 64 tokens. What does the loss say?

# %% tags=["predict"]
lesson.predict("ties")

# %%
hard = 5.0 * (np.arange(64)[:, None] % 8 == np.arange(8))        # each token sure of its expert
cases = {"sure, all experts used alike": hard, "all logits 0": np.zeros((64, 8)),
         "all a little for expert 2": 0.1 * np.tile(np.arange(8) == 2, (64, 1)),
         "all sure of expert 2": 5.0 * np.tile(np.arange(8) == 2, (64, 1))}
seen = {name: state.losses_of(z) for name, z in cases.items()}
rows = [(name, f"{s.balance:.3f}", f"{balance.max_violation(s.counts):.0f}",
         f"{np.abs(s.slopes).max():.4f}") for name, s in seen.items()]
views.table(["router", "loss", "MaxVio", "largest slope for a logit"], rows,
            "The value of the loss and the load are not the same thing.")

# %% tags=["reveal"]
zero = seen["all logits 0"]
lesson.reveal("ties", round(zero.balance, 3), fullest=int(zero.counts.max()))

# %% [markdown]
# A count has no slope: moving a logit a little changes nobody's choice. So f is a constant for the gradient, and what can move is P. By hand, the
# slope for logit e of token t is E/T · pₜₑ · (fₑ − Σⱼ pₜⱼ fⱼ): probability is taken from experts that are chosen more often than others. Predicted
# by this formula, and executed by a backward graph:

# %%
logits = np.random.default_rng(17).standard_normal((64, 8)) + 0.5 * (np.arange(8) == 1)
run = state.losses_of(logits)
f = run.counts / run.counts.sum()
slopes = 8 / 64 * run.probs * (f - run.probs @ f[:, None])
assert np.allclose(slopes, run.slopes, atol=1e-6)
views.side_by_side([(f"token 0, expert {e} with {f[e]:.0%} of all", slopes[0, e], run.slopes[0, e])
                    for e in np.argsort(-f)[[0, 1, -2, -1]]], ("formula", "backward graph"),
                   "Positive slope: the logit is pushed down. The fullest expert is pushed hardest.")

# %% [markdown]
# The last row of the table before says something too: the slope is smallest where the router is surest. The loss is best at keeping a load even from the
# start; it is slow to repair one that is lost.
#
# ## 4 · With and without · 7 min
#
# Three remedies. The *load-balancing loss*, times 0.2 here (Switch takes 0.01 in a network with many layers). The *z-loss*, the mean of (log Σ exp
# z)², times 0.001 (ST-MoE). A *selection bias* (DeepSeek-V3): after each step, experts below the mean load get 0.01 more, those above 0.01 less. Which of
# the three do *not* make the load even?

# %% tags=["predict"]
lesson.predict("remedies")

# %%
names = ["none", "load-balancing loss", "z-loss", "selection bias"]
trained = {name: state.trained(name, seed=3) for name in names}              # the same start and batches
curves = {name: [[balance.max_violation(c) for c in np.reshape(m.counts, (40, 10, 8)).sum(1)]]
          for name, m in trained.items()}
views.curves_picture({"ten steps to a point": curves},
                     "Two of the four curves stay near zero.",
                     "MaxVio over 400 steps for four runs. Without a remedy and with the z-loss it grows "
                     "above 2; with the load-balancing loss or the selection bias it stays below 1.",
                     ylabel="MaxVio", every=10, log=False)

# %%
rows = [(name, f"{balance.max_violation(m.load()):.1f}", int((m.load() < m.load().mean() / 10).sum()),
         f"{np.mean(m.losses[-50:]):.1f}") for name, m in trained.items()]
views.table(["remedy", "MaxVio, last 50 steps", "starved experts", "loss of the task"], rows,
            "One seed, trained just now: imbalance without a remedy, none with the right one.")

# %% [markdown]
# And ten seeds, recorded. The last column is what the z-loss is for: it keeps logits small, so that exponentials of f16 or bf16 do not round badly.

# %%
def middle(name, what):
    return float(np.median([r[what] for r in state.runs[name]]))

even = {name: sum(r["max violation"] < 0.5 for r in state.runs[name]) for name in names}
rows = [(name, f"{even[name]} of 10", f"{middle(name, 'max violation'):.2f}",
         f"{middle(name, 'dropped at 1.25'):.0%}", f"{middle(name, 'loss'):.2f}",
         f"{middle(name, 'mean square of log sum exp'):.0f}") for name in names]
heads = ["seeds with MaxVio < 0.5", "MaxVio", "dropped at 1.25", "loss", "(log Σ exp z)²"]
views.table(["remedy", *heads], rows, "Medians of ten seeds.")

# %% tags=["reveal"]
uneven = [name for name in names[1:] if even[name] < 5]
none, aux, _, bias = (f"{middle(name, 'loss'):.2f}" for name in names)
lesson.reveal("remedies", ", ".join(uneven), none=none, aux=aux, bias=bias)

# %% [markdown]
# Turn the knobs. Each move trains a smaller layer anew, four experts and 20 steps. With a capacity, choices beyond it would be dropped.

# %%
weights, factors = [0, 0.03, 0.1, 0.3, 1.0, 3.0], [1.0, 1.25, 2.0]

def what_if(aux, z, f):
    model = state.small(weights[aux], weights[z])
    load, capacity = model.load(5), round(factors[f] * 5 * 64 / 4)
    taken = np.minimum(load, capacity)
    text = (f"MaxVio {balance.max_violation(load):.1f}; dropped {1 - taken.sum() / load.sum():.0%}; "
            f"loss of the task {np.mean(model.losses[-5:]):.1f}. Choices of the last 5 steps.")
    return views.load_table(taken, load - taken, capacity, text)

said = [str(w) for w in weights]
knobs = [["load-balancing loss, times", 0, 5, said], ["z-loss, times", 0, 5, said],
         ["capacity factor", 0, 2, [str(f) for f in factors]]]
widgets.Knobs(knobs=knobs, values=[0, 0, 1]).drive(what_if)

# %% [markdown]
# ## 5 · A bias in place of a loss · 4 min
#
# The bias is added to the scores that experts are *chosen* by. In training, what does it change about the weights?

# %% tags=["predict"]
lesson.predict("bias")

# %%
logits = np.array([[2.0, 1.5, 0.5, 0.0]])
router, p = moe.Router(4, 2, normalise=False), moe.reference.softmax([2.0, 1.5, 0.5, 0.0])
rows, kept = [], None
for bias in ([0, 0, 0, 0], [0, 0, 0, 0.1], [0, 0, 0, 0.4]):
    ids, w = moe.reference.weigh(logits[0], router, np.array(bias))
    assert np.allclose(w, p[ids])                        # the probabilities, whatever the bias
    rows.append((str(bias[3]), ", ".join(f"{v:.2f}" for v in p + bias), f"{ids[0]}, {ids[1]}",
                 f"{w[0]:.2f}, {w[1]:.2f}"))
views.table(["bias of expert 3", "scores to choose by", "chosen", "weights"], rows,
            "One token, top 2 of 4: expert 3 gets in by its bias.")

# %% tags=["reveal"]
lesson.reveal("bias", "choice", weight=f"{p[3]:.2f}")

# %% [markdown]
# No gradient, no second aim that pulls at the router: only a number per expert that is moved after each step. What the layer of section 4
# ended with, beside what the paper printed (Wang et al. 2024, arXiv 2408.15664, Table 2; MaxVio over a whole validation set):

# %%
model = state.trained("selection bias", seed=3)
views.Stack(views.table(["expert", *map(str, range(8))], [
    ("bias", *(f"{b:+.1f}" for b in np.round(model.selection_bias, 1) + 0.0))], "Up for the unpopular."),
    views.table(["published", "MaxVio: loss", "bias", "perplexity: loss", "bias"], [
        ("1B parameters, 100B tokens", "0.72", "0.04", "9.56", "9.50"),
        ("3B parameters, 200B tokens", "0.52", "0.04", "7.97", "7.92"),
        ("ours, medians", *(f"{middle_of:.2f}" for middle_of in (
            np.median([r["max violation"] for r in state.runs[n]])
            for n in ("load-balancing loss", "selection bias"))), "", "")],
        "The same order everywhere: a bias balances more tightly than a loss does."))

# %% [markdown]
# ## 6 · What dropping costs · 6 min
#
# Now a real model: the tiny Mixtral, trained with a balancing loss, 0.06 · E Σ f P. We give each of its experts a capacity of 1.25 times the fair share
# and run two texts of 192 tokens: one all English, one with 32 tokens of each of six kinds. Which loses more by it?

# %% tags=["predict"]
lesson.predict("dropping")

# %%
texts = {"English": state.text(192), "six kinds": state.mixed(32)}
factors = [None, 2.0, 1.25, 1.0, 0.5]
costs = {(name, f): state.loss_with_capacity(text, f) for name, text in texts.items() for f in factors}
rows = [(str(f or "no limit"), *(cell for name in texts for cell in (
    f"{costs[name, f][1]:.0%}", f"{costs[name, f][0] - costs[name, None][0]:+.2f}"))) for f in factors]
heads = ["English: dropped", "nats per token", "six kinds: dropped", "nats per token"]
views.table(["capacity factor", *heads], rows,
            "What full experts do to a model that met none in training.")

# %% tags=["reveal"]
worse = {name: costs[name, 1.25][0] - costs[name, None][0] for name in texts}
lesson.reveal("dropping", max(worse, key=worse.get), english=f"{worse['English']:.2f}",
              dropped=f"{costs['English', 1.25][1]:.0%}", mixed=f"{costs['six kinds', 1.25][1]:.0%}")

# %% [markdown]
# So a capacity that is harmless in a training batch is not harmless for one reader's text. Models that were trained
# with dropping are run without it: llama.cpp knows no capacity.
#
# ## 7 · A real ablation · 4 min
#
# The tiny Mixtral was also trained without its balancing loss, same seed, 500 steps. What happened to its experts?

# %% tags=["predict"]
lesson.predict("real")

# %%
views.load_picture(state.ablation()["without"], range(6),
                   "Without balancing, share of each expert after 500 steps; 100% is fair.")

# %%
runs, rows = state.ablation(), []
for layer in range(6):
    with_, without = (runs[v][layer] for v in ("with", "without"))
    rows.append((layer, *(f"{f(x):.2f}" for f in (balance.max_violation, balance.load_entropy)
                          for x in (with_, without)), int((without < 1 / 80).sum())))
views.table(["layer", "MaxVio with", "without", "entropy with", "without", "starved without"], rows,
            "The deeper layers are uneven; the first one stays even without help.")

# %% tags=["reveal"]
top = max(float(x.max()) for x in runs["without"])
said = "collapse" if top > 0.9 else "strong" if top > 2 / 8 else "even"
losses = [state.validation(run) for run in ("tiny-mixtral", "tiny-mixtral-nobalance")]
a, b = (f"{x:.3f}" for x in losses)
lesson.reveal("real", said, top=f"{top:.0%}", loss_with=a, loss_without=b)

# %% [markdown]
# ## 8 · Even, and yet different · 3 min
#
# An even load could mean that every expert does a bit of everything. Layer 5 of the balanced model, by kind of text:

# %%
usage = state.usage(5)
mean = np.mean(list(usage.values()), axis=0)
alt = "; ".join(f"{d}: expert {u.argmax()} {u.max():.0%}" for d, u in usage.items())
views.heat_picture({**usage, "all six": mean},
                   "Rows differ, their mean is even: experts are for kinds of text.",
                   f"Share of each of eight experts by kind of text. Fullest: {alt}", "expert", top=0.5)

# %%
rows = [(d, int(u.argmax()), f"{u.max():.0%}", f"{balance.max_violation(u):.1f}")
        for d, u in [*usage.items(), ("all six", mean)]]
assert balance.max_violation(mean) < 0.2 < 0.5 < min(balance.max_violation(u) for u in usage.values())
views.table(["text", "fullest expert", "its share", "MaxVio"], rows,
            "Balance was asked for over whole batches, and that leaves room for specialists.")

# %% [markdown]
# The loss averages over a batch. Were it taken over single texts, it would forbid just this.
#
# ## 9 · Was it worth it? · 3 min
#
# Eight experts with two used, against one dense network with as many operations per token. Two tasks: eight maps, as above, and one map for all tokens.

# %% tags=["predict"]
lesson.predict("dense")

# %%
panels = {task: {name.split(":")[0]: net["losses"] for name, net in nets.items()}
          for task, nets in state.curves.items()}
views.curves_picture(panels, "Recorded, five seeds: the median, and a band from lowest to highest.",
                     "Training losses. Eight maps: 8 experts fall to 0.3, the dense network of equal "
                     "operations to 0.55, the one of equal parameters to 0.25. One map: both dense "
                     "networks are below the experts.", every=10)

# %%
rows = [(task, name, int(net["operations per token"]), net["parameters"],
         f"{np.median(net['test loss']):.2f}")
        for task, nets in state.curves.items() for name, net in nets.items()]
views.table(["task", "network", "operations per token", "parameters", "loss on new tokens"], rows,
            "Median of five seeds, with a selection bias for the experts.")

# %% tags=["reveal"]
better = []
for task, nets in state.curves.items():
    experts, equal = (np.median(net["test loss"]) for net in list(nets.values())[:2])
    better += [task] * bool(experts < equal)
lesson.reveal("dense", " and ".join(better))

# %% [markdown]
# ## 10 · Your turn · 5 min
#
# **Tier 1.** How far is the fullest expert above the mean?

# %% tags=["exercise", "tier-1"]
def max_vio(counts):
    """counts (E,). Returns MaxVio: 0 for an even load."""
    raise NotImplementedError

# %% tags=["solution"]
def max_vio(counts):
    """counts (E,). Returns MaxVio: 0 for an even load."""
    return counts.max() / counts.mean() - 1

# %% tags=["wrong"]
def max_vio(counts):
    return counts.max() / counts.mean()

# %% tags=["wrong"]
def max_vio(counts):
    return (counts.max() - counts.min()) / counts.mean()

# %% tags=["check"]
on = [(np.round(1000 * x),) for v in ("with", "without") for x in state.ablation()[v]]
lesson.check("max_vio", max_vio, [balance.max_violation(c) for (c,) in on], on)

# %% [markdown]
# **Tier 2.** The load-balancing loss, in NumPy. Your answer is judged by the graph, for one expert per token and for two.

# %% tags=["exercise", "tier-2"]
def balancing(probs, ids):
    """probs (T, E), ids (T, k): probabilities and the chosen experts. Returns E · Σ f P."""
    raise NotImplementedError

# %% tags=["solution"]
def balancing(probs, ids):
    """probs (T, E), ids (T, k): probabilities and the chosen experts. Returns E · Σ f P."""
    n_expert = probs.shape[1]
    f = np.bincount(ids.ravel(), minlength=n_expert) / ids.size
    return n_expert * (f * probs.mean(0)).sum()

# %% tags=["wrong"]
def balancing(probs, ids):
    n_expert = probs.shape[1]
    return n_expert * (probs.mean(0) ** 2).sum()

# %% tags=["wrong"]
def balancing(probs, ids):
    n_expert = probs.shape[1]
    f = np.bincount(ids.ravel(), minlength=n_expert) / len(ids)
    return n_expert * (f * probs.mean(0)).sum()

# %% tags=["check"]
rng, on, expected = np.random.default_rng(5), [], []
for k in (1, 2, 4):
    run = state.losses_of(2 * rng.standard_normal((32, 8)), moe.Router(8, k, normalise=False))
    on.append((run.probs, run.experts))
    expected.append(run.balance)
lesson.check("balancing", balancing, expected, on, ["k = 1", "k = 2", "k = 4"], tolerance=1e-4)

# %% [markdown]
# **Tier 3.** Balance without a loss: choose by score + bias, count, move the bias, many times over.

# %% tags=["exercise", "tier-3"]
def settle(scores, rate, steps):
    """scores (T, E), one expert per token. Returns the counts (E,) of the last step's choices."""
    raise NotImplementedError

# %% tags=["solution"]
def settle(scores, rate, steps):
    """scores (T, E), one expert per token. Returns the counts (E,) of the last step's choices."""
    bias = np.zeros(scores.shape[1])
    for _ in range(steps):
        counts = np.bincount((scores + bias).argmax(1), minlength=len(bias))
        bias += rate * np.sign(counts.mean() - counts)
    return counts

# %% tags=["wrong"]
def settle(scores, rate, steps):
    bias = np.zeros(scores.shape[1])
    for _ in range(steps):
        counts = np.bincount((scores + bias).argmax(1), minlength=len(bias))
        bias += rate * np.sign(counts - counts.mean())
    return counts

# %% tags=["wrong"]
def settle(scores, rate, steps):
    bias = np.zeros(scores.shape[1])
    for _ in range(steps):
        counts = np.bincount((scores * (1 + bias)).argmax(1), minlength=len(bias))
        bias += rate * np.sign(counts.mean() - counts)
    return counts

# %% tags=["check"]
on = [(state.scores(seed), 1 / 64, steps) for seed, steps in ((0, 1), (0, 2), (0, 20), (1, 40))]
lesson.check("settle", settle, [state.settled(*case) for case in on], on,
             ["1 step", "2 steps", "20 steps", "other scores, 40 steps"])

# %% [markdown]
# ## 11 · Names · 1 min
#
# | here | elsewhere | left out |
# |---|---|---|
# | `balance.load_balancing_loss` | `load_balancing_loss_func` in transformers (k times ours); eq. 4 of Switch | losses per device, per sequence (DeepSeek) |
# | `balance.z_loss` | router z-loss, ST-MoE eq. 5 | |
# | `selection_bias`, `balance.bias_step` | `exp_probs_b` in llama.cpp, `e_score_correction_bias`; "loss-free balancing" | proportional steps |
# | `balance.max_violation`, `variation` | MaxVio; CV in Shazeer 2017, there as a loss | importance loss |
# | `capacity_factor`, `dropped_fraction` | Switch, GShard | expert choice (experts pick tokens), dropless kernels |
# | `ClusterModel` | a training loop in PyTorch | noise on the logits, warm-up, many layers |
#
# ggml has no training of routers in llama.cpp: files come with balanced ones, and the bias is one more tensor. **Next**: 18 takes what all tokens
# need out of the routed experts.
