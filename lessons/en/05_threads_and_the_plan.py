# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 05 · Threads and the plan
#
# **49 minutes** · before it: 03, the graph; 04 helps · after it: 06, gradients
#
# Lesson 04 built a graph once and ran it many times. Between building and running lies one more object, the *plan*: one ready call for
# each node that needs work, with everything settled that does not change from run to run. Afterwards you can say how a node is cut into
# tasks, what eight threads do with a graph, whether they change its numbers, and at how many of them speed stops growing, for which of
# three reasons.
#
# You need NumPy; you need no ggml. Sections can be run in any order; each needs only the cell below.

# %% tags=["setup"]
import itertools

import numpy as np

from workbench import devices, lessons, views, widgets
from workbench.lessons.thread_states import critical_path, speed_ups

lesson = lessons.open_lesson("05")
state = lesson.state

# %% [markdown]
# ## 1 · What a plan settles · 6 min
#
# Our patient is one layer of TinyLlama-1.1B at half its width, with made-up weights: 46 MB, more than most processors can keep in their
# caches. A text of 256 tokens goes through it, on four threads. The names are llama.cpp's: `Qcur` to `attn_out` are the attention;
# `ffn_gate`, `ffn_up` and `ffn_out` the three large products behind it.

# %%
plan, step = state.prepare(n_tokens=256, n_threads=4)
rows = [(r.node, r.op, r.tasks, r.work) for r in plan.table() if r.tasks > 1 or r.work > 200_000]
views.table(["node", "operation", "tasks", "scratch bytes"], rows,
            f"{len(rows)} of the {len(plan)} nodes that need work; each of the others is one small task.")

# %% [markdown]
# A **task** is a piece of one node that a thread can compute alone. **Scratch** is memory that a node needs only while it is being
# computed: a packed copy, say, or partial results. All scratch comes from one *work buffer* that the plan asks for beforehand.

# %% tags=["predict"]
lesson.predict("buffer")

# %%
needs = []
for n_threads in (1, 2, 4, 8, 16):
    plan, step = state.prepare(256, n_threads)
    most = max(plan.table(), key=lambda r: r.work)
    needs.append((n_threads, sum(r.work for r in plan.table()), most.work, most.node, plan.work_size))
views.table(["threads", "sum over nodes", "largest node", "which", "work buffer"], needs,
            "Nodes run one after another, so one piece of memory serves them all. "
            "More threads can make another node the largest.")

# %% tags=["reveal"]
plan, step = state.prepare(256, 4)
needs = [r.work for r in plan.table()]
rules = {max(needs): "largest", sum(needs): "sum", sum(needs) * 4: "sum times threads"}
lesson.reveal("buffer", rules[plan.work_size], size=plan.work_size, all=sum(needs))

# %% [markdown]
# On four threads the largest is `kqv_out`, which packs the attention's result: width × tokens = 1,024 · T numbers of 4 bytes. So the
# buffer can be predicted from shapes alone. Formula, plan, and the memory that the backend really holds:

# %%
rows = []
for n_tokens in (256, 512):
    plan, step = state.prepare(n_tokens, 4)
    formula, held = 4 * 1024 * n_tokens, plan.backend.memory_report()["work buffer"]
    assert formula == plan.work_size == held
    rows += [(f"{n_tokens} tokens: bytes by formula, in the plan", formula, plan.work_size),
             (f"{n_tokens} tokens: bytes by formula, held", formula, held)]
shapes = state.tinyllama.expected_tensors() | {"output.weight": (2048, 32000)}
parameters = sum(int(np.prod(ne)) for ne in shapes.values())
rows.append(("TinyLlama: parameters published, in our shapes", 1_100_048_384, parameters))
views.side_by_side(rows, ("predicted", "found"),
                   "Every ratio is one. The last line vouches for the shape of the layers to come.")

# %% [markdown]
# ## 2 · How work is cut · 7 min
#
# A product `mul_mat(w, x)` is cut along the rows of `w`, since each row makes one column of the result and needs no other.
# `devices.cut` says where the cuts fall, for a layer of full width that has no memory at all:

# %%
rows = []
for n_tokens in (1, 512):
    nodes = {t.name: t for t in state.layer(n_tokens)}
    for name in ("norm-0", "ffn_gate-0", "ffn_swiglu-0"):
        axis, parts = devices.cut(nodes[name])
        assert all(p.start % 64 == 0 for p in parts)
        ends = ", ".join(str(p.stop) for p in parts[:6]) + ", …" * (len(parts) > 6)
        shape = "×".join(map(str, nodes[name].ne[:2]))
        rows.append((n_tokens, nodes[name].desc, shape, len(parts), ends))
views.table(["tokens", "operation", "result", "tasks", "tasks end before row"], rows,
            "All borders but the last are multiples of 64. "
            "A task should take 50 µs or more, so small nodes stay whole.")

# %% [markdown]
# The same text, now on 1, 2, 3 and 4 threads.

# %% tags=["predict"]
lesson.predict("bits")

# %%
results = {}
for n_threads in (1, 2, 3, 4):
    plan, step = state.prepare(64, n_threads)
    plan.run()
    results[n_threads] = step.logits.numpy().tobytes()
rows = [(n, len(b), b == results[1]) for n, b in results.items()]
assert all(same for _, _, same in rows)
views.table(["threads", "bytes of the result", "the same bytes as one thread"], rows,
            "Same tasks, same sums, same bits; only who computes which task changes.")

# %% tags=["reveal"]
equal = [n for n in results if results[n] == results[1]]
lesson.reveal("bits", {4: "same", 3: "not three"}.get(len(equal), "differ"))

# %% [markdown]
# The fear has a reason. Cut a product along the *sum* instead, one stretch for each thread, and add up the stretches: then the number of
# threads decides in which order numbers are added.

# %%
rng = np.random.default_rng(0)
x, w = rng.random((8, 1, 1000), np.float32), rng.random((64, 1000), np.float32)
whole, rows = (x * w).sum(axis=2), []
for n in (1, 2, 3, 4):
    stretches = np.array_split(x * w, n, axis=2)        # one for each thread
    added = sum(part.sum(axis=2) for part in stretches)
    worst = np.abs(added / whole - 1).max()
    size = "0" if worst == 0 else "below 0.00001" if worst < 1e-5 else "more"
    rows.append((n, added.tobytes() == whole.tobytes(), size))
views.table(["threads", "the same bytes", "relative difference"], rows,
            "Cut along the sum, the result depends on the number of threads. "
            "Neither ggml's products nor ours are cut there.")

# %% [markdown]
# In ggml, too, one thread adds up each number of a product. One of its kernels does cut a sum by threads: flash attention for a single
# token. There, the last bits may depend on the number of threads.
#
# ## 3 · Find the fault: who hands out the work? · 8 min
#
# An article on ggml says: *"for the current node, generate tasks; put them into the thread pool's shared queue; each thread atomically
# takes tasks from it; then the next node."* One word of it is a thing that ggml does not have.

# %% tags=["predict"]
lesson.predict("queue")

# %%
plan, step = state.prepare(n_tokens=1, n_threads=4)
chunks = [16 if r.op == "MUL_MAT" else 1 for r in plan.table()]
log = state.ggml_threads(chunks, n_threads=4)        # (thread, node it entered, chunks it took)
entered = [sum(me == thread for me, _, _ in log) for thread in range(4)]
took = [sum(n for _, at, n in log if at == node) for node in range(len(chunks))]
assert took == chunks                                 # every chunk exactly once
views.table(["thread", "nodes it entered", "barriers it met the others at"],
            [(thread, n, n) for thread, n in enumerate(entered)],
            f"ggml's way, re-enacted with real threads: {sum(chunks)} chunks of "
            f"{len(chunks)} nodes, each done exactly once, and no queue.")

# %% tags=["reveal"]
plan, step = state.prepare(n_tokens=1, n_threads=4)
log = state.ggml_threads([1] * len(plan), n_threads=4)
entered = [sum(me == thread for me, _, _ in log) for thread in range(4)]
lesson.reveal("queue", max(entered), nodes=len(plan))

# %% [markdown]
# **In ggml** (`ggml_graph_compute_thread`) every thread walks all nodes. Inside a product, threads take chunks of rows from one atomic
# counter, which gives each number once; elsewhere thread *i* of *n* takes its share of rows, or nothing. After each node comes a
# *barrier*: a place where everybody waits until all have arrived. The rest of the article's sentence is right.
#
# **Here** the calling thread walks the nodes alone. It wakes the others only at a node with several tasks, hands these out by a counter
# as well, and waits until all are done. Why not ggml's way? A meeting costs more in Python than in C:

# %%
plan, step = state.prepare(n_tokens=1, n_threads=2)
m, cut_nodes = state.machine, sum(r.tasks > 1 for r in plan.table())
ours, theirs = (m.wake_ns + m.helper_ns) / 1000, m.barrier_ns / 1000
ways = [("ggml: a barrier after each node", len(plan), theirs), ("the same in Python", len(plan), ours),
        ("ours: only where a node is cut", cut_nodes, ours)]
rows = [(way, n, each, round(n * each, 2)) for way, n, each in ways]
views.table(["two threads, one token", "meetings", "µs each", "µs in all"], rows,
            "Recorded costs (next section). Each of our meetings is dear, so there are few of them; "
            "ggml can afford one after every node.")

# %% [markdown]
# Now walk through our plan. *n* jumps to the next node that is cut. Watch what threads 1 to 3 do before `ffn_gate`.

# %%
plan, step = state.prepare(n_tokens=1, n_threads=4)
order = [job.at for job in plan.jobs]
assert order == sorted(order) and all(plan.n_tasks(i) >= 1 for i in order)    # one after another
widgets.step_plan(plan, caption="One token, four threads, simulated from counted work: "
                  "only the three large products are shared.")

# %% [markdown]
# ## 4 · What a meeting costs · 4 min
#
# Two costs decide how small a task may be: waking a thread, and waiting for the last one. Measured on *your* machine, with tasks that do
# nothing, beside what was recorded once:

# %% tags=["device", "nbval-ignore-output"]
m = state.machine
rows = [(n, round(state.wake_us(n), 1), (m.wake_ns + m.helper_ns * (n - 1)) / 1000) for n in (2, 3, 4)]
views.table(["threads that meet", "µs on your machine", "µs recorded"], rows,
            "The middle column may differ from the printed one.")

# %%
assumed = [(f"{name} (assumed)", what) for name, what in state.recorded["assumed"].items()]
views.table(["rate", "what and how"], [*state.recorded["measured"].items(), *assumed],
            f"Measured on {state.recorded['measured on']}. The last two rows are assumptions "
            "about a larger machine, and so is all that is simulated from them below.")

# %% [markdown]
# Real ggml was measured too: a chain of 4,100 nodes too small to share takes 31 ns per node on one thread and 511 ns on two. The difference
# is the barrier, paid even where there is nothing to share. Both numbers return in section 6.
#
# ## 5 · One token or many · 5 min
#
# `ffn_gate` at full width: 11.5 million weights, 46 MB. For one token each weight is read and used once.

# %% tags=["predict"]
lesson.predict("bytes")

# %%
rows, m = [], state.machine
for n_tokens in (1, 8, 64, 512):
    gate = next(w for w in state.works(state.layer(n_tokens)) if w.node.name == "ffn_gate-0")
    arithmetic, reading = gate.flops / m.flops / 1e6, gate.moved / m.memory / 1e6
    bound = "memory" if reading > arithmetic else "arithmetic"
    rows.append((n_tokens, *(round(x, 1) for x in (gate.flops / gate.moved, arithmetic, reading)), bound))
views.table(["tokens", "operations per byte", "ms of arithmetic", "ms of reading", "bound by"], rows,
            f"The recorded core does {m.flops:.0f} operations while {m.memory:.0f} bytes arrive: "
            f"it breaks even at {m.flops / m.memory:.0f} operations per byte.")

# %% tags=["reveal"]
one, many = (next(t for t in state.layer(n) if t.name == "ffn_gate-0") for n in (1, 512))
times = round(many.spec.moved(many) / one.spec.moved(one), 1)
lesson.reveal("bytes", times, flops=many.spec.flops(many) // one.spec.flops(one))

# %% [markdown]
# This divides all of inference. A prompt is *compute-bound*: more cores, more arithmetic. A new token is *memory-bound*: cores share one
# memory, and once it is busy, more of them only wait. The picture is called a *roofline*: the slope is the memory, the flat part
# the arithmetic.

# %%
m, x, gains = state.machine, np.geomspace(0.1, 1000, 200), []
roofs = {name: (x, np.minimum(n * m.flops, x * min(n * m.memory, m.memory_all)))
         for n, name in ((1, "1 core"), (8, "8 cores"))}
for n_tokens, name in ((1, "1 token"), (512, "512 tokens")):
    gate = next(w for w in state.works(state.layer(n_tokens)) if w.node.name == "ffn_gate-0")
    speeds = [gate.flops / gate._replace(tasks=n).ns(m, n) for n in (1, 8)]    # a task for each core
    roofs[f"ffn_gate, {name}"] = [gate.flops / gate.moved] * 2, speeds
    gains.append(f"{name} {speeds[1] / speeds[0]:.0f} times as fast")
gained = " and ".join(gains)
views.line_picture({"": roofs}, f"Simulated from section 4's rates. Eight cores make {gained}.",
                   f"Roofline on logarithmic axes; eight cores instead of one make {gained}.",
                   "operations per byte", "GFLOP/s at most")

# %% [markdown]
# ## 6 · Where speed stops growing · 8 min
#
# "Many people simply enter the number of their cores", says the article, and advises: start from 4 and go up; where 8 to 16
# gains only a few per cent, stop. We look from 1 up.

# %% tags=["predict"]
lesson.predict("stop")

# %%
counts, panels = range(1, 33), {}
for n_tokens, name in ((1, "1 token"), (512, "512 tokens")):
    works = state.works(state.layer(n_tokens))
    single = sum(w.ns(state.machine) for w in works if w.tasks == 1) / state.simulate(works, 1)
    lines = {"ggml's cut, a barrier per node": speed_ups(state.simulate_ggml, works, counts),
             "Amdahl's law for our cut": [1 / (single + (1 - single) / n) for n in counts],
             "our cut, a wake per cut node": speed_ups(state.simulate, works, counts), "ideal": counts}
    panels[name] = {label: (counts, line) for label, line in lines.items()}
views.line_picture(panels, "SIMULATED from section 4's rates. One token: memory is the limit from three "
                   "threads on. 512 tokens: our cut runs out of tasks at six; "
                   f"nodes of one task take {single:.1%}.",
                   "Speed-up by threads. One token levels off at 3; 512 tokens at 3.5 with our cut, "
                   "not at all with ggml's.", "threads (simulated)", "speed-up", [1, 2, 4, 8, 16, 32])

# %% tags=["reveal"]
works, prompt = (state.works(state.layer(n)) for n in (1, 512))
times = {n: state.simulate_ggml(works, n) for n in (1, 2, 3, 4, 8, 16, 32, 64)}
stop = next(a for a, b in itertools.pairwise(times) if times[b] > 0.95 * times[a])
gain, gain_32 = (round(times[1] / times[n], 2) for n in (stop, 32))
many = round(speed_ups(state.simulate_ggml, prompt, [32])[0])
lesson.reveal("stop", stop, gain=gain, all=gain_32, prompt=many)

# %% [markdown]
# Three reasons to stop. **Memory**: one token's weights come no faster. **Tasks**: our largest product makes six, so a seventh thread
# finds nothing; and what cannot be shared bounds the whole, which is Amdahl's law. (BLAS, which multiplies for us, prepares its input
# anew for each task, so we cut coarsely; ggml's kernels do not, and cut finely.) **Meetings**: invisible above, where a node takes
# milliseconds. In lesson 00's model a node takes microseconds. Here is the article's table, from one thread up:

# %%
counts, tiny = (1, 2, 4, 8, 16, 32), state.step().graph.nodes
columns = {"tiny-mixtral, ours": (state.simulate, tiny),
           "tiny-mixtral, ggml's way": (state.simulate_ggml, tiny),
           "TinyLlama, 1 token, ggml's": (state.simulate_ggml, state.layer(1)),
           "TinyLlama, 512 tokens, ggml's": (state.simulate_ggml, state.layer(512))}
gains = [speed_ups(simulate, state.works(nodes), counts) for simulate, nodes in columns.values()]
rows = [(n, *(round(g, 2) for g in row)) for n, row in zip(counts, zip(*gains))]
views.table(["threads", *columns], rows,
            "Simulated speed-up. In the tiny model a barrier costs more than it brings: more threads, "
            "less speed. Ours wakes nobody there, and loses nothing.")

# %% [markdown]
# And your machine? The half-width layer really runs. Beyond your number of cores nothing can be gained, and on two cores little is to be
# seen; other programs disturb. Compare with the simulation all the same.

# %% tags=["device", "nbval-ignore-output"]
rows = []
for n_tokens in (1, 128):
    for n in (1, 2, 3, 4):
        plan, step = state.prepare(n_tokens, n)
        measured = state.best_ms(plan)
        simulated = state.simulate(state.works(step.graph.nodes), n) / 1e6
        ratio = round(measured / simulated, 2)
        rows.append((n_tokens, n, round(simulated, 1), round(measured, 1), ratio))
views.table(["tokens", "threads", "ms simulated", "ms executed here", "ratio"], rows,
            "The recorded machine, with enough cores, beside yours; the last two columns may differ.")

# %% [markdown]
# **What if?** Three knobs, one question: how is it cut, and what does that buy? Run A stays beside run B. Try a least task of 1 µs and one
# token; then a least task of 100 ms.

# %%
lengths, leasts, kept = [1, 8, 64, 256, 512], [1, 10, 50, 200, 1000, 100_000], {}
layers = {n: state.layer(n) for n in lengths}

def what_if(n_threads, length, least):
    works = state.works(layers[lengths[length]], leasts[least] * 1000)
    ms, alone = (state.simulate(works, n) / 1e6 for n in (n_threads, 1))
    cuts = [w.tasks for w in works if w.tasks > 1]
    now = (n_threads, lengths[length], leasts[least], len(cuts), sum(cuts), round(ms, 2), alone / ms)
    a, kept["last"] = kept.get("last", now), now
    head = ["run", "threads", "rows", "least µs", "nodes cut", "into tasks", "ms", "speed-up"]
    return views.table(head, [("A", *a), ("B", *now)],
                       "One layer of TinyLlama, cut by the real rule, timed by the simulation.")

_ = what_if(1, 4, 2)
widgets.Knobs(knobs=[["threads", 1, 32, []], ["rows (tokens)", 0, len(lengths) - 1, lengths],
                     ["least task, µs", 0, len(leasts) - 1, leasts]], values=[8, 4, 2]).drive(what_if)

# %% [markdown]
# ## 7 · Why not one node per thread? · 5 min
#
# Q, K and V need nothing from each other. Neither do gate and up. Could three threads not compute three *nodes* at a time? Suppose there
# were a core for every node, waiting for its sources only, and meetings were free.

# %% tags=["predict"]
lesson.predict("width")

# %%
rows, m = [], state.machine
cases = {"TinyLlama, 1 token": state.layer(1), "TinyLlama, 512 tokens": state.layer(512),
         "tiny-mixtral, layer 2, 1 token": state.moe_layer()}
for name, nodes in cases.items():
    ns = {w.node: w.ns(m) for w in state.works(nodes)}
    ends, chain = critical_path(nodes, ns)
    assert all(a in b.sources() for a, b in itertools.pairwise(chain))    # each link is a real source
    total, longest = sum(ns.values()), max(ends.values())
    rows.append((name, len(ns), round(total / 1e3), round(longest / 1e3), round(total / longest, 2)))
views.table(["layer", "nodes", "µs, all nodes", "µs, critical path", "speed-up at most"], rows,
            "However many threads, each with a node of its own: the longest chain, "
            "the critical path, takes its time.")

# %%
nodes = state.layer(512)
ms = {w.node: w.ns(state.machine) / 1e6 for w in state.works(nodes)}
ends, chain = critical_path(nodes, ms)
free, spans = [0.0, 0.0, 0.0], []
for t in sorted(ms, key=lambda t: ends[t] - ms[t]):        # by the time at which its sources are there
    core = 0 if t in chain else 1 if free[1] <= ends[t] - ms[t] else 2
    free[core] = ends[t]
    spans.append((core, ends[t] - ms[t], ends[t], t.name.removesuffix("-0")))
one, two = (sum(e - b for core, b, e, _ in spans if core == c) / max(free) for c in (1, 2))
views.lane_picture(spans, ["core 0", "core 1", "core 2"], "Core 0 computes the critical path. Core 1 is "
                   f"busy for {one:.0%} of the time, nearly all of it with ffn_up; core 2 for {two:.0%}.",
                   f"Three cores over time: core 0 always busy, core 1 {one:.0%}, core 2 {two:.0%}.",
                   "ms (simulated), each node as soon as its sources are there")

# %% tags=["reveal"]
nodes = state.layer(512)
ns = {w.node: w.ns(state.machine) for w in state.works(nodes)}
bound = sum(ns.values()) / max(critical_path(nodes, ns)[0].values())
size = "below 1.5" if bound < 1.5 else "about 3" if bound < 4 else "more"
lesson.reveal("width", size, bound=round(bound, 2))

# %% [markdown]
# Inside a node, 32 threads find work; between nodes, not even two. ggml's CPU backend takes the first and leaves the second.
#
# A GPU is another matter: a small node cannot fill it, so two at once can pay. CUDA runs kernels on *streams*, and work on
# different streams may overlap. With `GGML_CUDA_GRAPH_OPT=1` ggml's CUDA backend forks the Q, K and V branches onto streams of their
# own and joins them by events; by default it does not. "No parallelism across nodes" is a statement about the CPU backend.
#
# ## 8 · Your turn · 5 min
#
# **Tier 1.** Cut `n` rows into about `tasks` equal parts whose borders are multiples of 64.

# %% tags=["exercise", "tier-1"]
def cut_rows(n, tasks):
    """A list of (start, stop), all parts but the last equally long."""
    raise NotImplementedError

# %% tags=["solution"]
def cut_rows(n, tasks):
    """A list of (start, stop), all parts but the last equally long."""
    length = -(-n // (64 * tasks)) * 64
    return [(start, min(start + length, n)) for start in range(0, n, length)]

# %% tags=["wrong"]
def cut_rows(n, tasks):
    return [(i * n // tasks, (i + 1) * n // tasks) for i in range(tasks)]

# %% tags=["wrong"]
def cut_rows(n, tasks):
    length = n // tasks // 64 * 64
    return [(start, min(start + length, n)) for start in range(0, n, length)]

# %% tags=["check"]
on, expected = [], []
for n_tokens in (1, 512):
    for name in ("Qcur-0", "ffn_gate-0", "ffn_out-0"):
        node = next(t for t in state.layer(n_tokens) if t.name == name)
        parts = devices.cut(node)[1]
        on.append((node.ne[0], len(parts)))
        expected.append([(p.start, p.stop) for p in parts])
lesson.check("cut", cut_rows, expected, on, [f"{n} rows, {tasks} tasks" for n, tasks in on])

# %% [markdown]
# **Tier 2.** Tasks of one node are taken in order from a counter: each thread that becomes free takes the next one. When does the last
# task end?

# %% tags=["exercise", "tier-2"]
def makespan(tasks, n_threads):
    """tasks: the time of each, in order. Returns when the last one ends, if all threads start at 0."""
    raise NotImplementedError

# %% tags=["solution"]
def makespan(tasks, n_threads):
    """tasks: the time of each, in order. Returns when the last one ends, if all threads start at 0."""
    free = [0] * n_threads
    for time in tasks:
        first = free.index(min(free))
        free[first] += time
    return max(free)

# %% tags=["wrong"]
def makespan(tasks, n_threads):
    return sum(tasks) / n_threads

# %% tags=["wrong"]
def makespan(tasks, n_threads):
    return max(sum(tasks[i::n_threads]) for i in range(n_threads))

# %% tags=["check"]
on = [([10] * 8, 2), ([10] * 8, 3), ([10] * 5 + [2], 4), ([9, 2, 2, 2, 2], 2), ([1, 1, 1, 9], 3)]
expected = [state.makespan(*args) for args in on]
lesson.check("makespan", makespan, expected, on)

# %% [markdown]
# **Tier 3.** The critical path. Nodes are in an order in which they can be computed; `sources[i]` lists the nodes that node i
# waits for.

# %% tags=["exercise", "tier-3"]
def longest_chain(costs, sources):
    """The earliest time at which all nodes can be done, with a core for each."""
    raise NotImplementedError

# %% tags=["solution"]
def longest_chain(costs, sources):
    """The earliest time at which all nodes can be done, with a core for each."""
    ends = []
    for cost, before in zip(costs, sources):
        ends.append(cost + max((ends[i] for i in before), default=0))
    return max(ends)

# %% tags=["wrong"]
def longest_chain(costs, sources):
    return sum(costs)

# %% tags=["wrong"]
def longest_chain(costs, sources):
    ends = []
    for cost, before in zip(costs, sources):
        ends.append(cost + (ends[before[0]] if before else 0))
    return ends[-1]

# %% tags=["check"]
on, expected = [], []
for nodes in (state.layer(1), state.layer(512), state.step(n_tokens=1).graph.nodes):
    place = {t: i for i, t in enumerate(nodes)}
    flops = {t: t.spec.flops(t) for t in nodes}
    on.append((list(flops.values()), [[place[s] for s in t.sources() if s in place] for t in nodes]))
    expected.append(max(critical_path(nodes, flops)[0].values()))
steps = ["TinyLlama, 1 token", "TinyLlama, 512 tokens", "tiny-mixtral"]
lesson.check("chain", longest_chain, expected, on, steps)

# %% [markdown]
# ## 9 · What is what, and what comes next · 1 min
#
# | here | in ggml | left out here |
# |---|---|---|
# | `Plan` | `ggml_cplan`, `ggml_graph_plan` | abort callback; ggml adds a cache line per thread to the buffer |
# | `plan.n_tasks(i)` | `ggml_get_n_tasks`: n_threads, or 1 | ggml's counts follow the number of threads, ours never do |
# | `devices.cut` | chunks of 16 or 64 rows in `ggml_compute_forward_mul_mat` | the second dimension; other cuts on NUMA machines, or where chunks are few |
# | `plan.work_size` | `ggml_cplan.work_size` | |
# | `Workers` | `ggml_threadpool` | priorities, affinity, polling |
# | a wake for each cut node | `ggml_barrier` after each node | OpenMP |
# | the counter of tasks | `current_chunk`, atomic | |
#
# **Next, 06:** the graph learns. The same expansion, run backwards, adds the nodes that compute gradients, and a small network is
# trained inside the graph.
