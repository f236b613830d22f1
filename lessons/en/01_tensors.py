# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 01 · Tensors
#
# **45 minutes** · before it: 00, start here · after it: 02, context and arena
#
# Lesson 00 ran a model made of 63 weights and 318 nodes. All of them are *tensors*. Here the word is opened: a tensor is a short
# description of bytes that lie somewhere else. Afterwards you can read the four numbers `ne` and the four numbers `nb`, find any
# element's address by hand, say what turning a matrix around costs, and what 32 numbers take in `q4_0`.
#
# You need NumPy; you need no ggml. Sections can be run in any order; each needs only the cell below.

# %% tags=["setup"]
import numpy as np

import workbench as wb
from workbench import lessons, ops, views, widgets

lesson = lessons.open_lesson("01")
state = lesson.state
ctx = wb.Context(name="lesson 01")    # where our tensors live; lesson 02 is about it

# %% [markdown]
# ## 1 · A description, not numbers · 5 min
#
# Take one weight of lesson 00's model, from its f16 file: the gate matrices of all eight experts of layer 2, in one tensor.

# %%
w = state.files["f16"].weight("ffn_gate_exps", 2)
facts = [("name", w.name, "for people"), ("dtype", w.dtype, "how a number is stored"),
         ("ne", w.ne, "how many elements along each dimension"),
         ("nb", w.nb, "how many bytes from one element to the next, along each dimension"),
         ("op", w.op, "what computes it: nothing, it is a leaf"),
         ("src", len(w.src), "from how many tensors"),
         ("view_src", w.view_src, "whose bytes it borrows: nobody's"),
         ("storage, offset", f"{w.storage.name} + {w.offset:,}", "where its bytes lie: in the file")]
views.table(["field", "value", "meaning"], facts, "The whole tensor. Nowhere in it is a weight.")

# %% [markdown]
# **Find the fault.** A widely read article on ggml lists these fields of `ggml_tensor`: type, op, n_dims, ne, nb, src, grad, data,
# name. Not all of them exist any more.

# %% tags=["predict"]
lesson.predict("fields")

# %%
w = state.files["f16"].weight("ffn_gate_exps", 2)
ours = {"type": "dtype", "data": "_storage"}    # where our name differs from ggml's
listed = ["type", "op", "n_dims", "ne", "nb", "src", "grad", "data", "name"]
names = [ours.get(field, field) for field in listed]
rows = [(field, name in type(w).__slots__, hasattr(w, name)) for field, name in zip(listed, names)]
gone = [field for field, is_field, _ in rows if not is_field]
views.table(["listed", "is a field", "can be asked for"], rows,
            f"n_dims is worked out from ne when asked: here {w.n_dims}. grad is gone altogether.")

# %% tags=["reveal"]
lesson.reveal("fields", " and ".join(gone), n_dims=w.n_dims, ne=str(w.ne))

# %% [markdown]
# ## 2 · `ne` is not NumPy's shape · 5 min
#
# `ne` counts elements along each dimension, always four. Here is a NumPy array of two pages, three lines, four letters.

# %% tags=["predict"]
lesson.predict("shape")

# %%
x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
t = ctx.from_numpy(x, name="book")
rows = [("NumPy", x.shape, x.strides, "the last index runs fastest"),
        ("ggml", t.ne, t.nb, "the first index runs fastest")]
views.table(["", "elements", "bytes between neighbours", "order"], rows,
            "The same 24 numbers in the same memory: only the order of counting is reversed.")

# %% tags=["reveal"]
t = ctx.from_numpy(np.zeros((2, 3, 4), np.float32))
lesson.reveal("shape", str(t.ne), shape=str(t.shape))

# %% [markdown]
# So `ne[0]` is the length of a row, and what NumPy calls `x[page, line, letter]` is element (letter, line, page). Wherever the
# package talks to NumPy, it reverses for you: `t.shape`, `t.numpy()` and `t[…]` use NumPy's order.

# %%
t = ctx.from_numpy(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
assert t.shape == t.ne[:t.n_dims][::-1] and t.array().strides == t.nb[::-1]    # true of every tensor
print("t.shape =", t.shape, "  t.ne =", t.ne, "  t[1, 2].numpy() =", t[1, 2].numpy().tolist())

# %% [markdown]
# ## 3 · `nb`: from an index to an address · 9 min
#
# `nb[d]` says how many *bytes* lie between neighbours along dimension `d`. So the element (i0, i1, i2, i3) lies at
#
# > address = offset + i0·nb[0] + i1·nb[1] + i2·nb[2] + i3·nb[3]
#
# That line is the whole secret of views. **Find the fault.** The same article says: an F32 matrix with ne[0] = 4, ne[1] = 8 has
# nb[0] = 4 and nb[1] = 32.

# %% tags=["predict"]
lesson.predict("nb1")

# %%
rows = []
for ne in ((4, 8), (8, 4)):
    t = ctx.new_tensor("f32", *ne)
    rows.append((f"[{ne[0]}, {ne[1]}]", t.nb[0], t.nb[1], f"{ne[0]} numbers × 4 bytes", t.nbytes))
views.table(["ne", "nb[0]", "nb[1]", "a row is", "bytes in all"], rows,
            "nb[1] = 32 belongs to rows of eight: the article took the number of rows for their length.")

# %% tags=["reveal"]
t = ctx.new_tensor("f32", 4, 8)
lesson.reveal("nb1", t.nb[1], row=t.ne[0])

# %% [markdown]
# Now walk. Below, `grid` is three rows of four; the walk goes over its columns 1 to 3, turned on their side by `.T`. Each cell is four
# bytes of memory with the number that lies there; the small numbers are the index (i0, i1) that leads to it. Click into the row of
# buttons, then → ← Home End; *n* and *p* jump to where i0 falls back. Before each of these jumps, say the next address aloud.

# %%
grid = ctx.from_numpy(10 * np.arange(12, dtype=np.float32).reshape(3, 4), name="grid")
view = grid[:, 1:4].T
trace = views.address_steps(view)
assert [s["marks"][0][0] * 4 for s in trace["steps"]] == [    # the walk, by the formula
    view.view_offs + i0 * view.nb[0] + i1 * view.nb[1] for i1 in range(3) for i0 in range(3)]
widgets.Stepper(
    trace, "A row of the view (one colour) is a column of memory: a step along i0 is 16 bytes, not 4.")

# %% [markdown]
# ## 4 · Views · 9 min
#
# That walk went over a transposed slice. Turn a large matrix in the same way: how much memory does it cost?

# %% tags=["predict"]
lesson.predict("transpose")

# %%
big = ctx.new_tensor("f32", 512, 512, name="big")
before = ctx.used_mem
turned = ops.transpose(big)
grown = ctx.used_mem - before
rows = [(t.name, t.ne[:2], t.nb[:2], t.offset, t.storage is big.storage) for t in (big, turned)]
views.table(["tensor", "ne", "nb", "offset", "same storage"], rows,
            f"Two pairs of numbers were exchanged. The arena grew by {grown} bytes: one description.")

# %% tags=["reveal"]
big = ctx.new_tensor("f32", 512, 512)
before = ctx.used_mem
turned = big.T
moved = wb.OPS["TRANSPOSE"].moved(turned)
lesson.reveal("transpose", ctx.used_mem - before, moved=moved, matrix=big.nbytes)

# %% [markdown]
# So a *view* is the same bytes with another description. It is not a copy, and writing through it shows in the owner. Graphs use that to
# fill a KV cache, attention's memory of earlier tokens: the node that stores new rows is itself a view of the cache.

# %%
grid = ctx.from_numpy(np.zeros((3, 4), np.float32), name="grid")
corner = grid[1:3, 2:4]
corner.set([[1, 2], [3, 4]])
assert np.shares_memory(corner.numpy(), grid.numpy())
print(corner)
print(grid.numpy().astype(int))

# %% [markdown]
# Move the slider: each position makes the view anew from the same 24 numbers. The colours follow i1, the small numbers are the
# index. Which of them could you read without jumping?

# %%
cube = ctx.from_numpy(np.arange(24, dtype=np.float32).reshape(2, 3, 4), name="cube")
make = {"cube": lambda: cube, "transpose": lambda: cube.T,
        "permute(0, 2, 1, 3)": lambda: ops.permute(cube, 0, 2, 1, 3),
        "rows [:, 1:]": lambda: cube[:, 1:], "columns [:, :, 1:3]": lambda: cube[:, :, 1:3],
        "every other [:, :, ::2]": lambda: cube[:, :, ::2], "reshape(12, 2)": lambda: cube.reshape(12, 2)}
names, kept = list(make), {}

# %% [markdown]
# What the slider shows is a function like any other: it makes the view, describes it, and keeps the last run as A.

# %%
def what_if(i):
    now = (names[i], make[names[i]]())
    last, kept["last"] = kept.get("last", now), now
    rows = [(run, name, t.ne[:3], t.nb[:3], t.is_contiguous, t.offset - cube.offset)
            for run, (name, t) in (("A", last), ("B", now))]
    assert all(t.storage is cube.storage for _, t in (last, now))       # nobody copied anything
    facts = views.table(["", "view", "ne", "nb", "contiguous", "offset"], rows, "The run before is A.")
    seen = views.MemoryMap(views.address_steps(now[1]), f"B: {names[i]}. Plain cells are not in it.")
    return views.Stack(facts, seen)

_ = what_if(0)
widgets.Range(value=1, max=len(names) - 1, label="view of the cube", names=names).drive(what_if)

# %% [markdown]
# A tensor is *contiguous* when a walk over it reads its bytes from first to last without a gap or a jump.

# %% tags=["predict"]
lesson.predict("contiguous")

# %% tags=["reveal"]
grid = ctx.from_numpy(np.zeros((6, 8), np.float32))
views_of = {"rows": grid[2:4], "columns": grid[:, 2:4], "transposed": grid.T, "half": grid[::2]}
contiguous = [name for name, t in views_of.items() if t.is_contiguous]
lesson.reveal("contiguous", " and ".join(contiguous), nb=str(grid[2:4].nb))

# %% [markdown]
# Some operations insist on contiguity, and say so. `ops.cont` then makes the copy that the transpose did not make. It is a *node*:
# nothing is copied until a graph with it is computed.

# %%
grid = ctx.from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4), name="grid")
try:
    grid.T.reshape(12)
except wb.errors.ShapeError as error:
    print(error, "\n")
copy = ops.cont(grid.T)
wb.compute(wb.build(copy))
print("nb", grid.T.nb[:2], "->", copy.nb[:2], "  first row:", copy.numpy()[0].tolist())

# %% [markdown]
# ## 5 · Blocks: less than a byte for a number · 9 min
#
# Eight experts of real size do not fit in f32. Quantised types let 32 neighbours share a scale. In `q4_0` each number keeps four
# bits of its own.

# %% tags=["predict"]
lesson.predict("q4")

# %%
kinds = [wb.dtype(name) for name in ("f32", "f16", "q8_0", "q4_0", "q4_K")]
rows = [(t.name, t.block, t.block_bytes, t.bits) for t in kinds]
views.table(["type", "numbers per block", "bytes per block", "bits per number"], rows,
            "Bits per number = 8 × bytes / numbers: the scale is paid by everyone in the block.")

# %% tags=["reveal"]
q4_0 = wb.dtype("q4_0")
lesson.reveal("q4", q4_0.row_bytes(32), bits=q4_0.bits)

# %%
blocks = {
    "q8_0": [("d: scale, f16", 2), ("32 codes, int8", 32)],
    "q4_0": [("d: scale, f16", 2),
             ("32 codes of 4 bits: number i in the lower half of byte i, i + 16 in the upper", 16)]}
assert all(sum(n for _, n in parts) == wb.dtype(name).block_bytes for name, parts in blocks.items())
views.byte_map(
    blocks, "32 numbers each. q8_0: x = d · code. q4_0: x = d · (code − 8): four bits hold 0 to 15.")

# %% [markdown]
# Decode one by hand: the first block of an attention weight, as it lies in the model's file. `raw_rows()` gives the stored bytes,
# `numpy()` what the library makes of them. Note nb[0]: in a quantised tensor it is the size of a *block*. A single number in there
# has no address of its own.

# %%
w = state.files["q8_0"].weight("attn_q", 2)
block = w.raw_rows()[0, 0, 0, :w.nb[0]]      # the first nb[0] = 34 bytes of the first row
d = block[:2].view("<f2").astype(np.float32)   # two bytes, read as one f16
codes = block[2:].view(np.int8)
by_hand = d * codes
library = w.numpy()[0, :32]
assert (by_hand == library).all()            # equal to the last bit
rows = [(i, int(codes[i]), float(by_hand[i]), float(library[i])) for i in (0, 1, 2, 31)]
views.table(["number", "code", "by hand", "library"], rows,
            f"d = {d[0]:.6f}. 34 bytes became 32 numbers.")

# %% [markdown]
# The *K* types put two storeys of scales into blocks of 256. A `q4_K` block has eight groups of 32; each has a scale and a minimum of
# six bits, and these are themselves multiples of d and dmin. Below are a block of invented bytes and its first two groups by hand. (The
# scales of groups 4 to 7 are scattered: four bits in the last third of the twelve bytes, two in the upper ends of the others.)

# %%
parts = [("d, f16", 2), ("dmin, f16", 2),
         ("8 scales and 8 minima, 6 bits each", 12), ("256 codes of 4 bits", 128)]
assert sum(n for _, n in parts) == wb.dtype("q4_K").block_bytes
views.byte_map(
    {"q4_K": parts}, "144 bytes for 256 numbers: 4.5 bits each, like q4_0. "
    "But x = d · scale · code − dmin · min follows the numbers more closely.")

# %%
block = np.random.default_rng(1).integers(0, 256, 144, np.uint8)
block[:4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
d, dmin = block[:4].view("<f2").astype(np.float32)
scale, least = block[4:8] & 63, block[8:12] & 63            # the lower six bits: groups 0 to 3
low, high = block[16:48] & 15, block[16:48] >> 4            # 32 bytes hold groups 0 and 1
by_hand = [d * scale[0] * low - dmin * least[0], d * scale[1] * high - dmin * least[1]]

t = ctx.new_tensor("q4_K", 256)
t.raw_rows()[...] = block
assert np.allclose(by_hand, t.numpy()[:64].reshape(2, 32), atol=1e-6)
print("group 1, by hand:", [f"{x:.3f}" for x in by_hand[1][:4]])
print("group 1, library:", [f"{x:.3f}" for x in t.numpy()[32:36]])

# %% [markdown]
# What does the saving cost in truth? Store one row of a real weight in several types, and read it back. And a row that is no whole
# number of blocks is refused.

# %%
row, rows, worst = state.files["f16"].weight("attn_q", 2).numpy()[0].astype(np.float32), [], {}
for name in ("f32", "f16", "q8_0", "q5_0", "q4_0"):
    t = ctx.from_numpy(row, name)
    worst[name] = np.abs(t.numpy() - row).max() / np.abs(row).max()
    rows.append((name, t.nbytes, t.dtype.bits, f"{worst[name]:.2%}"))
try:
    ctx.new_tensor("q4_0", 100)
except wb.errors.ShapeError as error:
    print(error)
views.table(["type", "bytes", "bits per number", "worst error / largest number"], rows,
            "128 numbers of layer 2's query matrix. From q8_0 to q4_0: "
            f"about half the bits, and {worst['q4_0'] / worst['q8_0']:.0f} times the worst error.")

# %% [markdown]
# Now numbers meet. Bytes follow from the shapes alone, so whole files can be predicted, also one that is not here: Llama 3.1 8B in Q8_0,
# for which llama.cpp's documentation prints 8.5008 bits per weight and 7.95 GiB.

# %%
rows = []
for name, model in state.files.items():
    formula = sum(t.n_rows * (t.ne[0] // t.dtype.block) * t.dtype.block_bytes
                  for t in model.weights.values())
    rows.append((f"tiny-mixtral {name}, bytes: formula, counted", formula, model.nbytes))
matrices, norms = 8_030_261_248 - 65 * 4096, 65 * 4096         # norms stay in f32
size = matrices * 34 // 32 + norms * 4
bits = 8 * size / (matrices + norms)
rows += [("Llama 3.1 8B Q8_0, bits per weight: formula, published", bits, 8.5008),
         ("Llama 3.1 8B Q8_0, GiB: formula, published", size / 2**30, 7.95)]
assert all(abs(a / b - 1) < 1e-3 for _, a, b in rows)
views.side_by_side(rows, ("formula", "found"),
                   f"Rows × blocks per row × bytes per block, summed: {bits:.4f} bits by formula.")

# %% [markdown]
# ## 6 · Your turn · 6 min
#
# **Tier 1.** How many bytes does a packed tensor take? `block` numbers share `block_bytes` bytes, and `ne` has four entries.

# %% tags=["exercise", "tier-1"]
def packed_bytes(ne, block, block_bytes):
    """Bytes of a tensor without gaps."""
    raise NotImplementedError

# %% tags=["solution"]
def packed_bytes(ne, block, block_bytes):
    """Bytes of a tensor without gaps."""
    return ne[0] // block * block_bytes * ne[1] * ne[2] * ne[3]

# %% tags=["wrong"]
def packed_bytes(ne, block, block_bytes):
    return ne[0] * ne[1] * ne[2] * ne[3] * block_bytes

# %% tags=["wrong"]
def packed_bytes(ne, block, block_bytes):
    return ne[0] * ne[1] * ne[2] * ne[3] // 2

# %% tags=["check"]
on, expected, steps = [], [], []
for kind, ne in (("f32", (4, 8)), ("f16", (128, 160, 8)),
                 ("q4_0", (128, 160, 8)), ("q4_K", (256, 2, 3, 2))):
    t = ctx.new_tensor(kind, *ne)
    on.append((t.ne, t.dtype.block, t.dtype.block_bytes))
    expected.append(t.nbytes)
    steps.append(f"{kind}, ne = {t.ne}")
lesson.check("packed-bytes", packed_bytes, expected, on, steps)

# %% [markdown]
# **Tier 2.** `ops.permute(t, *axes)` says where each axis *goes*: axis `i` becomes axis `axes[i]`. Write down the new `ne` and `nb`.

# %% tags=["exercise", "tier-2"]
def permuted(ne, nb, axes):
    """(ne, nb) of ops.permute(t, *axes), each a list of four."""
    raise NotImplementedError

# %% tags=["solution"]
def permuted(ne, nb, axes):
    """(ne, nb) of ops.permute(t, *axes), each a list of four."""
    new_ne, new_nb = [0] * 4, [0] * 4
    for i, target in enumerate(axes):
        new_ne[target], new_nb[target] = ne[i], nb[i]
    return new_ne, new_nb

# %% tags=["wrong"]
def permuted(ne, nb, axes):
    return [ne[a] for a in axes], [nb[a] for a in axes]

# %% tags=["check"]
t = ctx.new_tensor("f16", 64, 5, 7, 2)
on = [(t.ne, t.nb, axes) for axes in ((1, 0, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3), (3, 0, 1, 2))]
made = [ops.permute(t, *axes) for *_, axes in on]
steps = [f"permute{axes} of ne {t.ne}, nb {t.nb}" for *_, axes in on]
lesson.check("permuted", permuted, [(p.ne, p.nb) for p in made], on, steps)

# %% [markdown]
# **Tier 3.** Decode a real `q4_0` block: 18 bytes in, 32 numbers out. The picture in section 5 says where everything is.

# %% tags=["exercise", "tier-3"]
def decode_q4_0(block):
    """block: 18 bytes (uint8). Returns 32 numbers (float32)."""
    raise NotImplementedError

# %% tags=["solution"]
def decode_q4_0(block):
    """block: 18 bytes (uint8). Returns 32 numbers (float32)."""
    d = block[:2].view("<f2").astype(np.float32)
    codes = np.concatenate([block[2:] & 15, block[2:] >> 4]).astype(np.int8)
    return d * (codes - 8)

# %% tags=["wrong"]
def decode_q4_0(block):
    d = block[:2].view("<f2").astype(np.float32)
    codes = np.stack([block[2:] & 15, block[2:] >> 4], axis=1).reshape(32).astype(np.int8)
    return d * (codes - 8)

# %% tags=["wrong"]
def decode_q4_0(block):
    d = block[:2].view("<f2").astype(np.float32)
    codes = np.concatenate([block[2:] & 15, block[2:] >> 4]).astype(np.int8)
    return d * codes

# %% tags=["check"]
w = state.files["q4_0"].weight("ffn_gate_exps", 2)
blocks = [w.raw_rows()[0, 0, r, 18 * b:18 * b + 18].copy() for r in range(3) for b in range(4)]
expected = w.numpy()[0, :3].reshape(-1, 32)
steps = [f"block {i}" for i in range(12)]
lesson.check("decode", decode_q4_0, expected, [(b,) for b in blocks], steps)

# %% [markdown]
# ## 7 · What is what, and what comes next · 2 min
#
# | here | in ggml | left out here |
# |---|---|---|
# | `Tensor` | `ggml_tensor` | `extra`, a back end's private pointer; `op_params` is a dictionary, `params` |
# | `ne`, `nb`, `n_dims`, `nbytes` | `ne`, `nb`, `ggml_n_dims`, `ggml_nbytes` | nothing |
# | `t.shape`, `t.numpy()`, `t[…]` | none: NumPy's order, for people | negative steps |
# | `storage` + `offset` | `buffer`, `data` | nothing; a bare address would be of no use in Python |
# | `view_src`, `view_offs` | the same | nothing |
# | `DType.block`, `.block_bytes` | `blck_size`, `type_size` | encoding of the K and IQ types: use `llama-quantize` |
# | `ops.transpose`, `permute`, `reshape`, `t[…]` | `ggml_transpose`, `ggml_permute`, `ggml_reshape_*`, `ggml_view_*` | nothing |
# | `ops.cont` | `ggml_cont` | nothing |
#
# **Next, 02:** that arena which grew by 368 bytes for a transpose. What it holds, how large it must be, and what happens to a tensor
# whose arena is gone.
