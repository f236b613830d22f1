# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 23 · Token scheduling
#
# **50 minutes** · before it: 16, top-k MoE, and 22, the expert cache · after it: 24, memory pressure
#
# An expert that was loaded for one token could have served others on the way. So let tokens wait for company: in a queue for each expert,
# until a batch is worth its load. That idea has a unit, a price and a few traps, and this lesson measures all three.
#
# Afterwards you can say who gains from waiting and who does not, compute the batch that hides a load, bound a wait, and judge what
# regrouping two batches is worth. Each section needs only the cell below.

# %% tags=["setup"]
from workbench import lessons, views, widgets
from workbench.expertflow.batching import FOREVER, LATENCY, THROUGHPUT, Limits, TokenQueues, worthwhile
from workbench.lessons.queue_states import causes

lesson = lessons.open_lesson("23")
state = lesson.state
MS = 1_000_000      # nanoseconds

# %% [markdown]
# ## 1 · Alone · 4 min
#
# Routes come from the tiny Mixtral, times from a published configuration: **Mixtral-8x7B in f16 on an RTX 3090 behind PCIe 4, 24 expert slots** for the
# six recorded layers. One conversation decodes, and its queues may wait 0, 5, 20 or 100 ms for more tokens. What does waiting gain?

# %% tags=["predict"]
lesson.predict("alone")

# %%
limits_of = {f"{ms} ms": Limits(32, ms * MS) for ms in (0, 5, 20, 100)}
alone = {name: state.served(limits, 1) for name, limits in limits_of.items()}
rows = [(name, f"{r.throughput:.2f}", f"{r.latency():.0f}", f"{r.batch:.1f}",
         f"{r.longest_wait / MS:.1f}") for name, r in alone.items()]
views.table(["may wait", "tokens/s", "ms per token, median", "tokens per batch", "longest wait, ms"],
            rows,
            "Mixtral-8x7B, RTX 3090, PCIe 4: a single stream has no company to wait for.")

# %% tags=["reveal"]
fast, slow = alone["0 ms"].throughput, alone["100 ms"].throughput
lesson.reveal("alone", "gain" if slow > 1.02 * fast else "nothing", batch=f"{alone['100 ms'].batch:.0f}")

# %% [markdown]
# So the unit of token scheduling is a **micro-batch of several requests in one layer**. Now the same with more requests at once, and nobody
# waiting on purpose:

# %%
rows = []
for n in (1, 8, 16, 32):
    r = state.served(LATENCY, n)
    rows.append((n, f"{r.throughput:.2f}", f"{r.latency():.0f}", f"{r.batch:.1f}",
                 f"{r.loads_per_token:.1f}"))
views.table(["requests", "tokens/s", "ms per token, median", "tokens per batch", "loads per token"], rows,
            "Company comes by itself: seven times the throughput, at six times the time per token.")

# %% [markdown]
# ## 2 · Two queues, one token · 6 min
#
# Each token has two experts here. It stands in both queues. Expert 2 has computed its result for token 0; expert 7 has not been loaded yet.
# May token 0 go on to the next layer?

# %% tags=["predict"]
lesson.predict("join")

# %% [markdown]
# Step through it: six tokens of six sequences, layer 5, a millisecond apart. Expert 0 is in a slot; for others two tokens are worth a
# load; nobody waits longer than 2.5 ms. *n* jumps to the next batch, whose cause is named.

# %%
limits = Limits(capacity=3, max_wait=int(2.5 * MS))
steps = state.steps(limits, 2, (0,), "Six tokens, layer 5, two of eight experts each")
widgets.Stepper(steps, "A queue is served for a reason: its expert is there, it is long, it is old, "
                "or nothing else is to do.")

# %%
complete, served = {}, {}
for kind, what, _, done in state.walk(limits, 2, (0,)):
    for w in what.tokens if kind == "serve" else ():
        served.setdefault(w.token, []).append(what.expert)
    complete.update({token: list(served[token]) for token in done})
assert sorted(complete) == list(range(6)) and all(len(e) == 2 for e in complete.values())
rows = [(token, str(experts)) for token, experts in sorted(complete.items())]
views.table(["token", "experts, in the order of their results"], rows,
            "Joined when the second result is there: each token once, with both of its experts.")

# %% tags=["reveal"]
both_there = all(len(experts) == 2 for experts in complete.values())
lesson.reveal("join", "waits" if both_there else "goes", n=len(complete))

# %% [markdown]
# A request may be withdrawn meanwhile. Its token leaves all queues, and a late result of it is dropped:

# %%
q = TokenQueues(Limits(8, FOREVER), k=2, threshold=2)
for token, experts in enumerate([[7, 2], [2, 3]]):
    q.add(token, 5, experts, now=0)
rows = [("both wait", q.n_waiting, str(sorted(q.missing)))]
q.cancel(0)
rows.append(("request 0 withdrawn", q.n_waiting, str(sorted(q.missing))))
done = q.done([0, 1])
rows.append(("late result for 0, first for 1", q.n_waiting, f"{sorted(q.missing)}, joined: {done}"))
views.table(["moment", "places taken", "tokens on their way"], rows,
            "Nothing is lost, and nothing is left behind.")

# %% [markdown]
# ## 3 · The threshold · 7 min
#
# A load takes 14.0 ms, an expert 0.49 ms for one token. The rule of the article: serve a missing expert when **B · T_compute > T_load**. With a
# constant T_compute that gives 14.0 / 0.49, so 29 tokens. What does it give with the T_compute *per token in a batch of B*?

# %% tags=["predict"]
lesson.predict("threshold")

# %%
c = state.costs
rows = []
for n in (1, 8, 29, 64, 256, 1024, worthwhile(c)):
    total = c.expert(n)
    rows.append((n, f"{total / n / 1000:.1f}", f"{total / MS:.2f}", f"{c.load / MS:.2f}",
                 "yes" if total > c.load else "no"))
views.table(["B", "T_compute(B), µs per token", "B · T_compute(B), ms", "T_load, ms", "longer?"], rows,
            "Mixtral-8x7B, RTX 3090: up to some 47 tokens a batch takes as long as one token.")

# %% [markdown]
# Both times per token and expert, computing and loading, over the batch:

# %%
n_of, c = [1, 4, 16, 64, 256, 1024, 4096], state.costs
curves = {"computing": (n_of, [c.expert(n) / n / 1000 for n in n_of]),
          "loading": (n_of, [c.load / n / 1000 for n in n_of])}
views.line_picture({"Mixtral-8x7B, RTX 3090, PCIe 4": curves},
                   "Computing stops falling near 47 tokens, loading goes on; they meet at 1,409.",
                   "µs per token over batch size; the curves cross at 1,409", "B", "µs per token")

# %% [markdown]
# Up to some size the device is busy reading the weights, whoever they are for. Now run it: two slots, one link, forty batches of B tokens,
# each with an expert that must be loaded while the one before computes. Where does the device stop waiting?

# %%
sizes = (1, 29, 256, 1024, 1408, 1409, 2048)
piped = {n: state.pipeline(n) for n in sizes}
said = lambda share: f"{share:.1%}" if share > 1e-3 else "under 0.1%" if share else "none"
rows = [(n, said(stall / ns), f"{ns / 40 / n / 1000:,.1f}") for n, (ns, stall) in piped.items()]
views.table(["B", "device waits", "µs per token and expert"], rows,
            "Waiting ends at the B of the formula; time per token has fallen long before.")

# %% tags=["reveal"]
first = next(n for n, (_, stall) in piped.items() if not stall)
assert first == worthwhile(state.costs)
ratio = piped[1][0] / piped[29][0] * 29
lesson.reveal("threshold", first, per_token=f"{state.costs.expert(1) / MS:.2f}", ratio=f"{ratio:.0f}")

# %% [markdown]
# > **Erratum.** B · T_compute > T_load is the condition under which computing *hides* the next load. It is not the condition under which waiting
# > pays: two tokens that share a load already halve it. As a bound for serving it is far too high: no eight conversations ever fill it.
#
# At run time nobody knows T_compute(B); it is measured, and the threshold follows. Two readings of the same machine:

# %%
rows = []
for sizes, free in ((1, 2, 4, 8), 24 << 20), ((1, 16, 64, 128), 24 << 20), ((64, 128, 256), 4 << 20):
    limits = state.readings(sizes).limits(LATENCY, free, 8192, 48)
    rows.append((str(sizes), limits.threshold, limits.capacity))
views.table(["batches measured, tokens", "threshold", "capacity of each of 48 queues"], rows,
            "Small batches all take the same time: a flat line, and the threshold is “never” (4096).")

# %% [markdown]
# Capacity follows the free memory: 24 MiB in the first two lines, 4 MiB in the last; a row of Mixtral takes 8 KiB in f16.
#
# ## 4 · The listing · 6 min
#
# The article's `TokenBuffer`, its logic in our words; `now` is a parameter instead of a clock:

# %%
class AsListed:
    def __init__(self, n_expert, timeout):
        self.buffers, self.timeout = [[] for _ in range(n_expert)], timeout
        self.last = [0] * n_expert                        # when each was triggered last

    def check_timeout(self, now):
        for e, waiting in enumerate(self.buffers):
            if waiting and now - self.last[e] > self.timeout:
                self.buffers[e], self.last[e] = [], now
                return waiting                            # of the first one that is found

# %% [markdown]
# Timeout 20 ms, checked every millisecond. The queue was last emptied at 0. One token comes at 25 ms, a second one at 30 ms. How many
# tokens are in the first batch?

# %% tags=["predict"]
lesson.predict("listing")

# %%
def both(arrivals, timeout, until, n_expert):
    """arrivals: (ms, expert). Batches (ms, tokens) of the listing, and of ours."""
    listed, ours = AsListed(n_expert, timeout), TokenQueues(Limits(999, timeout), 1, 999)
    out = [], []
    for now in range(until):
        for i, (at, e) in enumerate(arrivals):
            if at == now:
                listed.buffers[e].append(i)
                ours.add(i, 0, [e], now)
        out[0].extend([(now, batch)] if (batch := listed.check_timeout(now)) else [])
        while batches := ours.next(now, idle=False):
            out[1].extend((now, [w.token for w in b.tokens]) for b in batches)
    return out

# %%
by_trigger, by_oldest = both([(25, 0), (30, 0)], 20, 60, 1)
rows = [(name, "; ".join(f"{at} ms: {len(batch)} tokens" for at, batch in found)) for name, found in
        (("as listed", by_trigger), ("from the oldest token", by_oldest))]
views.table(["timeout counts", "batches"], rows,
            "After a quiet time the listed timeout is over before anybody waits.")

# %% tags=["reveal"]
lesson.reveal("listing", len(by_trigger[0][1]), first=by_trigger[0][0], ours=by_oldest[0][0],
              both=len(by_oldest[0][1]))

# %% [markdown]
# And it returns the *first* expired queue. Eight experts, each gets a token every millisecond, timeout 3 ms. Which experts are served in
# 100 ms?

# %% tags=["predict"]
lesson.predict("starve")

# %%
arrivals = [(ms, e) for ms in range(100) for e in range(8)]
found, fair = both(arrivals, 3, 100, 8), []
for e in range(8):
    times = [[at for at, batch in some if batch[0] % 8 == e] for some in found]
    waits = [max((at - batch[0] // 8 for at, batch in some if batch[0] % 8 == e), default="for ever")
             for some in found]
    fair.append((e, len(times[0]), waits[0], len(times[1]), waits[1]))
views.table(["expert", "listed: batches", "longest wait, ms", "ours: batches", "longest wait, ms"], fair,
            "First found is first served: low numbers expire again before high ones are looked at.")

# %% tags=["reveal"]
never = sum(n == 0 for _, n, *_ in fair)
lesson.reveal("starve", never, bound=max(wait for *_, wait in fair))

# %% [markdown]
# > **Erratum.** Two faults in that method: the wait counts from the last trigger instead of from the oldest token, and one call returns one queue,
# > always the lowest. (A third: it does not say *whose* batch it returns.) Ours takes the oldest token first, and is asked until
# > nothing is due.
#
# ## 5 · Latency, throughput · 7 min
#
# The article has two classes of service. As presets: `LATENCY` lets nobody wait; `THROUGHPUT` waits for as long as anything else can be done,
# then merges up to four short queues. Eight requests: what does waiting for ever give in throughput?

# %% tags=["predict"]
lesson.predict("classes")

# %%
kinds = {"LATENCY": LATENCY, "wait 20 ms": Limits(32, 20 * MS), "wait 100 ms": Limits(32, 100 * MS),
         "for ever": Limits(32, FOREVER), "THROUGHPUT": THROUGHPUT}
rows = []
for n in (8, 32):
    for name, limits in kinds.items():
        r = state.served(limits, n)
        rows.append((n, name, f"{r.throughput:.2f}", f"{r.latency():.0f}", f"{r.latency(0.95):.0f}",
                     f"{r.batch:.1f}", f"{r.loads_per_token:.1f}"))
heads = ["requests", "limits", "tokens/s", "ms median", "ms, 95%", "tokens per batch", "loads per token"]
views.table(heads, rows, "Mixtral-8x7B, RTX 3090, PCIe 4. Waiting gains 5% or loses 27%; "
            "the median may fall while the slowest twentieth pays.")

# %% tags=["reveal"]
a, b = (state.served(limits, 8) for limits in (LATENCY, THROUGHPUT))
many = [state.served(limits, 32).throughput for limits in (LATENCY, Limits(32, FOREVER))]
change, tail = b.throughput / a.throughput - 1, b.latency(0.95) / a.latency(0.95)
said = "slower" if change < -0.02 else "same" if change < 0.02 else "faster"
lesson.reveal("classes", said, share=f"{change:.0%}", tail=f"{tail:.1f}",
              many=f"{many[1] / many[0] - 1:.0%}", batches=f"{a.batch:.1f} to {b.batch:.1f}")

# %%
n_of = [1, 2, 4, 8, 16, 32]
of = {"nobody waits": LATENCY, "for ever": Limits(32, FOREVER), "THROUGHPUT": THROUGHPUT}
curves = {name: (n_of, [state.served(limits, n).throughput for n in n_of]) for name, limits in of.items()}
last = ", ".join(f"{name} {y[-1]:.1f}" for name, (_, y) in curves.items())
views.line_picture({"Mixtral-8x7B, RTX 3090, PCIe 4": curves},
                   "With 4 to 8 requests waiting for ever gains a little; with 32 it costs a quarter.",
                   f"Tokens per second over requests; at 32: {last}", "requests", "tokens/s", n_of)

# %% [markdown]
# Why? While nobody waits, the oldest token goes first and all requests move through the layers in step: they meet at the same experts. Who
# serves "what is there" first lets some run ahead; soon they stand in different layers and meet nobody. Turn the knobs; each move
# serves all requests again.

# %%
requests, waits = [1, 2, 4, 8, 16], [0, 5, 20, 100, None]
thresholds, kept = [None, 1, 2, 4], {}
facts = ["tokens/s", "ms median", "ms, 95%", "tokens per batch", "loads per token", "batches"]

def what_if(n, w, t, merge, slots):
    limits = Limits(32, FOREVER if waits[w] is None else waits[w] * MS, thresholds[t], merge)
    r = state.serve(limits, requests[n], 3, 8 * slots)
    now = [f"{r.throughput:.2f}", f"{r.latency():.0f}", f"{r.latency(0.95):.0f}", f"{r.batch:.1f}",
           f"{r.loads_per_token:.1f}", causes(r)]
    kept["A"], kept["B"] = kept.get("B", now), now
    return views.table(["", "A: last run", "B: this run"], list(zip(facts, kept["A"], kept["B"])),
                       "Mixtral-8x7B, RTX 3090, PCIe 4: company raises throughput, waiting hardly does.")

# %%
names = [[str(n) for n in requests], ["for ever" if w is None else f"{w} ms" for w in waits],
         ["by the formula" if t is None else str(t) for t in thresholds]]
knobs = [["requests", 0, 4, names[0]], ["wait at most", 0, 4, names[1]], ["threshold", 0, 3, names[2]],
         ["queues merged", 1, 4, []], ["slots", 2, 6, [str(8 * n) for n in range(2, 7)]]]
widgets.Knobs(knobs=knobs, values=[3, 0, 0, 1, 3]).drive(what_if)

# %% [markdown]
# How long can a token wait at worst? The limit, and then each other queue may be older: one load and one batch for each of n · k queues, and
# an attention between. That bound against what was measured, eight requests:

# %%
rows, n, c = [], 8, state.costs
for ms in (0, 5, 20, 100):
    r = state.served(Limits(32, ms * MS), n)
    bound = ms * MS + n * 2 * (c.load + c.expert(n)) + c.attention(n) + c.ids(n)
    assert r.longest_wait <= bound
    rows.append((f"{ms} ms", r.longest_wait / MS, bound / MS))
views.side_by_side(rows, ("longest wait, ms", "bound, ms"), "A rare expert is late, never forgotten.")

# %% [markdown]
# ## 6 · Real sequences · 6 min
#
# All that was virtual time. Now eight real prompts decode side by side in the tiny Mixtral, half of its experts in slots: attention for
# whoever is ready, then one graph for each queue that is served. Rows are computed in other company than in one graph for all.

# %%
found = {name: state.decoded(limits) for name, limits in
         (("LATENCY", LATENCY), ("wait 6 actions", Limits(8, 6, 2)), ("THROUGHPUT", THROUGHPUT))}
assert all(s.apart <= 1e-4 and s.alike == s.of for s in found.values())
rows = [(name, s.batches, f"{s.mean:.2f}", s.loads, "yes" if s.apart <= 1e-4 else "no",
         f"{s.alike} of {s.of}") for name, s in found.items()]
heads = ["limits", "expert graphs", "tokens in each", "loads", "logits within 1e-4", "same next token"]
views.table(heads, rows, "Three ways through the queues, one result; more waiting, smaller batches.")

# %% [markdown]
# The tolerance is a share of the largest logit. A product of two rows may add up in another order than one of eight; nothing else differs.
#
# The article lets *predicted* experts' queues have resources first. So each token announces its experts of the next layer: of two equal
# queues the announced one is served first, and an idle link brings its expert. Mixtral-8x7B again, eight requests, nobody waits on
# purpose: what do announcements gain that are always **right**?

# %% tags=["predict"]
lesson.predict("announced")

# %%
cases, rows = [("none", True), ("gate", False), ("gate", True), ("true", True)], []
ever = Limits(32, FOREVER)
for n, name, limits in ((8, "LATENCY", LATENCY), (8, "for ever", ever), (32, "LATENCY", LATENCY)):
    for who, fetch in cases:
        r = state.announced(limits, n, who, fetch)
        rows.append((n, name, who + ("" if fetch else ", order only"), f"{r.throughput:.2f}",
                     f"{r.latency():.0f}", f"{r.wait:.0f}", f"{r.loads_per_token:.1f}",
                     r.prefetches))
heads = ["requests", "limits", "announced by", "tokens/s", "ms median", "wait in a queue, ms",
         "loads per token", "loaded ahead"]
views.table(heads, rows, "Mixtral-8x7B, RTX 3090, PCIe 4. Here announcements do not pay: "
            "the link has no time for them.")

# %% tags=["reveal"]
a, b = (state.announced(LATENCY, 8, who).throughput for who in ("none", "true"))
least = state.announced(ever, 8, "true").throughput / state.announced(ever, 8, "none").throughput
gain = b / a - 1
said = "much" if gain > 0.1 else "little" if abs(gain) < 0.02 else "loses"
lesson.reveal("announced", said, gain=f"{gain:.1%}", least=f"{1 - least:.0%}",
              ahead=state.announced(LATENCY, 8, "true").prefetches)

# %% [markdown]
# The eight real sequences through the engine, on a card whose link is idle most of the time, since the experts are tiny:

# %%
rows = []
for name, limits in (("LATENCY", LATENCY), ("THROUGHPUT", THROUGHPUT)):
    for who in ("none", "gate", "true"):
        r = state.decoded(limits, who)
        assert r.apart <= 1e-4 and r.alike == r.of
        rows.append((name, who, r.loads, r.ahead, f"{r.mean:.2f}", f"{r.ms:.1f}"))
heads = ["limits", "announced by", "loads waited for", "ahead", "tokens in each", "ms of a step"]
views.table(heads, rows, "Tiny Mixtral, simulated card. A sixth less time where nobody waits; "
            "with merging, only forecasts that are right help.")

# %% [markdown]
# One sequence is withdrawn in the middle of a step, while its token stands in queues:

# %%
w = state.withdrawn(seq=3, graph=25)
assert w.apart <= 1e-4 and w.places == 0
views.table(["", "before the step", "after it"], [
    ("cells of the KV cache in use", *w.cells), ("tokens of sequence 3", *w.past[3]),
    ("tokens of sequence 4", *w.past[4]), ("places in queues", 0, w.places),
    ("logits of the other seven within 1e-4", "", "yes" if w.apart <= 1e-4 else "no")],
    "Seven go on, and the eighth is as before the step; its cell is free again.")

# %% [markdown]
# ## 7 · Regrouping two batches · 7 min
#
# The paper waits for nothing: it takes two batches whose routes are *predicted*, and deals their tokens anew into two equal halves, so that
# tokens with the same experts are together. How many different experts does that save on our recorded routes, batches of 8?

# %% tags=["predict"]
lesson.predict("regroup")

# %%
def row(name, cut, by):
    found = [state.needed(name, cut, size, by) for size in (4, 8, 16, 32)]
    changed = [round(-1000 * n.saved) / 10 for n in found]
    return name, cut, by, *(f"{n.before:.2f} → {n.after:.2f}, {c:+.1f}%"
                            for n, c in zip(found, changed))


rows = [row(name, cut, by) for name in ("tiny-mixtral", "tiny-deepseek")
        for cut in ("text", "requests") for by in ("true", "gate", "network")]
rows += [row("switch-base-8", "text", "true")]
rows += [("Switch, another program", "text", "true", "-10.5%", "-10.6%", "-17.4%", "-18.5%")]
views.table(["routes", "batches cut from", "regrouped by", "T = 4", "8", "16", "32"], rows,
            "Experts per layer and batch. With 2 of 8 little is saved; in a text "
            "forecasts save about half of it, among requests less or nothing.")

# %% tags=["reveal"]
saved = state.needed("tiny-mixtral", "text", 8).saved
said = "tenth" if 0.03 < saved < 0.2 else "none" if saved <= 0.03 else "half"
large = state.needed("tiny-mixtral", "requests", 32).saved
lesson.reveal("regroup", said, ours=f"{saved:.0%}", large=f"{large:.1%}",
              told=f"{state.needed('tiny-mixtral', 'text', 8, 'network').saved:.0%}")

# %% [markdown]
# *Gate* looks one layer ahead, too late to choose batches for all layers; *network* reads the tokens before the first layer, as the
# paper's predictor. Both are judged on texts that nothing was fitted on.
#
# The paper prints for it 1.03x with 32 experts, 1.15x with 64 and 1.17x with 128, in tokens per second: of the same kind, with k = 1. And
# the result? Eight real sequences, one token each, in two batches of four, half of the experts in slots: as they came, and regrouped. Each
# keeps its own cells of the KV cache, so order within a sequence is untouched.

# %%
found = {by: state.regrouped(by) for by in ("", "true", "gate", "network")}
assert all(r.apart <= 1e-4 and r.alike == r.of for r in found.values())
rows = [(by or "as they came", *map(str, r.batches), r.distinct, r.loads,
         "yes" if r.apart <= 1e-4 else "no", f"{r.alike} of {r.of}") for by, r in found.items()]
heads = ["regrouped by", "first", "second", "experts", "loads", "within 1e-4", "same next token"]
views.table(heads, rows, "Fewer experts for the same tokens, and the same logits within rounding.")

# %% [markdown]
# ## 8 · Your turn · 6 min
#
# **Tier 1.** The batch that hides a load.

# %% tags=["exercise", "tier-1"]
def hides(load, times):
    """load: ns; times: batch size -> ns of the whole batch. The smallest that hides the load, or 0."""
    raise NotImplementedError

# %% tags=["solution"]
def hides(load, times):
    """load: ns; times: batch size -> ns of the whole batch. The smallest that hides the load, or 0."""
    return min((n for n, ns in times.items() if ns > load), default=0)

# %% tags=["wrong"]
def hides(load, times):
    return min((n for n, ns in times.items() if n * ns > load), default=0)

# %% tags=["wrong"]
def hides(load, times):
    return int(load / times[1]) + 1

# %% tags=["check"]
from workbench.expertflow.costs import costs
cards = [("rtx3090-pcie4", "f16"), ("rtx3090-pcie4", "q4_0"), ("a100", "q4_0")]
all_of = [costs("Mixtral-8x7B", card, kind) for card, kind in cards]
on = [(c.load, {n: c.expert(n) for n in range(1, 2000)}) for c in all_of]
lesson.check("hides", hides, [worthwhile(c) for c in all_of], on, [", ".join(card) for card in cards])

# %% [markdown]
# **Tier 2.** Who is complete, and when?

# %% tags=["exercise", "tier-2"]
def joined(k, batches):
    """batches: the tokens of each expert batch. The tokens in the order of their k-th results."""
    raise NotImplementedError

# %% tags=["solution"]
def joined(k, batches):
    """batches: the tokens of each expert batch. The tokens in the order of their k-th results."""
    have, out = {}, []
    for batch in batches:
        for token in batch:
            have[token] = have.get(token, 0) + 1
            if have[token] == k:
                out.append(token)
    return out

# %% tags=["wrong"]
def joined(k, batches):
    return list(dict.fromkeys(token for batch in batches for token in batch))

# %% tags=["wrong"]
def joined(k, batches):
    every = [token for batch in batches for token in batch]
    return sorted(set(t for t in every if every.count(t) == k))

# %% tags=["check"]
on, expected = [], []
two, three = [[0, 2], [0], [3], [1, 3], [2, 4], [1]], [[5, 1], [1, 5], [2], [1], [5, 2], [2]]
for k, batches in ((2, two), (3, three)):
    q = TokenQueues(Limits(), k, 1)
    for token in sorted({t for batch in batches for t in batch}):
        q.add(token, 0, range(k), 0)
    on.append((k, batches))
    expected.append([token for batch in batches for token in q.done(batch)])
lesson.check("joined", joined, expected, on, ["k = 2", "k = 3"])

# %% [markdown]
# **Tier 3.** What the listing should have done: everything that is due, in a fair order.

# %% tags=["exercise", "tier-3"]
def due(queues, max_wait, now):
    """queues: expert -> arrival times, ascending. The experts to serve now, in order."""
    raise NotImplementedError

# %% tags=["solution"]
def due(queues, max_wait, now):
    """queues: expert -> arrival times, ascending. The experts to serve now, in order."""
    late = [e for e, times in queues.items() if times and now - times[0] >= max_wait]
    return sorted(late, key=lambda e: queues[e][0])

# %% tags=["wrong"]
def due(queues, max_wait, now):
    return sorted(e for e, times in queues.items() if times and now - times[0] >= max_wait)

# %% tags=["wrong"]
def due(queues, max_wait, now):
    late = [e for e, times in queues.items() if times and now - times[-1] >= max_wait]
    return sorted(late, key=lambda e: queues[e][-1])

# %% tags=["check"]
def ours(queues, max_wait, now):
    q, out = TokenQueues(Limits(99, max_wait), 1, 99), []
    for token, (at, e) in enumerate((at, e) for e, times in queues.items() for at in times):
        q.add(token, 0, [e], at)
    while batches := q.next(now, idle=False):
        out += [b.expert for b in batches]
    return out

on = [({0: [8, 9], 3: [2], 5: [4, 19]}, 10, 20), ({1: [12], 2: [3, 5], 4: [], 6: [1]}, 8, 12),
      ({0: [6], 1: [4], 2: [5]}, 10, 16)]
names = ["three queues", "an empty one", "all are due"]
lesson.check("due", due, [ours(*case) for case in on], on, names)

# %% [markdown]
# ## 9 · Names · 1 min
#
# | here | elsewhere | left out |
# |---|---|---|
# | `TokenQueues`, `Limits` | `TokenBuffer` in the article; continuous batching in servers is over requests, not experts | priorities of users |
# | `LATENCY`, `THROUGHPUT` | the article's two classes | |
# | `worthwhile`, `Readings` | batch threshold, adapted at run time | times of several queues at once |
# | `Announced` | predicted experts first, in the article | taking a transfer back |
# | `SegmentServer`: `adapt`, `cancel` | - ; llama.cpp computes a whole graph for all sequences | models with sliding windows |
# | `regroup` | Token Scheduler of the paper | its overlap with the batch before |
#
# **Next**: queues take memory, too. Lesson 24 asks who gives way when it runs out.
