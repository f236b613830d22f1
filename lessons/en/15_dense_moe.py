# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 15 · Dense MoE
#
# **46 minutes** · before it: 03, the graph, and 00 · after it: 16, top-k MoE
#
# In a transformer, attention mixes tokens and a feed-forward network works on each by itself. That network holds most of the parameters.
# A *mixture of experts* has several of them, and a gate that says how much each counts. In the oldest form, of 1991, all of them
# work on every token.
#
# Afterwards you can build that layer as a graph, say what a gate does, say what another expert costs, and tell from a graph whether a program
# computes this form. Each section needs only the cell below.

# %% tags=["setup"]
import numpy as np

import workbench as wb
from workbench import lessons, moe, views, widgets

lesson = lessons.open_lesson("15")
state = lesson.state

# %% [markdown]
# ## 1 · A gate and some experts · 8 min
#
# An expert is a small network: `down @ (silu(gate @ x) * (up @ x))`. The *gate*, or router, is one more matrix W with a row for each expert:
#
# p = softmax(W x),  y = p₁ · expert₁(x) + p₂ · expert₂(x) + … + p_E · expert_E(x)
#
# As a graph, with the matrices of all experts merged into one tensor each. Here there are eight, for three tokens of four numbers:

# %%
arrays, out, graph = state.small(n_expert=8)
wb.CpuBackend().compute(graph)
for name, a in arrays.items():
    print(f"{name:7}", " × ".join(map(str, a.shape)))
print("result ", " × ".join(map(str, out.shape)))

# %% [markdown]
# A node `MUL_MAT` multiplies with weights. How many of them will this graph have?

# %% tags=["predict"]
lesson.predict("products")

# %%
arrays, out, graph = state.small(n_expert=2)
views.graph_picture(
    graph.nodes, "First the gate, then all experts at once, then their weighted sum.",
    "Graph of a dense layer with two experts: router product and soft max; up and gate products, SWIGLU, "
    "down product; each result times its probability; the additions.")

# %% tags=["reveal"]
counts = {n: [t.op for t in state.described(n).nodes] for n in (1, 2, 8, 64)}
of = {n: names.count("MUL_MAT") for n, names in counts.items()}
lesson.reveal("products", of[8], one=of[1], many=of[64], adds=counts[8].count("ADD"))

# %% [markdown]
# Is it what the formula says? The definition in plain NumPy, one token and one expert at a time, stands in `workbench.moe.reference`.

# %%
arrays, out, graph = state.small(n_expert=8)
wb.CpuBackend().compute(graph)
x, router, gate, up, down = arrays.values()
p = np.array([moe.reference.softmax(router @ row) for row in x])
everybody = np.tile(np.arange(8), (3, 1))
by_hand = moe.reference.moe(x, everybody, p, gate, up, down)
assert np.allclose(p.sum(-1), 1) and np.allclose(out.numpy(), by_hand, atol=1e-5)
views.side_by_side([(f"token 0, number {i}", by_hand[0, i], float(out.numpy()[0, i])) for i in range(4)],
                   ("by hand", "graph"), "The graph computes the formula.")

# %% [markdown]
# ## 2 · What a gate says · 7 min
#
# Now a trained gate: layer 5 of the tiny Mixtral, reading the first words of a text it was never trained on. (This model was trained
# with two experts per token. Its gate gives all eight a probability, so we can also run it densely.)

# %%
words = state.words(state.text())
run = state.layer(5)
assert np.allclose(run.probs.sum(-1), 1, atol=1e-5)         # what a dense gate declares
some = slice(3, 13)
best = run.probs[some].argmax(-1)[:, None]
views.router_picture(words[some], run.probs[some], best,
                     "Rarely is one expert all that counts; the rest is spread over the others.")

# %% [markdown]
# Dividing the logits by a *temperature* flattens or sharpens a gate. Towards zero, what becomes of the dense layer?

# %% tags=["predict"]
lesson.predict("cold")

# %%
names = ["0.01", "0.25", "0.5", "1, as trained", "2", "4", "100"]

def what_if(i):
    run = state.layer(5, temperature=float(names[i].partition(",")[0]))
    p = run.probs[8]
    entropy = -(run.probs * np.log2(np.maximum(run.probs, 1e-30))).sum(-1).mean()
    return {"temperature": names[i], "gate for ‘ me’": " ".join(f"{v:.0%}" for v in p),
            "experts above 1%, this token": int((p > 0.01).sum()),
            "bits of choice, mean over the text (3 = even)": f"{entropy:.2f}",
            "largest probability, mean": f"{run.probs.max(-1).mean():.2f}"}

widgets.Range(value=1, max=6, label="temperature", names=names).compare(
    what_if, "The same experts throughout; only how much each counts has changed.", first=3)

# %% tags=["reveal"]
cold = state.layer(5, temperature=0.01).probs[8]
lesson.reveal("cold", int((cold > 0.01).sum()), largest=round(float(cold.max()), 3))

# %% [markdown]
# ## 3 · Expert by expert · 4 min
#
# One token through all eight, in the order of the graph's additions. Use ← → Home End; *n* jumps to the heaviest expert. The table
# says how far the sum still is from the final result.

# %%
run = state.layer(5)
steps = views.sum_steps(run.results[8], run.weights[8], "‘ me’ in layer 5: the sum, expert by expert")
assert np.allclose(run.results[8].sum(0), run.out[8], atol=1e-4)
widgets.Stepper(steps, "The sum is complete only after the last expert; each costs the same to compute.")

# %% [markdown]
# ## 4 · What an expert costs · 8 min
#
# Suppose a gate is sure: probability 1 for one expert, 0 for the other seven. How much of a dense layer's work is that worth?

# %% tags=["predict"]
lesson.predict("zero")

# %% tags=["reveal"]
sure, even = (state.layer(5, temperature=t) for t in (1e-3, 1e3))
work = [state.flops(run.graph) for run in (sure, even)]
largest = float(sure.probs.max(-1).mean())
share, each = round(work[0] / work[1], 3), work[0] // len(sure.out)
lesson.reveal("zero", share, flops=each, largest=round(largest, 2))

# %% [markdown]
# And what does another expert cost? By formula, a token needs 2 · E · D for the gate and 2 · 3 · D · F for each expert. Beside it stand what
# the graph's nodes say, and a simulated card for experts of Mixtral's size (4096 × 14336).

# %%
rows, d, f = [], 128, 160
for n in (1, 2, 4, 8, 16, 32, 64):
    formula = 2 * n * d + 2 * 3 * d * f * n
    counted = state.flops(state.described(n, d=d, f=f))
    ms = state.simulated_us(state.described(n, d=4096, f=14336)) / 1000
    rows.append((n, n * (3 * d * f + d), formula, counted, f"{counted / formula:.3f}", f"{ms:.2f}"))
heads = ["experts", "parameters", "FLOPs: formula", "counted", "ratio", "Mixtral's size, simulated, ms"]
views.table(heads, rows, "Parameters, work and time all grow with the number of experts, in step.")

# %% tags=["predict"]
lesson.predict("published")

# %%
n_experts = [1, 2, 4, 8, 16, 32, 64]
one = state.flops(state.described(1))
work = {k: [state.flops(state.described(n, k)) / one for n in n_experts if n >= (k or 1)]
        for k in (None, 2)}
views.line_picture(
    {"Work of one token": {"dense": (n_experts, work[None]), "two used": (n_experts[1:], work[2])}},
    "The dense form pays for every expert; the form of lesson 16 only for those it uses.",
    "Work per token over the number of experts: a rising line for dense, a flat one for two used.",
    "experts in the layer", "FLOPs, one expert = 1", ticks=n_experts)

# %% tags=["reveal"]
mixtral = moe.configs.model("Mixtral-8x7B")
dense, used = mixtral.params(), mixtral.params(mixtral.router.n_used)
lesson.reveal("published", round(dense / used, 1), all=round(dense / 1e9, 1), active=round(used / 1e9, 1),
              printed=mixtral.published.active)

# %% [markdown]
# Executed on *your* machine: 64 tokens through small dense layers.

# %% tags=["device", "nbval-ignore-output"]
times = {n: state.best_ms(n) for n in (2, 4, 8, 16, 32)}
views.table(["experts", "ms", "times the row above"],
            [(n, f"{ms:.2f}", f"{ms / times[n // 2]:.2f}" if n > 2 else "") for n, ms in times.items()],
            "Twice the experts: about twice the time, and more once they outgrow the processor's caches.")

# %% [markdown]
# ## 5 · Is this what ggml does? · 6 min
#
# The article that started this course describes the dense form, and goes on: "one can see that ggml has the basic MoE". An expert layer of
# llama.cpp, recorded with one token in the tiny Mixtral, can settle that. How many of the eight experts will it compute?

# %% tags=["predict"]
lesson.predict("ggml")

# %%
rows = [(n["name"], n["op"], "×".join(map(str, n["ne"])), ", ".join(n["sources"]))
        for n in state.llama_cpp]
views.table(["node", "op", "shape", "reads"], rows,
            "The shape of what MUL_MAT_ID makes has the number of experts in it: 160×2, not 160×8.")

# %% tags=["reveal"]
ids = next(n for n in state.llama_cpp if n["name"] == "ffn_moe_topk-2")
readers = [n for n in state.llama_cpp if n["op"] == "MUL_MAT_ID"]
assert all(ids["name"] in n["sources"] for n in readers)
plain = [n["name"] for n in state.llama_cpp if n["op"] == "MUL_MAT"]
lesson.reveal("ggml", ids["ne"][0], readers=len(readers), dense=len(plain))

# %% [markdown]
# > **Erratum.** "ggml implements the dense MoE": it does not, nor does llama.cpp on top of it. Its graphs sort the experts' scores, keep the best k, and hand their
# > numbers to `MUL_MAT_ID`. Nothing in ggml *forbids* the dense form: the graph of section 1 is made of its ops. Nobody builds it, for the reason of
# > section 4.
#
# ## 6 · Are all better than the best two? · 6 min
#
# Dense, the tiny Mixtral does four times the expert work it was trained for. Measured as loss on 192 tokens of English (lower is better):
# what will using all eight experts do?

# %% tags=["predict"]
lesson.predict("more")

# %%
losses = {k: state.loss(k) for k in (1, 2, 4, 8)}
per_expert = 2 * 3 * 128 * 160
views.table(["experts per token", "expert FLOPs per token and layer", "loss, nats per token"],
            [(k, k * per_expert, f"{loss:.2f}") for k, loss in losses.items()],
            "Best as it was trained. The others never learned to speak at the same time.")

# %% tags=["reveal"]
change = losses[8] - losses[2]
said = "worse" if change > 0.05 else "better" if change < -0.05 else "same"
lesson.reveal("more", said, two=round(losses[2], 2), all=round(losses[8], 2), one=round(losses[1], 2))

# %% [markdown]
# How much of a dense layer do the best k carry? Each move runs the layer of your choice both ways, over the same 64 tokens.

# %%
dense = {n: state.layer(n) for n in (0, 5)}

def best_k(k, which):
    layer = (0, 5)[which]
    all_of, some = dense[layer], state.layer(layer, moe.Router(8, k, normalise=False))
    away = np.linalg.norm(some.out - all_of.out, axis=-1) / np.linalg.norm(all_of.out, axis=-1)
    row = (layer, k, f"{some.weights.sum(-1).mean():.0%}", f"{np.median(away):.0%}", f"{k / 8:.0%}")
    return views.table(["layer", "experts", "weight they carry", "distance from dense, median", "work"],
                       [row], "Where the gate is sure, few experts are nearly all; else they are not.")

knobs = [["experts used", 1, 8, []], ["layer", 0, 1, ["0", "5"]]]
widgets.Knobs(knobs=knobs, values=[2, 1]).drive(best_k)

# %% [markdown]
# ## 7 · Your turn · 6 min
#
# **Tier 1.** What a dense layer costs. Your formula is held against counted graphs.

# %% tags=["exercise", "tier-1"]
def dense_flops(n_expert, d, f):
    """FLOPs per token: a gate of d times n_expert, and experts of three matrices, d times f each."""
    raise NotImplementedError

# %% tags=["solution"]
def dense_flops(n_expert, d, f):
    """FLOPs per token: a gate of d times n_expert, and experts of three matrices, d times f each."""
    return 2 * d * n_expert + n_expert * 2 * 3 * d * f

# %% tags=["wrong"]
def dense_flops(n_expert, d, f):
    return n_expert * 2 * 3 * d * f

# %% tags=["wrong"]
def dense_flops(n_expert, d, f):
    return 2 * d * n_expert + 2 * 3 * d * f

# %% tags=["check"]
on = [(1, 64, 128), (8, 128, 160), (64, 128, 96), (160, 512, 256)]
expected = [state.flops(state.described(n, d=d, f=f)) for n, d, f in on]
lesson.check("dense-flops", dense_flops, expected, on)

# %% [markdown]
# **Tier 2.** Be the last part of the layer: probabilities and the experts' results to one row.

# %% tags=["exercise", "tier-2"]
def combine(logits, results):
    """Logits (E,) of the gate, unweighted results (E, D) of the experts; returns the layer's row (D,)."""
    raise NotImplementedError

# %% tags=["solution"]
def combine(logits, results):
    """Logits (E,) of the gate, unweighted results (E, D) of the experts; returns the layer's row (D,)."""
    p = np.exp(logits - logits.max())
    return (p / p.sum()) @ results

# %% tags=["wrong"]
def combine(logits, results):
    return logits @ results

# %% tags=["wrong"]
def combine(logits, results):
    p = np.exp(logits - logits.max())
    return p @ results

# %% tags=["check"]
run, tokens = state.layer(5), [3, 8, 20, 40]
on = [(np.log(run.probs[t]), run.results[t] / run.weights[t][:, None]) for t in tokens]
expected = [run.out[t] for t in tokens]
lesson.check("combine", combine, expected, on, [f"token {t}" for t in tokens], tolerance=1e-3)

# %% [markdown]
# **Tier 3.** A gate that works for any logits, however large, and any temperature.

# %% tags=["exercise", "tier-3"]
def gate(logits, temperature):
    """softmax(logits / temperature), a number between 0 and 1 for each expert."""
    raise NotImplementedError

# %% tags=["solution"]
def gate(logits, temperature):
    """softmax(logits / temperature), a number between 0 and 1 for each expert."""
    z = logits / temperature
    p = np.exp(z - z.max())
    return p / p.sum()

# %% tags=["wrong"]
def gate(logits, temperature):
    with np.errstate(all="ignore"):
        p = np.exp(logits / temperature)
        return p / p.sum()

# %% tags=["wrong"]
def gate(logits, temperature):
    p = np.exp(logits - logits.max()) / temperature
    return p / p.sum()

# %% tags=["check"]
on = [(np.array(z), t) for z in ([0.5, 2.0, -1.0], [900.0, 901.0, 880.0]) for t in (1.0, 0.5, 4.0)]
expected = [state.soft_max(*case) for case in on]
steps = [f"{z.tolist()} at temperature {t:g}" for z, t in on]
lesson.check("gate", gate, expected, on, steps, tolerance=1e-4)

# %% [markdown]
# ## 8 · Names · 1 min
#
# | here | elsewhere | left out |
# |---|---|---|
# | `moe.build_dense_moe` | no such function in llama.cpp; "mixture of experts" of Jacobs, Jordan, Nowlan and Hinton (1991) | experts of different shapes |
# | gate, router, `gate_inp` | `ffn_gate_inp` in llama.cpp; gating network | noise on the logits (Shazeer 2017) |
# | `ExpertWeights` | `ffn_gate_exps`, `ffn_up_exps`, `ffn_down_exps` | biases: gpt-oss, lesson 16 |
# | `moe.reference` | — | gradients: lesson 06; a trained dense gate |
# | `moe.configs` | a model's `config.json` | |
#
# **Next**, 16: keep the gate, use only its best k. Of the four products three become `MUL_MAT_ID`s, the experts' work no longer grows with their
# number, and suddenly it matters what the weights sum to, which rows go where, and who gets too many.
