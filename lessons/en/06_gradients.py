# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 06 · Gradients
#
# **50 minutes** · before it: 03, the graph; 04 helps · after it: 07, backends and buffers
#
# So far a graph turned numbers into a result. Now the numbers in its weights shall change, so that the result gets better. For that one must
# know, for each weight, which way is down. ggml answers with more nodes of the same graph.
#
# Afterwards you can expand a backward graph by hand, check a gradient, say what training costs in nodes, work and memory, and train a small
# network in a graph that is built once. Each section needs only the cell below.

# %% tags=["setup"]
import itertools

import numpy as np

import workbench as wb
from workbench import Flag, lessons, ops, views, widgets
from workbench.errors import GraphError

lesson = lessons.open_lesson("06")
state = lesson.state

# %% [markdown]
# ## 1 · Something to learn · 5 min
#
# The network of lesson 03, from 8 numbers over 32 to 8, with one difference: its weights are marked as *parameters*, and its last node as the
# *loss*. The task: which of the 8 numbers is the largest? A label is a row with a single 1.

# %%
net = state.network(with_data=True)
wb.compute(net.graph())
x, labels, logits = (t.numpy()[0] for t in (net.x, net.labels, net.logits))
rows = [[name, *(f"{v:.2f}" for v in row)]
        for name, row in (("x", x), ("label", labels), ("answer", logits))]
views.table(["", *"01234567"], rows, "One token of 64. The answers mean nothing yet.")

# %% [markdown]
# *Erratum.* The article's listing gives the two weights as (32, 8) and (8, 32). `mul_mat` refuses them: it multiplies rows with rows, so
# they must be (8, 32) and (32, 8), as here.
#
# The loss is the *cross entropy*: minus the logarithm of the probability given to the right answer. Whoever knows nothing gives each of the 8 the
# same, so the loss should be about log 8.

# %%
for w in net.parameters[::2]:
    print(w)
right = (net.logits.numpy().argmax(1) == net.labels.numpy().argmax(1)).mean()
rows = [("loss: log 8 → computed", np.log(8), net.loss.numpy().item()),
        ("right answers: 1 in 8 → computed", 1 / 8, right)]
views.side_by_side(rows, ("knowing nothing", "this network"), "It knows nothing, and is sure of it.")

# %% tags=["predict"]
lesson.predict("where")

# %% [markdown]
# Ask for the gradients, and look where they are:

# %%
backward = net.graph().build_backward_expand()
w1 = net.find("w1")
print("w1 has a field grad:", hasattr(w1, "grad"))
print("the graph has one for w1:", backward.grad(w1))
print("and none for x:", backward.grad(net.x))

# %% tags=["reveal"]
found = "tensor" if hasattr(w1, "grad") else "graph" if backward.grad(w1) is not None else "optimiser"
lesson.reveal("where", found)

# %% [markdown]
# *Erratum.* Older listings show `grad` as a field of `ggml_tensor`. It is gone since the end of 2024: a tensor may stand in several graphs, and have
# another gradient in each. `ggml_graph_get_grad(graph, tensor)` asks the graph.
#
# ## 2 · Backwards · 8 min
#
# The walk goes from the last node to the first. A node whose gradient is known hands it on to its sources, by the rule of its op: the chain
# rule, one link at a time. A source that is not trained, and leads to nothing that is, gets none.

# %%
forward = state.network().graph()
rows = [(t.name, t.desc if t.op != "NONE" else "parameter", ", ".join(s.name for s in t.sources()))
        for t in forward.nodes]
views.table(["node", "op", "of"], rows, "Parameters are nodes here: each will get a gradient.")

# %% tags=["predict"]
lesson.predict("nodes")

# %% [markdown]
# Step through it; *n* jumps to the next gradient. The tensors that are still grey do not exist yet.

# %%
steps = views.backward_steps(forward, "Ten nodes, expanded backwards")
middle = next(i for i, s in enumerate(steps["steps"]) if "TRANSPOSE" in s["sentence"])
widgets.Stepper(steps, "Each node hands its gradient to its sources; some get it as it is.", k=middle)

# %% [markdown]
# Count by the rules: a product adds OUT_PROD for its weights, and TRANSPOSE and OUT_PROD for its input, if that needs a gradient. A bias
# that is repeated over the tokens needs the sum over them, REPEAT_BACK. RELU adds STEP and MUL, the loss one node of its own.
#
# And real ggml? Its order was recorded, node by node:

# %%
before = len(forward.nodes)
grown = state.network().graph().build_backward_expand()
added = [t.op for t in grown.nodes[before:]]
by_rule = 1 + (1 + 3) + 2 + (1 + 1)       # loss, second layer, RELU, first layer (x is not trained)
theirs = state.recorded["relu"]["ops"]
print(", ".join(added))
views.table(["nodes added", ""], [("by the rules", by_rule), ("by our walk", len(added)),
            ("by ggml's", len(theirs) - state.recorded["relu"]["n_forward"]),
            ("all nodes in the same order", [t.op for t in grown.nodes] == theirs)],
            "The same nodes as ggml, in the same order.")

# %% tags=["reveal"]
lesson.reveal("nodes", len(added), forward=before)

# %% [markdown]
# A backward graph is **legal** like any other: every node stands behind its sources, and each parameter's gradient has the parameter's shape.

# %%
place = {t: i for i, t in enumerate(grown.nodes)}
assert all(place[s] < i for t, i in place.items() for s in t.sources() if s in place)
assert all(grown.grad(w).ne == w.ne for w in grown.nodes if w.flags & Flag.PARAM)
print("legal:", len(grown.nodes), "nodes, each behind its sources")

# %% [markdown]
# What if there is no rule? Then the walk stops before it adds anything, and says where:

# %%
w = wb.Context().new_tensor("f32", 4, name="w").mark(Flag.PARAM)
try:
    wb.build(ops.sum(ops.norm(w)).mark(Flag.LOSS)).build_backward_expand()
except GraphError as error:
    print(error)

# %% [markdown]
# ## 3 · Is it true? · 6 min
#
# A gradient can be checked without any rule: move one weight a little up and a little down, run the forward graph both times, and divide. These
# are *finite differences*. They take two runs per weight, and the network has 552 of them; the backward graph gives all in one run. How far
# should a weight be moved?

# %% tags=["predict"]
lesson.predict("step")

# %%
checked = state.network(with_data=True)
grads = state.gradients(checked)
places = [("w1", (0, 0)), ("w1", (12, 5)), ("b1", (3,)), ("w2", (1, 2)), ("b2", (4,))]
rows = [(f"{name}{list(i)}", state.slope(checked, name, i, h=0.01), grads[name][i]) for name, i in places]
assert all(abs(a - b) < 3e-4 for _, a, b in rows)
rows = [(what, f"{a:.3f}", f"{b:.3f}", f"{b / a:.2f}") for what, a, b in rows]
views.table(["weight", "finite difference", "gradient", "ratio"], rows, "Two ways, one slope.")

# %% [markdown]
# And with another h? Turn the knob. The error is the median of twelve weights of `w1`, over the largest gradient:

# %%
steps_h = [1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6]
errors = {h: state.slope_error(checked, h) for h in steps_h}

def what_if_step(i):
    h, error = steps_h[i], state.slope_error(checked, steps_h[i])
    said = "below 0.03 %" if error < 3e-4 else "below 2 %" if error < 0.02 else "above 2 %"
    return {"step h": f"{h:g}", "the bend, about h²": f"{h * h:.0e}",
            "rounding, about 1e-7 / h": f"{1e-7 / h:.0e}", "error found": said}

widgets.Range(value=2, max=6, label="h", names=[f"{h:g}" for h in steps_h]).compare(
    what_if_step, "Too far, and the curve bends; too near, and rounding is all that is left.", first=6)

# %% tags=["reveal"]
lesson.reveal("step", min(errors, key=errors.get))

# %% [markdown]
# ## 4 · Used twice · 4 min
#
# What if a tensor is used in two places? Both uses push the loss, so its gradient is the **sum**. The walk adds the second gradient to the
# first with a node of its own. Take y = x · x + x, whose slope is 2x + 1:

# %%
x = wb.Context().from_numpy([1.0, 2.0, -3.0], name="x").mark(Flag.PARAM)
graph = wb.build(ops.sum(ops.add(ops.mul(x, x), x)).named("y").mark(Flag.LOSS))
steps = views.backward_steps(graph)
print("\n".join(s["sentence"] for s in steps["steps"] if s["event"][0] == "grad"))
graph.build_backward_expand()
wb.compute(graph)
views.table(["", "2x + 1", "gradient"], [(f"x = {v:g}", 2 * v + 1, float(g)) for v, g in
            zip([1.0, 2.0, -3.0], graph.grad(x).numpy())], "Three uses, three gradients, two additions.")

# %% [markdown]
# The same sum makes large batches out of small ones. With an *accumulator* the gradient of each run is added to what is there already:

# %%
sums = x.context.new_tensor("f32", 3, name="sums")
graph = wb.build(ops.sum(ops.add(ops.mul(x, x), x)).mark(Flag.LOSS)).build_backward_expand({x: sums})
graph.reset()                             # 0 into the accumulator, 1 into the gradient of the loss
for run in (1, 2, 3):
    wb.compute(graph)
    print(run, [f"{v:g}" for v in sums.numpy()])

# %% [markdown]
# ## 5 · What it costs · 6 min
#
# First the work. A product multiplies each weight once per token; its two gradients are products of the same size. So a training run should cost
# three times a forward run: 6 operations per weight and token instead of 2, which is the rule of thumb 6·N·D of the papers on scaling
# (Kaplan et al., 2020).

# %%
net, trainer = state.trainer(state.network((64,) * 5, n_tokens=256))
count = {w.name: w.n_elements for w in net.parameters if w.n_dims > 1}
n, d = sum(count.values()), 256
work = {name: sum(t.spec.flops(t) for t in g.nodes if t.op in ("MUL_MAT", "OUT_PROD"))
        for name, g in (("forward", trainer.forward), ("training", trainer.graph))}
all_of = [wb.statistics(g).total.flops for g in (trainer.forward, trainer.graph)]
views.side_by_side([("products, forward: 2 · N · D", 2 * n * d, work["forward"]),
                    ("products, training: 6 · N · D", 6 * n * d, work["training"]),
                    ("… but x needs no gradient", 6 * n * d - 2 * count["w1"] * d, work["training"]),
                    ("all ops: forward → training", *all_of)], ("formula", "counted"),
                   "Three times, less the first layer's input.")

# %% [markdown]
# Then the memory. Lesson 04 found that the depth of a network does not matter: each result is dead soon after it was made, and three places
# serve all layers. Here are 2 layers of 64 numbers, 256 tokens:

# %%
print("2 layers: forward {:,} bytes, training {:,} bytes".format(*state.memory(2)))

# %% tags=["predict"]
lesson.predict("memory")

# %%
depths = [1, 2, 4, 8, 16]
bytes_of = {n: state.memory(n) for n in depths}
one = 64 * 256 * 4                                    # bytes of one result
views.table(["layers", "forward", "training", "training, in results of 64 KiB"],
            [(n, *bytes_of[n], f"{bytes_of[n][1] / one:.1f}") for n in depths],
            "Compute memory: forward it stays, in training it grows with every layer.")

# %% tags=["reveal"]
grows = bytes_of[16][1] > 1.8 * bytes_of[8][1] and bytes_of[16][0] == bytes_of[8][0]
per_layer = round((bytes_of[16][1] - bytes_of[8][1]) / 8 / one)
lesson.reveal("memory", "grows" if grows else "twice", per_layer=per_layer)

# %% [markdown]
# ## 6 · The optimiser is a node · 4 min
#
# A gradient says which way is up. How far to go down is the optimiser's business. AdamW keeps two running means for each weight, of its gradient
# (m) and of its square (v), and moves the weight by rate · m / √v. In ggml that is an op, OPT_STEP_ADAMW, and its result is a *view of the
# parameter*: it writes where the weight lies.

# %%
net, trainer = state.trainer()
step = trainer.graph.nodes[-1]
weight, grad, m, v, numbers = step.src
print(step.name, "=", step.op, "of", ", ".join(s.name for s in step.sources()))
print("writes into the parameter:", step.root() is weight)
counted = sum(t.nbytes for t in (weight, grad, m, v)) // weight.n_elements
views.table(["bytes for each trained number", ""], [
    ("the parameter", 4), ("its gradient, during the run", 4), ("m and v", 8), ("all, counted", counted)],
    "Four bytes become sixteen: fine-tuning needs more room than running.")

# %% tags=["predict"]
lesson.predict("first")

# %%
moved = {g: 1.0 - state.adamw_case([g], rate=0.1) for g in (0.5, 0.005)}
by_hand = {g: 0.1 * g / (np.sqrt(g * g) + 1e-8) for g in moved}     # corrected m and v are g and g²
views.side_by_side([(f"gradient {g}", by_hand[g], moved[g]) for g in moved], ("formula", "executed"),
                   "The first step of Adam.")

# %% tags=["reveal"]
lesson.reveal("first", round(moved[0.5] / moved[0.005]), rate=0.1)

# %% [markdown]
# ## 7 · Train it · 6 min
#
# Everything is one graph now: forward, gradients, one step per parameter. It is built, planned and placed once; from step to step only the batch
# changes, and seven numbers for AdamW. Here the curve will be drawn while the next cell trains:

# %%
live = widgets.Live("The curve is drawn here while the next cell runs.")
live

# %%
net, trainer = state.trainer(rate=0.01)
losses, caption = [], "From log 8 down: the network learns which number is the largest."
for batch in itertools.islice(state.batches(net), 400):
    losses.append(trainer.step(batch))
    if len(losses) % 80 == 0:
        alt = f"The loss over {len(losses)} steps falls."
        curve = views.curves_picture({"": {"loss": [losses]}}, caption, alt)
        live.draw(curve)
curve

# %%
fresh, right = state.right_answers(*state.trainer()), state.right_answers(net, trainer)
assert losses[-1] < 0.3 and right > 0.9 and trainer.runner.n_reallocations == 1
views.table(["", "before", "after 400 steps"], [
    ("loss", f"{losses[0]:.1f}", f"{losses[-1]:.1f}"),
    ("right answers in 100", f"{100 * fresh:.0f}", f"more than {10 * int(10 * right)}"),
    ("nodes of the graph", len(trainer.graph), len(trainer.graph)),
    ("times that memory was planned", 1, trainer.runner.n_reallocations)],
    "On numbers that it has never seen. The graph was built once.")

# %% [markdown]
# How large may a step be? Turn the knob: each move builds a new network and trains it for 60 steps.

# %%
rates = [0.0001, 0.001, 0.01, 0.1, 1.0]

def what_if_rate(i):
    losses, right = state.run(rates[i], n_steps=60)
    best = min(losses[-10:])
    said = "hardly moves" if best > 1.9 else "learns" if best > 0.7 else "learns fast"
    return {"rate": f"{rates[i]:g}", "loss at first": f"{losses[0]:.1f}", "after 60 steps it": said}

widgets.Range(value=2, max=4, label="rate", names=[f"{r:g}" for r in rates]).compare(
    what_if_rate, "Too small a step wastes time, too large a one jumps over the valley.", first=0)

# %% [markdown]
# ## 8 · Elsewhere · 2 min
#
# A backward graph is a graph: the scheduler of lessons 08 to 13 can spread it over devices. Weights on a (simulated) GPU, biases on the host, five
# steps, and the same on the CPU alone:

# %%
here, there = state.here(), state.on_devices()
same = here[0] == there[0] and all((a == b).all() for a, b in zip(here[1], there[1]))
assert same
split = [(i, s.backend, len(s.nodes), len(s.inputs)) for i, s in enumerate(there[2].splits)]
print("losses and all parameters have the same bits:", same)
views.table(["split", "device (0: GPU)", "nodes", "copied in"], split,
            "Each parameter's optimiser step runs where the parameter lies.")

# %% [markdown]
# ## 9 · Your turn · 8 min
#
# **Tier 1.** How many nodes does the walk add to a network of n layers? Each has a product, a bias, and, but for the last, a RELU; the loss
# is the cross entropy.

# %% tags=["exercise", "tier-1"]
def nodes_added(n_layers):
    """Nodes that the backward walk adds."""
    raise NotImplementedError

# %% tags=["solution"]
def nodes_added(n_layers):
    """Nodes that the backward walk adds."""
    per_layer, between = 1 + 1, 2 + 2              # REPEAT_BACK, OUT_PROD; TRANSPOSE, OUT_PROD, STEP, MUL
    return 1 + n_layers * per_layer + (n_layers - 1) * between

# %% tags=["wrong"]
def nodes_added(n_layers):
    return 1 + n_layers * 6

# %% tags=["wrong"]
def nodes_added(n_layers):
    return 5 * n_layers - 1

# %% tags=["check"]
on = [(n,) for n in (1, 2, 3, 5, 8)]
lesson.check("nodes-added", nodes_added, [state.added(n) for n, in on], on, [f"{n} layers" for n, in on])

# %% [markdown]
# **Tier 2.** One weight, several steps of AdamW without decay. m and v start at 0; what they are divided by corrects for that.

# %% tags=["exercise", "tier-2"]
def adamw(w, gradients, rate=0.1, beta1=0.9, beta2=0.999, eps=1e-8):
    """The weight after one step for each gradient."""
    raise NotImplementedError

# %% tags=["solution"]
def adamw(w, gradients, rate=0.1, beta1=0.9, beta2=0.999, eps=1e-8):
    """The weight after one step for each gradient."""
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w -= rate * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)) ** 0.5 + eps)
    return w

# %% tags=["wrong"]
def adamw(w, gradients, rate=0.1, beta1=0.9, beta2=0.999, eps=1e-8):
    return w - rate * sum(gradients)

# %% tags=["wrong"]
def adamw(w, gradients, rate=0.1, beta1=0.9, beta2=0.999, eps=1e-8):
    m = v = 0.0
    for g in gradients:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w -= rate * m / (v**0.5 + eps)
    return w

# %% tags=["check"]
on = [(1.0, [0.5]), (1.0, [0.5, 0.5, -1.0]), (0.0, [3.0, -2.0]), (2.0, [0.001, 1.0, 0.0, 0.0])]
expected = [state.adamw_case(gradients, start=w) for w, gradients in on]
lesson.check("adamw", adamw, expected, on, [f"{len(g)} steps from {w:g}" for w, g in on], tolerance=1e-4)

# %% [markdown]
# **Tier 3.** Be a rule. For y = soft max(x), each y depends on every x: the slope of y[i] along x[j] is y[i] · (1 if i = j, else 0)
# − y[i] · y[j].

# %% tags=["exercise", "tier-3"]
def soft_max_back(y, grad):
    """The gradient of x, from the result y and its gradient: NumPy arrays of one row."""
    raise NotImplementedError

# %% tags=["solution"]
def soft_max_back(y, grad):
    """The gradient of x, from the result y and its gradient: NumPy arrays of one row."""
    return y * (grad - (y * grad).sum())

# %% tags=["wrong"]
def soft_max_back(y, grad):
    return y * (1 - y) * grad

# %% tags=["wrong"]
def soft_max_back(y, grad):
    return y * (grad - grad.mean())

# %% tags=["check"]
cases = [state.soft_max_case(n, seed) for n, seed in ((2, 0), (5, 1), (8, 2), (40, 3))]
lesson.check("soft-max-back", soft_max_back, [c[2] for c in cases], [c[:2] for c in cases],
             [f"a row of {len(c[0])}" for c in cases], tolerance=1e-3)

# %% [markdown]
# ## 10 · What is what, and what comes next · 1 min
#
# | here | in ggml | left out here |
# |---|---|---|
# | `graph.build_backward_expand()` | `ggml_build_backward_expand` | gradients of gradients |
# | `t.mark(Flag.PARAM)`, `t.mark(Flag.LOSS)` | `ggml_set_param`, `ggml_set_loss` | – |
# | `graph.grad(t)`, `graph.grad_acc(t)`, `graph.reset()` | `ggml_graph_get_grad`, `…_get_grad_acc`, `ggml_graph_reset` | – |
# | `OPS[name].backward` | a `switch` in `ggml_compute_backward` | ROPE, masks of attention |
# | OUT_PROD_ID, MUL_MAT_ID_BACK | none: ggml cannot train experts | – |
# | OPT_STEP_ADAMW | the same | plain SGD |
# | `Trainer` | `ggml_opt_context` | data sets, epochs |
# | `cgraph.backward_expansion` | none: the same decisions, made silently | – |
#
# **Next, 07:** so far everything lay in one memory. Devices have memories of their own: what kinds there are, and what a copy costs.
